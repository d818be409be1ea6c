"""Build the tables of a trace from the record of a simulation: jobs, versions and staleness.

In every protocol and under every policy a worker's job ``j`` computes from its read ``j``, read 0
being version 0 at time 0; also jobs that are discarded or cancelled are followed by a read. So one
list of reads, in order for each worker, determines all staleness.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from asyncsim.clusters.cluster import Cluster
from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    RESENT,
    Source,
    arrays_of,
    previous_rows,
    table_of,
)
from asyncsim.traces.samples import RolloutTables
from asyncsim.traces.tables import Columns, restore_counts, versions_of_shards
from asyncsim.traces.trace import Trace

#: Records of each message; of a cancelled computation all times after ``send_time`` are
#: its end.
COMMIT_RECORD = ("worker", "start_time", "send_time", "arrive_time", "serve_time", "commit_time")
#: The same with what became of it, and the version after it: a row of the trace.
STEP_RECORD = (*COMMIT_RECORD, "outcome", "version")
#: Further records under failures.
FAILURE_RECORD = ("job", "failed_by", "incarnation")
#: The record of a read.
READ_RECORD = ("worker", "version", "arrive_time", "serve_time", "time")


def trace_of(
    cluster: Cluster,
    seed: int,
    commits: Columns,
    reads: Columns,
    present: Columns,
    absences: Columns | None = None,
    shards: Sequence[tuple[Columns, Columns]] = (),
    rollouts: RolloutTables | None = None,
) -> Trace:
    """Build the trace of a run from its record.

    Parameters
    ----------
    cluster, seed
        The cluster and the seed of the run.
    commits : columns
        `STEP_RECORD`, in the order in which services ended; under failures also `FAILURE_RECORD`.
    reads : columns
        `READ_RECORD`, in the same order, with the reads of version 0 at time 0.
    present : columns
        ``worker`` and ``arrive_time`` of the visits that waited or were served at the last commit,
        and with several servers their ``shard``.
    absences : columns
        The columns of `Trace.absences`.
    shards : sequence
        With several servers, ``commits`` and ``reads`` of the parts of messages at each of them.
    """
    columns, read_columns = _consume(cluster, commits, reads)
    steps = table_of("steps", columns)
    spells = table_of("absences", absences or {}, None if absences else 0)
    if shards:
        part_tables, read_tables, count = [], [read_columns], len(read_columns["worker"])
        for shard, record in enumerate(shards):
            of_shard = _consume(cluster, *record, shard, count)
            part_tables.append(of_shard[0])
            read_tables.append(of_shard[1])
            count += len(of_shard[1]["worker"])
        parts, read_columns = _joined(part_tables), _joined(read_tables)
        order = np.argsort(parts["commit_time"], kind="stable")
        parts = {name: values[order] for name, values in parts.items()}
        messages = _PerWorker(columns["worker"], cluster.workers)
        worker = parts["worker"]
        job = parts["job"]
        is_complete = job < messages.count[worker]
        parts["step"] = np.full(len(worker), -1)
        parts["step"][is_complete] = messages.find(worker[is_complete], job[is_complete])
        message_table = messages_of_parts(parts, present)
    else:
        message_table = messages_to_server(steps, present, spells)
    return Trace(
        workers=cluster.workers,
        protocol=cluster.protocol,
        window=max(cluster.windows),
        separate_reads=cluster.separate_reads,
        seed=seed,
        cluster=cluster,
        steps=steps,
        reads=table_of("reads", read_columns),
        messages=message_table,
        absences=spells,
        rollouts=rollouts,
    )


def _joined(tables: list[Columns]) -> Columns:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _consume(
    cluster: Cluster, commits: Columns, reads: Columns, shard: int = -1, count: int = 0
) -> tuple[Columns, Columns]:
    """Return the columns of steps or of a shard's parts, and of reads numbered from ``count``."""
    worker = commits["worker"].astype(np.int64)
    of_worker = _PerWorker(reads["worker"].astype(np.int64), cluster.workers)
    job = (
        commits["job"].astype(np.int64)
        if "job" in commits
        else _PerWorker(worker, cluster.workers).number
    )
    read, push_read = of_worker.find(worker, job), np.full(len(job), -1)
    if cluster.separate_reads and cluster.protocol == "read_then_write":
        follows = job + 1 < of_worker.count[worker]
        push_read = np.where(
            follows, of_worker.find(worker, np.where(follows, job + 1, job)) + count, -1
        )
    is_open = np.ones(len(of_worker.worker), bool)
    is_open[read if "failed_by" not in commits else read[commits["failed_by"] != RESENT]] = False
    columns = {
        "worker": worker,
        "job": job,
        "local_steps": np.array(cluster.windows)[worker],
        "read": read + count,
    }
    columns |= {"push_read": push_read, "shard": np.full(len(job), shard)}
    of_reads = {"job": of_worker.number, "is_open": is_open, "shard": np.full(len(is_open), shard)}
    return commits | columns, reads | of_reads


