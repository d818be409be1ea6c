"""Check a method before its replay, by the shapes that its functions return.

Nothing is computed: the functions are traced once with shapes instead of arrays. Errors name the
function of `asyncsim.methods.Method` at fault; the compiled loop would fail later and less clearly.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonState

from asyncsim.base.console import counted
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_name,
    require_positive,
    require_switch,
)
from asyncsim.base.tracing import naming_failures, shapes_of, tree_text
from asyncsim.clusters.cluster import DISCIPLINES, PROTOCOLS
from asyncsim.methods.method import (
    NO_MATRICES,
    OF_MESSAGE,
    SPACES,
    Applied,
    Array,
    Inbox,
    Memories,
    Method,
    Timing,
    Visit,
    add,
)

#: The call of each function, as errors print it.
_CALLS = {
    "init_worker": "init_worker(central)",
    "init_server": "init_server(central)",
    "init_memory": "init_memory(central)",
    "refresh": "refresh(worker, read)",
    "resume": "resume(worker, read)",
    "look_ahead": "look_ahead(optimizer_state)",
    "message": "message(worker, update, start, central, visit)",
    "apply": "apply(server, central, message, memory, visit)",
    "combine": "combine(server, central, messages, visits)",
    "receive": "receive(memory, message, visit)",
    "reply": "reply(server, central, memory, visit)",
    "origin": "origin(worker, read)",
    "proxy": "proxy(worker)",
    "mix": "mix(worker, inbox, visit)",
    "meet": "meet(replica, partner, visit)",
    "replica": "replica(message)",
    "presents": "presents(state, inbox, visit)",
    "last": "last(worker)",
}
#: Number of messages with which a method's ``combine`` is checked.
_SEVERAL = 3
_STATES = ("init_worker", "init_server", "init_memory")
_OPTIONAL = [name for name in _CALLS if name not in (*_STATES, "message", "apply")]


def check_method(method: Method, params: Any, workers: int = 3) -> tuple[str, ...]:
    """Check the arguments and results of a method's functions.

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
        For a wrong result; names the method and the function, the result and the expected one.
    """
    check_fields(method)
    try:
        return _check_functions(method, params, workers)
    except InputError as error:
        switches = {"sees_loss": "loss", "sees_delays": "delays", "needs_key": "key"}
        for switch, field in switches.items():
            change: Any = {switch: True}
            if not getattr(method, switch) and _fault(
                _check_functions, method._replace(**change), params, workers
            ) != str(error):
                raise InputError(
                    f"{method.name}.{switch} = False: its functions look at visit.{field}, which "
                    "needs a method "
                    f"made with {switch}=True; add that"
                ) from None
        # If another state makes the error go away, the missing state (the default, ()) is to blame.
        call, failed, _ = str(error).partition(": failed: ")
        for name in _STATES if failed else ():
            state: Any = {name: lambda central: central}
            if getattr(method, name) is Method._field_defaults[name]:
                fault_then = _fault(_check_functions, method._replace(**state), params, workers)
                if fault_then != str(error) and (not fault_then or fault_then.startswith(call)):
                    reason = f"{name.removeprefix('init_')} is (), as the method has no {name}"
                    raise InputError(f"{error}; {reason}; give that") from error
        raise


def visit_kinds(
    sees_loss: bool, needs_key: bool, gossips: bool = False, sees_delays: bool = False
) -> Visit:
    """Return the shapes and types of a visit, for tracing."""
    kind = jnp.result_type(float)
    kinds: dict[str, Any] = dict.fromkeys(Visit._fields, jnp.int32) | {
        "time": kind,
        "completes": jnp.bool_,
    }
    scalars: dict[str, Any] = {name: jax.ShapeDtypeStruct((), kind) for name, kind in kinds.items()}
    key: Any = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")) if needs_key else ()
    optional: dict[str, Any] = {
        "loss": scalars["time"] if sees_loss else (),
        "kept": scalars["time"] if gossips else (),
        "delays": scalars["staleness"] if sees_delays else (),
    }
    return Visit(**scalars)._replace(key=key, counted=(), **optional)


def memories_kinds(memory: Any, workers: int = 3) -> Memories:
    """Return the shapes of all workers' memories, from the memory of a single worker."""
    worker: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    return Memories(_several(memory, workers), _several(memory, 2), worker)


