"""The cost of waiting: the time until all or the first few workers finish."""

import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import betaincc

from asyncsim.base.errors import InputError, require_count, require_list
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    HalfNormal,
    Law,
    Mixture,
    Pareto,
    Uniform,
    as_law,
    parse,
)

#: Nodes of Gauss's rule between two edges; edges between the integrand's first fall and its end.
_NODES, _EDGES = 12, 400
#: Edges are added where the integrand falls by more than this share, for at most so many times.
_FALL, _ROUNDS = 1 / 50, 12
#: Times at which the integrand is looked at first, relative to the longest mean.
_SCAN = np.geomspace(1e-260, 1e43, 3_000)


def barrier_time(
    law: Law | float | str | Sequence[Law | float | str],
    workers: int | None = None,
    first: int | None = None,
) -> float:
    """Return the mean time (s) until ``first`` of the workers have finished, all having started
    together.

    The mean of an order statistic of independent durations,
    ``integral of P(fewer than first have finished by t) dt``: a synchronous step (all), K-sync and
    backup workers (the first K). Closed forms for constant, exponential, uniform and Pareto laws
    (David and Nagaraja 2003, Order statistics), else integrated numerically to about 1e-8.

    Parameters
    ----------
    law : Law, float, str, or a sequence of these
        Duration of each worker; a sequence gives one law per worker.
    workers : int, optional
        Not needed with a sequence.
    first : int, optional
        Number of workers to wait for; all by default.
    """
    law = parse(law) if isinstance(law, str) else law
    if not isinstance(law, Law | numbers.Real):
        laws = [as_law(f"law[{i}]", item) for i, item in enumerate(require_list("law", law))]
        count = len(laws)
        if workers is not None and workers != count:
            raise InputError(f"workers = {workers}: {count} laws are given; leave workers out")
    else:
        count = require_count("workers", workers)
        laws = [as_law("law", law)]
    first = count if first is None else require_count("first", first)
    if first > count:
        raise InputError(f"first = {first}: must be at most workers = {count}")
    if count == 1 or max(item_law.mean for item_law in laws) == 0:
        return laws[0].mean
    if all(item_law == laws[0] for item_law in laws):
        closed = _closed_form(laws[0], count, first)
        return _integrated(laws[:1], count, first) if closed is None else closed
    return _integrated(laws, count, first)


def sum_law(law: Law | float | str, steps: int) -> Law:
    """Return the law of the sum of ``steps`` independent durations: a worker's window of local
    steps.

    Raises
    ------
    InputError
        If the law is not constant, exponential or gamma: no other has a sum in closed form here.
    """
    law, steps = as_law("law", law), require_count("steps", steps)
    if steps == 1:
        return law
    if isinstance(law, Constant):
        return Constant(steps * law.value)
    if isinstance(law, Exponential):
        return Gamma(steps * law.mean, 1 / math.sqrt(steps))
    if isinstance(law, Gamma):
        return Gamma(steps * law.mean, law.cv / math.sqrt(steps))
    raise InputError(
        f"law = {law}: its sums have no closed form; use constant, exponential or gamma"
    )


def _closed_form(law: Law, workers: int, first: int) -> float | None:
    match law:
        case Constant(value=value):
            return value
        case Exponential(mean=mean):
            return mean * math.fsum(1 / k for k in range(workers - first + 1, workers + 1))
        case Uniform(low=low, high=high):
            return low + (high - low) * first / (workers + 1)
        case Pareto(shape=shape):
            late = workers - first + 1
            logarithm = math.lgamma(workers + 1) - math.lgamma(workers + 1 - 1 / shape)
            return law.minimum * math.exp(
                logarithm + math.lgamma(late - 1 / shape) - math.lgamma(late)
            )
    return None


