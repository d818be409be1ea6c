"""Journeys between workers and the server: latency, bandwidth, and the links that workers share."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.network import takes_no_time
from asyncsim.simulation.clock import Clock
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import Station, Step, Worker

UP, DOWN = 0, 1


class Journeys:
    """One direction of the network.

    Parameters
    ----------
    clock, cluster, seed
        Those of the run.
    direction : int
        `UP`, to the server, or `DOWN`.
    visits : list of int
        The number of each worker's computation, from one: only every `far_every`-th visit is far.
    exists : function
        Says of a `Worker` whether it is still that worker's life; nothing is sent to one that ended.
    """

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        seed: int,
        direction: int,
        visits: list[int],
        exists: Callable[[Worker], bool] | None,
    ):
        self._clock, self._cluster = clock, cluster
        way, near = cluster.ways[direction], cluster.near_ways[direction]
        purpose = f"latency {('up', 'down')[direction]}"
        self._way, self._transfer = way, way.transfer
        self._latency = delays(way.latency, seed, purpose)
        self._near_or_far: Callable[[int, bool], float] | None = None
        if cluster.far_every > 1 and way != near:
            far, latency = delays(way.latency, seed, f"far {purpose}"), delays(near.latency, seed, purpose)

            def near_or_far(index: int, loaded: bool) -> float:
                is_far = visits[index] % cluster.far_every == 0
                travels, transfer = (far, way.transfer) if is_far else (latency, near.transfer)
                return travels(index) + (transfer[index] if loaded else 0.0)

            self._near_or_far = near_or_far
        self._links: list[Station] = []
        self._link_of: list[int] = []
        if cluster.shared_bandwidth:
            apart = cluster.sites if cluster.sites and cluster.far_bandwidth is not None else (cluster.workers,)
            self._links = [self._link(exists) for _ in apart]
            self._link_of = np.repeat(np.arange(len(apart)), apart).tolist()

    def before(self, then: Step, loaded: bool = True) -> Step:
        """Return the step that travels, with the parameters if ``loaded``, and continues with ``then``."""
        if not loaded or not self._links:
            return self._travel(then, loaded)
        enter = [link.visit(self._travel(then, loaded=False)) for link in self._links]
        if len(enter) == 1:
            return enter[0]
        link_of = self._link_of
        return lambda worker: enter[link_of[worker.index]](worker)

    def _travel(self, then: Step, loaded: bool) -> Step:
        clock, latency, transfer = self._clock, self._latency, self._transfer
        loaded_or_not = self._near_or_far
        time: Callable[[int], float] = latency
        if loaded_or_not is not None:
            time = lambda index: loaded_or_not(index, loaded)  # noqa: E731
        elif loaded and any(transfer):
            time = lambda index: latency(index) + transfer[index]  # noqa: E731
        elif takes_no_time(self._way.latency):
            return then
        arrival: list[Callable[[Any], None]] = [then]

        def depart(worker: Worker) -> None:
            worker.callbacks = arrival
            clock.schedule(worker, delay=time(worker.index))

        return depart

    def _link(self, exists: Callable[[Worker], bool] | None) -> Station:
        transfer = self._transfer
        if exists is None:
            return Station(self._clock, self._cluster.workers, transfer.__getitem__, deque())

        def busy(index: int) -> float:
            assert link.serving is not None
            return transfer[index] if exists(link.serving) else 0.0

        link = Station(self._clock, self._cluster.workers, busy, deque())
        return link
