"""Mean paths on a quadratic: implicit and outer momentum, elastic averaging, limits of stability.

``step`` is the learning rate times the curvature. Momentum and paths assume independent exponential
compute times of equal rate, no queue and atomic visits, so that each commit is by a uniformly
random worker. Elastic stability assumes exact gradients, one local step per exchange, and one
curvature (`asyncsim.methods.aeasgd`, `asyncsim.methods.easgd`).
"""

import functools
import math

import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    require_number,
    require_positive,
    require_switch,
)

#: Senses in which asynchronous SGD may be stable; see `stable_step`.
SENSES = ("almost_sure", "mean_square", "mean")
#: Forms of momentum at the server; see `momentum_stable_rate`.
MOMENTA = ("nesterov", "heavy_ball")
#: The numerical limit: number of steps tried, sequences of workers, commits of each sequence (at
#: least, and for each worker), and commits between two rescalings.
_STEPS, _PATHS, _COMMITS, _COMMITS_OF_A_WORKER, _RESCALE = 13, 64, 4000, 200, 20
#: Bisections of a rate, until round-off.
_BISECTIONS = 50
#: With more workers it takes more than half a minute.
_MOST_WORKERS = 1_000


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


def critical_step(workers: int) -> float:
    """Return the step of critical damping, ``n (1 - sqrt(mu))**2`` with ``mu = 1 - 1/n``.

    About ``1 / (4 n)``. Above it the mean oscillates, each step shrinking it by ``sqrt(mu)``, up to
    where the roots of ``z**2 - (1 + mu - step/n) z + mu`` are real again.
    """
    return workers * (1 - math.sqrt(implicit_momentum(workers))) ** 2


def stable_step(workers: int, sense: str = "almost_sure") -> float:
    """Return the step above which asynchronous SGD diverges on a quadratic, in one of three senses.

    ===============  =======================  ===========================  =======================
    ``sense``        diverging quantity       the limit                    of 2, 10, 100 workers
    ===============  =======================  ===========================  =======================
    ``almost_sure``  each run                 numerical                    1.52, .61 and .18
    ``mean_square``  the mean square of runs  ``(1 + sqrt(1 + 8n)) / 2n``  1.28, .50 and .15
    ``mean``         the mean of runs         ``2 (2n - 1)``               6, 38 and 398
    ===============  =======================  ===========================  =======================

    Each run obeys the almost-sure limit, the default. Between the mean-square and the almost-sure
    limit runs converge, but rare runs that first grow dominate the mean square: gradient noise then
    has no finite variance. The mean is the limit of `implicit_momentum_path`, where the signs of
    diverging runs cancel; no run is near it. For one worker all three are 2.

    Parameters
    ----------
    sense : {"almost_sure", "mean_square", "mean"}
        See above.

    Notes
    -----
    A commit of worker ``i`` is ``x <- x - step r_i``, then ``r_i <- x``, with ``r_i`` its read: a
    product of random matrices. Mean: the roots of the recursion of `implicit_momentum_path`. Mean
    square: by symmetry the second moments are ``x^2``, ``x r_i``, ``r_i^2`` and ``r_i r_j``; their
    map has the eigenvalue 1 where ``n step^2 - step - 2 = 0``, so that the limit is
    ``(1 + sqrt(1 + 8 n)) / (2 n)``. Almost sure: the step at which the Lyapunov exponent of the
    product is zero, estimated from random sequences of workers with a fixed seed; within about 1 %.
    It takes seconds from a hundred workers on; at most a thousand workers.
    """
    n = require_count("workers", workers)
    if require_choice("sense", sense, SENSES) == "mean":
        return 2.0 * (2 * n - 1)
    mean_square = (1 + math.sqrt(1 + 8 * n)) / (2 * n)
    if sense == "almost_sure" and n > _MOST_WORKERS:
        raise InputError(
            f"workers = {n}: the almost-sure limit is computed for at most {_MOST_WORKERS:,}; give "
            f"sense='mean_square', whose limit, {mean_square:.3g}, is a fifth to a quarter lower"
        )
    return mean_square if sense == "mean_square" or n == 1 else _almost_sure_step(n, mean_square)


@functools.lru_cache(256)
def _almost_sure_step(workers: int, mean_square: float) -> float:
    """Return the step at which the Lyapunov exponent is zero, interpolated between tried steps."""
    steps = mean_square * np.linspace(1, 1.5, _STEPS)
    random = np.random.default_rng(0)
    draws = random.integers(workers, size=(max(_COMMITS, _COMMITS_OF_A_WORKER * workers), _PATHS))
    # All steps share the sequences of workers.
    central, reads = np.ones((_STEPS, _PATHS)), np.ones((workers, _STEPS, _PATHS))
    paths = np.arange(_PATHS)
    growth = np.zeros(_STEPS)
    for commit, worker in enumerate(draws, start=1):
        central = central - steps[:, None] * reads[worker, :, paths].T
        reads[worker, :, paths] = central.T
        if commit % _RESCALE == 0:
            # A step of exactly 1 reaches 0 after some commits.
            scale = np.maximum(
                np.maximum(np.abs(reads).max(axis=0), np.abs(central)), np.finfo(float).tiny
            )
            central, reads = central / scale, reads / scale
            if commit > len(draws) // 4:  # the start is forgotten
                growth += np.log(scale).mean(axis=1)
    return float(np.interp(0.0, growth, steps))


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


