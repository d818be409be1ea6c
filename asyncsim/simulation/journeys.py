"""Journeys between workers and the server: latency, bandwidth, and the links that workers share."""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

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
        The clock, the cluster and the seed of the run.
    direction : int
        `UP`, to the server, or `DOWN`.
    visits : list of int
        The number of each worker's computation, from one: only every `far_every`-th visit is far.
    exists : function
        Whether a `Worker` is still the life of its worker; a life that has ended gets no messages.
    stream : str
        Ends the names of the random streams.
    """

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        seed: int,
        direction: int,
        visits: list[int],
        exists: Callable[[Worker], bool] | None,
        stream: str,
    ):
        self._clock, self._cluster = clock, cluster
        way, near = cluster.ways[direction], cluster.near_ways[direction]
        purpose = f"latency {('up', 'down')[direction]}{stream}"
        self._way, self._transfer = way, way.transfer
        self._latency = delays(way.latency, seed, purpose)
        self._near_or_far: Callable[..., float] | None = None
        if cluster.far_every > 1 and way != near:
            far = delays(way.latency, seed, f"far {purpose}")
            latency = delays(near.latency, seed, purpose)

            # Separate streams: a far visit does not change the draws of near ones.
            def near_or_far(index: int, loaded: bool) -> float:
                is_far = visits[index] % cluster.far_every == 0
                travels, transfer = (far, way.transfer) if is_far else (latency, near.transfer)
                return travels(index) + (transfer[index] if loaded else 0.0)

            self._near_or_far = near_or_far
        self._links = (
            [self._link(exists) for _ in cluster.link_sizes] if cluster.shared_bandwidth else []
        )

    def before(self, next_step: Step, loaded: bool = True) -> Step:
        """Return the step that travels, with the parameters if ``loaded``, and continues with
        ``next_step``.
        """
        # Only parameters occupy a link; requests and acknowledgements pass it.
        if not loaded or not self._links:
            return self._travel(next_step, loaded)
        # The link's service is the transfer; the latency follows, and does not occupy the link.
        enter = [link.visit(self._travel(next_step, loaded=False)) for link in self._links]
        if len(enter) == 1:
            return enter[0]
        link_of = self._cluster.site_of
        return lambda worker: enter[link_of[worker.index]](worker)

    def _travel(self, next_step: Step, loaded: bool) -> Step:
        clock, latency, transfer = self._clock, self._latency, self._transfer

        def with_transfer(index: int) -> float:
            return latency(index) + transfer[index]

        time: Callable[[int], float] = with_transfer if loaded and any(transfer) else latency
        if self._near_or_far is not None:
            time = functools.partial(self._near_or_far, loaded=loaded)
        elif time is latency and takes_no_time(self._way.latency):
            return next_step  # an event of no duration would only change the order of ties
        arrival: list[Callable[[Any], None]] = [next_step]

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
            # A message whose sender has died still waits its turn, but takes no time.
            return transfer[index] if exists(link.serving) else 0.0

        link = Station(self._clock, self._cluster.workers, busy, deque())
        return link
