"""The heart of a replay in pieces: the gradients of a piece, then its commits one after the other.

A piece has room for ``piece_size`` commits. Reading rows of the carried ``[workers, parameters]`` arrays, committing,
which writes those of methods and proxies, and writing the others are loops apart, each over the commits there are. They
are loops even where a piece has room for one commit only: XLA fuses no work across a loop of unknown length, so it
never reads a row after the first write (it would have to copy the whole array at every piece), and an update is a
number in memory before it is applied, the same for every method. (What does not change from turn to turn it does move
out of a loop: hence `asyncsim.replays.rows.entry` and `asyncsim.replays.rows.tied`.)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Method
from asyncsim.replays.commits import Committed, Squares, build_commits
from asyncsim.replays.gradients import Gradients
from asyncsim.replays.local import Learner
from asyncsim.replays.replay_state import Layout, Pieces, ReadsOfPiece, ReplayState, WorkerRow
from asyncsim.replays.rows import copy_blocks, read_rows, row, set_row, set_tree_row, tied, tree_row, write_rows


class Scratch(NamedTuple):
    """Memory that pieces use one after the other: filled anew by each, never cleared.

    What a method or its gradients have no use for is ``()`` there.
    """

    worker_rows: WorkerRow
    read: Array
    start: Any
    learner: Learner
    results: Any
    committed: Committed


class MadePieces(NamedTuple):
    """What is told of the pieces that were run.

    Attributes
    ----------
    losses : Float[Array, "pieces lanes"]
        Zero of pieces that were not run, as the squares are.
    squares : Squares
        Leaves ``[pieces, piece_size]``, of this device's part of the vectors.
    first : Array
        The update of the first commit of all pieces; zero unless that was made.
    """

    losses: Array
    squares: Squares
    first: Array


class PiecesOf(NamedTuple):
    """Pieces from ``begin`` to before ``end``, and the data that their gradients are computed from."""

    data: Any
    begin: Array
    end: Array


def build_pieces(
    method: Method, gradients: Gradients, layout: Layout
) -> Callable[[ReplayState, Array, Pieces, Sequence[PiecesOf]], tuple[ReplayState, MadePieces]]:
    """Return the function that runs some of the pieces, as each device does.

    Its arguments: the state, the key of the problem's randomness, the pieces, and which of them, one after the other.
    """
    division = layout.division
    empty_scratch, run_piece = _build_piece(method, gradients, layout)

    def run_pieces(state: ReplayState, key: Array, pieces: Pieces, to_run: Sequence[PiecesOf]):
        def one(data, index, carry):
            state, scratch, losses, squares, first = carry
            piece = jax.tree.map(lambda leaf: row(leaf, index), pieces)
            state, scratch, loss, updates = run_piece(state, scratch, data, key, piece)
            losses = set_row(losses, loss, index)
            squares = set_tree_row(squares, scratch.committed.squares, index)
            # A loop of one turn or none, as a condition would copy the vector at every piece.
            is_first = jnp.int32(index == 0)
            first = jax.lax.fori_loop(0, is_first, lambda turn, _: gradients.update_of(updates, piece, turn), first)
            return state, scratch, losses, squares, first

        dtype, pieces_size = state.central.dtype, pieces.size.shape[0]
        losses = jnp.zeros((pieces_size, division.lanes, *layout.of_members), dtype)
        scratch = empty_scratch(state, to_run[0].data, key, pieces)
        squares = jax.tree.map(lambda leaf: jnp.zeros((pieces_size, *leaf.shape), dtype), scratch.committed.squares)
        carry = (state, scratch, losses, squares, jnp.zeros_like(state.central))
        for data, begin, end in to_run:
            carry = jax.lax.fori_loop(begin, end, functools.partial(one, data), carry)
        state, _, losses, squares, first = carry
        return state, MadePieces(losses, squares, first)

    return run_pieces


def _build_piece(method: Method, gradients: Gradients, layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that makes the scratch, and the one that runs a piece with it.

    The second returns the state and the scratch after the piece, the losses of its lanes, and its updates.
    """
    division = layout.division
    commits = build_commits(method, layout, gradients.update_of)

    def empty_scratch(state: ReplayState, data: Any, key: Array, pieces: Pieces) -> Scratch:
        def rows(leaf: Array, count: int = division.piece_size) -> Array:
            return jnp.zeros((count, *leaf.shape[1:]), leaf.dtype)

        vectors = rows(state.central[None])
        lanes = jnp.zeros((division.lanes, *layout.of_members, division.padded), vectors.dtype)
        learner = jax.tree.map(lambda leaf: rows(leaf, division.lanes), state.workers.learner)
        worker_rows = jax.tree.map(rows, state.workers._replace(learner=()))
        norms = jnp.zeros((division.piece_size, *layout.of_members), vectors.dtype)
        squares = Squares(update=norms, moved=norms, proxy=norms)
        return Scratch(
            worker_rows=worker_rows,
            read=vectors,
            start=vectors if method.resume else (),
            learner=learner,
            results=gradients.empty(data, key, lanes, learner, jax.tree.map(lambda leaf: leaf[0], pieces)),
            committed=Committed(worker_rows.memory, vectors if layout.keeps_history else (), squares),
        )

    def run_piece(state: ReplayState, scratch: Scratch, data: Any, key: Array, piece: Pieces):
        worker, count = piece.visit.worker, piece.size
        worker_rows = read_rows(state.workers._replace(learner=()), worker, count, scratch.worker_rows)
        read = read_rows(state.read, piece.slot, count, scratch.read)
        start: Any = read
        if method.resume is not None:
            start = _starts(method, worker_rows.method, read, count, scratch.start)
        lanes = division.to_lanes(start)
        own = division.own(worker)
        learner = read_rows(state.workers.learner, own, division.own_count(count), scratch.learner)
        results = gradients.run(data, key, lanes, learner, piece, scratch.results)
        updates = division.to_shards(results.update)
        if method.sees_loss:
            loss = division.of_all(results.loss).astype(piece.visit.time.dtype)
            piece = piece._replace(visit=piece.visit._replace(loss=loss))
        before = state.central
        state, committed = commits(state, piece, worker_rows, read, start, updates, scratch.committed)
        if layout.keeps_history:
            state = _read_separately(layout, state, piece, jnp.concatenate([before[None], committed.central]))
        left = committed.memory, division.of_all(results.learner)
        memory, learner_rows = write_rows((state.workers.memory, state.workers.learner), left, worker, count)
        state = state._replace(workers=state.workers._replace(memory=memory, learner=learner_rows))
        scratch = Scratch(
            worker_rows=worker_rows,
            read=read,
            start=start if method.resume else (),
            learner=learner,
            results=results if layout.in_turn else (),
            committed=committed,
        )
        return state, scratch, results.loss.astype(read.dtype), updates

    return empty_scratch, run_piece


def _starts(method: Method, rows: Any, read: Array, count: Array, into: Array) -> Array:
    """Return where the workers whose replicas live on start from."""
    resume: Any = method.resume

    def one(i, into):
        return set_row(into, resume(*tree_row(tied((rows, read), i), i)), i)

    return jax.lax.fori_loop(0, count, one, into)


def _read_separately(layout: Layout, state: ReplayState, piece: Pieces, history: Array) -> ReplayState:
    """Make the separate reads of a piece, given the central variable before it and after each of its commits."""
    read = _write_separate(state.read, history, piece.reads, layout.read_blocks)
    return state._replace(read=read, form=_write_separate(state.form, history, piece.form_reads))


def _write_separate(array: Array, history: Array, reads: ReadsOfPiece, blocks: int = 1) -> Array:
    """Write what separate reads saw: the central variable after as many commits of the piece as their offset."""
    if reads.slot.shape[0] == 0:
        return array
    if blocks > 1:
        return copy_blocks(array, history, reads.slot, reads.offset, reads.block, reads.size, blocks)
    seen = jnp.zeros((reads.slot.shape[0], *array.shape[1:]), array.dtype)
    return write_rows(array, read_rows(history, reads.offset, reads.size, seen), reads.slot, reads.size)
