"""Which closed forms hold for a cluster, and why: its staleness, its rate of commits, and the visits that wait.

Tables and figures draw these beside a measurement. Where no closed form holds they get the conserved mean of the
staleness, and the bounds of operational analysis, which hold for all laws with these means.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asyncsim.base.errors import InputError, require_positive
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Empirical, Exponential, Law, Mixture
from asyncsim.clusters.network import takes_no_time
from asyncsim.clusters.policy import asynchronous
from asyncsim.theory.barriers import BoundedClocks, barrier_time, bounded_clocks, sum_law
from asyncsim.theory.queueing import (
    alike,
    alike_network,
    away,
    computing,
    demand,
    journeys,
    knee,
    memoryless,
    queues,
    repairman,
    require_cluster,
    saturation_bound,
    think_time,
    waits_for_parts,
)
from asyncsim.theory.staleness import (
    first_staleness,
    geometric_staleness,
    geometric_staleness_variance,
    heterogeneous_geometric_staleness,
    renewal_staleness_variance,
)


class ThroughputTheory(NamedTuple):
    """What is known about the commits that are taken up, in the long run."""

    #: ``"nobody waits"``, ``"machine repairman"``, ``"order statistics"`` (of those who finish first; with ``", without
    #: the network"`` where only their computing counts), ``"bounded clocks"``, or ``"saturation bound"``.
    name: str
    commits: float  #: per second
    exact: bool = False  #: whether that is the rate; else it is the largest possible one
    #: The part of the workers' time in which they compute at that rate: the ``computing_share`` of a trace, or the most
    #: that it can be. None where workers that are unlike each other may wait and are not kept in step, and where
    #: computations are stopped.
    computing: float | None = None


class QueueTheory(NamedTuple):
    """What is known about the number of visits at the server."""

    #: ``"machine repairman"``, or ``"saturation bound"``: no cluster with these mean times has fewer at its server.
    name: str
    in_system: float  #: visits waiting or in service, mean over time
    utilisation: float  #: share of time that the server is busy
    exact: bool = False  #: whether these are the means; else the least possible number, and the largest possible share


def throughput_theory(cluster: Cluster) -> ThroughputTheory | None:
    """Return what theory says about the commits of a cluster.

    None with failures, and where computations are stopped of which the short ones are left, so that more may end than
    the mean time says; for barriers that is told by order statistics, of laws whose sums over a window are known, and
    by what the server and a shared link can take.

    With several servers a message takes at least the mean time of one part, so that these rates are bounds.
    """
    require_cluster(cluster)
    if cluster.topology is not None:
        return _without_server(cluster)
    if cluster.failures:
        return None
    rate = _rate(cluster)
    return None if rate is None else rate._replace(computing=_computing_share(cluster, rate))


def queue_theory(cluster: Cluster) -> QueueTheory | None:
    """Return what theory says about the server's queue; None if the workers' think time is not known, or nobody queues.

    Exponential service, first come first served and alike workers: the machine repairman. Else the least mean number
    that the means allow, ``workers - think / (mean time between visits at best)``.
    """
    think = think_time(cluster)
    service = cluster.service.mean
    if cluster.failures or think is None or service == 0 or cluster.discipline == "lock_free":
        return None
    if _repairman_holds(cluster):
        state = repairman(cluster.workers, think, service)
        return QueueTheory("machine repairman", state.in_system, state.utilisation, exact=True)
    most = saturation_bound(cluster.workers, think, demand(cluster))
    return QueueTheory("saturation bound", cluster.workers - think * most, demand(cluster) * most)


def saturating_workers(cluster: Cluster) -> float | None:
    """Return from how many workers like these on the server is never idle, at the mean times; None as `think_time`.

    Also None if the server takes no time, or lets any number in at once.
    """
    think = think_time(cluster)
    if cluster.failures or think is None or cluster.service.mean == 0 or cluster.discipline == "lock_free":
        return None
    return knee(think, demand(cluster))


def memoryless_clocks(cluster: Cluster) -> BoundedClocks | None:
    """Return what is known of workers with exponential times, alike and near the server, under bounded staleness.

    Their throughput is what nobody waiting at the server would leave of it. None if there are too many states.
    """
    if cluster.policy.bound is None or not memoryless(cluster):
        return None
    try:
        return bounded_clocks(cluster.workers, cluster.policy.bound)
    except InputError:
        return None


def _without_server(cluster: Cluster) -> ThroughputTheory:
    """Return the gradients per second of workers that compute all the time, or that nobody can leave behind."""
    means = computing(cluster)
    instant = takes_no_time(cluster.ways[0].latency) and not any(cluster.ways[0].transfer)
    if cluster.workers == 1 or cluster.policy == asynchronous() or (cluster.policy.name == "handshake" and instant):
        return ThroughputTheory("nobody waits", sum(1 / mean for mean in means), exact=True, computing=1.0)
    if cluster.policy.name == "handshake":
        return ThroughputTheory("saturation bound", _handshakes(cluster, means))
    commits = cluster.workers / max(means)
    return ThroughputTheory("saturation bound", commits, computing=commits / cluster.workers * float(np.mean(means)))


def _handshakes(cluster: Cluster, computing: list[float]) -> float:
    """Return the largest rate of gradients that pairwise averages over a network allow.

    A worker computes, then exchanges: no rate exceeds ``1 / (computing + exchange)``. An exchange holds two of the
    ``n`` replicas, so ``2 sum(rate * exchange) <= n``. The bound lets the shortest exchanges go first.
    """
    exchanges = _exchange_times(cluster)
    total, free_pairs = 0.0, cluster.workers / 2
    for exchange, seconds in sorted(zip(exchanges, computing, strict=True)):
        rate = 1 / (seconds + exchange)
        if exchange > 0:
            rate = min(rate, free_pairs / exchange)
            free_pairs -= rate * exchange
        total += rate
    return total


def _exchange_times(cluster: Cluster) -> list[float]:
    """Return the mean time (s) that the messages of each worker's exchange with a random neighbour travel."""
    assert cluster.topology is not None
    n, slow = cluster.workers, cluster.topology.slowness(cluster.workers)
    site = np.array(cluster.site_of)
    near, far = cluster.near_ways[0], cluster.ways[0]
    latencies = np.array([near.means, far.means])
    transfers = np.array([near.transfer, far.transfer])
    seconds = []
    for worker, neighbours in enumerate(cluster.topology.neighbours(n)):
        partners = np.array(neighbours, np.int64)
        is_far = (site[partners] != site[worker]).astype(np.int64)
        slow_out = np.array([slow.get((worker, partner), 1.0) for partner in neighbours])
        slow_in = np.array([slow.get((partner, worker), 1.0) for partner in neighbours])
        travel = slow_out * (2 * latencies[is_far, worker] + transfers[is_far, worker])
        travel += slow_in * transfers[is_far, partners]
        seconds.append(float(travel.mean()) if neighbours else 0.0)
    return seconds


