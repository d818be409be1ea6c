"""The usual SimPy model of a cluster: a process for each worker and a Resource for the server.

Written as SimPy's own examples are. Tests compare `asyncsim.simulate` with its events, which must
be the same. Only the delays and the description of the cluster come from the package.
"""

from collections import deque
from functools import partial
from typing import Any

import simpy

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Uniform
from asyncsim.simulation.delays import delays

#: Columns of `UsualModel.rows`. ``version``: after the visit. ``others``: number of other open
#: reads at that instant. The rest is as in a trace's frame.
COLUMNS = (
    "worker",
    "start_time",
    "send_time",
    "arrive_time",
    "serve_time",
    "commit_time",
    "read_version",
    "read_time",
    "version",
    "outcome",
    "others",
)


class UsualModel:
    """One run of a cluster, until the server has accepted ``commits`` messages.

    Covers all protocols, networks, timing policies and disciplines except ``lock_free``. Under a
    policy the laws must be continuous: among simultaneous events only the order at a new version is
    defined. ``rows``: the commits in order, including discarded and cancelled ones (see `COLUMNS`).
    ``reads``: each worker's open reads at the end, as pairs of version and time.

    Several servers share a clock ``env``, which the caller runs; ``stream`` ends the names of this
    server's random streams.
    """

    def __init__(
        self,
        cluster: Cluster,
        commits: int,
        seed: int = 0,
        env: simpy.Environment | None = None,
        stream: str = "",
    ):
        self.cluster, self.policy, n = cluster, cluster.policy, cluster.workers
        self.env = env or simpy.Environment()
        self.compute = delays(cluster.compute_laws, seed, "compute", cluster.windows)
        self.service = delays([cluster.service] * n, seed, f"service{stream}")
        self.up = self._way(cluster.latency_up, cluster.transfer_up, f"latency up{stream}", seed)
        self.down = self._way(
            cluster.latency_down, cluster.transfer_down, f"latency down{stream}", seed
        )
        at_random = partial(RandomResource, seed=seed, stream=stream)
        kinds: dict[str, Any] = {"lowest_rank": simpy.PriorityResource, "random": at_random}
        self.server = kinds.get(cluster.discipline, simpy.Resource)(self.env)
        self.version, self.taken, self.open = 0, 0, n
        self.rows: list[tuple[Any, ...]] = []
        self.reads = [deque([(0, 0.0)]) for _ in range(n)]
        # Of the policy: how stale is too stale, messages per version, and whether computations are
        # stopped.
        self.limit = {"barrier": 1}.get(self.policy.name, self.policy.limit)
        self.batch = self.policy.count or (n if self.policy.name == "barrier" else 1)
        self.stops = self.policy.name in ("barrier", "cancel_stale")
        self.clock, self.buffered, self.computing = [0] * n, 0, set[int]()
        self.contributed, self.next_round, self.updated = set[int](), set[int](), set[int]()
        self.changed = self.env.event()  # a version was made, or the slowest clock moved
        self.processes = [self.env.process(self._work(i)) for i in range(n)]
        while env is None and self.taken < commits:
            self.env.step()

    def _work(self, i):
        env, reads, compute, up, down = self.env, self.reads[i], self.compute, self.up, self.down
        protocol, governed = self.cluster.protocol, self.policy.name != "asynchronous"
        reads_first = protocol == "read_then_write"
        reads_apart = reads_first and self.cluster.separate_reads
        while True:
            start, (read_version, read_time) = env.now, reads[0]
            duration, outcome = compute(i), None
            if self.stops and self._outdated(read_version):
                outcome = "cancelled"
            else:
                self.computing.add(i)
                try:
                    yield env.timeout(duration)
                except simpy.Interrupt:
                    outcome = "cancelled"
                self.computing.discard(i)
            send = arrive = serve = env.now
            if outcome is None:
                if reads_apart:
                    yield from up(i, loaded=False)
                    yield from self._visit(i)
                    self._read(i)
                    yield from down(i)
                yield from up(i)
                arrive, serve = yield from self._visit(i)
                if reads_first and not reads_apart:
                    self._read(i)
                outcome = self._decide(i, read_version) if governed else self._apply()
            times = start, send, arrive, serve, env.now
            self.open -= 1
            self.rows.append((i, *times, read_version, read_time, self.version, outcome, self.open))
            reads.popleft()
            if governed:
                yield from self._wait(i, outcome)
            if protocol == "write_then_read":
                yield from self._visit(i)
            if not reads:
                self._read(i)
            yield from down(i, loaded=not reads_apart)

    def _visit(self, i):
        """Wait for the server and be served; return the times of arrival and of service."""
        arrive = self.env.now
        rank = {"priority": i} if self.cluster.discipline == "lowest_rank" else {}
        with self.server.request(**rank) as turn:
            yield turn
            serve = self.env.now
            yield self.env.timeout(self.service(i))
        return arrive, serve

    def _read(self, i):
        self.reads[i].append((self.version, self.env.now))
        self.open += 1

    def _way(self, law, transfer, purpose, seed):
        """Return a generator function for a message's travel."""
        env, latency = self.env, delays([law] * self.cluster.workers, seed, purpose)
        no_latency = law == Constant(0.0)
        link = simpy.Resource(env) if self.cluster.shared_bandwidth else None

        def travel(worker, loaded=True):
            transfer_time = transfer if loaded and link is None else 0.0
            if loaded and link is not None:
                with link.request() as turn:
                    yield turn
                    yield env.timeout(transfer)
            if not no_latency or transfer_time:
                yield env.timeout(latency(worker) + transfer_time)

        return travel

    # Decisions of the server

    def _apply(self):
        self.taken += 1
        self.version += 1
        return "applied"

    def _decide(self, i, read_version):
        if self._outdated(read_version):
            return "discarded"
        slowest = min(self.clock)
        self.clock[i] += 1
        if self.policy.name == "rounds":
            complete = self._round(i)
        elif self.policy.name == "buckets":
            self.contributed.add(i % self.batch)
            complete = len(self.contributed) == self.batch
            self.contributed -= self.contributed if complete else set()
        else:
            self.buffered += 1
            complete = self.buffered == self.batch
        if complete:
            self._apply()
            self.buffered = 0
        else:
            self.taken += 1
        # Wake the waiting workers only when it may be their turn; earlier wake-ups would change
        # their order.
        if min(self.clock) > slowest if self.policy.name == "bounded_staleness" else complete:
            changed, self.changed = self.changed, self.env.event()
            changed.succeed()
        return "applied" if complete else "buffered"

    def _outdated(self, read_version):
        return self.limit is not None and self.version - read_version >= self.limit

    def _round(self, i):
        """Algorithm 1 of Ringleader as sets: who contributed in the first phase, who was updated in
        the second.
        """
        everyone = set(range(self.cluster.workers))
        if not self.updated:
            self.contributed.add(i)
            if self.contributed < everyone:
                return False
            self.updated = {i}
        elif i in self.updated:
            self.next_round.add(i)
            return False
        else:
            self.updated.add(i)
        if self.updated == everyone:
            self.contributed, self.next_round, self.updated = self.next_round, set(), set()
        return True

    def _wait(self, i, outcome):
        if self.policy.name in ("first_of", "barrier") and outcome == "buffered":
            yield self.changed
        elif outcome == "applied" and not self._ahead(i):
            yield self.env.timeout(0)  # workers that waited resume first
        while self._ahead(i):
            yield self.changed
        if outcome == "applied" and self.stops:
            for worker in sorted(self.computing):
                if self._outdated(self.reads[worker][0][0]):
                    self.processes[worker].interrupt()

    def _ahead(self, i):
        return (
            self.policy.name == "bounded_staleness"
            and self.clock[i] - min(self.clock) > self.policy.bound
        )


class RandomResource(simpy.Resource):
    """A resource that serves one request at a time, chosen uniformly among the waiting ones."""

    def __init__(self, env, seed, stream):
        super().__init__(env)
        self.uniform = delays([Uniform(0.0, 1.0)], seed, f"discipline{stream}")

    def _trigger_put(self, _):
        waiting = self.put_queue
        if waiting and self.count < self.capacity:
            chosen = int(self.uniform(0) * len(waiting)) if len(waiting) > 1 else 0
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            self._do_put(waiting.pop())
