"""SimPy's environment, also for a hundred thousand pending events."""

from heapq import heapify, heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL

from asyncsim.clusters.cluster import Cluster

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

    Parameters
    ----------
    period : float
        Length of a period, seconds. Best when some tens of events fall into one.
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
