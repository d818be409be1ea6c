"""Asynchronous local SGD (asynchronous DiLoCo): an outer optimizer steps on the server."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.base.declared import Count, Fraction, NonNegative, Positive
from asyncsim.base.errors import InputError
from asyncsim.methods.buffer import outer_optimizer, outer_step
from asyncsim.methods.damping import StalenessLaw, staleness_weight
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Array, Method, local_steps


@declared
def async_local_sgd(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.07,
    server_momentum: Fraction = 0.9,
    law: StalenessLaw = "constant",
    strength: Positive = 0.5,
    threshold: NonNegative = 4.0,
    optimizer: Optimizer | None = None,
    server_optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous local SGD with an outer Nesterov step at each arrival.

    The window of the trace is the number of inner steps.

    ::

        sent    = law(staleness) * sum of the local steps
        m       <- server_momentum * m + sent
        central <- central + server_rate * (server_momentum * m + sent)

    Parameters
    ----------
    server_rate : float
        0.07 in the authors' toy runs; 0.7 for the synchronous method.
    law, strength, threshold
        See `asyncsim.methods.damping`; the authors' toy has polynomial.
    optimizer : optax.GradientTransformation, optional
        The workers' inner optimizer; AdamW in the paper.
    server_optimizer : optax.GradientTransformation, optional
        The outer optimizer, instead of its rate and momentum; it sees the problem's
        tensors.

    Notes
    -----
    The paper finds this naive form worse than synchronous DiLoCo, and repairs it with
    `delayed_nesterov`. Its dynamic local updates, numbers of inner steps that differ by speed, are
    the cluster's windows (`asyncsim.proportional_windows`). Its grace periods, in which the server
    waits for more arrivals, are left out. The state of the inner optimizer stays with the worker.

    References
    ----------
    Liu et al. 2024, "Asynchronous local-SGD training for language modeling", arXiv 2401.09135, and
    its authors' toy notebook; Douillard et al. 2023, "DiLoCo: distributed low-communication
    training of language models", arXiv 2311.08105.
    """
    outer = outer_optimizer(server_rate, server_momentum, server_optimizer, (0.07, 0.9))
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return jax.tree.map(lambda leaf: factor(visit, leaf) * leaf, update), worker, {}

    def apply(server, central, message, memory, visit):
        central, server = outer_step(outer, server, central, message)
        return Applied(central, server, memory)

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        apply=apply,
        init_server=outer.init,
        space="vector" if server_optimizer is None else "tensors",
        coordinatewise=server_optimizer is None,
    )


class DelayedServer(NamedTuple):
    """The server's state, vectors of shape ``[parameters]`` and a scalar."""

    momentum: Array
    collected: Array
    arrivals: Array  #: messages in ``collected``


@declared
def delayed_nesterov(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.7,
    server_momentum: Fraction = 0.9,
    period: Count | None = None,
    spread: NonNegative = 0.0,
    law: StalenessLaw = "constant",
    strength: Positive = 0.5,
    threshold: NonNegative = 4.0,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous local SGD with delayed Nesterov: momentum moves at every N-th arrival.

    With ``sent = law(staleness) * sum of the local steps`` and N the period::

        total <- total + sent at every N-th arrival: m <- server_momentum * m + total / N; total <-
        0; share = 1 - spread * N + spread at the others: share = spread central <- central +
        server_rate * (share * server_momentum * m + sent / N)

    Parameters
    ----------
    period : int, optional
        Arrivals between two steps of the momentum; None for the number of workers.
    spread : float
        The paper's c, from 0 to 1 / period: the share of the momentum that each arrival applies.
        Without a period values above ``1 / workers`` are cut to it, because only the trace has the
        number of workers.
    law, strength, threshold
        See `asyncsim.methods.damping`.
    optimizer : optax.GradientTransformation, optional
        The workers' inner optimizer; AdamW in the paper.

    Notes
    -----
    Over one period without spread the server takes exactly one Nesterov step with the mean of the
    messages. The momentum at an N-th arrival is the one just updated, as in a public program
    (HALoS); the paper's text was not read.

    References
    ----------
    Liu et al. 2024, arXiv 2401.09135; the rule as public programs have it.
    """
    if period is not None and isinstance(spread, float) and spread * period > 1:
        raise InputError(f"spread = {spread!r}: must be at most 1 / period = {1 / period:g}")
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return factor(visit, update) * update, worker, {}

    def apply(server, central, message, memory, visit):
        n = jnp.asarray(visit.workers if period is None else period, central.dtype)
        total, count = server.collected + message, server.arrivals + 1
        full = count >= n
        m = jnp.where(full, server_momentum * server.momentum + total / n, server.momentum)
        usual_share = jnp.minimum(spread, 1 / n)
        share = jnp.where(full, 1 - usual_share * n + usual_share, usual_share)
        after = DelayedServer(m, jnp.where(full, 0, total), jnp.where(full, 0, count))
        return Applied(
            central + server_rate * (share * server_momentum * m + message / n), after, memory
        )

    def init_server(central):
        return DelayedServer(
            jnp.zeros_like(central), jnp.zeros_like(central), jnp.zeros((), central.dtype)
        )

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        apply=apply,
        init_server=init_server,
        coordinatewise=True,
    )
