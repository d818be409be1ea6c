"""The rows of the state: gathered before a piece's commits, and written after them.

On a CPU the form "single" moves them by dynamic slices; gathers and scatters copy all of the state
there. XLA also copies it wherever it fuses the read of a row with operations after a write: hence
reading, and committing and writing, are loops of one turn. To XLA they are loops of unknown length,
and it fuses nothing across their ends.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Inbox, Method, Visit
from asyncsim.replays.state import (
    GossipOfPiece,
    Layout,
    Pieces,
    ReadsOfPiece,
    ReplayState,
    WorkerRow,
)
from asyncsim.replays.step import StepInputs


def gather(method: Method, layout: Layout, state: ReplayState, piece: Pieces) -> StepInputs:
    """Gather the inputs of a piece's commits; leaves have an axis of commits."""
    single = layout.form == "single"
    meets = method.meet is not None

    def read(index: Any) -> tuple[WorkerRow, Any, Any, Any]:
        worker, slot, push_slot, gossip = index
        received: Any = ()
        if method.mix is not None:
            received = _inbox(state.messages, gossip, single, method.sees_messages)
        elif meets:
            # Without a partner any row will do: `meet` drops it.
            received = take_rows(state.workers.method, jnp.maximum(gossip.partner, 0), single)
        pulled = take_rows(state.push_read, push_slot, single) if layout.separate_pushes else ()
        read_vector = _take_read(state.read, slot, layout) if layout.reads != "none" else ()
        return take_rows(state.workers, worker, single), read_vector, pulled, received

    index = piece.visit.worker, piece.slot, piece.push_slot, piece.gossip
    row, vectors, pulled, received = in_own_loop(single, piece.size, read, index)
    partner = piece.gossip.partner if meets else ()
    visit = piece.visit._replace(delays=_delays(layout, piece.visit))
    return StepInputs(visit, row, vectors, pulled, received, partner, piece.fresh)


def over_commits(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Map a function over the commits of a piece; a single one is computed without their axis."""
    # A batch of one would still make grouped convolutions and batched products, which are slow.
    if size > 1:
        return jax.vmap(function)(*arguments)
    return jax.tree.map(
        lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], arguments))
    )


def tied(tree: Any, i: Array) -> Any:
    """Hide from XLA that the tree is the same in each turn of a loop over ``i``.

    Otherwise XLA moves work out of the loop: reads of rows of the state, which is then copied, or
    passes over memory.
    """

    def tie(leaf: Array) -> Array:
        # An index plus an opaque zero; a barrier keeps floats and keys unchanged to the last bit.
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + jnp.minimum(i, 0).astype(leaf.dtype)
        return jax.lax.optimization_barrier((leaf, i))[0]

    return jax.tree.map(tie, tree)


def in_own_loop(single: bool, count: Array, function: Callable[[Any], Any], index: Any) -> Any:
    """Call a function; in the form "single" within a branch that XLA does not fuse."""
    if not single:
        return function(index)
    kinds = jax.eval_shape(function, index)

    def never() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kinds)

    # The traced count, always 1 here, hides the choice of the branch.
    return jax.lax.cond(count > 0, lambda: function(index), never)


def take_rows(tree: Any, index: Array, single: bool) -> Any:
    """Return the rows of a tree at an index."""
    # A dynamic slice of one row; the gather below would copy all rows on a CPU.
    if single:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index[0], 1), tree)
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _delays(layout: Layout, visit: Visit) -> Array:
    """Return the staleness of each parameter of reads; where they are whole, of each read."""
    if not layout.bounds:
        return visit.staleness
    delays: Any = visit.delays  # [piece_size, groups]
    of_runs = [
        jnp.broadcast_to(delays[:, owner, None], (len(delays), width))
        for width, owner in zip(np.diff(layout.bounds).tolist(), layout.owners, strict=True)
    ]
    return jnp.concatenate(of_runs, axis=-1)


def _take_read(read: Array, slot: Array, layout: Layout) -> Array:
    """Return reads; one that is not whole has each run of parameters from the block's own slot."""
    single = layout.form == "single"
    if not layout.bounds:
        return take_rows(read, slot, single)
    parts = []
    for (first, end), owner in zip(itertools.pairwise(layout.bounds), layout.owners, strict=True):
        if single:
            at = slot[0, owner], *[jnp.int32(0)] * (read.ndim - 2), jnp.int32(first)
            parts.append(jax.lax.dynamic_slice(read, at, (1, *read.shape[1:-1], end - first)))
        else:
            parts.append(read[slot[:, owner], ..., first:end])
    return jnp.concatenate(parts, axis=-1)


def _inbox(messages: Any, gossip: GossipOfPiece, single: bool, one_by_one: bool) -> Any:
    """Return the weighted sum of the messages that each commit takes up, or the messages."""
    if one_by_one:

        def rows(leaf: Array) -> Array:
            if not single:
                return leaf[gossip.sources]
            take = functools.partial(jax.lax.dynamic_index_in_dim, leaf, keepdims=False)
            return jax.lax.map(take, gossip.sources[0])[None]

        return Inbox(jax.tree.map(rows, messages), gossip.weights, gossip.senders)
    if not single:
        return jax.tree.map(
            lambda leaf: jnp.einsum(
                "ij,ij...->i...", gossip.weights.astype(leaf.dtype), leaf[gossip.sources]
            ),
            messages,
        )

    def add(j: Array, total: Any) -> Any:
        slot, weight = gossip.sources[0, j], gossip.weights[0, j]

        def add_message(partial_sum: Array, leaf: Array) -> Array:
            return partial_sum + weight.astype(leaf.dtype) * jax.lax.dynamic_slice_in_dim(
                leaf, slot, 1
            )

        return jax.tree.map(add_message, total, messages)

    zeros = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), messages)
    return jax.lax.fori_loop(0, gossip.source_count[0], add, zeros)


def put_rows(tree: Any, rows: Any, index: Array, valid: Array, single: bool) -> Any:
    """Write the ``valid`` rows into the tree; their indices differ."""
    if single:
        return jax.tree.map(
            lambda leaf, row: jax.lax.dynamic_update_slice_in_dim(leaf, row, index[0], 0),
            tree,
            rows,
        )

    def write(leaf: Array, row: Array) -> Array:
        # Invalid rows get distinct indices beyond the end: they are dropped, and the promise of
        # unique indices still holds.
        places = jnp.where(valid, index, leaf.shape[0] + jnp.arange(valid.size, dtype=index.dtype))
        return leaf.at[places].set(row, mode="drop", unique_indices=True)

    return jax.tree.map(write, tree, rows)


def put_separate(array: Array, history: Array, reads: ReadsOfPiece, layout: Layout) -> Array:
    """Write separate reads: the central variable after ``offset`` commits of the piece."""
    if reads.slot.size == 0:
        return array
    if layout.form == "single":

        def copy(i: Array, array: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(history, reads.offset[i], 1)
            return jax.lax.dynamic_update_slice_in_dim(array, row, reads.slot[i], 0)

        return jax.lax.fori_loop(0, reads.size, copy, array)
    valid = jnp.arange(reads.slot.size, dtype=reads.size.dtype) < reads.size
    # A slot that is freed within the piece may be written twice: only its last read stays.
    is_overwritten = jnp.any(jnp.triu((reads.slot[:, None] == reads.slot) & valid, 1), axis=1)
    return put_rows(array, history[reads.offset], reads.slot, valid & ~is_overwritten, single=False)
