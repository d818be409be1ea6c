"""The pieces of `asyncsim.replays.piece` with all their rows at once, for accelerators.

A CPU loops over the commits there are, and touches one row after the other. An accelerator launches a kernel for each
operation of each turn, and asks the host whether a loop of unknown length goes on. Here the rows of a piece are
gathered, its gradients are one batch, its norms are taken of all commits, and its rows are scattered (but for torn
reads). The commits, each of which depends on the one before, are a loop of known length, unrolled: of those of a method
that works element by element XLA makes one kernel. What a piece has room for and does not make is computed too, by the
method's functions as well, and dropped.

Nobody has timed this on a GPU yet. As XLA compiles it for an H100, 32 commits of GEM on MNIST's network are 58 kernels,
which move 1.12 times the bytes that their gradients alone do.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories, Method
from asyncsim.replays.commits import Measured, Squares, build_commit
from asyncsim.replays.gradients import Gradients
from asyncsim.replays.piece import MadePieces, PiecesOf
from asyncsim.replays.replay_state import Layout, Pieces, ReadsOfPiece, ReplayState, WorkerRow
from asyncsim.replays.rows import copy_blocks, row, set_row, set_tree_row, tree_row
from asyncsim.replays.tuning import UNROLLED


def build_batched_pieces(
    method: Method, gradients: Gradients, layout: Layout
) -> Callable[[ReplayState, Array, Pieces, Sequence[PiecesOf]], tuple[ReplayState, MadePieces]]:
    """Return the function that runs some of the pieces, all on the same data; see `asyncsim.replays.piece`."""
    division = layout.division
    run_piece = _build_piece(method, gradients, layout)

    def run_pieces(state: ReplayState, key: Array, pieces: Pieces, to_run: Sequence[PiecesOf]):
        dtype, count = state.central.dtype, pieces.size.shape[0]
        norms = jnp.zeros((count, division.piece_size, *layout.of_members), dtype)
        losses = jnp.zeros((count, division.lanes, *layout.of_members), dtype)
        nothing = MadePieces(losses, Squares(norms, norms, norms), jnp.zeros_like(state.central))
        ((data, begin, end),) = to_run

        def one(index: Array, carry: tuple[ReplayState, MadePieces]) -> tuple[ReplayState, MadePieces]:
            state, made = carry
            state, loss, squares, updates = run_piece(state, data, key, tree_row(pieces, index))
            return state, MadePieces(
                losses=set_row(made.losses, loss, index),
                squares=set_tree_row(made.squares, squares, index),
                first=jnp.where(index == 0, updates[0], made.first),
            )

        return jax.lax.fori_loop(begin, end, one, (state, nothing))

    return run_pieces


def _build_piece(method: Method, gradients: Gradients, layout: Layout) -> Callable[..., Any]:
    """Return the function that runs a piece: to the state after it, the losses of its lanes, norms and updates."""
    division = layout.division
    commits = _build_commits(method, layout)

    def run_piece(state: ReplayState, data: Any, key: Array, piece: Pieces):
        worker, slot = piece.visit.worker, piece.slot
        rows = _gather(state.workers._replace(learner=()), worker)
        read = _gather(state.read, slot)
        start = read if method.resume is None else jax.vmap(method.resume)(rows.method, read)
        learner = _gather(state.workers.learner, division.own(worker))
        results = gradients.run(data, key, division.to_lanes(start), learner, piece, ())
        updates = division.to_shards(results.update)
        if method.sees_loss:
            loss = division.of_all(results.loss).astype(piece.visit.time.dtype)
            piece = piece._replace(visit=piece.visit._replace(loss=loss))
        there = _first(piece.size, worker)
        carried, made = commits(state, piece, (there, rows, read, start, updates))
        left = made.left._replace(learner=division.of_all(results.learner))
        workers = _scatter(state.workers, left, worker, there)
        state = state._replace(central=carried.central, server=carried.server, workers=workers)
        if layout.reads != "separate":
            state = state._replace(read=_scatter(state.read, made.seen, slot, there))
        if layout.keeps_history:
            read = _write_separate(state.read, carried.history, piece.reads, layout.read_blocks)
            state = state._replace(read=read, form=_write_separate(state.form, carried.history, piece.form_reads))
        squares = Squares(*jax.vmap(division.squares)(made.measured))
        return state, results.loss.astype(state.central.dtype), squares, updates

    return run_piece


class _Carried(NamedTuple):
    """What a commit finds of those before it in its piece."""

    central: Array
    server: Any
    history: Any  #: the central variable before the piece and after each commit, if reads need it; else ``()``
    memory: Any  #: what commits have left of their workers' memories, if the method sees all; else ``()``


class _Made(NamedTuple):
    """What the commits of a piece leave, leaves with leading axis ``piece_size``."""

    left: WorkerRow
    seen: Any  #: what the worker reads at that visit; ``()`` if it reads separately
    measured: Measured


def _build_commits(method: Method, layout: Layout) -> Callable[..., tuple[_Carried, _Made]]:
    """Return the function that makes a piece's commits.

    Its arguments: the state before the piece, the piece, and of each commit whether it is there, its worker's row, its
    read, its start and its update.
    """
    commit, reply = build_commit(method, layout)
    size = layout.division.piece_size

    def commits(state: ReplayState, piece: Pieces, given: Any) -> tuple[_Carried, _Made]:
        visit, form = piece.visit, _gather(state.form, piece.form_slot) if layout.separate_forms else ()

        def step(before: _Carried, of_commit: Any) -> tuple[_Carried, _Made]:
            place, own_visit, own_form, offset, (there, worker, read, start, update) = of_commit
            formed = before.central
            told: tuple[Memories, ...] = ()
            if layout.separate_forms:
                # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read before the piece.
                formed = jnp.where(offset < 0, own_form, row(before.history, jnp.maximum(offset, 0)))
            if method.sees_memories:
                newer = jnp.where(jnp.arange(size, dtype=place.dtype) < place, visit.worker, visit.workers)
                told = (Memories(state.workers.memory, before.memory, newer),)
            central, server, left, measured = commit(
                before.central, before.server, worker, read, start, update, formed, own_visit, *told
            )
            seen: Any = ()
            if layout.reads == "after":
                seen = reply(server, central, left.memory, own_visit)
            elif layout.reads == "before":
                seen = reply(before.server, before.central, worker.memory, own_visit)
            central, server = jax.tree.map(
                functools.partial(jnp.where, there), (central, server), (before.central, before.server)
            )
            history: Any = set_row(before.history, central, place + 1) if layout.keeps_history else ()
            memory: Any = set_tree_row(before.memory, left.memory, place) if method.sees_memories else ()
            return _Carried(central, server, history, memory), _Made(left, seen, measured)

        central = state.central
        begin = _Carried(
            central,
            state.server,
            history=jnp.broadcast_to(central, (size + 1, *central.shape)) if layout.keeps_history else (),
            memory=_gather(state.workers.memory, visit.worker) if method.sees_memories else (),
        )
        places = jnp.arange(size, dtype=piece.slot.dtype)
        of_commits = places, visit, form, piece.form_offset, given
        return jax.lax.scan(step, begin, of_commits, unroll=min(size, UNROLLED))

    return commits


def _first(count: Array, index: Array) -> Array:
    """Return which of the indices are among the first ``count``."""
    return jnp.arange(index.size, dtype=index.dtype) < count


def _gather(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _scatter(tree: Any, rows: Any, index: Array, there: Array) -> Any:
    """Return the tree with the rows that are ``there``, each at another index."""

    def write(leaf: Array, own: Array) -> Array:
        # Beyond the end each at a place of its own: what is dropped, and that no two are the same.
        places = jnp.where(there, index, leaf.shape[0] + jnp.arange(there.size, dtype=index.dtype))
        return leaf.at[places].set(own, mode="drop", unique_indices=True)

    return jax.tree.map(write, tree, rows)


def _write_separate(array: Array, history: Array, reads: ReadsOfPiece, blocks: int = 1) -> Array:
    """Write what separate reads saw: the central variable after as many commits of the piece as their offset."""
    if reads.slot.size == 0:
        return array
    if blocks > 1:
        return copy_blocks(array, history, reads.slot, reads.offset, reads.block, reads.size, blocks)
    there = _first(reads.size, reads.slot)
    return _scatter(array, history[reads.offset], reads.slot, there & ~_again_later(reads.slot, there))


def _again_later(index: Array, there: Array) -> Array:
    """Return which indices come again among those that are ``there``: a slot is free for another read in a piece."""
    same = (index[:, None] == index) & there
    return jnp.any(jnp.triu(same, 1), axis=1)
