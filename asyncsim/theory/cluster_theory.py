"""The closed forms that hold for a cluster: staleness, rate of commits, and visits that wait.

Tables and figures show these beside a measurement. Where no closed form holds they show the
conserved mean staleness and the bounds of operational analysis, which hold for all laws with these
means.
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
from asyncsim.theory.barriers import barrier_time, sum_law
from asyncsim.theory.queueing import (
    alike,
    alike_network,
    away,
    computing,
    demand,
    journeys,
    knee,
    queues,
    repairman,
    require_cluster,
    saturation_bound,
    think_time,
    waits_for_parts,
)
from asyncsim.theory.staleness import (
    first_staleness,
    renewal_staleness_variance,
)


class ThroughputTheory(NamedTuple):
    """The long-run rate of accepted commits, or a bound of it."""

    #: ``"nobody waits"``, ``"machine repairman"``, ``"order statistics"`` (of the first to finish;
    #: with ``", without the network"`` if only their computing counts), or ``"saturation bound"``.
    name: str
    commits: float  #: per second
    exact: bool = False  #: whether ``commits`` is the rate; else it is an upper bound
    #: The share of the workers' time spent computing at that rate, like a trace's
    #: ``computing_share``, or an upper bound of it. None for unlike workers that may wait and are
    #: not in step, and for policies that stop computations.
    computing: float | None = None


class QueueTheory(NamedTuple):
    """The mean number of visits at the server, or a bound of it."""

    #: ``"machine repairman"``, or ``"saturation bound"``: the least number for these mean times.
    name: str
    in_system: float  #: visits waiting or in service, mean over time
    utilisation: float  #: share of the time that the server is busy
    exact: bool = False  #: whether these are the means; else a lower and an upper bound


def throughput_theory(cluster: Cluster) -> ThroughputTheory | None:
    """Return the closed form, or the bound, for a cluster's rate of commits.

    None with failures. None if computations are stopped: the short ones survive, so that more may
    end than the mean time suggests. Barriers are the exception: order statistics (of laws with a
    known sum over a window) and the capacities of the server and of a shared link bound their rate.

    With several servers a message takes at least the mean time of one part, so that these rates are
    bounds.
    """
    require_cluster(cluster)
    if cluster.failures:
        return None
    if cluster.topology is not None:
        return _without_server(cluster)
    rate = _rate(cluster)
    return None if rate is None else rate._replace(computing=_computing_share(cluster, rate))


def queue_theory(cluster: Cluster) -> QueueTheory | None:
    """Return the closed form, or the bounds, for the server's queue.

    None without a known think time or a queue.

    Exponential service, first come first served and alike workers: the machine repairman. Else the
    least mean number that the means allow,
    ``workers - think / (mean time between visits at best)``.
    """
    think = think_time(cluster)
    service = cluster.service.mean
    if cluster.failures or think is None or service == 0 or cluster.discipline == "lock_free":
        return None
    if _repairman_holds(cluster):
        state = repairman(cluster.workers, think, service)
        return QueueTheory("machine repairman", state.in_system, state.utilisation, exact=True)
    rate = saturation_bound(cluster.workers, think, demand(cluster))
    return QueueTheory("saturation bound", cluster.workers - think * rate, demand(cluster) * rate)


def saturating_workers(cluster: Cluster) -> float | None:
    """Return the number of such workers from which the server is never idle, at the mean times.

    None if `think_time` is None, if the server takes no time, or if it serves any number at once.
    """
    think = think_time(cluster)
    if (
        cluster.failures
        or think is None
        or cluster.service.mean == 0
        or cluster.discipline == "lock_free"
    ):
        return None
    return knee(think, demand(cluster))


def _without_server(cluster: Cluster) -> ThroughputTheory:
    """Return the gradients per second without a server, exact if no worker waits.

    With ``c`` seconds of computing and messages of ``d`` seconds, ``overlap(s)`` starts round
    ``k + s + 1`` with messages of round ``k``: a round takes at least ``max(c, (c + d) / (s + 1))``
    (`neighbours`: ``s = 0``; mixed in beside the gradient, messages travel during the next
    computation, ``max(c, d)``).
    """
    assert cluster.topology is not None
    means, policy = computing(cluster), cluster.policy
    instant = takes_no_time(cluster.ways[0].latency) and not any(cluster.ways[0].transfer)
    if cluster.workers == 1 or policy == asynchronous() or (policy.name == "handshake" and instant):
        return ThroughputTheory(
            "nobody waits", sum(1 / mean for mean in means), exact=True, computing=1.0
        )
    if policy.name == "handshake":
        return ThroughputTheory("saturation bound", _handshakes(cluster, means))
    duration = max(means)
    receives = [
        set(edges.taker.tolist()) == set(range(cluster.workers))
        for edges in cluster.topology.edges(cluster.workers)
    ]
    if all(receives):  # else a worker may begin some rounds without a message
        ways = cluster.near_ways[0], cluster.ways[0]
        fastest = min(min(way.means) + min(way.transfer) for way in ways)
        fastest *= min([1.0, *cluster.topology.slowness(cluster.workers).values()])
        fastest += 0.0 if policy.mix == "beside" else min(means)
        duration = max(duration, fastest / ((policy.steps or 0) + 1))
    return ThroughputTheory(
        "saturation bound", cluster.workers / duration, computing=float(np.mean(means)) / duration
    )


def _handshakes(cluster: Cluster, computing: list[float]) -> float:
    """Return an upper bound of the rate of gradients with pairwise averages over a network.

    A worker computes, then exchanges: no rate exceeds ``1 / (computing + exchange)``. An exchange
    holds two of the ``n`` replicas, so ``2 sum(rate * exchange) <= n``. The bound is reached if the
    shortest exchanges have priority.
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
    """Return the mean transfer time (s) of each worker's exchange with a random neighbour."""
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
    if policy.stops_computations or policy.name == "trials":
        return None
    # Discarded messages are computed and served as well: the rate counts all, and bounds the
    # accepted ones.
    nothing_lost = policy.staleness_limit is None
    if _repairman_holds(cluster):
        state = repairman(cluster.workers, away(cluster)[0], cluster.service.mean)
        return ThroughputTheory("machine repairman", state.throughput, exact=nothing_lost)
    bound = ThroughputTheory("saturation bound", _highest_rate(cluster))
    delayed = policy.chooses_when_to_reply and cluster.workers > 1
    may_wait = delayed or queues(cluster) or waits_for_parts(cluster)
    return (
        bound if may_wait or not nothing_lost else bound._replace(name="nobody waits", exact=True)
    )


