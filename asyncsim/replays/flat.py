"""The problem's tree of parameters as the one flat vector that methods work on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


class Flat(NamedTuple):
    """How a tree becomes a vector of shape ``[padded]``, and back; ``set_row`` writes it into a row of an array."""

    ravel: Callable[[Any], jax.Array]
    unravel: Callable[[jax.Array], Any]
    set_row: Callable[[jax.Array, Any, Any], jax.Array]


def flatten(template: Any, padded: int | None = None, in_parts: bool = False) -> Flat:
    """Return how trees with the structure and shapes of the template become vectors.

    They are filled up to ``padded`` elements with their first one: what is computed of these is as good as of it.
    ``in_parts`` says how: written into the vector one after the other, or concatenated (`tuning.writes_slices`).
    """
    vector, unravel = ravel_pytree(template)
    size = vector.size
    length = size if padded is None else padded

    def parts(tree: Any) -> list[jax.Array]:
        leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree) if leaf.size]
        return leaves if length == size else [*leaves, jnp.broadcast_to(leaves[0][0], length - size)]

    def set_row(array: jax.Array, tree: Any, index: Any) -> jax.Array:
        at = 0
        for part in parts(tree):
            part = part.astype(array.dtype).reshape(1, -1)
            array = jax.lax.dynamic_update_slice(array, part, (index, jnp.asarray(at, index.dtype)))
            at += part.size
        return array

    def joined(tree: Any) -> jax.Array:
        return jnp.concatenate(parts(tree))

    def written(tree: Any) -> jax.Array:
        # Behind a barrier, as XLA else makes one pad of the zeros and the first part, which takes 50 ms instead of 1
        # where the length does not divide evenly among threads (the thesis' perceptron). Not a row of an array with
        # two axes, as `set_row` has it, all of which XLA would copy once.
        array, at = jax.lax.optimization_barrier(jnp.zeros(length, vector.dtype)), 0
        for part in parts(tree):
            array = jax.lax.dynamic_update_slice(array, part.astype(array.dtype), (at,))
            at += part.size
        return array

    return Flat(written if in_parts else joined, lambda vector: unravel(vector[:size]), set_row)
