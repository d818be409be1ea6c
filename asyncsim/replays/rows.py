"""Rows of arrays in a compiled loop, one dynamic slice each: on a CPU gathers and scatters are far slower."""

from typing import Any

import jax
import jax.numpy as jnp

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


def set_tree_row(tree: Any, rows: Any, index: Any) -> Any:
    """Return the tree with the same row of every leaf replaced."""
    return jax.tree.map(lambda leaf, one: set_row(leaf, one, index), tree, rows)


def tied(tree: Any, i: Any) -> Any:
    """Return the tree, of which XLA cannot tell that it is the same in each turn of a loop over ``i``.

    Of the only row of an array it would else take work out of the loop, as passes over memory of their own.
    """
    return jax.tree.map(lambda leaf: jax.lax.optimization_barrier((leaf, i))[0], tree)


def entry(index: Array, i: Any) -> Array:
    """Return ``index[i]``, of which XLA cannot tell that it is the same in each turn of a loop over ``i``.

    It adds 0, as ``i`` is never negative. Where a piece has room for one commit only, XLA would else read the row of
    that index before the loop, in a pass over memory of its own.
    """
    return index[i] + jnp.minimum(i, 0)


def read_rows(tree: Any, index: Array, count: Array, into: Any) -> Any:
    """Read the first ``count`` rows that the index names, in its order; the others are what ``into`` held."""

    def read(i, rows):
        return set_tree_row(rows, tree_row(tree, entry(index, i)), i)

    return jax.lax.fori_loop(0, count, read, into)


def write_rows(tree: Any, rows: Any, index: Array, count: Array) -> Any:
    """Write the first ``count`` rows to where the index says."""

    def write(i, tree):
        return set_tree_row(tree, tree_row(rows, i), index[i])

    return jax.lax.fori_loop(0, count, write, tree)


def copy_blocks(array: Array, source: Array, to: Array, of: Array, block: Array, count: Array, blocks: int) -> Array:
    """Copy the first ``count`` blocks of rows of ``source`` into rows of ``array``, which has as many columns.

    The last axis is cut into ``blocks`` blocks of the same width, the last one or more of which may be shorter or
    empty.
    """
    columns = array.shape[-1]
    width = -(-columns // blocks)
    shape = (1, *array.shape[1:-1], width)
    within = (jnp.int32(0),) * (array.ndim - 2)

    def copy(i, array):
        begin = block[i] * jnp.int32(width)
        # A slice cannot reach over the end: the last one begins before its block, and leaves what is there.
        at = jnp.minimum(begin, jnp.int32(columns - width))
        there = jax.lax.dynamic_slice(array, (to[i], *within, at), shape)
        seen = jax.lax.dynamic_slice(source, (of[i], *within, at), shape)
        part = jnp.where(at + jnp.arange(width, dtype=jnp.int32) < begin, there, seen)
        return jax.lax.dynamic_update_slice(array, part, (to[i], *within, at))

    return jax.lax.fori_loop(0, count, copy, array)
