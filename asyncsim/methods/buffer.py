"""Servers that several methods share: a buffer of messages, and optimizers that take messages for gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.errors import InputError, require_fraction, require_positive
from asyncsim.methods.method import Applied, Array, State, Visit, require_optimizer


class Buffer(NamedTuple):
    """Messages since the last version."""

    total: Array  #: their sum, shape ``[parameters]``
    number: Array  #: how many, a scalar


def empty_buffer(central: Array) -> Buffer:
    """Return a buffer that holds nothing."""
    return Buffer(jnp.zeros_like(central), jnp.zeros((), central.dtype))


def collect(buffer: Buffer, message: Array, visit: Visit) -> tuple[Array, Buffer]:
    """Put a message in; return the mean of what is there, and the buffer, emptied if the version is complete."""
    total, count = buffer.total + message, buffer.number + 1
    return total / count, Buffer(jnp.where(visit.completes, 0, total), jnp.where(visit.completes, 0, count))


def add_mean(server: Buffer, central: Array, message: Array, memory: State, visit: Visit) -> Applied:
    """Add the mean of a version's messages to the central variable once the version is complete."""
    mean, server = collect(server, message, visit)
    return Applied(jnp.where(visit.completes, central + mean, central), server, memory)


def outer_optimizer(
    rate: float, momentum: float, server_optimizer: optax.GradientTransformation | None, default: tuple[float, float]
) -> tuple[dict[str, Any], optax.GradientTransformation]:
    """Return the server's optimizer and the hyper-parameters that name it: Nesterov's unless one is given.

    Nesterov's, with ``sent`` the mean message and ``m`` the momentum::

        m       <- momentum * m + sent
        central <- central + rate * (momentum * m + sent)
    """
    require_positive("server_rate", rate)
    require_fraction("server_momentum", momentum)
    if server_optimizer is None:
        return {"server_rate": rate, "server_momentum": momentum}, _nesterov(rate, momentum)
    for name, value, usual in zip(("server_rate", "server_momentum"), (rate, momentum), default, strict=True):
        if not (isinstance(value, float) and value == usual):
            raise InputError(f"{name} = {value!r}: the server_optimizer that is given has its own; give one of them")
    return {"server_optimizer": "optax"}, require_optimizer("server_optimizer", server_optimizer)


def outer_step(
    optimizer: optax.GradientTransformation, state: Any, central: Array, sent: Array, visit: Visit
) -> tuple[Array, Any]:
    """Return the central variable and the optimizer's state after a version; as they are if none is complete."""
    step, after = optimizer.update(-sent, state, central)
    taken = (optax.apply_updates(central, step), after)
    return jax.tree.map(lambda new, old: jnp.where(visit.completes, new, old), taken, (central, state))


class Nesterov(NamedTuple):
    """State of the default: its momentum, shape ``[parameters]``; ``()`` if there is none to keep."""

    momentum: Any


def _nesterov(rate: Any, momentum: Any) -> optax.GradientTransformation:
    # Not optax's: here the rate and the momentum may be an ensemble's, and nothing is kept without momentum.
    keeps = not (isinstance(momentum, float) and momentum == 0)

    def update(gradient, state, params=None):
        if not keeps:
            return -rate * gradient, state
        m = momentum * state.momentum + gradient
        return -rate * (momentum * m + gradient), Nesterov(m)

    return optax.GradientTransformation(lambda params: Nesterov(jnp.zeros_like(params) if keeps else ()), update)
