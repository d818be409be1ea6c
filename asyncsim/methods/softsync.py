"""Staleness-aware asynchronous SGD under n-softsync."""

import jax.numpy as jnp

from asyncsim.methods.buffer import add_mean
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Method, Timing, gradient_steps


@declared
def softsync(
    learning_rate: Rate = LEARNING_RATE,
    modulated: bool = True,
    policy: PolicyLike = "buffered(count=4)",
) -> Method:
    """Return n-softsync with learning rates that depend on the staleness.

    The server averages a version's messages and adds the mean::

        sent    = -learning_rate / max(staleness, 1) * gradient
        central <- central + mean of the version's messages       (once it is complete)

    ``modulated``: whether the rates depend on the staleness; without, the runs of the paper with
    many learners fail. ``policy``: ``buffered(workers // n)`` is the paper's n-softsync.

    Notes
    -----
    The policy decides the number of messages in a version: ``workers // n`` for n-softsync (``n``
    is the paper's splitting parameter, its lambda the number of workers); one, ``n = workers``, on
    a plain asynchronous trace. Gradients of staleness zero and one keep their whole rate;
    dist-keras' 1 / (staleness + 1) halves the latter (`asyncsim.methods.adaptive_staleness`). In
    the paper a worker does not pull if there is no newer version; here it reads the same values
    again.

    References
    ----------
    Zhang, Gupta, Lian and Liu 2016, "Staleness-aware async-SGD for distributed deep learning",
    arXiv 1511.05950.
    """

    def message(worker, update, start, central, visit):
        if modulated:
            update = update / jnp.maximum(visit.staleness, 1).astype(update.dtype)
        return update, worker, {}

    return Method(
        gradient_steps(learning_rate),
        message=message,
        combine=add_mean,
        timing=Timing(policy=policy),
        coordinatewise=True,
    )
