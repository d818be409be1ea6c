"""What follows from the mean times of a cluster, whatever their laws: how long its workers are where, per commit."""

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Exponential, Law
from asyncsim.errors import InputError


def require_cluster(cluster: Cluster) -> None:
    """Raise InputError unless that is a cluster."""
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster = {cluster!r}: must be a Cluster, asyncsim.Cluster(workers=100, compute=1.0) say")


def alike(cluster: Cluster) -> bool:
    """Return whether all workers have one law and one window."""
    return isinstance(cluster.compute, Law) and isinstance(cluster.window, int)


def memoryless(cluster: Cluster) -> bool:
    """Return whether all workers compute for exponential times alike, and their messages take no time."""
    return isinstance(cluster.compute, Exponential) and cluster.window == 1 and journeys(cluster) == 0


def queues(cluster: Cluster) -> bool:
    """Return whether workers may have to queue, at the server or for a link."""
    served_in_turn = cluster.service.mean > 0 and cluster.discipline != "lock_free"
    return cluster.workers > 1 and (served_in_turn or cluster.shared_bandwidth)


def pulls(cluster: Cluster) -> bool:
    """Return whether workers read in a visit of its own before they write."""
    return cluster.separate_reads and cluster.protocol == "read_then_write"


def demand(cluster: Cluster) -> float:
    """Return how long (s) a commit's visits are served."""
    return cluster.service.mean * (2 if cluster.separate_reads else 1)


def computing(cluster: Cluster) -> list[float]:
    """Return how long (s) each worker computes for a commit."""
    return [law.mean * window for law, window in zip(cluster.compute_laws, cluster.windows, strict=True)]


def journeys(cluster: Cluster) -> float:
    """Return how long (s) a commit's messages travel, without waiting for a link."""
    both_ways = cluster.latency_up.mean + cluster.latency_down.mean
    return both_ways * (2 if pulls(cluster) else 1) + cluster.transfer_up + cluster.transfer_down


def away(cluster: Cluster) -> list[float]:
    """Return how long (s) each worker is away from the server for a commit."""
    return [one + journeys(cluster) for one in computing(cluster)]


def think_time(cluster: Cluster) -> float | None:
    """Return the mean time (s) per commit that a worker spends away from the server.

    None where it is not a sum of stated means: workers unlike each other, a link that they queue for, or a policy that
    lets them wait or stops them.
    """
    require_cluster(cluster)
    if not alike(cluster) or cluster.shared_bandwidth or cluster.policy.chooses_when_to_reply:
        return None
    return away(cluster)[0]
