"""The cluster: how long things take, who queues where, and what the server admits."""

import functools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim.base.calls import form_of
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_memory,
    require_number,
    require_switch,
)
from asyncsim.clusters.collectives import NETWORKS, collective_time, exposed_time
from asyncsim.clusters.failures import Failure, as_failures
from asyncsim.clusters.laws import Constant, Law, LawLike, as_law
from asyncsim.clusters.network import (
    PerWorker,
    SizeLike,
    Way,
    as_bandwidth,
    as_latency,
    as_message_bytes,
    as_sites,
    as_text,
    directed,
    with_mean,
)
from asyncsim.clusters.policy import POLICIES, WITHOUT_SERVER, Policy, as_policy, asynchronous
from asyncsim.clusters.rollouts import Rollouts, as_rollouts
from asyncsim.clusters.topologies import Topology, as_topology, is_symmetric
from asyncsim.clusters.workers import as_compute, as_window

PROTOCOLS = ("exchange", "read_then_write", "write_then_read")
DISCIPLINES = ("fifo", "lowest_rank", "random", "lock_free")
_NO_TIME = Constant(0.0)
_ASYNCHRONOUS = asynchronous()
#: What there is also without a server; all else must have its default there.
_WITHOUT_SERVER = (
    *("workers", "compute", "latency", "bandwidth", "message_bytes", "window", "policy", "topology"),
    *("sites", "far_latency", "far_bandwidth", "failures"),
)
#: What `to_dict` leaves out where it is not given: older versions did not have it.
_LATER = (
    *("failures", "topology", "sites", "far_latency", "far_bandwidth", "far_every", "servers"),
    "rollouts",
)
#: Computations that a message may take before it is asked whether its bandwidth is meant.
_SLOW = 100
#: Memory (bytes) that a simulation needs for a worker at the least: the durations drawn ahead.
WORKER_BYTES = 1_000


