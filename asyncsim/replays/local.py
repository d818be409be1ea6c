"""A worker's local steps: the only place where gradients are computed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem
from asyncsim.replays.flat import Flat

#: Folded into a key before the number of the local step: draws of a step are none of the message's, or of another's.
_LOCAL_STEPS = 2**32 - 1


class Learner(NamedTuple):
    """What a worker's local steps change besides the parameters."""

    optimizer: State
    problem: State


class LocalResult(NamedTuple):
    """What a worker brings to its visit."""

    update: Any
    loss: Array
    learner: Learner


def build_local(method: Method, problem: Problem, window: int, windows_differ: bool = False):
    """Return the function that takes a worker's local steps from some parameters.

    They are as many as the window, or as its visit says. Parameters and update are in the problem's own tree.
    """
    optimizer = optax.with_extra_args_support(method.optimizer)

    gradient = jax.value_and_grad(problem.stateful_loss, has_aux=True)

    def step(carry, rows, key, data, **given):
        params, optimizer_state, problem_state = carry
        batch = jax.tree.map(lambda array: array[rows], data)
        at = params
        if method.look_ahead is not None:
            at = optax.apply_updates(params, method.look_ahead(optimizer_state))
        (value, problem_state), gradients = gradient(at, problem_state, batch, key)
        steps, optimizer_state = optimizer.update(gradients, optimizer_state, params, **given)
        return (optax.apply_updates(params, steps), optimizer_state, problem_state), (steps, value)

    def local(data, key, params, learner: Learner, visit: Visit, job: Array, rows: Array) -> LocalResult:
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), job)
        carry = (params, learner.optimizer, learner.problem)
        given = {"visit": visit, "start": params}

        def key_at(index: Any) -> Array:
            """Return the key of a local step's loss; of the first the job's, whatever the window."""
            return jnp.where(index == 0, key, jax.random.fold_in(jax.random.fold_in(key, _LOCAL_STEPS), index))

        def given_at(index: Any) -> dict[str, Any]:
            """Return what the optimizer is given at a local step: a key of its own, if visits have one."""
            if not method.draws:
                return given
            of_visit: Any = visit.key
            of_step = jax.random.fold_in(jax.random.fold_in(of_visit, _LOCAL_STEPS), index)
            return given | {"visit": visit._replace(key=of_step)}

        if window == 1:
            carry, (steps, value) = step(carry, rows[0], key, data, **given_at(0))
            return LocalResult(steps, value, Learner(*carry[1:]))

        nothing = jax.tree.map(jnp.zeros_like, params)
        if windows_differ:

            def another(index, state):
                carry, update, total = state
                carry, (steps, value) = step(carry, rows[index], key_at(index), data, **given_at(index))
                return carry, optax.tree.add(update, steps), total + value

            state = (carry, nothing, jnp.zeros((), jnp.result_type(*jax.tree.leaves(params))))
            carry, update, total = jax.lax.fori_loop(0, visit.local_steps, another, state)
            return LocalResult(update, total / visit.local_steps.astype(total.dtype), Learner(*carry[1:]))

        def next_step(state, index):
            carry, update = state
            carry, (steps, value) = step(carry, rows[index], key_at(index), data, **given_at(index))
            return (carry, optax.tree.add(update, steps)), value

        (carry, update), values = jax.lax.scan(next_step, (carry, nothing), jnp.arange(window))
        return LocalResult(update, jnp.mean(values), Learner(*carry[1:]))

    return local


def from_vector(local: Callable[..., LocalResult], flat: Flat) -> Callable[..., LocalResult]:
    """Return the function of `build_local` for parameters and an update that are one flat vector each."""

    def local_from_vector(data: Any, key: Array, start: Array, *given: Any) -> LocalResult:
        result = local(data, key, flat.unravel(start), *given)
        return result._replace(update=flat.ravel(result.update))

    return local_from_vector
