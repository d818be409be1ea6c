"""Failures: how much of the time workers are there, what crashes cost, and how often to write checkpoints."""

import math

import numpy as np

from asyncsim.base.errors import require_nonnegative, require_positive
from asyncsim.clusters.laws import Law, LawLike, as_law

#: Points of the integrals over a law.
_POINTS = 200_000


def availability(every: LawLike, lasts: LawLike) -> float:
    """Return the part of the time without a spell: these come ``every`` so long, and last so long (renewal theory)."""
    up, down = as_law("every", every).mean, as_law("lasts", lasts).mean
    return up / (up + down)


def mean_speed(every: LawLike, lasts: LawLike, speed: float) -> float:
    """Return the mean speed of a worker with slow spells, 1 being that without; its rate is as much lower.

    Exact in the long run for a worker that only computes: a computation is an integral of the speed.
    """
    there = availability(every, lasts)
    return there + (1.0 - there) * require_nonnegative("speed", speed)


def crash_rate(compute: LawLike, every: float, lasts: float) -> float:
    """Return how many computations a worker ends per second, if a crash ends them and it starts anew.

    With crashes after exponential times of mean ``M = every`` from when it came back, away for ``lasts`` on average,
    and ``L = E[exp(-X / M)]`` of a computation ``X``::

        rate = availability * L / (M (1 - L))

    Each attempt is done with probability ``L`` and takes ``M (1 - L)`` on average. Nothing but computing takes time.
    """
    law, mean = as_law("compute", compute), require_positive("every", every, "s")
    done = laplace(law, 1.0 / mean)
    return mean / (mean + require_nonnegative("lasts", lasts, "s")) * done / (mean * (1.0 - done))


def laplace(law: Law, rate: float) -> float:
    """Return ``E[exp(-rate X)]`` of a law, from its distribution function."""
    points = (np.arange(_POINTS) + 0.5) / _POINTS
    return float(np.mean(law.cdf(-np.log(points) / rate)))


def young_interval(cost: float, every: float) -> float:
    """Return Young's interval between two checkpoints that cost so many seconds: ``sqrt(2 cost every)``.

    ``every``: mean seconds from one failure to the next, which come at exponential times. Good to first order, where
    the cost is small beside it.

    References
    ----------
    Young 1974, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9).
    """
    return math.sqrt(2.0 * require_positive("cost", cost, "s") * require_positive("every", every, "s"))


def daly_interval(cost: float, every: float) -> float:
    """Return Daly's interval, to higher order, without the checkpoint itself; ``every`` where a cost is twice that.

    ::

        sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C

    References
    ----------
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), equation 37.
    """
    first, ratio = young_interval(cost, every), cost / (2.0 * every)
    return every if ratio >= 1 else first * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def checkpoint_efficiency(interval: float, cost: float, every: float, lasts: float = 0.0) -> float:
    """Return the part of the time whose work is not lost, of a server that is always busy.

    It works for ``interval`` seconds, writes a checkpoint for ``cost`` more, and so on; a failure, after exponential
    times of mean ``every``, takes it back to the last checkpoint after ``lasts`` seconds, in which it does not fail::

        interval / ((every + lasts) (exp((interval + cost) / every) - 1))

    References
    ----------
    Daly 2006, equation 20, with a restart that does not fail.
    """
    require_positive("interval", interval, "s")
    passes = (every + lasts) * math.expm1((interval + require_nonnegative("cost", cost, "s")) / every)
    return interval / passes
