"""The problem's tree of parameters as the one flat vector that methods work on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


class Flat(NamedTuple):
    """How a tree becomes a vector of shape ``[padded]``, and back."""

    ravel: Callable[[Any], jax.Array]
    unravel: Callable[[jax.Array], Any]


def flatten(template: Any, padded: int | None = None, in_parts: bool = False) -> Flat:
    """Return how trees with the structure and shapes of the template become vectors.

    They are filled up to ``padded`` elements with their first one: what is computed of these is as good as of it.
    ``in_parts`` says how: written into the vector one after the other, or concatenated (`tuning.writes_slices`).
    """
    vector, unravel = ravel_pytree(template)
    size = vector.size
    length = size if padded is None else padded

    def joined(tree: Any) -> jax.Array:
        vector = ravel_pytree(tree)[0]
        return vector if length == size else jnp.concatenate([vector, jnp.broadcast_to(vector[0], length - size)])

    def written(tree: Any) -> jax.Array:
        leaves = [leaf.reshape(-1).astype(vector.dtype) for leaf in jax.tree.leaves(tree) if leaf.size]
        into, at = jnp.broadcast_to(leaves[0][0], length), 0
        for leaf in leaves:
            into = jax.lax.dynamic_update_slice(into, leaf, (at,))
            at += leaf.size
        return into

    return Flat(written if in_parts else joined, lambda vector: unravel(vector[:size]))
