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


def flatten(template: Any, padded: int | None = None) -> Flat:
    """Return how trees with the structure and shapes of the template become vectors.

    They are filled up to ``padded`` elements with their first one: what is computed of these is as good as of it.
    """
    vector, unravel = ravel_pytree(template)
    size = vector.size
    if padded is None or padded == size:
        return Flat(lambda tree: ravel_pytree(tree)[0], unravel)

    def ravel(tree: Any) -> jax.Array:
        vector = ravel_pytree(tree)[0]
        return jnp.concatenate([vector, jnp.broadcast_to(vector[0], padded - size)])

    return Flat(ravel, lambda vector: unravel(vector[:size]))
