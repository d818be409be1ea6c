"""Gap-Aware: a gradient is divided by how many usual steps the central variable has moved since it
was read.
"""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Fraction
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Timing,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
)

#: Decay of the running mean of squared velocities, and the guard of its root: from the authors'
#: program.
_DECAY, _EPSILON = 0.999, 1e-8


class GapAwareServer(NamedTuple):
    """The server's state, vectors of shape ``[parameters]`` and scalars."""

    velocity: Array  #: in units of gradients
    square: Array  #: running mean of the squared velocity, not yet corrected for its start at zero
    decayed: Array  #: ``decay ** steps so far``
    rate: Array  #: the largest learning rate so far


@declared
def gap_aware(learning_rate: Rate = LEARNING_RATE, momentum: Fraction = 0.9) -> Method:
    """Return gap-aware asynchronous SGD, momentum on the server.

    Element by element, with ``g`` the gradient at ``s``, which the worker read, and ``v`` the
    server's velocity::

        C       = largest learning_rate so far * (sqrt(mean of v^2 so far) + 1e-8)
        v       <- momentum * v + g / (1 + |central - s| / C)
        central <- central - learning_rate * v

    The mean forgets by 0.999 a step and is corrected for its start at zero.

    Notes
    -----
    The mean holds the velocities of earlier steps; at the first commit it is empty and the gap is
    zero. The authors also divide the weight decay, which here is part of the problem's loss and
    thus of the gradient. A single worker has no gap: with a constant rate this is then
    `asyncsim.methods.sgd`, whose momentum remembers the rate of each past step. One gradient per
    commit.

    References
    ----------
    Barkai, Hakimi and Schuster 2020, "Gap-aware mitigation of gradient staleness", arXiv
    1909.10802; constants from a program of a co-worker of theirs.
    """

    def message(worker, update, start, central, visit):
        return (update, start), worker, {}

    def apply(server, central, message, memory, visit):
        update, start = message
        rate = rate_at(learning_rate, visit, central)
        largest = jnp.maximum(server.rate, rate)
        # Before the first step the mean is 0 / 0; the guard makes it zero.
        mean = server.square / jnp.maximum(1 - server.decayed, 1 - _DECAY)
        penalty = 1 + jnp.abs(central - start) / (divisor(largest) * (jnp.sqrt(mean) + _EPSILON))
        velocity = momentum * server.velocity - update / divisor(rate) / penalty
        square = _DECAY * server.square + (1 - _DECAY) * velocity**2
        after = GapAwareServer(velocity, square, _DECAY * server.decayed, largest)
        return Applied(central - rate * velocity, after, memory)

    def init_server(central):
        zeros = jnp.zeros_like(central)
        return GapAwareServer(
            zeros, zeros, jnp.ones((), central.dtype), jnp.zeros((), central.dtype)
        )

    return Method(
        gradient_steps(never_zero(learning_rate)),
        message=message,
        apply=apply,
        init_server=init_server,
        timing=Timing(window=1),
        coordinatewise=True,
    )
