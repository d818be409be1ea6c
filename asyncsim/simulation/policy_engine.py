"""The event engine under a timing policy: it follows versions as it goes, since decisions depend on them.

The steps are those of `asyncsim.simulation.engine`; what differs is what follows a commit. The server decides what
becomes of the message, who goes on (the worker, nobody, or several who waited), and whose computation is stopped.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from asyncsim.clusters.cluster import Cluster
from asyncsim.simulation.admission import Admission
from asyncsim.simulation.engine import Simulation
from asyncsim.simulation.station import Step, Worker
from asyncsim.traces.bookkeeping import COMMIT_RECORD
from asyncsim.traces.trace import APPLIED, CANCELLED, DISCARDED


class PolicySimulation(Simulation):
    """One run under a policy; every read is recorded, and with every message what became of it."""

    commit_record = (*COMMIT_RECORD, "outcome")

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

    def _taken_up(self) -> tuple[list[float], int]:
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
        """Stop the computations that the newest version has made outdated, in the order of workers."""
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
