"""Replay of messages that are split among servers: each part is committed at its own server.

The server of a shard has its own state of the method, for its part of the vector: central variable,
optimizer, buffer, and its workers' states and memories. So a method is computed there as if the
shard were all parameters, which equals the method on all parameters if that is coordinate-wise
(`asyncsim.methods.Method.coordinatewise`). Only the local steps of a worker are of the whole
vector. Their sum waits in a slot until the last part of the message is committed.

`asyncsim.replays.parts` cuts a trace into pieces: the jobs of a piece are computed at once, in the
form "single" one after the other, and then its parts are committed, shard by shard.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories
from asyncsim.problems.partition import Partition
from asyncsim.replays.local import Flat, LocalResult, MakeParts, Parts
from asyncsim.replays.observing import RECORDED, columns, observe
from asyncsim.replays.parts import PartsOfPiece, ShardedPieces
from asyncsim.replays.pieces import in_own_loop, in_turn, put_rows, tied
from asyncsim.replays.state import (
    Layout,
    Recorders,
    ReplayState,
    Start,
    WorkerRow,
    initial_state,
)
from asyncsim.replays.step import ServerState, StepInputs, begin, finish


class ShardedState(NamedTuple):
    """The replay between two pieces.

    Attributes
    ----------
    shards : tuple of ReplayState
        Of each server, on its part of the vector. ``read`` has the versions that wait for a reader,
        and one row more, for unread versions; ``workers.learner`` is ``()``.
    learners : Learner
        Leaves with a leading axis of workers.
    updates : Float[Array, "slots parameters"]
        The sums of local steps of messages whose parts are not all committed; padding
        writes the last row.
    numbers : Float[Array, "slots columns"]
        Their numbers, summed over the parts so far; the squared length of the step instead of the
        length.
    """

    shards: tuple[ReplayState, ...]
    learners: Any
    updates: Array
    numbers: Array


def split(partition: Partition, vector: Array) -> list[Array]:
    """Return the part of each shard of a vector, ``[..., parameters]``."""
    runs: list[list[Array]] = [[] for _ in partition.names]
    for owner, first, last in partition.runs:
        runs[owner].append(vector[..., first:last])
    return [part[0] if len(part) == 1 else jnp.concatenate(part, -1) for part in runs]


def joined(partition: Partition, parts: Sequence[Array]) -> Array:
    """Return the vector of the parts of all shards."""
    used, runs = [0] * len(parts), []
    for owner, first, last in partition.runs:
        runs.append(parts[owner][..., used[owner] : used[owner] + last - first])
        used[owner] += last - first
    return jnp.concatenate(runs, -1)


class InShards:
    """Computes the commits of a sharded trace; the interface of `asyncsim.replays.pieces.InPieces`.

    Parameters as there; ``flat`` converts between the problem's tree and the vector.
    """

    def __init__(
        self,
        parts: MakeParts,
        recorders: Recorders,
        layout: Layout,
        device: Any,
        flat: Flat,
    ):
        self._partition = layout.shards
        self._recorders, self._layout = recorders, layout
        self._parts, self._flat = parts, flat

        #: The numbers are of complete messages.
        self.advance = in_turn(
            lambda numbers: _build_piece(parts(numbers), recorders, layout),
            lambda state, pieces: jnp.zeros(
                (*pieces.complete.shape, len(columns(recorders))), state.numbers.dtype
            ),
        )
        #: Builds the state at version zero.
        self.initial_state = jax.jit(
            self._initial_state,
            static_argnames=("slots", "message_slots", "workers"),
            out_shardings=jax.sharding.SingleDeviceSharding(device),
        )

    def _initial_state(
        self,
        numbers: Any,
        start: Start,
        problem_state: Any,
        slots: tuple[int, ...],
        message_slots: int,
        workers: int,
    ) -> ShardedState:
        method, flat, partition = self._parts(numbers).method, self._flat, self._partition
        shards, learners = [], None

        def of_shard(shard: int) -> Flat:
            return Flat(lambda tree: split(partition, flat.ravel(tree))[shard], flat.unravel)

        for shard, count in enumerate(slots):
            state = initial_state(
                *(method, self._recorders, of_shard(shard), start, problem_state),
                *(count + 1, 0, workers),
                version_messages=self._layout.version_messages,
            )
            learners = state.workers.learner
            shards.append(state._replace(workers=state.workers._replace(learner=())))
        vector = flat.ravel(start.params)
        return ShardedState(
            tuple(shards),
            learners,
            jnp.zeros((message_slots + 1, vector.size), vector.dtype),
            jnp.zeros((message_slots + 1, len(columns(self._recorders))), vector.dtype),
        )

    def central(self, state: ShardedState) -> Array:
        """Return the central variables of all shards as one vector."""
        return joined(self._partition, [shard.central for shard in state.shards])

    def problem_states(self, state: ShardedState) -> Any:
        """Return the problem's non-trained state of all workers."""
        return state.learners.problem


