"""Damping by staleness, with the weights of several papers, and delay-adaptive steps."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from asyncsim.base.declared import NonNegative, Positive
from asyncsim.base.errors import (
    require_share,
)
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Visit,
    gradient_steps,
    local_steps,
    rate_at,
)

#: Bins of the law "rank"; larger staleness counts in the last.
_BINS = 1024
#: Functions of staleness, strength and threshold that return the factor.
_LAWS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "constant": lambda tau, a, b: jnp.ones_like(tau),
    "inverse": lambda tau, a, b: 1 / (1 + tau),
    "exponential": lambda tau, a, b: jnp.exp(-a * tau),
    "polynomial": lambda tau, a, b: (1 + tau) ** -a,
    "hinge": lambda tau, a, b: 1 / (a * jnp.maximum(tau - b, 0) + 1),
    "ratio": lambda tau, a, b: a / (tau + a),
}


StalenessLaw = Literal["constant", "inverse", "exponential", "polynomial", "hinge", "ratio"]


def staleness_weight(
    law: StalenessLaw, strength: float, threshold: float
) -> Callable[[Visit, Array], Array]:
    """Return the factor as a function of the visit and of an array whose type it takes."""
    return lambda visit, like: _LAWS[law](visit.staleness.astype(like.dtype), strength, threshold)


@declared
def damping(
    learning_rate: Rate = LEARNING_RATE,
    law: Literal[StalenessLaw, "rank"] = "polynomial",
    strength: Positive = 0.5,
    threshold: NonNegative = 4.0,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DOWNPOUR with each update multiplied by a function of its staleness.

    With ``tau`` the staleness, ``a`` the strength and ``b`` the threshold:

    ===============  ====================================  =======================================
    law              factor                                from
    ===============  ====================================  =======================================
    ``constant``     1                                     DOWNPOUR
    ``inverse``      1 / (1 + tau)                         DynSGD of dist-keras; Kardam
    ``exponential``  exp(-a tau)                           Chan and Lane 2014; Kardam
    ``polynomial``   (1 + tau)^-a                          FedAsync
    ``hinge``        1 up to b, then 1 / (a (tau - b) + 1) FedAsync
    ``ratio``        a / (tau + a)                         DASGD
    ``rank``         1 + a (1 - 2 F(tau))                  ASAP-SGD
    ===============  ====================================  =======================================

    ``threshold``: of the hinge (versions).

    Notes
    -----
    A fresh update has staleness zero in all laws, and all but "rank" apply it whole. ``F(tau)`` is
    the share of the messages so far, this one included, whose staleness was at most ``tau``;
    staleness above 1023 counts as 1023. The rates of ``n``-softsync, 1 / max(tau, 1), are
    `asyncsim.methods.softsync`.

    References
    ----------
    Damaskinos et al. 2018, "Asynchronous Byzantine machine learning (the case of SGD)", arXiv
    1802.07928 (Kardam); Xie, Koyejo and Gupta 2019, arXiv 1903.03934 (FedAsync); the last two known
    second-hand.
    """
    if law == "rank":
        # Above one the factors of the stalest would be negative.
        require_share("strength", strength)
        rules: dict[str, Any] = {"apply": _by_rank(strength), "init_server": _no_counts}
    else:
        weight = staleness_weight(law, strength, threshold)

        def apply(server, central, message, memory, visit):
            return Applied(central + weight(visit, central) * message, server, memory)

        rules = {"apply": apply}
    return Method(
        local_steps(learning_rate, optimizer),
        **rules,
        coordinatewise=True,
    )


def _no_counts(central: Array) -> Array:
    return jnp.zeros(_BINS, jnp.int32)


def _by_rank(strength: float) -> Callable[..., Applied]:
    def apply(server, central, message, memory, visit):
        tau = jnp.minimum(visit.staleness, _BINS - 1)
        bins = jnp.arange(_BINS, dtype=tau.dtype)
        counts = server + (bins == tau).astype(server.dtype)
        at_most = jnp.sum(jnp.where(bins <= tau, counts, 0)).astype(central.dtype)
        share = at_most / (visit.commit + 1).astype(central.dtype)
        return Applied(central + (1 + strength * (1 - 2 * share)) * message, counts, memory)

    return apply


@declared
def delay_adaptive(
    learning_rate: Rate = LEARNING_RATE,
    rule: Literal["mishchenko", "koloskova", "drop"] = "mishchenko",
    smoothness: Positive = 1.0,
) -> Method:
    """Return asynchronous SGD whose step shrinks with the staleness ``tau`` beyond the ``n``
    workers.

    ::

        central <- central - rate * gradient,   rate =
            learning_rate * n / max(n, tau)                                          (mishchenko)
            learning_rate if tau <= n, else min(learning_rate, 1 / (4 smoothness tau))  (koloskova)
            learning_rate if tau <= n, else 0                                        (drop)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Theory of Koloskova et al. asks for at most ``1 / (4 smoothness)``.
    rule : {"mishchenko", "koloskova", "drop"}
        The last is Koloskova's as well, whose theorem holds for any step below the middle one.
    smoothness : float
        Largest curvature of the loss (koloskova).

    Notes
    -----
    Koloskova et al. compare with the number of gradients in flight, which equals the number of
    workers if each has one job. A dropped gradient still makes a version. In the program of
    Mishchenko et al. a worker resumes at the central variable before its own gradient is applied,
    as on a trace with the protocol "read_then_write".

    References
    ----------
    Koloskova, Stich and Jaggi 2022, "Sharper convergence guarantees for asynchronous SGD for
    distributed and federated learning", arXiv 2206.08307; Mishchenko, Bach, Even and Woodworth
    2022, "Asynchronous SGD beats minibatch SGD under arbitrary delays", arXiv 2206.07638, and its
    authors' notebook.
    """

    def apply(server, central, message, memory, visit):
        tau, n = visit.staleness.astype(central.dtype), jnp.asarray(visit.workers, central.dtype)
        if rule == "mishchenko":
            factor = n / jnp.maximum(n, tau)
        elif rule == "koloskova":
            rate = rate_at(learning_rate, visit, central)
            factor = jnp.where(tau <= n, 1, jnp.minimum(1, 1 / (4 * smoothness * tau * rate)))
        else:
            factor = jnp.where(tau <= n, jnp.ones_like(tau), 0)
        return Applied(central + factor * message, server, memory)

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        coordinatewise=True,
    )