def _computing_share(cluster: Cluster, rate: ThroughputTheory) -> float | None:
    policy = cluster.policy
    stopped = policy.stops_computations and policy.per_version(cluster.workers) < cluster.workers
    if stopped:
        return None
    busy = computing(cluster)
    if alike(cluster) or _in_step(cluster):
        return rate.commits / cluster.workers * math.fsum(busy) / cluster.workers
    if rate.exact and not policy.chooses_when_to_reply:  # workers keep different paces
        cycles = [seconds + demand(cluster) for seconds in away(cluster)]
        return (
            math.fsum(part / cycle for part, cycle in zip(busy, cycles, strict=True))
            / cluster.workers
        )
    return None


def _in_step(cluster: Cluster) -> bool:
    """Return whether a policy keeps all workers at the same long-run rate of commits."""
    policy = cluster.policy
    everyone = policy.name == "barrier" and policy.per_version(cluster.workers) == cluster.workers
    return everyone or policy.bound is not None


def _highest_rate(cluster: Cluster) -> float:
    """Return the largest rate of commits that the means allow, by operational analysis.

    No worker is faster than alone, and no server or shared link is more than busy: the workers of a
    link reach at most the smaller of their total and of the link's rate. Under policies that
    keep all in step, no worker is faster than the slowest.
    """
    cycles = [seconds + demand(cluster) for seconds in away(cluster)]
    rate = _busiest_server(cluster)
    if _in_step(cluster):
        slowest = min(busiest / len(workers) for workers, busiest in _links(cluster))
        return min(rate, len(cycles) / max(cycles), len(cycles) * slowest)
    link_rates = [
        min(math.fsum(1 / cycles[i] for i in workers), busiest)
        for workers, busiest in _links(cluster)
    ]
    return min(rate, math.fsum(link_rates))


def _busiest_server(cluster: Cluster) -> float:
    """Return the rate of commits at which the server is always busy; infinite if it takes no
    time.
    """
    seconds = 0.0 if cluster.discipline == "lock_free" else demand(cluster)
    return 1 / seconds if seconds > 0 else math.inf


