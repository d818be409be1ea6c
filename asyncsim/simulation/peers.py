"""Simulate clusters without a server: computations, messages, and the gradients that take messages up.

There are two kinds of events: a worker's gradient is applied, and a worker continues with its next
computation. A message needs no event, as its arrival is known when it is sent. At each instant
gradients are applied first, worker by worker; then workers continue. So a message that takes no time
has arrived for all computations that begin at the instant of its sending.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import require_memory
from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.network import takes_no_time
from asyncsim.clusters.topologies import Topology
from asyncsim.simulation.clock import Record, clock_for
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import Worker
from asyncsim.traces.bookkeeping import trace_without_server
from asyncsim.traces.columns import GOSSIP, Source
from asyncsim.traces.tables import Columns
from asyncsim.traces.trace import Trace

#: Rows between two updates of the progress bar.
_BLOCK = 20_000
#: Memory (bytes) of a message in a trace.
_MESSAGE_BYTES = 120
#: Partners drawn at once for a worker.
_PARTNERS = 64
#: A row, a share of its state, and when it arrives (s).
_Message = tuple[int, float, float]


def simulate_without_server(cluster: Cluster, commits: int, seed: int, report: Callable[[int], None]) -> Trace:
    """Simulate a cluster with a topology until ``commits`` gradients were applied."""
    peers = Handshakes(cluster, seed) if cluster.policy.name == "handshake" else Messages(cluster, seed, commits)
    peers.run(commits, report)
    return peers.trace()


class Peers(ABC):
    """Workers that compute and exchange with each other; the subclasses say how.

    Attributes
    ----------
    rows : Record
        Each gradient: its worker, the begin and end of its computation, and when it was applied.
    """

    def __init__(self, cluster: Cluster, seed: int):
        assert cluster.topology is not None
        n = cluster.workers
        self.cluster, self.seed, self.topology = cluster, seed, cluster.topology
        self.clock = clock_for(cluster)
        self.rows = Record(("worker", "start_time", "send_time", "commit_time"))
        self.records = [self.rows]
        self.workers = [Worker(self.clock, index) for index in range(n)]
        self.applied = [0] * n  # gradients of each worker
        self.start_time, self.end_time = [0.0] * n, [0.0] * n
        self.duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
        self.latency, self.transfer, self.at_once = _journeys(cluster, self.topology, seed)
        self.accepted: list[int] = []
        self.commits = 0
        self._apply: list[Callable[[Any], None]] = [self.apply]
        self._go_on: list[Callable[[Any], None]] = [self.go_on]

    def run(self, commits: int, report: Callable[[int], None]) -> None:
        """Run until ``commits`` gradients were applied; report the progress."""
        self.commits = commits
        for index in range(self.cluster.workers):
            self.compute(index, 0.0)
        step, accepted = self.clock.step, self.accepted
        for stop in [*range(_BLOCK, commits, _BLOCK), commits]:
            while len(accepted) < stop:
                step()
            for record in self.records:
                record.pack()
            report(stop)

    @abstractmethod
    def compute(self, index: int, now: float) -> None:
        """Begin a computation."""

    @abstractmethod
    def apply(self, worker: Worker) -> None:
        """Apply a gradient."""

    @abstractmethod
    def go_on(self, worker: Worker) -> None:
        """Begin the next computation, or an exchange."""

    def apply_at(self, index: int, time: float) -> None:
        """Schedule the end of a gradient: the first events of an instant, worker by worker."""
        worker = self.workers[index]
        worker.callbacks = self._apply
        self.clock.schedule_at(worker, time, index)

    def go_on_at(self, index: int, time: float) -> None:
        """Schedule a worker's next step: after all gradients of an instant."""
        worker = self.workers[index]
        worker.callbacks = self._go_on
        self.clock.schedule_at(worker, time, self.cluster.workers + index)

    def add_row(self, index: int) -> bool:
        """Record a gradient that is applied now; return whether the run continues."""
        self.rows.entries.extend((index, self.start_time[index], self.end_time[index], self.clock._now))
        self.accepted.append(index)
        self.applied[index] += 1
        return len(self.accepted) < self.commits

    @abstractmethod
    def trace(self) -> Trace:
        """Return the trace of the run."""

    def trace_of(
        self, takes_up: str, rows: Columns, taken_up: Columns, in_flight: Sequence[tuple[int, int, float, float]]
    ) -> Trace:
        """Build the trace from the record and the messages."""
        cluster, table = self.cluster, self.rows.table()
        worker = table["worker"].astype(np.int64)
        # A worker whose last gradient has just been applied has not begun another.
        started = np.full(cluster.workers, -1.0)
        started[worker] = table["start_time"]
        open_start = np.where(np.array(self.start_time) > started, self.start_time, np.nan)
        source = Source(
            cluster.workers, GOSSIP, max(cluster.windows), seed=self.seed, cluster=cluster, takes_up=takes_up
        )
        rows = table | {"local_steps": np.array(cluster.windows)[worker]} | rows
        flying = np.array(in_flight).reshape(-1, 4).T
        names = ("step", "taker", "weight", "arrive_time")
        return trace_without_server(source, rows, taken_up, dict(zip(names, flying, strict=True)), open_start)


