"""Compiled programs of the replay, and the data they work on: made once for all runs that share them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.recorders import Recorder
from asyncsim.replays.dispatched import Dispatched
from asyncsim.replays.local import Flat, build_anew, build_local, flatten, from_vector
from asyncsim.replays.look import Met, build_first, build_look
from asyncsim.replays.members import Members, batched_anew, batched_local, batched_method, batched_state
from asyncsim.replays.pieces import InPieces
from asyncsim.replays.state import Layout, Pieces, ReplayState, initial_state, of_workers
from asyncsim.replays.tuning import gradients_a_group, gradients_at_once, writes_slices
from asyncsim.threads import cached


class Program(NamedTuple):
    """The compiled functions of a replay.

    Attributes
    ----------
    engine : InPieces or Dispatched
        What computes commits, on a kind of state of its own.
    first, look : function
        What the first commit of some pieces meets, and what recorders show of it; see `asyncsim.replays.look`.
    evaluate : function
        From the central variable, the problem's state, training and test data to a dict of numbers.
    replicas, spread : function or None
        Without a server, from the state to the replicas, ``[workers, parameters]``, in an ensemble ``[workers, members,
        parameters]``, and to the mean squared distance of those that count from the central variable.
    honest : bool array or slice
        Without a server, the workers that count in ``spread`` and in evaluations of replicas: all, or the honest ones.
    each : function
        From replicas, the problem's states of their workers and data to what each is evaluated at, ``[workers]``.
    flat : Flat
    devices : tuple of jax.Device
    """

    engine: Any
    first: Callable[[Any, Pieces], Met]
    look: Callable[..., Any]
    evaluate: Callable[..., Any]
    replicas: Callable[[ReplayState], Any] | None
    spread: Callable[[ReplayState], Any] | None
    honest: Any
    each: Callable[..., Any]
    flat: Flat
    devices: tuple[Any, ...]


def compiled(
    method: Method,
    recorders: tuple[Recorder, ...],
    problem: Problem,
    layout: Layout,
    dtype: Any,
    devices: tuple[Any, ...],
) -> Program:
    """Return the functions for these very objects: keep and reuse them to compile once."""
    return _build(Same(method), tuple(map(Same, recorders)), Same(problem), layout, dtype, devices, gradients_at_once())


def compiled_ensemble(
    members: Members,
    one: Method,
    recorders: tuple[Recorder, ...],
    problem: Problem,
    layout: Layout,
    dtype: Any,
    device: Any,
) -> Program:
    """Return the functions for the members of an ensemble on one device, ``one`` being any of their methods.

    They are compiled anew for each ensemble.
    """
    flat = _flatten(problem, dtype, device)
    method = batched_method(members, one)
    local = batched_local(members, problem, layout, flat)
    every = flat._replace(unravel=jax.vmap(flat.unravel))
    evaluate = _evaluation(problem, flat)

    def evaluate_all(central: Any, state: Any, train: Any, test: Any) -> Any:
        # One after the other: what an evaluation holds at a time is sized for one.
        return jax.lax.map(lambda own: evaluate(*own, train, test), (central, state))

    anew = batched_anew(members, problem, flat, dtype) if layout.restarts else None
    make = functools.partial(batched_state, members, recorders, flat)
    engine = InPieces(method, recorders, local, layout, (device,), make, anew)
    first, look = build_first(method, layout), build_look(method, recorders, local, every, layout, anew)
    each = _evaluation_of_each(problem, flat)
    return Program(engine, first, look, jax.jit(evaluate_all), *_build_replicas(method, layout), each, flat, (device,))


def on_devices(problem: Problem, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the training and the test data on the devices, moved there once for all runs of a study.

    Every device has all of the training data; the first one has the test data.
    """
    return _move(Same(problem), dtype, devices)


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree to the run's precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, _float(jnp.result_type(leaf), dtype)), tree)


def as_data(tree: Any, dtype: Any, what: str = "data") -> Any:
    """Cast a problem's data, or what else of it has whole numbers, to the run's precision.

    Raises
    ------
    InputError
        It has whole numbers that do not fit into the 32 bits of a float32 run.
    """
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.integer):
            _require_held(what, np.asarray(leaf))
    return cast(tree, dtype)