def _rate(cluster: Cluster) -> ThroughputTheory | None:
    policy = cluster.policy
    if policy.name == "barrier":
        return _barriers(cluster)
    if policy.stops_computations:
        return None
    # What is discarded was computed and served as well: such rates are of all messages, and bound that of the others.
    nothing_lost = policy.staleness_limit is None
    if _repairman_holds(cluster):
        state = repairman(cluster.workers, away(cluster)[0], cluster.service.mean)
        return ThroughputTheory("machine repairman", state.throughput, exact=nothing_lost)
    most = ThroughputTheory("saturation bound", _highest_rate(cluster))
    if policy.chooses_when_to_reply and cluster.workers > 1:
        return _with_waiting(cluster, most)
    may_wait = queues(cluster) or waits_for_parts(cluster)
    return most if may_wait or not nothing_lost else most._replace(name="nobody waits", exact=True)


def _computing_share(cluster: Cluster, rate: ThroughputTheory) -> float | None:
    policy = cluster.policy
    stopped = policy.stops_computations and policy.per_version(cluster.workers) < cluster.workers
    if stopped:
        return None
    busy = computing(cluster)
    if alike(cluster) or _in_step(cluster):
        return rate.commits / cluster.workers * math.fsum(busy) / cluster.workers
    if rate.exact and not policy.chooses_when_to_reply:  # each has its own pace
        cycles = [one + demand(cluster) for one in away(cluster)]
        return math.fsum(part / cycle for part, cycle in zip(busy, cycles, strict=True)) / cluster.workers
    return None


