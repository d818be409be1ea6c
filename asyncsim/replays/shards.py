"""Replay of messages that are split among servers: each shard is an ordinary replay.

The server of a shard has its own state of the method, for its part of the vector: central variable,
optimizer, buffer, and its workers' states and memories. So a method is computed there as if the
shard were all parameters, which equals the method on all parameters if that is coordinate-wise
(`asyncsim.methods.Method.coordinatewise`). Only the local steps of a worker are of the whole
vector. They stand in a table until the last part of the message is committed, and there the
ordinary pieces of each shard look them up. `asyncsim.replays.parts` plans the rounds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Visit
from asyncsim.problems.partition import Partition
from asyncsim.replays.local import Flat, LocalResult, MakeParts, Parts
from asyncsim.replays.observing import RECORDED, columns
from asyncsim.replays.pieces import Over, Piece, axes_of, in_turn, starting
from asyncsim.replays.rows import in_own_loop, over_commits, put_rows, take_rows
from asyncsim.replays.state import (
    JobPieces,
    Layout,
    Pieces,
    PlannedRounds,
    Recorders,
    ReplayState,
    Start,
    initial_state,
)
from asyncsim.replays.step import StepInputs, begin

_LENGTH = RECORDED.index("update_norm")


class ShardedState(NamedTuple):
    """The replay between two rounds.

    Attributes
    ----------
    shards : tuple of ReplayState
        Of each server, on its part of the vector; ``workers.learner`` is ``()``.
    learners : Learner
        Leaves with a leading axis of workers.
    updates : tuple of Float[Array, "places parameters"]
        For each shard, the table of the local steps of messages whose parts are not all committed.
    numbers : Float[Array, "places columns"]
        Their numbers, summed over the parts so far; the squared length of the step instead of the
        length.
    """

    shards: tuple[ReplayState, ...]
    learners: Any
    updates: tuple[Array, ...]
    numbers: Array


def split(partition: Partition, vector: Array) -> tuple[Array, ...]:
    """Return the part of each shard of a vector, ``[..., parameters]``."""
    runs: list[list[Array]] = [[] for _ in partition.names]
    for owner, first, last in partition.runs:
        runs[owner].append(vector[..., first:last])
    return tuple(part[0] if len(part) == 1 else jnp.concatenate(part, -1) for part in runs)


def joined(partition: Partition, parts: Sequence[Array]) -> Array:
    """Return the vector of the parts of all shards."""
    used, runs = [0] * len(parts), []
    for owner, first, last in partition.runs:
        runs.append(parts[owner][..., used[owner] : used[owner] + last - first])
        used[owner] += last - first
    return jnp.concatenate(runs, -1)


class InShards:
    """Computes the rounds of a sharded trace; as `asyncsim.replays.pieces.InPieces` to callers."""

    def __init__(
        self,
        parts: MakeParts,
        recorders: Recorders,
        layout: Layout,
        device: Any,
        flat: Flat,
        over: Over,
    ):
        self._parts, self._recorders, self._layout = parts, recorders, layout
        self._partition, self._flat = layout.partition, flat
        width = len(columns(recorders))
        #: The numbers are of the messages that each round completes.
        self.advance = in_turn(
            lambda numbers: functools.partial(self._run_round, parts(numbers)),
            lambda state, rounds: jnp.zeros((*rounds.complete.shape, width), state.numbers.dtype),
            over,
            PlannedRounds(axes_of(JobPieces), None, None),  # type: ignore[arg-type]  # axes
        )

        #: Builds the state at version zero.
        self.initial_state = starting(self._initial_state, device, over)

    def central(self, state: ShardedState) -> Array:
        """Return the central variables of all shards as one vector."""
        return joined(self._partition, [shard.central for shard in state.shards])

    def problem_states(self, state: ShardedState) -> Any:
        """Return the problem's non-trained state of all workers."""
        return state.learners.problem

    def _initial_state(
        self,
        numbers: Any,
        start: Start,
        problem_state: Any,
        workers: int,
        slots: tuple[tuple[int, int], ...],
        places: int,
    ) -> ShardedState:
        method, flat, partition = self._parts(numbers).method, self._flat, self._partition
        shards, learners = [], None

        def of_shard(shard: int) -> Flat:
            return Flat(lambda tree: split(partition, flat.ravel(tree))[shard], flat.unravel)

        for shard, (layout, of_reads) in enumerate(zip(self._layout.shards, slots, strict=True)):
            state = initial_state(
                *(method, self._recorders, of_shard(shard), start, problem_state),
                *(*of_reads, workers),
                version_messages=layout.version_messages,
            )
            learners = state.workers.learner
            shards.append(state._replace(workers=state.workers._replace(learner=())))

        def table(width: int) -> Array:
            return jnp.zeros((places, width), shards[0].central.dtype)

        updates = tuple(table(shard.central.size) for shard in shards)
        return ShardedState(tuple(shards), learners, updates, table(len(columns(self._recorders))))

    def _run_round(
        self, parts: Parts, state: ShardedState, data: Any, key: Array, planned: PlannedRounds
    ) -> tuple[ShardedState, Array]:
        """Compute the jobs of a round, and commit each shard's parts."""

        def compute(state: ShardedState, piece: JobPieces) -> ShardedState:
            return self._compute(parts, state, data, key, piece)

        def commit(run: Any, update: Array, carry: Any, piece: Pieces) -> Any:
            of_shard, numbers = carry
            of_shard, of_parts = run(of_shard, (update, numbers[:, 0]), key, piece)
            return of_shard, _added(numbers, piece, of_parts)

        state = _through(compute, state, planned.jobs)
        shards, numbers = [], state.numbers
        looking_up = Parts(parts.method, _look_up, None)
        rows = zip(state.shards, state.updates, planned.parts, self._layout.shards, strict=True)
        for of_shard, update, pieces, layout in rows:
            piece = Piece(looking_up, self._recorders, layout)
            run = functools.partial(commit, piece.run, update)
            of_shard, numbers = _through(run, (of_shard, numbers), pieces)
            shards.append(of_shard)
        of_messages = numbers[planned.complete]
        of_messages = of_messages.at[:, _LENGTH].set(jnp.sqrt(of_messages[:, _LENGTH]))
        return state._replace(shards=tuple(shards), numbers=numbers), of_messages

    def _compute(
        self, parts: Parts, state: ShardedState, data: Any, key: Array, piece: JobPieces
    ) -> ShardedState:
        """Take the local steps of a piece of jobs, and enter them in the table."""
        size, single = self._layout.piece_size, self._layout.form == "single"

        def gather(piece: JobPieces) -> Any:
            worker = piece.visit.worker
            of_shards = [
                (
                    take_rows(shard.workers, worker, single),
                    take_rows(shard.read, piece.read_slot[:, number], single),
                )
                for number, shard in enumerate(state.shards)
            ]
            return of_shards, take_rows(state.learners, worker, single)

        def of_job(of_shards: Any, learner: Any, visit: Visit, job: Array, rows: Array) -> Any:
            starts = [begin(parts.method, None, StepInputs(visit, *row))[1] for row in of_shards]
            start = joined(self._partition, starts)
            result = parts.local(data, key, start, learner, visit, job, rows)
            numbers = jnp.zeros_like(state.numbers[0]).at[0].set(result.loss.astype(start.dtype))
            return result.learner, split(self._partition, result.update), numbers

        inputs = in_own_loop(single, piece.size, gather, piece)
        results = over_commits(size, of_job, *inputs, piece.visit, piece.job, piece.rows)
        valid = jnp.arange(size, dtype=piece.size.dtype) < piece.size
        index = piece.visit.worker, piece.place, piece.place
        tables = state.learners, state.updates, state.numbers
        tables_after = [
            put_rows(table, rows, at, valid, single)
            for table, rows, at in zip(tables, results, index, strict=True)
        ]
        return ShardedState(state.shards, *tables_after)


def _through(run: Callable[[Any, Any], Any], state: Any, pieces: Any) -> Any:
    """Run the pieces of a round one after the other."""

    def run_next(index: Array, state: Any) -> Any:
        return run(state, jax.tree.map(lambda leaf: leaf[index], pieces))

    return jax.lax.fori_loop(0, jnp.count_nonzero(pieces.size), run_next, state)


def _look_up(
    table: Any, key: Array, start: Array, learner: Any, visit: Visit, job: Array, place: Array
) -> LocalResult:
    """Return the local steps at a place of the table, in the place of a gradient."""
    update, loss = (jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False) for leaf in table)
    return LocalResult(update, loss, learner)


def _added(numbers: Array, piece: Pieces, of_parts: Array) -> Array:
    """Add the numbers of a piece's parts to those of their messages."""
    # The loss is of the whole message, and stands there already.
    squared = of_parts.at[:, 0].set(0).at[:, _LENGTH].set(of_parts[:, _LENGTH] ** 2)
    valid = jnp.arange(len(squared), dtype=piece.size.dtype) < piece.size
    return numbers.at[jnp.where(valid, piece.rows, len(numbers))].add(squared, mode="drop")