def inbox_kinds(message: Any) -> Inbox:
    """Return an inbox of two messages, as shapes, from one message."""
    return Inbox(*(_several(tree, 2) for tree in (message, 0.0, np.int32(0))))


def _several(tree: Any, count: int) -> Any:
    """Return the shapes of some trees, stacked, from a single tree."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *jnp.shape(leaf)), jnp.result_type(leaf)), tree
    )


def _fault(check: Callable[..., Any], *arguments: Any) -> str:
    """Return the error message of a check; an empty string if the check passes."""
    try:
        check(*arguments)
    except InputError as error:
        return str(error)
    return ""


def _check_functions(method: Method, params: Any, workers: int) -> tuple[str, ...]:
    kind = jnp.result_type(float)  # a replay casts all parameters to its own precision
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), kind), params)
    vector = jax.ShapeDtypeStruct((sum(leaf.size for leaf in jax.tree.leaves(params)),), kind)
    central: Any = params if method.space == "tensors" else vector
    _check_optimizer(method, params)
    visit = visit_kinds(
        method.sees_loss,
        method.needs_key,
        gossips=method.gossips,
        sees_delays=method.sees_delays,
    )
    worker, server, memory = (_call(method, name, central) for name in _STATES)
    _require_matrices(_named(method, "init_server"), server)
    if method.refresh is not None:
        if method.gossips:
            raise InputError(
                f"{method.name}.refresh: is for methods with a server, whose workers read; leave "
                "it out"
            )
        refreshed = _call(method, "refresh", worker, central)
        _require_alike(_named(method, "refresh"), "the worker's state", refreshed, worker)
    if method.resume is not None:
        read = None if method.mix is not None else central
        _require_central(method, "resume", _call(method, "resume", worker, read), central)
    if method.origin is not None:
        _require_central(method, "origin", _call(method, "origin", worker, central), central)
    message, diagnostics = _check_message(method, worker, central, visit)
    if method.space == "tensors":
        _require_no_vector(method, "message", message, central)
    if method.gossips:
        _check_gossip(method, worker, message, central, visit)
    elif method.apply is add and method.combine is None:
        _require_addable(method, message, central)
    if method.proxy is not None:
        _require_central(method, "proxy", _call(method, "proxy", worker), central)
    if method.receive is not None and method.combine is None:
        raise InputError(
            f"{method.name}.receive: is for methods with combine, and there is none; leave it out"
        )
    if method.combine is not None:
        _check_combine(method, server, central, message, memory, visit)
    elif not method.gossips:
        _check_apply(method, server, central, message, memory, visit, workers)
    if method.reply is not None:
        _require_central(
            method, "reply", _call(method, "reply", server, central, memory, visit), central
        )
    return diagnostics


def _check_gossip(method: Method, worker: Any, message: Any, central: Any, visit: Visit) -> None:
    if method.meet is not None:
        if method.mix is not None:
            raise InputError(
                f"{method.name}.meet, {method.name}.mix: workers send each other messages or meet; "
                "give one"
            )
        result = _call(method, "meet", worker, worker, visit)
        _require_alike(
            _named(method, "meet"), "the states of both workers", result, (worker, worker)
        )
        _check_replica(method, worker, central, "init_worker", "the worker's state")
        _require_central(method, "message", message, central, "the message, ")
        return
    if method.resume is None:
        raise InputError(
            f"{method.name}.resume = None: without a server a worker starts from its own state; "
            "give it"
        )
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(message)):
        raise InputError(
            f"{_named(method, 'message')} returned the message, {tree_text(message)}: must be "
            "floating-point numbers, "
            "which are added up by weight"
        )
    _require_alike(
        _named(method, "mix"),
        "the worker's state, as init_worker made it",
        _call(
            method, "mix", worker, inbox_kinds(message) if method.sees_messages else message, visit
        ),
        worker,
    )
    _check_replica(method, message, central, "message", "the message")
    if method.last is not None:
        _require_alike(
            _named(method, "last"), "the last message", _call(method, "last", worker), message
        )


def _check_replica(method: Method, carrier: Any, central: Any, maker: str, name: str) -> None:
    """Check that a carrier has a replica: a message, or the state of a worker that meets others.

    ``maker`` is the function that returns the carrier.
    """
    if method.replica is not None:
        result = _call(method, "replica", carrier)
        is_pair = isinstance(result, tuple) and len(result) == 2
        has_weight = is_pair and not _is_alike(result, central)
        replica, weight = result if has_weight else (result, None)
        _require_central(method, "replica", replica, central, "the replica, ")
        if method.meet is not None and weight is not None:
            raise InputError(
                f"{_named(method, 'replica')} returned two things: workers that meet have no "
                "weights"
            )
        dtype = jax.tree.leaves(central)[0].dtype
        if weight is not None and (weight.shape, weight.dtype) != ((), dtype):
            raise InputError(
                f"{_named(method, 'replica')} returned the weight {tree_text(weight)}: must be a "
                f"number of type {dtype}"
            )
        return
    # The entries of a dict have no order, so none of them is the first.
    leaves = jax.tree.leaves(carrier)
    first = carrier[0] if isinstance(carrier, tuple) and carrier else carrier
    if method.space == "vector" and len(leaves) == 1:
        first = leaves[0]
    if _shapes(central) not in (_shapes(carrier), _shapes(first)):
        raise InputError(
            f"{_named(method, maker)} returned {name}, {tree_text(carrier)}: without a server it "
            f"carries the worker's replica, {_a_central(method)}, {tree_text(central)}; say "
            "which part that is with "
            f"replica=lambda {'message' if maker == 'message' else 'state'}: ..."
        )


def check_fields(method: Method) -> None:
    """Check the types of a method's fields: all that can be checked without a problem.

    Raises
    ------
    InputError
        Naming the field, its value and the expected type.
    """
    require_name("method", method.name)
    if not isinstance(method.hyperparameters, Mapping):
        raise InputError(
            f"{method.name}.hyperparameters = {method.hyperparameters!r}: must be a dict"
        )
    if not isinstance(method.timing, Timing):
        raise InputError(
            f"{method.name}.timing = {method.timing!r}: must be an asyncsim.methods.Timing"
        )
    _check_timing(f"{method.name}.timing", method.timing)
    require_choice(f"{method.name}.space", method.space, SPACES)
    for name in ("same_reply", "sees_loss", "sees_delays", "sees_memories", "sees_messages"):
        require_switch(f"{method.name}.{name}", getattr(method, name))
    require_switch(f"{method.name}.needs_key", method.needs_key)
    if method.same_reply and method.reply is None:
        raise InputError(f"{method.name}.same_reply = True: there is no reply; give it")
    if method.sees_delays and method.gossips:
        raise InputError(
            f"{method.name}.sees_delays = True: without a server no read is delayed; leave it out"
        )
    for name, call in _CALLS.items():
        function = getattr(method, name)
        if not callable(function) and not (function is None and name in _OPTIONAL):
            raise InputError(f"{method.name}.{name} = {function!r}: must be a function, {call}")
    if not all(callable(getattr(method.optimizer, name, None)) for name in ("init", "update")):
        raise InputError(
            f"{method.name}.optimizer = {method.optimizer!r}: must be an "
            "optax.GradientTransformation; for plain "
            "gradient descent asyncsim.methods.gradient_steps(learning_rate)"
        )


def _check_timing(argument: str, timing: Timing) -> None:
    requirements = {name: value for name, value in vars(timing).items() if value is not None}
    counts = ("workers", "window", "read_blocks", "message_numbers", "far_every", "groups")
    for name in (*counts, "fewest_workers"):
        if name in requirements:
            require_count(f"{argument}: {name}", requirements[name])
    for name in ("message_size", "reply_size"):
        if name in requirements:
            require_positive(f"{argument}: {name}", requirements[name])
    if {"message_size", "message_numbers"} <= set(requirements):
        raise InputError(
            f"{argument}: message_size = {timing.message_size} and message_numbers = "
            f"{timing.message_numbers}: are two sizes of one message; give one of them"
        )
    for name, choices in (("protocol", PROTOCOLS), ("discipline", DISCIPLINES)):
        if name in requirements:
            require_choice(f"{argument}: {name}", requirements[name], choices)


def _check_optimizer(method: Method, params: Any) -> None:
    try:
        visit = visit_kinds(False, method.needs_key, sees_delays=method.sees_delays)
        _check_steps(method, params, visit)
    except InputError as error:
        if _fault(_check_steps, method, params, visit_kinds(True, method.needs_key)) != str(error):
            raise InputError(
                f"{method.name}.optimizer: looks at visit.loss, which is known only after its "
                "steps; message and apply "
                "may look at it, with sees_loss=True"
            ) from None
        raise


def _check_steps(method: Method, params: Any, visit: Visit) -> None:
    optimizer = optax.with_extra_args_support(method.optimizer)
    state = _traced(f"{method.name}.optimizer.init(params)", optimizer.init, params)
    _require_matrices(f"{method.name}.optimizer", state)
    call = f"{method.name}.optimizer.update(gradients, state, params, visit=visit, start=params)"

    def update(gradients: Any, state: Any, params: Any, visit: Visit) -> Any:
        return optimizer.update(gradients, state, params, visit=visit, start=params)

    result = _traced(call, update, params, state, params, visit)
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(
            f"{call} returned {tree_text(result)}: must return the steps and the new state"
        )
    _require_alike(call, "the steps, of the tree of the parameters", result[0], params)
    _require_alike(call, "the state, of the tree of optimizer.init(params)", result[1], state)
    if method.look_ahead is not None:
        ahead = _call(method, "look_ahead", state)
        _require_alike(
            _named(method, "look_ahead"), "how far, of the tree of the parameters", ahead, params
        )


def _require_matrices(call: str, state: Any) -> None:
    """Raise InputError for a state of Muon without a matrix: all its steps would be Adam's."""
    for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, MuonState)):
        if isinstance(part, MuonState) and not jax.tree.leaves(part.mu):
            raise InputError(f"{call}: {NO_MATRICES}")


