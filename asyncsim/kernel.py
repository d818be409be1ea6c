"""The jitted heart of the replay: all gradients of a piece at once, then its commits one after the other.

A piece has room for ``piece_size`` commits; where there are fewer, the gradients beyond are computed and dropped.
Reading rows of the carried ``[workers, parameters]`` arrays, committing, and writing rows are three loops, each over
the commits there are. They are loops even where a piece has room for one commit only: XLA fuses no work across a loop
of unknown length, so it never reads a row after the first write (it would have to copy the whole array at every
piece), and an update is a number in memory before it is applied, the same for every method.
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

    @property
    def keeps_history(self) -> bool:
        """Whether reads may see the central variable between any two commits of a piece."""
        return self.reads == "separate" or self.separate_forms


class ReplayState(NamedTuple):
    """The replay between two pieces.

    Attributes
    ----------
    central : Float[Array, "parameters"]
    server : tree
        The method's own state on the server.
    read : Float[Array, "slots parameters"]
        What was read and waits for its commit.
    form : Float[Array, "form_slots parameters"]
        What messages will be formed with, if that is read apart.
    workers : WorkerRow
        Leaves with leading axis ``workers``.
    """

    central: Array
    server: State
    read: Array
    form: Array
    workers: WorkerRow


class ReadsOfPiece(NamedTuple):
    """Separate reads that fall into a piece: how many, and for each the slot and the commits of the piece it sees."""

    size: Array
    slot: Array  # [reads_size]
    offset: Array  # [reads_size]


class Pieces(NamedTuple):
    """The plan of consecutive pieces, all leaves with leading axis ``pieces``; see `Layout` for the sizes."""

    size: Array  # commits in the piece
    slot: Array  # [piece_size]
    form_slot: Array  # [piece_size]
    form_offset: Array  # [piece_size], commits of this piece that the read for the message saw; -1: before this piece
    visit: Visit  # [piece_size]
    job: Array  # [piece_size]
    rows: Array  # [piece_size, window, batch] examples
    reads: ReadsOfPiece
    form_reads: ReadsOfPiece


class Records(NamedTuple):
    """What is recorded of each commit, ``[pieces, piece_size]``."""

    loss: Array
    update_norm: Array
    central_energy: Array
    proxy_energy: Array


class Committed(NamedTuple):
    """What a piece's commits leave: leaves with leading axis ``piece_size``."""

    method: State
    memory: State
    proxy: State
    central: Any  #: the central variable after each commit, if reads need its history; else ``()``
    recorded: tuple[Array, ...]  #: update norm, central and proxy energy


class First(NamedTuple):
    """What the first commit of some pieces was made from, for its diagnostics.

    Attributes
    ----------
    start : Float[Array, "parameters"]
        Where its local steps started; ``()`` if that is what was read.
    update : Float[Array, "parameters"]
    """

    start: Array | tuple[()]
    update: Array


class Scratch(NamedTuple):
    """Memory that pieces use one after the other: filled anew by each, never cleared."""

    read: Array
    workers: WorkerRow
    results: LocalResult | tuple[()]  #: ``()`` if the gradients of a piece are batched
    committed: Committed


def initial_state(
    method: Method, flat: Flat, params: Any, problem_state: Any, slots: int, form_slots: int, workers: int
) -> ReplayState:
    """Return the replay's state at version zero, from the problem's initial parameters and non-trained state."""
    central = flat.ravel(params)
    server = method.init_server(central)
    row = WorkerRow(
        method=method.init_worker(central),
        optimizer=method.optimizer.init(params),
        problem=problem_state,
        memory=method.init_memory(central),
        proxy=() if method.proxy else jnp.zeros_like(central),
    )
    return ReplayState(
        # Copies: the state is donated, and neither its parts nor the user's own arrays may share memory with it.
        central=jnp.array(central),
        server=jax.tree.map(jnp.array, server),
        read=_repeat(central, slots),
        form=_repeat(central, form_slots),
        workers=jax.tree.map(lambda leaf: _repeat(jnp.asarray(leaf), workers), row),
    )


