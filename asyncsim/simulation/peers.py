"""Simulate clusters without a server: computations, and the messages between workers.

There are two kinds of events: a worker's gradient is applied, and a worker continues with its next
computation. A message needs no event, as its arrival is known when it is sent. At each instant
gradients are applied first, worker by worker; then workers continue. So a message that takes no
time has arrived for all computations that begin at the instant of its sending. Failures come first
of all.

A crash, or a departure, ends the life of a worker, with its replica and the messages not taken up.
The others count the worker until the failure is detected. A returning worker copies the replica of
the living neighbour that applied a gradient last, and takes part from the newest round of its
neighbours on. `asyncsim.simulation.messages` and `asyncsim.simulation.handshakes` have the
exchanges.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from simpy.events import EventPriority

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.network import takes_no_time
from asyncsim.clusters.topologies import Topology
from asyncsim.simulation.absences import Absences
from asyncsim.simulation.clock import Clock, Record
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import Worker
from asyncsim.simulation.weather import Weather
from asyncsim.traces.bookkeeping import trace_without_server
from asyncsim.traces.columns import APPLIED, CANCELLED, GOSSIP, NOTHING, Source
from asyncsim.traces.tables import Columns
from asyncsim.traces.trace import Trace

#: A row of `Trace.in_flight`.
Flying = tuple[int, int, float, float]


class Peers(ABC):
    """Workers that compute and exchange with each other; subclasses define the exchange.

    Attributes
    ----------
    rows : Record
        Each gradient: its worker, the begin and end of its computation, and when it was applied.
        With failures also cancelled computations.
    causes : Record
        With failures, for each row: the worker's round, the version that the computation began
        from, when the worker could have begun it, the outcome and its cause, and how often the
        worker had lost its state.
    absences : Absences or None
        With failures, the absences of workers.
    """

    def __init__(self, cluster: Cluster, seed: int):
        assert cluster.topology is not None
        n = cluster.workers
        self.cluster, self.seed, self.topology = cluster, seed, cluster.topology
        self.clock = Clock()
        self.rows = Record(("worker", "start_time", "send_time", "commit_time"))
        self.causes = Record(
            ("round", "read_version", "ready_time", "outcome", "failed_by", "incarnation")
        )
        self.records = [self.rows, self.causes]
        self.workers = [Worker(self.clock, index) for index in range(n)]  # the present life of each
        self.applied = [0] * n  # gradients of each worker; of one that was away, its round
        self.start_time, self.end_time = [0.0] * n, [0.0] * n
        self.duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
        self.latency, self.transfer, self.at_once = _journeys(cluster, self.topology, seed)
        self.accepted: list[int] = []
        self.commits = 0
        # Callback lists, shared by all events: a new list per event would cost time.
        self._apply: list[Callable[[Any], None]] = [self.apply]
        self._resume: list[Callable[[Any], None]] = [self.resume]
        self.absences: Absences | None = None
        if cluster.failures:
            self.weather = weather = Weather(cluster.failures, n, cluster.sites, seed)
            # Failures come before all else: who is away is the same for all events of an instant.
            self.absences = Absences(
                cluster,
                weather,
                self.clock,
                self.rows,
                self,
                fruitless="no gradient was applied",
                priority=EventPriority(-1),
            )
            self.absences.schedule()
            if weather.slows:
                work, working_time, clock = self.duration, weather.working_time, self.clock
                self.duration = lambda index: working_time(index, clock._now, work(index))
            self.counted = {index for index in range(n) if weather.present[index]}
            self.computing = [False] * n
            self.read_version, self.ready_time = [0] * n, [0.0] * n
            self._has_row = [False] * n  # in its present life
            # Both directions of an edge: a death concerns those that send to a worker as well.
            self._near = self.topology.neighbours(n)
            for index, takers in enumerate(self.topology.neighbours(n)):
                for taker in takers:
                    self._near[taker] = sorted({*self._near[taker], index})
            self._copy_latency, self._copy_transfer, _ = _journeys(
                cluster, self.topology, seed, "latency down"
            )

    def run(self, commits: int, report: Callable[[int], None]) -> None:
        """Run until ``commits`` gradients were applied; report the progress."""
        self.commits = commits
        # An absent worker begins when it joins.
        for index in range(self.cluster.workers) if self.absences is None else sorted(self.counted):
            self.compute(index, 0.0)
        self.clock.run_until(commits, self.accepted, self.records, report)

    def compute(self, index: int, now: float) -> None:
        """Begin a computation."""
        self.start_time[index] = now
        self.end_time[index] = end = now + self.duration(index)
        if self.absences is not None:
            self.computing[index] = True
        self.finish_at(index, end)

    @abstractmethod
    def finish_at(self, index: int, end: float) -> None:
        """Schedule the worker's next step for the end of its computation."""

    @abstractmethod
    def apply(self, worker: Worker) -> None:
        """Apply a gradient."""

    @abstractmethod
    def resume(self, worker: Worker) -> None:
        """Begin the next computation, or an exchange."""

    def apply_at(self, index: int, time: float) -> None:
        """Schedule the end of a gradient: the first events of an instant, worker by worker."""
        worker = self.workers[index]
        worker.callbacks = self._apply
        # The index is the event's priority.
        self.clock.schedule_at(worker, time, index)

    def resume_at(self, index: int, time: float) -> None:
        """Schedule a worker's next step: after all gradients of an instant."""
        worker = self.workers[index]
        worker.callbacks = self._resume
        self.clock.schedule_at(worker, time, self.cluster.workers + index)

    def add_row(self, index: int) -> bool:
        """Record a gradient that is applied now; return whether the run continues."""
        self.rows.entries.extend(
            (index, self.start_time[index], self.end_time[index], self.clock._now)
        )
        self.accepted.append(index)
        if self.absences is not None:
            self._add_cause(index, APPLIED, NOTHING)
            self.read_version[index], self._has_row[index] = len(self.accepted), True
        self.applied[index] += 1
        return len(self.accepted) < self.commits

    def _add_cause(self, index: int, outcome: int, failed_by: int) -> None:
        """Record the outcome of a row, after which its worker waits."""
        assert self.absences is not None
        versions = self.applied[index], self.read_version[index], self.ready_time[index]
        self.causes.entries.extend(
            (*versions, outcome, failed_by, self.absences.incarnation[index])
        )
        self.absences.count_row(outcome == APPLIED)
        self.ready_time[index], self.computing[index] = self.clock._now, False

    @abstractmethod
    def trace(self) -> Trace:
        """Return the trace of the run."""

    # Absences.

    def end_life(self, index: int, failed_by: int) -> None:
        """End a worker's life: its next event does nothing, and its computation is cancelled."""
        now = self.clock._now
        # A scheduled event cannot be removed from the clock's queue.
        self.workers[index].callbacks = []
        self.workers[index] = Worker(self.clock, index)
        begin, end = (
            (self.start_time[index], min(self.end_time[index], now))
            if self.computing[index]
            else (now, now)
        )
        self.rows.entries.extend((index, begin, end, now))
        self._add_cause(index, CANCELLED, failed_by)
        self._has_row[index] = False

    def dismiss(self, index: int) -> None:
        """Count a worker no more; release the workers that waited for it."""
        self.counted.discard(index)

    def begin_life(self, index: int) -> None:
        """Let a returning worker copy a replica (the initial one if no peer lives), and compute."""
        assert self.absences is not None
        now, away = self.clock._now, self.absences.away
        self.counted.add(index)
        self.ready_time[index] = now
        # A peer without a row in its life may itself still be copying.
        living = [
            peer for peer in range(self.cluster.workers) if self._has_row[peer] and not away[peer]
        ]
        near = [peer for peer in living if peer in self._near[index]]
        source = max(near or living, key=self.read_version.__getitem__, default=None)
        self.read_version[index] = 0 if source is None else self.read_version[source]
        if source is not None:
            now += self._copy_latency(index, source) + self._copy_transfer(source, index)
        self.workers[index].callbacks = [lambda worker: self.compute(index, self.clock._now)]
        self.clock.schedule_at(self.workers[index], now, self.cluster.workers + index)

    def trace_of(
        self,
        takes_up: str,
        rows: Columns,
        taken_up: Columns,
        in_flight: Sequence[Flying],
    ) -> Trace:
        """Build the trace from the record and the messages."""
        cluster, rows = self.cluster, self.rows.table() | rows
        worker, start = rows["worker"].astype(np.int64), np.array(self.start_time)
        rows["local_steps"] = np.array(cluster.windows)[worker]
        source = Source(
            cluster.workers,
            GOSSIP,
            max(cluster.windows),
            seed=self.seed,
            cluster=cluster,
            takes_up=takes_up,
        )
        names = ("step", "taker", "weight", "arrive_time")
        flying = dict(zip(names, np.array(in_flight).reshape(-1, len(names)).T, strict=True))
        if self.absences is not None:
            open_reads = {
                "start_time": np.where(self.computing, start, np.nan),
                "read_version": np.array(self.read_version),
                "ready_time": np.array(self.ready_time),
                "is_away": np.array(self.absences.away) > 0,
            }
            rows |= self.causes.table()
            return trace_without_server(
                source, rows, taken_up, flying, open_reads, self.absences.table()
            )
        # A worker whose last gradient was just applied has begun no other computation: its start
        # time is that of its last row.
        started = np.full(cluster.workers, -1.0)
        started[worker] = rows["start_time"]
        open_reads = {"start_time": np.where(start > started, start, np.nan)}
        return trace_without_server(source, rows, taken_up, flying, open_reads)


def _journeys(
    cluster: Cluster, topology: Topology, seed: int, purpose: str = "latency up"
) -> tuple[Callable[[int, int], float], Callable[[int, int], float], bool]:
    """Return functions of sender and taker, latency and transfer time (s); and if both are 0."""
    (near, _), (far, _) = cluster.near_ways, cluster.ways
    at_once = takes_no_time(far.latency + near.latency) and not any(far.transfer + near.transfer)
    latency, slow = delays(near.latency, seed, purpose), topology.slowness(cluster.workers)
    if near == far and not slow:
        return (
            lambda sender, taker: latency(sender),
            lambda sender, taker: near.transfer[sender],
            at_once,
        )
    between = delays(far.latency, seed, f"far {purpose}")
    site = cluster.site_of

    def travel(sender: int, taker: int) -> float:
        drawn = latency(sender) if site[sender] == site[taker] else between(sender)
        return drawn * slow.get((sender, taker), 1.0)

    def transfer(sender: int, taker: int) -> float:
        way = near if site[sender] == site[taker] else far
        return way.transfer[sender] * slow.get((sender, taker), 1.0)

    return travel, transfer, at_once
