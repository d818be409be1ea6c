"""The jitted heart of the replay: all gradients of a piece at once, then its commits one after the other.

A piece of up to ``piece_size`` commits is padded with empty ones, which compute on a scratch row and change nothing.
Rows of a carried ``[workers, parameters]`` array are read at the start of a piece and written at its end, one
dynamic slice a row: XLA then updates the array in place, where indexing or updating it commit by commit copies it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem

#: Quantiles of the diagnostics that the replay records.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


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


class WorkerRow(NamedTuple):
    """All that belongs to one worker; in the replay's state each leaf has a leading axis of workers."""

    method: State
    optimizer: State
    problem: State
    memory: State
    proxy: State


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
    diagnose: Array  # bool: record the diagnostics of the piece's first commit


class Records(NamedTuple):
    """What is recorded of each commit, ``[pieces, piece_size]``, and of diagnosed pieces, ``[pieces, ...]``."""

    loss: Array
    update_norm: Array
    central_energy: Array
    proxy_energy: Array
    diagnostics: dict[str, Array]


class LocalResult(NamedTuple):
    """What a worker brings to its visit."""

    start: Array
    update: Array
    loss: Array
    optimizer: State
    problem: State


def initial_state(method: Method, problem: Problem, params: Any, slots: int, form_slots: int, workers: int):
    """Return the replay's state at version zero, from the problem's initial parameters."""
    central = ravel_pytree(params)[0]
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
    method: Method, problem: Problem, layout: Layout, unravel: Callable[[Array], Any]
) -> Callable[[ReplayState, Any, Array, Pieces, Array], tuple[ReplayState, Records]]:
    """Return the jitted function that runs the first ``count`` of some planned pieces.

    Its arguments: the state (donated), the training data, the key of the problem's randomness, the pieces and their
    count. The number of pieces in ``Pieces`` is part of the compiled shape, ``count`` is not.
    """
    local = build_local(method, problem, layout.window, unravel)
    commit = build_commit(method, layout.proxy_momentum)
    diagnose = build_diagnose(method, unravel)

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
        size = layout.piece_size
        # Read in a loop of their own: XLA would fuse single reads into later work, past the first write, and then has
        # to copy the arrays.
        reads = jax.lax.map(lambda slot: _row(state.read, slot), piece.slot)
        rows = jax.lax.map(lambda worker: _tree_row(state.workers, worker), piece.visit.worker)
        read = [reads[i] for i in range(size)]
        workers = [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for i in range(size)]
        visits = [jax.tree.map(lambda leaf, i=i: leaf[i], piece.visit) for i in range(size)]
        batched = (rows, reads, piece.visit, piece.job, piece.rows)
        if layout.one_by_one:
            results = jax.lax.map(lambda one: local(data, key, *one), batched)
        else:
            results = jax.vmap(lambda *one: local(data, key, *one))(*batched)

        central, server = state.central, state.server
        seen = [central]  # the central variable after 0, 1, ... commits of this piece
        recorded = []
        diagnostics: dict[str, Array] = {}
        for i in range(size):
            form = _form(state, piece, seen, i) if layout.separate_forms else central
            result = jax.tree.map(lambda leaf, i=i: leaf[i], results)
            if i == 0:
                # The first commit of a piece, so that what it is formed from is at hand as whole arrays.
                diagnostics = jax.lax.cond(
                    piece.diagnose,
                    diagnose,
                    lambda *args: jax.tree.map(
                        lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(diagnose, *args)
                    ),
                    *(workers[0].method, result.update, result.start, form, visits[0]),
                )
            applied, workers[i], record = commit(server, central, form, workers[i], read[i], result, visits[i])
            keep = piece.valid[i]
            central = jnp.where(keep, applied.central, central)
            server = jax.tree.map(lambda new, old, keep=keep: jnp.where(keep, new, old), applied.server, server)
            seen.append(central)
            recorded.append(record)

        state = ReplayState(
            central=central,
            server=server,
            read=_write_reads(state.read, seen, piece, layout),
            form=_write_separate(state.form, seen, piece.form_read_slot, piece.form_read_offset),
            workers=_write_rows(state.workers, workers, piece.visit.worker),
        )
        return state, Records(results.loss, *(jnp.stack(column) for column in zip(*recorded, strict=True)), diagnostics)

    return jax.jit(advance, donate_argnums=0)