@dataclass(frozen=True)
class Cluster:
    """Workers, one parameter server, and the network between them; or with a topology, workers and no server.

    Laws may be given as a law, a number of seconds or a text such as ``"gamma(mean=1, cv=0.2)"``.

    Attributes
    ----------
    workers : int
        How many compute at once, each with one job in flight.
    compute : Law or tuple of Law
        Seconds per local step; a list or an array gives one law per worker.
    service : Law
        Seconds the server is busy per visit.
    latency : Law, tuple of two Law, or PerWorker
        Seconds one way; a pair gives the way up (to the server) and the way down, `asyncsim.per_worker` one law or pair
        for each worker.
    bandwidth : float, pair of float, PerWorker, or None
        Bytes per second for the messages that carry parameters, ``"100 Mbit/s"`` say; a pair gives the way up and the
        way down, `asyncsim.per_worker` one bandwidth or pair for each worker. None: they take no time.
        Requests to read and acknowledgements carry no parameters and take the latency alone.
    message_bytes : float, pair of float, or None
        Size of such a message, ``"25 MB"`` say; a pair gives the way up and the way down. Given together with
        ``bandwidth`` or ``far_bandwidth``.
    shared_bandwidth : bool
        Each direction of the server's link carries one message at a time, first come first served, and
        the latency comes after it. Otherwise every worker has the bandwidth to itself. With a ``far_bandwidth``
        each other site has such a link of its own to the server.
    window : int or tuple of int
        Local steps per communication; a computation is the sum of that many compute times. A list gives one per worker
        (`asyncsim.proportional_windows` makes one).
    protocol : str
        What a visit to the server is:

        - ``"exchange"``: one atomic visit applies the message and reads back.
        - ``"read_then_write"``: the worker's own read comes before its own write.
        - ``"write_then_read"``: two visits; the request to read queues as soon as the write has been
          served (same connection, no latency in between), so other commits may slip in.
    exclusive : bool
        With ``"read_then_write"``: True (GEM's algorithm 1 as printed), one atomic visit whose read is
        the version before the worker's own commit. False, two visits: a read visit, its reply travels
        down, the message is formed with what was read and travels up, a write visit, an acknowledgement
        travels down; then the next computation starts on what the read visit returned. Without any latency the write
        waits beside the others before the server goes on to the next of them, and may be served first; with the
        smallest latency the server has gone on, so that the one is not the limit of the other.
    discipline : str
        Who is served next among those that wait: ``"fifo"``, ``"lowest_rank"`` (the lowest worker
        index, which starves the others under load) or ``"random"`` (each as likely as the others). With
        ``"lock_free"`` nobody waits: any number of visits are served at once.
    read_blocks : int
        Above one, reads are torn: each is made in so many blocks of the parameters, spread evenly over its service, and
        a block shows what was committed by then; see `Trace.block_versions`. Each is ``ceil(parameters / read_blocks)``
        wide, so that the last ones may be shorter, or have nothing left. With ``"lock_free"`` and
        ``"write_then_read"``.
    policy : Policy
        What the server takes up, and when workers go on: `asyncsim.asynchronous` and the other functions of
        `asyncsim.clusters.policy`. As laws do, policies may come as their text, ``"barrier(count=8)"``.
    failures : tuple of Failure
        What breaks: crashes, slow spells, outages, lost messages, of `asyncsim.failures`. Each
        may come as its text.
    topology : Topology or None
        With one there is no server: workers send each other messages along its edges, `asyncsim.topologies`. Latency
        and bandwidth are then those of an edge (of `asyncsim.per_worker` the sender's), and all that says how a server
        works is refused. May come as its text.
    sites : tuple of int or None
        Workers of each site, in the order of their indices; the server is at the first.
    far_latency : Law, tuple of two Law, or None
        Seconds one way between two sites, in the place of ``latency``; None: the same.
    far_bandwidth : float, pair of float, or None
        Bytes per second between two sites, in the place of ``bandwidth``; None: the same.
    rollouts : Rollouts or None
        Slots that generate samples for the workers, which are then learners: see
        `asyncsim.Rollouts`. May come as its text.
    far_every : int
        Above one, only each so many-th visit of a worker, at whichever site it is, goes to another site and back; for
        the others its own site has all that they need. The services of all visits still queue at one server.
    servers : int
        Servers that each hold an equal part of the parameters, a *shard*. Above one, a worker's message is split into
        parts, one for each server, with as many bytes each. Each server has its own queue, its own versions and its own
        ``policy``; ``service`` is the time of one part. With ``shared_bandwidth`` each has its own link, else a worker
        has the bandwidth to each server. The next computation begins when the answers of all servers have arrived.

    Warns
    -----
    HeterogeneityWarning
        One law per worker was given, and all are equal.
    SlowLinkWarning
        One message takes longer than a hundred computations.
    """

    workers: int
    compute: Law | tuple[Law, ...]
    service: Law = _NO_TIME
    latency: Law | tuple[Law, Law] | PerWorker = _NO_TIME
    bandwidth: float | tuple[float, float] | PerWorker | None = None
    message_bytes: float | tuple[float, float] | None = None
    shared_bandwidth: bool = False
    window: int | tuple[int, ...] = 1
    protocol: str = "exchange"
    exclusive: bool = True
    discipline: str = "fifo"
    read_blocks: int = 1
    policy: Policy = _ASYNCHRONOUS
    failures: tuple[Failure, ...] = ()
    topology: Topology | None = None
    sites: tuple[int, ...] | None = None
    far_latency: Law | tuple[Law, Law] | None = None
    far_bandwidth: float | tuple[float, float] | None = None
    far_every: int = 1
    servers: int = 1
    rollouts: Rollouts | None = None

    if TYPE_CHECKING:  # what may be given; the fields say what is kept

        def __init__(
            self,
            workers: int,
            compute: LawLike | Sequence[LawLike] | np.ndarray,
            service: LawLike = 0.0,
            latency: LawLike | Sequence[LawLike] | PerWorker = 0.0,
            bandwidth: SizeLike | PerWorker | None = None,
            message_bytes: SizeLike | None = None,
            shared_bandwidth: bool = False,
            window: int | Sequence[int] | np.ndarray = 1,
            protocol: str = "exchange",
            exclusive: bool = True,
            discipline: str = "fifo",
            read_blocks: int = 1,
            policy: Policy | str = _ASYNCHRONOUS,
            failures: Failure | str | Sequence[Failure | str] = (),
            topology: Topology | str | None = None,
            sites: Sequence[int] | None = None,
            far_latency: LawLike | Sequence[LawLike] | PerWorker | None = None,
            far_bandwidth: SizeLike | PerWorker | None = None,
            far_every: int = 1,
            servers: int = 1,
            rollouts: Rollouts | str | None = None,
        ): ...

    def __post_init__(self) -> None:
        store = _setter(self)
        require_switch("shared_bandwidth", self.shared_bandwidth)
        require_switch("exclusive", self.exclusive)
        store("workers", as_workers(self.workers))
        store("window", as_window(self.window, self.workers))
        store("compute", as_compute(self.compute, self.workers))
        store("service", with_mean("service", as_law("service", self.service)))
        store("latency", as_latency("latency", self.latency, self.workers))
        _check_sites(self, store)
        _check_bandwidth(self, store)
        store("policy", as_policy(self.policy))
        require_choice("protocol", self.protocol, PROTOCOLS)
        require_choice("discipline", self.discipline, DISCIPLINES)
        store("read_blocks", require_count("read_blocks", self.read_blocks))
        store("servers", require_count("servers", self.servers))
        if self.read_blocks > 1 and (self.protocol, self.discipline) != ("write_then_read", "lock_free"):
            raise InputError(
                f"read_blocks = {self.read_blocks}: nobody commits while a read is made, unless protocol is "
                "'write_then_read' and discipline 'lock_free'; give these two, or leave read_blocks out"
            )
        if not self.exclusive and self.protocol == "exchange":
            raise InputError(
                "exclusive = False: an exchange is always one atomic visit; leave exclusive out, or choose "
                "protocol 'read_then_write'"
            )
        if self.protocol == "write_then_read":
            store("exclusive", True)  # its visits are always separate
        _check_policy(self)
        if self.rollouts is not None:
            store("rollouts", as_rollouts(self.rollouts))
            _check_rollouts(self)
        slots = None if self.rollouts is None else self.rollouts.slots
        store("failures", as_failures(self.failures, self.workers, self.sites, slots))
        if self.read_blocks > 1 and any(one.name == "outage" for one in self.failures):
            raise InputError(
                f"read_blocks = {self.read_blocks}: with an outage, a read would be torn between what was lost and "
                "what was restored; leave one of them out"
            )
        if self.topology is not None:
            store("topology", as_topology(self.topology))
            _check_topology(self, self.topology)
        if self.servers > 1:
            _check_shards(self)
        _question_bandwidth(self)

    @property
    def compute_laws(self) -> tuple[Law, ...]:
        """The law of a local step of each worker, length ``workers``."""
        if isinstance(self.compute, Law):
            return (self.compute,) * self.workers
        return self.compute

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each worker, length ``workers``."""
        return (self.window,) * self.workers if isinstance(self.window, int) else self.window

    @property
    def mean_window(self) -> float:
        """Mean local steps per commit of workers that only compute."""
        if isinstance(self.window, int):
            return self.window
        step_times = [law.mean for law in self.compute_laws]
        commits = sum(1 / (time * window) for time, window in zip(step_times, self.window, strict=True))
        return sum(1 / time for time in step_times) / commits

    @functools.cached_property
    def collective_time(self) -> float:
        """Seconds that the all-reduce of all workers takes after the barrier; 0 without one."""
        return self.collective_time_of(range(self.workers))

    def collective_time_of(self, members: Collection[int]) -> float:
        """Return the seconds that the all-reduce of some workers takes after the barrier; 0 without one.

        If the number of living workers is no power of two, ``halving_doubling`` uses the next lower one: each
        worker beyond it sends its message to another before, and receives the sum after.
        """
        policy = self.policy
        if policy.collective is None or not members:
            return 0.0
        size = 0.0 if self.message_bytes is None else self.message_bytes
        latency, far_latency = self.latency, self.far_latency
        assert isinstance(size, float) and isinstance(latency, Constant)  # as `_check_policy` has seen
        assert isinstance(far_latency, Constant | None) and isinstance(self.far_bandwidth, float | None)
        bandwidth = math.inf if self.bandwidth is None else self.bandwidth
        assert isinstance(bandwidth, float)
        kind, nodes, sites = policy.collective, len(members), self.sites
        near = functools.partial(collective_time, bandwidth=bandwidth, latency=latency.value)
        far_seconds = None if far_latency is None else far_latency.value
        between = functools.partial(near, far_bandwidth=self.far_bandwidth, far_latency=far_seconds)
        if sites is not None:
            counts = np.bincount(np.array(self.site_of)[list(members)])
            sites = tuple(counts[counts > 0].tolist())

        def seconds(size: float) -> float:
            if kind == "halving_doubling" and nodes < self.workers and nodes & (nodes - 1):
                return near(kind, size, 2 ** (nodes.bit_length() - 1)) + near("tree", size, 2)
            return between(kind, size, nodes, sites=sites)

        if policy.layers is None:
            return seconds(size)
        laws = self.compute_laws
        step = max(laws[member].mean for member in members)
        return exposed_time(NETWORKS[policy.layers], step, size, seconds, policy.bucket_bytes)

    @functools.cached_property
    def ways(self) -> tuple[Way, Way]:
        """The way up, to the server, and the way down, of each worker: the longer one, where it may be near or far.

        With an all-reduce the way down is the time until that is done.
        """
        if self.sites is None or len(self.sites) == 1 or self.policy.collective is not None:
            return self.near_ways
        now_and_then = self.far_every > 1 or self.topology is not None
        return self._ways([now_and_then or worker >= self.sites[0] for worker in range(self.workers)])

    @functools.cached_property
    def near_ways(self) -> tuple[Way, Way]:
        """The same of visits that do not leave the worker's site."""
        if self.policy.collective is not None:
            laws, none = (_NO_TIME, Constant(self.collective_time)), (0.0,) * self.workers
            up, down = (Way((law,) * self.workers, none) for law in laws)
            return up, down
        return self._ways([False] * self.workers)

    @property
    def latency_up(self) -> Law:
        """Seconds from a worker to the server; raises InputError where workers differ."""
        return self._same(0).latency[0]

    @property
    def latency_down(self) -> Law:
        """Seconds from the server to a worker; raises InputError where workers differ."""
        return self._same(1).latency[0]

    @property
    def transfer_up(self) -> float:
        """Seconds that the bandwidth adds to a message with parameters on its way to the server; as `latency_up`."""
        return self._same(0).transfer[0]

    @property
    def transfer_down(self) -> float:
        """Seconds that the bandwidth adds to one on its way to a worker; as `latency_down`."""
        return self._same(1).transfer[0]

    def _same(self, direction: int) -> Way:
        way = self.ways[direction]
        if not way.alike:
            raise InputError("latency, bandwidth: workers differ in these; see Cluster.ways for each of them")
        return way

    @property
    def site_of(self) -> list[int]:
        """The number of each worker's site."""
        sites = self.sites or (self.workers,)
        return np.repeat(np.arange(len(sites)), sites).tolist()

    @property
    def link_sizes(self) -> tuple[int, ...]:
        """The number of workers on each link, where bandwidth is shared: one link, or one for each site."""
        return self.sites if self.sites and self.far_bandwidth is not None else (self.workers,)

    def _ways(self, far: Sequence[bool]) -> tuple[Way, Way]:
        found = []
        for direction in (0, 1):
            laws = directed(self.latency, direction, self.workers)
            speeds = directed(self.bandwidth, direction, self.workers)
            for value, each in ((self.far_latency, laws), (self.far_bandwidth, speeds)):
                if value is not None:
                    between = directed(value, direction, self.workers)
                    each[:] = [between[i] if away else each[i] for i, away in enumerate(far)]
            size = self.message_bytes[direction] if isinstance(self.message_bytes, tuple) else self.message_bytes
            transfer = (0.0 if size is None or speed is None else size / self.servers / speed for speed in speeds)
            found.append(Way(tuple(laws), tuple(transfer)))
        return found[0], found[1]

    @property
    def separate_reads(self) -> bool:
        """Whether a worker visits the server twice per commit."""
        return self.protocol == "write_then_read" or not self.exclusive

    def __repr__(self) -> str:
        """Return the arguments that are not the defaults, laws and policies as they are typed."""
        texts = {name: as_text(getattr(self, name)) for name in ("compute", "latency", "far_latency")}
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return f"Cluster({', '.join(f'{name}={texts.get(name, getattr(self, name))}' for name in given)})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold; laws as the text that `asyncsim.clusters.laws.parse` reads."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("compute", "latency", "far_latency", "topology"):
            values[name] = as_text(values[name])
        values["service"] = str(self.service)
        values["bandwidth"] = str(self.bandwidth) if isinstance(self.bandwidth, PerWorker) else self.bandwidth
        values["policy"] = self.policy.to_dict()
        for entry in fields(self):
            if entry.name in _LATER and getattr(self, entry.name) == entry.default:
                del values[entry.name]
        if self.rollouts is not None:
            values["rollouts"] = str(self.rollouts)
        if self.failures:
            values["failures"] = list(map(str, self.failures))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Cluster":
        """Return the cluster that `to_dict` described."""
        known = [field.name for field in fields(cls)]
        for name in values:
            require_choice("cluster entry", name, known)
        for name in ("workers", "compute"):
            if name not in values:
                raise InputError(f"cluster: the entry {name!r} is missing; add it")
        policy = values.get("policy", {})
        if isinstance(policy, Mapping):
            for name in policy:
                require_choice("policy entry", name, [field.name for field in fields(Policy)])
        return cls(**{**values, "policy": Policy(**policy) if isinstance(policy, Mapping) else policy})