def momentum_gain(momentum: float, correlation: float, rule: str = "nesterov") -> float:
    """Return how far a step of momentum moves along the newest message, relative to the message.

    ::

        1 + momentum / (1 - momentum * correlation)    Nesterov
        1 / (1 - momentum * correlation)               heavy ball

    Messages ``k`` commits apart have the correlation ``correlation**k``; see
    `momentum_stable_rate` for the rules.
    """
    mu, rho, nesterov = _require_momentum(momentum, correlation, rule)
    return 1 + mu / (1 - mu * rho) if nesterov else 1 / (1 - mu * rho)


def momentum_energy(momentum: float, correlation: float, rule: str = "nesterov") -> float:
    """Return the mean square of a step of momentum, relative to a message's.

    With ``mu`` the momentum and ``rho`` the correlation of consecutive messages::

        (1 + mu)**2 + 2 (1 + mu) mu**2 rho / (1 - mu rho) + mu**4 E    Nesterov
        E = (1 + mu rho) / ((1 - mu**2) (1 - mu rho))                  heavy ball

    10.06 for Nesterov with a momentum of 0.9 and a correlation of 0.25. Assumptions: those of
    `momentum_gain`.
    """
    mu, rho, nesterov = _require_momentum(momentum, correlation, rule)
    ball = (1 + mu * rho) / ((1 - mu**2) * (1 - mu * rho))
    if not nesterov:
        return ball
    return (1 + mu) ** 2 + 2 * (1 + mu) * mu**2 * rho / (1 - mu * rho) + mu**4 * ball


def elastic_path(workers: int, elasticity: float, contraction: float, commits: int) -> np.ndarray:
    """Return the exact mean of the central variable after each asynchronous elastic exchange.

    With ``X`` the central variable, ``U`` the mean of the workers' variables after their last
    exchanges, both 1 at first, ``alpha`` the elasticity and ``c`` the contraction of the local
    steps in between::

        X' = (1 - alpha) X + alpha c U
        U' = (1 - 1/n) U + ((1 - alpha) c U + alpha X) / n

    ``elasticity``: the moving rate of Zhang, Choromanska, LeCun 2015 (arXiv 1412.6651), ``alpha``.
    ``contraction``: ``(1 - step)**window`` on a quadratic.
    """
    n, alpha = require_count("workers", workers), require_positive("elasticity", elasticity)
    c = require_number("contraction", contraction)
    transition = np.array([[1 - alpha, alpha * c], [alpha / n, 1 - 1 / n + (1 - alpha) * c / n]])
    state = np.ones(2)
    path = [1.0]
    for _ in range(require_count("commits", commits, 0)):
        state = transition @ state
        path.append(float(state[0]))
    return np.array(path)


def elastic_stable_alpha(step: float) -> float:
    """Return asynchronous elastic averaging's limit of stability, ``(4 - 2 step) / (4 - step)``.

    The largest elastic step ``alpha`` for workers that take turns, each exchange followed by a
    gradient at the replica before it. It does not depend on the number of workers: exact for odd
    numbers, slightly low for even ones (0.667 instead of 0.708 with two and a step of 1).

    References
    ----------
    Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; the formula from memory, checked against
    `elastic_round_robin`.
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


def elastic_round_robin(workers: int, step: float, alpha: float) -> np.ndarray:
    """Return the map of a round of exchanges one after the other, on replicas and central variable.

    Each worker exchanges, then steps once.

    Stable if all eigenvalues are smaller than one in size. The central variable is the last row.
    """
    n = require_count("workers", workers)
    step, alpha = require_nonnegative("step", step), require_nonnegative("alpha", alpha)
    round_map = np.eye(n + 1)
    for worker in range(n):
        visit = np.eye(n + 1)
        visit[worker, [worker, n]] = 1 - step - alpha, alpha
        visit[n, [worker, n]] = alpha, 1 - alpha
        round_map = visit @ round_map
    return round_map


def elastic_synchronous(workers: int, step: float, alpha: float) -> np.ndarray:
    """Return the map of a round in which all workers exchange at once, then step once.

    Stable if all eigenvalues are smaller than one in size. The central variable is the last row.
    """
    n = require_count("workers", workers)
    step, alpha = require_nonnegative("step", step), require_nonnegative("alpha", alpha)
    round_map = (1 - step - alpha) * np.eye(n + 1)
    round_map[:n, n] = alpha
    round_map[n, :n] = alpha
    round_map[n, n] = 1 - n * alpha
    return round_map


def _require_momentum(momentum: float, correlation: float, rule: str) -> tuple[float, float, bool]:
    """Return the checked momentum and correlation, and whether the rule is Nesterov's."""
    rho = require_number("correlation", correlation)
    if not -1 <= rho <= 1:
        raise InputError(f"correlation = {correlation!r}: must be from -1 to 1")
    nesterov = require_choice("rule", rule, MOMENTA) == "nesterov"
    return require_fraction("momentum", momentum), rho, nesterov


def _require_step(step: float) -> float:
    if require_nonnegative("step", step) > 2:
        raise InputError(
            f"step = {step!r}: must be at most 2, above which even a single worker diverges"
        )
    return float(step)
