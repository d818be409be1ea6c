"""The event engine under a timing policy: it follows versions as it goes, since decisions depend on them.

The steps are those of `asyncsim.simulation.engine`; what differs is what follows a commit. The server decides what
becomes of the message, who goes on (the worker, nobody, or several who waited), and whose computation is stopped.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.policy import Policy
from asyncsim.simulation.engine import Simulation
from asyncsim.simulation.station import Step, Worker
from asyncsim.traces.bookkeeping import COMMIT_RECORD
from asyncsim.traces.columns import APPLIED, BUFFERED, CANCELLED, DISCARDED

Member = TypeVar("Member")


class Admission(Generic[Member]):
    """The state of the server's policy.

    Attributes
    ----------
    version : int
        The newest there is.
    """

    def __init__(self, policy: Policy, workers: int):
        self.version = 0
        self._limit = policy.staleness_limit
        if policy.name == "rounds":
            self._completes = rounds_of(workers)
        elif policy.name == "buckets":
            self._completes = buckets_of(policy.per_version(workers))
        else:
            self._completes = batches_of(policy.per_version(workers))
        self._waits_for_version = policy.waits_for_version
        self._bound = policy.bound
        self._clocks = [0] * workers
        self._workers_at = Counter({0: workers})
        self._slowest = 0
        self._waiting: list[Member] = []

    def take(self, index: int, read_version: int) -> int:
        """Return the outcome of a worker's message that was computed from a version; make a version if one is due."""
        if self.outdated(read_version):
            return DISCARDED
        if not self._completes(index):
            return BUFFERED
        self.version += 1
        return APPLIED

    def outdated(self, read_version: int) -> bool:
        """Return whether a message computed from a version is too stale to be accepted."""
        return self._limit is not None and self.version - read_version >= self._limit

    def who_goes_on(self, worker: Member, index: int, outcome: int) -> Sequence[Member]:
        """Return the workers that go on after a message: those that waited for it, then the sender if it may."""
        if self._bound is not None:
            return self._within_bound(worker, index, self._bound)
        if not self._waits_for_version or outcome == DISCARDED:
            return (worker,)
        self._waiting.append(worker)
        return self._all_waiting() if outcome == APPLIED else ()

    def _within_bound(self, worker: Member, index: int, bound: int) -> Sequence[Member]:
        clock = self._clocks[index]
        self._clocks[index] = clock + 1
        self._workers_at[clock] -= 1
        self._workers_at[clock + 1] += 1
        moved = clock == self._slowest and not self._workers_at[clock]
        if moved:
            del self._workers_at[clock]
            self._slowest += 1
        # All that wait have the same clock, one more than the bound allowed: whoever waits may go on now.
        released = self._all_waiting() if moved else []
        if clock + 1 - self._slowest > bound:
            self._waiting.append(worker)
        else:
            released.append(worker)
        return released

    def _all_waiting(self) -> list[Member]:
        waiting, self._waiting = self._waiting, []
        return waiting


def batches_of(count: int) -> Callable[[int], bool]:
    """Return a function that says whether an accepted message is the last of its batch."""
    taken = 0

    def completes(index: int) -> bool:
        nonlocal taken
        taken = (taken + 1) % count
        return taken == 0

    return completes


def rounds_of(workers: int) -> Callable[[int], bool]:
    """Return a function that says whether a worker's message makes a version; see `asyncsim.rounds`."""
    missing, due, ahead = set(range(workers)), set[int](), set[int]()

    def completes(index: int) -> bool:
        nonlocal missing, due, ahead
        if missing:
            missing.discard(index)
            if missing:
                return False
            due = set(range(workers)) - {index}
        elif index in due:
            due.discard(index)
        else:
            ahead.add(index)
            return False
        if not due:
            missing, ahead = set(range(workers)) - ahead, set()
        return True

    return completes


def buckets_of(count: int) -> Callable[[int], bool]:
    """Return a function that says whether a message comes into the last empty bucket; see `asyncsim.buckets`."""
    filled = set[int]()

    def completes(index: int) -> bool:
        filled.add(index % count)
        if len(filled) < count:
            return False
        filled.clear()
        return True

    return completes


