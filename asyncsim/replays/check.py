"""The check of a method before its replay: one commit, traced with shapes instead of arrays.

The commit is the replay's own (`asyncsim.replays.step`). Each function of the method is called
through a guard, so that an error names it, its result and the expected one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState

from asyncsim.base.errors import InputError, require_choice, require_name
from asyncsim.base.tracing import naming, naming_failures, require_form, shapes_of, tree_text
from asyncsim.methods.method import (
    NO_MATRICES,
    SPACES,
    Applied,
    Array,
    Inbox,
    Memories,
    Method,
    Visit,
)
from asyncsim.replays.central import Sent, initial_memory
from asyncsim.replays.local import LocalResult, flatten
from asyncsim.replays.recorders import Commit
from asyncsim.replays.state import WorkerRow, no_messages, visit_kinds
from asyncsim.replays.step import ServerState, StepInputs, begin, finish
from asyncsim.replays.tensors import of_vectors

#: Messages with which ``combine``, and an inbox, are checked.
_SEVERAL = 3


def _a_message(result: Any, central: Any, worker: Any, *_: Any) -> Any:
    """Return the expected form of the result of ``message``."""
    message, _, diagnostics = result
    # Diagnostics may be of any type.
    return (
        message,
        worker,
        {
            name: value if jnp.shape(value) == central.shape else central
            for name, value in diagnostics.items()
        },
    )


def _is_message(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)


#: Of each function its arguments, as errors print them, and the expected form of its result: a
#: function of the result, the central variable and the arguments.
_FUNCTIONS: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "init_worker": ("central", None),
    "init_server": ("central", None),
    "init_memory": ("central", None),
    "refresh": ("worker, read", lambda result, central, worker, read: worker),
    "resume": ("worker, read", lambda result, central, worker, read: central),
    "look_ahead": ("optimizer_state", None),
    "message": ("worker, update, start, central, visit", _a_message),
    "apply": (
        "server, central, message, memory, visit",
        lambda result, vector, server, central, message, memory, *_: Applied(
            central, server, memory
        ),
    ),
    "combine": (
        "server, central, messages, visits",
        lambda result, vector, server, central, *_: Applied(central, server),
    ),
    "receive": ("memory, message, visit", lambda result, central, memory, *_: (result[0], memory)),
    "reply": (
        "server, central, memory, visit",
        lambda result, vector, server, central, *_: central,
    ),
    "origin": ("worker, read", lambda result, central, *_: central),
    "proxy": ("worker", lambda result, central, worker: central),
    "mix": ("worker, inbox, visit", lambda result, central, worker, *_: worker),
    "meet": ("replica, partner, visit", lambda result, central, *states: states[:2]),
    "replica": (
        "message",
        lambda result, central, _: (central, central[0]) if isinstance(result, tuple) else central,
    ),
    "last": ("worker", None),
}


def check_method(method: Method, params: Any, workers: int = 3) -> tuple[str, ...]:
    """Trace one commit of a method.

    Parameters
    ----------
    method : Method
    params : tree of arrays or ShapeDtypeStruct
        The problem's initial parameters; only their shapes are used.
    workers : int
        Number of workers whose memories the functions see.

    Returns
    -------
    tuple of str
        The names of the diagnostics that ``message`` returns.

    Raises
    ------
    InputError
        For a function that fails, or returns another form than it should.
    """
    require_name("method", method.name)
    require_choice(f"{method.name}.space", method.space, SPACES)
    try:
        return _trace(method, params, workers)
    except InputError as error:
        if not method.needs_key and ": failed: " in str(error):
            try:
                _trace(method._replace(needs_key=True), params, workers)
            except InputError as fault:
                if str(fault) == str(error):
                    raise error from None
            raise InputError(
                f"{method.name}.needs_key = False: its functions look at visit.key; add "
                "needs_key=True"
            ) from None
        raise


def _trace(method: Method, params: Any, workers: int) -> tuple[str, ...]:
    kind = jnp.result_type(float)  # a replay casts all parameters to its own precision
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), kind), params)
    flat = flatten(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, kind), params))
    diagnostics: list[str] = []

    def commit(params: Any, visit: Visit) -> Any:
        central = flat.ravel(params)
        guarded = of_vectors(_guarded(method, central), flat)
        row = WorkerRow(guarded.init_worker(central), initial_memory(guarded, central), (), ())
        waiting = no_messages(guarded, row, central, _SEVERAL)
        server = ServerState(central, guarded.init_server(central), waiting)
        _require_matrices(method.name, server.server)
        before_steps = visit._replace(loss=())
        received = _received(guarded, row, central, visit)
        partner = () if guarded.meet is None else jnp.int32(1)
        inputs = StepInputs(before_steps, row, central, central, received, partner)
        inputs, start = begin(guarded, None, inputs)
        steps = _local_steps(method, params, flat.unravel(start), before_steps)
        local = LocalResult(flat.ravel(steps), central[0], ())
        memories = _memories(row.memory, workers) if method.sees_memories else ()
        outputs = finish(guarded, "after", server, inputs, start, local, *memories)
        _require_replica(method, outputs.commit)
        diagnostics[:] = outputs.commit.diagnostics
        call = f"{method.name}: a commit"
        require_form(f"{call}: the central variable", outputs.server_state.central, central)
        require_form(f"{call}: the memory of the worker", outputs.commit.memory, row.memory)
        return outputs.server_state.central

    call = f"{method.name}: a commit"
    with naming_failures(call):
        shapes_of(
            call, commit, params, visit_kinds(method), key="from visit.key, with needs_key=True"
        )
    return tuple(diagnostics)


def _guarded(method: Method, central: Array) -> Method:
    """Return the method whose functions name themselves when they fail."""

    def guard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        arguments, expected = _FUNCTIONS[name]
        memories = ", memories" if name == "apply" and method.sees_memories else ""
        call = f"{method.name}.{name}({arguments}{memories})"

        named = naming(call, function)

        def guarded(*values: Any) -> Any:
            with naming_failures(call):
                result = jax.tree.map(jnp.asarray, named(*values))
            if name == "message" and not _is_message(result):
                raise InputError(
                    f"{call} returned {tree_text(result)}: must return three things, the message, "
                    "the worker's state and a dict of diagnostics ({} for none)"
                )
            with naming_failures(call):
                form = result if expected is None else expected(result, central, *values)
            return require_form(call, result, form)

        return guarded

    changed: Any = {}
    for name in _FUNCTIONS:
        function = getattr(method, name)
        if function is not None or Method._field_defaults[name] is not None:
            changed[name] = guard(name, function)
    return method._replace(**changed)


def _local_steps(method: Method, params: Any, start: Any, visit: Visit) -> Any:
    """Trace an optimizer; return its steps."""
    if not all(callable(getattr(method.optimizer, name, None)) for name in ("init", "update")):
        raise InputError(
            f"{method.name}.optimizer = {method.optimizer!r}: must be an "
            "optax.GradientTransformation; for plain gradient descent "
            "asyncsim.methods.gradient_steps(learning_rate)"
        )
    call = f"{method.name}.optimizer.update(gradients, state, params, visit=visit, start=params)"
    with naming_failures(call):
        optimizer = optax.with_extra_args_support(method.optimizer)
        state = optimizer.init(params)
        _require_matrices(f"{method.name}.optimizer", state)
        result = optimizer.update(params, state, params, visit=visit, start=start)
    steps, _ = require_form(call, result, (params, state))
    if method.look_ahead is not None:
        ahead = method.look_ahead(state)
        require_form(f"{method.name}.look_ahead(optimizer_state)", ahead, params)
    return steps


def _require_matrices(call: str, state: Any) -> None:
    """Raise InputError for a state of Muon without a matrix: all its steps would be Adam's."""
    for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, MuonState)):
        if isinstance(part, MuonState) and not jax.tree.leaves(part.mu):
            raise InputError(f"{call}: {NO_MATRICES}")


