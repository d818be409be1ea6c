"""The border between methods that see tensors and the flat vectors that replays compute with.

A method with ``space="tensors"`` has the problem's tree of parameters wherever other methods have a
vector. `on_vectors` turns it into a method of vectors once, before anything is compiled: replays,
recorders, attacks and real processes see vectors only.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from asyncsim.base.threads import cached
from asyncsim.methods.declared import recast
from asyncsim.methods.method import Applied, Array, Method, State, Visit
from asyncsim.problems.problem import Problem
from asyncsim.replays.local import Flat
from asyncsim.replays.programs import IdentityKey, flatten_problem


def on_vectors(method: Method, problem: Problem, dtype: Any) -> Method:
    """Return a method of tensors as a method of vectors; others, and equal arguments, unchanged.

    A message with the structure and shapes of the parameters travels as one vector of type
    ``dtype``; other messages, and all states, stay as they are.
    """
    if method.space == "vector":
        return method
    return _cached_on_vectors(IdentityKey(method), IdentityKey(problem), jnp.dtype(dtype))


@cached(maxsize=64)
def _cached_on_vectors(method: IdentityKey, problem: IdentityKey, dtype: Any) -> Method:
    flat = flatten_problem(problem.value, dtype, jax.devices()[0])
    params = problem.value.shapes
    return recast(
        method.value, ("vectors", problem, dtype), lambda method: _on_vectors(method, flat, params)
    )


def _on_vectors(method: Method, flat: Flat, params: Any) -> Method:
    def shape(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [jnp.shape(leaf) for leaf in leaves]

    shape_of_params, size = shape(params), sum(leaf.size for leaf in jax.tree.leaves(params))

    def vector(tree: Any) -> Any:
        return flat.ravel(tree) if shape(tree) == shape_of_params else tree

    def tensors(array: Any) -> Any:
        return flat.unravel(array) if getattr(array, "shape", None) == (size,) else array

    def tensors_of_each(rows: Any) -> Any:
        """Return messages with a leading axis as tensors with that axis."""
        is_vectors = getattr(rows, "ndim", 0) == 2 and rows.shape[1] == size
        return jax.vmap(flat.unravel)(rows) if is_vectors else rows

    def message(worker: State, update: Array, start: Array, central: Any, visit: Visit) -> Any:
        arguments = map(tensors, (update, start, central))
        message, worker, diagnostics = method.message(worker, *arguments, visit)
        # Diagnostics may be boolean: they keep their type.
        vectors = {name: ravel_pytree(tree)[0] for name, tree in diagnostics.items()}
        return vector(message), worker, vectors

    def apply(server: State, central: Array, message: Any, *arguments: Any) -> Applied:
        applied = method.apply(server, tensors(central), tensors(message), *arguments)
        return applied._replace(central=vector(applied.central))

    def combine(server: State, central: Array, messages: Any, visits: Visit) -> Applied:
        assert method.combine is not None
        applied = method.combine(server, tensors(central), tensors_of_each(messages), visits)
        return applied._replace(central=vector(applied.central))

    def receive(memory: State, message: Any, visit: Visit) -> tuple[State, State]:
        assert method.receive is not None
        message, memory = method.receive(memory, tensors(message), visit)
        return vector(message), memory

    def mix(worker: State, inbox: Any, visit: Visit) -> State:
        assert method.mix is not None
        if method.sees_messages:
            inbox = inbox._replace(messages=tensors_of_each(inbox.messages))
        return method.mix(worker, tensors(inbox), visit)

    def replica(carrier: State) -> Any:
        # A message may have become a vector; the state of a worker that meets others is a tree.
        carrier = tensors(carrier) if method.meet is None else carrier
        if method.replica is not None:
            carrier = method.replica(carrier)
        elif shape(carrier) != shape_of_params:
            carrier = carrier[0]
        # Beside its weight, if the method's messages carry weights.
        has_weight = isinstance(carrier, tuple) and shape(carrier) != shape_of_params
        return (vector(carrier[0]), carrier[1]) if has_weight else vector(carrier)

    def init(name: str) -> Any:
        return lambda central: getattr(method, name)(tensors(central))

    def of_state(name: str) -> Any:
        return lambda state: vector(getattr(method, name)(state))

    def at_central(name: str) -> Any:
        return lambda state, central, *arguments: vector(
            getattr(method, name)(state, tensors(central), *arguments)
        )

    def refresh(state: Any, read: Any) -> Any:
        assert method.refresh is not None
        return method.refresh(state, tensors(read))

    changed: dict[str, Any] = dict(
        refresh=refresh,
        message=message,
        apply=apply,
        combine=combine,
        receive=receive,
        mix=mix,
        replica=replica,
    )
    for border, names in (
        (init, ("init_worker", "init_server", "init_memory")),
        (of_state, ("proxy", "last")),
        (at_central, ("resume", "reply", "origin")),
    ):
        changed |= {name: border(name) for name in names}
    usual = Method._field_defaults
    if method.gossips:
        usual = {name: value for name, value in usual.items() if name != "replica"}
    changed = {
        name: function
        for name, function in changed.items()
        # The defaults work with vectors, too.
        if name not in usual or getattr(method, name) is not usual[name]
    }
    return method._replace(space="vector", **changed)
