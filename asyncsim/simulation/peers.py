"""Simulate clusters without a server: computations, and the messages between workers.

There are two kinds of events: a worker's gradient is applied, and a worker continues with its next
computation. A message needs no event, as its arrival is known when it is sent. At each instant
gradients are applied first, worker by worker; then workers continue. So a message that takes no
time has arrived for all computations that begin at the instant of its sending. Failures come first
of all.

A crash, or a departure, ends the life of a worker, with its replica and the messages not taken up.
The others count the worker until the failure is detected. A returning worker copies the replica of
the living neighbour that applied a gradient last, and takes part from the newest round of its
neighbours on.

A share of a message that no worker will take up returns: its sender takes it up with the messages
of others. So the shares of a row always sum to one; symmetric shares, as a worker mixes them, do as
well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pandas as pd
from simpy.events import EventPriority

from asyncsim.base.errors import require_memory
from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.network import takes_no_time
from asyncsim.clusters.topologies import Edges, Topology
from asyncsim.simulation.absences import Absences
from asyncsim.simulation.clock import Record, clock_for
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import Worker
from asyncsim.simulation.weather import Weather
from asyncsim.traces.bookkeeping import trace_without_server
from asyncsim.traces.columns import (
    APPLIED,
    CANCELLED,
    GOSSIP,
    NOTHING,
    Source,
    previous_rows,
)
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
#: The same after its round; -1 if any later round may take it up.
_Pending = tuple[int, int, float, float]
#: A row of `Trace.in_flight`.
_Flying = tuple[int, int, float, float]
#: The messages of a round to a worker, their latest arrival, and, with failures, the senders that
#: it need not await.
_Round = tuple[list[_Message], list[float], set[int]]
_NO_SENDERS: set[int] = set()
_NOTHING: _Round = [], [0.0], _NO_SENDERS


def simulate_without_server(
    cluster: Cluster, commits: int, seed: int, report: Callable[[int], None]
) -> Trace:
    """Simulate a cluster with a topology until ``commits`` gradients were applied."""
    peers = (
        Handshakes(cluster, seed)
        if cluster.policy.name == "handshake"
        else Messages(cluster, seed, commits)
    )
    peers.run(commits, report)
    return peers.trace()


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
    absences : PeerAbsences or None
        With failures, the absences of workers.
    """

    def __init__(self, cluster: Cluster, seed: int):
        assert cluster.topology is not None
        n = cluster.workers
        self.cluster, self.seed, self.topology = cluster, seed, cluster.topology
        self.clock = clock_for(cluster)
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
        self.absences: PeerAbsences | None = None
        if cluster.failures:
            self.weather = weather = Weather(cluster.failures, n, cluster.sites, seed)
            self.absences = PeerAbsences(self, weather)
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
        in_flight: Sequence[_Flying],
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


class PeerAbsences(Absences):
    """The absences of workers without a server."""

    #: The failures of an instant come before all else: who is away is the same for all its events.
    priority = EventPriority(-1)
    fruitless = "no gradient was applied"

    def __init__(self, peers: Peers, weather: Weather):
        super().__init__(peers.cluster, weather, peers.clock, peers.rows)
        self._peers = peers
        self.schedule()

    def end_life(self, index: int) -> None:
        """End the life of a worker that goes away."""
        self._peers.end_life(index, self.cause(index))

    def is_counted(self, index: int) -> bool:
        """Return whether the others count a worker."""
        return index in self._peers.counted

    def dismiss(self, index: int) -> None:
        """Count a worker no more; release the workers that waited for it."""
        self._peers.dismiss(index)

    def admit(self, index: int) -> None:
        """Count a worker that is back, and begin its new life."""
        self._peers.begin_life(index)


