"""The trace: who visited the server when, and how stale each message was."""

import dataclasses
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base import hooks
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.policy import Policy, asynchronous
from asyncsim.traces import gossip, shards
from asyncsim.traces.columns import (
    ACCEPTED,
    COLUMNS,
    GOSSIP,
    Source,
    load_trace,
    no_messages,
    no_open_parts,
    no_open_reads,
    no_parts,
    no_spells,
    nobody_present,
    save_trace,
)
from asyncsim.traces.samples import Audit, RolloutTables, audit, law_of_staleness
from asyncsim.traces.trace_summary import per_shard, per_worker, queue, summary


@dataclass(frozen=True, eq=False)
class Trace:
    """The order and the times of all server visits.

    Attributes
    ----------
    frame : pandas.DataFrame
        One row per message, in the order in which they were served, and per cancelled computation. Times are seconds
        since the start.

        ``commit``
            0, 1, 2, ...: the rows, whatever became of them.
        ``worker``, ``job``
            Whose commit, and which of its computations, from 0.
        ``local_steps``
            Steps of the computation.
        ``read_version``, ``read_time``
            The version that the computation started from, and the end of the service that read it. Of a read in
            several blocks it is that of the last block: see `block_versions`.
            ``read_arrive_time`` and ``read_serve_time``: when that visit came and was begun. All are
            zero for a worker's first job.
        ``start_time``
            When the computation began.
        ``send_time``
            When it was done and its message set off; with separate read_then_write visits, its request to read. Of a
            cancelled computation when it was stopped. Not a number in recorded traces that do not tell it.
        ``push_version``, ``push_time``
            The central version with which the message was formed, and when that was read: the version
            before the commit, at ``commit_time``; but with separate read_then_write visits that of the
            read visit shortly before.
        ``arrive_time``, ``serve_time``, ``commit_time``
            The message reaches the server, its service begins and ends; then it is applied. Of a cancelled
            computation all three are when it was stopped.
        ``staleness``
            Versions between the read and the commit: the version before it less ``read_version``.
        ``version``
            The version after the commit.
        ``outcome``
            ``"applied"``: this message made a version, of what was buffered and its own. ``"buffered"``: it goes into
            the next version. ``"discarded"``: served, and of no effect. ``"cancelled"``: a computation that was
            stopped, and no message at all.

        Without a server (``protocol`` is ``"gossip"``) there is one row per gradient, in the order in which they are
        applied, and the columns mean:

        ``read_version``, ``read_time``
            The version that the worker's own last row made, and when the computation began. ``read_arrive_time`` is
            when that row was applied: in between the worker waited for others.
        ``arrive_time``, ``serve_time``, ``commit_time``
            When the gradient is applied to the worker's own replica.
        ``sources``, ``weights``
            Lists: the rows, all earlier, whose messages were taken up for this one, ascending, and the share of each.
            See ``source.takes_up`` for when.
        ``kept``
            Which share of its own last state the worker kept when it sent the rest, after its own last row; 1 in its
            first row.
        ``partner``
            With whom the worker averaged when this gradient was applied; -1: with nobody.

        With failures, ``sources`` may have an earlier row of the same worker: a share that came back, as nobody took
        it up. The first row of a worker that was away has as ``read_version`` the version whose replica it copied (0:
        the initial one), as ``read_arrive_time`` when it was back, and 1 as ``kept``.

        On a cluster with failures ``outcome`` may also be ``"lost"``: a message that did not arrive, with the time-out
        as its ``arrive_time``, ``serve_time`` and ``commit_time``. A version may be made between two rows: when a death
        is detected for which a barrier waited, of what was buffered; and when a checkpoint is restored. There are also:

        ``failed_by``
            ``"crash"`` and ``"leave"``: the computation, or its reply, went with its worker. ``"loss"``: its message
            was lost and given up; ``"resent"``: it was sent again, the next row of its worker, with the same ``job``.
            ``"nothing"`` elsewhere.
        ``incarnation``
            How often the worker had lost its state before this computation began.
        ``restored``
            The version of the checkpoint that the server restored since the row before; -1: none.
        ``restores``
            How often it did so, each time as a new version.

        With several servers a row is of a message, whose parts are those of ``parts``. A version counts messages; a
        message is read, or committed, with the last of its parts, whose times the row has. It is ``"discarded"`` if all
        its parts are.
    source : Source
        Where it comes from.
    open_reads : pandas.DataFrame
        The reads not yet consumed at the end, columns as above; ``job`` is the one to be computed from it.
        A prescribed trace has none.
    present : pandas.DataFrame
        The visits waiting or in service when the last commit was applied: ``worker``, ``arrive_time``, and with several
        servers ``shard``. Workers that a policy lets wait after their visit are not among them.
    in_flight : pandas.DataFrame
        Without a server, the messages that no row has taken up: ``row`` whose state was sent, ``taker``, ``weight`` and
        ``arrive_time``, which may be before the end, where a computation that has taken them up is not done. With
        failures also those that were lost (``taker`` -1) with a worker that died, and when (``arrive_time``).
    spells : pandas.DataFrame
        On a cluster with failures, when workers were away and the server (``worker`` -1) was down: ``kind`` (one of
        ``"crash"``, ``"leave"``, ``"outage"``), ``begin``, ``end`` and ``detected`` (s), and of workers the rows
        ``from_row`` up to but not ``to_row`` at which the server did not count them. Not a number: not by the end.
    parts : pandas.DataFrame
        With several servers, one row per part of a message, in the order of ``commit_time``; the columns are those of
        ``frame``, and versions count those of the part's shard. Without, it has no rows.

        ``part``
            0, 1, 2, ...: the rows.
        ``commit``
            The row of ``frame`` with the message; -1 if parts of it are missing at the end.
        ``shard``
            The server, from 0.
    open_parts : pandas.DataFrame
        The reads of each ``shard`` that are not consumed at the end, columns as in ``open_reads``.
    """

    frame: pd.DataFrame
    source: Source
    open_reads: pd.DataFrame = field(default_factory=no_open_reads)
    present: pd.DataFrame = field(default_factory=nobody_present)
    in_flight: pd.DataFrame = field(default_factory=no_messages)
    spells: pd.DataFrame = field(default_factory=no_spells)
    parts: pd.DataFrame = field(default_factory=no_parts)
    open_parts: pd.DataFrame = field(default_factory=no_open_parts)
    rollouts: RolloutTables | None = None

    def __post_init__(self) -> None:
        missing = [name for name in COLUMNS if name not in self.frame]
        if missing:
            raise InputError(f"frame: misses {', '.join(missing)}; a trace has all of {', '.join(COLUMNS)}")
        rules = _rules(self.frame, self.source.workers)
        if self.protocol == GOSSIP:
            rules += gossip.rules(self.frame, self.source, self.in_flight)
        elif len(self.in_flight) or self.source.takes_up:
            raise InputError(f"protocol = {self.protocol!r}: has a server, and no messages between workers")
        for column, holds, rule in rules:
            if not np.all(holds):
                row = int(np.argmin(holds))
                raise InputError(f"frame: {column} of row {row} is {self.frame[column].iloc[row]}; it {rule}")
        shards.check(self.parts, self.frame, self.workers, self.servers)
        for column, least, most in (
            ("worker", -1, self.workers - 1),
            ("from_row", 0, len(self)),
            ("to_row", 0, len(self)),
        ):
            numbers = self.spells[column].dropna()
            wrong = numbers[~numbers.between(least, most) | (numbers % 1 != 0)]
            if len(wrong):
                raise InputError(f"spells: {column} = {wrong.iloc[0]}: must be a whole number from {least} to {most}")

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        lost = len(self) - len(self.accepted)
        commits = f"{len(self) - lost} commits{f' and {lost} lost computations' if lost else ''}"
        servers = f" at {self.servers} servers" if self.servers > 1 else ""
        return f"<Trace of {commits} by {counted(self.workers, 'worker')}{servers}, {self.protocol}, seed {self.seed}>"

    def plot(self) -> Any:
        """Draw how stale commits are and what workers do at first: a figure; `asyncsim.plots` has more."""
        return hooks.plots().overview(self)

    @functools.cached_property
    def accepted(self) -> "Trace":
        """The messages that the server accepted, applied or buffered, counted anew: what a replay computes."""
        kept = self.frame["outcome"].isin(ACCEPTED).to_numpy()
        if kept.all() and not self.has_failures:
            return self
        frame, spells = self.frame[kept].reset_index(drop=True), self.spells
        if self.has_failures:
            frame, spells = _credited(self.frame, kept), spells.copy()
            for name in ("from_row", "to_row"):
                known = spells[name].notna()
                spells.loc[known, name] = np.r_[0, np.cumsum(kept)][spells.loc[known, name].astype(int)]
        frame, in_flight = frame.assign(commit=np.arange(len(frame))), self.in_flight
        if self.protocol == GOSSIP:
            row, reads = np.cumsum(kept) - 1, list(self.open_reads)
            frame = frame.assign(sources=[row[sources].tolist() for sources in frame["sources"]])
            in_flight = in_flight.assign(row=row[in_flight["row"]])
            # Cancelled computations have not consumed what they began from.
            open_reads = pd.concat([self.frame.loc[~kept, reads], self.open_reads], ignore_index=True)
            return Trace(frame, self.source, open_reads, self.present, in_flight, spells)
        parts = shards.renumbered(self.parts, kept) if self.servers > 1 else self.parts
        return dataclasses.replace(self, frame=frame, spells=spells, parts=parts)

    @property
    def has_failures(self) -> bool:
        """Whether the cluster has failures, and the trace their columns."""
        return "failed_by" in self.frame

    @property
    def read_visits(self) -> pd.DataFrame:
        """The reads that were visits of their own, consumed or not: their columns of ``frame``, or of ``parts``.

        None of exchanges, and not the first of a worker, which no server served.
        """
        reads, commits = (self.open_reads, self.frame) if self.servers == 1 else (self.open_parts, self.parts)
        columns = list(reads.columns)
        tables = [commits, reads] if self.source.separate_reads else []
        visits = [table.loc[(table["job"] > 0) | (table["read_time"] > 0), columns] for table in tables]
        if not visits:
            return reads.head(0)
        table = pd.concat(visits, ignore_index=True)
        # A message that is sent again has several rows with one read.
        return table.drop_duplicates(["worker", "job"], ignore_index=True) if self.has_failures else table

    @property
    def visits(self) -> pd.DataFrame:
        """The finished server visits: ``worker``, ``arrive``, ``serve``, ``end`` (s); commits, then reads.

        With several servers they are visits of parts, and have their ``shard``.
        """
        whole = self.frame[~self.frame["outcome"].isin(["cancelled", "lost"])]
        commits, shard = (whole, []) if self.servers == 1 else (self.parts, ["shard"])
        names = ["worker", "arrive", "serve", "end", *shard]
        tables = [
            commits[["worker", "arrive_time", "serve_time", "commit_time", *shard]],
            self.read_visits[["worker", "read_arrive_time", "read_serve_time", "read_time", *shard]],
        ]
        return pd.concat([table.set_axis(names, axis=1) for table in tables], ignore_index=True)

    @functools.cached_property
    def worker_step(self) -> np.ndarray:
        """How many rows of the same worker come before each row, ``[rows]``; its ``job`` if none was left out."""
        return self.frame.groupby("worker", sort=False).cumcount().to_numpy()

    @functools.cached_property
    def taken_up(self) -> pd.DataFrame:
        """The messages between workers that rows took up, in order: ``row``, ``source`` and ``weight``."""
        return gossip.taken_up(self.frame) if self.protocol == GOSSIP else gossip.NOTHING_TAKEN_UP

    @functools.cached_property
    def kept_after(self) -> np.ndarray:
        """The share of the state after each row that its worker kept when it sent the rest, ``[rows]``."""
        sent = np.bincount(self.taken_up["source"], self.taken_up["weight"], len(self))
        return 1.0 - sent - np.bincount(self.in_flight["row"], self.in_flight["weight"], len(self))

    @property
    def takes_up(self) -> str:
        """Without a server: whether messages are taken up at the ``"read"`` or at the ``"commit"``; else ``""``."""
        return self.source.takes_up

    @property
    def workers(self) -> int:
        """How many workers took part."""
        return self.source.workers

    @property
    def protocol(self) -> str:
        """The protocol of the visits; ``"prescribed"``; or ``"gossip"``, without a server."""
        return self.source.protocol

    @property
    def window(self) -> int:
        """Local steps per commit; the most of a worker's where they differ."""
        return self.source.window

    @functools.cached_property
    def windows_differ(self) -> bool:
        """Whether some computations have fewer local steps than others."""
        return bool((self.frame["local_steps"] != self.window).any())

    @property
    def seed(self) -> int:
        """The seed of the random numbers."""
        return self.source.seed

    @property
    def cluster(self) -> Cluster | None:
        """What was simulated; None for a trace that was prescribed or recorded."""
        return self.source.cluster

    @property
    def discipline(self) -> str | None:
        """Who of the waiting is served next; None for a trace without a cluster."""
        return None if self.cluster is None else self.cluster.discipline

    @property
    def servers(self) -> int:
        """How many servers each hold a shard of the parameters; 1 for a trace without a cluster."""
        return 1 if self.cluster is None else self.cluster.servers

    @property
    def read_blocks(self) -> int:
        """Number of blocks that a read is made of; 1 if it is whole."""
        return 1 if self.cluster is None else self.cluster.read_blocks

    @property
    def policy(self) -> Policy:
        """The timing policy; asynchronous for a trace without a cluster."""
        return asynchronous() if self.cluster is None else self.cluster.policy

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that made the trace."""
        return self.source.versions

    def block_versions(self) -> np.ndarray:
        """Return the version of every block of every read; a torn read has blocks of several versions.

        Without locks a read takes time. One that is made in ``read_blocks`` is spread evenly over its service: block
        ``b`` is read once ``(b + 1) / read_blocks`` of the service's time have passed, the last one at its end. A block
        shows what was committed by then. The blocks are of consecutive parameters, as many in each; the last ones have
        what is left.

        Returns
        -------
        int array, shape ``[rows, blocks]``
            Never decreasing along a row; the last column is ``read_version``, and the only one where reads are whole.

        Notes
        -----
        What is committed in the very instant in which a block is read is seen, unless the end of the read came before
        it in the trace. Messages are written at one instant, the end of their visit: a write that is spread over the
        same blocks as slowly as the reads would be seen by none of them in part, as neither overtakes the other.

        References
        ----------
        Recht, Re, Wright and Niu 2011, "Hogwild!", arXiv 1106.5730: components are read and written without locks.
        """
        column = {name: self.frame[name].to_numpy() for name in ("read_serve_time", "read_time", "read_version")}
        begin, end, last = (values[:, None] for values in column.values())
        parts = np.arange(1, self.read_blocks + 1) / self.read_blocks
        made = np.searchsorted(self.frame["commit_time"].to_numpy(), begin + parts * (end - begin), side="right")
        seen = np.minimum(np.r_[0, self.frame["version"].to_numpy()][made], last)
        seen[:, -1] = column["read_version"]
        return seen

    @property
    def samples(self) -> pd.DataFrame:
        """The samples of a cluster with rollouts; see `asyncsim.traces.samples.RolloutTables`."""
        return self._rollouts().samples

    def staleness(self, weight: str = "samples") -> pd.Series:
        """Return the law of the samples' staleness; see `asyncsim.traces.samples.law_of_staleness`."""
        return law_of_staleness(self._rollouts(), weight)

    def check(self) -> Audit:
        """Compare ages and counts of samples; see `asyncsim.traces.samples.audit`."""
        tables = self._rollouts()
        assert self.cluster is not None and self.cluster.rollouts is not None
        return audit(tables, self.cluster.rollouts)

    def _rollouts(self) -> RolloutTables:
        if self.rollouts is None:
            raise InputError(
                "trace: has no samples; simulate a cluster with rollouts=asyncsim.Rollouts(...)"
            )
        return self.rollouts

    def summary(self, warm_up: int | None = None) -> dict[str, float]:
        """Return the trace in some twenty numbers; see `asyncsim.traces.trace_summary.summary`.

        Without a server they are those of `asyncsim.traces.gossip.summary`.
        """
        return summary(self, warm_up)

    def per_worker(self, warm_up: int | None = None) -> pd.DataFrame:
        """Return one row per worker; see `asyncsim.traces.trace_summary.per_worker`."""
        return per_worker(self, warm_up)

    def per_shard(self, warm_up: int | None = None) -> pd.DataFrame:
        """Summarize each server's shard; see `asyncsim.traces.trace_summary.per_shard`."""
        return per_shard(self, warm_up)

    def queue(self) -> pd.DataFrame:
        """Return how many visits are at the server over time; see `asyncsim.traces.trace_summary.queue`.

        Without a server: how many messages are in flight.
        """
        return queue(self)

    def waits(self) -> np.ndarray:
        """Return who waited how long for whom without a server; see `asyncsim.traces.gossip.waits`."""
        if self.protocol != GOSSIP:
            raise InputError(
                f"protocol = {self.protocol!r}: workers wait for a server, not for each other; see summary()"
            )
        return gossip.waits(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write one parquet file with everything inside; the whole file or, on failure, nothing.

        The same trace gives the same bytes.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        InputError
            There is such a file already, or it cannot be written.
        """
        return save_trace(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Read a trace that `save` wrote.

        Raises
        ------
        InputError
            No such file; a truncated or damaged one; not a trace; or a trace of another format.
        """
        return load_trace(cls, path)


def _credited(frame: pd.DataFrame, kept: np.ndarray) -> pd.DataFrame:
    """Return the rows that are kept, each version that a death made credited to the last message that went into it."""
    before = (frame["version"] - (frame["outcome"] == "applied")).to_numpy()[kept]
    restores = np.diff(frame["restores"].cumsum().to_numpy()[kept], prepend=0)
    restored = frame["restored"].where(frame["restored"] >= 0).ffill().fillna(-1).astype(np.int64).to_numpy()[kept]
    frame = frame[kept].reset_index(drop=True)
    version = np.append(before[1:] - restores[1:], frame["version"].to_numpy()[-1:])
    outcome = frame["outcome"].mask(version > before, "applied")
    restored = np.where(restores > 0, restored, -1)
    return frame.assign(version=version, outcome=outcome, restores=restores, restored=restored)


_WHEN_ARRIVED = "must not be before 0, nor after its serve_time"


def _rules(frame: pd.DataFrame, workers: int) -> list[tuple[str, np.ndarray, str]]:
    """Return the rules of every row: the column, the rows where the rule holds, and the rule in words."""
    column = {name: frame[name].to_numpy() for name in COLUMNS if name != "outcome"}
    last = np.concatenate([[0], column["version"][:-1]])
    before = column["version"] - (frame["outcome"] == "applied").to_numpy() if "failed_by" in frame else last
    time = column["commit_time"]
    return [
        ("commit", column["commit"] == np.arange(len(frame)), "must count the rows from 0"),
        ("worker", (column["worker"] >= 0) & (column["worker"] < workers), f"must be from 0 to {workers - 1}"),
        ("version", (column["version"] >= before) & (before >= last), "must not be less than the row before's"),
        (
            "outcome",
            (column["version"] == before) | (frame["outcome"] == "applied").to_numpy(),
            "must be 'applied' where a version was made",
        ),
        *(
            (name, (column[name] >= 0) & (column[name] <= before), "must be a version that there was before the commit")
            for name in ("read_version", "push_version")
        ),
        ("staleness", column["staleness"] == before - column["read_version"], "must count the versions since the read"),
        ("commit_time", np.diff(time, prepend=0.0) >= 0, "must not be before the row before's, nor before 0"),
        ("commit_time", np.isfinite(time), "must be finite"),
        # By the server's clock; those of workers may differ a little where a trace was recorded.
        ("arrive_time", (column["arrive_time"] >= 0) & (column["arrive_time"] <= column["serve_time"]), _WHEN_ARRIVED),
        ("serve_time", column["serve_time"] <= time, "must not be after its commit_time"),
        ("start_time", ~(column["start_time"] > time[-1:]), "must not be after the last commit"),  # or not told
    ]