def _in_step(cluster: Cluster) -> bool:
    """Return whether a policy lets no worker commit more often than another, in the long run."""
    policy = cluster.policy
    everyone = policy.name == "barrier" and policy.per_version(cluster.workers) == cluster.workers
    return everyone or policy.bound is not None


def _highest_rate(cluster: Cluster) -> float:
    """Return the largest rate of commits that the means allow, by operational analysis.

    No worker is quicker than without anybody else; no server and no shared link is more than busy, so that the workers
    of a link make at most the smaller of their own rates and of the link's. Under policies that keep all in step none
    is quicker than the slowest.
    """
    cycles = [one + demand(cluster) for one in away(cluster)]
    rate = _busiest_server(cluster)
    if _in_step(cluster):
        slowest = min(busiest / len(workers) for workers, busiest in _links(cluster))
        return min(rate, len(cycles) / max(cycles), len(cycles) * slowest)
    link_rates = [min(math.fsum(1 / cycles[i] for i in workers), busiest) for workers, busiest in _links(cluster)]
    return min(rate, math.fsum(link_rates))


def _busiest_server(cluster: Cluster) -> float:
    """Return the rate of commits at which the server is always busy; infinite if it takes no time."""
    seconds = 0.0 if cluster.discipline == "lock_free" else demand(cluster)
    return 1 / seconds if seconds > 0 else math.inf


def _links(cluster: Cluster) -> list[tuple[range, float]]:
    """Return the workers that share each link, and their rate of commits at which it is always busy.

    Each commit has a message with parameters in either direction. Without shared links all workers have an infinite
    rate.
    """
    if not cluster.shared_bandwidth:
        return [(range(cluster.workers), math.inf)]
    links = []
    for first, last in itertools.pairwise(np.cumsum([0, *cluster.link_sizes]).tolist()):
        seconds = max(min(way.transfer[first:last]) for way in cluster.ways)
        links.append((range(first, last), 1 / seconds if seconds > 0 else math.inf))
    return links


def _barriers(cluster: Cluster) -> ThroughputTheory | None:
    """Return the rate of the first few of all workers, which start together; its limit where they may not quite.

    A version takes the time until they have finished, the journeys and one service. The last of several services, and
    messages of others that are under way, make it longer.
    """
    first = cluster.policy.per_version(cluster.workers)
    everyone = first == cluster.workers
    # Of the workers' own times the short ones may be left, the server and a shared link see to all that is taken up.
    links = _links(cluster)
    busiest = min(_busiest_server(cluster), math.fsum(rate for _, rate in links))
    most = _highest_rate(cluster) if everyone else busiest
    # The nearest worker's journeys, where some are farther than others: no version is made in less.
    name, travelling, served = "order statistics", min(journeys(cluster)), demand(cluster)
    same = alike_network(cluster)
    steady = all(isinstance(law, Constant) for way in (*cluster.ways, *cluster.near_ways) for law in way.latency)
    in_turn = steady and cluster.discipline == "fifo" and cluster.protocol == "exchange"
    if cluster.shared_bandwidth and in_turn and same:  # nobody misses a version on the way, so that everyone gets each
        most = min(most, first / max(len(workers) for workers, _ in links) / cluster.transfer_down)
    limits = [ThroughputTheory("saturation bound", most)] if most < math.inf else []
    if not everyone:  # of random journeys, too, the short ones may be left, and of services that do not wait in turn
        if not steady:
            travelling, name = 0.0, "order statistics, without the network"
        if cluster.discipline == "lock_free":
            # Who is served as the version is made, for a message that came too late, may see it by a read that is
            # under way: then it waits for no whole one.
            served = cluster.service.mean if isinstance(cluster.service, Constant) else 0.0
    try:
        laws = [sum_law(law, window) for law, window in zip(cluster.compute_laws, cluster.windows, strict=True)]
    except InputError:
        return limits[0] if limits else None
    together = barrier_time(laws, first=first)
    exact = same and steady and cluster.service.mean == 0 and not cluster.shared_bandwidth
    exact = exact and (everyone or travelling == 0)
    limits.insert(0, ThroughputTheory(name, first / (together + travelling + served), exact))
    return min(limits, key=lambda limit: limit.commits)