def _check_message(
    method: Method, worker: Any, central: Any, visit: Visit
) -> tuple[Any, tuple[str, ...]]:
    result = _call(method, "message", worker, central, central, central, visit)
    if not isinstance(result, tuple) or len(result) != 3:
        raise InputError(
            f"{_named(method, 'message')} returned {tree_text(result)}: must return three things, "
            "the message, the "
            "worker's state and a dict of diagnostics ({} for none)"
        )
    message, after, diagnostics = result
    _require_alike(
        _named(method, "message"), "the worker's state, as init_worker made it", after, worker
    )
    if not isinstance(diagnostics, Mapping):
        raise InputError(
            f"{_named(method, 'message')} returned {tree_text(diagnostics)} for the diagnostics: "
            "must be a dict"
        )
    for name, value in diagnostics.items():
        if _shapes(value) != _shapes(central):
            kind = (
                f"a vector of shape {list(central.shape)}"
                if method.space == "vector"
                else f"a tree with the shapes of the parameters, {tree_text(central)}"
            )
            raise InputError(
                f"{_named(method, 'message')} returned {tree_text(value)} for the diagnostic "
                f"{name!r}: must be {kind}"
            )
    return message, tuple(diagnostics)


def _require_addable(method: Method, message: Any, central: Any) -> None:
    is_scalar = method.space == "vector" and getattr(message, "shape", None) == (1,)
    if _shapes(message) != _shapes(central) and not is_scalar:
        raise InputError(
            f"{_named(method, 'message')} returned the message, {tree_text(message)}: must be "
            f"{_a_central(method)}, {tree_text(central)}, to be added to it"
        )