def _check_rollouts(cluster: Cluster) -> None:
    """Raise InputError for learners that do not make a version of each of their batches."""
    if cluster.servers > 1:
        raise InputError(f"servers = {cluster.servers}: with rollouts one server publishes versions; leave servers out")
    if cluster.topology is not None:
        raise InputError(
            f"rollouts: a topology, {cluster.topology}, has no server that publishes versions; leave "
            "topology or rollouts out"
        )
    if cluster.policy.name != "asynchronous":
        raise InputError(f"policy = {cluster.policy}: with rollouts every update makes a version; leave policy out")


def _setter(instance: Any) -> Any:
    """Return what stores a checked value in a frozen dataclass."""

    def store(name: str, value: Any) -> None:
        object.__setattr__(instance, name, value)

    return store


def _check_sites(cluster: Cluster, store: Any) -> None:
    require_count("far_every", cluster.far_every)
    if cluster.sites is not None:
        store("sites", as_sites(cluster.sites, cluster.workers))
    for name, read in (("far_latency", as_latency), ("far_bandwidth", as_bandwidth)):
        value = getattr(cluster, name)
        if value is not None:
            store(name, read(name, value))
            if cluster.sites is None:
                raise InputError(f"{name} = {value}: is between sites, and there is one; give sites, [16, 16] say")
    if cluster.far_every > 1 and (cluster.sites is None or cluster.shared_bandwidth):
        raise InputError(f"far_every = {cluster.far_every}: needs sites, [16, 16] say, and no shared_bandwidth")


