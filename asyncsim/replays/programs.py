"""Compiled programs of the replay, and the data they work on: made once for all runs that share them."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.base.errors import InputError
from asyncsim.base.threads import cached
from asyncsim.methods.check import check_method
from asyncsim.methods.method import Array, Method, add, send_update
from asyncsim.methods.recipe import Recipe, recipe_of
from asyncsim.problems.problem import Problem
from asyncsim.replays.local import Flat, MakeParts, Parts, build_anew, build_local, flatten
from asyncsim.replays.look import Met, build_first, build_look
from asyncsim.replays.members import batched_parts, batched_state
from asyncsim.replays.pieces import InPieces
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.state import Layout, Pieces, ReplayState, initial_state, of_workers
from asyncsim.replays.tuning import writes_slices


class Program(NamedTuple):
    """The compiled functions of a replay.

    Attributes
    ----------
    engine : InPieces
        Computes commits.
    first, look : function
        The inputs of the first commit of some pieces, and the recorders' values of it; see `asyncsim.replays.look`.
    evaluate : function
        From the central variable, the problem's state, training and test data to a dict of numbers.
    replicas, spread : function or None
        Without a server, from the state and the method's numbers to the replicas, ``[workers, parameters]``, in an
        ensemble ``[workers, members, parameters]``, and to the mean squared distance of those that count from the
        central variable.
    honest : bool array or slice
        Without a server, the workers that count in ``spread`` and in evaluations of replicas: all, or the honest ones.
    each : function
        From replicas, their workers' states of the problem, and data to the values of each, ``[workers]``.
    flat : Flat
    devices : tuple of jax.Device
    """

    engine: InPieces
    first: Callable[[Any, Pieces], Met]
    look: Callable[..., Any]
    evaluate: Callable[..., Any]
    replicas: Callable[[ReplayState, Any], Any] | None
    spread: Callable[[ReplayState, Any], Any] | None
    honest: Any
    each: Callable[..., Any]
    flat: Flat
    devices: tuple[Any, ...]


class Family(NamedTuple):
    """Methods that share a program.

    Attributes
    ----------
    make : function
        From the numbers in which they differ, which may be traced, to a method.
    method : Method
        Any of them.
    """

    make: Callable[[Any], Method]
    method: Method


def compiled(
    method: Method,
    recorders: tuple[Recorder, ...],
    problem: Problem,
    layout: Layout,
    dtype: Any,
    devices: tuple[Any, ...],
) -> tuple[Program, dict[str, Array]]:
    """Return the program of a method, made once for all that differ in numbers alone, and the numbers of this one.

    Else it is made for these very objects: keep and reuse them to compile once.
    """
    recipe, numbers = recipe_of(method), {}
    family = Keyed(Same(method), Family(lambda numbers: method, method))
    if recipe is not None:
        names = _traced_numbers(Keyed(recipe.key, recipe), Same(problem))
        if len(names) < len(recipe.numbers):  # the value of a constant may decide about other numbers
            names = _traced_numbers(Keyed((recipe.key, *recipe.numbers.values()), recipe), Same(problem))
        constants = {name: value for name, value in recipe.numbers.items() if name not in names}
        key = recipe.key, names, tuple(constants.values())
        family = Keyed(key, Family(lambda numbers: recipe.make({**constants, **numbers}), method))
        # Weakly typed, like Python's numbers: they never promote.
        numbers = {name: jnp.asarray(recipe.numbers[name]) for name in names}
    same_recorders = tuple(map(Same, recorders))
    return _build(family, same_recorders, Same(problem), layout, dtype, devices), numbers


def compiled_ensemble(
    family: Family, recorders: tuple[Recorder, ...], problem: Problem, layout: Layout, dtype: Any, device: Any
) -> Program:
    """Build the program of an ensemble on one device; each ensemble is compiled separately."""
    flat = _flatten(problem, dtype, device)
    of_member = _parts(family, problem, layout, flat, dtype)

    def parts(numbers: Any) -> Parts:
        return batched_parts(of_member, family.method, numbers, layout.restarts)

    evaluate = _evaluation(problem, flat)

    def evaluate_all(central: Any, state: Any, train: Any, test: Any) -> Any:
        # One after the other: what an evaluation holds at a time is sized for one.
        return jax.lax.map(lambda own: evaluate(*own, train, test), (central, state))

    make = functools.partial(batched_state, _initial(of_member, recorders, flat, layout))
    engine = InPieces(parts, recorders, layout, (device,), make)
    flat_members = flat._replace(unravel=jax.vmap(flat.unravel))
    first, look = build_first(family.method, layout), build_look(parts, recorders, flat_members, layout)
    each = _evaluation_of_each(problem, flat)
    replicas = _build_replicas(parts, family.method, layout)
    return Program(engine, first, look, jax.jit(evaluate_all), *replicas, each, flat, (device,))


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


class Keyed:
    """A value of a cache that is as good as another with the same key."""

    def __init__(self, key: Hashable, value: Any):
        self.key, self.value = key, value

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key


@cached(maxsize=32)
def _build(
    keyed: Keyed,
    same_recorders: tuple[Same, ...],
    same_problem: Same,
    layout: Layout,
    dtype: Any,
    devices: tuple[Any, ...],
) -> Program:
    family, problem = keyed.value, same_problem.value
    recorders = tuple(same.value for same in same_recorders)
    flat, evaluate, each = _of_problem(same_problem, dtype, devices[0])
    parts = _parts(family, problem, layout, flat, dtype)
    engine = InPieces(parts, recorders, layout, devices, _initial(parts, recorders, flat, layout))
    first, look = build_first(family.method, layout), build_look(parts, recorders, flat, layout)
    return Program(engine, first, look, evaluate, *_build_replicas(parts, family.method, layout), each, flat, devices)


@cached(maxsize=8)
def _of_problem(same_problem: Same, dtype: Any, device: Any) -> tuple[Flat, Callable[..., Any], Callable[..., Any]]:
    """Return how parameters become vectors, and `Program.evaluate` and `Program.each`, which all methods share."""
    flat = _flatten(same_problem.value, dtype, device)
    return flat, jax.jit(_evaluation(same_problem.value, flat)), _evaluation_of_each(same_problem.value, flat)


def _parts(family: Family, problem: Problem, layout: Layout, flat: Flat, dtype: Any) -> MakeParts:
    """Return the function from numbers to the functions of a method with them."""

    def parts(numbers: Any) -> Parts:
        method = family.make(numbers)
        local = build_local(method, problem, flat, layout.window, layout.windows_differ)
        return Parts(method, local, build_anew(method, problem, flat, dtype) if layout.restarts else None)

    return parts


def _initial(
    parts: MakeParts, recorders: tuple[Recorder, ...], flat: Flat, layout: Layout
) -> Callable[..., ReplayState]:
    """Return the function from numbers, parameters, the problem's state and sizes to the state at version zero."""

    def initial(numbers: Any, *arguments: Any, **sizes: int) -> ReplayState:
        sizes["version_messages"] = layout.version_messages
        return initial_state(parts(numbers).method, recorders, flat, *arguments, **sizes)

    return initial


