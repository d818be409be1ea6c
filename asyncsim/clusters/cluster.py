"""The cluster: durations, the network, the order of service, and the server's policy."""

import functools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim.base.calls import form_of
from asyncsim.base.console import counted
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_memory,
    require_number,
    require_switch,
)
from asyncsim.base.markup import card
from asyncsim.clusters.collectives import NETWORKS, collective_time, exposed_time
from asyncsim.clusters.failures import Failure, as_failures
from asyncsim.clusters.laws import Constant, Law, LawLike, as_law, brief
from asyncsim.clusters.network import (
    Matrix,
    PerWorker,
    SizeLike,
    Way,
    as_bandwidth,
    as_latency,
    as_message_bytes,
    as_sites,
    as_text,
    directed,
    far_values,
    is_matrix,
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
#: Entries that a cluster without a server has as well; all others must have their default there.
_WITHOUT_SERVER = (
    *(
        "workers",
        "compute",
        "latency",
        "bandwidth",
        "message_bytes",
        "window",
        "policy",
        "topology",
    ),
    *("sites", "far_latency", "far_bandwidth", "failures"),
)
#: Entries that `to_dict` omits at their default: older versions did not have them.
_LATER = (
    *("failures", "topology", "sites", "far_latency", "far_bandwidth", "server_site", "far_every"),
    *("servers", "rollouts"),
)
#: Computations that a message may last before the unit of its bandwidth is questioned.
_SLOW = 100
#: Memory (bytes) that a simulation needs for a worker at the least: the durations drawn ahead.
WORKER_BYTES = 1_000
#: Characters of an argument in `Cluster.__repr__`.
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Cluster:
    """Workers, a parameter server and the network between them; or with a topology, only workers.

    Laws may be given as a law, a number of seconds or a text such as ``"gamma(mean=1, cv=0.2)"``.

    Attributes
    ----------
    workers : int
        The number of workers; each computes one job at a time.
    compute : Law or tuple of Law
        Seconds per local step; a list or an array gives one law per worker.
    service : Law
        Seconds the server is busy per visit.
    latency : Law, tuple of two Law, or PerWorker
        Seconds one way; a pair gives the way up (to the server) and the way down,
        `asyncsim.per_worker` one law or pair for each worker.
    bandwidth : float, pair of float, PerWorker, or None
        Bytes per second for messages that carry parameters, for example ``"100 Mbit/s"``; a pair
        gives the way up and the way down, `asyncsim.per_worker` one bandwidth or pair for each
        worker. None: transfers take no time. Requests to read and acknowledgements take the latency
        alone.
    message_bytes : float, pair of float, or None
        Size of such a message, for example ``"25 MB"``; a pair gives the way up and the way down.
        Required with ``bandwidth`` or ``far_bandwidth``.
    shared_bandwidth : bool
        Each direction of the server's link carries one message at a time, first come first served,
        and the latency comes after it. Otherwise every worker has the full bandwidth. With a
        ``far_bandwidth`` each other site has a separate link to the server.
    window : int or tuple of int
        Local steps per communication; a computation is the sum of that many compute times. A list
        gives one per worker (see `asyncsim.proportional_windows`).
    protocol : str
        The visits to the server:

        - ``"exchange"``: one atomic visit applies the message and reads back.
        - ``"read_then_write"``: the worker's own read comes before its own write.
        - ``"write_then_read"``: two visits; the request to read queues as soon as the write has
          been served (same connection, no latency in between), so other commits may slip in.
    exclusive : bool
        With ``"read_then_write"``: True (GEM's algorithm 1 as printed), one atomic visit whose read
        is the version before the worker's own commit. False, two visits: a read visit, its reply
        travels down, the message is formed with that version and travels up, a write visit, an
        acknowledgement travels down; then the next computation starts from the version of the read
        visit. Without any latency the write joins the queue before the server begins the next
        visit, and may be served first; with the smallest latency the server has begun it. So zero
        latency is not the limit of small latencies.
    discipline : str
        The order of service of waiting visits: ``"fifo"``, ``"lowest_rank"`` (the lowest worker
        index, which starves the others under load) or ``"random"`` (equally likely). With
        ``"lock_free"`` no visit waits: any number are served at once.
    read_blocks : int
        Above one, reads are torn: the parameters are read in that many blocks, spread evenly over
        the service, and each block shows the commits up to its instant; see `Trace.block_versions`.
        Each is ``ceil(parameters / read_blocks)`` wide, so that the last ones may be shorter or
        empty. With ``"lock_free"`` and ``"write_then_read"``.
    policy : Policy
        The messages that make a version, and when workers continue: `asyncsim.asynchronous` and the
        other functions of `asyncsim.clusters.policy`. May be a text, ``"barrier(count=8)"``.
    failures : tuple of Failure
        Crashes, slow spells, outages and lost messages, from `asyncsim.failures`. Each may be a
        text.
    topology : Topology or None
        Without a server: workers send each other messages along its edges, see
        `asyncsim.topologies`. Latency and bandwidth are those of an edge (with
        `asyncsim.per_worker` the sender's); arguments of a server are refused. May be a text.
    sites : tuple of int or None
        Workers of each site, in the order of their indices; 0 at a site that only has the server.
    far_latency : Law, tuple of two Law, matrix of Law, or None
        Seconds one way between two sites, instead of ``latency``; None: the same. A matrix holds a
        law for each pair, in row ``i`` and column ``j`` from site ``i`` to site ``j``, and 0 on
        the diagonal, as ``latency`` holds inside a site. With a topology or ``far_every`` a matrix
        is refused.
    far_bandwidth : float, pair of float, matrix of float, or None
        Bytes per second between two sites, instead of ``bandwidth``; None: the same. A matrix is
        that of ``far_latency``.
    server_site : int
        The server's site, from 0, the first one.
    rollouts : Rollouts or None
        Slots that generate samples for the workers, which are then learners: see
        `asyncsim.Rollouts`. May be a text.
    far_every : int
        Above one, only every ``far_every``-th visit of a worker, at any site, crosses to another
        site and back; the other visits stay at its site. All services still queue at one server.
    servers : int or sequence of str
        Servers that each hold an equal part of the parameters, a *shard*; or the names of the
        tensors of each shard: ``["0", "1,2"]`` for two, of the first layer and of the others, see
        `asyncsim.problems.partition.partition`. Above one, a message is
        split into equal parts, one per server. Each server has a separate queue, versions and
        ``policy``; ``service`` is the time of one part. With ``shared_bandwidth`` each server has a
        link, else a worker has the full bandwidth to each. The next computation begins when the
        answers of all servers have arrived.

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
    far_latency: Law | tuple[Law, Law] | Matrix | None = None
    far_bandwidth: float | tuple[float, float] | Matrix | None = None
    server_site: int = 0
    far_every: int = 1
    servers: int | tuple[str, ...] = 1
    rollouts: Rollouts | None = None

    if TYPE_CHECKING:  # the types of arguments are wider than those of the checked fields

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
            far_latency: LawLike | Sequence[LawLike | Sequence[LawLike]] | PerWorker | None = None,
            far_bandwidth: SizeLike | Sequence[Sequence[float | str]] | PerWorker | None = None,
            server_site: int = 0,
            far_every: int = 1,
            servers: int | Sequence[str] = 1,
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
        store("servers", _as_servers(self.servers))
        if self.read_blocks > 1 and (self.protocol, self.discipline) != (
            "write_then_read",
            "lock_free",
        ):
            raise InputError(
                f"read_blocks = {self.read_blocks}: nobody commits while a read is made, unless "
                "protocol is "
                "'write_then_read' and discipline 'lock_free'; give these two, or leave "
                "read_blocks out"
            )
        if not self.exclusive and self.protocol == "exchange":
            raise InputError(
                "exclusive = False: an exchange is always one atomic visit; leave exclusive out, "
                "or choose "
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
        if self.read_blocks > 1 and any(failure.restores for failure in self.failures):
            raise InputError(
                f"read_blocks = {self.read_blocks}: with an outage, a read would be torn between "
                "what was lost and "
                "what was restored; leave one of them out"
            )
        if self.policy.completes_between_messages:
            for failure in self.failures:
                if failure.restores:
                    raise InputError(
                        f"failures = {failure}: a server that is down cannot complete a version at "
                        f"the times of policy = {self.policy}; leave the outage out, or choose "
                        "another policy"
                    )
        _check_job(self)
        if self.topology is not None:
            store("topology", as_topology(self.topology))
            _check_topology(self, self.topology)
        if self.server_count > 1:
            _check_shards(self)
        _question_bandwidth(self)

    @property
    def compute_laws(self) -> tuple[Law, ...]:
        """Law of a local step for each worker, length ``workers``."""
        if isinstance(self.compute, Law):
            return (self.compute,) * self.workers
        return self.compute

    @property
    def server_count(self) -> int:
        """The number of servers."""
        return self.servers if isinstance(self.servers, int) else len(self.servers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each worker, length ``workers``."""
        return (self.window,) * self.workers if isinstance(self.window, int) else self.window

    @property
    def mean_window(self) -> float:
        """Mean local steps per commit of workers that only compute."""
        if isinstance(self.window, int):
            return self.window
        step_times = [law.mean for law in self.compute_laws]
        commits = sum(
            1 / (time * window) for time, window in zip(step_times, self.window, strict=True)
        )
        return sum(1 / time for time in step_times) / commits

    @functools.cached_property
    def collective_time(self) -> float:
        """Seconds from the barrier to the end of the all-reduce of all workers; 0 without one."""
        return self.collective_time_of(range(self.workers))

    def collective_time_of(self, members: Collection[int]) -> float:
        """Return the seconds from the barrier to the end of an all-reduce; 0 without one."""
        policy = self.policy
        if policy.collective is None or not members:
            return 0.0
        size = 0.0 if self.message_bytes is None else self.message_bytes
        latency, bandwidth = self.latency, math.inf if self.bandwidth is None else self.bandwidth
        # See `_check_collective`.
        assert isinstance(size, float) and isinstance(latency, Constant)
        assert isinstance(bandwidth, float)
        present, counts = np.unique(np.array(self.site_of)[list(members)], return_counts=True)

        def between(value: Any) -> Any:
            if is_matrix(value):
                return [[between(value[i][j]) for j in present] for i in present]
            return value.value if isinstance(value, Constant) else value

        def seconds(size: float) -> float:
            return collective_time(
                policy.collective or "",
                size,
                len(members),
                bandwidth,
                latency.value,
                sites=None if self.sites is None else counts.tolist(),
                far_bandwidth=between(self.far_bandwidth),
                far_latency=between(self.far_latency),
            )

        if policy.layers is None:
            return seconds(size)
        laws = self.compute_laws
        step = max(laws[member].mean for member in members)
        return exposed_time(NETWORKS[policy.layers], step, size, seconds, policy.bucket_bytes)

    @functools.cached_property
    def ways(self) -> tuple[Way, Way]:
        """The ways up (to the server) and down of each worker; the longer one if both occur.

        With an all-reduce the way down lasts until it ends.
        """
        if self.sites is None or len(self.sites) == 1 or self.policy.collective is not None:
            return self.near_ways
        now_and_then = self.far_every > 1 or self.topology is not None
        return self._ways([now_and_then or site != self.server_site for site in self.site_of])

    @functools.cached_property
    def near_ways(self) -> tuple[Way, Way]:
        """The ways of visits that stay at the worker's site."""
        if self.policy.collective is not None:
            laws, no_transfer = (_NO_TIME, Constant(self.collective_time)), (0.0,) * self.workers
            up, down = (Way((law,) * self.workers, no_transfer) for law in laws)
            return up, down
        return self._ways([False] * self.workers)

    @property
    def latency_up(self) -> Law:
        """Seconds from a worker to the server; raises InputError where workers differ."""
        return self._common_way(0).latency[0]

    @property
    def latency_down(self) -> Law:
        """Seconds from the server to a worker; raises InputError where workers differ."""
        return self._common_way(1).latency[0]

    @property
    def transfer_up(self) -> float:
        """Seconds that the bandwidth adds to a message to the server; see `latency_up`."""
        return self._common_way(0).transfer[0]

    @property
    def transfer_down(self) -> float:
        """Seconds that the bandwidth adds to a message to a worker; see `latency_down`."""
        return self._common_way(1).transfer[0]

    def _common_way(self, direction: int) -> Way:
        way = self.ways[direction]
        if not way.alike:
            raise InputError(
                "latency, bandwidth: workers differ in these; see Cluster.ways for each of them"
            )
        return way

    @property
    def site_of(self) -> list[int]:
        """The number of each worker's site."""
        sites = self.sites or (self.workers,)
        return np.repeat(np.arange(len(sites)), sites).tolist()

    @property
    def link_sizes(self) -> tuple[int, ...]:
        """Numbers of workers that share each link: one link, or one for each site."""
        return self.sites if self.sites and self.far_bandwidth is not None else (self.workers,)

    def _ways(self, far: Sequence[bool]) -> tuple[Way, Way]:
        ways = []
        for direction in (0, 1):
            laws = directed(self.latency, direction, self.workers)
            speeds = directed(self.bandwidth, direction, self.workers)
            for value, near in ((self.far_latency, laws), (self.far_bandwidth, speeds)):
                if value is not None:
                    between = far_values(value, direction, self.site_of, self.server_site)
                    near[:] = [between[i] if crosses else near[i] for i, crosses in enumerate(far)]
            size = (
                self.message_bytes[direction]
                if isinstance(self.message_bytes, tuple)
                else self.message_bytes
            )
            transfer = (
                0.0 if size is None or speed is None else size / self.server_count / speed
                for speed in speeds
            )
            ways.append(Way(tuple(laws), tuple(transfer)))
        return ways[0], ways[1]

    @property
    def separate_reads(self) -> bool:
        """Whether a worker visits the server twice per commit."""
        return self.protocol == "write_then_read" or not self.exclusive

    def _repr_html_(self) -> str:
        """Show in a notebook the arguments that differ from the defaults, as a table."""
        changed = [entry for entry in fields(self) if getattr(self, entry.name) != entry.default]
        return card(
            counted(self.workers, "worker"),
            {entry.name: as_text(getattr(self, entry.name)) for entry in changed},
        )

    def __repr__(self) -> str:
        """Show the arguments that differ from the defaults; long ones in a few words."""
        changed = [
            entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default
        ]
        return f"Cluster({', '.join(f'{name}={self._option_text(name)}' for name in changed)})"

    def _option_text(self, name: str) -> str:
        """Write an argument: laws and policies as texts, long ones in a few words."""
        value = getattr(self, name)
        text = as_text(value) if name in ("compute", "latency", "far_latency") else str(value)
        if len(text) <= _LONGEST_SHOWN:
            return text
        if isinstance(value, Law):
            return brief(value)
        if isinstance(value, tuple) and all(isinstance(law, Law) for law in value):
            means = [law.mean for law in value]
            return f"<{len(value)} laws of means {min(means):.3g} to {max(means):.3g} s>"
        return f"{text[:_LONGEST_SHOWN]}..."

    def to_dict(self) -> dict[str, Any]:
        """Convert to values for JSON; laws as text, which `asyncsim.clusters.laws.parse` reads."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("compute", "latency", "far_latency", "topology"):
            values[name] = as_text(values[name])
        values["service"] = str(self.service)
        values["bandwidth"] = (
            str(self.bandwidth) if isinstance(self.bandwidth, PerWorker) else self.bandwidth
        )
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
        """Rebuild the cluster that `to_dict` described."""
        names = [field.name for field in fields(cls)]
        for name in values:
            require_choice("cluster entry", name, names)
        for name in ("workers", "compute"):
            if name not in values:
                raise InputError(f"cluster: the entry {name!r} is missing; add it")
        policy = values.get("policy", {})
        if isinstance(policy, Mapping):
            for name in policy:
                require_choice("policy entry", name, [field.name for field in fields(Policy)])
        return cls(
            **{**values, "policy": Policy(**policy) if isinstance(policy, Mapping) else policy}
        )


def _check_rollouts(cluster: Cluster) -> None:
    """Raise InputError unless the learners' server makes a version of each batch."""
    if cluster.server_count > 1:
        raise InputError(
            f"servers = {cluster.server_count}: with rollouts one server publishes versions; leave "
            "servers out"
        )
    if cluster.topology is not None:
        raise InputError(
            f"rollouts: a topology, {cluster.topology}, has no server that publishes versions; "
            "leave "
            "topology or rollouts out"
        )
    if cluster.policy.name != "asynchronous":
        raise InputError(
            f"policy = {cluster.policy}: with rollouts every update makes a version; leave policy "
            "out"
        )


def _setter(instance: Any) -> Any:
    """Return a function that sets a field of a frozen dataclass."""

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
            if cluster.sites is None:
                raise InputError(
                    f"{name} = {value}: is between sites, and there is one; give sites, [16, 16] "
                    "say"
                )
            store(name, read(name, value, sites=len(cluster.sites)))
            if is_matrix(getattr(cluster, name)) and (
                cluster.far_every > 1 or cluster.topology is not None
            ):
                raise InputError(
                    f"{name} = a matrix of {len(cluster.sites)} sites: needs a server that each "
                    "visit reaches; give one number for all pairs, or leave topology and far_every "
                    "out"
                )
    sites = 1 if cluster.sites is None else len(cluster.sites)
    if require_count("server_site", cluster.server_site, minimum=0) >= sites:
        raise InputError(
            f"server_site = {cluster.server_site}: sites are counted from 0, and the cluster has "
            f"{sites}; give a lower number, or sites, [16, 16] say"
        )
    if cluster.far_every > 1 and (cluster.sites is None or cluster.shared_bandwidth):
        raise InputError(
            f"far_every = {cluster.far_every}: needs sites, [16, 16] say, and no shared_bandwidth"
        )


def _check_bandwidth(cluster: Cluster, store: Any) -> None:
    size, speeds = cluster.message_bytes, [cluster.bandwidth, cluster.far_bandwidth]
    if cluster.bandwidth is not None:
        store("bandwidth", as_bandwidth("bandwidth", cluster.bandwidth, cluster.workers))
    if size is not None:
        store("message_bytes", as_message_bytes(size))
        if speeds == [None, None]:
            raise InputError(
                f"message_bytes = {size!r}: says nothing without bandwidth; give both or neither"
            )
    for name, bandwidth in (
        ("bandwidth", cluster.bandwidth),
        ("far_bandwidth", cluster.far_bandwidth),
    ):
        if bandwidth is not None and size is None:
            raise InputError(
                f"{name} = {bandwidth!r}: says nothing without message_bytes; give both or neither"
            )
    if speeds == [None, None] and cluster.shared_bandwidth:
        raise InputError(
            "shared_bandwidth = True: there is no bandwidth to share; give bandwidth and "
            "message_bytes"
        )


def _question_bandwidth(cluster: Cluster) -> None:
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
            f"policy = {policy}: the server chooses when to answer a read, but with protocol "
            "'read_then_write' a "
            "worker reads before the server has its message; choose the protocol 'exchange' or "
            "'write_then_read'"
        )
    if policy.collective is not None:
        _check_collective(cluster)
    _check_trials(cluster)
    is_filled = policy.waits_for_version or policy.name == "buckets"
    if is_filled and policy.per_version(cluster.workers) > cluster.workers:
        problem = (
            f"a version needs messages of {policy.per_version(cluster.workers)} workers"
            if policy.waits_for_version
            else "some buckets would have no worker"
        )
        raise InputError(
            f"policy = {policy}: {problem}, and there are {cluster.workers}; "
            f"write {form_of(POLICIES[policy.name])} with a count of at most {cluster.workers}"
        )