class Messages(Peers):
    """Workers that send after each gradient, under `asynchronous`, `neighbours` and `overlap`."""

    def __init__(self, cluster: Cluster, seed: int, commits: int):
        super().__init__(cluster, seed)
        n, policy = cluster.workers, cluster.policy
        self._edges = self.topology.edges(n)
        per_row = sum(len(edges.sender) for edges in self._edges) / (len(self._edges) * n)
        memory = commits * per_row * _MESSAGE_BYTES
        require_memory(f"commits = {commits}", f"a trace of so many, {per_row:g} messages each", memory)
        self._sends = self.topology.sends(n)
        self._expected = [np.bincount(edges.taker, minlength=n).tolist() for edges in self._edges]
        # Whether a worker waits for the round that lies `behind` its own, and takes up only that.
        self._waits = policy.name != "asynchronous"
        self._behind = policy.steps or 0
        self._by_round = policy.name == "neighbours"
        self._mixes_beside = policy.mix == "beside"
        # The messages of a round to a worker, and their latest arrival; those to take up whenever they arrive.
        self._rounds: list[dict[int, tuple[list[_Message], list[float]]]] = [{} for _ in range(n)]
        self._inbox: list[list[tuple[float, int, float]]] = [[] for _ in range(n)]
        self._mixed: list[list[_Message]] = [[] for _ in range(n)]
        self._waiting, self._ready = [-1] * n, [0.0] * n  # the round that a worker waits for, and since when
        self._taken_up = Record(("step", "weight", "arrive_time", "by"))
        self.records.append(self._taken_up)

    def compute(self, index: int, now: float) -> None:
        """Begin a computation."""
        self.start_time[index] = now
        self.end_time[index] = end = now + self.duration(index)
        if self._mixes_beside:
            self._after_round(self.apply_at, index, self.applied[index] - 1, end)
        else:
            self.apply_at(index, end)

    def go_on(self, worker: Worker) -> None:
        """Take up the messages that have arrived, and compute."""
        index, now = worker.index, self.clock._now
        if self._by_round:
            messages = self._round(index)
        else:
            box, messages = self._inbox[index], []
            while box and box[0][0] <= now:
                arrival, row, share = heappop(box)
                messages.append((row, share, arrival))
            messages.sort()
            self._rounds[index].pop(self.applied[index] - 1 - self._behind, None)
        self._mixed[index] = messages
        self.compute(index, now)

    def apply(self, worker: Worker) -> None:
        """Apply a gradient with the messages taken up for it, and send to the neighbours."""
        index, now = worker.index, self.clock._now
        number = self.applied[index]
        if self._mixes_beside:
            messages = self._round(index)
        else:
            messages, self._mixed[index] = self._mixed[index], []
        row = len(self.accepted)
        for message in messages:
            self._taken_up.entries.extend((*message, row))
        goes_on = self.add_row(index)
        self._send(index, number, row)
        if not goes_on:
            return
        if self._mixes_beside:
            self.compute(index, now)
        else:
            self._after_round(self.go_on_at, index, number - self._behind, now)

    def _send(self, index: int, number: int, row: int) -> None:
        """Send shares of a row's state to the neighbours of a round; wake those whose round is complete."""
        now, part = self.clock._now, number % len(self._edges)
        for taker, share in self._sends[part][index]:
            arrival = now if self.at_once else now + self.latency(index, taker) + self.transfer(index, taker)
            if not self._by_round:
                heappush(self._inbox[taker], (arrival, row, share))
            if not self._waits:
                continue
            messages, latest = self._rounds[taker].setdefault(number, ([], [0.0]))
            messages.append((row, share, arrival))
            latest[0] = max(latest[0], arrival)
            if self._waiting[taker] == number and len(messages) == self._expected[part][taker]:
                self._waiting[taker] = -1
                wake = self.apply_at if self._mixes_beside else self.go_on_at
                wake(taker, max(self._ready[taker], latest[0]))

    def _round(self, index: int) -> list[_Message]:
        """Return the messages of the round before a worker's next gradient, by their rows."""
        messages, _ = self._rounds[index].pop(self.applied[index] - 1, ([], [0.0]))
        return sorted(messages)

    def _after_round(self, schedule: Callable[[int, float], None], index: int, number: int, now: float) -> None:
        """Schedule a worker's next event for the arrival of the last message of a round."""
        if self._waits and number >= 0:
            expected = self._expected[number % len(self._edges)][index]
            messages, latest = self._rounds[index].get(number, ((), (0.0,))) if expected else ((), (0.0,))
            if len(messages) < expected:
                self._waiting[index], self._ready[index] = number, now
                return
            now = max(now, latest[0])
        schedule(index, now)

    def trace(self) -> Trace:
        """Return the trace of the run."""
        n, takers = self.cluster.workers, range(self.cluster.workers)
        waiting: Sequence[list[_Message]] = (
            [[message for messages, _ in rounds.values() for message in messages] for rounds in self._rounds]
            if self._by_round
            else [[(row, share, arrival) for arrival, row, share in box] for box in self._inbox]
        )
        in_flight = [
            (row, taker, share, arrival)
            for taker in takers
            for row, share, arrival in [*self._mixed[taker], *waiting[taker]]
        ]
        worker = self.rows.table()["worker"].astype(np.int64)
        job = pd.Series(worker).groupby(worker).cumcount().to_numpy()
        kept_share = np.array([edges.kept(n) for edges in self._edges])[(job - 1) % len(self._edges), worker]
        rows = {"kept": np.where(job == 0, 1.0, kept_share)}
        return self.trace_of("commit" if self._mixes_beside else "read", rows, self._taken_up.table(), in_flight)