class Messages(Peers):
    """Workers that send after each gradient, under `asynchronous`, `neighbours` and `overlap`."""

    def __init__(self, cluster: Cluster, seed: int, commits: int):
        super().__init__(cluster, seed)
        n, policy = cluster.workers, cluster.policy
        self._edges = self.topology.edges(n)
        per_row = sum(len(edges.sender) for edges in self._edges) / (len(self._edges) * n)
        memory = commits * per_row * _MESSAGE_BYTES
        require_memory(
            f"commits = {commits}", f"a trace of so many, {per_row:g} messages each", memory
        )
        self._sends = self.topology.sends(n)
        self._from = [_senders(edges, n) for edges in self._edges]
        self._expected = [list(map(len, senders)) for senders in self._from]
        # Whether a worker waits for the round that lies `behind` its own, and takes up only that.
        self._waits = policy.name != "asynchronous"
        self._behind = policy.steps or 0
        self._by_round = policy.name == "neighbours"
        self._mixes_beside = policy.mix == "beside"
        # The messages of each round to a worker; messages that any later computation may take up.
        self._rounds: list[dict[int, _Round]] = [{} for _ in range(n)]
        self._inbox: list[list[tuple[float, int, float]]] = [[] for _ in range(n)]
        self._mixed: list[list[_Message]] = [[] for _ in range(n)]
        self._waiting = [-1] * n
        self._ready = [0.0] * n  # the round that a worker waits for, and since when
        self._wake = self.apply_at if self._mixes_beside else self.resume_at
        self._taken_up = Record(("step", "weight", "arrive_time", "by"))
        self.records.append(self._taken_up)
        self._since = [0] * n  # the first round of a worker's present life
        self._senders: list[Worker] = []  # with failures, the life that sent each row
        # To workers that are away: messages, and whether they were sent before these went.
        self._undelivered: list[list[tuple[_Pending, bool]]] = [[] for _ in range(n)]
        self._lost: list[_Flying] = []
        # The sender, the taker and the round of messages that come back.
        self._void = set[tuple[int, int, int]]()
        self._last = [0] * n  # of an absent worker, the first round without its message

    def compute(self, index: int, now: float) -> None:
        """Begin a computation."""
        self.start_time[index] = now
        self.end_time[index] = end = now + self.duration(index)
        if self.absences is not None:
            self.computing[index] = True
        if self._mixes_beside:
            self._after_round(self.apply_at, index, self.applied[index] - 1, end)
        else:
            self.apply_at(index, end)

    def resume(self, worker: Worker) -> None:
        """Take up the messages that have arrived, and compute."""
        index, now = worker.index, self.clock._now
        if self._by_round:
            messages = self._round(index)
        else:
            box, messages = self._inbox[index], []
            while box and box[0][0] <= now:
                arrival, row, share = heappop(box)
                messages.append((row, share, arrival))
            messages.sort()  # by rows: floating-point sums depend on the order
            if self.absences is not None:
                messages = _merged(messages)
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
        row = len(self.rows)
        for message in messages:
            self._taken_up.entries.extend((*message, row))
        runs = self.add_row(index)
        if self.absences is not None:
            self._senders.append(worker)
        self._send(index, number, row)
        # The messages of the last gradient are in flight at the end.
        if not runs:
            return
        if self._mixes_beside:
            self.compute(index, now)
        else:
            self._after_round(self.resume_at, index, number - self._behind, now)

    def _send(self, index: int, number: int, row: int) -> None:
        """Send shares of a row's state to the neighbours of a round; wake those whose round is
        complete.
        """
        now, part, fails = self.clock._now, number % len(self._edges), self.absences is not None
        at_once, by_round, waits, rounds = self.at_once, self._by_round, self._waits, self._rounds
        waiting = self._waiting
        ready = self._ready
        expected = self._expected[part]
        wake = self._wake
        for taker, share in self._sends[part][index]:
            arrival = (
                now if at_once else now + self.latency(index, taker) + self.transfer(index, taker)
            )
            if fails:
                arrives = self._arrival(index, taker, number, (row, share, arrival))
                if arrives is None:
                    continue
                arrival = arrives
            if not by_round:
                heappush(self._inbox[taker], (arrival, row, share))
            if not waits:
                continue
            box = rounds[taker].get(number)
            if box is None:
                box = rounds[taker][number] = [], [0.0], set() if fails else _NO_SENDERS
            messages, latest, senders = box
            messages.append((row, share, arrival))
            if arrival > latest[0]:
                latest[0] = arrival
            if fails:
                senders.add(index)
                self._recheck(taker)
            elif waiting[taker] == number and len(messages) == expected[taker]:
                waiting[taker] = -1
                wake(taker, max(ready[taker], latest[0]))

    def _round(self, index: int) -> list[_Message]:
        """Return the messages of the round before a worker's next gradient, by their rows."""
        box = self._rounds[index].pop(self.applied[index] - 1, None)
        messages = [] if box is None else sorted(box[0])
        return messages if self.absences is None else _merged(messages)

    def _after_round(
        self, schedule: Callable[[int, float], None], index: int, number: int, now: float
    ) -> None:
        """Schedule a worker's next event for the arrival of the last message of a round."""
        if self._waits and number >= self._since[index]:
            part = number % len(self._edges)
            expected = self._expected[part][index]
            messages, latest, _ = (
                self._rounds[index].get(number, _NOTHING) if expected else _NOTHING
            )
            is_short = (
                len(messages) < expected if self.absences is None else self._lacks(index, number)
            )
            if is_short:
                self._waiting[index], self._ready[index] = number, now
                return
            now = max(now, latest[0])
        schedule(index, now)

    # Failures.

    def _arrival(self, index: int, taker: int, number: int, message: _Message) -> float | None:
        """Return the arrival of a message (s); None if it does not arrive."""
        absences, now = self.absences, self.clock._now
        assert absences is not None
        row, share, arrival = message
        # Each lost copy costs a time-out, until one arrives or the message is given up.
        late, is_given_up = 0.0, False
        while not is_given_up and (loss := self.weather.loss(index)) is not None:
            late += loss.timeout or 0.0
            is_given_up = not loss.resend
        if (index, taker, number) in self._void:
            self._void.remove((index, taker, number))
            self._come_back(index, number, row, share, now)
        elif taker not in self.counted or number < self._since[taker]:
            # The other half of this exchange has arrived: with this half as well, the weights that
            # the sender mixes would exceed one.
            if self._is_exchange(index, taker, number) and taker in self._box(index, number)[2]:
                self._lost.append((row, -1, share, now))
            else:
                self._come_back(index, number, row, share, now)
        elif absences.away[taker]:
            self._undelivered[taker].append(((number, row, share, arrival + late), False))
        elif is_given_up:
            self._give_up(index, taker, number, (row, share, now + late))
        else:
            return arrival + late
        return None

    def _give_up(self, index: int, taker: int, number: int, message: _Message) -> None:
        """Return the share of a lost message to its sender; of an exchange, return both halves."""
        row, share, time = message
        self._come_back(index, number, row, share, time)
        if not self._waits:
            return
        box = self._box(taker, number)
        box[2].add(index)
        box[1][0] = max(box[1][0], time)
        if self._is_exchange(index, taker, number):
            box_of_sender = self._box(index, number)
            arrived = [sent for sent in box_of_sender[0] if self._senders[sent[0]].index == taker]
            # Symmetric weights stay symmetric only if the partner's half returns as well.
            if arrived:
                box_of_sender[0].remove(arrived[0])
                self._come_back(taker, number, *arrived[0][:2], time)
            else:  # not sent yet
                self._void.add((taker, index, number))
            box_of_sender[2].add(taker)
        self._recheck(taker)

    def _come_back(self, index: int, number: int, row: int, share: float, time: float) -> None:
        """Return a share to its sender's inbox; of an earlier round, into the next mixing."""
        if not self._by_round:
            heappush(self._inbox[index], (time, row, share))
            return
        mixes_later = self.computing[index] and not self._mixes_beside
        box = self._box(index, max(number, self.applied[index] - 1 + mixes_later))
        box[0].append((row, share, time))
        box[1][0] = max(box[1][0], time)

    def _is_exchange(self, index: int, taker: int, number: int) -> bool:
        """Return whether two workers send to each other in a round, and wait for each other."""
        return self._by_round and taker in self._from[number % len(self._edges)][index]

    def _box(self, index: int, number: int) -> _Round:
        """Return the messages of a round to a worker."""
        return self._rounds[index].setdefault(number, ([], [0.0], set()))

    def _lacks(self, index: int, number: int) -> bool:
        """Return whether a message of a round is expected that was not sent yet."""
        arrived = self._box(index, number)[2]
        senders = self._from[number % len(self._edges)][index]
        return any(
            peer not in arrived and peer in self.counted and number >= self._since[peer]
            for peer in senders
        )

    def _recheck(self, index: int) -> None:
        """Wake a worker whose round has no missing message."""
        number = self._waiting[index]
        if number >= 0 and not self._lacks(index, number):
            self._waiting[index] = -1
            self._wake(
                index, max(self._ready[index], self.clock._now, self._box(index, number)[1][0])
            )

    def _settle(self, index: int) -> None:
        """Return a dead worker's messages to their senders, or count them as lost."""
        for (number, row, share, _), was_before in self._undelivered[index]:
            sender = self._senders[row]
            # The dead worker has sent its half of an earlier exchange: the other is lost with it.
            is_lost = (
                number < self._last[index]
                if self._is_exchange(sender.index, index, number)
                else was_before
            )
            if is_lost or self.workers[sender.index] is not sender:
                self._lost.append((row, -1, share, self.clock._now))
            else:
                self._come_back(sender.index, number, row, share, self.clock._now)
        self._undelivered[index] = []
        for peer in self._near[index]:
            self._recheck(peer)

    def end_life(self, index: int, failed_by: int) -> None:
        """End a worker's life, and with it the messages that it has taken up for a computation."""
        self._lost += [(row, -1, share, self.clock._now) for row, share, _ in self._mixed[index]]
        self._mixed[index], self._waiting[index], self._last[index] = [], -1, self.applied[index]
        # They return when the death is detected, as no worker knows of it before.
        self._undelivered[index] += [(message, True) for message in self._pending(index)]
        self._rounds[index], self._inbox[index] = {}, []
        super().end_life(index, failed_by)
        self._senders.append(self.workers[index])

    def dismiss(self, index: int) -> None:
        """Count a worker no more; release the workers that waited for it."""
        super().dismiss(index)
        self._settle(index)

    def begin_life(self, index: int) -> None:
        """Let a returning worker join the newest round of its living neighbours."""
        assert self.absences is not None
        if self._waits:
            # Neighbours never send older rounds again: the worker would wait for them forever.
            rounds = [
                self.applied[peer] for peer in self._near[index] if not self.absences.away[peer]
            ]
            self.applied[index] = self._since[index] = max([self.applied[index], *rounds])
        super().begin_life(index)
        self._settle(index)

    def _pending(self, index: int) -> list[_Pending]:
        """Return the messages to a worker that it has not taken up."""
        if self._by_round:
            rounds = self._rounds[index].items()
            return [(number, *message) for number, (box, *_) in rounds for message in box]
        return [(-1, row, share, arrival) for arrival, row, share in self._inbox[index]]

    def trace(self) -> Trace:
        """Return the trace of the run."""
        n, in_flight = self.cluster.workers, [*self._lost]
        for taker in range(n):
            in_flight += [(row, taker, share, time) for row, share, time in self._mixed[taker]]
            pending = self._pending(taker) + [message for message, _ in self._undelivered[taker]]
            in_flight += [(row, taker, share, time) for _, row, share, time in pending]
        worker = self.rows.table()["worker"].astype(np.int64)
        number = pd.Series(worker).groupby(worker).cumcount().to_numpy()
        is_first = number == 0
        if self.absences is not None:
            causes = self.causes.table()
            number = causes["round"].astype(np.int64)
            is_first = previous_rows(worker, causes["incarnation"].astype(np.int64)) < 0
            is_first |= causes["outcome"] == CANCELLED
        # The share kept after the previous row, by the edges of its round; 1 in a first row.
        kept_share = np.array([edges.kept(n) for edges in self._edges])[
            (number - 1) % len(self._edges), worker
        ]
        rows = {"kept": np.where(is_first, 1.0, kept_share)}
        return self.trace_of(
            "commit" if self._mixes_beside else "read", rows, self._taken_up.table(), in_flight
        )