def _check_bandwidth(cluster: Cluster, store: Any) -> None:
    size, speeds = cluster.message_bytes, [cluster.bandwidth, cluster.far_bandwidth]
    if cluster.bandwidth is not None:
        store("bandwidth", as_bandwidth("bandwidth", cluster.bandwidth, cluster.workers))
    if size is not None:
        store("message_bytes", as_message_bytes(size))
        if speeds == [None, None]:
            raise InputError(f"message_bytes = {size!r}: says nothing without bandwidth; give both or neither")
    for name, given in (("bandwidth", cluster.bandwidth), ("far_bandwidth", cluster.far_bandwidth)):
        if given is not None and size is None:
            raise InputError(f"{name} = {given!r}: says nothing without message_bytes; give both or neither")
    if speeds == [None, None] and cluster.shared_bandwidth:
        raise InputError("shared_bandwidth = True: there is no bandwidth to share; give bandwidth and message_bytes")


def _question_bandwidth(cluster: Cluster) -> None:
    if cluster.message_bytes is None:
        return
    slowest = max(max(way.transfer) for way in cluster.ways)
    steps = zip(cluster.compute_laws, cluster.windows, strict=True)
    computing = math.fsum(law.mean * window for law, window in steps) / cluster.workers
    if slowest > _SLOW * computing:
        warnings.warn(
            f"bandwidth: one message takes {slowest:.4g} s, a computation {computing:.4g} s; check the unit, bytes/s",
            SlowLinkWarning,
            stacklevel=4,
        )


