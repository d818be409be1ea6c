"""Compiled programs of the replay, and the data they work on: made once for all runs that share them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.diagnosis import build_before, build_diagnose
from asyncsim.replays.dispatched import Dispatched
from asyncsim.replays.division import DEVICES, Division
from asyncsim.replays.flat import Flat, flatten
from asyncsim.replays.halves import Halves
from asyncsim.replays.kernel import build_advance
from asyncsim.replays.local import build_local, from_vector
from asyncsim.replays.members import Members, batched_local, batched_method, batched_state
from asyncsim.replays.parts_check import require_elementwise
from asyncsim.replays.replay_state import Layout, ReplayState, initial_state, state_specs
from asyncsim.replays.tuning import gradients_a_group, gradients_at_once, writes_slices
from asyncsim.threads import cached


class Program(NamedTuple):
    """The jitted functions of a replay.

    Attributes
    ----------
    advance, before, diagnose : function
        See `asyncsim.replays.kernel.build_advance` and `asyncsim.replays.diagnosis`, or
        `asyncsim.replays.dispatched.Dispatched` and `asyncsim.replays.halves.Halves`, each of which has a kind of state
        of its own.
    evaluate : function
        From the central variable, the problem's state, training and test data to a dict of numbers.
    initial_state : function
        `asyncsim.replays.replay_state.initial_state` less its first two arguments, the result divided over the devices.
    whole, from_whole : function
        From a state to the same as a `ReplayState`; and from that to a state that can be gone on from, copied.
    problem_states : function
        From a state to the problem's non-trained state, its leaves with leading axis ``workers``.
    flat : Flat
    devices : tuple of jax.Device
    looks_ahead : bool
        Whether ``advance`` is also told which pieces will follow, or None.
    """

    advance: Callable[..., Any]
    before: Callable[..., Any]
    diagnose: Callable[..., Any]
    evaluate: Callable[..., Any]
    initial_state: Callable[..., Any]
    whole: Callable[[Any], ReplayState]
    from_whole: Callable[[ReplayState], Any]
    problem_states: Callable[[Any], Any]
    flat: Flat
    devices: tuple[Any, ...]
    looks_ahead: bool = False


def compiled(method: Method, problem: Problem, layout: Layout, dtype: Any, devices: tuple[Any, ...]) -> Program:
    """Return the functions for this very method and problem: keep and reuse the objects to compile once."""
    return _build(Same(method), Same(problem), layout, dtype, devices, gradients_at_once())


def compiled_ensemble(
    members: Members, one: Method, problem: Problem, layout: Layout, dtype: Any, device: Any
) -> Program:
    """Return the functions for the members of an ensemble on one device, ``one`` being any of their methods.

    They are compiled anew for each ensemble.
    """
    flat = _flatten(problem, layout, dtype, device)
    method = batched_method(members, one)
    local = batched_local(members, problem, layout, flat)
    every = flat._replace(unravel=jax.vmap(flat.unravel))
    evaluate = _evaluation(problem, flat)

    def evaluate_all(central: Any, state: Any, train: Any, test: Any) -> Any:
        # One after the other: what an evaluation holds at a time is sized for one.
        return jax.lax.map(lambda own: evaluate(*own, train, test), (central, state))

    return Program(
        advance=build_advance(method, local, layout, Mesh(np.array([device]), (DEVICES,))),
        before=build_before(method, layout),
        diagnose=build_diagnose(method, every, layout),
        evaluate=jax.jit(evaluate_all),
        initial_state=_make_in_place(functools.partial(batched_state, members, flat)),
        whole=_as_it_is,
        from_whole=functools.partial(_copied, device=device),
        problem_states=_problem_states,
        flat=flat,
        devices=(device,),
    )


def on_devices(problem: Problem, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the training and the test data on the devices, moved there once for all runs of a study.

    Every device has all of the training data; the first one has the test data.
    """
    return _move(Same(problem), dtype, devices)


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree to the run's precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, _float(jnp.result_type(leaf), dtype)), tree)


