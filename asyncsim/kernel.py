"""The jitted heart of the replay: all gradients of a piece at once, then its commits one after the other.

A piece of up to ``piece_size`` commits is padded with empty ones, which compute on a scratch row and change nothing.
Rows of a carried ``[workers, parameters]`` array are read at the start of a piece and written at its end, one
dynamic slice a row: XLA then updates the array in place, where indexing or updating it commit by commit copies it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.flat import Flat
from asyncsim.local import LocalResult, WorkerRow, build_local
from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem


class Layout(NamedTuple):
    """What the compiled program depends on besides method and problem.

    Attributes
    ----------
    piece_size, reads_size, form_reads_size : int
        Room for commits, separate reads and separate reads for messages in a piece.
    reads : {"after", "before", "separate"}
    separate_forms : bool
    window : int
        Local steps of each commit.
    one_by_one : bool
        Whether a piece's gradients run one after the other (``lax.map``) rather than batched (``vmap``).
    proxy_momentum : float
        Of the proxy that the replay keeps for methods without one.
    """

    piece_size: int
    reads_size: int
    form_reads_size: int
    reads: str
    separate_forms: bool
    window: int
    one_by_one: bool
    proxy_momentum: float


class ReplayState(NamedTuple):
    """The replay between two pieces.

    Attributes
    ----------
    central : Float[Array, "parameters"]
    server : tree
        The method's own state on the server.
    read : Float[Array, "slots+1 parameters"]
        What was read and waits for its commit; the last row is scratch.
    form : Float[Array, "form_slots+1 parameters"]
        What messages will be formed with, if that is read apart.
    workers : WorkerRow
        Leaves with leading axis ``workers + 1``; the last row is scratch.
    """

    central: Array
    server: State
    read: Array
    form: Array
    workers: WorkerRow


class Pieces(NamedTuple):
    """The plan of consecutive pieces, all leaves with leading axis ``pieces``; see `Layout` for the sizes."""

    valid: Array  # [piece_size] bool
    slot: Array  # [piece_size]
    form_slot: Array  # [piece_size]
    form_offset: Array  # [piece_size], commits of this piece that the read for the message saw; -1: before this piece
    visit: Visit  # [piece_size]
    job: Array  # [piece_size]
    rows: Array  # [piece_size, window, batch] examples
    read_slot: Array  # [reads_size]
    read_offset: Array  # [reads_size], commits of this piece that the read sees
    form_read_slot: Array  # [form_reads_size]
    form_read_offset: Array  # [form_reads_size]


class Records(NamedTuple):
    """What is recorded of each commit, ``[pieces, piece_size]``."""

    loss: Array
    update_norm: Array
    central_energy: Array
    proxy_energy: Array


def initial_state(
    method: Method, problem: Problem, flat: Flat, params: Any, slots: int, form_slots: int, workers: int
) -> ReplayState:
    """Return the replay's state at version zero, from the problem's initial parameters."""
    central = flat.ravel(params)
    row = WorkerRow(
        method=method.init_worker(central),
        optimizer=method.optimizer.init(params),
        problem=problem.init_state() if problem.init_state else (),
        memory=method.init_memory(central),
        proxy=() if method.proxy else jnp.zeros_like(central),
    )
    return ReplayState(
        central=central,
        server=method.init_server(central),
        read=_repeat(central, slots + 1),
        form=_repeat(central, form_slots + 1),
        workers=jax.tree.map(lambda leaf: _repeat(jnp.asarray(leaf), workers + 1), row),
    )


def build_advance(
    method: Method, problem: Problem, layout: Layout, flat: Flat
) -> Callable[[ReplayState, Any, Array, Pieces, Array], tuple[ReplayState, Records]]:
    """Return the jitted function that runs the first ``count`` of some planned pieces.

    Its arguments: the state (donated), the training data, the key of the problem's randomness, the pieces and their
    count. The number of pieces in ``Pieces`` is part of the compiled shape, ``count`` is not.
    """
    local = build_local(method, problem, layout.window, flat)
    commits = build_commits(method, layout)

    def advance(state: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        def run_piece(index, carry):
            state, records = carry
            piece = jax.tree.map(lambda leaf: _row(leaf, index), pieces)
            state, record = one_piece(state, data, key, piece)
            return state, jax.tree.map(lambda all_, one: _set_row(all_, one, index), records, record)

        number = pieces.valid.shape[0]
        first = jax.tree.map(lambda leaf: leaf[0], pieces)
        shapes = jax.eval_shape(one_piece, state, data, key, first)[1]
        records = jax.tree.map(lambda one: jnp.zeros((number, *one.shape), one.dtype), shapes)
        return jax.lax.fori_loop(0, count, run_piece, (state, records))

    def one_piece(state: ReplayState, data: Any, key: Array, piece: Pieces):
        worker = piece.visit.worker
        read = _read_rows(state.read, piece.slot)
        rows = _read_rows(state.workers._replace(memory=(), proxy=()), worker)
        arguments = (rows, read, piece.visit, piece.job, piece.rows)
        if layout.one_by_one:
            results = jax.lax.map(lambda one: local(data, key, *one), arguments)
        else:
            results = jax.vmap(lambda *one: local(data, key, *one))(*arguments)
        central, server, committed = commits(state, piece, read, results)
        rows = WorkerRow(committed.method, results.optimizer, results.problem, committed.memory, committed.proxy)
        before, after = state.central, committed.central
        state = ReplayState(
            central=central,
            server=server,
            read=_write_reads(state.read, before, after, piece, layout),
            form=_write_separate(state.form, before, after, piece.form_read_slot, piece.form_read_offset),
            workers=_write_rows(state.workers, rows, worker),
        )
        return state, Records(results.loss, *committed.recorded)

    return jax.jit(advance, donate_argnums=0)


class Committed(NamedTuple):
    """What a piece's commits leave: leaves with leading axis ``piece_size``."""

    method: State
    memory: State
    proxy: State
    central: Array  #: the central variable after each commit
    recorded: tuple[Array, Array, Array]  #: update norm, central and proxy energy


