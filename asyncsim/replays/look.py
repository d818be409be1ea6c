"""Looks at whole vectors: recorders' values of a commit now and then, computed apart from it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories
from asyncsim.replays.local import Constants, Flat, MakeParts
from asyncsim.replays.observing import require_vectors
from asyncsim.replays.pieces import Over, axes_of, gather, keyed
from asyncsim.replays.state import Layout, Pieces, Recorders, ReplayState
from asyncsim.replays.step import ServerState, begin, finish


def build_look(
    parts: MakeParts, recorders: Recorders, flat: Flat, layout: Layout, over: Over
) -> Callable[..., list[dict[str, list[Array]]]]:
    """Return the jitted function that shows the first commit of some pieces, by recorder and name.

    It repeats the commit and its gradient. Its arguments: the state before the pieces, the training
    data, the constants of the run and the pieces. Each vector comes as the problem's tensors.
    """

    def look(
        state: ReplayState, data: Any, constants: Constants, pieces: Pieces
    ) -> list[dict[str, list[Array]]]:
        method, local, restart = parts(constants.numbers)
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
        # Without a server a worker returns between two pieces, see `asyncsim.replays.lives`.
        inputs, start = begin(method, None if layout.gossip else restart, inputs)
        job, rows = pieces.job[0, 0], pieces.rows[0, 0]
        result = local(data, constants.key, start, inputs.row.learner, inputs.visit, job, rows)
        server_state = ServerState(state.central, state.server, state.waiting)
        commit = finish(method, layout.reads, server_state, inputs, start, result, *memories).commit
        values: list[dict[str, list[Array]]] = []
        # Recorders come with those of shared states last.
        states = *inputs.row.recorders, *state.recorders
        for recorder, of_recorder in zip(recorders, states, strict=True):
            if recorder.look is not None:
                vectors = require_vectors(recorder, of_recorder, commit)
                values.append(
                    {name: jax.tree.leaves(flat.unravel(value)) for name, value in vectors.items()}
                )
        return values

    return jax.jit(over(look, (0, None, 0, axes_of(Pieces))))
