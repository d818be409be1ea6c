"""Sequential SGD with momentum: the proxy of energy matching, and the baseline of all methods."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Fraction
from asyncsim.clusters.policy import asynchronous
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import Array, Method, Timing, gradient_steps


class SgdWorker(NamedTuple):
    """The worker's state: its momentum, shape ``[parameters]``."""

    momentum: Array


@declared
def sgd(learning_rate: Rate = 0.05, momentum: Fraction = 0.9) -> Method:
    """Return stochastic gradient descent with heavy-ball momentum, on one worker.

    With ``u = -learning_rate * gradient``::

        m       <- momentum * m + u
        central <- central + m

    Notes
    -----
    Needs a trace of one worker that exchanges after every gradient, so that nothing is stale, under
    the asynchronous policy, so that every gradient makes a version. Compare it with asynchronous
    runs at equal numbers of gradients.

    References
    ----------
    Polyak 1964, "Some methods of speeding up the convergence of iteration methods", eq. 9.
    """

    def message(worker, update, start, central, visit):
        m = momentum * worker.momentum + update
        return m, SgdWorker(m), {}

    return Method(
        gradient_steps(learning_rate),
        message=message,
        init_worker=lambda central: SgdWorker(jnp.zeros_like(central)),
        proxy=lambda worker: worker.momentum,
        timing=Timing(workers=1, protocol="exchange", window=1, policy=asynchronous()),
        coordinatewise=True,
    )