def _links(cluster: Cluster) -> list[tuple[range, float]]:
    """Return the workers that share each link, and their rate of commits at which it is always
    busy.

    Each commit has a message with parameters in either direction. Without shared links the rate is
    infinite.
    """
    if not cluster.shared_bandwidth:
        return [(range(cluster.workers), math.inf)]
    links = []
    sizes = [size for size in cluster.link_sizes if size]
    for first, last in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
        seconds = max(min(way.transfer[first:last]) for way in cluster.ways)
        links.append((range(first, last), 1 / seconds if seconds > 0 else math.inf))
    return links


def _barriers(cluster: Cluster) -> ThroughputTheory | None:
    """Return the rate of the first few of all workers, which start together, or an upper bound.

    A version takes the time until they have finished, the journeys and one service. Further
    services, and late messages of others, can make it longer, so that the rate is exact only in
    special cases.
    """
    first = cluster.policy.per_version(cluster.workers)
    everyone = first == cluster.workers
    # A barrier may keep the short computations only, but the server and a shared link handle all
    # messages.
    links = _links(cluster)
    busiest = min(_busiest_server(cluster), math.fsum(rate for _, rate in links))
    bound = _highest_rate(cluster) if everyone else busiest
    # At least the nearest worker's journeys, if distances differ: no version takes less.
    name, travelling, served = "order statistics", min(journeys(cluster)), demand(cluster)
    is_uniform = alike_network(cluster)
    steady = all(
        isinstance(law, Constant)
        for way in (*cluster.ways, *cluster.near_ways)
        for law in way.latency
    )
    in_turn = steady and cluster.discipline == "fifo" and cluster.protocol == "exchange"
    # Then no reply misses a version, so that every worker gets each.
    if cluster.shared_bandwidth and in_turn and is_uniform:
        bound = min(
            bound, first / max(len(workers) for workers, _ in links) / cluster.transfer_down
        )
    limits = [ThroughputTheory("saturation bound", bound)] if bound < math.inf else []
    # A version may take the short ones of random journeys, and of services at once.
    if not everyone:
        if not steady:
            travelling, name = 0.0, "order statistics, without the network"
        if cluster.discipline == "lock_free":
            # A message that came too late may be served at the instant of the version and see it by
            # a read that is under way: then its worker waits for no whole service.
            served = cluster.service.mean if isinstance(cluster.service, Constant) else 0.0
    try:
        laws = [
            sum_law(law, window)
            for law, window in zip(cluster.compute_laws, cluster.windows, strict=True)
        ]
    except InputError:
        return limits[0] if limits else None
    duration = barrier_time(laws, first=first)
    exact = is_uniform and steady and cluster.service.mean == 0 and not cluster.shared_bandwidth
    exact = exact and (everyone or travelling == 0)
    limits.insert(0, ThroughputTheory(name, first / (duration + travelling + served), exact))
    return min(limits, key=lambda limit: limit.commits)


def _repairman_holds(cluster: Cluster) -> bool:
    exponential = isinstance(cluster.service, Exponential) and cluster.discipline == "fifo"
    return exponential and not cluster.separate_reads and think_time(cluster) is not None


#: Workers that start in step lose step after about 0.25 / cv**2 computations; at least this much
#: of ``computations * cv**2`` leaves most of a trace to the stationary regime.
_OUT_OF_STEP = 1.0


class StalenessTheory(NamedTuple):
    """The staleness of a cluster's commits, as far as theory has it."""

    law: str  #: name of the closed form, ``""`` without one
    #: Over commits; None if only bounds hold. A conserved mean also counts reads that are never
    #: consumed, as under ``lowest_rank`` at a saturated server.
    mean: float | None
    #: Smallest and largest possible mean; both equal to ``mean`` if that is known. They count such
    #: reads, too.
    mean_bounds: tuple[float, float]
    std: float | None = None  #: standard deviation over commits, without a queue
    queue_free: bool = False  #: whether the server takes no time; else ``std`` is an approximation
    #: From whole numbers to their probabilities, if the whole law is known.
    probability: Callable[[np.ndarray], np.ndarray] | None = None


