"""The cluster: durations, the network, the order of service, and the server's policy."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np

from asyncsim.base.console import counted
from asyncsim.base.declared import Count, Value, check_fields
from asyncsim.base.errors import InputError, require_choice
from asyncsim.base.markup import card
from asyncsim.clusters import cluster_checks as checks
from asyncsim.clusters.cluster_text import entries
from asyncsim.clusters.collectives import collective_bytes, collective_time
from asyncsim.clusters.failures import as_failures
from asyncsim.clusters.laws import Constant, Law, as_law
from asyncsim.clusters.network import (
    PerWorker,
    Way,
    as_bandwidth,
    as_latency,
    as_message_bytes,
    as_sites,
    as_text,
    directed,
    far_values,
    is_matrix,
)
from asyncsim.clusters.policy import as_policy, asynchronous
from asyncsim.clusters.rollouts import as_rollouts
from asyncsim.clusters.topologies import as_topology
from asyncsim.clusters.workers import as_compute, as_window, as_workers

PROTOCOLS = ("exchange", "read_then_write", "write_then_read")
DISCIPLINES = ("fifo", "lowest_rank", "random", "lock_free")
_NO_TIME = Constant(0.0)
_ASYNCHRONOUS = asynchronous()


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
    policy : Policy
        The messages that make a version, and when workers continue: `asyncsim.asynchronous` and the
        other functions of `asyncsim.clusters.policy`. May be a text, ``"barrier(count=8)"``.
    failures : tuple of Failure
        Crashes, slow spells, outages and lost messages, from `asyncsim.failures`. Each may be a
        text.
    topology : Topology or None
        Without a server: workers send each other messages along its edges, see
        `asyncsim.topologies`. Latency and bandwidth belong to an edge (with
        `asyncsim.per_worker` the sender's); arguments of a server are refused. May be a text.
    sites : tuple of int or None
        Workers of each site, in the order of their indices. The server is at the first site, which
        may have 0.
    far_latency : Law, tuple of two Law, matrix of Law, or None
        Seconds one way between two sites, instead of ``latency``; None: the same. A matrix holds a
        law for each pair, in row ``i`` and column ``j`` from site ``i`` to site ``j``, and 0 on
        the diagonal, as ``latency`` holds inside a site. With a topology or ``far_every`` a matrix
        is refused.
    far_bandwidth : float, pair of float, matrix of float, or None
        Bytes per second between two sites, instead of ``bandwidth``; None: the same. A matrix is
        as in ``far_latency``.
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

    # Any: a law, say, may be given as its text.
    workers: Annotated[int, as_workers]
    compute: Any
    service: Annotated[Any, as_law] = _NO_TIME
    latency: Any = _NO_TIME
    bandwidth: Any = None
    message_bytes: Annotated[Any, as_message_bytes] | None = None
    shared_bandwidth: bool = False
    window: Any = 1
    protocol: Annotated[str, functools.partial(require_choice, choices=PROTOCOLS)] = "exchange"
    exclusive: bool = True
    discipline: Annotated[str, functools.partial(require_choice, choices=DISCIPLINES)] = "fifo"
    policy: Annotated[Any, lambda argument, value: as_policy(value)] = _ASYNCHRONOUS
    failures: Any = ()
    topology: Annotated[Any, lambda argument, value: as_topology(value)] | None = None
    sites: Any = None
    far_latency: Any = None
    far_bandwidth: Any = None
    far_every: Count = 1
    servers: Annotated[Any, checks.as_servers] = 1
    rollouts: Annotated[Any, as_rollouts] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.protocol == "write_then_read":
            self._store("exclusive", True)  # its visits are always separate
        self._store("window", as_window(self.window, self.workers))
        self._store("compute", as_compute(self.compute, self.workers))
        self._store("latency", as_latency("latency", self.latency, self.workers))
        if self.sites is not None:
            self._store("sites", as_sites(self.sites, self.workers))
        for name, read in (("far_latency", as_latency), ("far_bandwidth", as_bandwidth)):
            if getattr(self, name) is not None:
                checks.require_sites(self, name)
                self._store(name, read(name, getattr(self, name), sites=len(self.sites or ())))
        checks.check_sites(self)
        if self.bandwidth is not None:
            self._store("bandwidth", as_bandwidth("bandwidth", self.bandwidth, self.workers))
        slots = None if self.rollouts is None else self.rollouts.slots
        self._store("failures", as_failures(self.failures, self.workers, self.sites, slots))
        checks.check_cluster(self)

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

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
        # See `asyncsim.clusters.cluster_checks`.
        assert isinstance(size, float) and isinstance(latency, Constant)
        assert isinstance(bandwidth, float)
        present, counts = np.unique(np.array(self.site_of)[list(members)], return_counts=True)

        def between(value: Any) -> Any:
            if is_matrix(value):
                return [[between(value[i][j]) for j in present] for i in present]
            return value.value if isinstance(value, Constant) else value

        return collective_time(
            policy.collective,
            size,
            len(members),
            bandwidth,
            latency.value,
            sites=None if self.sites is None else counts.tolist(),
            far_bandwidth=between(self.far_bandwidth),
            far_latency=between(self.far_latency),
        )

    def all_reduced_bytes(self, message_bytes: float) -> float:
        """Return the bytes that the all-reduce of a version sends, all workers together."""
        sites = [count for count in self.sites or (self.workers,) if count]
        kind = self.policy.collective or ""
        return collective_bytes(kind, message_bytes, self.workers, sites).total

    @functools.cached_property
    def ways(self) -> tuple[Way, Way]:
        """The ways up (to the server) and down of each worker; the longer one if both occur.

        With an all-reduce the way down lasts until it ends.
        """
        if self.sites is None or len(self.sites) == 1 or self.policy.collective is not None:
            return self.near_ways
        now_and_then = self.far_every > 1 or self.topology is not None
        return self._ways([now_and_then or site > 0 for site in self.site_of])

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
                    between = far_values(value, direction, self.site_of)
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
        return card(counted(self.workers, "worker"), entries(self))

    def __repr__(self) -> str:
        """Show the arguments that differ from the defaults; long ones in a few words."""
        return f"Cluster({', '.join(f'{name}={text}' for name, text in entries(self).items())})"

    def to_dict(self) -> dict[str, Any]:
        """Convert to values for JSON; laws as text, which `asyncsim.clusters.laws.parse` reads."""
        values: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "failures":
                value = list(map(str, value))
            elif entry.name in ("compute", "latency", "far_latency") or isinstance(
                value, Value | PerWorker
            ):
                value = as_text(value)
            if getattr(self, entry.name) != entry.default:
                values[entry.name] = value
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
        return cls(**values)
