"""Laws of the staleness of gradients without a queue."""

import math
from typing import Any

import numpy as np

from asyncsim.base.errors import InputError, require_count
from asyncsim.clusters.laws import Constant, Law, as_law

#: Survival below which the renewal integral is cut off.
_NEGLIGIBLE = 1e-13
#: Longest interval, in mean durations, on which the renewal equation is solved.
_LONGEST_INTERVAL = 64.0


def geometric_staleness(workers: int, staleness: Any) -> np.ndarray:
    """Return the probability of each staleness under independent exponential times of equal rate.

    With no queue and atomic visits each commit is by a uniformly random worker, independent of the
    past, so staleness is geometric with success ``1 / workers``: mean ``workers - 1``. (Consecutive
    values are slightly correlated.) Source: the memoryless model of Mitliagkas et al. 2016, arXiv
    1605.09774.
    """
    success, staleness = 1 / require_count("workers", workers), np.asarray(staleness)
    return np.where(staleness < 0, 0.0, success * (1 - success) ** np.maximum(staleness, 0))


def geometric_staleness_variance(workers: int) -> int:
    """Return the variance of the geometric staleness, ``workers * (workers - 1)``."""
    workers = require_count("workers", workers)
    return workers * (workers - 1)


def first_staleness(workers: int, first: int) -> float:
    """Return the mean staleness of K-async: ``(workers - first) / first``.

    The server makes a version of the first ``first`` gradients; their workers wait for it, the
    others compute on. Follows from the conservation identity, for any times. Named K-async in Dutta
    et al. 2018, arXiv 1803.01113.
    """
    workers, first = require_count("workers", workers), require_count("first", first)
    if first > workers:
        raise InputError(f"first = {first}: must be at most workers = {workers}")
    return (workers - first) / first


def renewal_staleness_variance(law: Law | float | str, workers: int, points: int = 4096) -> float:
    """Return the variance of staleness for any one law of the compute time, without a queue.

    Given that a computation took ``x``, its staleness is the sum of the stationary renewal counts
    of the other ``workers - 1`` over ``x``. With ``c`` the coefficient of variation, ``F`` the law
    and ``m`` its renewal function, the law of total variance gives::

        n (n-1) c^2 + 2 (n-1) / mean * integral (m(x) - x/mean - (c^2 - 1)/2) (1 - F(x)) dx

    whose integrand vanishes quickly, as ``m`` approaches its asymptote. Exponential times make it
    zero.

    Parameters
    ----------
    law : Law, float or str
        Law of the compute time; infinite variance gives ``inf``. Assumes the stationary regime: a
        law on a lattice that starts in step stays in step, and only the constant (variance 0) is
        exact.
    workers : int
        Number of independent workers with this law.
    points : int
        Grid on which the renewal equation is solved. The error falls as ``1 / points**2``, and as
        ``1 / points`` for a law with atoms. At 4096 it is below 1e-3 of the result for coefficients
        of variation up to 3, 2e-3 at 5 and 1.3e-2 at 10 for log-normal laws, whose tails exceed the
        64 means that the grid spans (measured by refining and lengthening it).

    References
    ----------
    Cox 1962, Renewal theory (variance of the stationary count); Xie 1989, Commun. Stat. Simul. 18,
    281 (the Riemann-Stieltjes scheme).
    """
    law, partners = as_law("law", law), require_count("workers", workers) - 1
    if law.mean <= 0:
        raise InputError(f"law = {law}: must have a mean above zero")
    if isinstance(law, Constant) or partners == 0:
        return 0.0
    if not math.isfinite(law.std):
        return math.inf
    x = np.linspace(0.0, _cut_off(law), require_count("points", points, 8) + 1)
    square_cv = (law.std / law.mean) ** 2
    excess = _renewal_function(law, x) - x / law.mean - (square_cv - 1) / 2
    integral = float(np.trapezoid(excess * (1 - law.cdf(x)), x))
    return (partners + 1) * partners * square_cv + 2 * partners * integral / law.mean


def _renewal_function(law: Law, x: np.ndarray) -> np.ndarray:
    """Solve ``m(x) = F(x) + integral m(x - s) dF(s)`` on an even grid that begins at 0."""
    half = law.cdf((x[1:] + x[:-1]) / 2)
    at = law.cdf(x)
    m = np.zeros(len(x))
    steps = np.zeros(len(x))  # steps[j] = m[j] - m[j - 1]
    m[0] = at[0] / (1 - at[0])  # durations of exactly zero renew at once
    for i in range(1, len(x)):
        explicit = at[i] * (1 + m[0]) + steps[1:i] @ half[i - 1 : 0 : -1]
        m[i] = (explicit - m[i - 1] * half[0]) / (1 - half[0])
        steps[i] = m[i] - m[i - 1]
    return m


def _cut_off(law: Law) -> float:
    """Return a time beyond which a duration is negligible, or the longest affordable time."""
    candidates = law.mean * np.geomspace(1.0, _LONGEST_INTERVAL, 200)
    return float(candidates[np.argmax(np.append(1 - law.cdf(candidates[:-1]) < _NEGLIGIBLE, True))])