class _PerWorker:
    """Visits in order of time, grouped by worker.

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
    """Return the reads of the commits' visits, one each: of the version after it, or before it."""
    version = commits["version"]
    if cluster.protocol == "read_then_write":
        version = version - (commits["outcome"] == APPLIED)
    names = ("arrive_time", "serve_time")
    reads = {
        "worker": commits["worker"],
        "version": version,
        **{name: commits[name] for name in names},
    }
    return with_first(reads | {"time": commits["commit_time"]}, cluster.workers)


def with_first(reads: Columns, workers: int) -> Columns:
    """Put the reads of version 0 at time 0, one for each worker, before others."""
    first = {name: np.zeros(workers) for name in READ_RECORD} | {"worker": np.arange(workers)}
    return {name: np.concatenate([first[name], reads[name]]) for name in READ_RECORD}


def trace_without_server(
    source: Source,
    rows: Columns,
    taken_up: Columns,
    in_flight: Columns,
    open_reads: Columns,
    absences: Columns | None = None,
) -> Trace:
    """Build the trace of a run without a server from its record.

    Parameters
    ----------
    source : Source
        Where it comes from.
    rows : columns
        ``worker``, ``local_steps``, ``start_time``, ``send_time``, ``commit_time``, ``partner``,
        ``kept``; under failures also ``read_version``, ``ready_time``, ``outcome``, ``failed_by``,
        ``incarnation``.
    taken_up, in_flight : columns
        As of `messages_of_peers`.
    open_reads : columns
        ``start_time`` of each worker's computation that is not done at the end, ``[workers]``, not
        a number where none has begun; under failures also ``read_version``, ``ready_time`` and
        ``is_away``.
    absences : columns
        The columns of `Trace.absences`.
    """
    worker, time = rows["worker"].astype(np.int64), np.asarray(rows["commit_time"])
    jobs = _PerWorker(worker, source.workers)
    commit = np.arange(len(worker))
    present = np.arange(source.workers)
    if absences is None:
        last = np.full(source.workers, -1)
        last[worker] = commit
        before = np.concatenate([previous_rows(worker), last])
        read_version = before + 1
        ready = np.where(before < 0, 0.0, time[before])
        is_applied = np.ones(len(worker), int)
    else:
        present = np.flatnonzero(~open_reads["is_away"])
        read_version, ready = (
            np.concatenate([rows[name], open_reads[name][present]])
            for name in ("read_version", "ready_time")
        )
        is_applied = rows["outcome"] == APPLIED
    start = np.concatenate([rows["start_time"], open_reads["start_time"][present]])
    reads = {
        "worker": np.concatenate([worker, present]),
        "job": np.concatenate([jobs.number, jobs.count[present]]),
        "version": read_version,
        "arrive_time": ready,
        "serve_time": start,
        "time": start,
        "is_open": np.arange(len(start)) >= len(worker),
    }
    counted = {
        "worker": worker,
        "job": jobs.number,
        "read": commit,
        "version": np.cumsum(is_applied),
    }
    steps = table_of("steps", {**rows, **counted, "arrive_time": time, "serve_time": time})
    return Trace(
        **vars(source),
        steps=steps,
        reads=table_of("reads", reads),
        messages=messages_of_peers(worker, taken_up, in_flight),
        absences=table_of("absences", absences or {}, None if absences else 0),
    )