def _check_job(cluster: Cluster) -> None:
    """Raise InputError for a job's crash on a cluster whose workers are not in rounds."""
    for failure in (failure for failure in cluster.failures if failure.is_of_job):
        subject = f"failures = {failure}: ends a round of all workers"
        if cluster.topology is not None or cluster.policy.name != "barrier":
            raise InputError(f"{subject}; choose policy = barrier(), or crash workers")
        for name, usual in (("protocol", "exchange"), ("discipline", "fifo"), ("rollouts", None)):
            if (value := getattr(cluster, name)) != usual:
                raise InputError(
                    f"{subject}, and {name} = {value!r} is not simulated with it; leave {name} out"
                )


def _check_trials(cluster: Cluster) -> None:
    """Raise InputError for trials that are not of the workers, and for outages between messages."""
    policy = cluster.policy
    for parameter in ("time", "count"):
        value = getattr(policy, parameter)
        if isinstance(value, tuple) and len(value) != cluster.workers:
            raise InputError(
                f"policy = {policy}: {parameter} has {len(value)} entries, and there are "
                f"{cluster.workers} workers; give a number for all, or one per worker"
            )


def _check_collective(cluster: Cluster) -> None:
    """Raise InputError for a server, and for ways up and down, with an all-reduce."""
    subject = f"policy = {cluster.policy}"
    for entry in fields(Cluster):
        if entry.name in (
            "service",
            "shared_bandwidth",
            "protocol",
            "discipline",
            "server_site",
            "far_every",
            "servers",
        ):
            value = getattr(cluster, entry.name)
            if value != entry.default:
                why = "an all-reduce has no server"
                raise InputError(
                    f"{entry.name} = {_quoted(value)}: {subject}: {why}; leave {entry.name} out"
                )
    if isinstance(cluster.message_bytes, tuple):
        raise InputError(
            f"message_bytes = {_quoted(cluster.message_bytes)}: {subject}: the sum is as large as "
            "each "
            "message; give one size (sums of compressed messages are not compressed)"
        )
    for name, kind in (
        ("latency", Constant),
        ("bandwidth", float),
        ("far_latency", Constant),
        ("far_bandwidth", float),
    ):
        value = getattr(cluster, name)
        pairs = np.ravel(value).tolist() if is_matrix(value) else [value]
        if not all(isinstance(pair, kind | None) or pair == 0.0 for pair in pairs):
            raise InputError(
                f"{name} = {as_text(value)}: {subject}: the time of an all-reduce is known for one "
                "constant latency and one bandwidth; give a number"
            )
    require_number(
        "collective_time", cluster.collective_time
    )  # raises an error where the nodes do not fit


