"""The border between servers that see tensors and the flat vectors that replays compute with.

Of a method with ``space="tensors"`` the server's functions have the problem's tree of parameters
wherever other methods have a vector: optimizers of matrices, and rules by tensor. Workers,
recorders, attacks and real processes see vectors.
"""

from typing import Any

import jax

from asyncsim.methods.method import Applied, Array, Method, State
from asyncsim.replays.local import Flat


def of_vectors(method: Method, flat: Flat) -> Method:
    """Return a method whose server sees tensors as a method of vectors; others unchanged."""
    if method.space == "vector":
        return method

    def tensors(message: Any, central: Array, unravel: Any) -> Any:
        """Return a message whose vectors of all parameters are trees."""
        return jax.tree.map(
            lambda leaf: unravel(leaf) if leaf.shape[-1:] == central.shape else leaf, message
        )

    def raveled(applied: Applied) -> Applied:
        return applied._replace(central=flat.ravel(applied.central))

    def init_server(central: Array) -> State:
        return method.init_server(flat.unravel(central))

    def apply(server: State, central: Array, message: Any, *rest: Any) -> Applied:
        message = tensors(message, central, flat.unravel)
        return raveled(method.apply(server, flat.unravel(central), message, *rest))

    def combine(server: State, central: Array, messages: Array, visits: Any) -> Applied:
        assert method.combine is not None
        messages = tensors(messages, central, jax.vmap(flat.unravel))
        return raveled(method.combine(server, flat.unravel(central), messages, visits))

    def reply(server: State, central: Array, *rest: Any) -> Array:
        assert method.reply is not None
        return flat.ravel(method.reply(server, flat.unravel(central), *rest))

    return method._replace(
        space="vector",
        init_server=init_server,
        apply=apply if method.combine is None else method.apply,
        combine=method.combine and combine,
        reply=method.reply and reply,
    )
