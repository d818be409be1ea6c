"""Failures: the workers' availability, the cost of crashes, and intervals between checkpoints."""

import math

from asyncsim.base.errors import require_nonnegative, require_positive


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
