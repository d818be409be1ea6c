"""A worker's local steps, the only place where gradients are computed; and parameters as one flat vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem

#: Folded into a key before the number of the local step: draws of a step are none of the message's, or of another's.
_LOCAL_STEPS = 2**32 - 1


class Flat(NamedTuple):
    """Functions from a problem's tree to the vector that methods work on, and back."""

    ravel: Callable[[Any], Array]
    unravel: Callable[[Array], Any]


class Learner(NamedTuple):
    """What a worker's local steps change besides the parameters."""

    optimizer: State
    problem: State


class Constants(NamedTuple):
    """Constants of a run, which may differ between runs of one compiled program.

    Attributes
    ----------
    key : jax.random.key
        Of the problem's randomness; in an ensemble ``[members]``.
    numbers : dict
        Hyper-parameters of the method by name, scalars; in an ensemble ``[members]``.
    """

    key: Array
    numbers: dict[str, Array]


class Parts(NamedTuple):
    """A method, and the functions of `build_local` and `build_anew` for it on a problem."""

    method: Method
    local: Callable[..., "LocalResult"]
    anew: Callable[[Array], tuple[State, Learner]] | None


#: From numbers, `Constants.numbers`, to the functions that compute with them.
MakeParts = Callable[[Any], Parts]


class LocalResult(NamedTuple):
    """What a worker brings to its visit."""

    update: Any
    loss: Any
    learner: Any  #: a `Learner`


def build_local(method: Method, problem: Problem, flat: Flat, window: int, windows_differ: bool = False):
    """Return the function that takes a worker's local steps, as many as the window or as the visit says.

    Their start and their sum are vectors.
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

    def local(data, key, start: Array, learner: Learner, visit: Visit, job: Array, rows: Array) -> LocalResult:
        params = flat.unravel(start)
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), job)
        carry = (params, learner.optimizer, learner.problem)
        given = {"visit": visit, "start": params}

        def key_at(index: Any) -> Array:
            """Return the key of a local step's loss; of the first the job's, whatever the window."""
            return jnp.where(index == 0, key, jax.random.fold_in(jax.random.fold_in(key, _LOCAL_STEPS), index))

        def given_at(index: Any) -> dict[str, Any]:
            """Return what the optimizer is given at a local step: a key of its own, if visits have one."""
            if not method.needs_key:
                return given
            of_visit: Any = visit.key
            of_step = jax.random.fold_in(jax.random.fold_in(of_visit, _LOCAL_STEPS), index)
            return given | {"visit": visit._replace(key=of_step)}

        if window == 1:
            carry, (steps, value) = step(carry, rows[0], key, data, **given_at(0))
            return LocalResult(flat.ravel(steps), value, Learner(*carry[1:]))

        nothing = jax.tree.map(jnp.zeros_like, params)
        if windows_differ:

            def another(index, state):
                carry, update, total = state
                carry, (steps, value) = step(carry, rows[index], key_at(index), data, **given_at(index))
                return carry, optax.tree.add(update, steps), total + value

            state = (carry, nothing, jnp.zeros((), jnp.result_type(*jax.tree.leaves(params))))
            carry, update, total = jax.lax.fori_loop(0, visit.local_steps, another, state)
            return LocalResult(flat.ravel(update), total / visit.local_steps.astype(total.dtype), Learner(*carry[1:]))

        def next_step(state, index):
            carry, update = state
            carry, (steps, value) = step(carry, rows[index], key_at(index), data, **given_at(index))
            return (carry, optax.tree.add(update, steps)), value

        (carry, update), values = jax.lax.scan(next_step, (carry, nothing), jnp.arange(window))
        return LocalResult(flat.ravel(update), jnp.mean(values), Learner(*carry[1:]))

    return local


def build_anew(method: Method, problem: Problem, flat: Flat, dtype: Any) -> Callable[[Array], tuple[State, Learner]]:
    """Return the function from what a worker reads that has lost its state to the one that it begins with.

    That is the method's and the local optimizer's own at the start, of these parameters, and the problem's.
    """

    def cast(leaf: Any) -> Array:
        kind = jnp.result_type(leaf)
        return jnp.asarray(leaf, dtype if jnp.issubdtype(kind, jnp.floating) else kind)

    def anew(read: Array) -> tuple[State, Learner]:
        state = jax.tree.map(cast, problem.init_state()) if problem.init_state else ()
        return method.init_worker(read), Learner(method.optimizer.init(flat.unravel(read)), state)

    return anew


def start_anew(anew: Callable[[Array], tuple[State, Learner]], row: Any, read: Array, fresh: Array) -> Any:
    """Return a worker's row, as it is or, if the worker is ``fresh``, anew; the server's memory of it stays."""
    state, learner = anew(read)
    method, learner = jax.tree.map(
        lambda new, old: jnp.where(fresh, new, old), (state, learner), (row.method, row.learner)
    )
    return row._replace(method=method, learner=learner)


def flatten(template: Any, in_parts: bool = False) -> Flat:
    """Return how trees with the structure and shapes of the template become vectors.

    ``in_parts`` says how: written into the vector one after the other, or concatenated (`tuning.writes_slices`).
    """
    vector, unravel = ravel_pytree(template)

    def parts(tree: Any) -> list[Array]:
        return [leaf.reshape(-1).astype(vector.dtype) for leaf in jax.tree.leaves(tree) if leaf.size]

    def written(tree: Any) -> Array:
        # Behind a barrier, as XLA else makes one pad of the zeros and the first part, which takes 50 ms instead of 1
        # where the length does not divide evenly among threads (the thesis' perceptron).
        array, at = jax.lax.optimization_barrier(jnp.zeros(vector.size, vector.dtype)), 0
        for part in parts(tree):
            array = jax.lax.dynamic_update_slice(array, part, (at,))
            at += part.size
        return array

    return Flat(written if in_parts else lambda tree: jnp.concatenate(parts(tree)), unravel)