def _require_no_vector(method: Method, name: str, message: Any, central: Any) -> None:
    """Raise InputError for a vector of all parameters that a method of tensors sends.

    It could not be told from the parameters' tree, which travels as such a vector.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(central))
    if getattr(message, "shape", None) == (size,) and not _is_alike(message, central):
        raise InputError(
            f"{_named(method, name)} returned the message, {tree_text(message)}: with "
            f"space='tensors' a message of all parameters must be a tree like them, "
            f"{tree_text(central)}"
        )


def _shapes(tree: Any) -> Any:
    """Return the structure of a tree and the shapes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]


def _check_apply(
    method: Method, server: Any, central: Any, message: Any, memory: Any, visit: Visit, workers: int
) -> None:
    call = _named(method, "apply")
    arguments = [server, central, message, memory, visit]
    if method.sees_memories:
        call, arguments = (
            call.replace("visit", "visit, memories"),
            [*arguments, memories_kinds(memory, workers)],
        )
    applied = _traced(call, method.apply, *arguments)
    _require_applied(method, call, applied, server, central)
    _require_alike(call, "the memory of the worker, as init_memory made it", applied.memory, memory)


def _check_combine(
    method: Method, server: Any, central: Any, message: Any, memory: Any, visit: Visit
) -> None:
    if method.apply is not add or method.sees_memories or method.gossips:
        raise InputError(
            f"{method.name}.combine: replaces apply, sees_memories, mix and meet; leave the others "
            "out"
        )
    if method.receive is not None:
        result = _call(method, "receive", memory, message, visit)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                f"{_named(method, 'receive')} returned {tree_text(result)}: must return the "
                "message that waits and the "
                "memory of its worker"
            )
        message, after = result
        if method.space == "tensors":
            _require_no_vector(method, "receive", message, central)
        _require_alike(
            _named(method, "receive"),
            "the memory of the worker, as init_memory made it",
            after,
            memory,
        )
    fields = {name: _several(getattr(visit, name), _SEVERAL) for name in OF_MESSAGE}
    visits, messages = visit._replace(**fields), _several(message, _SEVERAL)
    applied = _call(method, "combine", server, central, messages, visits)
    _require_applied(method, _named(method, "combine"), applied, server, central)