@cached(maxsize=256)
def _traced_numbers(keyed: Keyed, same_problem: Same) -> tuple[str, ...]:
    """Return the names of a recipe's numbers that may be traced without changing the form of the method."""
    recipe: Recipe = keyed.value
    params = jax.eval_shape(lambda: same_problem.value.init(jax.random.key(0)))

    def may_be_traced(names: tuple[str, ...]) -> bool:
        def has_same_form(traced: Any) -> int:
            method = recipe.make({**recipe.numbers, **traced})
            check_method(method, params)
            if _form(method, params) != _form(recipe.product, params):
                raise TypeError
            return 0

        try:
            jax.eval_shape(has_same_form, {name: recipe.numbers[name] for name in names})
        except (TypeError, InputError):
            return False
        return True

    names = tuple(recipe.numbers)
    if may_be_traced(names):
        return names
    traceable = tuple(name for name in names if may_be_traced((name,)))
    return traceable if may_be_traced(traceable) else ()


def _form(method: Method, params: Any) -> tuple[Any, ...]:
    """Return the properties of a method on which a program depends: its switches, and the shapes of its states."""
    functions = [
        value if value in (None, send_update, add) else callable(value)
        for name, value in zip(Method._fields, method, strict=True)
        if name not in ("name", "hyperparameters", "optimizer", "timing", "rounds", "honest", "recipe")
    ]
    central, *_ = jax.eval_shape(lambda tree: (jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(tree))]),), params)
    inits = method.init_worker, method.init_server, method.init_memory
    states = [*(jax.eval_shape(init, central) for init in inits), jax.eval_shape(method.optimizer.init, params)]
    leaves, structure = jax.tree.flatten(states)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return (*functions, method.sees_loss, method.sees_memories, method.needs_key, method.honest, structure, shapes)


def _build_replicas(parts: MakeParts, method: Method, layout: Layout) -> tuple[Any, Any, Any]:
    """Return `Program.replicas`, `Program.spread` and `Program.honest`."""
    honest = slice(None) if method.honest is None else np.array(method.honest)
    if not layout.gossip:
        return None, None, honest

    def replicas(state: ReplayState, numbers: Any) -> Any:
        method, replicas = parts(numbers).method, state.workers.method
        if method.mix is not None:
            resume: Any = method.resume  # which every method with ``mix`` has
            replicas = jax.vmap(lambda replica: resume(replica, None))(replicas)
        return of_workers(replicas, layout.workers)

    def spread(state: ReplayState, numbers: Any) -> Any:
        return jnp.mean(jnp.sum((replicas(state, numbers)[honest] - state.central) ** 2, -1), 0)

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