def messages_to_server(
    steps: pd.DataFrame, present: Columns, absences: pd.DataFrame
) -> pd.DataFrame:
    """Return the messages that a server took up, and the waiting visits, which have no step yet.

    ``present`` has ``worker`` and ``arrive_time`` of these.
    """
    outcome, version, worker, arrive_time = arrays_of(
        steps, "outcome", "version", "worker", "arrive_time"
    )
    step, applied = np.flatnonzero(outcome <= BUFFERED), np.flatnonzero(outcome == APPLIED)
    completed_by = np.full(version.max(initial=0) + 2, -1)
    completed_by[version[applied]] = applied
    # A version may be completed between two rows, by a death, a cut trial or a grace window: its
    # last message has completed it. A restore makes a version, too, without messages.
    last = np.r_[0, version][:-1]
    new_versions = version - (outcome == APPLIED) - last
    rows = np.flatnonzero(new_versions > restore_counts(absences, len(steps)))
    completed_by[last[rows] + 1] = step[np.searchsorted(step, rows) - 1]
    by = completed_by[version[step] + (outcome[step] == BUFFERED)]
    nowhere = np.full(len(present["worker"]), -1)
    return table_of(
        "messages",
        {
            "worker": np.concatenate([worker[step], present["worker"]]),
            "step": np.concatenate([step, nowhere]),
            "by": np.concatenate([by, nowhere]),
            "arrive_time": np.concatenate([arrive_time[step], present["arrive_time"]]),
        },
    )


def messages_of_parts(parts: Columns, present: Columns) -> pd.DataFrame:
    """Return the parts of messages in the order of commits, and the visits that wait for a server.

    ``parts`` has the columns of `Trace.messages` but ``by``; ``present`` has ``worker``, ``shard``,
    ``arrive_time``.
    """
    table = table_of("messages", parts)
    step, shard, outcome = arrays_of(table, "step", "shard", "outcome")
    version = versions_of_shards(table)
    completed_by = np.full((shard.max(initial=0) + 1, version.max(initial=0) + 2), -1)
    is_applied = outcome == APPLIED
    completed_by[shard[is_applied], version[is_applied]] = step[is_applied]
    by = np.where(outcome <= BUFFERED, completed_by[shard, version + (outcome == BUFFERED)], -1)
    return pd.concat([table.assign(by=by), table_of("messages", present)], ignore_index=True)


def messages_of_peers(worker: np.ndarray, taken_up: Columns, in_flight: Columns) -> pd.DataFrame:
    """Return the messages between workers.

    Parameters
    ----------
    worker : array, shape ``[steps]``
        The worker of each step.
    taken_up : columns
        ``step``, ``by``, ``weight`` and, if known, ``arrive_time``.
    in_flight : columns
        ``step``, ``taker`` (-1 of a message that was lost with its taker), ``weight`` and
        ``arrive_time``.
    """
    tables = []
    for columns, keys in (
        (taken_up, ("step", "by")),
        (in_flight, ("arrive_time", "weight", "taker", "step")),
    ):
        order = np.lexsort([columns[key] for key in keys])
        columns = {name: np.asarray(values)[order] for name, values in columns.items()}
        tables.append(table_of("messages", columns, len(order)))
    messages = pd.concat(tables, ignore_index=True)
    step, by, taker = arrays_of(messages, "step", "by", "taker")
    return messages.assign(worker=worker[step], taker=np.where(by < 0, taker, worker[by]))
