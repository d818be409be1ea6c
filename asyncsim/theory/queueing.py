"""The parameter server as a queue, and the workers' times per commit, from mean times alone."""

from typing import NamedTuple

import numpy as np

from asyncsim.base.errors import InputError, require_count, require_nonnegative, require_positive
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Law


class Repairman(NamedTuple):
    """The stationary state of a closed queue with one server."""

    throughput: float  #: visits per second
    in_system: float  #: mean number of visits waiting or in service
    response: float  #: mean time from arrival to the end of service, seconds
    utilisation: float  #: share of the time that the server is busy


def repairman(workers: int, think: float, service: float) -> Repairman:
    """Return the stationary state of the machine-repairman queue, by exact mean-value analysis.

    A visit of the ``k``-th worker finds the queue that ``k - 1`` workers would leave::

        response = service * (1 + in_system)
        throughput = k / (think + response)
        in_system = throughput * response

    Assumes exponential service, first come first served; the law of the think time does not matter.

    ``think``: mean time from one visit's end to the next arrival, seconds: computation and network.
    ``service``: mean time that the server is busy per visit, seconds.

    References
    ----------
    Reiser and Lavenberg 1980, J. ACM 27, 313. With exponential think times this is M/M/1//N.
    """
    workers, think, service = _checked(workers, think, service)
    in_system = throughput = response = 0.0
    for k in range(1, workers + 1):
        response = service * (1 + in_system)
        throughput = k / (think + response)
        in_system = throughput * response
    return Repairman(throughput, in_system, response, throughput * service)


def saturation_bound(workers: int, think: float, service: float) -> float:
    """Return the largest possible throughput, visits per second:
    ``min(N / (think + service), 1 / service)``.

    Holds for any laws with these means; constant think and service times reach it. (Asymptotic
    bounds of operational analysis: Denning and Buzen 1978, ACM Comput. Surv. 10, 225.)
    """
    workers, think, service = _checked(workers, think, service)
    unqueued = workers / (think + service)
    return min(unqueued, 1 / service) if service > 0 else unqueued


def knee(think: float, service: float) -> float:
    """Return the number of workers at which the server saturates: ``1 + think / service``.

    Also the largest possible speed-up over one worker. A worker that visits twice per window counts
    the sum of its two services.
    """
    return 1 + require_nonnegative("think", think, "seconds") / require_positive(
        "service", service, "seconds"
    )


def _checked(workers: int, think: float, service: float) -> tuple[int, float, float]:
    workers = require_count("workers", workers)
    think = require_nonnegative("think", think, "seconds")
    service = require_nonnegative("service", service, "seconds")
    if think + service == 0:
        raise InputError("think = service = 0: one of them must be above zero (seconds)")
    return workers, think, service


def require_cluster(cluster: Cluster) -> None:
    """Check the type of a cluster."""
    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster = {cluster!r}: must be a Cluster, such as asyncsim.Cluster(workers=100)"
        )


def alike(cluster: Cluster) -> bool:
    """Return whether all workers have one law and one window, and are equally far from the
    server.
    """
    return (
        isinstance(cluster.compute, Law)
        and isinstance(cluster.window, int)
        and alike_network(cluster)
    )


def alike_network(cluster: Cluster) -> bool:
    """Return whether all workers' messages, and all visits, have the same latency and bandwidth."""
    return cluster.far_every == 1 and all(way.alike for way in cluster.ways)


def queues(cluster: Cluster) -> bool:
    """Return whether workers may have to queue, at the server or for a link."""
    served_in_turn = cluster.service.mean > 0 and cluster.discipline != "lock_free"
    return cluster.workers > 1 and (served_in_turn or cluster.shared_bandwidth)


def waits_for_parts(cluster: Cluster) -> bool:
    """Return whether the parts of a message at several servers may take different times."""
    laws = (
        cluster.service,
        *(law for way in (*cluster.ways, *cluster.near_ways) for law in way.latency),
    )
    return cluster.server_count > 1 and not all(isinstance(law, Constant) for law in laws)


def pulls(cluster: Cluster) -> bool:
    """Return whether workers read in a separate visit before they write."""
    return cluster.separate_reads and cluster.protocol == "read_then_write"


def demand(cluster: Cluster) -> float:
    """Return the service time (s) of a commit's visits."""
    return cluster.service.mean * (2 if cluster.separate_reads else 1)


def computing(cluster: Cluster) -> list[float]:
    """Return each worker's mean computing time (s) for a commit."""
    return [
        law.mean * window for law, window in zip(cluster.compute_laws, cluster.windows, strict=True)
    ]


def journeys(cluster: Cluster) -> list[float]:
    """Return the mean transfer time (s) of each worker's messages for a commit, without queues."""
    far_share, trips = 1 / cluster.far_every, 2 if pulls(cluster) else 1
    seconds = np.zeros(cluster.workers)
    for share, ways in ((far_share, cluster.ways), (1 - far_share, cluster.near_ways)):
        for way in ways:
            seconds += share * (np.array(way.means) * trips + np.array(way.transfer))
    return seconds.tolist()


def away(cluster: Cluster) -> list[float]:
    """Return each worker's mean time (s) away from the server for a commit."""
    return [
        compute + travel
        for compute, travel in zip(computing(cluster), journeys(cluster), strict=True)
    ]


def think_time(cluster: Cluster) -> float | None:
    """Return a worker's mean time (s) away from the server for a commit, the same for all workers.

    None if it is not a sum of stated means: with unlike workers, a shared link, or a policy that
    makes workers wait or stops them. None without a server, and with several: workers wait for the
    last of them.
    """
    require_cluster(cluster)
    if (
        cluster.topology is not None
        or cluster.server_count > 1
        or not alike(cluster)
        or cluster.shared_bandwidth
        or cluster.policy.chooses_when_to_reply
    ):
        return None
    return away(cluster)[0]