def _build_piece(
    functions: Parts, recorders: Recorders, layout: Layout
) -> Callable[..., tuple[ShardedState, Array]]:
    """Return the function that computes the jobs of a piece and commits its parts; its numbers are
    of complete messages.
    """
    (method, local, _), partition = functions, layout.shards
    size, single = layout.piece_size, layout.form == "single"
    worker_recorders = [recorder for recorder in recorders if not recorder.shared]
    shared_recorders = [recorder for recorder in recorders if recorder.shared]
    length = RECORDED.index("update_norm")

    def start_of(state: ShardedState, job: Any) -> tuple[Array, Any]:
        """Return the start of a job's local steps, and its worker's learner."""
        visit, slots, starts = job.visit, job.read_slot, []
        for shard, of_shard in enumerate(state.shards):
            row = _row(of_shard.workers, visit.worker)
            read = _row(of_shard.read, slots[shard])
            starts.append(begin(method, None, StepInputs(visit, row, read))[1])
        return joined(partition, starts), _row(state.learners, visit.worker)

    def compute(state: ShardedState, data: Any, key: Array, piece: ShardedPieces) -> ShardedState:
        """Compute the jobs of a piece; their messages wait."""

        def result_of(start: Array, learner: Any, job: Any) -> tuple[Any, Array, Array]:
            result = local(data, key, start, learner, job.visit, job.job, job.rows)
            loss = result.loss.astype(start.dtype)
            return result.learner, result.update, jnp.zeros_like(state.numbers[0]).at[0].set(loss)

        jobs = piece._replace(size=(), parts=(), complete=())
        if not single:
            results = jax.vmap(result_of)(*jax.vmap(lambda job: start_of(state, job))(jobs), jobs)
            valid = jnp.arange(size, dtype=piece.size.dtype) < piece.size
            slots = piece.visit.worker, piece.message_slot, piece.message_slot
            tables = state.learners, state.updates, state.numbers
            tables_after = [
                put_rows(table, rows, index, valid, single=False)
                for table, rows, index in zip(tables, results, slots, strict=True)
            ]
            return ShardedState(state.shards, *tables_after)

        def turn(i: Array, state: ShardedState) -> ShardedState:
            job = _row(jobs, i)
            turns = jnp.minimum(piece.size, 1)
            start, learner = in_own_loop(single, turns, lambda job: start_of(state, job), job)
            learner, update, numbers = result_of(start, learner, job)
            return ShardedState(
                state.shards,
                _with_row(state.learners, learner, job.visit.worker),
                _with_row(state.updates, update, job.message_slot),
                _with_row(state.numbers, numbers, job.message_slot),
            )

        return jax.lax.fori_loop(0, piece.size, turn, state)

    def commit(
        shard: int, state: ReplayState, numbers: Array, updates: Array, parts: PartsOfPiece
    ) -> tuple[ReplayState, Array]:
        """Commit the parts of a piece at a shard, in order; add their numbers."""

        def write(carry: tuple[ReplayState, Array], part: PartsOfPiece, gathered: Any) -> Any:
            (state, numbers), (row, read, pulled, update, sums) = carry, gathered
            memories: tuple[Memories, ...] = ()
            if method.sees_memories:
                # The table is up to date: the newer row belongs to no worker.
                newer = jax.tree.map(lambda leaf: leaf[None], row.memory)
                no_worker = jnp.full(1, layout.workers, jnp.int32)
                memories = (Memories(state.workers.memory, newer, no_worker),)
            inputs, start = begin(method, None, StepInputs(part.visit, row, read, pulled))
            server_state = ServerState(state.central, state.server, state.waiting)
            result = LocalResult(update, sums[0], ())
            outputs = finish(method, layout.reads, server_state, inputs, start, result, *memories)
            of_commit = outputs.commit
            after, of_part = observe(worker_recorders, row.recorders, of_commit)
            shared, of_shared = observe(shared_recorders, state.recorders, of_commit, base=False)
            of_part = of_part.at[0].set(0).at[length].set(of_part[length] ** 2)
            sums = sums + jnp.concatenate([of_part, of_shared])
            central, server, waiting = outputs.server_state
            row = WorkerRow(of_commit.worker, of_commit.memory, after, ())
            state = state._replace(
                central=central,
                server=server,
                waiting=waiting,
                recorders=shared,
                read=_with_row(state.read, outputs.read, part.write_slot),
                workers=_with_row(state.workers, row, part.visit.worker),
            )
            return state, _with_row(numbers, sums, part.message_slot)

        def turn(i: Array, carry: tuple[ReplayState, Array]) -> tuple[ReplayState, Array]:
            state, numbers = carry

            def gather(part: PartsOfPiece) -> Any:
                row, read = _row(state.workers, part.visit.worker), _row(state.read, part.read_slot)
                pulled = _row(state.read, part.push_slot) if layout.separate_pushes else ()
                update = split(partition, _row(updates, part.message_slot))[shard]
                return row, read, pulled, update, _row(numbers, part.message_slot)

            part, turns = _row(parts._replace(size=()), i), jnp.minimum(parts.size, 1)
            arguments = part, in_own_loop(single, turns, gather, part)
            if not single:
                return write(carry, *arguments)
            return jax.lax.fori_loop(
                0, turns, lambda j, carry: write(carry, *tied(arguments, j)), carry
            )

        return jax.lax.fori_loop(0, parts.size, turn, (state, numbers))

    def run_piece(
        state: ShardedState, data: Any, key: Array, piece: ShardedPieces
    ) -> tuple[ShardedState, Array]:
        state = compute(state, data, key, piece)
        shards, numbers = [], state.numbers
        for shard, (of_shard, parts) in enumerate(zip(state.shards, piece.parts, strict=True)):
            of_shard, numbers = commit(shard, of_shard, numbers, state.updates, parts)
            shards.append(of_shard)
        state = state._replace(shards=tuple(shards), numbers=numbers)
        of_messages = numbers[piece.complete]
        return state, of_messages.at[:, length].set(jnp.sqrt(of_messages[:, length]))

    return run_piece


def _row(tree: Any, index: Array) -> Any:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )


def _with_row(tree: Any, row: Any, index: Array) -> Any:
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, row
    )