def _require_replica(method: Method, commit: Commit) -> None:
    """Raise InputError unless workers without a server carry a replica."""
    if not method.gossips or method.replica is not None:
        return
    name = "message" if method.meet is None else "state"
    carrier = commit.message if method.meet is None else commit.worker
    first = carrier[0] if isinstance(carrier, tuple) else carrier
    if getattr(first, "shape", None) != commit.start.shape:
        raise InputError(
            f"{method.name}: without a server the worker's {name} carries its replica, and is "
            f"{tree_text(carrier)}; say which part that is with replica=lambda {name}: ..."
        )


def _received(method: Method, row: WorkerRow, central: Array, visit: Visit) -> Any:
    """Return what a commit without a server takes up: messages, or the state of a partner."""
    if method.meet is not None:
        return row.method
    if method.mix is None:
        return ()
    message, *_ = method.message(row.method, central, central, central, visit)
    sent = Sent(message, () if method.honest is None else row.memory)
    if not method.sees_messages:
        return sent
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * _SEVERAL), sent)
    return Inbox(several, jnp.ones(_SEVERAL, central.dtype), jnp.zeros(_SEVERAL, jnp.int32))


def _memories(memory: Any, workers: int) -> tuple[Memories]:
    rows, newer = (
        jax.tree.map(lambda leaf, n=n: jnp.stack([leaf] * n), memory) for n in (workers, 2)
    )
    return (Memories(rows, newer, jnp.zeros(2, jnp.int32)),)