def build_advance(
    method: Method, problem: Problem, layout: Layout, flat: Flat
) -> Callable[[ReplayState, Any, Array, Pieces, Array], tuple[ReplayState, Records, First]]:
    """Return the jitted function that runs the first ``count`` of some planned pieces.

    Its arguments: the state (donated), the training data, the key of the problem's randomness, the pieces and their
    count. The number of pieces in ``Pieces`` is part of the compiled shape, ``count`` is not.
    """
    local = build_local(method, problem, layout.window, flat)
    commits = build_commits(method, layout)

    def advance(state: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        def run_piece(index, carry):
            state, scratch, records, first = carry
            piece = jax.tree.map(lambda leaf: _row(leaf, index), pieces)
            state, scratch, record, results = one_piece(state, scratch, data, key, piece)
            records = jax.tree.map(lambda all_, one: _set_row(all_, one, index), records, record)
            # A loop of one turn or none, as a condition would copy both vectors at every piece.
            made = jax.tree.map(lambda leaf: leaf[0], First(results.start, results.update))
            first = jax.lax.fori_loop(0, jnp.int32(index == 0), lambda _, first: made, first)
            return state, scratch, records, first

        dtype, shape = state.central.dtype, (pieces.size.shape[0], layout.piece_size)
        records = Records(*(jnp.zeros(shape, dtype) for _ in Records._fields))
        scratch = empty_scratch(state, data, key, pieces)
        first = First(jnp.zeros_like(state.central) if method.resume else (), jnp.zeros_like(state.central))
        state, _, records, first = jax.lax.fori_loop(0, count, run_piece, (state, scratch, records, first))
        return state, records, first

    def for_gradients(workers: WorkerRow) -> WorkerRow:
        """Leave out what gradients need not know: reading it would make XLA copy it before the commits write it."""
        return workers._replace(method=workers.method if method.resume else (), memory=(), proxy=())

    def empty_scratch(state: ReplayState, data: Any, key: Array, pieces: Pieces) -> Scratch:
        size = layout.piece_size
        rows = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape[1:]), leaf.dtype), state.workers)
        vectors = jnp.zeros((size, *state.central.shape), state.central.dtype)
        recorded = tuple(jnp.zeros(size, state.central.dtype) for _ in range(3))
        history = vectors if layout.keeps_history else ()
        committed = Committed(rows.method, rows.memory, rows.proxy, history, recorded)
        results: Any = ()
        if layout.one_by_one:
            one = (
                for_gradients(rows),
                vectors,
                *jax.tree.map(lambda leaf: leaf[0], (pieces.visit, pieces.job, pieces.rows)),
            )
            shapes = jax.eval_shape(jax.vmap(lambda *one: local(data, key, *one)), *one)
            results = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return Scratch(vectors, for_gradients(rows), results, committed)

    def gradients(data: Any, key: Array, workers: WorkerRow, read: Array, piece: Pieces, into: Any) -> LocalResult:
        arguments = (workers, read, piece.visit, piece.job, piece.rows)
        if not layout.one_by_one:
            return jax.vmap(lambda *one: local(data, key, *one))(*arguments)

        def next_one(i, results):
            one = local(data, key, *_tree_row(arguments, i))
            return jax.tree.map(lambda all_, new: _set_row(all_, new, i), results, one)

        return jax.lax.fori_loop(0, piece.size, next_one, into)

    def one_piece(state: ReplayState, scratch: Scratch, data: Any, key: Array, piece: Pieces):
        worker, count = piece.visit.worker, piece.size
        read = read_rows(state.read, piece.slot, count, scratch.read)
        rows = read_rows(for_gradients(state.workers), worker, count, scratch.workers)
        results = gradients(data, key, rows, read, piece, scratch.results)
        central, server, new_read, committed = commits(state, piece, read, results, scratch.committed)
        scratch = Scratch(read, rows, results if layout.one_by_one else (), committed)
        rows = WorkerRow(committed.method, results.optimizer, results.problem, committed.memory, committed.proxy)
        form = state.form
        if layout.keeps_history:
            history = jnp.concatenate([state.central[None], committed.central])
            new_read = _write_separate(new_read, history, piece.reads)
            form = _write_separate(form, history, piece.form_reads)
        workers = _write_rows(state.workers, rows, worker, count)
        state = ReplayState(central, server, new_read, form, workers)
        return state, scratch, Records(results.loss.astype(read.dtype), *committed.recorded), results

    return jax.jit(advance, donate_argnums=0)


