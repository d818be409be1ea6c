"""Compiled programs of the replay and their data, shared by runs."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.threads import cached
from asyncsim.methods.declared import Recipe, recast, recipe_of
from asyncsim.methods.method import Array, Method, add, send_update
from asyncsim.problems.problem import Problem
from asyncsim.replays.central import replica_of
from asyncsim.replays.check import check_method
from asyncsim.replays.local import Flat, MakeParts, Parts, build_local, build_restart, flatten
from asyncsim.replays.look import build_look
from asyncsim.replays.pieces import InPieces, Over
from asyncsim.replays.shards import InShards
from asyncsim.replays.state import (
    Layout,
    Recorders,
    ReplayState,
)
from asyncsim.replays.tensors import of_vectors
from asyncsim.replays.tuning import writes_slices


class Program(NamedTuple):
    """The compiled functions of a replay.

    Attributes
    ----------
    engine : InPieces or InShards
        Computes commits; the latter with several servers.
    look : function
        The recorders' values of the first commit of some pieces; see `asyncsim.replays.look`.
    evaluate : function
        From the central variable, the problem's state, training and test data to a dict of numbers.
    replicas : function or None
        Without a server, from the state and the method's numbers to the replicas,
        ``[workers, parameters]``.
    honest : bool array, shape ``[workers]``
    flat : Flat
    device : jax.Device
    """

    engine: Any
    look: Callable[..., Any]
    evaluate: Callable[..., Any]
    replicas: Callable[[ReplayState, Any], Any] | None
    honest: np.ndarray
    flat: Flat
    device: Any


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
    recorders: Recorders,
    problem: Problem,
    layout: Layout,
    dtype: Any,
    device: Any,
    for_members: bool = False,
) -> tuple[Program, dict[str, Array]]:
    """Return the program of a method and the method's numbers; methods of one recipe share it.

    ``for_members``: states, starts, constants and examples have an axis of members in front.

    A method without a recipe has a program for these very objects: reuse them to compile once.
    """
    recipe, numbers = recipe_of(method), {}
    family = Keyed(IdentityKey(method), Family(lambda numbers: method, method))
    if recipe is not None:
        names = _traced_numbers(Keyed(recipe.key, recipe), IdentityKey(problem))
        # The value of a constant may decide whether others can be traced: then it is part of the
        # key.
        if len(names) < len(recipe.numbers):
            names = _traced_numbers(
                Keyed((recipe.key, *recipe.numbers.values()), recipe), IdentityKey(problem)
            )
        constants = {name: value for name, value in recipe.numbers.items() if name not in names}
        key = recipe.key, names, tuple(constants.values())
        family = Keyed(key, Family(lambda numbers: recipe.make({**constants, **numbers}), method))
        # Weakly typed, like Python's numbers: they never promote.
        numbers = {name: jnp.asarray(recipe.numbers[name]) for name in names}
    recorder_keys = tuple(map(IdentityKey, recorders))
    program = _build(
        family, recorder_keys, IdentityKey(problem), layout, dtype, device, for_members
    )
    return program, numbers


def on_device(problem: Problem, dtype: Any, device: Any) -> tuple[Any, Any]:
    """Move the training and the test data to a device, once for all runs of a study."""
    return _move(IdentityKey(problem), dtype, device)


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree to the run's precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, _float(jnp.result_type(leaf), dtype)), tree)


class Keyed:
    """A value of a cache that equals any other value with the same key."""

    def __init__(self, key: Hashable, value: Any):
        self.key, self.value = key, value

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key


class IdentityKey(Keyed):
    """A value of a cache that equals itself alone: methods and problems need no hash."""

    def __init__(self, value: Any):
        super().__init__(id(value), value)


@cached(maxsize=32)
def _build(
    keyed: Keyed,
    recorder_keys: tuple[IdentityKey, ...],
    problem_key: IdentityKey,
    layout: Layout,
    dtype: Any,
    device: Any,
    for_members: bool,
) -> Program:
    def over(function: Any, axes: tuple[Any, ...]) -> Any:
        return jax.vmap(function, axes) if for_members else function

    family, problem = keyed.value, problem_key.value
    recorders = tuple(key.value for key in recorder_keys)
    flat, evaluate = _of_problem(problem_key, dtype, device)
    parts = _parts(family, problem, layout, flat, dtype)
    kind: Any = InPieces if layout.partition is None else InShards
    engine = kind(parts, recorders, layout, device, flat, over)
    look = build_look(parts, recorders, flat, layout, over)
    replicas = _build_replicas(parts, over) if layout.gossip else None
    honest = np.array(family.method.honest or [True] * layout.workers)
    if for_members:
        evaluate = _one_by_one(evaluate)
    return Program(engine, look, evaluate, replicas, honest, flat, device)


def _one_by_one(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the evaluation of all members: an evaluation's arrays are sized for one of them."""

    def evaluate_all(central: Any, state: Any, train: Any, test: Any) -> Any:
        return jax.lax.map(lambda member: evaluate(*member, train, test), (central, state))

    return jax.jit(evaluate_all)