def staleness_theory(cluster: Cluster, computations: float = math.inf) -> StalenessTheory:
    """Return the closed forms for a cluster's staleness.

    With several servers it is the staleness of the parts of messages, at each server.

    ``computations``: commits per worker of the trace at hand. Laws of little spread lose step
    slowly, and the standard deviation of the stationary regime is left out for a trace that hardly
    reaches it.
    """
    require_cluster(cluster)
    if computations != math.inf:
        require_positive("computations", computations)
    n = cluster.workers
    if cluster.failures:  # the number of open reads changes
        return StalenessTheory("", None, (0.0, math.inf))
    if cluster.topology is not None:  # a worker reads its own row; each row ages others
        return StalenessTheory("", n - 1.0, (n - 1.0, n - 1.0))
    if cluster.policy != asynchronous():
        return _under_policy(cluster)
    if cluster.separate_reads:
        # The other workers' reads may be open or not; if the read precedes the write, the worker's
        # next one is open.
        bounds = (
            (0.0, n - 1.0) if cluster.protocol == "write_then_read" else (float(n), 2.0 * n - 1)
        )
        return StalenessTheory("", None, bounds)
    shift = 1 if cluster.protocol == "read_then_write" else 0
    mean = float(n - 1 + shift)
    conserved = StalenessTheory("", mean, (mean, mean))
    if _in_rotation(cluster):
        rotation = _shifted(lambda k: (k == n - 1).astype(np.float64), shift)
        return conserved._replace(law="round robin", std=0.0, queue_free=True, probability=rotation)
    if max(journeys(cluster)) > 0:
        return conserved
    rates = [1 / law.mean for law in cluster.compute_laws if isinstance(law, Exponential)]
    if len(rates) == n and cluster.window == 1 and cluster.service.mean == 0:
        return conserved._replace(**_geometric(rates, shift), queue_free=True)
    if alike(cluster):
        return conserved._replace(**_renewal(cluster, computations))
    return conserved


def _under_policy(cluster: Cluster) -> StalenessTheory:
    """Return the mean staleness of accepted messages, or its bounds, by conservation.

    Each version ages the open reads by one. The other workers have at most ``n - 1``, and workers
    that read before their own write have one more. Policies that discard add their limit as a
    bound.
    """
    n, policy = cluster.workers, cluster.policy
    if policy.name == "trials":  # no round ends while a computation is under way
        return StalenessTheory("", 0.0, (0.0, 0.0))
    upper = float(n - 1)
    if cluster.protocol == "read_then_write":
        upper = float(n if cluster.exclusive else 2 * n - 1)
    lower = 0.0
    if policy.grace is not None and policy.name == "buffered":
        # A window closes while all workers compute, and its version has ``count`` messages or more.
        upper = (upper if upper == n else upper + 1) / policy.per_version(n)
    elif policy.name == "buffered":
        upper /= policy.per_version(n)
        lower = n / policy.per_version(n) if cluster.protocol == "read_then_write" else 0.0
    elif policy.name == "first_of":
        upper = first_staleness(n, policy.per_version(n))
    if policy.staleness_limit is not None:
        upper = min(upper, policy.staleness_limit - 1.0)
    is_fixed = policy.name in ("buffered", "first_of") and policy.grace is None
    if is_fixed and not cluster.separate_reads:
        lower = upper
    return StalenessTheory("", upper if lower == upper else None, (lower, upper))


def _in_rotation(cluster: Cluster) -> bool:
    """Return whether workers take turns for ever: equal constant times and a fifo queue."""
    if not alike(cluster) or cluster.discipline != "fifo":
        return False
    laws = (cluster.compute, cluster.service, cluster.latency_up, cluster.latency_down)
    return all(isinstance(law, Constant) for law in laws)


def _geometric(rates: list[float], shift: int) -> dict[str, Any]:
    """Return the law of the staleness of exponential workers, without a queue."""
    # A commit is by worker ``i`` with the probability of its share, which ends its geometric wait.
    shares, counts = np.unique(np.array(rates) / sum(rates), return_counts=True)
    means = (1 - shares) / shares
    second_moment = float(counts * shares @ (means * (means + 1) + means**2))

    def mixture(k: np.ndarray) -> np.ndarray:
        probabilities = (1 - shares) ** np.maximum(k[..., None], 0) @ (counts * shares**2)
        return np.where(k >= 0, probabilities, 0.0)

    return {
        "law": f"geometric law{'' if len(shares) == 1 else ' of each worker'}",
        "std": math.sqrt(second_moment - (len(rates) - 1) ** 2),
        "probability": _shifted(mixture, shift),
    }


def _renewal(cluster: Cluster, computations: float) -> dict[str, Any]:
    """Return the law of alike workers' staleness, if a queue does not matter."""
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
    """Return whether a law has atoms, so that workers can meet at one instant again and again."""
    if isinstance(law, Mixture):
        return any(_on_lattice(part) for part in law.laws)
    return isinstance(law, Constant | Empirical)


def _shifted(
    probability: Callable[[np.ndarray], np.ndarray], shift: int
) -> Callable[[np.ndarray], np.ndarray]:
    return lambda k: probability(np.asarray(k) - shift)
