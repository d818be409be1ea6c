"""Looks at whole vectors: recorders' values of a commit now and then, computed apart from it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories, Method, State
from asyncsim.replays.local import Constants, Flat, MakeParts
from asyncsim.replays.observing import require_vectors
from asyncsim.replays.pieces import Over, axes_of, gather, keyed
from asyncsim.replays.state import Layout, Pieces, Recorders, ReplayState
from asyncsim.replays.step import ServerState, StepInputs, begin, finish


class FirstCommit(NamedTuple):
    """A copy of the inputs of the first commit of some planned pieces."""

    server_state: ServerState
    recorders: tuple[State, ...]  #: states that all commits share
    inputs: StepInputs
    memories: tuple[Memories, ...]  #: of all workers, for methods that see them


def build_first(method: Method, layout: Layout, over: Over) -> Callable[..., FirstCommit]:
    """Return the jitted function that copies the inputs of the first commit.

    A copy, because the run of the piece overwrites the donated state.
    """

    def first(state: ReplayState, constants: Constants, pieces: Pieces) -> FirstCommit:
        pieces = keyed(pieces, constants)
        inputs = gather(method, layout, state, jax.tree.map(lambda leaf: leaf[0], pieces))
        inputs = jax.tree.map(lambda leaf: leaf[0], inputs)
        if layout.separate_pushes:
            inputs = inputs._replace(
                pulled=jnp.where(pieces.push_offset[0, 0] < 0, inputs.pulled, state.central)
            )
        memories: tuple[Memories, ...] = ()
        if method.sees_memories:
            rows = state.workers.memory
            # No commit of the piece comes before the first: its newer row belongs to no worker.
            newer = jax.tree.map(lambda leaf: leaf[:1], rows)
            memories = (Memories(rows, newer, jnp.full(1, layout.workers, jnp.int32)),)
        return FirstCommit(
            ServerState(state.central, state.server, state.waiting),
            state.recorders,
            inputs,
            memories,
        )

    return jax.jit(over(first, (0, 0, axes_of(Pieces))))


def build_look(
    parts: MakeParts, recorders: Recorders, flat: Flat, layout: Layout, over: Over
) -> Callable[..., list[dict[str, list[Array]]]]:
    """Return the jitted function that shows the first commit of some pieces, by recorder and name.

    It repeats the commit and its gradient. Its arguments: the inputs of the commit, the training
    data, the constants of the run and the pieces. Each vector comes as the problem's tensors.
    """

    def look(
        first: FirstCommit, data: Any, constants: Constants, pieces: Pieces
    ) -> list[dict[str, list[Array]]]:
        method, local, restart = parts(constants.numbers)
        # Without a server a worker returns between two pieces, see `asyncsim.replays.lives`.
        inputs, start = begin(method, None if layout.gossip else restart, first.inputs)
        job, rows = pieces.job[0, 0], pieces.rows[0, 0]
        result = local(data, constants.key, start, inputs.row.learner, inputs.visit, job, rows)
        server_state = first.server_state
        commit = finish(
            method, layout.reads, server_state, inputs, start, result, *first.memories
        ).commit
        values: list[dict[str, list[Array]]] = []
        # Recorders come with those of shared states last.
        for recorder, state in zip(
            recorders, (*first.inputs.row.recorders, *first.recorders), strict=True
        ):
            if recorder.look is not None:
                vectors = require_vectors(recorder, state, commit)
                values.append(
                    {name: jax.tree.leaves(flat.unravel(value)) for name, value in vectors.items()}
                )
        return values

    return jax.jit(over(look, (0, None, 0, axes_of(Pieces))))
