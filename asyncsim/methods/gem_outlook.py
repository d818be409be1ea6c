"""Two methods that the GEM paper's outlook names: a proxy at the server, and a tuned momentum."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Count, Fraction, NonNegative, Positive
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.gem import scale
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
)
from asyncsim.methods.yellowfin import YellowFin, init_tuner, tune


@declared
def gem_server(
    learning_rate: Rate = LEARNING_RATE,
    momentum: Fraction = 0.9,
    kappa: NonNegative = 1.0,
    pi_max: Positive | None = 5.0,
    proxy_step: Literal["round", "commit"] = "round",
) -> Method:
    """Return gradient energy matching with one proxy, which the server computes from all updates.

    As `asyncsim.methods.gem`, with ``n`` workers and the server's momentum ``m`` instead of the
    workers'::

        m  <- momentum^(1/n) m + u / n
        pi  = clip((kappa |m| - |d|) / |u|, 0, pi_max)
        central <- central + pi u

    Parameters
    ----------
    momentum, kappa, pi_max : see `asyncsim.methods.gem`
    proxy_step : {"round", "commit"}
        The updates that make one step of the proxy. "round": ``n``, as above, so that the proxy
        steps as often as a worker and averages the gradients of all. "commit": each, with
        ``m <- momentum m + u``.

    Notes
    -----
    The paper proposes the idea without a rule. The server knows each worker's previous pull; the
    message is the unscaled update. `asyncsim.recorders.energy` compares with the worker's own
    momentum here, as it does for methods without a proxy, so that its ratios compare with
    `asyncsim.methods.gem`'s. There are no diagnostics of ``pi``: the server computes it.

    References
    ----------
    Hermans and Louppe 2018, "Gradient energy matching for distributed asynchronous gradient
    descent", arXiv 1805.08469, the rule and the conclusion.
    """

    def message(worker, update, start, central, visit):
        return (update, worker), central, {}

    def apply(server, central, message, memory, visit):
        update, pulled = message
        n = visit.workers.astype(update.dtype)
        m = (
            momentum ** (1 / n) * server + update / n
            if proxy_step == "round"
            else momentum * server + update
        )
        pi, _ = scale(m, central - pulled, update, kappa, pi_max)
        return Applied(central + pi * update, m, memory)

    return Method(
        gradient_steps(learning_rate),
        message=message,
        apply=apply,
        init_worker=lambda central: central,
        init_server=jnp.zeros_like,
        origin=lambda worker, read: worker,
        coordinatewise=True,
    )


class TunedWorker(NamedTuple):
    """A worker's state, vectors of shape ``[parameters]``."""

    momentum: Array  #: the proxy's momentum as this worker estimates it
    pulled: Array  #: the central variable at its previous visit, before its own commit
    tuner: YellowFin


@declared
def gem_yellowfin(
    learning_rate: Rate = LEARNING_RATE,
    initial_momentum: Fraction = 0.0,
    kappa: NonNegative = 1.0,
    pi_max: Positive | None = 5.0,
    smoothing: Fraction = 0.999,
    curvature_window: Count = 20,
) -> Method:
    """Return gradient energy matching whose proxy has YellowFin's momentum.

    As `asyncsim.methods.gem`, with a momentum that each worker tunes by its own gradients, after it
    has used it for its proxy; see `asyncsim.methods.yellowfin.tune`.

    Parameters
    ----------
    initial_momentum : float
        Before the first gradients, in [0, 1); YellowFin's is 0.
    kappa, pi_max : see `asyncsim.methods.gem`
    smoothing : float
        Weight of the past in the tuner's averages, in [0, 1): 0.999 is YellowFin's. The momentum is
        such an average, too, and needs about ``1 / (1 - smoothing)`` steps of a worker.
    curvature_window : int
        Gradients of a worker among which the range of curvatures is taken.

    Notes
    -----
    The paper proposes the idea without a rule. The learning rate is the given one: YellowFin's is
    computed, as part of its rule, and not used. With a window of several local steps a gradient is
    their sum over the learning rate.

    References
    ----------
    Hermans and Louppe 2018, "Gradient energy matching for distributed asynchronous gradient
    descent", arXiv 1805.08469; Zhang, Mitliagkas and Re 2017, "YellowFin and the art of momentum
    tuning", arXiv 1706.03471.
    """
    learning_rate_above_zero = never_zero(learning_rate)

    def message(worker, update, start, central, visit):
        m = worker.tuner.momentum * worker.momentum + update
        pi, diagnostics = scale(m, central - worker.pulled, update, kappa, pi_max)
        gradient = -update / divisor(rate_at(learning_rate_above_zero, visit, update))
        tuner = tune(worker.tuner, gradient, smoothing)
        return pi * update, TunedWorker(m, central, tuner), diagnostics

    def init_worker(central):
        rate = 0.0 if callable(learning_rate) else learning_rate
        tuner = init_tuner(central, rate, initial_momentum, curvature_window)
        return TunedWorker(jnp.zeros_like(central), central, tuner)

    return Method(
        gradient_steps(learning_rate_above_zero),
        message=message,
        init_worker=init_worker,
        origin=lambda worker, read: worker.pulled,
        proxy=lambda worker: worker.momentum,
    )