def _require_applied(method: Method, call: str, applied: Any, server: Any, central: Any) -> None:
    if not isinstance(applied, Applied):
        raise InputError(
            f"{call} returned {tree_text(applied)}: must return Applied(central, server, memory)"
        )
    name = call.removeprefix(f"{method.name}.").partition("(")[0]
    _require_central(method, name, applied.central, central, "the central variable, ")
    _require_alike(call, "the server's state, as init_server made it", applied.server, server)


def _call(method: Method, name: str, *arguments: Any) -> Any:
    return _traced(_named(method, name), getattr(method, name), *arguments)


def _traced(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Trace a function and return the shapes of its results; errors name the call."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        takes = f"takes {inspect.signature(function)}"
        expected = counted(len(arguments), "argument")
        raise InputError(f"{call}: {takes}; it is called with {expected}, in this order") from None
    except ValueError:  # a built-in without a signature
        pass
    with naming_failures(call):
        return _shapes_of_results(call, function, arguments)


def _shapes_of_results(call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Trace a function and return the shapes of its results; None and text stay as they are."""
    structure: list[Any] = []

    def arrays(*values: Any) -> list[Array]:
        leaves, tree = jax.tree.flatten(function(*values))
        traced = [
            isinstance(leaf, jax.Array | int | float | complex) or hasattr(leaf, "dtype")
            for leaf in leaves
        ]
        structure[:] = [
            tree,
            traced,
            [None if is_array else leaf for leaf, is_array in zip(leaves, traced, strict=True)],
        ]
        return [
            jnp.asarray(leaf) for leaf, is_array in zip(leaves, traced, strict=True) if is_array
        ]

    shapes = iter(shapes_of(call, arrays, *arguments, key="from visit.key, with needs_key=True"))
    tree, traced, constants = structure
    return jax.tree.unflatten(
        tree,
        [next(shapes) if t else constant for t, constant in zip(traced, constants, strict=True)],
    )


def _require_central(
    method: Method, name: str, result: Any, central: Any, description: str = ""
) -> None:
    if not _is_alike(result, central):
        raise InputError(
            f"{_named(method, name)} returned {description}{tree_text(result)}: must be "
            f"{_a_central(method)}, {tree_text(central)}"
        )


def _a_central(method: Method) -> str:
    """Describe the parameters as the method's functions see them."""
    if method.space == "tensors":
        return "a tree like the parameters"
    return "a vector like the central variable"


def _require_alike(call: str, description: str, result: Any, expected: Any) -> None:
    if not _is_alike(result, expected):
        raise InputError(
            f"{call} returned {tree_text(result)} for {description}: must be {tree_text(expected)}"
        )


def _is_alike(result: Any, expected: Any) -> bool:
    """Return whether two trees have equal structures, shapes and types."""
    if _shapes(result) != _shapes(expected):
        return False
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return all(hasattr(a, "dtype") and a.dtype == b.dtype for a, b in pairs)


def _named(method: Method, name: str) -> str:
    return f"{method.name}.{_CALLS[name]}"
