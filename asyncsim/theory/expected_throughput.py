"""Which closed forms hold for a cluster: how many commits it should make, how many visits wait, and why.

Tables and figures draw these beside a measurement. Where no closed form holds they get the bounds of operational
analysis, which hold for all laws with these means.
"""

import math
from typing import NamedTuple

from asyncsim import theory
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Exponential, Law
from asyncsim.errors import InputError


class ThroughputTheory(NamedTuple):
    """What is known about the commits that are taken up, in the long run.

    Attributes
    ----------
    law : str
        ``"nobody waits"``, ``"machine repairman"``, ``"order statistics"`` (of those who finish first),
        ``"bounded clocks"``, or ``"saturation bound"``.
    commits : float
        Per second.
    exact : bool
        Whether that is the rate; else it is the largest possible one.
    """

    law: str
    commits: float
    exact: bool = False


class QueueTheory(NamedTuple):
    """What is known about the number of visits at the server.

    Attributes
    ----------
    law : str
        ``"machine repairman"``, or ``"saturation bound"``: no cluster with these mean times has fewer at its server.
    in_system : float
        Visits waiting or in service, mean over time.
    utilisation : float
        Share of time that the server is busy; the largest possible one with the bound.
    """

    law: str
    in_system: float
    utilisation: float


def throughput_theory(cluster: Cluster) -> ThroughputTheory | None:
    """Return what theory says about the commits of a cluster.

    None where computations are stopped of which the short ones are left, so that more may end than the mean time says;
    for barriers that is told by order statistics, of laws whose sums over a window are known.
    """
    policy = cluster.policy
    if policy.name == "barrier":
        return _barriers(cluster)
    if policy.stops_computations:
        return None
    all_count = policy.staleness_limit is None
    if _repairman_holds(cluster):
        state = theory.repairman(cluster.workers, _away(cluster)[0], cluster.service.mean)
        return ThroughputTheory("machine repairman", state.throughput, exact=all_count)
    bound = ThroughputTheory("saturation bound", _most(cluster))
    if policy.chooses_when_to_reply:
        return _with_waiting(cluster, bound)
    return bound if _queues(cluster) or not all_count else ThroughputTheory("nobody waits", bound.commits, exact=True)


def computing_theory(cluster: Cluster) -> float | None:
    """Return the part of the workers' time in which they compute or send, at the rate of `throughput_theory`.

    That is the measured ``computing_share`` of a trace in the long run, or where the rate is a bound the most that it
    can be. None where workers are unlike each other, unless none waits, or where some of what they compute is lost.
    """
    rate, policy = throughput_theory(cluster), cluster.policy
    lost = policy.staleness_limit is not None and policy.per_version(cluster.workers) < cluster.workers
    pulls = cluster.separate_reads and cluster.protocol == "read_then_write"
    if rate is None or lost or pulls or cluster.shared_bandwidth:
        return None
    busy = [computing + cluster.latency_up.mean + cluster.transfer_time for computing in _computing(cluster)]
    if rate.law == "nobody waits":
        cycles = [away + _demand(cluster) for away in _away(cluster)]
        return math.fsum(part / cycle for part, cycle in zip(busy, cycles, strict=True)) / cluster.workers
    return rate.commits * busy[0] / cluster.workers if _alike(cluster) else None


def queue_theory(cluster: Cluster) -> QueueTheory | None:
    """Return what theory says about the server's queue; None if the workers' think time is not known, or nobody queues.

    Exponential service, first come first served and alike workers: the machine repairman. Else the least mean number
    that the means allow, ``workers - think / (mean time between visits at best)``.
    """
    think = think_time(cluster)
    service = cluster.service.mean
    if think is None or service == 0 or cluster.discipline == "lock_free":
        return None
    if _repairman_holds(cluster):
        state = theory.repairman(cluster.workers, think, service)
        return QueueTheory("machine repairman", state.in_system, state.utilisation)
    throughput = theory.saturation_bound(cluster.workers, think, _demand(cluster))
    return QueueTheory("saturation bound", cluster.workers - think * throughput, _demand(cluster) * throughput)


def think_time(cluster: Cluster) -> float | None:
    """Return the mean time (s) per commit that a worker spends away from the server.

    None where it is not a sum of stated means: workers unlike each other, a link that they queue for, or a policy that
    lets them wait or stops them.
    """
    if not _alike(cluster) or cluster.shared_bandwidth or cluster.policy.chooses_when_to_reply:
        return None
    return _away(cluster)[0]


