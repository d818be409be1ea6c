"""The trace: the visits of workers to the server, and the staleness of each message."""

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base import hooks
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError
from asyncsim.base.markup import card
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.policy import Policy
from asyncsim.traces.archive import load_trace, save_trace
from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    CANCELLED,
    GOSSIP,
    OUTCOMES,
    READ_COLUMNS,
    Source,
)
from asyncsim.traces.samples import Audit, RolloutTables, audit, law_of_staleness
from asyncsim.traces.tables import frame_of, parts_of
from asyncsim.traces.trace_summary import per_shard, per_worker, queue, summary, waits


@dataclass(frozen=True, eq=False)
class Trace:
    """The order and the times of all server visits.

    Four tables hold it, whatever their origin; `frame` joins them for readers.

    Attributes
    ----------
    source : Source
        The cluster and the seed, or the protocol of a recording or a prescription.
    steps : pandas.DataFrame
        One row per message or stopped computation: ``worker``, ``job``, ``local_steps``, ``read``
        (the row of `reads` that it was computed from), ``start_time``, ``send_time``,
        ``arrive_time``, ``serve_time``, ``commit_time``, ``outcome``, ``version``, ``push_read``
        (the row of `reads` with which its message was formed, if that is a separate visit; else
        -1), ``failed_by``, ``incarnation``, ``partner``, ``kept``. They mean the same as in
        `frame`.
    reads : pandas.DataFrame
        One row per read: ``worker``, the ``job`` that is computed from it, ``version``,
        ``arrive_time``, ``serve_time``, ``time`` (its end), and ``is_open``: whether no step has
        consumed it. With several servers also one row per ``shard`` of each read; the ``shard`` of
        a full read is -1. So also with groups of tensors (`asyncsim.prescribed`): there a full read
        has the version of its oldest shard, and its shards follow in the order of the full reads.
    messages : pandas.DataFrame
        One row per message that was taken up or is under way: its ``worker`` and ``step``, -1 for a
        visit that waits at the server and has no row yet; ``by``, the step that took it up, at a
        server the one that completed the version (-1: none so far, or the version was dropped for a
        restored one); ``taker``, a worker, or -1 for the server; ``weight``, its share of the
        sender's state; ``arrive_time`` (s), not a number if not recorded. Without a server a
        ``taker`` of -1 is a worker that died with the message, at ``arrive_time``.

        With several servers one row per part of a message: ``shard``, ``read`` and ``push_read``
        (rows of `reads`, as of a step), ``serve_time``, ``commit_time`` and ``outcome``; `parts`
        joins it with its reads. Its ``step`` is -1 if parts of the message are missing at the end.
    absences : pandas.DataFrame
        One row per absence of a worker, and per outage of the server (``worker`` -1): ``kind``
        (``"crash"``, ``"leave"``, ``"outage"``), ``begin``, ``end``, ``detected`` (s),
        ``from_row``, ``to_row``: the steps at which the server did not count the worker, the last
        exclusive; an outage ends before ``to_row``. ``version``: of the checkpoint restored after
        an outage; else -1. Values after the end are not a number.
    rollouts : RolloutTables or None
        The tables of samples, of a cluster with rollouts.
    frame : pandas.DataFrame
        One row per message, in the order in which they were served, and per cancelled computation.
        Times are seconds since the start.

        ``commit``
            0, 1, 2, ...: the rows, including discarded messages.
        ``worker``, ``job``
            The worker, and the number of the computation among its own, from 0.
        ``local_steps``
            Steps of the computation.
        ``read_version``, ``read_time``
            The version that the computation started from, and the end of the service that read it.
            ``read_arrive_time`` and ``read_serve_time``: the arrival and the begin of that visit.
            All are zero for a worker's first job.
        ``start_time``
            The begin of the computation.
        ``send_time``
            Its end, at which the message departs; with separate read_then_write visits, the request
            to read. For a cancelled computation, when it was stopped. Not a number if not recorded.
        ``push_version``, ``push_time``
            The central version with which the message was formed, and the time of that read: the
            version before the commit, at ``commit_time``; with separate read_then_write visits, the
            version of the preceding read visit.
        ``arrive_time``, ``serve_time``, ``commit_time``
            The message reaches the server, its service begins and ends; then it is applied. For a
            cancelled computation all three are when it was stopped.
        ``staleness``
            Versions between the read and the commit: the version before it less ``read_version``.
        ``version``
            The version after the commit.
        ``outcome``
            ``"applied"``: this message completed a version, with the buffered messages.
            ``"buffered"``: it goes into the next version. ``"discarded"``: served, without effect.
            ``"cancelled"``: a stopped computation, which sent no message.

        Under the policy `asyncsim.trials`, and with a grace window, a version may be made between
        two rows, of the buffered messages. The next computation after a cut trial starts from the
        same version without a visit: its ``read_arrive_time`` and ``read_serve_time`` are not a
        number.

        Without a server (``protocol`` is ``"gossip"``) there is one row per gradient, in the order
        in which they are applied, and the columns mean:

        ``read_version``, ``read_time``
            The version that the worker's previous row completed, and the begin of the computation.
            ``read_arrive_time`` is when that row was applied: in between the worker waited for
            others.
        ``arrive_time``, ``serve_time``, ``commit_time``
            When the gradient is applied to the worker's replica.
        ``sources``, ``weights``
            Lists: the rows, all earlier, whose messages were taken up for this one, ascending, and
            the share of each. See ``source.takes_up`` for when.
        ``kept``
            The share of its state that the worker kept, after its previous row, when it sent the
            rest; 1 in its first row.
        ``partner``
            The worker with which it averaged when this gradient was applied; -1: none.

        With failures, ``sources`` may contain an earlier row of the same worker: a returned share
        that no worker took up. The first row of a returning worker has as ``read_version`` the
        version whose replica it copied (0: the initial one), as ``read_arrive_time`` its return,
        and 1 as ``kept``.

        With failures ``outcome`` may also be ``"lost"``: a message that did not arrive, with the
        time-out as its ``arrive_time``, ``serve_time`` and ``commit_time``. A version may be made
        between two rows: from the buffered messages, when the death is detected for which a barrier
        waited; and when a checkpoint is restored. There are also:

        ``failed_by``
            ``"crash"`` and ``"leave"``: the computation, or its reply, was lost with its worker.
            ``"loss"``: its message was lost and given up; ``"resent"``: it was sent again, as the
            next row of its worker, with the same ``job``. Otherwise ``"nothing"``.
        ``incarnation``
            The number of losses of the worker's state before this computation.
        ``restored``
            The version of the checkpoint that the server restored since the previous row; -1: none.
        ``restores``
            The number of such restores; each makes a new version.

        With several servers a row is a message, whose parts are in ``parts``. A version counts
        messages; a message is read, or committed, with the last of its parts, whose times the row
        has. It is ``"discarded"`` if all its parts are.
    parts : pandas.DataFrame
        With several servers, one row per part of a message, in the order of ``commit_time``; the
        columns are as in ``frame``, and versions are those of the part's shard. With one server,
        empty.

        ``part``
            0, 1, 2, ...: the rows.
        ``commit``
            The row of ``frame`` with the message; -1 if parts of it are missing at the end.
        ``shard``
            The server, from 0.
    """

    source: Source
    steps: pd.DataFrame
    reads: pd.DataFrame
    messages: pd.DataFrame
    absences: pd.DataFrame
    rollouts: RolloutTables | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        lost = len(self) - len(self.accepted)
        commits = f"{len(self) - lost} commits{f' and {lost} lost computations' if lost else ''}"
        servers = f" at {self.servers} servers" if self.servers > 1 else ""
        if self.source.shards > 1:
            servers = f" in {self.source.shards} groups of tensors"
        return (
            f"<Trace of {commits} by {counted(self.workers, 'worker')}{servers}, {self.protocol}, "
            f"seed {self.seed}>"
        )

    def _repr_html_(self) -> str:
        """Show the trace in a notebook, with its summary as a table."""
        return card(repr(self).strip("<>"), {} if self.rollouts else self.summary())

    def plot(self) -> Any:
        """Draw the staleness of commits and the workers' first steps; `asyncsim.plots` has more."""
        return hooks.plots().overview(self)

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The joined tables: one row per message, in the order of service; see `Trace`."""
        return frame_of(self)

    @functools.cached_property
    def accepted(self) -> "Trace":
        """The messages that the server applied or buffered, renumbered: a replay's gradients.

        Where a detected death, a cut trial or a grace window completed a version, its last message
        counts as the one that completed it.
        """
        outcome = self.steps["outcome"].cat.codes.to_numpy()
        is_accepted, messages = outcome <= BUFFERED, self.messages
        is_whole = messages["shard"] < 0  # a part may complete a version of its shard alone
        completed = messages.loc[is_whole & (messages["by"] == messages["step"]), "step"].to_numpy()
        between = completed[(completed >= 0) & (outcome[completed] == BUFFERED)]
        if is_accepted.all() and not len(between):
            return self
        version, outcome = self.steps["version"].to_numpy(copy=True), outcome.copy()
        version[between] += 1
        outcome[between] = APPLIED
        steps = self.steps.assign(
            version=version, outcome=pd.Categorical.from_codes(outcome, OUTCOMES)
        )
        rows = np.concatenate([[0], np.cumsum(is_accepted)])
        place = np.append(np.where(is_accepted, rows[:-1], -1), -1)
        messages = messages.assign(**{name: place[messages[name]] for name in ("step", "by")})
        absences = self.absences.copy()
        for name in ("from_row", "to_row"):
            is_known = absences[name].notna()
            absences.loc[is_known, name] = rows[absences.loc[is_known, name].astype(int)]
        reads = self.reads
        # Cancelled computations have not consumed the replicas that they began from.
        if self.protocol == GOSSIP:
            is_open = reads["is_open"].to_numpy(copy=True)
            is_open[self.steps["read"][~is_accepted]] = True
            reads = reads.assign(is_open=is_open)
        steps = steps[is_accepted].reset_index(drop=True)
        return Trace(self.source, steps, reads, messages, absences, self.rollouts)

    def head(self, rows: int) -> "Trace":
        """Return the first rows, as a trace that ended there, without its open reads."""
        end = self.steps["commit_time"].iloc[rows - 1]
        numbers = ["from_row", "to_row"]
        absences = self.absences[self.absences["begin"] <= end]
        absences = absences.assign(**absences[numbers].where(absences[numbers] <= rows))
        return replace(
            self,
            steps=self.steps.iloc[:rows],
            reads=self.reads.assign(is_open=False),
            messages=self.messages[self.messages["step"].between(0, rows - 1)],
            absences=absences,
        )

    @functools.cached_property
    def has_failures(self) -> bool:
        """Whether the cluster has failures, or the trace records one."""
        if self.cluster is not None and self.cluster.failures:
            return True
        return len(self.absences) > 0 or bool((self.steps["failed_by"] != "nothing").any())

    @property
    def open_reads(self) -> pd.DataFrame:
        """The reads that no row consumed, with columns as in `frame`; ``job`` would consume it."""
        return self._open_reads(self.reads["shard"] < 0).drop(columns="shard")

    @property
    def open_parts(self) -> pd.DataFrame:
        """The reads of each ``shard`` that no row consumed, with columns as in `open_reads`."""
        reads = self._open_reads(self.reads["shard"] >= 0)
        return reads[[*(name for name in reads if name != "shard"), "shard"]]

    def _open_reads(self, rows: pd.Series) -> pd.DataFrame:
        reads = self.reads[self.reads["is_open"] & rows].drop(columns="is_open")
        return reads.rename(columns=READ_COLUMNS).reset_index(drop=True)

    @property
    def present(self) -> pd.DataFrame:
        """The visits that waited or were served at the last commit: ``worker``, ``arrive_time``.

        With several servers also their ``shard``.

        Workers that a policy holds after their visit are not included.
        """
        shard = ["shard"] if self.servers > 1 else []
        waits = (self.messages["step"] < 0) & self.messages["commit_time"].isna()
        return self.messages.loc[waits, ["worker", "arrive_time", *shard]].reset_index(drop=True)

    @functools.cached_property
    def parts(self) -> pd.DataFrame:
        """The parts of messages to several servers, joined with their reads; see `Trace`."""
        return parts_of(self)

    @property
    def in_flight(self) -> pd.DataFrame:
        """The messages that no row has taken up, without a server.

        ``row`` (whose state was sent), ``taker``, ``weight``, ``arrive_time``. A message may have
        arrived before the end, if the computation that has taken it up is not finished. With
        failures also messages (``taker`` -1) lost with a dead worker, at ``arrive_time``.
        """
        flying = self.messages[(self.messages["by"] < 0) & (self.protocol == GOSSIP)]
        columns = ["row", "taker", "weight", "arrive_time"]
        return flying.rename(columns={"step": "row"})[columns].reset_index(drop=True)

    @property
    def spells(self) -> pd.DataFrame:
        """The absences of workers and the outages of the server (``worker`` -1).

        ``kind`` is ``"crash"``, ``"leave"`` or ``"outage"``; ``begin``, ``end`` and ``detected``
        are seconds. For workers ``from_row`` and ``to_row`` are the rows at which the server did
        not count them, the last exclusive. Values after the end are not a number.
        """
        spells = self.absences.drop(columns="version").astype({"kind": str})
        return spells.assign(to_row=spells["to_row"].where(spells["worker"] >= 0))

    @property
    def read_visits(self) -> pd.DataFrame:
        """The reads that were separate visits, consumed or not, as rows of `reads`.

        Empty for exchanges. A worker's first read is not included: no server served it.
        """
        if not self.source.separate_reads:
            return self.reads.head(0)
        read, is_split = self.steps["read"], self.servers > 1
        if is_split:
            read = self.messages.loc[self.messages["read"] >= 0, "read"]
        is_open = self.reads["is_open"] & ((self.reads["shard"] >= 0) == is_split)
        reads = self.reads.iloc[pd.unique(np.append(read, np.flatnonzero(is_open)))]
        was_served = (reads["job"] > 0) | (reads["time"] > 0)
        return reads[was_served & reads["serve_time"].notna()]  # not so after a cut trial

    @property
    def visits(self) -> pd.DataFrame:
        """The finished server visits: ``worker``, ``arrive``, ``serve``, ``end`` (s); commits, then
        reads.

        With several servers they are visits of parts, and have their ``shard``.
        """
        commits, shard = self.steps[self.steps["outcome"].cat.codes < CANCELLED], []
        if self.servers > 1:
            commits, shard = self.parts, ["shard"]
        names = ["worker", "arrive", "serve", "end", *shard]
        visits = [
            commits[["worker", "arrive_time", "serve_time", "commit_time", *shard]].set_axis(
                names, axis=1
            ),
            self.read_visits[["worker", "arrive_time", "serve_time", "time", *shard]].set_axis(
                names, axis=1
            ),
        ]
        return pd.concat(visits, ignore_index=True)

    @functools.cached_property
    def worker_step(self) -> np.ndarray:
        """The number of earlier rows of the worker, ``[rows]``; its ``job`` if none is missing."""
        return self.steps.groupby("worker", sort=False).cumcount().to_numpy()

    @functools.cached_property
    def taken_up(self) -> pd.DataFrame:
        """The messages between workers that rows took up, in order: ``row``, ``source`` and
        ``weight``.
        """
        messages = self.messages
        messages_taken = messages[(messages["by"] >= 0) & (messages["taker"] >= 0)]
        names = {"by": "row", "step": "source", "weight": "weight"}
        return messages_taken[[*names]].set_axis([*names.values()], axis=1).reset_index(drop=True)

    @functools.cached_property
    def kept_after(self) -> np.ndarray:
        """The share of the state after each row that its worker did not send, ``[rows]``."""
        taken_up, in_flight = self.taken_up, self.in_flight
        sent = np.bincount(taken_up["source"], taken_up["weight"], len(self))
        return 1.0 - sent - np.bincount(in_flight["row"], in_flight["weight"], len(self))

    @property
    def takes_up(self) -> str:
        """When messages are taken up without a server, ``"read"`` or ``"commit"``; else ``""``."""
        return self.source.takes_up

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.source.workers

    @property
    def protocol(self) -> str:
        """The protocol of the visits; ``"prescribed"``; or ``"gossip"``, without a server."""
        return self.source.protocol

    @property
    def window(self) -> int:
        """Local steps per commit; the largest number if workers differ."""
        return self.source.window

    @functools.cached_property
    def windows_differ(self) -> bool:
        """Whether some computations have fewer local steps than others."""
        return bool((self.steps["local_steps"] != self.window).any())

    @property
    def seed(self) -> int:
        """The seed of the random numbers."""
        return self.source.seed

    @property
    def cluster(self) -> Cluster | None:
        """The simulated cluster; None for a prescribed or recorded trace."""
        return self.source.cluster

    @property
    def discipline(self) -> str | None:
        """The order of service of waiting visits; None for a trace without a cluster."""
        return None if self.cluster is None else self.cluster.discipline

    @property
    def servers(self) -> int:
        """The number of servers, each with a shard of the parameters; 1 without a cluster."""
        return self.source.servers

    @property
    def policy(self) -> Policy:
        """The timing policy; asynchronous for a trace without a cluster."""
        return self.source.policy

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that produced the trace."""
        return self.source.versions

    def group_versions(self) -> np.ndarray:
        """Return the version of each group of tensors in every read; one group if reads are whole.

        Returns
        -------
        int array, shape ``[rows, groups]``
            The smallest of a row is its ``read_version``.
        """
        if self.source.shards == 1:
            return self.frame["read_version"].to_numpy()[:, None]
        of_shards = self.reads.loc[self.reads["shard"] >= 0, "version"].to_numpy()
        return of_shards.reshape(-1, self.source.shards)[self.steps["read"]]

    @property
    def samples(self) -> pd.DataFrame:
        """The samples of a cluster with rollouts; see `asyncsim.traces.samples.RolloutTables`."""
        return self._rollouts().samples

    def staleness(self, weight: str = "samples") -> pd.Series:
        """Return the law of the samples' staleness; see
        `asyncsim.traces.samples.law_of_staleness`.
        """
        return law_of_staleness(self._rollouts(), weight)

    def check(self) -> Audit:
        """Compare ages and counts of samples; see `asyncsim.traces.samples.audit`."""
        tables = self._rollouts()
        assert self.cluster is not None
        return audit(tables, self.cluster)

    def _rollouts(self) -> RolloutTables:
        if self.rollouts is None:
            raise InputError(
                "trace: has no samples; simulate a cluster with rollouts=asyncsim.Rollouts(...)"
            )
        return self.rollouts

    def summary(self, warm_up: int | None = None) -> dict[str, float]:
        """Summarize the trace in numbers; see `asyncsim.traces.trace_summary.summary`."""
        return summary(self, warm_up)

    def per_worker(self, warm_up: int | None = None) -> pd.DataFrame:
        """Summarize each worker; see `asyncsim.traces.trace_summary.per_worker`."""
        return per_worker(self, warm_up)

    def per_shard(self, warm_up: int | None = None) -> pd.DataFrame:
        """Summarize each server's shard; see `asyncsim.traces.trace_summary.per_shard`."""
        return per_shard(self, warm_up)

    def queue(self) -> pd.DataFrame:
        """Count the visits at the server over time; see `asyncsim.traces.trace_summary.queue`.

        Without a server: the messages in flight.
        """
        return queue(self)

    def waits(self) -> np.ndarray:
        """Return the waits between workers (s); see `asyncsim.traces.trace_summary.waits`."""
        if self.protocol != GOSSIP:
            raise InputError(
                f"protocol = {self.protocol!r}: workers wait for a server, not for each other; see "
                "summary()"
            )
        return waits(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write one parquet file, a row with a list for each column; on failure, nothing.

        The same trace gives the same bytes.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        InputError
            The file exists already, or cannot be written.
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
