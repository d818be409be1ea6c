"""The event engine: who visits the server when.

SimPy's environment is the event engine: each end of a computation, of a journey and of a service is
one event in its queue. A worker waits for one thing at a time, so it *is* its next event, used again
and again: no process and no request object, and two events per visit when the network takes no time.

What a worker does is a chain of steps. A step is a function that sets a worker going and knows the
step that follows; the protocols are ways to chain them. Where every message is applied, versions are not
followed during the run: `asyncsim.traces.bookkeeping` counts them from its record.
"""

from array import array
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law
from asyncsim.clusters.network import takes_no_time
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import OpenStation, Station, Step, Worker, waiting_room
from asyncsim.traces.bookkeeping import COMMIT_RECORD

#: Up to so many workers SimPy's own queue is the faster one.
_FEW = 3_000
#: Computations that end in one period, on average.
_PER_PERIOD = 64


def environment(cluster: Cluster) -> simpy.Environment:
    """Return a SimPy environment fit for as many workers as the cluster has."""
    if cluster.workers <= _FEW:
        return simpy.Environment()
    laws, windows = cluster.compute_laws, cluster.windows
    ends_per_second = sum(1.0 / (law.mean * window) for law, window in zip(laws, windows, strict=True))
    return PeriodicEnvironment(_PER_PERIOD / ends_per_second)


class PeriodicEnvironment(simpy.Environment):
    """A SimPy environment whose queue holds the near future only.

    SimPy keeps all pending events in one heap. With 100,000 workers every push and every pop walks
    through 17 levels of it, in memory that no cache holds. Here time is cut into periods. SimPy's queue
    holds the events of the current one; those of a later period lie in a plain list until it begins.
    Events happen in SimPy's order: by time, then by priority, then in the order of scheduling.

    ``period``: length of a period, seconds. Best when some tens of events fall into one.
    """

    def __init__(self, period: float):
        super().__init__()
        self._periods_per_second = 1.0 / period
        self._current = 0
        self._later: dict[int, list[Any]] = {}
        self._begins: list[int] = []

    def schedule(self, event: simpy.Event, priority: Any = NORMAL, delay: float = 0) -> None:
        """Schedule an event, as in SimPy."""
        time = self._now + delay
        entry = (time, priority, next(self._eid), event)
        period = int(time * self._periods_per_second)
        if period <= self._current:
            heappush(self._queue, entry)
        elif period in self._later:
            self._later[period].append(entry)
        else:
            self._later[period] = [entry]
            heappush(self._begins, period)

    def step(self) -> None:
        """Process the next event, as in SimPy."""
        if not self._queue:
            self._begin_next_period()
        _step(self)

    def peek(self) -> float:
        """Return the time of the next event, as in SimPy."""
        if not self._queue:
            self._begin_next_period()
        return _peek(self)

    def _begin_next_period(self) -> None:
        if self._begins:
            self._current = heappop(self._begins)
            self._queue = self._later.pop(self._current)
            heapify(self._queue)


_step = simpy.Environment.step
_peek = simpy.Environment.peek


#: Commits between two updates of the progress bar: a fraction of a second.
_BLOCK = 20_000