class Same:
    """A key for a cache: equal only to itself wrapped again, so that methods and problems need no hash."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


@cached(maxsize=32)
def _build(
    same_method: Same,
    same_recorders: tuple[Same, ...],
    same_problem: Same,
    layout: Layout,
    dtype: Any,
    devices: tuple[Any, ...],
    at_once: int,
) -> Program:
    method, problem = same_method.value, same_problem.value
    recorders = tuple(same.value for same in same_recorders)
    flat = _flatten(problem, dtype, devices[0])
    local = build_local(method, problem, layout.window, layout.windows_differ)
    of_vector = from_vector(local, flat)
    anew = build_anew(method, problem, flat, dtype) if layout.restarts else None
    engine: Any
    first: Callable[[Any, Pieces], Met]
    if layout.form == "dispatched":
        parameters = problem.parameter_count
        room = gradients_a_group(parameters, _has_convolution(problem, dtype))
        apart = Dispatched(method, recorders, local, flat, layout, devices[0], at_once, room, parameters, anew)
        engine, first = apart, apart.first
    else:
        make = functools.partial(initial_state, method, recorders, flat)
        engine = InPieces(method, recorders, of_vector, layout, devices, make, anew)
        first = build_first(method, layout)
    look = build_look(method, recorders, of_vector, flat, layout, anew)
    evaluate, each = jax.jit(_evaluation(problem, flat)), _evaluation_of_each(problem, flat)
    return Program(engine, first, look, evaluate, *_build_replicas(method, layout), each, flat, devices)


def _build_replicas(method: Method, layout: Layout) -> tuple[Any, Any, Any]:
    """Return `Program.replicas`, `Program.spread` and `Program.honest`."""
    honest = slice(None) if method.honest is None else np.array(method.honest)
    if not layout.gossip:
        return None, None, honest

    def replicas(state: ReplayState) -> Any:
        found, resume = state.workers.method, method.resume
        if method.mix is not None and resume is not None:
            found = jax.vmap(lambda own: resume(own, None))(found)
        return of_workers(found, layout.workers)

    def spread(state: ReplayState) -> Any:
        return jnp.mean(jnp.sum((replicas(state)[honest] - state.central) ** 2, -1), 0)

    return jax.jit(replicas), jax.jit(spread), honest


def _require_held(what: str, numbers: np.ndarray) -> None:
    """Raise InputError unless whole numbers fit into the type that JAX holds them in."""
    held = jax.dtypes.canonicalize_dtype(numbers.dtype)
    if held == numbers.dtype or not numbers.size:
        return
    least, most, room = numbers.min(), numbers.max(), np.iinfo(held)
    if least < room.min or most > room.max:
        raise InputError(
            f"problem: its {what} has whole numbers from {least} to {most}, which {held} cannot hold; use "
            "precision='float64', or give smaller numbers, or floats"
        )


def _flatten(problem: Problem, dtype: Any, device: Any) -> Flat:
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    template = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _float(leaf.dtype, dtype)), shapes)
    return flatten(template, writes_slices(device.platform, problem.parameter_count))


def _has_convolution(problem: Problem, dtype: Any) -> bool:
    """Return whether the loss has one of XLA's own convolutions, as `asyncsim.problems.layers.convolve` has not."""

    def minibatch(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((problem.batch_size, *leaf.shape[1:]), _float(jnp.result_type(leaf), dtype))

    key = jax.random.key(0)
    params, state = jax.eval_shape(
        lambda: (cast(problem.init(key), dtype), cast(problem.init_state(), dtype) if problem.init_state else ())
    )
    loss = jax.make_jaxpr(problem.stateful_loss)(params, state, jax.tree.map(minibatch, problem.train), key)
    return "conv_general_dilated" in str(loss)


def _evaluation(problem: Problem, flat: Flat) -> Callable[..., dict[str, Any]]:
    def evaluate(central: Any, state: Any, train: Any, test: Any) -> dict[str, Any]:
        parts = {"train": train} if test is None else {"train": train, "test": test}
        values: dict[str, Any] = {}
        for part, data in parts.items():
            found = problem.evaluate(flat.unravel(central), state, data)
            values |= {f"{part}_{name}": value for name, value in found.items()}
        return values

    return evaluate


def _evaluation_of_each(problem: Problem, flat: Flat) -> Callable[..., dict[str, Any]]:
    @jax.jit
    def each(replicas: Any, states: Any, data: Any) -> dict[str, Any]:
        # One after the other, as what an evaluation holds at a time is sized for one.
        return jax.lax.map(lambda own: problem.evaluate(flat.unravel(own[0]), own[1], data), (replicas, states))

    return each


@cached(maxsize=2)
def _move(problem: Same, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    train, test = (as_data(of, dtype) for of in (problem.value.train, problem.value.test))
    if len(devices) == 1:
        return jax.device_put((train, test), devices[0])
    everywhere = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    return jax.device_put(train, everywhere), jax.device_put(test, devices[0])


def _float(own: Any, dtype: Any) -> Any:
    return dtype if jnp.issubdtype(own, jnp.floating) else own