def _check_policy(cluster: Cluster) -> None:
    policy = cluster.policy
    if policy.name in WITHOUT_SERVER[1:] and cluster.topology is None:
        raise InputError(
            f"policy = {policy}: is for clusters without a server; give a topology, such as "
            "asyncsim.topologies.ring(), or another policy, or run the study gossip"
        )
    if cluster.protocol == "read_then_write" and policy.chooses_when_to_reply:
        raise InputError(
            f"policy = {policy}: the server chooses when to answer a read, but with protocol 'read_then_write' a "
            "worker reads before the server has its message; choose the protocol 'exchange' or 'write_then_read'"
        )
    if policy.collective is not None:
        _check_collective(cluster)
    is_filled = policy.waits_for_version or policy.name == "buckets"
    if is_filled and policy.per_version(cluster.workers) > cluster.workers:
        needs = (
            f"a version needs messages of {policy.per_version(cluster.workers)} workers"
            if policy.waits_for_version
            else "some buckets would have no worker"
        )
        raise InputError(
            f"policy = {policy}: {needs}, and there are {cluster.workers}; "
            f"write {form_of(POLICIES[policy.name])} with a count of at most {cluster.workers}"
        )


def _check_collective(cluster: Cluster) -> None:
    """Raise InputError for what an all-reduce does not have: a server, and ways up and down."""
    told = f"policy = {cluster.policy}"
    for entry in fields(Cluster):
        if entry.name in ("service", "shared_bandwidth", "protocol", "discipline", "far_every", "servers"):
            value = getattr(cluster, entry.name)
            if value != entry.default:
                why = "an all-reduce has no server"
                raise InputError(f"{entry.name} = {_shown(value)}: {told}: {why}; leave {entry.name} out")
    if isinstance(cluster.message_bytes, tuple):
        raise InputError(
            f"message_bytes = {_shown(cluster.message_bytes)}: {told}: the sum is as large as each message; give one "
            "size (sums of compressed messages are not compressed)"
        )
    for name, kind in (
        ("latency", Constant),
        ("bandwidth", float),
        ("far_latency", Constant),
        ("far_bandwidth", float),
    ):
        value = getattr(cluster, name)
        if not isinstance(value, kind | None):
            raise InputError(
                f"{name} = {as_text(value)}: {told}: the time of an all-reduce is known for one constant latency and "
                "one bandwidth; give a number"
            )
    require_number("collective_time", cluster.collective_time)  # raises an error where the nodes do not fit


