"""What a cluster is, in one line: the same words in tables and in titles."""

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Law
from asyncsim.clusters.policy import asynchronous
from asyncsim.wording import counted

#: More different laws than these are told by their number and their means.
_MOST_LAWS = 3
#: A law written longer than this is told by its mean.
_LONGEST_LAW = 40


def describe(cluster: Cluster) -> str:
    """Return what a cluster is: ``100 workers, compute gamma(mean=1, cv=0.2), service 0.005 s, exchange, fifo``.

    What takes no time and what is one only (the network, the window) is left out, and the asynchronous policy.
    """
    return ", ".join(parts(cluster))


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
    least, most = min(cluster.windows), max(cluster.windows)
    return str(most) if least == most else f"{least} to {most} by worker"


def _network(cluster: Cluster) -> list[str]:
    up, down = cluster.latency_up, cluster.latency_down
    found = []
    if up != down:
        found.append(f"latency {brief(up)} up and {brief(down)} down")
    elif up != Constant(0.0):
        found.append(f"latency {brief(up)} each way")
    if cluster.bandwidth is not None and cluster.message_bytes is not None:
        share = "shared" if cluster.shared_bandwidth else "each"
        size = cluster.message_bytes
        sizes = f"{size[0]:.4g} bytes up and {size[1]:.4g} down" if isinstance(size, tuple) else f"{size:.4g} bytes"
        found.append(f"{sizes} at {cluster.bandwidth:.4g} bytes/s {share}")
    return found


def _server(cluster: Cluster) -> list[str]:
    if cluster.topology is not None:
        return [f"no server, {cluster.topology!r}"]
    blocks = [f"reads in {cluster.read_blocks} blocks"] if cluster.read_blocks > 1 else []
    return [_protocol(cluster), f"served {cluster.discipline}", *blocks]


def _protocol(cluster: Cluster) -> str:
    if cluster.protocol == "read_then_write":
        return f"{cluster.protocol} in {'one visit' if cluster.exclusive else 'two visits'}"
    return cluster.protocol


def brief(law: Law) -> str:
    """Return a law in a few words: as it is written, or if that is long its family and its mean."""
    if isinstance(law, Constant):
        return f"{law.value:g} s"
    text = str(law)
    return text if len(text) <= _LONGEST_LAW else f"{text.partition('(')[0]}(...) of mean {law.mean:.3g} s"