def _integrated(laws: list[Law], workers: int, first: int) -> float:
    """Integrate the probability of an incomplete barrier; a single law applies to all workers."""

    def finished(t: np.ndarray) -> np.ndarray:
        return np.stack([law.cdf(t) for law in laws])

    if first < workers:
        return _integral(lambda t: _fewer_than(first, workers, finished(t)), laws)
    # The mean of the maximum is the sum of the means less an integral whose integrand falls with
    # the square of the laws' tails: the exact means contain the heavy tails that no grid reaches.
    repeats = workers / len(laws)

    def excess(t: np.ndarray) -> np.ndarray:
        late = 1 - finished(t)
        with np.errstate(divide="ignore"):  # log 0 before the first finish
            all_finished_log = repeats * np.sum(np.log1p(-late), axis=0)
        return repeats * np.sum(late, axis=0) + np.expm1(all_finished_log)

    return repeats * math.fsum(law.mean for law in laws) - _integral(excess, laws)


def _fewer_than(first: int, workers: int, finished: np.ndarray) -> np.ndarray:
    """Compute the probability that fewer than ``first`` have finished, from ``[laws, times]``."""
    if len(finished) == 1:
        return betaincc(first, workers - first + 1, finished[0])
    counts = np.zeros(
        (first, finished.shape[1])
    )  # counts[k]: exactly k finished (Poisson-binomial)
    counts[0] = 1.0
    for probability in finished:
        counts[1:] = counts[1:] * (1 - probability) + counts[:-1] * probability
        counts[0] *= 1 - probability
    return counts.sum(axis=0)


def _integral(function: Callable[[np.ndarray], np.ndarray], laws: list[Law]) -> float:
    """Integrate over all times a function that falls to 0 and jumps where the laws do."""
    scale = max(law.mean for law in laws)
    start, values = float(function(np.zeros(1))[0]), function(_SCAN * scale)
    # The first times that differ from the start, and that do not matter; later ones are round-off.
    falls = int(np.argmax(values < start))
    settled = int(np.argmax(values * np.maximum(_SCAN, 1.0) <= 1e-15 * start))
    begin, end = scale * _SCAN[[max(falls - 1, 0), settled]]
    jumps = [point for law in laws for point in _breakpoints(law)]
    edges = np.unique([0.0, *np.geomspace(begin, max(begin, end), _EDGES), *jumps])
    shares = np.arange(1, 8) / 8
    for _ in range(_ROUNDS):
        steep = -np.diff(function(edges)) > _FALL * start
        if not steep.any():
            break
        between = edges[:-1, None] + np.diff(edges)[:, None] * shares
        edges = np.unique([*edges, *between[steep].ravel()])
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    half = np.diff(edges) / 2
    times = edges[:-1, None] + half[:, None] * (1 + nodes)
    return float(half @ function(times.ravel()).reshape(times.shape) @ weights)


def _breakpoints(law: Law) -> list[float]:
    """List the times at which a law's cdf jumps or bends."""
    match law:
        case Constant(value=value):
            return [value]
        case Uniform(
            low=low, high=high
        ):  # dense at the top, where the last of many workers finishes
            return [*(high - (high - low) * np.geomspace(1e-9, 1.0, 60)), high]
        case HalfNormal(low=low):
            return [low]
        case Pareto():
            return [law.minimum]
        case Empirical(samples=samples):
            return list(samples)
        case Mixture(laws=parts):
            return [point for part in parts for point in _breakpoints(part)]
    return []


def trial_success(cluster: Cluster) -> tuple[float, ...]:
    """Return the probability that each worker's trial ends in time, under the policy `trials`.

    ``P(sum of the local steps' times <= time)``, the paper's ``p_i``. Waits and failures do not
    matter: a trial's time is its computation's.

    Raises
    ------
    InputError
        For another policy, and for windows of laws whose sums are not known; see `sum_law`.

    References
    ----------
    Maranjyan, Shaikh Omar and Richtarik 2025, arXiv 2410.04285.
    """
    times = cluster.policy.trial_times(cluster.workers)
    if times is None:
        raise InputError(
            f"policy = {cluster.policy}: cuts no computation; give a cluster with "
            "asyncsim.trials(time)"
        )
    steps = zip(cluster.compute_laws, cluster.windows, times, strict=True)
    return tuple(float(sum_law(law, window).cdf(time)) for law, window, time in steps)
