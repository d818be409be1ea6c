"""The gradients of a device's lanes: those of its commits in a piece."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.local import Learner, LocalResult
from asyncsim.methods.method import Array
from asyncsim.replay_state import Layout, Pieces


class Gradients(NamedTuple):
    """The gradients of a device's lanes.

    Attributes
    ----------
    in_turn : bool
        Whether they come in batches, one after the other, written over the results of the piece before.
    empty : function
        Returns such results to begin with; ``()`` if not in turn.
    run : function
    """

    in_turn: bool
    empty: Callable[..., Any]
    run: Callable[..., LocalResult]


def build_gradients(local: Callable[..., LocalResult], layout: Layout) -> Gradients:
    """Return how a device takes the local steps of its lanes, ``layout.together`` at a time."""
    division, together = layout.division, layout.together
    in_turn = together < division.lanes or together == 1

    def batch(data: Any, key: Array, arguments: Any) -> LocalResult:
        if together == 1:
            one = local(data, key, *jax.tree.map(lambda leaf: leaf[0], arguments))
            return jax.tree.map(lambda leaf: leaf[None], one)
        return jax.vmap(lambda *one: local(data, key, *one))(*arguments)

    def arguments(lanes: Array, learner: Learner, piece: Pieces) -> Any:
        return (lanes, learner, *division.own((piece.visit, piece.job, piece.rows)))

    def part(tree: Any, begin: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, begin, together), tree)

    def empty(data: Any, key: Array, lanes: Array, learner: Learner, piece: Pieces) -> Any:
        if not in_turn:
            return ()
        shapes = jax.eval_shape(lambda *a: batch(data, key, part(arguments(*a), 0)), lanes, learner, piece)
        return jax.tree.map(lambda leaf: jnp.zeros((division.lanes, *leaf.shape[1:]), leaf.dtype), shapes)

    def run(data: Any, key: Array, lanes: Array, learner: Learner, piece: Pieces, into: Any) -> LocalResult:
        given = arguments(lanes, learner, piece)
        if not in_turn:
            return batch(data, key, given)

        def next_batch(i, results):
            made = batch(data, key, part(given, i * together))
            return jax.tree.map(
                lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, i * together, 0), results, made
            )

        batches = (division.own_count(piece.size) + together - 1) // together
        return jax.lax.fori_loop(0, batches, next_batch, into)

    return Gradients(in_turn, empty, run)