class Handshakes(Peers):
    """Workers that average in pairs, under `handshake`.

    An exchange queues for both replicas at its request. So its begin is known at once: the end of
    all earlier exchanges of either worker.
    """

    def __init__(self, cluster: Cluster, seed: int):
        super().__init__(cluster, seed)
        n = cluster.workers
        self._partner_of = partners(self.topology, n, seed)
        self._partner, self._free = [-1] * n, [0.0] * n
        self._row_partners: list[int] = []
        # Whether an exchange may take time, or have to wait for a message.
        self._at_once = self.at_once and not (self.absences is not None and self.weather.loses)
        # By an absent partner, the workers that wait for it.
        self._waiting: list[list[Worker]] = [[] for _ in range(n)]
        self._number = [0] * n  # computations of each worker

    def compute(self, index: int, now: float) -> None:
        """Begin a computation, and draw the partner for its end."""
        self.start_time[index] = now
        self.end_time[index] = end = now + self.duration(index)
        if self.absences is not None:
            self.computing[index] = True
        partner = self._partner[index] = self._partner_of(index, self._number[index])
        self._number[index] += 1
        (self.apply_at if self._at_once or partner < 0 else self.resume_at)(index, end)

    def resume(self, worker: Worker) -> None:
        """Ask the partner for an exchange."""
        index, now = worker.index, self.clock._now
        if self.absences is not None and not self._may_exchange(worker):
            return
        partner = self._partner[index]
        if partner < 0:
            self.apply_at(index, now)
            return
        if self.absences is not None and (loss := self.weather.loss(index)) is not None:
            late = now + (loss.timeout or 0.0)
            if loss.resend:
                self.resume_at(index, late)
            else:
                self._partner[index] = -1
                self.apply_at(index, late)
            return
        end = max(now, self._free[index], self._free[partner])
        end += self.latency(index, partner)  # the request, then the reply
        end += self.latency(index, partner)
        end += self.transfer(index, partner) + self.transfer(partner, index)
        self._free[index] = self._free[partner] = end
        self.apply_at(index, end)

    def apply(self, worker: Worker) -> None:
        """Apply a gradient, at the end of an exchange."""
        index = worker.index
        if self.absences is not None and not self._may_exchange(worker):
            return
        self._row_partners.append(self._partner[index])
        if self.add_row(index):
            self.compute(index, self.clock._now)

    # Failures.

    def _may_exchange(self, worker: Worker) -> bool:
        """Return whether a worker's partner is present; else let it wait, or choose another.

        It waits until the partner returns or its death is detected.
        """
        assert self.absences is not None
        index = worker.index
        partner = self._partner[index]
        if partner < 0 or not self.absences.away[partner]:
            return True
        if partner in self.counted:
            self._waiting[partner].append(worker)
            return False
        # No new draw: the sequence of partners stays that of a run without failures.
        living = [peer for peer in self._near[index] if peer in self.counted]
        self._partner[index] = living[partner % len(living)] if living else -1
        self._exchange_now(worker)
        return False

    def _exchange_now(self, worker: Worker) -> None:
        (self.apply_at if self._at_once else self.resume_at)(worker.index, self.clock._now)

    def _release(self, index: int) -> None:
        waiting, self._waiting[index] = self._waiting[index], []
        for worker in waiting:
            if self.workers[worker.index] is worker:
                self._exchange_now(worker)

    def end_life(self, index: int, failed_by: int) -> None:
        """End a worker's life and its exchange."""
        super().end_life(index, failed_by)
        # Exchanges that queued for the dead replica do not delay its next life.
        self._free[index] = self.clock._now
        self._row_partners.append(-1)

    def dismiss(self, index: int) -> None:
        """Count a worker no more; release the workers that waited for it."""
        super().dismiss(index)
        self._release(index)

    def begin_life(self, index: int) -> None:
        """Let a returning worker compute, and waiting workers exchange with it."""
        super().begin_life(index)
        self._release(index)

    def trace(self) -> Trace:
        """Return the trace of the run."""
        rows = {"partner": np.array(self._row_partners)}
        return self.trace_of("commit", rows, Record(("step", "weight", "by")).table(), [])


