"""The four tables of a trace, and the tables that follow from them."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd

from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    CANCELLED,
    COLUMNS,
    GOSSIP,
    LOST,
    OUTCOMES,
    PART_COLUMNS,
    READ_COLUMNS,
    Source,
    arrays_of,
)
from asyncsim.traces.samples import RolloutTables

Columns = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Tables(Source):
    """A source and the four tables of its trace; their attributes are described in `Trace`."""

    steps: pd.DataFrame
    reads: pd.DataFrame
    messages: pd.DataFrame
    absences: pd.DataFrame
    rollouts: RolloutTables | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The joined tables: one row per message, in the order of service; see `Trace`."""
        steps = self.steps
        version, outcome = arrays_of(steps, "version", "outcome")
        between = self.has_failures or self.policy.completes_between_messages
        before = version - (outcome == APPLIED) if between else np.r_[0, version][:-1]
        counted = {"commit": np.arange(len(steps)), **_read_columns(steps, self.reads, before)}
        columns: Columns = {name: counted.get(name, steps.get(name)) for name in COLUMNS}
        if not self.has_failures:
            columns["outcome"] = pd.Categorical.from_codes(outcome, OUTCOMES[:LOST])
        if self.protocol == GOSSIP:
            taken_up = self.taken_up
            ends = np.cumsum(np.bincount(taken_up["row"], minlength=len(steps))).tolist()
            bounds = list(itertools.pairwise([0, *ends]))
            for name in ("source", "weight"):
                values = taken_up[name].tolist()
                columns[f"{name}s"] = [values[begin:end] for begin, end in bounds]
            columns |= {name: steps[name] for name in ("kept", "partner")}
        if self.has_failures:
            restores, restored = restores_of(self.absences, len(steps)), np.full(len(steps), -1)
            restored[restores["to_row"]] = restores["version"]
            columns |= {name: steps[name] for name in ("failed_by", "incarnation")}
            columns |= {"restored": restored, "restores": restore_counts(self.absences, len(steps))}
        return pd.DataFrame(columns, copy=False)

    @functools.cached_property
    def accepted(self) -> Self:
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
        return replace(self, steps=steps, reads=reads, messages=messages, absences=absences)

    def head(self, rows: int) -> Self:
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
        reads = self.reads[self.reads["is_open"] & (self.reads["shard"] < 0)]
        reads = reads.drop(columns=["is_open", "shard"])
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
        parts = self.messages[self.messages["commit_time"].notna()].reset_index(drop=True)
        version, (outcome,) = versions_of_shards(parts), arrays_of(parts, "outcome")
        counted = {
            "part": np.arange(len(parts)),
            "commit": parts["step"],
            "job": self.reads["job"].to_numpy()[parts["read"]],
            **_read_columns(parts, self.reads, version - (outcome == APPLIED)),
            "version": version,
            "outcome": pd.Categorical.from_codes(outcome, OUTCOMES[:LOST]),
        }
        return pd.DataFrame({name: counted.get(name, parts.get(name)) for name in PART_COLUMNS})

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
        if not self.separate_reads:
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
        """The server visits: ``worker``, ``arrive``, ``serve``, ``end`` (s); commits, then reads,
        and then those of `present`, without ``serve`` and ``end``.

        With several servers they are visits of parts, and have their ``shard``.
        """
        commits = self.steps[self.steps["outcome"].cat.codes < CANCELLED]
        names = {"arrive_time": "arrive", "serve_time": "serve", "commit_time": "end"}
        columns = ["worker", *names]
        if self.servers > 1:
            commits, columns = self.parts, [*columns, "shard"]
        reads = self.read_visits.rename(columns={"time": "commit_time"})
        tables = (table.reindex(columns=columns) for table in (commits, reads, self.present))
        return pd.concat(tables, ignore_index=True).rename(columns=names)

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

    @functools.cached_property
    def windows_differ(self) -> bool:
        """Whether some computations have fewer local steps than others."""
        return bool((self.steps["local_steps"] != self.window).any())

    @property
    def discipline(self) -> str | None:
        """The order of service of waiting visits; None for a trace without a cluster."""
        return None if self.cluster is None else self.cluster.discipline

    def group_versions(self) -> np.ndarray:
        """Return the version of each group of tensors in every read; one group if reads are whole.

        Returns
        -------
        int array, shape ``[rows, groups]``
            The smallest of a row is its ``read_version``.
        """
        if self.shards == 1:
            return self.frame["read_version"].to_numpy()[:, None]
        of_shards = self.reads.loc[self.reads["shard"] >= 0, "version"].to_numpy()
        return of_shards.reshape(-1, self.shards)[self.steps["read"]]


def restores_of(absences: pd.DataFrame, rows: int) -> pd.DataFrame:
    """Return the outages after which a checkpoint was restored before one of the rows."""
    outages = absences[(absences["worker"] < 0) & (absences["to_row"] < rows)]
    return outages.astype({"to_row": np.int64})


def restore_counts(absences: pd.DataFrame, rows: int) -> np.ndarray:
    """Return the number of restored checkpoints before each row, ``[rows]``."""
    return np.bincount(restores_of(absences, rows)["to_row"], minlength=rows)


def versions_of_shards(parts: pd.DataFrame) -> np.ndarray:
    """Return the version of each part's shard after the part."""
    is_applied = (parts["outcome"].cat.codes == APPLIED).astype(int)
    return is_applied.groupby(parts["shard"]).cumsum().to_numpy()


def _read_columns(table: pd.DataFrame, reads: pd.DataFrame, before: np.ndarray) -> Columns:
    """Compute the columns of steps or parts that follow from reads and earlier versions."""
    read, push_read, outcome = arrays_of(table, "read", "push_read", "outcome")
    columns = {name: reads[column].to_numpy()[read] for column, name in READ_COLUMNS.items()}
    push_version, push_time = before, table["commit_time"]
    formed = np.flatnonzero((push_read >= 0) & (outcome < CANCELLED))
    if len(formed):
        push_version, push_time = before.copy(), push_time.to_numpy(copy=True)
        push_version[formed], push_time[formed] = arrays_of(
            reads.iloc[push_read[formed]], "version", "time"
        )
    staleness = before - columns["read_version"]
    return columns | {"push_version": push_version, "push_time": push_time, "staleness": staleness}