def _with_waiting(cluster: Cluster, most: ThroughputTheory) -> ThroughputTheory:
    """Return the rate under a policy that lets workers wait, where memoryless ones tell it."""
    exact = cluster.service.mean == 0 and not cluster.shared_bandwidth
    clocks = memoryless_clocks(cluster)
    if clocks is not None:
        commits = clocks.throughput * cluster.workers / cluster.compute_laws[0].mean
        return min(ThroughputTheory("bounded clocks", commits, exact), most, key=lambda limit: limit.commits)
    if cluster.policy.name == "first_of" and exact and memoryless(cluster):
        # Who computes still is as if it had just begun.
        first = cluster.policy.per_version(cluster.workers)
        together = barrier_time(cluster.compute_laws[0], cluster.workers, first=first)
        return ThroughputTheory("order statistics", first / together, exact=True)
    return most


def _repairman_holds(cluster: Cluster) -> bool:
    exponential = isinstance(cluster.service, Exponential) and cluster.discipline == "fifo"
    return exponential and not cluster.separate_reads and think_time(cluster) is not None


#: A worker that starts in step with the others is out of it after about 0.25 / cv**2 computations; at least this much
#: of ``computations * cv**2`` leaves most of a trace to the stationary regime.
_OUT_OF_STEP = 1.0


class StalenessTheory(NamedTuple):
    """What is known about the staleness of a cluster's commits."""

    law: str  #: name of the closed form, ``""`` if there is none
    #: Over commits; None if only bounds are known. One that is conserved counts also what workers have read that are
    #: never served, as under ``lowest_rank`` at a saturated server.
    mean: float | None
    #: Smallest and largest possible mean; both equal to ``mean`` where that is known. Reads that are never served
    #: count, as there.
    mean_bounds: tuple[float, float]
    std: float | None = None  #: standard deviation over commits, without a queue
    queue_free: bool = False  #: whether the server takes no time, so that ``std`` is more than an approximation
    #: From whole numbers to their probabilities, where the whole law is known.
    probability: Callable[[np.ndarray], np.ndarray] | None = None
    #: Why the mean is what it is: ``"conserved"``, whatever the laws of the times, or ``"bounded clocks"``.
    mean_law: str = "conserved"


def staleness_theory(cluster: Cluster, computations: float = math.inf) -> StalenessTheory:
    """Return what theory says about the staleness of a cluster.

    With several servers that is the staleness of the parts of messages, at each server.

    ``computations``: commits per worker of the trace at hand. Laws of little spread leave the start in step only
    slowly, and the spread of the stationary regime is not stated for a trace that hardly reaches it.
    """
    require_cluster(cluster)
    if computations != math.inf:
        require_positive("computations", computations)
    n = cluster.workers
    if cluster.failures:  # how many reads are open changes
        return StalenessTheory("", None, (0.0, math.inf))
    if cluster.topology is not None:  # the reads are of the own last rows, and each row ages those of all others
        return StalenessTheory("", n - 1.0, (n - 1.0, n - 1.0))
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
    if max(journeys(cluster)) > 0:
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
    if not alike(cluster) or cluster.discipline != "fifo":
        return False
    laws = (cluster.compute, cluster.service, cluster.latency_up, cluster.latency_down)
    return all(isinstance(law, Constant) for law in laws)


def _geometric(rates: list[float], shift: int) -> dict[str, Any]:
    """Return law and spread of the staleness of exponential workers of these rates, without a queue."""
    n = len(rates)
    if len(set(rates)) == 1:
        probability = _shifted(lambda k: geometric_staleness(n, k), shift)
        return {"law": "geometric law", "std": math.sqrt(geometric_staleness_variance(n)), "probability": probability}
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