def build_commits(method: Method, layout: Layout):
    """Return the function that commits a piece's updates, one after the other."""

    def commits(state: ReplayState, piece: Pieces, read: Array, results: LocalResult):
        first = state.central
        history = jnp.zeros_like(read) if layout.separate_forms else ()

        def form(i: Array, central: Array, history: Array) -> Array:
            """Return the central variable that the message is formed with."""
            if not layout.separate_forms:
                return central
            # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read before the piece.
            offset = piece.form_offset[i]
            seen = jnp.where(offset == 0, first, _row(history, jnp.maximum(offset - 1, 0)))
            return jnp.where(offset < 0, _row(state.form, piece.form_slot[i]), seen)

        def one(carry, member):
            central, server, history = carry
            i, visit, read, start, update = member
            # Rows are read here, where they are used, and written after the last commit of the piece.
            worker = _tree_row(state.workers, visit.worker)
            origin = method.origin(worker.method, read) if method.origin else read
            message, method_state, _ = method.message(worker.method, update, start, form(i, central, history), visit)
            applied = method.apply(server, central, message, worker.memory, visit)
            proxy = method.proxy(method_state) if method.proxy else layout.proxy_momentum * worker.proxy + update
            recorded = (
                jnp.sqrt(_square(applied.central - central)),
                _square(applied.central - origin) / 2,
                _square(proxy) / 2,
            )
            valid = piece.valid[i]
            central = jnp.where(valid, applied.central, central)
            server = jax.tree.map(lambda new, old: jnp.where(valid, new, old), applied.server, server)
            if layout.separate_forms:
                history = _set_row(history, central, i)
            kept = () if method.proxy else proxy
            return (central, server, history), Committed(method_state, applied.memory, kept, central, recorded)

        start = results.start if method.resume else read
        members = (jnp.arange(layout.piece_size), piece.visit, read, start, results.update)
        (central, server, _), committed = jax.lax.scan(one, (first, state.server, history), members)
        return central, server, committed

    return commits


def _write_reads(read: Array, before: Array, after: Array, piece: Pieces, layout: Layout) -> Array:
    if layout.reads == "separate":
        return _write_separate(read, before, after, piece.read_slot, piece.read_offset)
    if layout.reads == "before":
        after = jnp.concatenate([before[None], after[:-1]])
    return _write_rows(read, after, piece.slot)


def _write_separate(array: Array, before: Array, after: Array, slots: Array, offsets: Array) -> Array:
    """Write what separate reads saw: ``before`` at offset 0, the central variable after k commits at k."""
    if slots.shape[0] == 0:
        return array
    return _write_rows(array, _read_rows(jnp.concatenate([before[None], after]), offsets), slots)


def _square(vector: Array) -> Array:
    return jnp.vdot(vector, vector)


def _repeat(leaf: Array, count: int) -> Array:
    return jnp.array(jnp.broadcast_to(leaf, (count, *leaf.shape)))


def _row(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


def _set_row(array: Array, row: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0)


def _tree_row(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda leaf: _row(leaf, index), tree)


def _read_rows(tree: Any, index: Array) -> Any:
    # A loop of its own: XLA would fuse single reads into later work, past the first write, and copy the arrays.
    return jax.lax.map(lambda i: _tree_row(tree, i), index)


def _write_rows(tree: Any, rows: Any, index: Array) -> Any:
    def write(i, tree):
        return jax.tree.map(lambda leaf, new: _set_row(leaf, _row(new, i), index[i]), tree, rows)

    return jax.lax.fori_loop(0, index.shape[0], write, tree)
