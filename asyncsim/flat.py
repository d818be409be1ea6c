"""The problem's tree of parameters as the one flat vector that methods work on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.flatten_util import ravel_pytree


class Flat(NamedTuple):
    """How a tree becomes a vector of shape ``[parameters]``, and back."""

    ravel: Callable[[Any], jax.Array]
    unravel: Callable[[jax.Array], Any]


def flatten(template: Any) -> Flat:
    """Return how trees with the structure and shapes of the template become vectors."""
    return Flat(lambda tree: ravel_pytree(tree)[0], ravel_pytree(template)[1])