@cached(maxsize=8)
def _of_problem(
    problem_key: IdentityKey, dtype: Any, device: Any
) -> tuple[Flat, Callable[..., Any]]:
    """Return `Program.flat` and `Program.evaluate`, which all methods share."""
    problem = problem_key.value
    flat = flatten_problem(problem, dtype, device)
    return flat, jax.jit(_evaluation(problem, flat))


def _parts(family: Family, problem: Problem, layout: Layout, flat: Flat, dtype: Any) -> MakeParts:
    """Return the function from numbers to the functions of a method with them."""

    def parts(numbers: Any) -> Parts:
        method = family.make(numbers)
        local = build_local(method, problem, flat, layout.window, layout.windows_differ)
        return Parts(
            method, local, build_restart(method, problem, flat, dtype) if layout.restarts else None
        )

    return parts


@cached(maxsize=256)
def _traced_numbers(keyed: Keyed, problem_key: IdentityKey) -> tuple[str, ...]:
    """Return the names of a recipe's numbers whose tracing does not change the method's form."""
    recipe: Recipe = keyed.value
    params = problem_key.value.shapes

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

    # All together in most cases; else each alone, and those together once more.
    names = tuple(recipe.numbers)
    if may_be_traced(names):
        return names
    traceable = tuple(name for name in names if may_be_traced((name,)))
    return traceable if may_be_traced(traceable) else ()


def _form(method: Method, params: Any) -> tuple[Any, ...]:
    """Return the properties of a method that shape its program: switches and shapes of states."""
    unseen = ("name", "hyperparameters", "optimizer", "timing", "rounds", "recipe")
    switches = [
        True if callable(value) and value not in (send_update, add) else value
        for name, value in zip(Method._fields, method, strict=True)
        if name not in unseen
    ]
    central, *_ = jax.eval_shape(
        lambda tree: (jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(tree))]),), params
    )
    inits = method.init_worker, method.init_server, method.init_memory
    states = [
        *(jax.eval_shape(init, central) for init in inits),
        jax.eval_shape(method.optimizer.init, params),
    ]
    leaves, structure = jax.tree.flatten(states)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return *switches, structure, shapes


def _build_replicas(parts: MakeParts, over: Over) -> Callable[[ReplayState, Any], Any]:
    """Return `Program.replicas`."""

    def replicas(state: ReplayState, numbers: Any) -> Any:
        method, states = parts(numbers).method, state.workers.method
        if method.mix is None:
            return jax.vmap(functools.partial(replica_of, method))(states)
        resume: Any = method.resume  # present in every method with ``mix``
        return jax.vmap(lambda replica: resume(replica, None))(states)

    return jax.jit(over(replicas, (0, 0)))


def flatten_problem(problem: Problem, dtype: Any, device: Any) -> Flat:
    """Return the conversions between a problem's tree, cast to ``dtype``, and vectors."""
    template = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, _float(leaf.dtype, dtype)), problem.shapes
    )
    return flatten(template, writes_slices(device.platform, problem.parameter_count))


def on_vectors(method: Method, problem: Problem, dtype: Any) -> Method:
    """Return a method of tensors as a method of vectors; others, and equal arguments, unchanged."""
    if method.space == "vector":
        return method
    return _cached_on_vectors(IdentityKey(method), IdentityKey(problem), jnp.dtype(dtype))


@cached(maxsize=64)
def _cached_on_vectors(method: IdentityKey, problem: IdentityKey, dtype: Any) -> Method:
    flat = flatten_problem(problem.value, dtype, jax.devices()[0])
    key = "vectors", problem, dtype
    return recast(method.value, key, lambda method: of_vectors(method, flat))


def _evaluation(problem: Problem, flat: Flat) -> Callable[..., dict[str, Any]]:
    def evaluate(central: Any, state: Any, train: Any, test: Any) -> dict[str, Any]:
        parts = {"train": train} if test is None else {"train": train, "test": test}
        values: dict[str, Any] = {}
        for part, data in parts.items():
            metrics = problem.evaluate(flat.unravel(central), state, data)
            values |= {f"{part}_{name}": value for name, value in metrics.items()}
        return values

    return evaluate


@cached(maxsize=2)
def _move(problem: IdentityKey, dtype: Any, device: Any) -> tuple[Any, Any]:
    data = problem.value.train, problem.value.test
    for values in map(np.asarray, jax.tree.leaves(data)):
        kind = jax.dtypes.canonicalize_dtype(values.dtype)
        if values.dtype.kind in "iu" and not np.array_equal(values.astype(kind), values):
            raise InputError(
                f"problem: its data has whole numbers from {values.min()} to {values.max()}, which "
                f"{kind} cannot hold; use precision='float64', or give smaller numbers, or floats"
            )
    return jax.device_put(cast(data, dtype), device)


def _float(dtype_of_leaf: Any, dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype_of_leaf, jnp.floating) else dtype_of_leaf
