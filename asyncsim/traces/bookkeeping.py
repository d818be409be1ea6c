"""Make the rows of a trace from the record of a simulation: jobs, versions and staleness.

In every protocol and under every policy a worker's job ``j`` computes from its read ``j``, read 0 being version 0 at
time 0; also jobs that are discarded or cancelled are followed by a read. So one list of reads, in order for each
worker, tells all staleness.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.clusters.cluster import Cluster
from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    DISCARDED,
    FAILED_BY,
    FAILING_OUTCOMES,
    OUTCOMES,
    PART_COLUMNS,
    SPELLS,
    Source,
    no_messages,
    no_spells,
)
from asyncsim.traces.gossip import previous_rows
from asyncsim.traces.samples import RolloutTables
from asyncsim.traces.trace import Trace

Columns = dict[str, np.ndarray]

#: What is recorded of each message; of a cancelled computation all times after ``send_time`` are its end.
COMMIT_RECORD = ("worker", "start_time", "send_time", "arrive_time", "serve_time", "commit_time")
#: The same with what became of it, and the version after it: a row of the trace.
STEP_RECORD = (*COMMIT_RECORD, "outcome", "version")
#: What is recorded besides under failures.
FAILURE_RECORD = ("job", "failed_by", "incarnation", "restored", "restores")
#: What is recorded of each read but the first of each worker.
READ_RECORD = ("worker", "read_version", "read_arrive_time", "read_serve_time", "read_time")


def trace_of(
    cluster: Cluster,
    seed: int,
    commits: Columns,
    reads: Columns,
    present: Columns,
    first: Sequence[int] | None = None,
    consumed: Sequence[int] | None = None,
    spells: Sequence[float] | None = None,
    shards: Sequence[tuple[Columns, Columns]] = (),
    rollouts: RolloutTables | None = None,
) -> Trace:
    """Build the trace of a run from its record.

    ``commits`` and ``reads`` have the columns `STEP_RECORD` and `READ_RECORD`, in the order in which services ended.
    ``present`` has ``worker`` and ``arrive_time`` of the visits that waited or were served at the last commit.

    Under failures ``commits`` have the columns `FAILURE_RECORD` besides. ``first`` are then the workers that were there
    at time 0, by default all; ``consumed`` how many of its reads each worker has used up; ``spells`` has the entries of
    `Trace.spells`, row by row, with the positions of the kinds.

    With several servers ``shards`` are the parts of messages, and the reads, at each of them.
    """
    reads = _with_first(reads, range(cluster.workers) if first is None else first)
    jobs = _PerWorker(commits["worker"].astype(np.int64), cluster.workers)
    if "job" in commits:
        jobs.number, jobs.count = commits["job"].astype(np.int64), np.array(consumed, np.int64)
    read_visits = _PerWorker(reads["worker"].astype(np.int64), cluster.workers)
    columns = _rows(cluster, commits, reads, jobs, read_visits)
    outcomes = OUTCOMES if spells is None else FAILING_OUTCOMES
    columns["outcome"] = pd.Categorical.from_codes(commits["outcome"].astype(np.int8), outcomes)
    tables = {"open_reads": _open_reads(reads, jobs, read_visits), "present": pd.DataFrame(present)}
    if shards:
        tables |= _parts(cluster, shards, jobs)
    if spells is not None:
        columns["failed_by"] = pd.Categorical.from_codes(commits["failed_by"].astype(np.int8), FAILED_BY)
        columns |= {name: commits[name].astype(np.int64) for name in ("incarnation", "restored", "restores")}
    source = Source(
        workers=cluster.workers,
        protocol=cluster.protocol,
        window=max(cluster.windows),
        separate_reads=cluster.separate_reads,
        seed=seed,
        cluster=cluster,
    )
    table = no_spells() if spells is None else _table_of(spells)
    return Trace(pd.DataFrame(columns), source, **tables, spells=table, rollouts=rollouts)


def _table_of(spells: Sequence[float]) -> pd.DataFrame:
    """Return `Trace.spells` from its entries, with the positions of the kinds."""
    table = pd.DataFrame(np.array(spells).reshape(-1, len(no_spells().columns)), columns=list(no_spells()))
    return table.assign(kind=np.array(SPELLS, object)[table["kind"].astype(np.int64)]).astype({"worker": np.int64})


class _PerWorker:
    """Visits in order of time, and for each worker which are its own.

    Attributes
    ----------
    worker : Int64[ndarray, "visits"]
        Who made each visit.
    number : Int64[ndarray, "visits"]
        Which of the worker's own it is, from 0.
    count : Int64[ndarray, "workers"]
        How many each worker made.
    """

    def __init__(self, worker: np.ndarray, workers: int):
        self.worker = worker
        self.count = np.bincount(worker, minlength=workers)
        self._first = np.cumsum(self.count) - self.count
        # NumPy sorts short integers several times faster.
        self._by_worker = np.argsort(worker.astype(np.min_scalar_type(workers)), kind="stable")
        self.number = np.empty_like(worker)
        self.number[self._by_worker] = np.arange(len(worker)) - np.repeat(self._first, self.count)

    def find(self, worker: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the positions of visits by worker and number."""
        return self._by_worker[self._first[worker] + number]


