"""Staleness of gradients: the conservation identity, and the laws of staleness without a queue."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncsim.base.errors import InputError, require_count, require_list, require_positive
from asyncsim.clusters.laws import Constant, Law, as_law

#: Survival below which the renewal integral is cut off.
_NEGLIGIBLE = 1e-13
#: Longest interval, in mean durations, on which the renewal equation is solved.
_LONGEST_INTERVAL = 64.0


class GeometricStaleness(NamedTuple):
    """Staleness under exponential times of different rates."""

    shares: (
        np.ndarray
    )  #: each worker's share of the commits; also the success probability of its geometric law
    means: np.ndarray  #: each worker's mean staleness
    over_updates: float  #: mean over commits: always ``workers - 1``
    over_workers: float  #: mean of ``means``: larger, because slow workers count like fast ones


def conserved_staleness(commits: int, workers: int) -> int:
    """Return the sum of all staleness and of the final ages of the open reads.

    It is ``commits * (workers - 1)``.

    Exact on every path, for any times, speeds and queues, if each worker holds one read, all first
    reads are of version 0 at time 0, a commit and the next read are one atomic visit, and each
    commit makes one version: a new version ages every read but the one it consumed. With the
    worker's own read before its own commit in the visit the next read is aged as well:
    ``commits * workers``.
    """
    return require_count("commits", commits, 0) * (require_count("workers", workers) - 1)


def other_open_reads(read_version: Any, version_before: Any, versions: int) -> np.ndarray:
    """Count the other reads that were open at each version increment.

    The sum is the right-hand side of the conservation identity, which holds for any protocol and
    any policy: the staleness of everything consumed, plus the ages of the reads still open, is the
    sum over the increments of the number of other reads open then.

    Parameters
    ----------
    read_version : Int[array, "reads"]
        The version of each read, consumed or still open.
    version_before : Int[array, "reads"]
        The version just before the read's gradient was consumed (applied or discarded);
        ``versions`` for the reads still open at the end.
    versions : int
        The number of increments.
    """
    versions = require_count("versions", versions, 0)
    begin, end = (
        _whole_numbers("read_version", read_version),
        _whole_numbers("version_before", version_before),
    )
    if begin.shape != end.shape:
        raise InputError(
            f"version_before: {end.size} entries for {begin.size} reads; give one per read"
        )
    wrong = np.flatnonzero((begin < 0) | (end < begin) | (end > versions))
    if wrong.size:
        i = wrong[0]
        raise InputError(
            f"read {i}: read_version = {begin[i]}, version_before = {end[i]}: "
            f"must satisfy 0 <= read_version <= version_before <= {versions}"
        )
    change = np.bincount(begin, minlength=versions + 1) - np.bincount(end, minlength=versions + 1)
    return np.cumsum(change)[:versions]


def _whole_numbers(argument: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        fits = array.dtype.kind in "iuf" and bool(
            (np.abs(array) < 2.0**63).all()
        )  # which nan is not
    except (TypeError, ValueError):
        fits = False
    integers = array.astype(np.int64) if fits else None
    if integers is None or not np.array_equal(integers, array):
        raise InputError(f"{argument}: must hold whole numbers")
    return integers


def round_robin_staleness(commits: int, workers: int) -> np.ndarray:
    """Return the staleness of each commit under equal constant times.

    It is 0, 1, ..., then always ``workers - 1``.

    Assumes one atomic visit per commit and a fixed order of simultaneous arrivals; a constant
    service time changes nothing.
    """
    last = require_count("workers", workers) - 1
    return np.minimum(np.arange(require_count("commits", commits, 0)), last)


def geometric_staleness(workers: int, staleness: Any) -> np.ndarray:
    """Return the probability of each staleness under independent exponential times of equal rate.

    With no queue and atomic visits each commit is by a uniformly random worker, independent of the
    past, so staleness is geometric with success ``1 / workers``: mean ``workers - 1``. (Consecutive
    values are slightly correlated.) Source: the memoryless model of Mitliagkas et al. 2016, arXiv
    1605.09774.
    """
    success = 1 / require_count("workers", workers)
    staleness = _whole_numbers("staleness", staleness)
    probability = success * (1 - success) ** np.maximum(staleness, 0)
    return np.where(staleness >= 0, probability, 0.0)


def geometric_staleness_variance(workers: int) -> int:
    """Return the variance of the geometric staleness, ``workers * (workers - 1)``."""
    workers = require_count("workers", workers)
    return workers * (workers - 1)


def expected_inverse_staleness(workers: int) -> float:
    """Return the mean of ``1 / (staleness + 1)`` under the geometric law.

    It is ``ln(workers) / (workers - 1)``.

    It is the mean factor by which methods that divide by staleness (DynSGD) shrink their steps.
    """
    workers = require_count("workers", workers)
    return math.log(workers) / (workers - 1) if workers > 1 else 1.0


def heterogeneous_geometric_staleness(rates: Sequence[float]) -> GeometricStaleness:
    """Return the staleness under independent exponential times of different rates, without a queue.

    A commit is by worker ``i`` with probability ``p = rate_i / sum(rates)``; its staleness is
    geometric with success ``p``, mean ``(1 - p) / p``. State which average is shown: over commits,
    or over workers.

    ``rates``: computations per second of each worker.
    """
    numbers = require_list("rates", rates)
    checked = np.array(
        [require_positive(f"rates[{i}]", rate, "1/s") for i, rate in enumerate(numbers)]
    )
    shares = checked / checked.sum()
    means = (1 - shares) / shares
    return GeometricStaleness(shares, means, float(shares.size - 1), float(means.mean()))


def batch_staleness(in_flight: int, batch: int) -> float:
    """Return the mean staleness if every ``batch`` arriving gradients make a version.

    ``(in_flight - 1) / batch``, for softsync, K-batch-async and FedBuff: workers read again at
    once, so ``in_flight`` gradients are always under way. Follows from the conservation identity,
    for any times.
    """
    return (require_count("in_flight", in_flight) - 1) / require_count("batch", batch)


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


def renewal_staleness_means(laws: Sequence[Law | float | str]) -> np.ndarray:
    """Return each worker's mean staleness for any laws of the compute time, without a queue.

    While worker ``i`` computes for ``mean_i`` on average, each other worker commits
    ``mean_i / mean_j`` times: ``mean_i * sum_j(1 / mean_j) - 1``. Assumes independent workers in
    their stationary regime and atomic visits; laws on one lattice (equal constants) depend on how
    ties fall.

    ``laws``: one law per worker.
    """
    means = np.array(
        [as_law(f"laws[{i}]", law).mean for i, law in enumerate(require_list("laws", laws))]
    )
    if not np.all(means > 0):
        raise InputError(f"laws[{int(np.argmin(means))}]: must have a mean above zero")
    return means * np.sum(1 / means) - 1


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
