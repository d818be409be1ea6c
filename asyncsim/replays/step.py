"""The one step of a method: what precedes a worker's local steps, and what its commit does.

`begin` and `finish` are the only semantics of a method: of every form of replay, of looks at whole
vectors and of real processes. Between them the worker takes its local steps
(`asyncsim.replays.local`). A store gathers what a step meets, `Held`, and writes back what it
leaves, `Left`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import OF_MESSAGE, Applied, Array, Memories, Method, State, Visit, add, send_update
from asyncsim.replays.central import commit_mean, meet, take_up
from asyncsim.replays.local import LocalResult, start_anew
from asyncsim.replays.recorders import Commit
from asyncsim.replays.state import Waiting, WorkerRow, of_message


class Place(NamedTuple):
    """The central variable, the method's state on the server and the messages that wait there."""

    central: Array
    server: State = ()
    waiting: Any = ()  #: `asyncsim.replays.state.Waiting` of methods with ``combine``; else ``()``


class Held(NamedTuple):
    """What a step meets besides the place.

    Attributes
    ----------
    visit : Visit
    row : WorkerRow
    read : Array
        What the worker read; set by `begin` without a server.
    pulled : Array
        The central variable that the message is formed with, if that is read in another visit.
    other : tree
        Without a server the messages that it takes up, summed, or the replica of its partner.
    partner : int
        The partner; negative without one.
    fresh : bool
        Whether the worker starts anew.
    """

    visit: Visit
    row: WorkerRow
    read: Any = ()
    pulled: Any = ()
    other: Any = ()
    partner: Any = ()
    fresh: Any = ()


class Left(NamedTuple):
    """What a commit leaves.

    Attributes
    ----------
    place : Place
    commit : Commit
        With the worker's own states.
    read : Array
        What the worker reads at this visit for its next computation; ``()`` if it does not.
    other : tree
        The partner's replica.
    """

    place: Place
    commit: Commit
    read: Any
    other: Any


def begin(method: Method, restart: Callable[[Array], tuple[State, Any]] | None, held: Held) -> tuple[Held, Array]:
    """Mix, restart and resume a worker; return it with the start of its local steps.

    ``restart`` is `asyncsim.replays.local.build_anew`'s function; None if no worker starts anew.
    """
    row, read, resume = held.row, held.read, method.resume
    if method.mix is not None:
        row = take_up(method, row, held.other, held.visit)
        assert resume is not None
        read, resume = resume(row.method, None), None
    if restart is not None:
        row = start_anew(restart, row, read, held.fresh)
    start = read if resume is None else resume(row.method, read)
    return held._replace(row=row, read=read), start


def finish(
    method: Method,
    reads: str,
    place: Place,
    held: Held,
    start: Array,
    local: LocalResult,
    *memories: Memories,
    made: Array | None = None,
) -> Left:
    """Make the commit of a worker that has taken its local steps.

    ``reads``: when the worker reads for its next computation, see `asyncsim.replays.waves`.
    ``memories``: those of all workers, if the method sees them. ``made``: whether there is a commit;
    without one the place stays as it is.
    """
    visit, row, other = held.visit, held.row, held.other
    central, server, waiting = place
    gossips = method.mix is not None or method.meet is not None
    if method.meet is not None:
        row, other = meet(method, row, other, held.partner, visit)
    if method.sees_loss:
        visit = visit._replace(loss=local.loss.astype(visit.time.dtype))
    pulled = central if isinstance(held.pulled, tuple) else held.pulled
    message, worker, diagnostics = method.message(row.method, local.update, start, pulled, visit)
    if gossips:
        applied = commit_mean(method, server, central, message, worker, row.memory, visit)
    elif method.combine is not None:
        applied, waiting = _wait(method, place, message, row.memory, visit, made)
    else:
        applied = method.apply(server, central, message, row.memory, visit, *memories)
    seen: Any = ()
    if reads == "message":
        seen = message
    elif reads == "after":
        states = applied.server, applied.central, applied.memory
        seen = applied.central if method.reply is None else method.reply(*states, visit)
    elif reads == "before":
        states = server, central, row.memory
        seen = central if method.reply is None else method.reply(*states, visit)
    # A server that adds the update steps by just that: to subtract, XLA would copy the central variable.
    adds_update = method.message is send_update and method.apply is add
    adds_update = adds_update and not gossips and method.combine is None
    commit = Commit(
        visit=visit,
        loss=local.loss,
        read=held.read,
        start=start,
        update=local.update,
        message=message,
        diagnostics=diagnostics,
        origin=method.origin(row.method, held.read) if method.origin else held.read,
        before=central,
        central=applied.central,
        step=local.update if adds_update else applied.central - central,
        worker=worker,
        memory=applied.memory,
        server=applied.server,
        proxy=method.proxy(worker) if method.proxy else (),
    )
    after = applied.central, applied.server
    if made is not None:
        after = jax.tree.map(lambda new, old: jnp.where(made, new, old), after, (central, server))
    return Left(Place(*after, waiting), commit, seen, other)


def _wait(
    method: Method, place: Place, message: State, memory: State, visit: Visit, made: Array | None
) -> tuple[Applied, Waiting]:
    """Let a message wait; if it completes a version, combine the messages of the version."""
    combine: Any = method.combine
    if method.receive is not None:
        message, memory = method.receive(memory, message, visit)

    def put(rows: Array, row: Array) -> Array:
        row = jnp.broadcast_to(row, rows.shape[1:])  # of an ensemble
        if made is not None:
            old = jax.lax.dynamic_index_in_dim(rows, visit.place, 0, keepdims=False)
            row = jnp.where(made, row, old)
        return jax.lax.dynamic_update_index_in_dim(rows, row, visit.place, 0)

    waiting = jax.tree.map(put, place.waiting, Waiting(message, of_message(visit)))

    def complete() -> tuple[Array, State]:
        shared = {name: getattr(visit, name) for name in Visit._fields if name not in OF_MESSAGE}
        applied = combine(place.server, place.central, waiting.messages, waiting.visits._replace(**shared))
        return applied.central, applied.server

    completes = jnp.asarray(visit.completes)
    if made is not None:
        completes &= made
    # A branch that is not taken costs nothing but the copy of what it returns.
    central, server = jax.lax.cond(completes, complete, lambda: (place.central, place.server))
    return Applied(central, server, memory), waiting
