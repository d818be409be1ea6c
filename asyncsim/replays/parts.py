"""The plan of a replay whose messages are split among servers: the parts and their dependencies.

A *job* is a worker's computation. It reads each shard of the parameters at its own version, and
its message is committed in *parts*, each at its shard's server. A position counts the accepted
parts at all servers, in the order of their commits. A job can be computed at a position if all its
reads and the last part of its worker's previous job lie before; it must be computed before its
first part. So the cuts of `asyncsim.replays.waves` hold for parts: a piece computes its jobs at
once, and then commits the parts of these and of earlier jobs.

Within a piece the parts of a shard depend on each other, and not on other shards' parts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.methods.method import Method, Visit
from asyncsim.problems.partition import Partition, partition
from asyncsim.problems.problem import Problem
from asyncsim.replays.plan import Minibatches, chunk_size, places, visits_at
from asyncsim.replays.state import Layout
from asyncsim.replays.suitable import require_replies
from asyncsim.replays.tuning import Form, tuning
from asyncsim.replays.waves import Reads, allocate, cut, previous_commit
from asyncsim.traces.columns import ACCEPTED
from asyncsim.traces.trace import Trace

#: Jobs and parts of each shard in a piece of the form "single", which computes them one by one.
_SINGLE_PIECE = 4


class Dependencies(NamedTuple):
    """The dependencies of the accepted parts; arrays have shape ``[parts]`` unless noted.

    Attributes
    ----------
    shard, job : int array
        Jobs are numbered in the order of their first parts.
    worker, number, first, last : int array, shape ``[jobs]``
        The worker of each job and the job's number among the worker's own; the positions of its
        first and last part.
    parts_at_end : int array, shape ``[messages]``
        The number of parts at the end of each message; a message may end with a discarded part.
    message_job : int array, shape ``[messages]``
    read_slot : int array, shape ``[jobs, shards]``
        The slot of the shard with the version that the job reads.
    push_slot : int array
        The slot of the version with which the part is formed.
    write_slot : int array
        The slot of the version that the part completes; ``slots`` if no job reads it.
    slots : tuple of int
        For each shard.
    reads : {"after", "separate"}
        Whether each read is of the version that the worker's previous part completed.
    separate_pushes : bool
        Whether some part is formed with another version than the one before its commit.
    depends_on : int array
        Running maximum of the first position at which the part's job can be computed.
    """

    shard: np.ndarray
    job: np.ndarray
    worker: np.ndarray
    number: np.ndarray
    first: np.ndarray
    last: np.ndarray
    parts_at_end: np.ndarray
    message_job: np.ndarray
    read_slot: np.ndarray
    push_slot: np.ndarray
    write_slot: np.ndarray
    slots: tuple[int, ...]
    reads: str
    separate_pushes: bool
    depends_on: np.ndarray


def find_parts(trace: Trace) -> Dependencies:
    """Find the dependencies of a trace's accepted parts; the trace is an accepted one."""
    all_parts = trace.parts
    is_accepted = all_parts["outcome"].isin(ACCEPTED).to_numpy()
    parts = {name: column.to_numpy() for name, column in all_parts[is_accepted].items()}
    shard, servers, position = parts["shard"], trace.servers, np.arange(is_accepted.sum())
    jobs_of_worker = int(trace.reads["job"].max()) + 1

    def key(table: Any) -> Any:
        return table["worker"] * jobs_of_worker + table["job"]

    job, keys = pd.factorize(key(parts))
    (worker, number), by_key = np.divmod(keys, jobs_of_worker), pd.Index(keys)
    newest = np.maximum.accumulate(job)
    first, last = np.flatnonzero(np.diff(newest, prepend=-1)), np.zeros(len(keys), int)
    last[job] = position  # of equal indices the last assignment stays
    message_job = by_key.get_indexer(key(trace.frame))
    ended = all_parts[all_parts["commit"] >= 0].groupby("commit")["part"].max().to_numpy()
    # At one instant a message may be complete before an earlier row is: then with that row.
    parts_at_end = np.maximum.accumulate(np.cumsum(is_accepted)[ended])
    reads = trace.reads[trace.reads["shard"] >= 0]
    reader = by_key.get_indexer(key(reads))
    read_version = np.zeros((len(keys), servers), int)
    read_version[reader[reader >= 0], reads["shard"][reader >= 0]] = reads["version"][reader >= 0]
    before = parts["version"] - (parts["outcome"] == "applied")
    separate_pushes = bool((parts["push_version"] != before).any())
    previous = previous_commit(worker)
    # The position after which the versions of each shard exist, and the last one that needs them.
    read_slot, push_slot, write_slot = np.zeros_like(read_version), 0 * job, 0 * job
    need, slots, is_after = np.where(previous >= 0, last[previous] + 1, 0), [], True
    for server in range(servers):
        positions = np.flatnonzero(shard == server)
        completes = positions[parts["outcome"][positions] == "applied"]
        exists_at = np.r_[0, completes + 1]
        versions = read_version[:, server]
        last_use = np.full(len(exists_at), -1)
        part_at = first.copy()  # a job whose part is discarded reads the shard for its gradient
        part_at[job[positions]] = positions
        np.maximum.at(last_use, versions, np.maximum(first, part_at))
        if separate_pushes:
            np.maximum.at(last_use, parts["push_version"][positions], positions)
        # Unread versions share one more slot.
        is_used = last_use >= 0
        slot, count = allocate(exists_at[is_used], last_use[is_used])
        slot_of = np.full(len(exists_at), count)
        slot_of[is_used] = slot
        slots.append(count)
        read_slot[:, server] = slot_of[versions]
        push_slot[positions] = slot_of[parts["push_version"][positions]]
        write_slot[positions] = count
        write_slot[completes] = slot_of[1:]
        read_at = exists_at[versions]
        np.maximum(need, read_at, out=need)
        after_previous = np.where(previous >= 0, part_at[previous] + 1, 0)
        is_after &= bool((read_at == after_previous).all())
    depends_on = np.maximum.accumulate(np.where(first[job] == position, need[job], 0))
    return Dependencies(
        shard,
        job,
        worker,
        number,
        first,
        last,
        parts_at_end,
        message_job,
        read_slot,
        push_slot,
        write_slot,
        tuple(slots),
        "after" if is_after else "separate",
        separate_pushes,
        depends_on,
    )


