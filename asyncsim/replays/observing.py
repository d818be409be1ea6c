"""The recorders of a replay: checked, and called with each commit."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.base.errors import InputError
from asyncsim.base.tracing import naming_failures, require_form, tree_text
from asyncsim.methods.method import Array, State
from asyncsim.replays.recorders import Commit, Recorder

#: Names of the numbers that every replay records of a commit.
RECORDED = ("loss", "update_norm")


def observe(
    recorders: Sequence[Recorder], states: Sequence[State], commit: Commit, base: bool = True
) -> tuple[tuple[State, ...], Array]:
    """Return recorders' states after a commit, and its numbers; with ``base`` `RECORDED` first."""
    dtype = commit.central.dtype
    # One dtype for all, so that a commit's numbers are one vector.
    numbers = (
        [commit.loss.astype(dtype), jnp.sqrt(jnp.vdot(commit.step, commit.step))] if base else []
    )
    after = []
    for recorder, state in zip(recorders, states, strict=True):
        new, values = _observed(recorder, state, commit)
        after.append(new)
        numbers += [number.astype(dtype) for number in values]
    return tuple(after), jnp.stack(numbers) if numbers else jnp.zeros(0, dtype)


def _observed(recorder: Recorder, state: State, commit: Commit) -> tuple[State, Sequence[Any]]:
    """Call a recorder; raise InputError, while it is traced, for results of a wrong form."""
    call = f"record: observe(state, commit) of {recorder.title}"
    with naming_failures(call):
        returned = recorder.observe(state, commit)
    form = state, [commit.loss] * len(recorder.columns)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], list | tuple):
        new, numbers = returned
        returned = (
            jax.tree.map(jnp.asarray, new),
            [jnp.asarray(number).astype(commit.loss.dtype) for number in numbers],
        )
    return require_form(call, returned, form)


def require_vectors(recorder: Recorder, state: State, commit: Commit) -> Mapping[str, Array]:
    """Return a recorder's vectors of a commit; raise InputError, while traced, if it has others."""
    assert recorder.look is not None
    call = f"record: look(state, commit) of {recorder.title}"
    with naming_failures(call):
        vectors = recorder.look(state, commit)
    vector = jnp.shape(commit.central)
    if not isinstance(vectors, Mapping) or any(
        jnp.shape(value) != vector for value in vectors.values()
    ):
        raise InputError(
            f"{call} returned {tree_text(vectors)}: must return a dict of "
            f"vectors like the central variable, {tree_text(commit.central)}"
        )
    return vectors


def require_recorders(record: Any) -> tuple[Recorder, ...]:
    """Return a replay's recorders, those with shared states last.

    Raises
    ------
    InputError
        For objects that are no recorders, or for a column of two recorders.
    """
    recorders = (record,) if isinstance(record, Recorder) else record
    if not isinstance(recorders, list | tuple):
        raise InputError(
            f"record = {record!r}: must be a list of recorders, [recorders.energy()] say"
        )
    names = {"commit", "commit_time", "worker", "worker_step", "staleness", *RECORDED}
    for recorder in recorders:
        if not isinstance(recorder, Recorder):
            hint = (
                f"; call it, recorders.{recorder.__name__}()"
                if hasattr(recorder, "__name__")
                else ""
            )
            raise InputError(f"record: {recorder!r} is not a recorder{hint}")
        if not isinstance(recorder.columns, list | tuple):
            raise InputError(
                f"record: columns = {recorder.columns!r}: must be a tuple of names, "
                f"({recorder.columns!r},)"
            )
        for column in recorder.columns:
            if column in names:
                raise InputError(
                    f"record: two columns are called {column!r}; give each recorder once"
                )
            names.add(column)
    # A stable sort: the order of columns and states within each kind is the caller's.
    return tuple(sorted(recorders, key=lambda recorder: recorder.shared))


def require_additive(recorders: Sequence[Recorder], servers: int) -> None:
    """Raise InputError unless the numbers of a message are sums over its parts at all servers."""
    refused = [
        recorder.title
        for recorder in recorders
        if recorder.look is not None or (recorder.columns and not recorder.additive)
    ]
    if refused:
        raise InputError(
            f"record: {', '.join(refused)}: all parameters are needed at one instant, and with "
            f"servers = {servers} each commits its shard at another time; leave these recorders "
            "out, or give servers = 1"
        )


def columns(recorders: Sequence[Recorder]) -> tuple[str, ...]:
    """Return the names of all numbers recorded of a commit."""
    return (*RECORDED, *(column for recorder in recorders for column in recorder.columns))
