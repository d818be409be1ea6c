"""The gradients of a device's lanes: those of its commits in a piece."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array
from asyncsim.replays.local import Learner, LocalResult
from asyncsim.replays.replay_state import Layout, Pieces
from asyncsim.replays.rows import row, set_tree_row, tied, tree_row


class Gradients(NamedTuple):
    """The gradients of a device's lanes.

    Attributes
    ----------
    empty : function
        Returns results to begin with, where gradients come in turn and are written over those of the piece before;
        else ``()``.
    run : function
    update_of : function
        From what `run` made as updates, the piece and the place of one of its commits to that commit's update.
    """

    empty: Callable[..., Any]
    run: Callable[..., LocalResult]
    update_of: Callable[[Array, Pieces, Array], Array]


def build_gradients(local: Callable[..., LocalResult], layout: Layout) -> Gradients:
    """Return how a device takes the local steps of its lanes: one after the other, or all as one batch.

    ``local`` is that of `asyncsim.replays.local.from_vector`.
    """
    division = layout.division

    def arguments(lanes: Array, learner: Learner, piece: Pieces) -> Any:
        return (lanes, learner, *division.own((piece.visit, piece.job, piece.rows)))

    def one(data: Any, key: Array, given: Any, lane: Any) -> LocalResult:
        return local(data, key, *tree_row(given, lane))

    def empty(data: Any, key: Array, lanes: Array, learner: Learner, piece: Pieces) -> Any:
        if not layout.in_turn:
            return ()
        shapes = jax.eval_shape(lambda *given: one(data, key, arguments(*given), 0), lanes, learner, piece)
        return jax.tree.map(lambda leaf: jnp.zeros((division.lanes, *leaf.shape), leaf.dtype), shapes)

    def run(data: Any, key: Array, lanes: Array, learner: Learner, piece: Pieces, into: Any) -> LocalResult:
        given = arguments(lanes, learner, piece)
        if not layout.in_turn:
            return jax.vmap(lambda *own: local(data, key, *own))(*given)

        def next_lane(lane, results):
            made = one(data, key, given, lane)
            return set_tree_row(results, made, lane)

        # Also on devices without a commit in the last lane: they would only wait for the others, and XLA ends a process
        # where one waits for a minute.
        return jax.lax.fori_loop(0, division.lanes_of(piece.size), next_lane, into)

    def update_of(updates: Array, piece: Pieces, i: Array) -> Array:
        return row(tied(updates, i), i)

    return Gradients(empty, run, update_of)