def build_local(method: Method, problem: Problem, window: int, unravel: Callable[[Array], Any]):
    """Return the function that takes a worker's local steps: the only place where gradients are computed."""
    optimizer = optax.with_extra_args_support(method.optimizer)

    gradient = jax.value_and_grad(problem.stateful_loss, has_aux=True)

    def step(carry, rows, key, data, visit):
        params, optimizer_state, problem_state = carry
        batch = jax.tree.map(lambda array: array[rows], data)
        (value, problem_state), gradients = gradient(params, problem_state, batch, key)
        steps, optimizer_state = optimizer.update(gradients, optimizer_state, params, visit=visit)
        return (optax.apply_updates(params, steps), optimizer_state, problem_state), (steps, value)

    def local(data, key, worker: WorkerRow, read: Array, visit: Visit, job: Array, rows: Array) -> LocalResult:
        start = method.resume(worker.method, read) if method.resume else read
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), job)
        carry = (unravel(start), worker.optimizer, worker.problem)
        if window == 1:
            carry, (steps, value) = step(carry, rows[0], key, data, visit)
            return LocalResult(start, ravel_pytree(steps)[0], value, carry[1], carry[2])

        def next_step(state, index):
            carry, update = state
            carry, (steps, value) = step(carry, rows[index], jax.random.fold_in(key, index), data, visit)
            return (carry, update + ravel_pytree(steps)[0]), value

        (carry, update), values = jax.lax.scan(next_step, (carry, jnp.zeros_like(start)), jnp.arange(window))
        return LocalResult(start, update, jnp.mean(values), carry[1], carry[2])

    return local


def build_commit(method: Method, proxy_momentum: float):
    """Return the function of one commit: message, apply, and what is recorded of it."""

    def commit(server, central, form, worker: WorkerRow, read, result: LocalResult, visit: Visit):
        origin = method.origin(worker.method, read) if method.origin else read
        message, method_state, _ = method.message(worker.method, result.update, result.start, form, visit)
        applied = method.apply(server, central, message, worker.memory, visit)
        proxy = () if method.proxy else proxy_momentum * worker.proxy + result.update
        worker = WorkerRow(method_state, result.optimizer, result.problem, applied.memory, proxy)
        record = (
            jnp.sqrt(_square(applied.central - central)),
            _square(applied.central - origin) / 2,
            _square(method.proxy(method_state) if method.proxy else proxy) / 2,
        )
        return applied, worker, record

    return commit


def build_diagnose(method: Method, unravel: Callable[[Array], Any]):
    """Return the function that summarises a method's diagnostics: quantiles, and a median for each tensor."""

    def diagnose(worker, update, start, form, visit) -> dict[str, Array]:
        diagnostics = method.message(worker, update, start, form, visit)[2]
        summary = {}
        for name, value in diagnostics.items():
            if value.dtype == bool:
                summary[name] = jnp.mean(value, dtype=update.dtype)
            else:
                summary[name] = jnp.quantile(value, jnp.array(QUANTILES, value.dtype))
                tensors = jax.tree.leaves(unravel(value))
                summary[f"{name} by tensor"] = jnp.stack([jnp.median(tensor) for tensor in tensors])
        return summary

    return diagnose


def _form(state: ReplayState, piece: Pieces, seen: list[Array], i: int) -> Array:
    """Return the central variable that message ``i`` is formed with, where that is read apart."""
    form = _row(state.form, piece.form_slot[i])
    for offset, central in enumerate(seen):
        form = jnp.where(piece.form_offset[i] == offset, central, form)
    return form


def _write_reads(read: Array, seen: list[Array], piece: Pieces, layout: Layout) -> Array:
    if layout.reads == "separate":
        return _write_separate(read, seen, piece.read_slot, piece.read_offset)
    values = seen[1:] if layout.reads == "after" else seen[:-1]
    return _write_rows(read, values, piece.slot)


def _write_separate(array: Array, seen: list[Array], slots: Array, offsets: Array) -> Array:
    if slots.shape[0] == 0:
        return array
    values = jnp.stack(seen)
    return _write_rows(array, [_row(values, offsets[i]) for i in range(slots.shape[0])], slots)


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


def _write_rows(tree: Any, rows: list[Any], index: Array) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def write(i, tree):
        return jax.tree.map(lambda leaf, new: _set_row(leaf, _row(new, i), index[i]), tree, stacked)

    return jax.lax.fori_loop(0, len(rows), write, tree)
