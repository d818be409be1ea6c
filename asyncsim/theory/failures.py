"""Failures: the workers' availability, the cost of crashes, and intervals between checkpoints."""

import math

import numpy as np

from asyncsim.base.errors import require_nonnegative, require_positive
from asyncsim.clusters.laws import Law, LawLike, as_law

#: Grid points of the integrals over a law.
_POINTS = 200_000


def availability(every: LawLike, lasts: LawLike) -> float:
    """Return the share of the time outside spells of mean ``lasts``, mean ``every`` apart."""
    up, down = as_law("every", every).mean, as_law("lasts", lasts).mean
    return up / (up + down)


def mean_speed(every: LawLike, lasts: LawLike, speed: float) -> float:
    """Return the mean speed of a worker with slow spells, relative to its full speed.

    Exact in the long run for a worker that only computes: a computation is an integral of the
    speed, so the rate of computations is proportional to it.
    """
    up_share = availability(every, lasts)
    return up_share + (1.0 - up_share) * require_nonnegative("speed", speed)


def crash_rate(compute: LawLike, every: float, lasts: float) -> float:
    """Return the computations per second that a worker completes, if a crash restarts them.

    With crashes at exponential times of mean ``M = every`` after each return, absences of mean
    ``lasts``, and ``L = E[exp(-X / M)]`` of a computation ``X``::

        rate = availability * L / (M (1 - L))

    Each attempt succeeds with probability ``L`` and takes ``M (1 - L)`` on average. Only computing
    takes time.
    """
    law, mean = as_law("compute", compute), require_positive("every", every, "s")
    success = laplace(law, 1.0 / mean)
    return (
        mean
        / (mean + require_nonnegative("lasts", lasts, "s"))
        * success
        / (mean * (1.0 - success))
    )


def laplace(law: Law, rate: float) -> float:
    """Compute ``E[exp(-rate X)]`` of a law, from its distribution function."""
    points = (np.arange(_POINTS) + 0.5) / _POINTS
    return float(np.mean(law.cdf(-np.log(points) / rate)))


def young_interval(cost: float, every: float) -> float:
    """Return Young's interval between two checkpoints of ``cost`` seconds: ``sqrt(2 cost every)``.

    ``every``: mean seconds between failures, which come at exponential times. A first-order
    formula, for a cost that is small beside it.

    References
    ----------
    Young 1974, "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9).
    """
    return math.sqrt(
        2.0 * require_positive("cost", cost, "s") * require_positive("every", every, "s")
    )


def daly_interval(cost: float, every: float) -> float:
    """Return Daly's interval, a higher-order formula; ``every`` if ``cost >= 2 every``.

    The interval does not contain the checkpoint itself.

    ::

        sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C

    References
    ----------
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), equation 37.
    """
    first, ratio = young_interval(cost, every), cost / (2.0 * every)
    return every if ratio >= 1 else first * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def checkpoint_efficiency(interval: float, cost: float, every: float, lasts: float = 0.0) -> float:
    """Return the share of the time whose work is not lost, for a server that is always busy.

    It alternates between ``interval`` seconds of work and a checkpoint of ``cost`` seconds.
    Failures come at exponential times of mean ``every``; each returns it to the last checkpoint
    after ``lasts`` seconds without another failure::

        interval / ((every + lasts) (exp((interval + cost) / every) - 1))

    References
    ----------
    Daly 2006, equation 20, with a restart that cannot fail.
    """
    require_positive("interval", interval, "s")
    passes = (every + lasts) * math.expm1(
        (interval + require_nonnegative("cost", cost, "s")) / every
    )
    return interval / passes
