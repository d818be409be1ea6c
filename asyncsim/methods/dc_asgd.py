"""DC-ASGD: a stale gradient is corrected to first order for how far the central variable has
moved.
"""

from typing import Any

import jax.numpy as jnp

from asyncsim.base.declared import Fraction, NonNegative
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Method,
    Timing,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
)

#: Keeps the division by the root of the mean square finite.
_EPSILON = 1e-7


@declared
def dc_asgd(
    learning_rate: Rate = LEARNING_RATE,
    compensation: NonNegative = 0.04,
    adaptive: bool = False,
    decay: Fraction = 0.95,
) -> Method:
    """Return delay-compensated asynchronous SGD.

    Element by element, with ``g`` the gradient at ``s``, which the worker read::

        central <- central - learning_rate * (g + strength * g * g * (central - s))

        strength = compensation                                     (constant)
        mean     <- decay * mean + (1 - decay) * g * g
        strength = compensation / sqrt(mean + eps)                  (adaptive)

    ``compensation``: the paper's lambda: about 0.04 constant, 2 adaptive in its CIFAR runs. Zero is
    asynchronous SGD. ``decay``: of the mean square of all workers' gradients on the server
    (adaptive), in [0, 1).

    Notes
    -----
    The paper's server stores the parameters that it sent to each worker; here the worker returns
    them with its gradient, which is the same. MXNet's optimizer of that name stores one previous
    value for all workers: another method. One gradient per commit: the compensation has no meaning
    for a sum along a path.

    References
    ----------
    Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay compensation", arXiv
    1609.08326; constants from memory.
    """

    def message(worker, update, start, central, visit):
        return (update, start), worker, {}

    def apply(server, central, message, memory, visit):
        update, start = message
        rate = rate_at(learning_rate, visit, central)
        square = (update / divisor(rate)) ** 2
        strength: Any = compensation
        if adaptive:
            server = decay * server + (1 - decay) * square
            strength = compensation / jnp.sqrt(server + _EPSILON)
        step = rate / divisor(rate) * update  # zero at a rate of zero
        return Applied(
            central + (step - rate * strength * square * (central - start)), server, memory
        )

    return Method(
        gradient_steps(never_zero(learning_rate)),
        message=message,
        apply=apply,
        init_server=jnp.zeros_like if adaptive else lambda central: (),
        timing=Timing(window=1),
        coordinatewise=True,
    )
