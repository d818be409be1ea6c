"""Compiled programs of the replay, and the data they work on: made once for all runs that share them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.diagnosis import build_before, build_diagnose
from asyncsim.division import DEVICES
from asyncsim.flat import Flat, flatten
from asyncsim.kernel import build_advance
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replay_state import Layout, ReplayState, initial_state, state_specs


class Program(NamedTuple):
    """The jitted functions of a replay.

    Attributes
    ----------
    advance, before, diagnose : function
        See `asyncsim.kernel.build_advance` and `asyncsim.diagnosis`.
    evaluate : function
        From a vector of parameters, the problem's state and data to a dict of scalars.
    initial_state : function
        `asyncsim.replay_state.initial_state` less its first two arguments, the result divided over the devices.
    flat : Flat
    """

    advance: Callable[..., Any]
    before: Callable[..., Any]
    diagnose: Callable[..., Any]
    evaluate: Callable[..., Any]
    initial_state: Callable[..., ReplayState]
    flat: Flat


def compiled(method: Method, problem: Problem, layout: Layout, dtype: Any, devices: tuple[Any, ...]) -> Program:
    """Return the functions for this very method and problem: keep and reuse the objects to compile once."""
    return _build(_Same(method), _Same(problem), layout, dtype, devices)


def on_devices(problem: Problem, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the training and the test data on the devices, moved there once for all runs of a study.

    Every device has all of the training data; the first one has the test data.
    """
    return _move(_Same(problem), dtype, devices)


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree to the run's precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, _float(jnp.result_type(leaf), dtype)), tree)


class _Same:
    """A key for a cache: equal only to itself wrapped again, so that methods and problems need no hash."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


@functools.lru_cache(maxsize=32)
def _build(method: _Same, problem: _Same, layout: Layout, dtype: Any, devices: tuple[Any, ...]) -> Program:
    shapes = jax.eval_shape(problem.value.init, jax.random.key(0))
    template = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _float(leaf.dtype, dtype)), shapes)
    flat = flatten(template, layout.division.padded)
    mesh = Mesh(np.array(devices), (DEVICES,))

    def initial(params: Any, problem_state: Any, slots: int, form_slots: int, workers: int) -> ReplayState:
        make = functools.partial(initial_state, method.value, flat, slots=slots, form_slots=form_slots, workers=workers)
        if len(devices) == 1:
            return make(params, problem_state)
        specs = state_specs(jax.eval_shape(make, params, problem_state), layout.division)
        # Made where it will lie: no device ever holds the whole of it.
        return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))(
            params, problem_state
        )

    return Program(
        advance=build_advance(method.value, problem.value, layout, flat, mesh),
        before=build_before(layout),
        diagnose=build_diagnose(method.value, flat),
        evaluate=jax.jit(lambda central, state, data: problem.value.evaluate(flat.unravel(central), state, data)),
        initial_state=initial,
        flat=flat,
    )


@functools.lru_cache(maxsize=2)
def _move(problem: _Same, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    train, test = cast(problem.value.train, dtype), cast(problem.value.test, dtype)
    if len(devices) == 1:
        return jax.device_put((train, test), devices[0])
    everywhere = NamedSharding(Mesh(np.array(devices), (DEVICES,)), PartitionSpec())
    return jax.device_put(train, everywhere), jax.device_put(test, devices[0])


def _float(own: Any, dtype: Any) -> Any:
    return dtype if jnp.issubdtype(own, jnp.floating) else own
