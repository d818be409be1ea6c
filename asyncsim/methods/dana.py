"""DANA: the server stores a momentum for each worker and replies with its expected position."""

import jax.numpy as jnp

from asyncsim.base.declared import Fraction
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Timing, gradient_steps


@declared
def dana_zero(learning_rate: Rate = LEARNING_RATE, momentum: Fraction = 0.9) -> Method:
    """Return DANA-Zero.

    With ``u = -learning_rate * gradient``, ``v`` the server's velocity for the worker and ``S`` the
    sum of all workers' velocities::

        v       <- momentum * v + u
        central <- central + v
        reply    = central + momentum * S

    Notes
    -----
    The paper's velocities are of gradients and multiplied by the learning rate at the end: the same
    for a constant rate, another order of decay for a schedule. With one worker it is Nesterov's
    method. The reply is formed at the worker's own visit, so the trace's reads must belong to
    commits. One gradient per commit.

    References
    ----------
    Hakimi, Barkai, Gabel and Schuster 2019, "Taming momentum in a distributed asynchronous
    environment", arXiv 1907.11612, known second-hand.
    """

    def apply(server, central, message, memory, visit):
        velocity = momentum * memory + message
        return Applied(central + velocity, server + (velocity - memory), velocity)

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=jnp.zeros_like,
        init_memory=jnp.zeros_like,
        reply=lambda server, central, memory, visit: central + momentum * server,
        timing=Timing(window=1),
        coordinatewise=True,
    )


@declared
def dana_slim(learning_rate: Rate = LEARNING_RATE, momentum: Fraction = 0.9) -> Method:
    """Return DANA-Slim: DANA-Zero's look-aheads with only additions on the server.

    With ``u = -learning_rate * gradient`` and ``v`` the worker's velocity::

        v       <- momentum * v + u
        central <- central + (momentum * v + u)

    Notes
    -----
    For a constant rate its central variable is DANA-Zero's reply, so that both compute the same
    gradients. It accepts any trace. One gradient per commit.

    References
    ----------
    Hakimi, Barkai, Gabel and Schuster 2019, arXiv 1907.11612; known second-hand.
    """

    def message(worker, update, start, central, visit):
        velocity = momentum * worker + update
        return momentum * velocity + update, velocity, {}

    return Method(
        gradient_steps(learning_rate),
        message=message,
        init_worker=jnp.zeros_like,
        timing=Timing(window=1),
        coordinatewise=True,
    )