class PartsOfPiece(NamedTuple):
    """The parts of a shard in consecutive pieces; leaves have leading axes ``pieces, piece_size``.

    ``size`` has shape ``[pieces]``, and ``message_slot`` is where the message of the part waits.
    """

    size: Any
    visit: Visit
    message_slot: Any
    read_slot: Any
    push_slot: Any
    write_slot: Any


class ShardedPieces(NamedTuple):
    """The plan of consecutive pieces; leaves have a leading axis ``pieces``.

    Attributes
    ----------
    size : int array, shape ``[pieces]``
        Jobs in the piece.
    visit : Visit
        Of the first part of each job, ``[pieces, piece_size]``.
    job, message_slot : int array, shape ``[pieces, piece_size]``
        The number of each job among its worker's own, and the slot that its message waits in.
    read_slot : int array, shape ``[pieces, piece_size, shards]``
    rows : int array
        The examples of each job.
    parts : tuple of PartsOfPiece
        For each shard.
    complete : int array, shape ``[pieces, messages]``
        The slots of the messages that are complete after the piece.
    """

    size: Any
    visit: Visit
    job: Any
    message_slot: Any
    read_slot: Any
    rows: Any
    parts: tuple[PartsOfPiece, ...]
    complete: Any


def partition_of(problem: Problem, servers: int | Sequence[str]) -> Partition:
    """Return the shards of a cluster's servers: equal runs of the vector, or groups of tensors."""
    if isinstance(servers, int):
        bounds = [problem.parameter_count * shard // servers for shard in range(servers + 1)]
        return Partition(tuple(map(str, range(servers))), tuple(bounds), tuple(range(servers)))
    return partition(problem.shapes, servers, "servers")


class ShardedPlan:
    """The accepted parts of a trace cut into pieces, and their arrays chunk by chunk.

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
    ):
        assert trace.cluster is not None and not look_every
        self._parts = parts = find_parts(trace)
        self.stops = stops
        self.restores: list[Any] = []
        self.changes: dict[int, Any] = {}
        self.looks, self.looked_at = np.zeros((0, len(trace)), bool), np.zeros(len(trace), bool)
        self._shards = partition_of(problem, trace.cluster.servers)
        self._of_shard = [np.flatnonzero(parts.shard == shard) for shard in range(trace.servers)]
        kinds = [Reads(positions + 1, positions) for positions in (parts.first, *self._of_shard)]
        tuned = tuning(device.platform, problem.parameter_count)
        sizes = tuned.piece_sizes if form == "batch" else (_SINGLE_PIECE,)
        starts = self._position(stops)

        def cuts(size: int) -> np.ndarray:
            return cut(parts, len(parts.job), tuple(kinds), size, starts)

        self.piece_size = min(
            sizes, key=lambda size: (len(cuts(size)) - 1) * (size + tuned.piece_overhead)
        )
        self._cuts = cuts(self.piece_size)
        self._form: Form = "single" if self.piece_size == 1 and device.platform == "cpu" else form
        self._chunk = chunk_size(self._cuts, starts, tuned.chunk)
        #: The messages that are complete before each piece.
        self._complete = np.searchsorted(parts.parts_at_end, self._cuts, side="right")
        self._most_complete = int(np.diff(self._complete).max())
        end = parts.last.copy()
        np.maximum.at(end, parts.message_job, parts.parts_at_end - 1)
        piece = np.searchsorted(self._cuts, parts.first, side="right") - 1
        self._message_slot, self._message_slots = allocate(self._cuts[piece], end)
        self._minibatches = Minibatches(problem, seeds, trace.workers, trace.window)
        self._dtype, self._trace = dtype, trace
        self._columns = self._visit_columns(trace)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the replay's state."""
        slots = {"slots": self._parts.slots, "message_slots": self._message_slots}
        return {**slots, "workers": self._trace.workers}

    def layout(self, method: Method) -> Layout:
        """Return the program's layout; raise InputError if the method's reply cannot be exact."""
        # A server forms a reply in the visit that commits a part, for every method.
        require_replies(method._replace(same_reply=False), self._parts.reads)
        return Layout(
            form=self._form,
            piece_size=self.piece_size,
            workers=self._trace.workers,
            reads="after",
            separate_pushes=self._parts.separate_pushes,
            window=self._trace.window,
            windows_differ=self._trace.windows_differ,
            version_messages=1 if method.combine is None else self._columns["messages"].max(),
            shards=self._shards,
        )

    def chunks(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, ShardedPieces]]:
        """Yield the messages that are complete before and after a chunk's pieces, and the pieces'
        arrays.
        """
        first, last = np.searchsorted(self._cuts, self._position(np.array([start, stop])))
        for index in range(first, last, self._chunk):
            end = min(index + self._chunk, last)
            yield self._complete[index : end + 1], self._pieces(index, end)

    def _position(self, messages: np.ndarray) -> np.ndarray:
        """Return the number of parts at the end of a number of messages."""
        return np.r_[0, self._parts.parts_at_end][messages]

    def _visit_columns(self, trace: Trace) -> dict[str, np.ndarray]:
        """Return the fields of each part's visit: its server counts the parts of its shard."""
        parts, table = self._parts, trace.parts
        table = table[table["outcome"].isin(ACCEPTED)]
        job, count = parts.job, len(parts.job)
        assert trace.cluster is not None
        step = pd.Series(parts.worker).groupby(parts.worker).cumcount().to_numpy()
        columns = {
            "staleness": table["staleness"].to_numpy(),
            "worker": parts.worker[job],
            "worker_step": step[job],
            "time": table["commit_time"].to_numpy(),
            "local_steps": np.array(trace.cluster.windows)[parts.worker[job]],
            "completes": (table["outcome"] == "applied").to_numpy(),
            **{name: np.zeros(count, int) for name in ("commit", "place", "messages")},
            "workers": np.full(count, trace.workers),
        }
        for positions in self._of_shard:
            of_shard = places(columns["completes"][positions])
            for name, values in {"commit": np.arange(len(positions)), **of_shard}.items():
                columns[name][positions] = values
        return columns

    def _visits(self, part: np.ndarray) -> Visit:
        return visits_at(self._columns, part, self._dtype)

    def _pieces(self, first: int, last: int) -> ShardedPieces:
        """Fill in the arrays of consecutive pieces, padded to a whole chunk."""
        parts, cuts = self._parts, self._cuts[first : last + 1]

        def members(positions: np.ndarray, room: int) -> tuple[Any, np.ndarray, np.ndarray]:
            """Return the number of entries in each piece, and their indices, padded with zero."""
            begin = np.searchsorted(positions, cuts)
            size: Any = np.zeros(self._chunk, np.int32)
            size[: last - first] = np.diff(begin)
            valid = np.arange(room) < size[:, None]
            index = np.zeros(valid.shape, int)
            index[valid] = np.arange(begin[0], begin[-1])
            return size, index, valid

        size, job, valid = members(parts.first, self.piece_size)
        jobs = parts.worker[job], parts.number[job], self._columns["local_steps"][parts.first[job]]
        of_shards = []
        for positions in self._of_shard:
            count, index, _ = members(positions, self.piece_size)
            part = positions[index]
            slots = (
                self._message_slot[parts.job[part]],
                parts.read_slot[parts.job[part], parts.shard[part]],
                parts.push_slot[part],
                parts.write_slot[part],
            )
            slots = tuple(slot.astype(np.int32) for slot in slots)
            of_shards.append(PartsOfPiece(count, self._visits(part), *slots))
        _, index, _ = members(parts.parts_at_end - 1, self._most_complete)
        message_slot = self._message_slot[parts.message_job[index]]
        return ShardedPieces(
            size,
            self._visits(parts.first[job]),
            parts.number[job].astype(np.int32),
            self._message_slot[job].astype(np.int32),
            parts.read_slot[job].astype(np.int32),
            self._minibatches.rows(jobs, valid),
            tuple(of_shards),
            message_slot.astype(np.int32),
        )