class Same:
    """A key for a cache: equal only to itself wrapped again, so that methods and problems need no hash."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


@cached(maxsize=32)
def _build(method: Same, problem: Same, layout: Layout, dtype: Any, devices: tuple[Any, ...], at_once: int) -> Program:
    flat = _flatten(problem.value, layout, dtype, devices[0])
    local = build_local(method.value, problem.value, layout.window, layout.windows_differ)
    evaluate = jax.jit(_evaluation(problem.value, flat))
    if layout.way == "halves" or layout.division.by_parameters:
        require_elementwise(method.value)
    if layout.way != "kernel":
        one: Any
        if layout.way == "halves":
            one = Halves(method.value, local, flat, layout, dtype, devices[0])
        else:
            room = gradients_a_group(problem.value.parameter_count, _has_convolution(problem.value, dtype))
            one = Dispatched(method.value, local, flat, layout, devices[0], at_once, room)
        return Program(
            advance=one.advance,
            before=one.before,
            diagnose=one.diagnose,
            evaluate=evaluate,
            initial_state=one.initial_state,
            whole=one.whole,
            from_whole=one.from_whole,
            problem_states=one.problem_states,
            flat=flat,
            devices=devices,
            looks_ahead=layout.way == "dispatched",
        )
    mesh = Mesh(np.array(devices), (DEVICES,))
    make: Callable[..., ReplayState] = functools.partial(initial_state, method.value, flat)
    return Program(
        advance=build_advance(method.value, from_vector(local, flat), layout, mesh),
        before=build_before(method.value, layout),
        diagnose=build_diagnose(method.value, flat, layout),
        evaluate=evaluate,
        initial_state=_make_in_place(make) if len(devices) == 1 else _make_divided(make, layout.division, mesh),
        whole=_as_it_is,
        from_whole=functools.partial(_copied, device=devices[0]),
        problem_states=_problem_states,
        flat=flat,
        devices=devices,
    )


def _problem_states(state: ReplayState) -> Any:
    return state.workers.learner.problem


def _as_it_is(state: ReplayState) -> ReplayState:
    return state


def _copied(state: ReplayState, device: Any) -> ReplayState:
    # A state is donated when it is gone on from.
    return jax.tree.map(lambda leaf: jnp.array(leaf, device=device), state)


def _make_in_place(make: Callable[..., ReplayState], **options: Any) -> Callable[..., ReplayState]:
    """Return the function compiled, so that no array is made twice."""
    return jax.jit(make, static_argnames=("slots", "form_slots", "workers"), **options)


def _make_divided(make: Callable[..., ReplayState], division: Division, mesh: Mesh) -> Callable[..., ReplayState]:
    """Return the function compiled to make each array where it will lie: no device ever holds all of it."""

    @functools.cache
    def compiled_for(sizes: tuple[tuple[str, int], ...], structure: Any, shapes: tuple[Any, ...]):
        arguments = jax.tree.unflatten(structure, shapes)
        specs = state_specs(jax.eval_shape(functools.partial(make, **dict(sizes)), *arguments), division)
        return _make_in_place(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def made(*arguments: Any, **sizes: int) -> ReplayState:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return compiled_for(tuple(sizes.items()), structure, shapes)(*arguments, **sizes)

    return made


def _flatten(problem: Problem, layout: Layout, dtype: Any, device: Any) -> Flat:
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    template = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _float(leaf.dtype, dtype)), shapes)
    return flatten(template, layout.division.padded, writes_slices(device.platform, problem.parameter_count))


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
        values = {
            f"train_{name}": value for name, value in problem.evaluate(flat.unravel(central), state, train).items()
        }
        if test is not None:
            found = problem.evaluate(flat.unravel(central), state, test)
            values |= {f"test_{name}": value for name, value in found.items()}
        return values

    return evaluate


@cached(maxsize=2)
def _move(problem: Same, dtype: Any, devices: tuple[Any, ...]) -> tuple[Any, Any]:
    train, test = cast(problem.value.train, dtype), cast(problem.value.test, dtype)
    if len(devices) == 1:
        return jax.device_put((train, test), devices[0])
    everywhere = NamedSharding(Mesh(np.array(devices), (DEVICES,)), PartitionSpec())
    return jax.device_put(train, everywhere), jax.device_put(test, devices[0])


def _float(own: Any, dtype: Any) -> Any:
    return dtype if jnp.issubdtype(own, jnp.floating) else own
