"""The plan of a replay whose messages are split among servers: each shard has an ordinary plan.

A *job* is a worker's computation. It reads each shard of the parameters at its own version, and
its message is committed in *parts*, each at its shard's server. The parts of a shard are the rows
of an ordinary trace, whose local steps stand in a table. A *round* computes jobs and enters their
local steps; then each shard commits its parts up to the first one of a later job.

A position counts the accepted parts at all servers, in the order of their commits. A job can be
computed at a position if all its reads and the last part of its worker's previous job lie before;
it must be computed before its first part. So rounds are cut as the pieces of
`asyncsim.replays.waves`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.methods.method import Method
from asyncsim.problems.partition import Partition, partition
from asyncsim.problems.problem import Problem
from asyncsim.replays.plan import Minibatches, Plan, chunk_size, members, visits_at
from asyncsim.replays.state import JobPieces, Layout, PlannedRounds
from asyncsim.replays.tuning import Form, tuning
from asyncsim.replays.waves import Reads, Waves, allocate, cut, find_waves, previous_commit
from asyncsim.traces.columns import ACCEPTED, APPLIED, arrays_of, table_of
from asyncsim.traces.trace import Trace

#: Jobs in a round of the form "single", which computes them one by one.
_SINGLE_ROUND = 4


class Jobs(NamedTuple):
    """The jobs of a trace, in the order of their first parts, and their accepted parts.

    Attributes
    ----------
    table : pandas.DataFrame
        Of each job its ``worker``, its number among the worker's own, ``job``, ``local_steps``, and
        the positions of its ``first`` and ``last`` part.
    parts : pandas.DataFrame
        As of `Trace.parts`, with ``push_read`` and the ``number`` of the job.
    read : int array, shape ``[jobs, shards]``
        The rows of `Trace.reads` with the versions that the job reads.
    of_message : int array, shape ``[messages]``
        The job of each message.
    parts_at_end : int array, shape ``[messages]``
        The number of parts at the end of each message; a message may end with a discarded part.
    depends_on : int array, shape ``[parts]``
        Running maximum of the first position at which the part's job can be computed.
    """

    table: pd.DataFrame
    parts: pd.DataFrame
    read: np.ndarray
    of_message: np.ndarray
    parts_at_end: np.ndarray
    depends_on: np.ndarray


def find_jobs(trace: Trace) -> Jobs:
    """Find the jobs with accepted parts; the trace is an accepted one."""
    assert trace.cluster is not None
    push_read = trace.messages.loc[trace.messages["commit_time"].notna(), "push_read"]
    every, of_job = trace.parts.assign(push_read=push_read.to_numpy()), ["worker", "job"]
    is_accepted = every["outcome"].isin(ACCEPTED).to_numpy()
    parts = every[is_accepted].reset_index(drop=True)
    position = parts.assign(position=parts.index).groupby(of_job, sort=False)["position"]
    number, table = position.ngroup(), position.agg(first="min", last="max").reset_index()
    worker, first, last = (table[name].to_numpy() for name in ("worker", "first", "last"))
    index = pd.MultiIndex.from_frame(table[of_job])
    read = trace.reads.reset_index().pivot(index=of_job, columns="shard", values="index")
    read = read.loc[index, range(trace.servers)].to_numpy(int)
    # A job is computed after the commits that it reads, and after its worker's previous job.
    previous = previous_commit(worker)
    need = np.where(previous >= 0, last[previous] + 1, 0)
    for shard, version in enumerate(trace.reads["version"].to_numpy()[read].T):
        completes = (parts["shard"] == shard) & (parts["outcome"] == "applied")
        need = np.maximum(need, np.r_[0, 1 + np.flatnonzero(completes)][version])
    ended = every[every["commit"] >= 0].groupby("commit")["part"].max()
    is_first = first[number] == parts.index
    return Jobs(
        table.assign(local_steps=np.array(trace.cluster.windows)[worker]),
        parts.assign(number=number),
        read,
        index.get_indexer(pd.MultiIndex.from_frame(trace.frame[of_job])),
        # At one instant a message may be complete before an earlier row is: then with that row.
        np.maximum.accumulate(np.cumsum(is_accepted)[ended]),
        np.maximum.accumulate(np.where(is_first, need[number], 0)),
    )


def trace_of_shard(trace: Trace, jobs: Jobs, shard: int) -> tuple[Trace, np.ndarray, np.ndarray]:
    """Return a shard as an ordinary trace: its parts, and rows of all other jobs behind the end.

    The other jobs only read the shard: their part is discarded, or comes after the end.

    Returns
    -------
    trace : Trace
    job : int array, shape ``[rows]``
    used_at : int array, shape ``[rows]``
        The row before which the read is used for the last time.
    """
    parts = jobs.parts[jobs.parts["shard"] == shard]
    others = np.setdiff1d(jobs.table.index, parts["number"])
    job = np.r_[parts["number"], others]
    outcome, push_read, time = arrays_of(parts, "outcome", "push_read", "commit_time")
    outcome = np.r_[outcome, np.full(len(others), APPLIED)]
    steps = {
        **jobs.table.iloc[job],
        "read": jobs.read[job, shard],
        "push_read": np.r_[push_read, np.full(len(others), -1)],
        "commit_time": np.r_[time, np.full(len(others), np.nan)],
        "outcome": outcome,
        "version": np.cumsum(outcome == APPLIED),
    }
    first = jobs.table["first"].to_numpy()[others]
    used_at = np.r_[: len(parts), np.searchsorted(parts.index, first)]
    messages = trace.messages.head(0)
    return replace(trace, steps=table_of("steps", steps), messages=messages), job, used_at


def waves_of_servers(trace: Trace) -> list[Waves]:
    """Find the dependencies of each server's commits; the trace is an accepted one."""
    if trace.servers == 1:
        return [find_waves(trace)]
    jobs = find_jobs(trace)
    shards = (trace_of_shard(trace, jobs, shard) for shard in range(trace.servers))
    return [find_waves(of_shard, used_at=used_at) for of_shard, _, used_at in shards]


