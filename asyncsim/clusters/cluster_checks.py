"""The checks of a cluster's entries against each other.

Each raises InputError, which names the entry, its value and the remedy.
"""

import math
import warnings
from dataclasses import fields
from typing import Any

import numpy as np

from asyncsim.base.calls import form_of
from asyncsim.base.errors import InputError, require_count, require_memory, require_number
from asyncsim.clusters.laws import Constant
from asyncsim.clusters.network import PerWorker, SlowLinkWarning, as_text, is_matrix
from asyncsim.clusters.policy import POLICIES, WITHOUT_SERVER
from asyncsim.clusters.topologies import Topology, is_symmetric
from asyncsim.clusters.workers import WORKER_BYTES

#: Entries that only a cluster with a server has; an all-reduce refuses them as well.
_OF_A_SERVER = (
    "service",
    "shared_bandwidth",
    "protocol",
    "exclusive",
    "discipline",
    "read_blocks",
    "far_every",
    "servers",
)
#: A message that takes longer than this many computations may have a bandwidth in another unit.
_SLOW = 100


def require_sites(cluster: Any, name: str) -> None:
    """Check that the cluster has sites, for an entry between them."""
    if cluster.sites is None:
        raise InputError(
            f"{name} = {getattr(cluster, name)}: is between sites, and there is one; give sites, "
            "[16, 16] say"
        )


def check_sites(cluster: Any) -> None:
    """Check the sites and the ways between them."""
    far = cluster.far_every > 1
    for name in ("far_latency", "far_bandwidth"):
        if is_matrix(getattr(cluster, name)) and (far or cluster.topology is not None):
            raise InputError(
                f"{name} = a matrix of {len(cluster.sites)} sites: needs a server that each visit "
                "reaches; give one number for all pairs, or leave topology and far_every out"
            )
    if far and (cluster.sites is None or cluster.shared_bandwidth):
        raise InputError(
            f"far_every = {cluster.far_every}: needs sites, [16, 16] say, and no shared_bandwidth"
        )


def check_cluster(cluster: Any) -> None:
    """Check the entries of a cluster against each other."""
    _check_bandwidth(cluster)
    _check_visits(cluster)
    _check_policy(cluster)
    if cluster.rollouts is not None:
        _check_rollouts(cluster)
    _check_failures(cluster)
    if cluster.topology is not None:
        _check_topology(cluster, cluster.topology)
    if cluster.server_count > 1:
        _check_shards(cluster)
    _question_bandwidth(cluster)


def _check_bandwidth(cluster: Any) -> None:
    """Check that bandwidths and the size of messages come together."""
    size = cluster.message_bytes
    speeds = (cluster.bandwidth, cluster.far_bandwidth)
    if size is not None and speeds == (None, None):
        raise InputError(
            f"message_bytes = {size!r}: says nothing without bandwidth; give both or neither"
        )
    for name, speed in zip(("bandwidth", "far_bandwidth"), speeds, strict=True):
        if speed is not None and size is None:
            raise InputError(
                f"{name} = {speed!r}: says nothing without message_bytes; give both or neither"
            )
    if speeds == (None, None) and cluster.shared_bandwidth:
        raise InputError(
            "shared_bandwidth = True: there is no bandwidth to share; give bandwidth and "
            "message_bytes"
        )


def _question_bandwidth(cluster: Any) -> None:
    """Warn of messages that take far longer than a computation."""
    if cluster.message_bytes is None:
        return
    slowest = max(max(way.transfer) for way in cluster.ways)
    steps = zip(cluster.compute_laws, cluster.windows, strict=True)
    computing = math.fsum(law.mean * window for law, window in steps) / cluster.workers
    if slowest > _SLOW * computing:
        warnings.warn(
            f"bandwidth: one message takes {slowest:.4g} s, a computation {computing:.4g} s; check "
            "the unit, bytes/s",
            SlowLinkWarning,
            stacklevel=5,
        )


def _check_visits(cluster: Any) -> None:
    """Check that a visit can be torn, or split in two."""
    is_torn = (cluster.protocol, cluster.discipline) == ("write_then_read", "lock_free")
    if cluster.read_blocks > 1 and not is_torn:
        raise InputError(
            f"read_blocks = {cluster.read_blocks}: no worker commits during a read, unless "
            "protocol is 'write_then_read' and discipline 'lock_free'; give these two, or leave "
            "read_blocks out"
        )
    if not cluster.exclusive and cluster.protocol == "exchange":
        raise InputError(
            "exclusive = False: an exchange is always one atomic visit; leave exclusive out, or "
            "choose protocol 'read_then_write'"
        )


