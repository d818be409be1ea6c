"""The commits of a piece, one after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories, Method, State, add, send_update
from asyncsim.replays.replay_state import Layout, Pieces, ReplayState, WorkerRow
from asyncsim.replays.rows import entry, row, set_row, set_tree_row, tied, tree_row


class Squares(NamedTuple):
    """Squared norms at each commit, ``[..., piece_size]``; on each device those of its part of the vectors."""

    update: Array  # of the central variable's step; before it is rounded where the server `adds_update`
    moved: Array  # of its way since the worker's origin
    proxy: Array  # of the proxy's momentum

    def recorded(self) -> tuple[Array, Array, Array]:
        """Return the update's norm, and the central variable's and the proxy's energy."""
        return jnp.sqrt(self.update), self.moved / 2, self.proxy / 2


class Measured(NamedTuple):
    """Vectors of a commit whose squared norms are recorded, see `Squares`."""

    update: Array
    moved: Array
    proxy: Array


class Committed(NamedTuple):
    """What a piece's commits leave beside the state: leaves with leading axis ``piece_size``."""

    memory: State  # written to the state after the piece, as methods may see the memories of all workers
    central: Any  #: the central variable after each commit, if reads need its history; else ``()``
    squares: Squares


def adds_update(method: Method) -> bool:
    """Return whether the server adds the update as it is: it is the step then, which need not be formed anew."""
    return method.message is send_update and method.apply is add


def build_commit(method: Method, layout: Layout) -> tuple[Callable[..., Any], Callable[..., Array]]:
    """Return the function that makes one commit, and the one that tells what its worker reads at that visit.

    The first goes from the central variable, the server's state, the worker's row, its read, start and update, the
    central variable that the message is formed with, the visit and, if the method sees them, the memories of all
    workers to the central variable, the server's state and the worker's row after it, and what is `Measured`.
    """

    def commit(central, server, worker, read, start, update, form, visit, *memories):
        origin = method.origin(worker.method, read) if method.origin else read
        message, method_state, _ = method.message(worker.method, update, start, form, visit)
        applied = method.apply(server, central, message, worker.memory, visit, *memories)
        proxy = method.proxy(method_state) if method.proxy else layout.proxy_momentum * worker.proxy + update
        # The difference would need the central variable before the commit, and so a copy of it.
        step = update if adds_update(method) else applied.central - central
        left = WorkerRow(method_state, applied.memory, () if method.proxy else proxy, learner=())
        return applied.central, applied.server, left, Measured(step, applied.central - origin, proxy)

    def reply(server, central, memory, visit):
        return central if method.reply is None else method.reply(server, central, memory, visit)

    return commit, reply


def build_visit(method: Method, layout: Layout) -> Callable[..., Any]:
    """Return the function that makes one commit and what its worker reads then, outside of any piece.

    It goes from the central variable, the server's state, the worker's row, its read, what its gradients made (start,
    update, loss, learner), what the message is formed with, if that is read apart, and the visit to the central
    variable, the server's state, the worker's row without its learner, the learner, what the worker reads (``()`` if
    that is a visit of its own) and the four numbers of `Records`, ``[4]``.
    """
    commit, reply = build_commit(method, layout)

    def visited(central, server, row, read, made, form, visit):
        start, update, loss, learner = made
        if method.resume is None:
            start = read
        if method.sees_loss:
            visit = visit._replace(loss=loss.astype(visit.time.dtype))
        formed = form if layout.separate_forms else central
        after, server_after, left, measured = commit(central, server, row, read, start, update, formed, visit)
        squares = Squares(*layout.division.squares(measured))
        if layout.reads == "after":
            seen: Any = reply(server_after, after, left.memory, visit)
        else:
            seen = reply(server, central, row.memory, visit) if layout.reads == "before" else ()
        numbers = jnp.stack([loss.astype(central.dtype), *squares.recorded()])
        return after, server_after, left, learner, seen, numbers

    return visited


def build_commits(method: Method, layout: Layout, update_of: Callable[[Array, Pieces, Array], Array]):
    """Return the function that commits a piece's updates, one after the other; ``update_of`` is that of `Gradients`.

    It goes from the state, the piece, the rows of its workers (``[piece_size]``, as they are before it: each worker
    commits once), what they read, their starts, what the gradients made as updates, and the scratch of what the commits
    leave beside the state to the state after it and that. In this state memories, learners and separate reads are those
    before the piece.
    """
    division = layout.division
    commit, reply = build_commit(method, layout)

    def commits(
        state: ReplayState,
        piece: Pieces,
        worker_rows: WorkerRow,
        read: Array,
        start: Array,
        updates: Array,
        scratch: Committed,
    ) -> tuple[ReplayState, Committed]:
        def form(i: Array, central: Array, committed: Committed) -> Array:
            """Return the central variable that message ``i`` is formed with."""
            if not layout.separate_forms:
                return central
            # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read before the piece.
            offset = piece.form_offset[i]
            seen = jnp.where(offset == 0, state.central, row(committed.central, jnp.maximum(offset - 1, 0)))
            return jnp.where(offset < 0, row(state.form, entry(piece.form_slot, i)), seen)

        def memories(i: Array, committed: Committed) -> tuple[Memories, ...]:
            """Return what ``apply`` is told of all workers."""
            if not method.sees_memories:
                return ()
            there = jnp.arange(division.piece_size, dtype=i.dtype) < i
            worker = jnp.where(there, piece.visit.worker, piece.visit.workers)
            return (Memories(state.workers.memory, committed.memory, worker),)

        def step(i, carry):
            before, server_before, new_read, workers, committed = carry
            visit = jax.tree.map(lambda leaf: leaf[i], piece.visit)
            # Each array is tied by itself, so that what the method has no use for is not even read.
            worker, *own = (tree_row(tied(leaves, i), i) for leaves in (worker_rows, read, start))
            update = update_of(updates, piece, i)
            told = memories(i, committed)
            formed = form(i, before, committed)
            central, server, left, measured = commit(before, server_before, worker, *own, update, formed, visit, *told)
            squares = Squares(*division.squares(measured))
            # The worker's own read, atomic with its commit.
            if layout.reads == "after":
                new_read = set_row(new_read, reply(server, central, left.memory, visit), piece.slot[i])
            elif layout.reads == "before":
                new_read = set_row(new_read, reply(server_before, before, worker.memory, visit), piece.slot[i])
            workers = set_tree_row(workers, left._replace(memory=()), piece.visit.worker[i])
            after = central if layout.keeps_history else ()
            committed = set_tree_row(committed, Committed(left.memory, after, squares), i)
            return central, server, new_read, workers, committed

        carried = state.workers._replace(memory=(), learner=())
        carry = (state.central, state.server, state.read, carried, scratch)
        central, server, new_read, carried, committed = jax.lax.fori_loop(0, piece.size, step, carry)
        workers = state.workers._replace(method=carried.method, proxy=carried.proxy)
        return ReplayState(central, server, new_read, state.form, workers), committed

    return commits