def partition_of(problem: Problem, servers: int | Sequence[str]) -> Partition:
    """Return the shards of a cluster's servers: equal runs of the vector, or groups of tensors."""
    if isinstance(servers, int):
        bounds = [problem.parameter_count * shard // servers for shard in range(servers + 1)]
        return Partition(tuple(map(str, range(servers))), tuple(bounds), tuple(range(servers)))
    return partition(problem.shapes, servers, "servers")


class ShardedPlan:
    """The rounds of a trace, and their arrays chunk by chunk.

    Parameters and attributes as of `asyncsim.replays.plan.Plan`; ``stops`` count messages, and no
    recorder looks at whole vectors.
    """

    def __init__(
        self,
        trace: Trace,
        problem: Problem,
        seeds: Sequence[int],
        stops: np.ndarray,
        look_every: Sequence[int],
        dtype: Any,
        device: Any,
        form: Form,
        same_reply: bool = False,
    ):
        assert trace.cluster is not None and not look_every
        self._trace, self._dtype = trace, dtype
        self._jobs = jobs = find_jobs(trace)
        self.stops = stops
        self.restores: list[Any] = []
        self.changes: dict[int, Any] = {}
        self.looks, self.looked_at = np.zeros((0, len(trace)), bool), np.zeros(len(trace), bool)
        self._partition = partition_of(problem, trace.cluster.servers)
        tuned, starts = tuning(device.platform, problem.parameter_count), self._position(stops)
        first, last = (jobs.table[name].to_numpy() for name in ("first", "last"))
        sizes = tuned.piece_sizes if form == "batch" else (_SINGLE_ROUND,)

        def cut_in(size: int) -> np.ndarray:
            return cut(jobs, len(jobs.parts), (Reads(first + 1, first),), size, starts)

        size = min(sizes, key=lambda size: len(cut_in(size)) * (size + tuned.piece_overhead))
        self._cuts = cuts = cut_in(size)
        self._chunk = chunk_size(cuts, starts, tuned.chunk)
        #: The messages that are complete before each round.
        self._complete = np.searchsorted(jobs.parts_at_end, cuts, side="right")
        end = last.copy()
        np.maximum.at(end, jobs.of_message, jobs.parts_at_end - 1)
        begin = cuts[np.searchsorted(cuts, first, side="right") - 1]
        self._place, self._places = allocate(begin, end)
        # A piece has all jobs of a round; in the form "single" one.
        self._form, job_ends = form, np.searchsorted(first, cuts)
        self._size, self._job_cuts = size, np.unique(job_ends)
        if form == "single":
            self._size, self._job_cuts = 1, np.arange(len(first) + 1)
        #: The pieces of jobs, and of each shard, before each round.
        self._ends = [np.searchsorted(self._job_cuts, job_ends)]
        self._plans, read_slots = list[Plan](), []
        step = jobs.table.groupby("worker").cumcount().to_numpy()
        first_shard = jobs.parts["shard"].to_numpy()[first]
        self._columns: dict[str, Any] = {}
        for shard in range(trace.servers):
            of_shard, job, used_at = trace_of_shard(trace, jobs, shard)
            of_rounds = np.searchsorted(np.flatnonzero(jobs.parts["shard"] == shard), cuts)
            plan = Plan(
                *(of_shard, problem, seeds, of_rounds, (), dtype, device, form, same_reply),
                examples=_looking_up(self._place[job]),
                used_at=used_at,
            )
            plan.columns["worker_step"] = step[job]
            row = np.argsort(job)
            # The visit of a job is that of its first part.
            for name, column in plan.columns.items():
                of_others = self._columns.get(name, 0)
                self._columns[name] = np.where(first_shard == shard, column[row], of_others)
            read_slots.append(plan.waves.slot[row])
            self._plans.append(plan)
            self._ends.append(np.searchsorted(plan.cuts, of_rounds))
        self._read_slots = np.stack(read_slots, -1)
        self._minibatches = Minibatches(problem, seeds, trace.workers, trace.window, jobs.table)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the replay's state."""
        slots = tuple((plan.waves.slots, plan.waves.push_slots) for plan in self._plans)
        return {"workers": self._trace.workers, "slots": slots, "places": self._places}

    def layout(self, method: Method) -> Layout:
        """Return the program's layout; raise InputError if the method's reply cannot be exact."""
        return Layout(
            form=self._form,
            piece_size=self._size,
            workers=self._trace.workers,
            reads="none",
            window=self._trace.window,
            windows_differ=self._trace.windows_differ,
            partition=self._partition,
            shards=tuple(plan.layout(method) for plan in self._plans),
        )

    def chunks(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, PlannedRounds]]:
        """Yield the messages that are complete before and after a chunk's rounds, and the rounds'
        arrays.
        """
        first, last = np.searchsorted(self._cuts, self._position(np.array([start, stop])))
        for begin in range(first, last, self._chunk):
            end = min(begin + self._chunk, last)
            yield self._complete[begin : end + 1], self._rounds(np.array([begin, end]))

    def _position(self, messages: np.ndarray) -> np.ndarray:
        """Return the number of parts at the end of a number of messages."""
        return np.r_[0, self._jobs.parts_at_end][messages]

    def _rounds(self, bounds: np.ndarray) -> PlannedRounds:
        """Fill in the arrays of consecutive rounds, padded to a whole chunk."""
        rounds = members(bounds, 0, True, self._chunk)

        def of_rounds(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return members(ends, *rounds, int(np.diff(ends).max(initial=1)))

        of_jobs, *of_shards = map(of_rounds, self._ends)
        job, valid = members(self._job_cuts, *of_jobs, self._size)
        message, _ = of_rounds(self._complete)
        jobs = JobPieces(
            valid.sum(-1).astype(np.int32),
            visits_at(self._columns, job, self._dtype),
            self._jobs.table["job"].to_numpy()[job].astype(np.int32),
            self._minibatches.rows(job, valid),
            self._place[job].astype(np.int32),
            self._read_slots[job].astype(np.int32),
        )
        return PlannedRounds(
            jobs,
            tuple(plan.pieces(*of) for plan, of in zip(self._plans, of_shards, strict=True)),
            self._place[self._jobs.of_message[message]].astype(np.int32),
        )


def _looking_up(place: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the function from the rows of a shard's trace to their places in the table."""
    return lambda row, valid: place[row].astype(np.int32)