def _as_servers(servers: Any) -> int | tuple[str, ...]:
    """Return a number of servers, or the names of the tensors of each."""
    if not isinstance(servers, list | tuple):
        return require_count("servers", servers)
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


def _check_shards(cluster: Cluster) -> None:
    """Raise InputError for policies and failures that are not simulated with several servers."""
    servers, policy = cluster.server_count, cluster.policy
    require_memory(
        f"servers = {servers}", "a cluster of so many", cluster.workers * servers * WORKER_BYTES
    )
    if policy.name == "first_of":
        raise InputError(
            f"policy = {policy}: with servers = {servers} all workers may wait for each other, as "
            "each server holds "
            "others; choose barrier() or buffered(count), or servers = 1"
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
            f"{servers} a "
            "computation has a read of each; choose barrier() or discard_stale(limit), or servers "
            "= 1"
        )
    for name in ("failures", "read_blocks"):
        value = getattr(cluster, name)
        if value != next(entry.default for entry in fields(Cluster) if entry.name == name):
            raise InputError(
                f"{name} = {_quoted(value)}: not simulated with several servers; leave {name} out, "
                "or give servers = 1"
            )


def _check_topology(cluster: Cluster, topology: Topology) -> None:
    """Raise InputError for entries of a server, and for a graph that does not fit the cluster."""
    why = f"with topology = {topology!r} there is no server"
    for entry in fields(Cluster):
        value = getattr(cluster, entry.name)
        if entry.name not in _WITHOUT_SERVER and value != entry.default:
            raise InputError(f"{entry.name} = {_quoted(value)}: {why}; leave {entry.name} out")
    for name in ("latency", "bandwidth", "message_bytes", "far_latency", "far_bandwidth"):
        value = getattr(cluster, name)
        if any(
            isinstance(entry, tuple)
            for entry in (value.values if isinstance(value, PerWorker) else (value,))
        ):
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
    # Both raise an error if the graph does not fit.
    topology.edges(cluster.workers)
    topology.slowness(cluster.workers)
    if (
        topology.slow
        and cluster.latency == _NO_TIME
        and cluster.bandwidth is None
        and cluster.sites is None
    ):
        raise InputError(
            f"topology = {topology!r}: its links take no time, so that none can be slow; give "
            "latency, or bandwidth "
            "and message_bytes"
        )
    if policy.name == "handshake" and not is_symmetric(topology, cluster.workers):
        raise InputError(
            f"policy = {policy}: two workers average in pairs, and topology = {topology!r} is "
            "directed; choose an "
            "undirected one, such as ring() or complete()"
        )


def _quoted(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return repr(value) if isinstance(value, str) else str(value)


class SlowLinkWarning(UserWarning):
    """Warns that one message takes longer than a hundred computations: the bandwidth may be in
    another unit.
    """


def as_workers(value: Any) -> int:
    """Check a number of workers: at least one, and at most as many as fit into memory."""
    workers = require_count("workers", value)
    require_memory(f"workers = {workers}", "a cluster of so many", workers * WORKER_BYTES)
    return workers