def _merged(messages: list[_Message]) -> list[_Message]:
    """Merge the messages of each row: several returned shares of a row become one."""
    merged: dict[int, _Message] = {}
    for row, share, arrival in messages:
        _, before, earlier = merged.get(row, (row, 0.0, arrival))
        merged[row] = row, before + share, max(earlier, arrival)
    return list(merged.values())


def _senders(edges: Edges, workers: int) -> list[list[int]]:
    """List the senders of each worker."""
    senders: list[list[int]] = [[] for _ in range(workers)]
    for sender, taker in zip(edges.sender.tolist(), edges.taker.tolist(), strict=True):
        senders[taker].append(sender)
    return senders


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


def partners(topology: Topology, workers: int, seed: int) -> Callable[[int, int], int]:
    """Return the function from a worker and its gradient's number to a neighbour (-1: none).

    The numbers of a worker must come in order, from 0: draws are made in blocks.
    """
    neighbours, streams = topology.neighbours(workers), Streams(seed, "partner")
    ahead: list[list[int]] = [[] for _ in range(workers)]

    def partner(worker: int, number: int) -> int:
        near = neighbours[worker]
        if not near:
            return -1
        block, place = divmod(number, _PARTNERS)
        if place == 0:
            ahead[worker] = (
                streams.generator(worker, block).integers(len(near), size=_PARTNERS).tolist()
            )
        return near[ahead[worker][place]]

    return partner
