"""Methods for pipelines of stages: weight prediction, and AsyncPP's Nesterov momentum."""

import jax.numpy as jnp

from asyncsim.base.declared import Fraction
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, gradient_steps


@declared
def weight_prediction(learning_rate: Rate = LEARNING_RATE, momentum: Fraction = 0.9) -> Method:
    """Return momentum SGD whose stages compute at predicted weights.

    With ``u = -learning_rate * gradient``, ``v`` the server's velocity and ``tau`` the staleness of
    each parameter, so that ``W - tau lr dW`` is the place at which this gradient will be applied if
    the velocity stays::

        v       <- momentum * v + u
        central <- central + v
        read     = central + tau * v

    Notes
    -----
    ``tau`` is known only once the gradient is applied: a version is predicted with the staleness of
    the commit that made it. In a pipeline both are equal, except in its first commits. Both passes
    of a stage use one predicted version. SpecTrain's velocity is ``momentum * v + (1 - momentum) *
    u``: the same with another rate.

    References
    ----------
    Chen, Yang and Cheng 2018, "Efficient and robust parallel DNN training through model parallelism
    on multi-GPU platform", arXiv 1809.02839: SpecTrain, known second-hand.
    """

    def apply(server, central, message, memory, visit):
        velocity = momentum * server + message
        return Applied(central + velocity, velocity, memory)

    def reply(server, central, memory, visit):
        return central + visit.delays.astype(central.dtype) * server

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=jnp.zeros_like,
        reply=reply,
        same_reply=True,
    )


@declared
def async_nesterov(
    learning_rate: Rate = LEARNING_RATE,
    momentum: Fraction = 0.9,
    look_ahead: bool = True,
) -> Method:
    """Return AsyncPP's Nesterov momentum, whose look-ahead makes up for the delay of gradients.

    With ``u = -learning_rate * gradient`` and ``w`` the central variable after each commit::

        d_t    = momentum * (w_t - w_(t-1))
        w_(t+1) = w_t + d_t + (1 - momentum) * u

    Parameters
    ----------
    look_ahead : bool
        Whether a gradient is computed at ``w_s + d_s`` of the version ``s`` that was read, as in
        Nesterov's method, or at ``w_s``: heavy ball.

    Notes
    -----
    The authors' program is torch's NAdam with a momentum of 0.99 on stashed weights: it
    also divides by the root of the second moment, changes the momentum at the start, and keeps the
    weights ahead, as ``look_ahead`` does. The factor ``1 - momentum`` is theirs: without it, stale
    gradients are added up ``1 / (1 - momentum)`` times.

    References
    ----------
    Ajanthan, Ramasinghe, Zuo, Avraham and Long 2025, "Nesterov method for asynchronous pipeline
    parallel optimization", arXiv 2505.01099.
    """

    def apply(server, central, message, memory, visit):
        step = momentum * server + (1 - momentum) * message
        return Applied(central + step, step, memory)

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=jnp.zeros_like,
        reply=(lambda server, central, memory, visit: central + momentum * server)
        if look_ahead
        else None,
        same_reply=look_ahead,
        coordinatewise=True,
    )
