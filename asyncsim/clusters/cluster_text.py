"""Describe a cluster in one line, with the same words in tables and titles."""

from typing import Any

from asyncsim.base.calls import write
from asyncsim.base.console import counted
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.failures import Failure
from asyncsim.clusters.laws import Constant, Law, brief
from asyncsim.clusters.network import PerWorker, is_matrix
from asyncsim.clusters.policy import asynchronous
from asyncsim.clusters.rollouts import Rollouts

#: With more different laws, their number and the range of their means are printed.
_MOST_LAWS = 3


def describe(cluster: Cluster, attack: Any = None) -> str:
    """Describe a cluster in one line.

    For example ``100 workers, compute gamma(mean=1, cv=0.2), service 0.005 s, exchange, fifo``.
    Parts that take no time, a window of one and the asynchronous policy are left out. ``attack``:
    of the replays.
    """
    return ", ".join([*parts(cluster), *attack_text(attack)])


def attack_text(attack: Any) -> list[str]:
    """Name an attack, of its type or a text; empty without one."""
    return [f"attack {getattr(attack, 'text', attack)}"] if attack else []


def parts(cluster: Cluster) -> list[str]:
    """Return the parts of `describe`, for lines that break between them."""
    return [
        counted(cluster.workers, "worker"),
        f"compute {_compute(cluster)}",
        *([f"window {_window(cluster)}"] if cluster.window != 1 else []),
        *([f"service {brief(cluster.service)}"] if cluster.topology is None else []),
        *_network(cluster),
        *_server(cluster),
        *([str(cluster.policy)] if cluster.policy != asynchronous() else []),
        *map(_failure, cluster.failures),
        *([] if cluster.rollouts is None else _rollouts(cluster.rollouts)),
    ]


def _rollouts(rollouts: Rollouts) -> list[str]:
    return [
        f"{rollouts.slots} slots",
        f"samples {brief(rollouts.length)}",
        f"groups of {rollouts.group}",
        f"batches of {rollouts.batch}",
        str(rollouts.queue),
        f"versions taken up {rollouts.updates.replace('_', ' ').replace('start', 'at the start')}",
    ]


def _compute(cluster: Cluster) -> str:
    laws = [cluster.compute] if isinstance(cluster.compute, Law) else cluster.compute
    distinct = list(dict.fromkeys(laws))
    if len(distinct) == 1:
        return brief(distinct[0])
    if len(distinct) <= _MOST_LAWS:
        return " + ".join(f"{laws.count(law)} \u00d7 {brief(law)}" for law in distinct)
    means = [law.mean for law in distinct]
    return f"{len(distinct)} different laws of means {min(means):.3g} to {max(means):.3g} s"


def _window(cluster: Cluster) -> str:
    smallest, largest = min(cluster.windows), max(cluster.windows)
    return str(largest) if smallest == largest else f"{smallest} to {largest} by worker"


def _network(cluster: Cluster) -> list[str]:
    texts = _latency(cluster.latency, "latency")
    if cluster.message_bytes is not None:
        size = cluster.message_bytes
        sizes = (
            f"{size[0]:.4g} bytes up and {size[1]:.4g} down"
            if isinstance(size, tuple)
            else f"{size:.4g} bytes"
        )
        share = "shared" if cluster.shared_bandwidth else "each"
        texts.append(
            f"{sizes} at {_bandwidth(cluster.bandwidth)} {share}"
            if cluster.bandwidth is not None
            else sizes
        )
    if cluster.sites is not None:
        far = _latency(cluster.far_latency, "latency") if cluster.far_latency is not None else []
        far += [_bandwidth(cluster.far_bandwidth)] if cluster.far_bandwidth is not None else []
        sites = " + ".join(map(str, cluster.sites))
        sites += f" with the server at site {cluster.server_site}" if cluster.server_site else ""
        texts.append(f"sites of {sites}{', between them ' + ' and '.join(far) if far else ''}")
        texts += (
            [f"beyond its site at every visit {cluster.far_every}"] if cluster.far_every > 1 else []
        )
    return texts


def _latency(latency: Any, name: str) -> list[str]:
    if isinstance(latency, PerWorker) or is_matrix(latency):
        means = [law.mean for law in _entries(latency)]
        extremes = f"{min(means):.3g} to {max(means):.3g} s"
        if is_matrix(latency):
            return [f"{name} {extremes} by pair"]
        return [f"{name} by worker, means {extremes}"]
    if isinstance(latency, tuple):
        return [f"{name} {brief(latency[0])} up and {brief(latency[1])} down"]
    return [f"{name} {brief(latency)} each way"] if latency != Constant(0.0) else []


def _entries(values: Any) -> list[Any]:
    """List the entries of a value for each worker, or of a matrix but for its diagonal."""
    rows = values.values if isinstance(values, PerWorker) else values
    return [entry for row in rows for entry in (row if isinstance(row, tuple) else (row,)) if entry]


def _bandwidth(bandwidth: Any) -> str:
    if isinstance(bandwidth, PerWorker) or is_matrix(bandwidth):
        speeds = _entries(bandwidth)
        by = "pair" if is_matrix(bandwidth) else "worker,"
        return f"{min(speeds):.4g} to {max(speeds):.4g} bytes/s by {by}"
    if isinstance(bandwidth, tuple):
        return f"{bandwidth[0]:.4g} bytes/s up and {bandwidth[1]:.4g} down"
    return f"{bandwidth:.4g} bytes/s"


def _server(cluster: Cluster) -> list[str]:
    if cluster.topology is not None:
        return [f"no server, {cluster.topology!r}"]
    shards = [f"{cluster.server_count} servers"] if cluster.server_count > 1 else []
    blocks = [f"reads in {cluster.read_blocks} blocks"] if cluster.read_blocks > 1 else []
    return [*shards, _protocol(cluster), f"served {cluster.discipline}", *blocks]


def _protocol(cluster: Cluster) -> str:
    if cluster.protocol == "read_then_write":
        return f"{cluster.protocol} in {'one visit' if cluster.exclusive else 'two visits'}"
    return cluster.protocol


def _failure(failure: Failure) -> str:
    text = str(failure)
    for law in (failure.every, failure.lasts):
        text = text if law is None else text.replace(str(law), brief(law))
    for name in ("checkpoint", "saving"):
        seconds = getattr(failure, name)
        if isinstance(seconds, float):
            rounded = float(f"{seconds:.3g}")
            text = text.replace(f"{name}={write(seconds)}", f"{name}={rounded:g} s")
    return text
