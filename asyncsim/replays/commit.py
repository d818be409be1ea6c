"""Where a commit meets what its worker read: the one place, for every form of computing, and for real processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from asyncsim.errors import InputError
from asyncsim.methods.method import Array, Method, State, add, send_update
from asyncsim.recorders import Commit, Recorder
from asyncsim.replays.state import WorkerRow

#: Names of the numbers that every replay records of a commit.
RECORDED = ("loss", "update_norm")


def build_commit(method: Method, reads: str) -> Callable[..., tuple[Commit, Any]]:
    """Return the function that makes one commit.

    It goes from the central variable, the server's state, the worker's row, what the worker had read, where its local
    steps started, their sum and mean loss, the central variable that the message is formed with, the visit and, if the
    method sees them, the memories of all workers to the `Commit` and to what the worker reads at this visit for its
    next computation (``()`` if ``reads`` are "separate").
    """
    # A server that adds the update makes a step of just that: to form it anew, the central variable would be copied.
    adds_update = method.message is send_update and method.apply is add

    def commit(central, server, row, read, start, update, loss, pulled, visit, *memories):
        if method.sees_loss:
            visit = visit._replace(loss=loss.astype(visit.time.dtype))
        message, worker, diagnostics = method.message(row.method, update, start, pulled, visit)
        applied = method.apply(server, central, message, row.memory, visit, *memories)
        seen: Any = ()
        if reads == "after":
            seen = applied.central
            if method.reply is not None:
                seen = method.reply(applied.server, applied.central, applied.memory, visit)
        elif reads == "before":
            seen = central if method.reply is None else method.reply(server, central, row.memory, visit)
        made = Commit(
            visit=visit,
            loss=loss,
            read=read,
            start=start,
            update=update,
            message=message,
            diagnostics=diagnostics,
            origin=method.origin(row.method, read) if method.origin else read,
            before=central,
            central=applied.central,
            step=update if adds_update else applied.central - central,
            worker=worker,
            memory=applied.memory,
            server=applied.server,
            proxy=method.proxy(worker) if method.proxy else (),
        )
        return made, seen

    return commit


def row_after(commit: Commit, recorders: Sequence[State], learner: Any = ()) -> WorkerRow:
    """Return the worker's row as a commit leaves it."""
    return WorkerRow(commit.worker, commit.memory, tuple(recorders), learner)


def observe(
    recorders: Sequence[Recorder], states: Sequence[State], commit: Commit, base: bool = True
) -> tuple[tuple[State, ...], Array]:
    """Return the recorders' states after a commit, and its numbers: of the `RECORDED`, if wanted, and of these."""
    dtype = commit.central.dtype
    numbers = [commit.loss.astype(dtype), jnp.sqrt(jnp.vdot(commit.step, commit.step))] if base else []
    after = []
    for recorder, state in zip(recorders, states, strict=True):
        new, found = recorder.observe(state, commit)
        after.append(new)
        numbers += [jnp.asarray(number).astype(dtype) for number in found]
    return tuple(after), jnp.stack(numbers) if numbers else jnp.zeros(0, dtype)


def require_recorders(record: Any) -> tuple[Recorder, ...]:
    """Return a replay's recorders, those with shared states last.

    Raises
    ------
    InputError
        For what is no recorder, or for a column that is there twice.
    """
    recorders = (record,) if isinstance(record, Recorder) else record
    if not isinstance(recorders, list | tuple):
        raise InputError(f"record = {record!r}: must be a list of recorders, [recorders.energy()] say")
    taken = {"commit", "commit_time", "worker", "worker_step", "staleness", *RECORDED}
    for recorder in recorders:
        if not isinstance(recorder, Recorder):
            hint = f"; call it, recorders.{recorder.__name__}()" if hasattr(recorder, "__name__") else ""
            raise InputError(f"record: {recorder!r} is not a recorder{hint}")
        for column in recorder.columns:
            if column in taken:
                raise InputError(f"record: two columns are called {column!r}; give each recorder once")
            taken.add(column)
    return tuple(sorted(recorders, key=lambda recorder: recorder.shared))


def columns(recorders: Sequence[Recorder]) -> tuple[str, ...]:
    """Return the names of all numbers that are recorded of each commit."""
    return (*RECORDED, *(column for recorder in recorders for column in recorder.columns))
