"""When elastic averaging is stable on a quadratic: the linear maps of a round, and closed forms for their limits.

Assumes exact gradients, one local step per exchange, and one curvature; ``step`` is the learning rate times the
curvature. Elastic methods are ``asyncsim.methods.aeasgd`` and ``asyncsim.methods.easgd``.
"""

import numpy as np

from asyncsim.errors import InputError, require_count, require_nonnegative


def elastic_stable_alpha(step: float) -> float:
    """Return the largest elastic step at which asynchronous elastic averaging is stable: ``(4 - 2 step) / (4 - step)``.

    For workers that take turns, each exchange followed by a gradient at the replica before it. It does not depend on
    the number of workers: exact for odd ones, slightly low for even ones (0.667 for 0.708 with two and a step of 1).

    Raises
    ------
    InputError
        For a step outside [0, 2], at which no elastic step is stable.

    References
    ----------
    Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; the formula from memory, checked against
    `elastic_round_robin`.
    """
    step = _require_step(step)
    return (4 - 2 * step) / (4 - step)


def elastic_stable_beta(workers: int, step: float) -> float:
    """Return the largest ``beta = workers * alpha`` at which synchronous elastic averaging is stable.

    ::

        n (4 - 2 step) / (2 + n (2 - step))

    Raises
    ------
    InputError
        For a step outside [0, 2], at which nothing is stable, or workers that are no count.

    Notes
    -----
    The condition of Jury, ``2 alpha + beta (2 - step) < 4 - 2 step``, on the mean of the replicas and the central
    variable; differences between replicas are no closer to their own limit.
    """
    step, n = _require_step(step), require_count("workers", workers)
    return n * (4 - 2 * step) / (2 + n * (2 - step))


def elastic_round_robin(workers: int, step: float, alpha: float) -> np.ndarray:
    """Return the map of a round in which each worker exchanges and then steps once, on replicas and central variable.

    Stable if all eigenvalues are smaller than one in size.

    Returns
    -------
    Float64[ndarray, "workers+1 workers+1"]
        The central variable is the last row.
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
    """Return the map of a round in which all workers exchange with the same central variable and step once.

    Stable if all eigenvalues are smaller than one in size.

    Returns
    -------
    Float64[ndarray, "workers+1 workers+1"]
        The central variable is the last row.
    """
    n = require_count("workers", workers)
    step, alpha = require_nonnegative("step", step), require_nonnegative("alpha", alpha)
    round_map = (1 - step - alpha) * np.eye(n + 1)
    round_map[:n, n] = alpha
    round_map[n, :n] = alpha
    round_map[n, n] = 1 - n * alpha
    return round_map


def _require_step(step: float) -> float:
    if require_nonnegative("step", step) > 2:
        raise InputError(f"step = {step!r}: must be at most 2, above which a worker alone diverges")
    return float(step)
