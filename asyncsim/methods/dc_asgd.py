"""DC-ASGD: a stale gradient is corrected to first order for how far the central variable has
moved.
"""

from typing import Any

import jax.numpy as jnp

from asyncsim.base.errors import require_fraction, require_nonnegative, require_switch
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Method,
    Schedule,
    Timing,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
)
from asyncsim.methods.recipe import shares_programs

#: Keeps the division by the root of the mean square finite.
_EPSILON = 1e-7


@shares_programs
def dc_asgd(
    learning_rate: float | Schedule = LEARNING_RATE,
    compensation: float = 0.04,
    adaptive: bool = False,
    decay: float = 0.95,
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
    require_nonnegative("compensation", compensation)
    require_switch("adaptive", adaptive)
    require_fraction("decay", decay)

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
        name="dc_asgd",
        hyperparameters=dict(
            learning_rate=learning_rate, compensation=compensation, adaptive=adaptive, decay=decay
        ),
        optimizer=gradient_steps(never_zero(learning_rate)),
        message=message,
        apply=apply,
        init_server=jnp.zeros_like if adaptive else lambda central: (),
        timing=Timing(window=1),
        coordinatewise=True,
    )