def _check_shards(cluster: Cluster) -> None:
    """Raise InputError for a cluster with several servers that is not simulated."""
    servers, policy = cluster.servers, cluster.policy
    require_memory(f"servers = {servers}", "a cluster of so many", cluster.workers * servers * WORKER_BYTES)
    if policy.name == "first_of":
        raise InputError(
            f"policy = {policy}: with servers = {servers} all workers may wait for each other, as each server holds "
            "others; choose barrier() or buffered(count), or servers = 1"
        )
    waits_for_all = policy.name == "barrier" and policy.per_version(cluster.workers) == cluster.workers
    if policy.stops_computations and not waits_for_all:
        raise InputError(
            f"policy = {policy}: stops computations whose read is too stale, and with servers = {servers} a "
            "computation has a read of each; choose barrier() or discard_stale(limit), or servers = 1"
        )
    for name in ("failures", "read_blocks"):
        value = getattr(cluster, name)
        if value != next(entry.default for entry in fields(Cluster) if entry.name == name):
            raise InputError(
                f"{name} = {_shown(value)}: not simulated with several servers; leave {name} out, or give servers = 1"
            )


def _check_topology(cluster: Cluster, topology: Topology) -> None:
    """Raise InputError for what only a server has, and for a graph that does not fit."""
    why = f"with topology = {topology!r} there is no server"
    for entry in fields(Cluster):
        value = getattr(cluster, entry.name)
        if entry.name not in _WITHOUT_SERVER and value != entry.default:
            raise InputError(f"{entry.name} = {_shown(value)}: {why}; leave {entry.name} out")
    for name in ("latency", "bandwidth", "message_bytes", "far_latency", "far_bandwidth"):
        value = getattr(cluster, name)
        if any(isinstance(one, tuple) for one in (value.values if isinstance(value, PerWorker) else (value,))):
            raise InputError(f"{name} = {_shown(value)}: {why}, and an edge has one way; give one and not a pair")
    outages = [failure for failure in cluster.failures if failure.name == "outage"]
    if outages:
        raise InputError(f"failures = {outages[0]}: is a server's, and {why}; leave it out, or let workers crash")
    policy = cluster.policy
    if policy.name not in WITHOUT_SERVER:
        usable = ", ".join(form_of(POLICIES[name]) for name in WITHOUT_SERVER)
        raise InputError(f"policy = {policy}: is a server's, and {why}; choose from {usable}")
    topology.edges(cluster.workers)  # raises an error where it does not fit
    topology.slowness(cluster.workers)  # so does this
    if topology.slow and cluster.latency == _NO_TIME and cluster.bandwidth is None and cluster.sites is None:
        raise InputError(
            f"topology = {topology!r}: its links take no time, so that none can be slow; give latency, or bandwidth "
            "and message_bytes"
        )
    if policy.name == "handshake" and not is_symmetric(topology, cluster.workers):
        raise InputError(
            f"policy = {policy}: two workers average in pairs, and topology = {topology!r} is directed; choose an "
            "undirected one, such as ring() or complete()"
        )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return repr(value) if isinstance(value, str) else str(value)


class SlowLinkWarning(UserWarning):
    """Warns that one message takes longer than a hundred computations: the bandwidth may be in another unit."""


def as_workers(value: Any) -> int:
    """Check a number of workers: at least one, and no more than the memory holds."""
    workers = require_count("workers", value)
    require_memory(f"workers = {workers}", "a cluster of so many", workers * WORKER_BYTES)
    return workers
