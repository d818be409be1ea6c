"""Which closed forms hold for a cluster: what its staleness should be, and why.

Tables and figures draw these beside a measurement. Where no closed form holds they get what is exact for any law: the
conserved mean.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Empirical, Exponential, Law, Mixture
from asyncsim.clusters.policy import asynchronous
from asyncsim.errors import InputError, require_positive
from asyncsim.theory.barriers import sum_law
from asyncsim.theory.expected_throughput import memoryless_clocks
from asyncsim.theory.queueing import alike, journeys, knee, require_cluster
from asyncsim.theory.staleness import (
    first_staleness,
    geometric_staleness,
    geometric_staleness_variance,
    heterogeneous_geometric_staleness,
    renewal_staleness_variance,
)

#: A worker that starts in step with the others is out of it after about 0.25 / cv**2 computations; at least this much
#: of ``computations * cv**2`` leaves most of a trace to the stationary regime.
_OUT_OF_STEP = 1.0


class StalenessTheory(NamedTuple):
    """What is known about the staleness of a cluster's commits.

    Attributes
    ----------
    law : str
        Name of the closed form, ``""`` if there is none.
    mean : float or None
        Over commits; None if only bounds are known. One that is conserved counts also what workers have read that are
        never served, as under ``lowest_rank`` at a saturated server.
    mean_bounds : tuple of float
        Smallest and largest possible mean; both equal to ``mean`` where that is known. Reads that are never served
        count, as there.
    std : float or None
        Standard deviation over commits, without a queue.
    queue_free : bool
        Whether the server takes no time, so that ``std`` is more than an approximation.
    probability : function or None
        From whole numbers to their probabilities, where the whole law is known.
    mean_law : str
        Why the mean is what it is: ``"conserved"``, whatever the laws of the times, or ``"bounded clocks"``.
    """

    law: str
    mean: float | None
    mean_bounds: tuple[float, float]
    std: float | None = None
    queue_free: bool = False
    probability: Callable[[np.ndarray], np.ndarray] | None = None
    mean_law: str = "conserved"


def staleness_theory(cluster: Cluster, computations: float = math.inf) -> StalenessTheory:
    """Return what theory says about the staleness of a cluster.

    Parameters
    ----------
    cluster : Cluster
    computations : float
        Commits per worker of the trace at hand. Laws of little spread leave the start in step only slowly, and the
        spread of the stationary regime is not stated for a trace that hardly reaches it.
    """
    require_cluster(cluster)
    if computations != math.inf:
        require_positive("computations", computations)
    n = cluster.workers
    if cluster.policy != asynchronous():
        return _under_policy(cluster)
    if cluster.separate_reads:
        # The other workers' reads may be open or not; with the read before the write, the own next one is as well.
        bounds = (0.0, n - 1.0) if cluster.protocol == "write_then_read" else (float(n), 2.0 * n - 1)
        return StalenessTheory("", None, bounds)
    shift = 1 if cluster.protocol == "read_then_write" else 0
    mean = float(n - 1 + shift)
    known = StalenessTheory("", mean, (mean, mean))
    if _in_rotation(cluster):
        rotation = _shifted(lambda k: (k == n - 1).astype(np.float64), shift)
        return known._replace(law="round robin", std=0.0, queue_free=True, probability=rotation)
    if journeys(cluster) > 0:
        return known
    rates = [1 / law.mean for law in cluster.compute_laws if isinstance(law, Exponential)]
    if len(rates) == n and cluster.window == 1 and cluster.service.mean == 0:
        return known._replace(**_geometric(rates, shift), queue_free=True)
    if alike(cluster):
        return known._replace(**_renewal(cluster, computations))
    return known


def _under_policy(cluster: Cluster) -> StalenessTheory:
    """Return what the conservation of staleness says of the messages taken up: a mean, or bounds of it.

    With each version the reads that are open age by one. Of the others' those are at most ``n - 1``, and one more if
    workers read before their own write; of the policies that discard, the limit is a bound besides.
    """
    n, policy = cluster.workers, cluster.policy
    clocks = memoryless_clocks(cluster)
    if clocks is not None and cluster.service.mean == 0 and cluster.protocol == "exchange":
        return StalenessTheory("", clocks.staleness, (clocks.staleness,) * 2, mean_law="bounded clocks")
    most = float(n - 1)
    if cluster.protocol == "read_then_write":
        most = float(n if cluster.exclusive else 2 * n - 1)
    least = 0.0
    if policy.name == "buffered":
        most /= policy.per_version(n)
        least = n / policy.per_version(n) if cluster.protocol == "read_then_write" else 0.0
    elif policy.name == "first_of":
        most = first_staleness(n, policy.per_version(n))
    if policy.staleness_limit is not None:
        most = min(most, policy.staleness_limit - 1.0)
    if policy.name in ("buffered", "first_of") and not cluster.separate_reads:
        least = most
    return StalenessTheory("", most if least == most else None, (least, most))


def _in_rotation(cluster: Cluster) -> bool:
    """Return whether the workers take turns for ever: all times constant and alike, first come first served."""
    laws = (cluster.compute, cluster.service, cluster.latency_up, cluster.latency_down)
    constant = all(isinstance(law, Constant) for law in laws) and isinstance(cluster.window, int)
    return constant and cluster.discipline == "fifo"


def _geometric(rates: list[float], shift: int) -> dict[str, Any]:
    """Return law and spread of the staleness of exponential workers of these rates, without a queue."""
    n = len(rates)
    if len(set(rates)) == 1:
        probability = _shifted(lambda k: geometric_staleness(n, k), shift)
        return {
            "law": "geometric law",
            "std": math.sqrt(geometric_staleness_variance(n)),
            "probability": probability,
        }
    expected = heterogeneous_geometric_staleness(rates)
    shares, means = expected.shares, expected.means
    second_moment = float(shares @ (means * (means + 1) + means**2))

    def mixture(k: np.ndarray) -> np.ndarray:
        each = shares**2 * (1 - shares) ** np.maximum(k[..., None], 0)
        return np.where(k >= 0, each.sum(axis=-1), 0.0)

    std = math.sqrt(second_moment - expected.over_updates**2)
    return {"law": "geometric law of each worker", "std": std, "probability": _shifted(mixture, shift)}


def _renewal(cluster: Cluster, computations: float) -> dict[str, Any]:
    """Return law and spread of the staleness of alike workers without a queue, if these say anything here."""
    try:
        law = sum_law(cluster.compute_laws[0], max(cluster.windows))
    except InputError:
        return {}
    spread = law.std / law.mean
    if _on_lattice(law) or not math.isfinite(spread) or computations * spread**2 < _OUT_OF_STEP:
        return {}
    instant = cluster.service.mean == 0
    if not instant and cluster.workers >= knee(law.mean, cluster.service.mean):
        return {}
    std = math.sqrt(renewal_staleness_variance(law, cluster.workers))
    return {"law": "renewal theory", "std": std, "queue_free": instant}


def _on_lattice(law: Law) -> bool:
    """Return whether a law has atoms, so that workers may meet at one instant again and again."""
    if isinstance(law, Mixture):
        return any(_on_lattice(part) for part in law.laws)
    return isinstance(law, Constant | Empirical)


def _shifted(probability: Callable[[np.ndarray], np.ndarray], shift: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda k: probability(np.asarray(k) - shift)
