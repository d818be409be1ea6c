"""The phases of the workers of a trace: computing, travelling, waiting and absence.

Each time of a step or a read is a mark, at which the phase of its worker changes; a phase lasts
until the worker's next mark.
"""

from collections.abc import Collection

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.traces.columns import GOSSIP, RESENT, arrays_of
from asyncsim.traces.tables import Tables

#: The phases in words.
IN_WORDS = {
    #: Until the message departs, or arrives where its departure is not recorded.
    "computing": "computing",
    #: A message travels to the server, or waits for a link; with separate read_then_write visits
    #: the request to read, and after that visit both ways in between.
    "sending": "sending",
    #: At the server, before the service.
    "waiting": "waiting at the server",
    "served": "being served",
    #: After the service: a policy delays the reply. Without a server: not computing.
    "held": "held by the policy",
    #: The reply travels to the worker.
    "returning": "reply on its way",
    #: Crashed, or left, and no message of it travels or is at the server.
    "away": "away",
}
COMPUTING, SENDING, WAITING, SERVED, HELD, RETURNING, AWAY = range(len(IN_WORDS))
#: The end of an absence, among the marks.
_BACK = len(IN_WORDS)

#: The worker, the job, the time (s) and the phase of each instant at which a worker's phase
#: changes, and the step that it begins to compute, or -1.
Mark = tuple[np.ndarray, ...]


def phases(trace: Tables, workers: Collection[int]) -> pd.DataFrame:
    """Return the phases of some workers up to the last commit of the trace.

    Computations without a commit count, too: a worker that the server never serves waits to the
    end. A trace does not record their begins; the reply is assumed to travel as long as the median
    one. With several servers the times are of a message's last part.

    Returns
    -------
    pandas.DataFrame
        ``worker``, ``phase`` (categories: the names in `IN_WORDS`), ``begin`` and ``end`` (s), in
        the order of workers and times; ``step``: the row of a computation, or -1. In a prescribed
        trace the computations of a worker may overlap, and there are no other phases.

    Raises
    ------
    InputError
        For several servers with separate reads.
    """
    if trace.servers > 1 and trace.separate_reads:
        raise InputError(
            f"servers = {trace.servers}: with reads in visits of their own a worker is at several "
            "servers at once, and does not do one thing at a time; see Trace.parts, or simulate "
            "the protocol 'exchange'"
        )
    last = float(trace.steps["commit_time"].iloc[-1])
    if trace.protocol == "prescribed":
        computed = trace.steps.assign(step=range(len(trace)))
        begun = _begun(trace).assign(arrive_time=last, step=-1)
        table = pd.concat([computed, begun.rename(columns={"time": "start_time"})])
        table = table.rename(columns={"start_time": "begin", "arrive_time": "end"})
        table = table.assign(phase=COMPUTING)[["worker", "phase", "begin", "end", "step"]]
    else:
        table = _lasting(trace, _marks(trace), last)
    is_drawn = table["worker"].isin(workers) & (table["end"] > table["begin"])
    table = table[is_drawn].reset_index(drop=True)
    return table.assign(phase=pd.Categorical.from_codes(table["phase"], list(IN_WORDS)))


def _mark(
    table: pd.DataFrame, time: str, phase: int, rows: np.ndarray | slice = slice(None)
) -> Mark:
    """Return the marks of one phase: instants in a column of some rows of a table."""
    worker, job, begin = (column[rows] for column in arrays_of(table, "worker", "job", time))
    step = np.full(len(begin), -1)
    if time == "start_time":
        step = np.arange(len(table))[rows]
    return worker, job, begin, np.full(len(begin), phase, np.int8), step