def reads_of_commits(cluster: Cluster, commits: Columns) -> Columns:
    """Return the reads that are parts of the commits' visits, one each: of the version after it, or before it."""
    version = commits["version"]
    if cluster.protocol == "read_then_write":
        version = version - (commits["outcome"] == APPLIED)
    return {
        "worker": commits["worker"],
        "read_version": version,
        "read_arrive_time": commits["arrive_time"],
        "read_serve_time": commits["serve_time"],
        "read_time": commits["commit_time"],
    }


def _with_first(reads: Columns, workers: Sequence[int]) -> Columns:
    """Return all reads, those of version 0 at time 0 at their head."""
    first = {name: np.zeros(len(workers)) for name in READ_RECORD}
    first["worker"] = np.array(workers, np.float64)
    return {name: np.concatenate([first[name], reads[name]]) for name in READ_RECORD}


def _open_reads(reads: Columns, jobs: _PerWorker, read_visits: _PerWorker) -> pd.DataFrame:
    """Build the table of the reads that no job has consumed."""
    still_open = np.flatnonzero(read_visits.number >= jobs.count[read_visits.worker])
    columns = {
        "worker": read_visits.worker[still_open],
        "job": read_visits.number[still_open],
        "read_version": reads["read_version"][still_open].astype(np.int64),
        **{name: reads[name][still_open] for name in ("read_arrive_time", "read_serve_time", "read_time")},
    }
    return pd.DataFrame(columns)


def _parts(cluster: Cluster, shards: Sequence[tuple[Columns, Columns]], jobs: _PerWorker) -> dict[str, pd.DataFrame]:
    """Build the tables of the parts of messages, and of the open reads of shards."""
    tables, open_tables = [], []
    for shard, (commits, reads) in enumerate(shards):
        reads = _with_first(reads, range(cluster.workers))
        shard_jobs, read_visits = (
            _PerWorker(visits["worker"].astype(np.int64), cluster.workers) for visits in (commits, reads)
        )
        table = pd.DataFrame(_rows(cluster, commits, reads, shard_jobs, read_visits))
        is_complete = shard_jobs.number < jobs.count[shard_jobs.worker]
        table["commit"] = -1
        table.loc[is_complete, "commit"] = jobs.find(shard_jobs.worker[is_complete], shard_jobs.number[is_complete])
        table["outcome"] = pd.Categorical.from_codes(commits["outcome"].astype(np.int8), OUTCOMES)
        tables.append(table.assign(shard=shard))
        open_tables.append(_open_reads(reads, shard_jobs, read_visits).assign(shard=shard))
    parts = pd.concat(tables, ignore_index=True).sort_values("commit_time", kind="stable", ignore_index=True)
    parts = parts.assign(part=np.arange(len(parts)))[list(PART_COLUMNS)]
    return {"parts": parts, "open_parts": pd.concat(open_tables, ignore_index=True)}


def _rows(cluster: Cluster, commits: Columns, reads: Columns, jobs: _PerWorker, read_visits: _PerWorker) -> Columns:
    """Return the columns of the trace, without the outcome."""
    makes = commits["outcome"] == APPLIED
    version = commits["version"].astype(np.int64)
    before = version - makes
    used = read_visits.find(jobs.worker, jobs.number)
    read_version = reads["read_version"][used].astype(np.int64)
    push_version, push_time = before, commits["commit_time"]
    if cluster.separate_reads and cluster.protocol == "read_then_write":
        there = np.isin(commits["outcome"], (APPLIED, BUFFERED, DISCARDED))  # else there was no message
        pulled = read_visits.find(jobs.worker[there], jobs.number[there] + 1)
        push_version, push_time = before.copy(), push_time.copy()
        push_version[there], push_time[there] = reads["read_version"][pulled], reads["read_time"][pulled]
    return {
        "commit": np.arange(len(jobs.worker)),
        "worker": jobs.worker,
        "job": jobs.number,
        "local_steps": np.array(cluster.windows)[jobs.worker],
        "read_version": read_version,
        "read_arrive_time": reads["read_arrive_time"][used],
        "read_serve_time": reads["read_serve_time"][used],
        "read_time": reads["read_time"][used],
        "start_time": commits["start_time"],
        "send_time": commits["send_time"],
        "push_version": push_version,
        "push_time": push_time,
        "arrive_time": commits["arrive_time"],
        "serve_time": commits["serve_time"],
        "commit_time": commits["commit_time"],
        "staleness": before - read_version,
        "version": version,
    }


