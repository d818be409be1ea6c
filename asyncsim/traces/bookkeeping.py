"""Make the rows of a trace from the record of a simulation: jobs, versions and staleness.

In every protocol and under every policy a worker's job ``j`` computes from its read ``j``, read 0 being version 0 at
time 0; also jobs that are discarded or cancelled are followed by a read. So one list of reads, in order for each
worker, tells all staleness.
"""

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.traces.columns import APPLIED, RESENT, Source, previous_rows, table_of
from asyncsim.traces.tables import Columns, messages_of_peers, messages_to_server
from asyncsim.traces.trace import Trace

#: What is recorded of each message; of a cancelled computation all times after ``send_time`` are its end.
COMMIT_RECORD = ("worker", "start_time", "send_time", "arrive_time", "serve_time", "commit_time")
#: The same with what became of it, and the version after it: a row of the trace.
STEP_RECORD = (*COMMIT_RECORD, "outcome", "version")
#: What is recorded besides under failures.
FAILURE_RECORD = ("job", "failed_by", "incarnation")
#: The record of a read.
READ_RECORD = ("worker", "version", "arrive_time", "serve_time", "time")


def trace_of(
    cluster: Cluster, seed: int, commits: Columns, reads: Columns, present: Columns, absences: Columns | None = None
) -> Trace:
    """Build the trace of a run from its record.

    Parameters
    ----------
    cluster, seed
        What ran.
    commits : columns
        `STEP_RECORD`, in the order in which services ended; under failures also `FAILURE_RECORD`.
    reads : columns
        `READ_RECORD`, in the same order, those of version 0 at time 0 included.
    present : columns
        ``worker`` and ``arrive_time`` of the visits that waited or were served at the last commit.
    absences : columns
        Those of `Trace.absences`.
    """
    worker = commits["worker"].astype(np.int64)
    of_worker = _PerWorker(reads["worker"].astype(np.int64), cluster.workers)
    job = commits["job"].astype(np.int64) if "job" in commits else _PerWorker(worker, cluster.workers).number
    read, push_read = of_worker.find(worker, job), None
    if cluster.separate_reads and cluster.protocol == "read_then_write":
        follows = job + 1 < of_worker.count[worker]
        push_read = np.where(follows, of_worker.find(worker, np.where(follows, job + 1, job)), -1)
    is_open = np.ones(len(of_worker.worker), bool)
    is_open[read if "failed_by" not in commits else read[commits["failed_by"] != RESENT]] = False
    local_steps = np.array(cluster.windows)[worker]
    columns = commits | {"worker": worker, "job": job, "local_steps": local_steps, "read": read}
    steps = table_of("steps", columns if push_read is None else columns | {"push_read": push_read})
    spells = table_of("absences", absences or {}, None if absences else 0)
    source = Source(
        workers=cluster.workers,
        protocol=cluster.protocol,
        window=max(cluster.windows),
        separate_reads=cluster.separate_reads,
        seed=seed,
        cluster=cluster,
    )
    read_table = table_of("reads", reads | {"job": of_worker.number, "is_open": is_open})
    return Trace(source, steps, read_table, messages_to_server(steps, present, spells), spells)


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
    names = ("arrive_time", "serve_time")
    reads = {"worker": commits["worker"], "version": version, **{name: commits[name] for name in names}}
    return with_first(reads | {"time": commits["commit_time"]}, cluster.workers)


def with_first(reads: Columns, workers: int) -> Columns:
    """Put the reads of version 0 at time 0, one for each worker, before others."""
    first = {name: np.zeros(workers) for name in READ_RECORD} | {"worker": np.arange(workers)}
    return {name: np.concatenate([first[name], reads[name]]) for name in READ_RECORD}


def trace_without_server(
    source: Source, rows: Columns, taken_up: Columns, in_flight: Columns, open_start: np.ndarray
) -> Trace:
    """Return the trace of a run without a server from its record.

    Parameters
    ----------
    source : Source
        Where it comes from.
    rows : columns
        ``worker``, ``local_steps``, ``start_time``, ``send_time``, ``commit_time``, ``partner``, ``kept``.
    taken_up, in_flight : columns
        As of `messages_of_peers`.
    open_start : float array, shape ``[workers]``
        When the computations began that are not done at the end; not a number where none has.
    """
    worker, time = rows["worker"].astype(np.int64), np.asarray(rows["commit_time"])
    jobs, previous, commit = _PerWorker(worker, source.workers), previous_rows(worker), np.arange(len(worker))
    last = np.full(source.workers, -1)
    last[worker] = commit
    before, start = np.concatenate([previous, last]), np.concatenate([rows["start_time"], open_start])
    reads = {
        "worker": np.concatenate([worker, np.arange(source.workers)]),
        "job": np.concatenate([jobs.number, jobs.count]),
        "version": before + 1,
        "arrive_time": np.where(before < 0, 0.0, time[before]),
        "serve_time": start,
        "time": start,
        "is_open": np.arange(len(before)) >= len(worker),
    }
    counted = {"worker": worker, "job": jobs.number, "read": commit, "version": commit + 1}
    steps = table_of("steps", {**rows, **counted, "arrive_time": time, "serve_time": time})
    messages = messages_of_peers(worker, np.asarray(rows["kept"]), taken_up, in_flight)
    return Trace(source, steps, table_of("reads", reads), messages, table_of("absences", {}, 0))
