"""Momentum by asynchrony and at the server, and limits of stability, on a quadratic.

``step`` is the learning rate times the curvature. Implicit momentum assumes independent
exponential compute times of equal rate, no queue and atomic visits, so that each commit is by a
uniformly random worker. Elastic stability assumes exact gradients, one local step per exchange, and
one curvature (`asyncsim.methods.aeasgd`, `asyncsim.methods.easgd`).
"""

import math

import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    require_switch,
)

#: Senses in which asynchronous SGD may be stable; see `stable_step`.
SENSES = ("mean_square", "mean")
#: Forms of momentum at the server; see `momentum_stable_rate`.
MOMENTA = ("nesterov", "heavy_ball")
#: Bisections of a rate, until round-off.
_BISECTIONS = 50


def implicit_momentum(workers: int) -> float:
    """Return the momentum that asynchrony adds to the mean path: ``1 - 1 / workers``.

    For any objective, the mean of the central variable obeys::

        E[w' - w] = (1 - 1/n) E[w - w_before] - learning_rate / n * E[gradient(w)]

    References
    ----------
    Mitliagkas, Zhang, Hadjis, Ré 2016, arXiv 1605.09774.
    """
    return 1 - 1 / require_count("workers", workers)


def implicit_momentum_path(workers: int, step: float, commits: int) -> np.ndarray:
    """Return the exact mean of the central variable after each commit, on a quadratic.

    From 1, with minimum 0::

        e[1] = (1 - step) e[0]
        e[t+1] = e[t] + (1 - 1/n) (e[t] - e[t-1]) - step / n * e[t]

    ``step``: learning rate times curvature; with a window, ``window_step(step, window)``.
    """
    mu = implicit_momentum(workers)
    step = require_nonnegative("step", step)
    path = np.ones(require_count("commits", commits, 0) + 1)
    path[1:2] = 1 - step
    for t in range(1, commits):
        path[t + 1] = path[t] + mu * (path[t] - path[t - 1]) - step / workers * path[t]
    return path


def window_step(step: float, window: int, averaged: bool = False) -> float:
    """Return the step of one commit that carries ``window`` local steps:
    ``1 - (1 - step)**window``.

    Exact for DOWNPOUR with plain local SGD on a quadratic. ``averaged`` divides by the window, for
    methods that normalise accumulated gradients (AGN).
    """
    step, window = require_nonnegative("step", step), require_count("window", window)
    require_switch("averaged", averaged)
    return (1 - (1 - step) ** window) / (window if averaged else 1)


def stable_step(workers: int, sense: str = "mean_square") -> float:
    """Return the step above which asynchronous SGD diverges on a quadratic, in one of two senses.

    ===============  =======================  ===========================  =======================
    ``sense``        diverging quantity       the limit                    of 2, 10, 100 workers
    ===============  =======================  ===========================  =======================
    ``mean_square``  the mean square of runs  ``(1 + sqrt(1 + 8n)) / 2n``  1.28, .50 and .15
    ``mean``         the mean of runs         ``2 (2n - 1)``               6, 38 and 398
    ===============  =======================  ===========================  =======================

    Each run converges a little beyond the mean-square limit: up to 1.52, .61 and .18, where the
    Lyapunov exponent of the product below is zero (by simulation). In between rare runs that first
    grow dominate the mean square: gradient noise then has no finite variance. The mean is the limit
    of `implicit_momentum_path`, where the signs of diverging runs cancel; no run is near it. For
    one worker all are 2.

    Notes
    -----
    A commit of worker ``i`` is ``x <- x - step r_i``, then ``r_i <- x``, with ``r_i`` its read: a
    product of random matrices. Mean: the roots of the recursion of `implicit_momentum_path`. Mean
    square: by symmetry the second moments are ``x^2``, ``x r_i``, ``r_i^2`` and ``r_i r_j``; their
    map has the eigenvalue 1 where ``n step^2 - step - 2 = 0``.
    """
    n = require_count("workers", workers)
    if require_choice("sense", sense, SENSES) == "mean":
        return 2.0 * (2 * n - 1)
    return (1 + math.sqrt(1 + 8 * n)) / (2 * n)


def momentum_stable_rate(momentum: float, delay: int, rule: str = "nesterov") -> float:
    """Return the effective rate above which momentum at the server diverges under a fixed delay.

    The effective rate is ``rate * curvature / (1 - momentum)``. With ``g`` the gradient at the
    central variable ``delay`` versions ago::

        m       <- momentum * m + g
        central <- central - rate * (momentum * m + g)    Nesterov, as DiLoCo has it
        central <- central - rate * m                     heavy ball

    ========  ========  ========  ========  ==============
    delay     0         0.5       0.9       heavy ball 0.9
    ========  ========  ========  ========  ==============
    0         2         3         13.57     38
    1         1         1.123     2.531     1
    4         .347      .335      .326      .265
    16        .0952     .0929     .0785     .0749
    ========  ========  ========  ========  ==============

    Parameters
    ----------
    momentum : float
        From 0 to below 1.
    delay : int
        Staleness of every gradient (versions).
    rule : {"nesterov", "heavy_ball"}
        See above.

    Notes
    -----
    The largest rate at which no root of the characteristic polynomial is outside the unit circle::

        (z - 1) (z - momentum) z**delay + rate * curvature * ((1 + momentum) z - momentum)

    Heavy ball has ``z`` in the last brackets. A window of local steps is a commit with the rate
    times `window_step` as the ``rate * curvature``.
    """
    mu, delay = require_fraction("momentum", momentum), require_count("delay", delay, 0)
    nesterov = require_choice("rule", rule, MOMENTA) == "nesterov"
    free = np.append(np.poly([1.0, mu]), np.zeros(delay))
    pulled = np.zeros_like(free)
    pulled[-2:] = (1 + mu, -mu) if nesterov else (1.0, 0.0)

    def is_stable(rate: float) -> bool:
        return bool(np.abs(np.roots(free + rate * (1 - mu) * pulled)).max() <= 1)

    # Plain steps with this delay are stable up to about pi / (2 delay + 1).
    low, high = 0.0, 1 / (delay + 1)
    while is_stable(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def elastic_stable_alpha(step: float) -> float:
    """Return asynchronous elastic averaging's limit of stability, ``(4 - 2 step) / (4 - step)``.

    The largest elastic step ``alpha`` for workers that take turns, each exchange followed by a
    gradient at the replica before it. It does not depend on the number of workers: exact for odd
    numbers, slightly low for even ones (0.667 instead of 0.708 with two and a step of 1).

    References
    ----------
    Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; the formula from memory, checked against
    the eigenvalues of a round.
    """
    step = _require_step(step)
    return (4 - 2 * step) / (4 - step)


def elastic_stable_beta(workers: int, step: float) -> float:
    """Return the limit of stability ``beta = workers * alpha`` of synchronous elastic averaging.

    ::

        n (4 - 2 step) / (2 + n (2 - step))

    Notes
    -----
    Jury's condition, ``2 alpha + beta (2 - step) < 4 - 2 step``, on the mean of the replicas and
    the central variable; differences between replicas do not reach their limit earlier.
    """
    step, n = _require_step(step), require_count("workers", workers)
    return n * (4 - 2 * step) / (2 + n * (2 - step))


def _require_step(step: float) -> float:
    if require_nonnegative("step", step) > 2:
        raise InputError(
            f"step = {step!r}: must be at most 2, above which even a single worker diverges"
        )
    return float(step)
