"""Averages of pairs of workers, under `handshake`."""

from collections.abc import Callable

import numpy as np

from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.topologies import Topology
from asyncsim.simulation.clock import Record
from asyncsim.simulation.peers import Peers
from asyncsim.simulation.station import Worker
from asyncsim.traces.trace import Trace

#: Partners drawn at once for a worker.
_PARTNERS = 64


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

    def finish_at(self, index: int, end: float) -> None:
        """Schedule the worker's next step, and draw the partner for it."""
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
            late = now + loss.timeout
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
