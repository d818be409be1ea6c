"""Looks at whole vectors: recorders' values of a commit now and then, computed apart from it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array
from asyncsim.replays.local import Constants, Flat, MakeParts
from asyncsim.replays.observing import require_vectors
from asyncsim.replays.pieces import Over, Piece, axes_of, keyed
from asyncsim.replays.state import Layout, Pieces, Recorders, ReplayState


def build_look(
    parts: MakeParts, recorders: Recorders, flat: Flat, layout: Layout, over: Over
) -> Callable[..., list[dict[str, list[Array]]]]:
    """Return the jitted function that shows the first commit of some pieces, by recorder and name.

    It repeats the commit and its gradient, as a piece of its own. Its arguments: the state before
    the pieces, the training data, the constants of the run and the pieces. Each vector comes as the
    problem's tensors.
    """

    def look(
        state: ReplayState, data: Any, constants: Constants, pieces: Pieces
    ) -> list[dict[str, list[Array]]]:
        piece = Piece(parts(constants.numbers), recorders, layout._replace(piece_size=1))
        first = jax.tree.map(
            lambda leaf: leaf[0, :1] if leaf.ndim > 1 else leaf[0], keyed(pieces, constants)
        )
        inputs, start, result = piece.compute(state, data, constants.key, first)
        _, outputs = piece.commit(state, first, jnp.ones(1, bool), inputs, start, result)
        row, commit = jax.tree.map(lambda leaf: leaf[0], (inputs.row, outputs.commit))
        # Recorders come with those of shared states last.
        states, values = (*row.recorders, *state.recorders), []
        for recorder, of_recorder in zip(recorders, states, strict=True):
            if recorder.look is not None:
                vectors = require_vectors(recorder, of_recorder, commit)
                values.append(
                    {name: jax.tree.leaves(flat.unravel(value)) for name, value in vectors.items()}
                )
        return values

    return jax.jit(over(look, (0, None, 0, axes_of(Pieces))))