def build_commits(method: Method, layout: Layout):
    """Return the function that commits a piece's updates, one after the other."""

    def commits(state: ReplayState, piece: Pieces, read: Array, results: LocalResult, scratch: Committed):
        start: Any = results.start if method.resume else read

        def form(i: Array, central: Array, committed: Committed) -> Array:
            """Return the central variable that message ``i`` is formed with."""
            if not layout.separate_forms:
                return central
            # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read before the piece.
            offset = piece.form_offset[i]
            seen = jnp.where(offset == 0, state.central, _row(committed.central, jnp.maximum(offset - 1, 0)))
            return jnp.where(offset < 0, _row(state.form, piece.form_slot[i]), seen)

        def one(i, central, server, form):
            visit = jax.tree.map(lambda leaf: leaf[i], piece.visit)
            worker = _tree_row(state.workers, visit.worker)
            update = _row(results.update, i)
            origin = method.origin(worker.method, _row(read, i)) if method.origin else _row(read, i)
            message, method_state, _ = method.message(worker.method, update, _row(start, i), form, visit)
            applied = method.apply(server, central, message, worker.memory, visit)
            proxy = method.proxy(method_state) if method.proxy else layout.proxy_momentum * worker.proxy + update
            recorded = (
                jnp.sqrt(_square(applied.central - central)),
                _square(applied.central - origin) / 2,
                _square(proxy) / 2,
            )
            kept = () if method.proxy else proxy
            after = applied.central if layout.keeps_history else ()
            return applied.central, applied.server, Committed(method_state, applied.memory, kept, after, recorded)

        def step(i, carry):
            before, server, new_read, all_committed = carry
            central, server, committed = one(i, before, server, form(i, before, all_committed))
            if layout.reads != "separate":
                # The worker's own read, atomic with its commit.
                new_read = _set_row(new_read, central if layout.reads == "after" else before, piece.slot[i])
            all_committed = jax.tree.map(lambda all_, new: _set_row(all_, new, i), all_committed, committed)
            return central, server, new_read, all_committed

        return jax.lax.fori_loop(0, piece.size, step, (state.central, state.server, state.read, scratch))

    return commits


def _write_separate(array: Array, history: Array, reads: ReadsOfPiece) -> Array:
    """Write what separate reads saw: the central variable after as many commits of the piece as their offset."""
    if reads.slot.shape[0] == 0:
        return array
    seen = jnp.zeros((reads.slot.shape[0], *array.shape[1:]), array.dtype)
    return _write_rows(array, read_rows(history, reads.offset, reads.size, seen), reads.slot, reads.size)


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


def read_rows(tree: Any, index: Array, count: Array, into: Any) -> Any:
    """Read the first ``count`` rows that the index names; the others are whatever ``into`` held."""

    def read(i, rows):
        return jax.tree.map(lambda all_, leaf: _set_row(all_, _row(leaf, index[i]), i), rows, tree)

    return jax.lax.fori_loop(0, count, read, into)


def _write_rows(tree: Any, rows: Any, index: Array, count: Array) -> Any:
    """Write the first ``count`` rows to where the index says."""

    def write(i, tree):
        return jax.tree.map(lambda leaf, new: _set_row(leaf, _row(new, i), index[i]), tree, rows)

    return jax.lax.fori_loop(0, count, write, tree)