def _check_policy(cluster: Any) -> None:
    """Check that the policy fits the visits and the number of workers."""
    policy, workers = cluster.policy, cluster.workers
    if policy.name in WITHOUT_SERVER[1:] and cluster.topology is None:
        raise InputError(
            f"policy = {policy}: is for clusters without a server; give a topology, such as "
            "asyncsim.topologies.ring(), or another policy, or run the study gossip"
        )
    if cluster.protocol == "read_then_write" and policy.chooses_when_to_reply:
        raise InputError(
            f"policy = {policy}: the server chooses when to answer a read, but with protocol "
            "'read_then_write' a worker reads before the server has its message; choose the "
            "protocol 'exchange' or 'write_then_read'"
        )
    if policy.collective is not None:
        _check_collective(cluster)
    for parameter in ("time", "count"):
        value = getattr(policy, parameter)
        if isinstance(value, tuple) and len(value) != workers:
            raise InputError(
                f"policy = {policy}: {parameter} has {len(value)} entries, and there are {workers} "
                "workers; give a number for all, or one per worker"
            )
    is_filled = policy.waits_for_version or policy.name == "buckets"
    if is_filled and policy.per_version(workers) > workers:
        problem = (
            f"a version needs messages of {policy.per_version(workers)} workers"
            if policy.waits_for_version
            else "some buckets would have no worker"
        )
        raise InputError(
            f"policy = {policy}: {problem}, and there are {workers}; "
            f"write {form_of(POLICIES[policy.name])} with a count of at most {workers}"
        )


def _check_collective(cluster: Any) -> None:
    """Check that an all-reduce has no server, and that its time is known."""
    subject = f"policy = {cluster.policy}"
    _require_defaults(cluster, _OF_A_SERVER, f"{subject}: an all-reduce has no server")
    if isinstance(cluster.message_bytes, tuple):
        raise InputError(
            f"message_bytes = {_quoted(cluster.message_bytes)}: {subject}: the sum is as large as "
            "each message; give one size (sums of compressed messages are not compressed)"
        )
    for name in ("latency", "bandwidth", "far_latency", "far_bandwidth"):
        value, kind = getattr(cluster, name), Constant if "latency" in name else float
        pairs = np.ravel(value).tolist() if is_matrix(value) else [value]
        if not all(isinstance(pair, kind | None) or pair == 0.0 for pair in pairs):
            raise InputError(
                f"{name} = {as_text(value)}: {subject}: the time of an all-reduce is known for one "
                "constant latency and one bandwidth; give a number"
            )
    # Raises an error where the nodes do not fit.
    require_number("collective_time", cluster.collective_time)


def _check_rollouts(cluster: Any) -> None:
    """Check that the learners' server makes a version of each batch."""
    if cluster.server_count > 1:
        raise InputError(
            f"servers = {cluster.server_count}: with rollouts one server publishes versions; leave "
            "servers out"
        )
    if cluster.topology is not None:
        raise InputError(
            f"rollouts: a topology, {cluster.topology}, has no server that publishes versions; "
            "leave topology or rollouts out"
        )
    if cluster.policy.name != "asynchronous":
        raise InputError(
            f"policy = {cluster.policy}: with rollouts every update makes a version; leave policy "
            "out"
        )


def _check_failures(cluster: Any) -> None:
    """Check that restored checkpoints fit the reads, the policy and, of a job, its rounds."""
    restores = [failure for failure in cluster.failures if failure.restores]
    if restores and cluster.read_blocks > 1:
        raise InputError(
            f"read_blocks = {cluster.read_blocks}: with an outage, a read would be torn between "
            "lost and restored versions; leave one of them out"
        )
    if restores and cluster.policy.completes_between_messages:
        raise InputError(
            f"failures = {restores[0]}: a server that is down cannot complete a version at the "
            f"times of policy = {cluster.policy}; leave the outage out, or choose another policy"
        )
    for failure in (failure for failure in restores if failure.is_of_job):
        subject = f"failures = {failure}: ends a round of all workers"
        if cluster.topology is not None or cluster.policy.name != "barrier":
            raise InputError(f"{subject}; choose policy = barrier(), or crash workers")
        for name, usual in (("protocol", "exchange"), ("discipline", "fifo"), ("rollouts", None)):
            if (value := getattr(cluster, name)) != usual:
                raise InputError(
                    f"{subject}, and {name} = {value!r} is not simulated with it; leave {name} out"
                )


