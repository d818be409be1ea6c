"""Server steps of several methods: means of messages, and optimizers that step along messages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.errors import InputError
from asyncsim.methods.method import Applied, Array, State, Visit


def sum_messages(messages: Any, visits: Visit) -> Any:
    """Add up the messages of a version in a loop; on a CPU ``jnp.sum`` over large rows is slow."""

    def add(place: Array, total: Any) -> Any:
        return jax.tree.map(
            lambda summed, rows: summed + jax.lax.dynamic_index_in_dim(rows, place, keepdims=False),
            total,
            messages,
        )

    nothing = jax.tree.map(lambda rows: jnp.zeros(rows.shape[1:], rows.dtype), messages)
    return jax.lax.fori_loop(jnp.int32(0), jnp.asarray(visits.messages, jnp.int32), add, nothing)


def mean_message(messages: Any, visits: Visit) -> Any:
    """Average the messages of a version."""
    return jax.tree.map(
        lambda total: total / jnp.asarray(visits.messages, total.dtype),
        sum_messages(messages, visits),
    )


def add_mean(server: State, central: Array, messages: Array, visits: Visit) -> Applied:
    """Add the mean of a version's messages to the central variable."""
    return Applied(central + mean_message(messages, visits), server)


def group_means(messages: Array, present: Array, group: Array, count: int) -> tuple[Array, Array]:
    """Average the messages of each of ``count`` groups; return the means and the numbers of
    messages.
    """
    total = jnp.zeros((count, *messages.shape[1:]), messages.dtype)
    total = total.at[group].add(jnp.where(present[:, None], messages, 0))
    number = jnp.zeros(count, messages.dtype).at[group].add(present.astype(messages.dtype))
    return total / jnp.maximum(number, 1)[:, None], number


def outer_optimizer(
    rate: float,
    momentum: float,
    server_optimizer: optax.GradientTransformation | None,
    default: tuple[float, float],
) -> optax.GradientTransformation:
    """Return the server's optimizer; the default is Nesterov's.

    Nesterov's rule, with ``sent`` the mean message and ``m`` the momentum::

        m       <- momentum * m + sent
        central <- central + rate * (momentum * m + sent)
    """
    if server_optimizer is None:
        return _nesterov(rate, momentum)
    for name, value, usual in zip(
        ("server_rate", "server_momentum"), (rate, momentum), default, strict=True
    ):
        if not (isinstance(value, float) and value == usual):
            raise InputError(
                f"{name} = {value!r}: the server_optimizer that is given has its own; give one of "
                "them"
            )
    return server_optimizer


def outer_step(
    optimizer: optax.GradientTransformation, state: Any, central: Any, sent: Any
) -> tuple[Any, Any]:
    """Update the central variable with a message; return it and the optimizer's new state."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with numbers
        step, state = optimizer.update(jax.tree.map(jnp.negative, sent), state, central)
    return optax.apply_updates(central, step), state


class Nesterov(NamedTuple):
    """State of the default optimizer: a momentum of shape ``[parameters]``, or ``()``."""

    momentum: Any


def _nesterov(rate: Any, momentum: Any) -> optax.GradientTransformation:
    # Unlike optax's, the rate and the momentum may vary in an ensemble, and no state is stored
    # without momentum.
    keeps = not (isinstance(momentum, float) and momentum == 0)

    def update(gradient, state, params=None):
        if not keeps:
            return -rate * gradient, state
        m = momentum * state.momentum + gradient
        return -rate * (momentum * m + gradient), Nesterov(m)

    return optax.GradientTransformation(
        lambda params: Nesterov(jnp.zeros_like(params) if keeps else ()), update
    )
