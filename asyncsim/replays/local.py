"""A worker's local steps, the only place of gradients; and parameters as one flat vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem

#: Folded into a key before the number of the local step: the draws of a step are then independent
#: of the message's draws and of other steps'.
_LOCAL_STEPS = 2**32 - 1


class Flat(NamedTuple):
    """Functions from a problem's tree to the vector that methods work on, and back."""

    ravel: Callable[[Any], Array]
    unravel: Callable[[Array], Any]


class Learner(NamedTuple):
    """The states that a worker's local steps change besides the parameters."""

    optimizer: State
    problem: State


class Constants(NamedTuple):
    """Constants of a run, which may differ between runs of one compiled program.

    Attributes
    ----------
    key, visits_key : jax.random.key
        Of the problem's randomness, and of the visits of methods that draw; ``()`` without draws.
    numbers : dict
        Hyper-parameters of the method by name, scalars.
    """

    key: Array
    visits_key: Any
    numbers: dict[str, Array]


class Parts(NamedTuple):
    """A method, and the functions of `build_local` and `build_restart` for it on a problem."""

    method: Method
    local: Callable[..., "LocalResult"]
    restart: Callable[[Array], tuple[State, Learner]] | None


#: From numbers, `Constants.numbers`, to the functions that compute with them.
MakeParts = Callable[[Any], Parts]


class LocalResult(NamedTuple):
    """The result of a worker's local steps."""

    update: Any
    loss: Any
    learner: Any  #: a `Learner`


def build_local(
    method: Method, problem: Problem, flat: Flat, window: int, windows_differ: bool = False
):
    """Return the function that takes a worker's local steps: the window's, or the visit's number.

    Their start and their sum are vectors.
    """
    optimizer = optax.with_extra_args_support(method.optimizer)

    gradient = jax.value_and_grad(problem.stateful_loss, has_aux=True)

    def step(carry, rows, key, data, **extra):
        params, optimizer_state, problem_state = carry
        batch = jax.tree.map(lambda array: array[rows], data)
        at = params
        # Nesterov's gradient is taken ahead; the optimizer's step still starts from the parameters.
        if method.look_ahead is not None:
            at = optax.apply_updates(params, method.look_ahead(optimizer_state))
        (value, problem_state), gradients = gradient(at, problem_state, batch, key)
        steps, optimizer_state = optimizer.update(gradients, optimizer_state, params, **extra)
        return (optax.apply_updates(params, steps), optimizer_state, problem_state), (steps, value)

    def local(
        data, key, start: Array, learner: Learner, visit: Visit, job: Array, rows: Array
    ) -> LocalResult:
        params = flat.unravel(start)
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), job)
        carry = (params, learner.optimizer, learner.problem)
        extra = {"visit": visit, "start": params}

        def key_at(index: Any) -> Array:
            """Return the key of a local step's loss; of the first, for any window, the job's."""
            return jnp.where(
                index == 0, key, jax.random.fold_in(jax.random.fold_in(key, _LOCAL_STEPS), index)
            )

        def extra_at(index: Any) -> dict[str, Any]:
            """Return the optimizer's arguments at a local step, with a key if visits have one."""
            if not method.needs_key:
                return extra
            of_visit: Any = visit.key
            of_step = jax.random.fold_in(jax.random.fold_in(of_visit, _LOCAL_STEPS), index)
            return extra | {"visit": visit._replace(key=of_step)}

        # Without a loop: on a CPU, convolutions inside a scan ran five times slower than outside.
        if window == 1:
            carry, (steps, value) = step(carry, rows[0], key, data, **extra_at(0))
            return LocalResult(flat.ravel(steps), value, Learner(*carry[1:]))

        def add_step(index, state):
            carry, update, total = state
            carry, (steps, value) = step(carry, rows[index], key_at(index), data, **extra_at(index))
            return carry, optax.tree.add(update, steps), total + value

        zeros = jax.tree.map(jnp.zeros_like, params)
        total = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
        # A number that differs between visits is traced, and its loop of unknown length.
        count = visit.local_steps if windows_differ else jnp.asarray(window, jnp.int32)
        carry, update, total = jax.lax.fori_loop(0, count, add_step, (carry, zeros, total))
        mean = total / count.astype(total.dtype)
        return LocalResult(flat.ravel(update), mean, Learner(*carry[1:]))

    return local


def build_restart(
    method: Method, problem: Problem, flat: Flat, dtype: Any
) -> Callable[[Array], tuple[State, Learner]]:
    """Return the function from a restarted worker's read to its first state.

    These are the initial states of the method and the local optimizer at the read parameters, and
    the problem's initial state.
    """

    def cast(leaf: Any) -> Array:
        kind = jnp.result_type(leaf)
        # Leaves of a running replay have these types, and `restart_worker` must keep them.
        return jnp.asarray(leaf, dtype if jnp.issubdtype(kind, jnp.floating) else kind)

    def restart(read: Array) -> tuple[State, Learner]:
        state = jax.tree.map(cast, problem.init_state()) if problem.init_state else ()
        return method.init_worker(read), Learner(method.optimizer.init(flat.unravel(read)), state)

    return restart


def restart_worker(
    restart: Callable[[Array], tuple[State, Learner]], row: Any, read: Array, fresh: Array
) -> Any:
    """Reset a worker's row if the worker is ``fresh``; the server's memory of it stays."""
    state, learner = restart(read)
    method, learner = jax.tree.map(
        lambda new, old: jnp.where(fresh, new, old), (state, learner), (row.method, row.learner)
    )
    return row._replace(method=method, learner=learner)


def flatten(template: Any, in_parts: bool = False) -> Flat:
    """Return the conversions between vectors and trees with the structure of the template.

    With ``in_parts`` leaves are written into the vector one after the other; else they are
    concatenated (`asyncsim.replays.tuning.writes_slices`).
    """
    vector, unravel = ravel_pytree(template)

    def raveled_leaves(tree: Any) -> list[Array]:
        return [
            leaf.reshape(-1).astype(vector.dtype) for leaf in jax.tree.leaves(tree) if leaf.size
        ]

    def write_slices(tree: Any) -> Array:
        # Behind a barrier: otherwise XLA makes one pad of the zeros and the first part, which takes
        # 50 ms instead of 1 ms where the length does not divide evenly among threads (the thesis'
        # perceptron).
        array, at = jax.lax.optimization_barrier(jnp.zeros(vector.size, vector.dtype)), 0
        for part in raveled_leaves(tree):
            array = jax.lax.dynamic_update_slice(array, part, (at,))
            at += part.size
        return array

    return Flat(
        write_slices if in_parts else lambda tree: jnp.concatenate(raveled_leaves(tree)), unravel
    )
