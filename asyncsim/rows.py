"""Rows of arrays in a compiled loop, one dynamic slice each: on a CPU gathers and scatters are far slower."""

from collections.abc import Callable
from typing import Any

import jax

Array = jax.Array


def row(array: Array, index: Any) -> Array:
    """Return one row."""
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


def set_row(array: Array, row: Array, index: Any) -> Array:
    """Return the array with one row replaced."""
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0)


def tree_row(tree: Any, index: Any) -> Any:
    """Return the same row of every leaf."""
    return jax.tree.map(lambda leaf: row(leaf, index), tree)


def here(index: Any) -> Any:
    """Return the index itself: rows lie in the order of commits."""
    return index


def read_rows(tree: Any, index: Array, count: Array, into: Any, position: Callable[[Any], Any] = here) -> Any:
    """Read the first ``count`` rows that the index names, to their positions; the others are what ``into`` held."""

    def read(i, rows):
        return jax.tree.map(lambda all_, leaf: set_row(all_, row(leaf, index[i]), position(i)), rows, tree)

    return jax.lax.fori_loop(0, count, read, into)


def write_rows(tree: Any, rows: Any, index: Array, count: Array, position: Callable[[Any], Any] = here) -> Any:
    """Write the first ``count`` rows, found at their positions, to where the index says."""

    def write(i, tree):
        return jax.tree.map(lambda leaf, new: set_row(leaf, row(new, position(i)), index[i]), tree, rows)

    return jax.lax.fori_loop(0, count, write, tree)