class Simulation:
    """One run: the record of its visits, and the steps that write it.

    Attributes
    ----------
    commits, reads : list of float
        Visits in the order in which their services ended, entry by entry: those of ``commit_record``, and those of
        `asyncsim.traces.bookkeeping.READ_RECORD`.
    commit_record : tuple of str
        What is recorded of each commit.
    """

    commit_record: tuple[str, ...] = COMMIT_RECORD

    def __init__(self, cluster: Cluster, seed: int):
        self.cluster = cluster
        self.seed = seed
        self.commits: list[float] = []
        self.reads: list[float] = []
        self.env = environment(cluster)
        service = self._delays(cluster.service, "service")
        self.server: Station | OpenStation = (
            OpenStation(self.env, cluster.workers, service)
            if cluster.discipline == "lock_free"
            else self._station(service, waiting_room(cluster.discipline, seed))
        )
        # Of each worker's last computation. What takes no time to arrive is not followed apart: it sets off then.
        self.start_time = array("d", [0.0]) * cluster.workers
        at_once = takes_no_time(cluster.ways[0].latency) and not any(cluster.ways[0].transfer)
        reads_first = cluster.separate_reads and cluster.protocol == "read_then_write"
        #: The number of each worker's computation, from one: told where only some of its visits leave its site.
        self.visits = [0] * cluster.workers
        self.send_time = self.server.arrive_time if at_once and not reads_first else self.start_time[:]

    def run(self, commits: int, report: Callable[[int], None]) -> None:
        """Run until the server has accepted ``commits`` messages; report progress now and then."""
        start = self._round()
        for index in range(self.cluster.workers):
            start(Worker(self.env, index))
        step, (record, width) = self.env.step, self._accepted()
        for stop in [*range(_BLOCK, commits, _BLOCK), commits]:
            length = stop * width
            while len(record) < length:
                step()
            report(stop)

    def present(self) -> dict[str, np.ndarray]:
        """Return who waits at the server or is served, and since when."""
        server = self.server
        served = [] if server.serving is None else [server.serving]
        worker = np.array(sorted(worker.index for worker in [*server.waiting, *served]), np.int64)
        return {"worker": worker, "arrive_time": np.array(server.arrive_time)[worker]}

    def _accepted(self) -> tuple[list[float], int]:
        """Return a list, and how many entries each accepted message adds to it."""
        return self.commits, len(COMMIT_RECORD)

    def _round(self) -> Step:
        """Chain a worker's steps from one computation to the next, and return the computation."""
        computed: list[Callable[[Any], None]] = []
        compute = self._compute(computed)
        if self.cluster.far_every > 1:
            compute = self._counted(compute)
        up, down = self._way(0), self._way(1)
        visit, commit, read = self.server.visit, self._commit, self._read
        if not self.cluster.separate_reads:
            first = up(visit(self._atomic(down(compute))))
        elif self.cluster.protocol == "write_then_read":
            first = up(visit(commit(visit(read(down(compute))))))
        else:
            acknowledged = down(compute, loaded=False)
            first = up(visit(read(down(up(visit(commit(acknowledged)))))), loaded=False)
        computed.append(first)
        return compute

    def _compute(self, computed: list[Callable[[Any], None]]) -> Step:
        cluster, env, start_time, send_time = self.cluster, self.env, self.start_time, self.send_time
        duration = delays(cluster.compute_laws, self.seed, "compute", cluster.windows)

        def compute(worker: Worker) -> None:
            index = worker.index
            start_time[index] = env._now
            worker.callbacks = computed
            env.schedule(worker, NORMAL, duration(index))

        def compute_and_send(worker: Worker) -> None:
            index = worker.index
            lasts = duration(index)
            start_time[index] = env._now
            send_time[index] = env._now + lasts
            worker.callbacks = computed
            env.schedule(worker, NORMAL, lasts)

        return compute if send_time is self.server.arrive_time else compute_and_send

    def _counted(self, then: Step) -> Step:
        def count(worker: Worker) -> None:
            self.visits[worker.index] += 1
            then(worker)

        return count

    def _way(self, direction: int) -> Callable[..., Step]:
        """Return the function that puts a journey before a step: up to the server, 0, or down, 1."""
        env, cluster, seed = self.env, self.cluster, self.seed
        way, near = cluster.ways[direction], cluster.near_ways[direction]
        name, transfer = f"latency {('up', 'down')[direction]}", way.transfer
        latency = delays(way.latency, seed, name)
        if now_and_then := cluster.far_every > 1 and way != near:
            far, visits, every = delays(way.latency, seed, f"far {name}"), self.visits, cluster.far_every
            latency = delays(near.latency, seed, name)

        def loaded(index: int) -> float:
            return latency(index) + transfer[index]

        def near_or_far(index: int, loaded: bool = True) -> float:
            if visits[index] % every:
                return latency(index) + (near.transfer[index] if loaded else 0.0)
            return far(index) + (transfer[index] if loaded else 0.0)

        def travel(then: Step, with_parameters: bool) -> Step:
            lasts = loaded if with_parameters and any(transfer) else latency
            if now_and_then:
                lasts = near_or_far if with_parameters else lambda index: near_or_far(index, loaded=False)
            elif lasts is latency and takes_no_time(way.latency):
                return then
            arrived: list[Callable[[Any], None]] = [then]

            def depart(worker: Worker) -> None:
                worker.callbacks = arrived
                env.schedule(worker, NORMAL, lasts(worker.index))

            return depart

        links: list[Station] = []
        if cluster.shared_bandwidth:
            apart = cluster.sites if cluster.sites is not None and cluster.far_bandwidth is not None else ()
            links = [self._station(transfer.__getitem__, deque()) for _ in apart or (0,)]
            link_of = np.repeat(np.arange(len(apart)), apart).tolist()

        def put_before(then: Step, loaded: bool = True) -> Step:
            if not loaded or not links:
                return travel(then, loaded)
            enter = [link.visit(travel(then, False)) for link in links]
            return enter[0] if len(enter) == 1 else lambda worker: enter[link_of[worker.index]](worker)

        return put_before

    def _atomic(self, then: Step) -> Step:
        """Return the step of a visit that commits and reads; the version shows what it read."""
        return self._commit(then)

    def _commit(self, then: Step) -> Step:
        env, server, record = self.env, self.server, self.commits.extend
        start_time, send_time, arrive_time = self.start_time, self.send_time, self.server.arrive_time

        def commit(worker: Worker) -> None:
            index = worker.index
            record((index, start_time[index], send_time[index], arrive_time[index], server.serve_time, env._now))
            then(worker)

        return commit

    def _read(self, then: Step) -> Step:
        env, server, record = self.env, self.server, self.reads.extend
        commits, width = self.commits, len(COMMIT_RECORD)

        def read(worker: Worker) -> None:
            index = worker.index
            version = len(commits) // width
            record((index, version, server.arrive_time[index], server.serve_time, env._now))
            then(worker)

        return read

    def _delays(self, law: Law, purpose: str) -> Callable[[int], float]:
        return delays([law] * self.cluster.workers, self.seed, purpose)

    def _station(self, busy: Callable[[int], float], waiting: Any) -> Station:
        return Station(self.env, self.cluster.workers, busy, waiting)