class Handshakes(Peers):
    """Workers that average in pairs, under `handshake`.

    An exchange queues for both replicas at its request. So its begin is known at once: the end of the
    exchanges that either worker requested before.
    """

    def __init__(self, cluster: Cluster, seed: int):
        super().__init__(cluster, seed)
        n = cluster.workers
        self._partner_of = partners(self.topology, n, seed)
        self._partner, self._free = [-1] * n, [0.0] * n
        self._row_partners: list[int] = []

    def compute(self, index: int, now: float) -> None:
        """Begin a computation, and draw the partner for its end."""
        self.start_time[index] = now
        self.end_time[index] = end = now + self.duration(index)
        partner = self._partner[index] = self._partner_of(index, self.applied[index])
        (self.apply_at if self.at_once or partner < 0 else self.go_on_at)(index, end)

    def go_on(self, worker: Worker) -> None:
        """Ask the partner for an exchange."""
        index = worker.index
        partner = self._partner[index]
        begin = max(self.clock._now, self._free[index], self._free[partner])
        request, reply = self.latency(index, partner), self.latency(index, partner)
        end = begin + request + reply + (self.transfer(index, partner) + self.transfer(partner, index))
        self._free[index] = self._free[partner] = end
        self.apply_at(index, end)

    def apply(self, worker: Worker) -> None:
        """Apply a gradient, at the end of an exchange."""
        index = worker.index
        self._row_partners.append(self._partner[index])
        if self.add_row(index):
            self.compute(index, self.clock._now)

    def trace(self) -> Trace:
        """Return the trace of the run."""
        rows = {"kept": np.ones(len(self._row_partners)), "partner": np.array(self._row_partners)}
        return self.trace_of("commit", rows, Record(("step", "weight", "by")).table(), [])


def _journeys(
    cluster: Cluster, topology: Topology, seed: int
) -> tuple[Callable[[int, int], float], Callable[[int, int], float], bool]:
    """Return functions of sender and taker: a message's latency and its transfer time (s); and if both are zero."""
    (near, _), (far, _) = cluster.near_ways, cluster.ways
    at_once = takes_no_time(far.latency + near.latency) and not any(far.transfer + near.transfer)
    latency, slow = delays(near.latency, seed, "latency up"), topology.slowness(cluster.workers)
    if near == far and not slow:
        return lambda sender, taker: latency(sender), lambda sender, taker: near.transfer[sender], at_once
    between = delays(far.latency, seed, "far latency up")
    site = cluster.site_of

    def travel(sender: int, taker: int) -> float:
        drawn = latency(sender) if site[sender] == site[taker] else between(sender)
        return drawn * slow.get((sender, taker), 1.0)

    def transfer(sender: int, taker: int) -> float:
        way = near if site[sender] == site[taker] else far
        return way.transfer[sender] * slow.get((sender, taker), 1.0)

    return travel, transfer, at_once


def partners(topology: Topology, workers: int, seed: int) -> Callable[[int, int], int]:
    """Return a function of a worker and its gradient's number: the neighbour drawn for it; -1 without neighbours.

    The numbers of a worker must be asked for in order, from 0.
    """
    neighbours, streams = topology.neighbours(workers), Streams(seed, "partner")
    ahead: list[list[int]] = [[] for _ in range(workers)]

    def partner(worker: int, number: int) -> int:
        near = neighbours[worker]
        if not near:
            return -1
        block, place = divmod(number, _PARTNERS)
        if place == 0:
            ahead[worker] = streams.generator(worker, block).integers(len(near), size=_PARTNERS).tolist()
        return near[ahead[worker][place]]

    return partner