class Lives(NamedTuple):
    """The workers at the end of a run without a server but with failures, ``[workers]``; and `Trace.spells`."""

    read_version: np.ndarray  #: from which version each computes
    ready_time: np.ndarray  #: since when it has waited for others
    is_away: np.ndarray
    spells: Sequence[float]  #: entry by entry


def trace_without_server(
    source: Source,
    rows: pd.DataFrame,
    sources: list[list[int]],
    weights: list[list[float]],
    open_start: np.ndarray,
    in_flight: list[tuple[int, int, float, float]],
    lives: Lives | None = None,
) -> Trace:
    """Return the trace of a run without a server from its record.

    ``rows`` has the columns of a trace that cannot be counted; with ``lives``, also ``read_version``, ``ready_time``,
    and the positions of ``outcome`` and ``failed_by``. ``open_start`` is when the computations began that are
    not done at the end, ``[workers]``, not a number where none has; ``in_flight`` has the rows of `Trace.in_flight`.
    """
    worker = rows["worker"].to_numpy(np.int64)
    time, start = rows["commit_time"].to_numpy(), rows["start_time"].to_numpy()
    jobs = _PerWorker(worker, source.workers)
    commit = np.arange(len(worker))
    if lives is None:
        previous, own, outcome = previous_rows(worker), np.full(source.workers, -1), np.full(len(worker), APPLIED)
        own[worker] = commit
        read_version, ready = previous + 1, np.where(previous < 0, 0.0, time[previous])
        lives = Lives(own + 1, np.where(own < 0, 0.0, time[own]), np.zeros(source.workers, bool), ())
        outcomes: tuple[str, ...] = OUTCOMES
        of_failures: Columns = {}
    else:
        read_version, ready = rows["read_version"].to_numpy(np.int64), rows["ready_time"].to_numpy()
        outcome, outcomes = rows["outcome"].to_numpy(np.int64), FAILING_OUTCOMES
        of_failures = {
            "failed_by": pd.Categorical.from_codes(rows["failed_by"].astype(np.int8), FAILED_BY),
            "incarnation": rows["incarnation"].to_numpy(np.int64),
            "restored": np.full(len(worker), -1),
            "restores": np.zeros(len(worker), np.int64),
        }
    version = np.cumsum(outcome == APPLIED)
    before = version - (outcome == APPLIED)
    columns = {
        "commit": commit,
        "worker": worker,
        "job": jobs.number,
        "local_steps": rows["local_steps"].to_numpy(np.int64),
        "read_version": read_version,
        "read_arrive_time": ready,
        "read_serve_time": start,
        "read_time": start,
        "start_time": start,
        "send_time": rows["send_time"].to_numpy(),
        "push_version": before,
        "push_time": time,
        "arrive_time": time,
        "serve_time": time,
        "commit_time": time,
        "staleness": before - read_version,
        "version": version,
        "outcome": pd.Categorical.from_codes(outcome.astype(np.int8), outcomes),
        "sources": sources,
        "weights": weights,
        "kept": rows["kept"].to_numpy(np.float64),
        "partner": rows["partner"].to_numpy(np.int64),
        **of_failures,
    }
    present = np.flatnonzero(~lives.is_away)
    open_reads = {
        "worker": present,
        "job": jobs.count[present],
        "read_version": lives.read_version[present],
        "read_arrive_time": lives.ready_time[present],
        "read_serve_time": open_start[present],
        "read_time": open_start[present],
    }
    flying = np.array(sorted(in_flight), np.float64).reshape(-1, 4)
    table = pd.DataFrame(flying, columns=list(no_messages())).astype({"row": np.int64, "taker": np.int64})
    spells = _table_of(lives.spells) if of_failures else no_spells()
    return Trace(pd.DataFrame(columns), source, pd.DataFrame(open_reads), in_flight=table, spells=spells)
