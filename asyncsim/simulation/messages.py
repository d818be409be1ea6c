"""Messages between workers, under `asynchronous`, `neighbours` and `overlap`.

A share of a message that no worker will take up returns: its sender takes it up with the messages
of others. So the shares of a row always sum to one; symmetric shares, as a worker mixes them, do as
well.
"""

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
import pandas as pd

from asyncsim.base.errors import require_memory
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.topologies import Edges
from asyncsim.simulation.clock import Record
from asyncsim.simulation.peers import Flying, Peers
from asyncsim.simulation.station import Worker
from asyncsim.traces.columns import CANCELLED, previous_rows
from asyncsim.traces.trace import Trace

#: Memory (bytes) of a message in a trace.
_MESSAGE_BYTES = 120
#: A row, a share of its state, and its arrival (s).
_Message = tuple[int, float, float]
#: The same after its round, or after -1 if any later round may take it up.
_Pending = tuple[int, int, float, float]


class _Round:
    """The messages of a round to a worker, and their latest arrival (s).

    ``senders``: with failures, the workers whose messages it need not await.
    """

    __slots__ = ("latest", "messages", "senders")

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self.latest = 0.0
        self.senders: set[int] = set()


#: A round that awaits no message; never written.
_NO_ROUND = _Round()


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
        self._waiting, self._ready = [-1] * n, [0.0] * n  # a worker's awaited round, and since (s)
        self._wake = self.apply_at if self._mixes_beside else self.resume_at
        self._taken_up = Record(("step", "weight", "arrive_time", "by"))
        self.records.append(self._taken_up)
        self._since = [0] * n  # the first round of a worker's present life
        self._senders: list[Worker] = []  # with failures, the life that sent each row
        # To workers that are away: messages, and whether they were sent before these went.
        self._undelivered: list[list[tuple[_Pending, bool]]] = [[] for _ in range(n)]
        self._lost: list[Flying] = []
        # The sender, the taker and the round of messages that come back.
        self._void = set[tuple[int, int, int]]()
        self._last = [0] * n  # of an absent worker, the first round without its message

    def finish_at(self, index: int, end: float) -> None:
        """Schedule the gradient, after the messages that are mixed in beside it."""
        if self._mixes_beside:
            self._after_round(self.apply_at, index, self.applied[index] - 1, end)
        else:
            self.apply_at(index, end)

    def resume(self, worker: Worker) -> None:
        """Take up the messages that have arrived, and compute."""
        index, now = worker.index, self.clock._now
        if self._by_round:
            messages = self._pop_round(index)
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
            messages = self._pop_round(index)
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
        # Local names: this loop takes most of the time of a simulation.
        at_once, by_round, waits, rounds = self.at_once, self._by_round, self._waits, self._rounds
        waiting, ready, expected = self._waiting, self._ready, self._expected[part]
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
            arrived = rounds[taker].get(number)
            if arrived is None:
                arrived = rounds[taker][number] = _Round()
            messages = arrived.messages
            messages.append((row, share, arrival))
            if arrival > arrived.latest:
                arrived.latest = arrival
            if fails:
                arrived.senders.add(index)
                self._recheck(taker)
            elif waiting[taker] == number and len(messages) == expected[taker]:
                waiting[taker] = -1
                wake(taker, max(ready[taker], arrived.latest))

    def _pop_round(self, index: int) -> list[_Message]:
        """Remove and return the messages of the round before a worker's next gradient, by rows."""
        messages = sorted(self._rounds[index].pop(self.applied[index] - 1, _NO_ROUND).messages)
        return messages if self.absences is None else _merged(messages)

    def _after_round(
        self, schedule: Callable[[int, float], None], index: int, number: int, now: float
    ) -> None:
        """Schedule a worker's next event for the arrival of the last message of a round."""
        if self._waits and number >= self._since[index]:
            part = number % len(self._edges)
            expected = self._expected[part][index]
            arrived = self._rounds[index].get(number, _NO_ROUND) if expected else _NO_ROUND
            is_short = (
                len(arrived.messages) < expected
                if self.absences is None
                else self._lacks(index, number)
            )
            if is_short:
                self._waiting[index], self._ready[index] = number, now
                return
            now = max(now, arrived.latest)
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
            late += loss.timeout
            is_given_up = not loss.resend
        if (index, taker, number) in self._void:
            self._void.remove((index, taker, number))
            self._come_back(index, number, row, share, now)
        elif taker not in self.counted or number < self._since[taker]:
            # The other half of this exchange has arrived: with this half as well, the weights that
            # the sender mixes would exceed one.
            is_exchange = self._is_exchange(index, taker, number)
            if is_exchange and taker in self._round_of(index, number).senders:
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
        of_taker = self._round_of(taker, number)
        of_taker.senders.add(index)
        of_taker.latest = max(of_taker.latest, time)
        if self._is_exchange(index, taker, number):
            of_sender = self._round_of(index, number)
            arrived = [sent for sent in of_sender.messages if self._senders[sent[0]].index == taker]
            # Symmetric weights stay symmetric only if the partner's half returns as well.
            if arrived:
                of_sender.messages.remove(arrived[0])
                self._come_back(taker, number, *arrived[0][:2], time)
            else:  # not sent yet
                self._void.add((taker, index, number))
            of_sender.senders.add(taker)
        self._recheck(taker)

    def _come_back(self, index: int, number: int, row: int, share: float, time: float) -> None:
        """Return a share to its sender's inbox; of an earlier round, into the next mixing."""
        if not self._by_round:
            heappush(self._inbox[index], (time, row, share))
            return
        mixes_later = self.computing[index] and not self._mixes_beside
        mixed = self._round_of(index, max(number, self.applied[index] - 1 + mixes_later))
        mixed.messages.append((row, share, time))
        mixed.latest = max(mixed.latest, time)

    def _is_exchange(self, index: int, taker: int, number: int) -> bool:
        """Return whether two workers send to each other in a round, and wait for each other."""
        return self._by_round and taker in self._from[number % len(self._edges)][index]

    def _round_of(self, index: int, number: int) -> _Round:
        """Return a round of a worker, which may be new."""
        return self._rounds[index].setdefault(number, _Round())

    def _lacks(self, index: int, number: int) -> bool:
        """Return whether a message of a round is expected that was not sent yet."""
        senders_so_far = self._round_of(index, number).senders
        senders = self._from[number % len(self._edges)][index]
        return any(
            peer not in senders_so_far and peer in self.counted and number >= self._since[peer]
            for peer in senders
        )

    def _recheck(self, index: int) -> None:
        """Wake a worker whose round has no missing message."""
        number = self._waiting[index]
        if number >= 0 and not self._lacks(index, number):
            self._waiting[index] = -1
            latest = self._round_of(index, number).latest
            self._wake(index, max(self._ready[index], self.clock._now, latest))

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
            return [(number, *sent) for number, arrived in rounds for sent in arrived.messages]
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