def _most(cluster: Cluster) -> float:
    """Return the largest rate of commits that the means allow, by operational analysis.

    No worker is quicker than without anybody else, under policies that keep all in step none is quicker than the
    slowest; no server and no shared link is more than busy.
    """
    cycles = [away + _demand(cluster) for away in _away(cluster)]
    in_step = cluster.policy.bound is not None or cluster.policy.name == "barrier"
    limits = [len(cycles) / max(cycles) if in_step else math.fsum(1 / cycle for cycle in cycles)]
    if cluster.discipline != "lock_free" and cluster.service.mean > 0:
        limits.append(1 / _demand(cluster))
    if cluster.shared_bandwidth:  # in either direction, as each commit has one message with parameters up and one down
        limits.append(1 / cluster.transfer_time)
    return min(limits)


def _barriers(cluster: Cluster) -> ThroughputTheory | None:
    """Return the rate of the first few of all workers, which start together; its limit where they may not quite.

    A version takes the time until they have finished, the journeys and one service. The last of several services, and
    messages of others that are under way, make it longer.
    """
    first = cluster.policy.per_version(cluster.workers)
    everyone = first == cluster.workers
    bound = ThroughputTheory("saturation bound", _most(cluster)) if everyone else None
    try:
        steps = zip(cluster.compute_laws, cluster.windows, strict=True)
        laws = [theory.sum_law(law, window) for law, window in steps]
    except InputError:
        return bound
    journeys = _journeys(cluster)
    steady = all(isinstance(law, Constant) for law in (cluster.latency_up, cluster.latency_down))
    if not steady and not everyone:  # of journeys, too, the short ones may be left
        journeys = 0.0
    together = theory.barrier_time(laws, first=first) + journeys
    commits = first / (together + _demand(cluster))
    exact = steady and cluster.service.mean == 0 and not cluster.shared_bandwidth and (everyone or journeys == 0)
    return ThroughputTheory("order statistics", commits if bound is None else min(commits, bound.commits), exact)


def memoryless_clocks(cluster: Cluster) -> theory.BoundedClocks | None:
    """Return what is known of workers with exponential times, alike and near the server, under bounded staleness.

    Their throughput is what nobody waiting at the server would leave of it. None if there are too many states.
    """
    if cluster.policy.bound is None or not _memoryless(cluster):
        return None
    try:
        return theory.bounded_clocks(cluster.workers, cluster.policy.bound)
    except InputError:
        return None


def _with_waiting(cluster: Cluster, bound: ThroughputTheory) -> ThroughputTheory:
    """Return the rate under a policy that lets workers wait, where memoryless ones tell it."""
    if not _memoryless(cluster):
        return bound
    n, law, exact = cluster.workers, cluster.compute_laws[0], not _queues(cluster)
    clocks = memoryless_clocks(cluster)
    if clocks is not None:
        commits = clocks.throughput * n / law.mean
        return ThroughputTheory("bounded clocks", min(commits, bound.commits), exact)
    if cluster.policy.name == "first_of" and exact:  # who computes still is as if it had just begun
        first = cluster.policy.per_version(n)
        return ThroughputTheory("order statistics", first / theory.barrier_time(law, n, first=first), exact)
    return bound


def _memoryless(cluster: Cluster) -> bool:
    exponential = isinstance(cluster.compute, Exponential) and cluster.window == 1
    return exponential and _journeys(cluster) == 0


def _repairman_holds(cluster: Cluster) -> bool:
    exponential = isinstance(cluster.service, Exponential) and cluster.discipline == "fifo"
    return exponential and not cluster.separate_reads and think_time(cluster) is not None


def _queues(cluster: Cluster) -> bool:
    """Return whether workers may have to queue, at the server or for a link."""
    return (cluster.service.mean > 0 and cluster.discipline != "lock_free") or cluster.shared_bandwidth


def _alike(cluster: Cluster) -> bool:
    return isinstance(cluster.compute, Law) and isinstance(cluster.window, int)


def _demand(cluster: Cluster) -> float:
    """Return how long (s) a commit's visits are served, on average."""
    return cluster.service.mean * (2 if cluster.separate_reads else 1)


def _computing(cluster: Cluster) -> list[float]:
    """Return how long (s) each worker computes per commit, on average."""
    return [law.mean * window for law, window in zip(cluster.compute_laws, cluster.windows, strict=True)]


def _journeys(cluster: Cluster) -> float:
    """Return how long (s) a commit's messages travel, on average and without waiting for a link."""
    both_ways = cluster.latency_up.mean + cluster.latency_down.mean
    pulls = cluster.separate_reads and cluster.protocol == "read_then_write"
    return both_ways * (2 if pulls else 1) + 2 * cluster.transfer_time


def _away(cluster: Cluster) -> list[float]:
    """Return how long (s) each worker is away from the server per commit, on average."""
    return [computing + _journeys(cluster) for computing in _computing(cluster)]
