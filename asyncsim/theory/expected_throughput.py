"""Which closed forms hold for a cluster: how many commits it should make, how many visits wait, and why.

Tables and figures draw these beside a measurement. Where no closed form holds they get the bounds of operational
analysis, which hold for all laws with these means.
"""

import math
from typing import NamedTuple

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Exponential
from asyncsim.errors import InputError
from asyncsim.theory.barriers import BoundedClocks, barrier_time, bounded_clocks, sum_law
from asyncsim.theory.queueing import (
    alike,
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
)


class ThroughputTheory(NamedTuple):
    """What is known about the commits that are taken up, in the long run.

    Attributes
    ----------
    name : str
        ``"nobody waits"``, ``"machine repairman"``, ``"order statistics"`` (of those who finish first; with
        ``", without the network"`` where only their computing counts), ``"bounded clocks"``, or ``"saturation bound"``.
    commits : float
        Per second.
    exact : bool
        Whether that is the rate; else it is the largest possible one.
    computing : float or None
        The part of the workers' time in which they compute at that rate: the ``computing_share`` of a trace, or the
        most that it can be. None where workers that are unlike each other may wait and are not kept in step, and where
        computations are stopped.
    """

    name: str
    commits: float
    exact: bool = False
    computing: float | None = None


class QueueTheory(NamedTuple):
    """What is known about the number of visits at the server.

    Attributes
    ----------
    name : str
        ``"machine repairman"``, or ``"saturation bound"``: no cluster with these mean times has fewer at its server.
    in_system : float
        Visits waiting or in service, mean over time.
    utilisation : float
        Share of time that the server is busy.
    exact : bool
        Whether these are the means; else the least possible number, and the largest possible share.
    """

    name: str
    in_system: float
    utilisation: float
    exact: bool = False


def throughput_theory(cluster: Cluster) -> ThroughputTheory | None:
    """Return what theory says about the commits of a cluster.

    None where computations are stopped of which the short ones are left, so that more may end than the mean time says;
    for barriers that is told by order statistics, of laws whose sums over a window are known, and by what the server
    and a shared link can take.
    """
    require_cluster(cluster)
    rate = _rate(cluster)
    return None if rate is None else rate._replace(computing=_computing_share(cluster, rate))


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
        state = repairman(cluster.workers, think, service)
        return QueueTheory("machine repairman", state.in_system, state.utilisation, exact=True)
    most = saturation_bound(cluster.workers, think, demand(cluster))
    return QueueTheory("saturation bound", cluster.workers - think * most, demand(cluster) * most)


def saturating_workers(cluster: Cluster) -> float | None:
    """Return from how many workers like these on the server is never idle, at the mean times; None as `think_time`.

    Also None if the server takes no time, or lets any number in at once.
    """
    think = think_time(cluster)
    if think is None or cluster.service.mean == 0 or cluster.discipline == "lock_free":
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
    return most if queues(cluster) or not nothing_lost else most._replace(name="nobody waits", exact=True)


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

    No worker is quicker than without anybody else, under policies that keep all in step none is quicker than the
    slowest; no server and no shared link is more than busy.
    """
    cycles = [one + demand(cluster) for one in away(cluster)]
    own = len(cycles) / max(cycles) if _in_step(cluster) else math.fsum(1 / cycle for cycle in cycles)
    return min(own, _busiest(cluster))


def _busiest(cluster: Cluster) -> float:
    """Return the rate of commits at which the server or a shared link is always busy; infinite without either."""
    seconds = [0.0]
    if cluster.discipline != "lock_free":
        seconds.append(demand(cluster))
    if cluster.shared_bandwidth:  # in either direction, as each commit has one message with parameters up and one down
        seconds += [cluster.transfer_up, cluster.transfer_down]
    return 1 / max(seconds) if max(seconds) > 0 else math.inf


def _barriers(cluster: Cluster) -> ThroughputTheory | None:
    """Return the rate of the first few of all workers, which start together; its limit where they may not quite.

    A version takes the time until they have finished, the journeys and one service. The last of several services, and
    messages of others that are under way, make it longer.
    """
    first = cluster.policy.per_version(cluster.workers)
    everyone = first == cluster.workers
    # Of the workers' own times the short ones may be left, the server and a shared link see to all that is taken up.
    most = _highest_rate(cluster) if everyone else _busiest(cluster)
    name, travelling, served = "order statistics", journeys(cluster), demand(cluster)
    steady = all(isinstance(law, Constant) for law in (cluster.latency_up, cluster.latency_down))
    in_turn = steady and cluster.discipline == "fifo" and cluster.protocol == "exchange"
    if cluster.shared_bandwidth and in_turn:  # nobody misses a version on the way, so that everyone gets each
        most = min(most, first / cluster.workers / cluster.transfer_down)
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
    exact = steady and cluster.service.mean == 0 and not cluster.shared_bandwidth and (everyone or travelling == 0)
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