class PolicySimulation(Simulation):
    """One run under a policy; records every read, and the outcome of every message."""

    commit_record: tuple[str, ...] = (*COMMIT_RECORD, "outcome")

    def __init__(self, cluster: Cluster, seed: int):
        super().__init__(cluster, seed)
        workers = cluster.workers
        self.admission: Admission[Worker] = Admission(cluster.policy, workers)
        self.taken: list[float] = []
        self.serve_time = array("d", [0.0]) * workers  # begin of each one's last service
        self.last_read = [0] * workers  # version of each one's last read
        self.read_version = [0] * workers  # version that each one's computation started from
        self._stops = cluster.policy.stops_computations
        self._computing: dict[int, Worker] = {}
        # Who began a computation from each version; the computation may be over since.
        self._began_from: dict[int, list[int]] = defaultdict(list)

    def _accepted(self) -> tuple[list[float], int]:
        return self.taken, 1

    def _compute(self, computed: list[Callable[[Any], None]]) -> Step:
        begin, last_read, read_version = super()._compute(computed), self.last_read, self.read_version

        def compute(worker: Worker) -> None:
            index = worker.index
            read_version[index] = last_read[index]
            begin(worker)

        def compute_if_up_to_date(worker: Worker) -> None:
            compute(worker)
            index = worker.index
            self._computing[index] = worker
            if self.admission.outdated(read_version[index]):
                self._stop(index)
            else:
                self._began_from[read_version[index]].append(index)

        def finish(worker: Worker) -> None:
            del self._computing[worker.index]

        if not self._stops:
            return compute
        computed.append(finish)
        return compute_if_up_to_date

    def _atomic(self, then: Step) -> Step:
        if self.cluster.protocol == "read_then_write":
            return self._read(self._commit(then))
        return self._commit(self._reply(then))

    def _commit(self, then: Step) -> Step:
        env, server, admission, record = self.env, self.server, self.admission, self.commits.extend
        start_time, send_time = self.start_time, self.send_time
        arrive_time, serve_time = self.server.arrive_time, self.serve_time
        self._go_on = then

        def commit(worker: Worker) -> None:
            index = worker.index
            serve_time[index] = server.serve_time
            outcome = admission.take(index, self.read_version[index])
            times = start_time[index], send_time[index], arrive_time[index], server.serve_time, env._now
            record((index, *times, outcome))
            if outcome != DISCARDED:
                self.taken.append(index)
            for one in admission.who_goes_on(worker, index, outcome):
                then(one)
            if self._stops and outcome == APPLIED:
                self._stop_outdated()

        return commit

    def _reply(self, then: Step) -> Step:
        """Return the step that reads for a worker without a visit of its own: in a commit, or when it is let go."""
        read = self._recorded_read

        def reply(worker: Worker) -> None:
            read(worker.index, self.serve_time[worker.index])
            then(worker)

        return reply

    def _read(self, then: Step) -> Step:
        read, server = self._recorded_read, self.server

        def visit(worker: Worker) -> None:
            read(worker.index, server.serve_time)
            then(worker)

        return visit

    def _recorded_read(self, index: int, serve_time: float) -> None:
        version = self.last_read[index] = self.admission.version
        self.reads.extend((index, version, self.server.arrive_time[index], serve_time, self.env._now))

    def _stop_outdated(self) -> None:
        """Stop the computations that the newest version has made too stale, in the order of workers."""
        limit = self.cluster.policy.staleness_limit
        assert limit is not None
        version = self.admission.version - limit
        for index in sorted(set(self._began_from.pop(version, ()))):
            if index in self._computing and self.read_version[index] == version:
                self._stop(index)

    def _stop(self, index: int) -> None:
        """Stop a computation and send its worker the newest version."""
        now = self.env._now
        # Its end is still in the event queue, and finds nothing to do.
        self._computing.pop(index).callbacks = []
        self.commits.extend((index, self.start_time[index], now, now, now, now, CANCELLED))
        self.server.arrive_time[index] = self.serve_time[index] = now
        self._go_on(Worker(self.env, index))
