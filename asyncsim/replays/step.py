"""The one step of a method: a worker's preparation before its local steps, and its commit.

`begin` and `finish` are the only semantics of a method: of every form of replay, of looks at whole
vectors and of real processes. Between them the worker takes its local steps
(`asyncsim.replays.local`). A store gathers the `StepInputs` and writes back the `StepOutputs`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import (
    OF_MESSAGE,
    Applied,
    Array,
    Memories,
    Method,
    State,
    Visit,
    add,
    send_update,
)
from asyncsim.replays.central import commit_mean, meet, take_up
from asyncsim.replays.local import LocalResult, restart_worker
from asyncsim.replays.recorders import Commit
from asyncsim.replays.state import Waiting, WorkerRow, of_message


class ServerState(NamedTuple):
    """The central variable, the method's state on the server and the messages that wait there."""

    central: Array
    server: State = ()
    waiting: Any = ()  #: `asyncsim.replays.state.Waiting` of methods with ``combine``; else ``()``


class StepInputs(NamedTuple):
    """The inputs of a step besides the server's state.

    Attributes
    ----------
    visit : Visit
    row : WorkerRow
    read : Array
        The central variable as the worker read it; without a server, set by `begin`.
    pulled : Array
        The central variable that the message is formed with, if that is read in another visit.
    received : tree
        Without a server the messages that it takes up, summed, or the state of its partner.
    partner : int
        The partner; negative without one.
    fresh : bool
        Whether the worker restarts without its state.
    """

    visit: Visit
    row: WorkerRow
    read: Any = ()
    pulled: Any = ()
    received: Any = ()
    partner: Any = ()
    fresh: Any = ()


class StepOutputs(NamedTuple):
    """The outputs of a step.

    Attributes
    ----------
    server_state : ServerState
    commit : Commit
        With the worker's own states.
    read : Array
        The worker's read at this visit for its next computation, or the reply to all reads of this
        version; ``()`` without either.
    partner_state : tree
        The partner's state after the meeting.
    """

    server_state: ServerState
    commit: Commit
    read: Any
    partner_state: Any


def begin(
    method: Method, restart: Callable[[Array], tuple[State, Any]] | None, inputs: StepInputs
) -> tuple[StepInputs, Array]:
    """Mix, restart and resume a worker; return it with the start of its local steps.

    ``restart`` is `asyncsim.replays.local.build_restart`'s function; None if no worker restarts.
    """
    row, read, resume = inputs.row, inputs.read, method.resume
    if method.mix is not None:
        row = take_up(method, row, inputs.received, inputs.visit)
        assert resume is not None
        # A worker that mixes reads no central variable: its mixed replica is read and start.
        read, resume = resume(row.method, None), None
    if restart is not None:
        row = restart_worker(restart, row, read, inputs.fresh)
    if method.refresh is not None:
        row = row._replace(method=method.refresh(row.method, read))
    start = read if resume is None else resume(row.method, read)
    return inputs._replace(row=row, read=read), start


def finish(
    method: Method,
    reads: str,
    server_state: ServerState,
    inputs: StepInputs,
    start: Array,
    local: LocalResult,
    *memories: Memories,
    is_valid: Array | None = None,
) -> StepOutputs:
    """Apply the commit of a worker that has taken its local steps.

    ``reads``: when the worker reads for its next computation, see `asyncsim.replays.waves`.
    ``memories``: all workers' memories, if the method sees them. ``is_valid``: false for padding
    of a piece, which leaves the server's state unchanged.
    """
    visit, row, received = inputs.visit, inputs.row, inputs.received
    central, server, waiting = server_state
    gossips = method.gossips
    if method.meet is not None:
        row, received = meet(method, row, received, inputs.partner, visit)
    # The plan knows no losses: only here, after the local steps, has the visit one.
    visit = visit._replace(loss=local.loss.astype(start.dtype))
    pulled = central if isinstance(inputs.pulled, tuple) else inputs.pulled
    message, worker, diagnostics = method.message(row.method, local.update, start, pulled, visit)
    if gossips:
        applied = commit_mean(method, server, central, message, worker, row.memory, visit)
    elif method.combine is not None:
        applied, waiting = _wait(method, server_state, message, row.memory, visit, is_valid)
    else:
        applied = method.apply(server, central, message, row.memory, visit, *memories)
    next_read: Any = ()
    if reads == "message":
        next_read = message
    elif reads == "after" or (reads == "separate" and method.same_reply):
        states = applied.server, applied.central, applied.memory
        next_read = applied.central if method.reply is None else method.reply(*states, visit)
    elif reads == "before":
        # The server answers before it applies: the reply sees the states of before the commit.
        states = server, central, row.memory
        next_read = central if method.reply is None else method.reply(*states, visit)
    # Where the server adds the update, the step is the update: a subtraction of the old central
    # variable would keep it alive, and XLA would copy it.
    adds_update = method.message is send_update and method.apply is add
    adds_update = adds_update and not gossips and method.combine is None
    commit = Commit(
        visit=visit,
        loss=local.loss,
        read=inputs.read,
        start=start,
        update=local.update,
        message=message,
        diagnostics=diagnostics,
        origin=method.origin(row.method, inputs.read) if method.origin else inputs.read,
        before=central,
        central=applied.central,
        step=local.update if adds_update else applied.central - central,
        worker=worker,
        memory=applied.memory,
        server=applied.server,
        proxy=method.proxy(worker) if method.proxy else (),
    )
    after = applied.central, applied.server
    if is_valid is not None:
        after = jax.tree.map(
            lambda new, old: jnp.where(is_valid, new, old), after, (central, server)
        )
    return StepOutputs(ServerState(*after, waiting), commit, next_read, received)


def _wait(
    method: Method,
    server_state: ServerState,
    message: State,
    memory: State,
    visit: Visit,
    is_valid: Array | None,
) -> tuple[Applied, Waiting]:
    """Store a message among the waiting ones; if it completes a version, combine them."""
    combine: Any = method.combine
    if method.receive is not None:
        message, memory = method.receive(memory, message, visit)

    def put(rows: Array, row: Array) -> Array:
        if is_valid is not None:
            # One row, not all: a select over the whole buffer would copy it at every commit.
            old = jax.lax.dynamic_index_in_dim(rows, visit.place, 0, keepdims=False)
            row = jnp.where(is_valid, row, old)
        return jax.lax.dynamic_update_index_in_dim(rows, row, visit.place, 0)

    waiting = jax.tree.map(put, server_state.waiting, Waiting(message, of_message(visit)))

    def complete() -> tuple[Array, State]:
        shared = {name: getattr(visit, name) for name in Visit._fields if name not in OF_MESSAGE}
        central, server, _ = server_state
        visits = waiting.visits._replace(**shared)
        applied = combine(server, central, waiting.messages, visits)
        return applied.central, applied.server

    completes = jnp.asarray(visit.completes)
    if is_valid is not None:
        completes &= is_valid
    # A conditional, not a select: an incomplete version then costs only a copy of the results.
    central, server = jax.lax.cond(
        completes, complete, lambda: (server_state.central, server_state.server)
    )
    return Applied(central, server, memory), waiting