def as_servers(argument: str, servers: Any) -> int | tuple[str, ...]:
    """Check and return a number of servers, or the names of the tensors of each."""
    if not isinstance(servers, list | tuple):
        return require_count(argument, servers)
    for group in servers:
        if not isinstance(group, str) or not group.strip():
            raise InputError(
                f"servers: {group!r} names no tensors; give texts such as ['0', '1,2'], or a number"
            )
    if not servers:
        raise InputError("servers: names no group of tensors; give one or more, or a number")
    if len(set(servers)) < len(servers):
        raise InputError(f"servers = {servers!r}: one group comes twice; give each once")
    return tuple(servers)


def _check_shards(cluster: Any) -> None:
    """Check that the policy and the failures are simulated with several servers."""
    servers, policy = cluster.server_count, cluster.policy
    require_memory(
        f"servers = {servers}", "a cluster of so many", cluster.workers * servers * WORKER_BYTES
    )
    if policy.name == "first_of":
        raise InputError(
            f"policy = {policy}: with servers = {servers} all workers may wait for each other, as "
            "each server holds others; choose barrier() or buffered(count), or servers = 1"
        )
    if policy.completes_between_messages:
        raise InputError(
            f"policy = {policy}: completes versions between messages, which is not simulated with "
            f"servers = {servers}; choose barrier() or buffered(count), or servers = 1"
        )
    waits_for_all = (
        policy.name == "barrier" and policy.per_version(cluster.workers) == cluster.workers
    )
    if policy.stops_computations and not waits_for_all:
        raise InputError(
            f"policy = {policy}: stops computations whose read is too stale, and with servers = "
            f"{servers} a computation has a read of each; choose barrier() or "
            "discard_stale(limit), or servers = 1"
        )
    why, instead = "not simulated with several servers", ", or give servers = 1"
    _require_defaults(cluster, ("failures", "read_blocks"), why, instead)


def _check_topology(cluster: Any, topology: Topology) -> None:
    """Check that there is no entry of a server, and that the graph fits the cluster."""
    why = f"with topology = {topology!r} there is no server"
    _require_defaults(cluster, _OF_A_SERVER, why)
    for name in ("latency", "bandwidth", "message_bytes", "far_latency", "far_bandwidth"):
        value = getattr(cluster, name)
        entries = value.values if isinstance(value, PerWorker) else (value,)
        if any(isinstance(entry, tuple) for entry in entries):
            raise InputError(
                f"{name} = {_quoted(value)}: {why}, and an edge has one way; give one and not a "
                "pair"
            )
    outages = [failure for failure in cluster.failures if failure.restores]
    if outages:
        raise InputError(
            f"failures = {outages[0]}: is a server's, and {why}; leave it out, or let workers crash"
        )
    policy = cluster.policy
    if policy.name not in WITHOUT_SERVER:
        usable = ", ".join(form_of(POLICIES[name]) for name in WITHOUT_SERVER)
        raise InputError(f"policy = {policy}: is a server's, and {why}; choose from {usable}")
    topology.edges(cluster.workers)  # raises an error if the graph does not fit
    takes_no_time = cluster.latency == Constant(0.0) and cluster.bandwidth is None
    if topology.slowness(cluster.workers) and takes_no_time and cluster.sites is None:
        raise InputError(
            f"topology = {topology!r}: its links take no time, so that none can be slow; give "
            "latency, or bandwidth and message_bytes"
        )
    if policy.name == "handshake" and not is_symmetric(topology, cluster.workers):
        raise InputError(
            f"policy = {policy}: two workers average in pairs, and topology = {topology!r} is "
            "directed; choose an undirected one, such as ring() or complete()"
        )


def _require_defaults(cluster: Any, names: tuple[str, ...], why: str, instead: str = "") -> None:
    """Check that some entries have their defaults; ``why`` and ``instead`` explain the error."""
    for entry in fields(cluster):
        value = getattr(cluster, entry.name)
        if entry.name in names and value != entry.default:
            raise InputError(
                f"{entry.name} = {_quoted(value)}: {why}; leave {entry.name} out{instead}"
            )


def _quoted(value: Any) -> str:
    """Format an entry's value as the user would write it."""
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return repr(value) if isinstance(value, str) else str(value)