def _marks(trace: Tables) -> list[Mark]:
    """Return the instants at which a worker's phase changes, in the order of a job's cycle."""
    steps, reads = trace.steps, trace.reads
    start_time, commit_time, push_read, failed_by = arrays_of(
        steps, "start_time", "commit_time", "push_read", "failed_by"
    )
    computing = [
        # A computation may be lost before its begin.
        _mark(steps, "start_time", COMPUTING, ~(start_time > commit_time)),
        _mark(_begun(trace), "time", COMPUTING),
    ]
    if trace.protocol == GOSSIP:
        return [*computing, *(_mark(steps, time, HELD) for time in ("send_time", "commit_time"))]
    # The next read of a stopped computation comes after it.
    pulled = push_read >= 0
    pulled[pulled] = reads["time"].to_numpy()[push_read[pulled]] <= commit_time[pulled]
    open_reads = reads[reads["is_open"] & (reads["shard"] < 0)]
    is_pull = np.zeros(len(reads), bool)
    is_pull[push_read[pulled]] = True
    # For the message of a computation that is not done.
    is_pull[open_reads.index[open_reads["worker"].duplicated()]] = True
    # A read for a message belongs to the cycle of the message's computation.
    reads = reads.assign(job=reads["job"] - is_pull)
    whole = (reads["shard"] < 0).to_numpy()
    is_visit = np.zeros(len(reads), bool)
    if trace.servers == 1:
        is_visit[trace.read_visits.index] = True
    ended = failed_by != RESENT  # otherwise the message departs again
    present = trace.present.groupby("worker", as_index=False)["arrive_time"].max()
    present = present.assign(job=np.iinfo(np.int64).max)
    return [
        _mark(reads, "arrive_time", WAITING, is_visit & ~is_pull),
        _mark(reads, "serve_time", SERVED, is_visit & ~is_pull),
        _mark(reads, "time", RETURNING, whole & ~is_pull),
        *computing,
        _mark(steps, "send_time", SENDING),
        _mark(reads, "arrive_time", WAITING, is_visit & is_pull),
        _mark(reads, "serve_time", SERVED, is_visit & is_pull),
        _mark(reads, "time", SENDING, whole & is_pull),
        _mark(steps, "arrive_time", WAITING, ended),
        _mark(steps, "serve_time", SERVED, ended),
        _mark(steps, "commit_time", RETURNING, ended & pulled),
        _mark(steps, "commit_time", HELD, ended & ~pulled),
        _mark(present, "arrive_time", SERVED if trace.discipline == "lock_free" else WAITING),
    ]


def _lasting(trace: Tables, marks: list[Mark], last: float) -> pd.DataFrame:
    """Return the phases between marks, with their ends."""
    begins = pd.DataFrame({"worker": np.arange(trace.workers), "job": -1, "begin": 0.0})
    absences = trace.absences[trace.absences["worker"] >= 0].assign(job=np.iinfo(np.int64).max)
    away = [_mark(absences, "begin", AWAY), _mark(absences, "end", _BACK)]
    columns = zip(_mark(begins, "begin", HELD), *marks, *away, strict=True)
    worker, job, begin, phase, step = (np.concatenate(column) for column in columns)
    # Small integers are sorted in linear time.
    order = np.lexsort((job, begin, worker.astype(np.min_scalar_type(trace.workers))))
    order = order[begin[order] <= last]
    worker, begin, phase, step = (column[order] for column in (worker, begin, phase, step))
    is_last = np.append(worker[1:] > worker[:-1], True)
    end = np.where(is_last, last, np.append(begin[1:], last))
    # A message travels, or is at the server, also while its worker is away.
    absent = np.cumsum((phase == AWAY).astype(int) - (phase == _BACK))
    absent -= np.append(0, absent[is_last])[worker]
    latest = np.maximum.accumulate(np.where(phase < AWAY, np.arange(len(phase)), 0))
    phase, step = phase[latest], step[latest]
    phase[(absent > 0) & (phase == HELD)] = AWAY
    table = {"worker": worker, "phase": phase, "begin": begin, "end": end, "step": step}
    return pd.DataFrame(table, copy=False)


def _begun(trace: Tables) -> pd.DataFrame:
    """Return the open reads, at the assumed begins of the computations not done at the end."""
    steps, reads = trace.steps, trace.reads
    is_ahead = reads["is_open"] & (reads["shard"] < 0)
    is_ahead[steps["read"]] = False
    begun = reads[is_ahead].drop_duplicates("worker")
    if trace.protocol == GOSSIP:
        return begun
    by_worker = steps.groupby("worker")["commit_time"]
    ready = np.fmax(reads["time"].to_numpy()[steps["read"]], by_worker.shift(1))
    travel_times = (steps["start_time"] - ready)[steps["job"] > 0]
    travel_time = float(travel_times.median()) if len(travel_times) else 0.0
    ready = np.fmax(begun["time"], by_worker.last().reindex(begun["worker"]).to_numpy())
    return begun.assign(time=ready + travel_time * (begun["job"] > 0))
