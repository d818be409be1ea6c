"""The clock of a simulation, a SimPy environment, and the record of its rows."""

from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL

from asyncsim.clusters.cluster import Cluster

#: Workers up to which SimPy's queue is faster.
_SMALL_CLUSTER = 3_000
#: Commits between two updates of the progress bar: a fraction of a second.
_BLOCK = 20_000
#: Computations that end in one period, on average.
_PER_PERIOD = 64

_step = simpy.Environment.step
_peek = simpy.Environment.peek


class Clock(simpy.Environment):
    """A SimPy environment that also schedules events at an absolute time."""

    def schedule_at(self, event: simpy.Event, time: float, priority: Any = NORMAL) -> None:
        """Schedule an event at a time (s), which a delay would miss by round-off."""
        # The counter breaks ties in the order of scheduling, as in SimPy.
        heappush(self._queue, (time, priority, next(self._eid), event))

    def after(self, delay: float, action: Callable[[], Any], priority: Any = NORMAL) -> None:
        """Schedule an action after a delay (s)."""
        # Not a timeout, which has no priority.
        event = simpy.Event(self)
        event._ok, event._value = True, None
        event.callbacks.append(lambda _: action())
        self.schedule(event, priority, max(delay, 0.0))

    def run_until(
        self,
        commits: int,
        accepted: Sequence[int],
        records: Sequence["Record"],
        report: Callable[[int], None],
    ) -> None:
        """Process events until ``accepted`` has ``commits`` entries.

        Now and then compress the records, and report the number of entries.
        """
        step = self.step
        for stop in [*range(_BLOCK, commits, _BLOCK), commits]:
            while len(accepted) < stop:
                step()
            for record in records:
                record.pack()
            report(stop)


class PeriodicClock(Clock):
    """A clock whose queue holds the near future only.

    SimPy keeps all pending events in one heap. With 100,000 workers every push and every pop walks
    through 17 levels of it, in memory that no cache holds. Here time is cut into periods. SimPy's
    queue holds the events of the current one; the events of a later period lie in a plain list
    until it begins. Events happen in SimPy's order: by time, then by priority, then in the order of
    scheduling.

    ``period``: length of a period, seconds. Best when some tens of events fall into one.
    """

    def __init__(self, period: float):
        super().__init__()
        self._periods_per_second = 1.0 / period
        self._current = 0
        self._later: dict[int, list[Any]] = {}
        self._begins: list[int] = []

    def schedule(self, event: simpy.Event, priority: Any = NORMAL, delay: float = 0) -> None:
        """Schedule an event, as in SimPy."""
        self.schedule_at(event, self._now + delay, priority)

    def schedule_at(self, event: simpy.Event, time: float, priority: Any = NORMAL) -> None:
        """Schedule an event at a time (s)."""
        entry = (time, priority, next(self._eid), event)
        period = int(time * self._periods_per_second)
        # Also earlier periods: `peek` may have begun a period that lies ahead of the clock.
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
            # All at once takes linear time, and less than a push per event.
            heapify(self._queue)


def clock_for(cluster: Cluster) -> Clock:
    """Return the faster clock for a cluster."""
    if cluster.workers <= _SMALL_CLUSTER:
        return Clock()
    laws, windows = cluster.compute_laws, cluster.windows
    ends_per_second = sum(
        1.0 / (law.mean * count) for law, count in zip(laws, windows, strict=True)
    )
    return PeriodicClock(_PER_PERIOD / ends_per_second)


class Record:
    """A table that grows row by row; all entries are numbers.

    Attributes
    ----------
    entries : list of float
        The newest rows, entry by entry. Extend it by a tuple of all columns to add a row.
    """

    def __init__(self, columns: tuple[str, ...]):
        self.columns = columns
        self.entries: list[float] = []
        self._packed = array("d")

    def __len__(self) -> int:
        return (len(self._packed) + len(self.entries)) // len(self.columns)

    def pack(self) -> None:
        """Compress the newest rows to eight bytes per entry."""
        self._packed.extend(array("d", self.entries))
        self.entries.clear()

    def table(self) -> dict[str, np.ndarray]:
        """Return the columns."""
        self.pack()
        rows = np.frombuffer(self._packed).reshape(-1, len(self.columns))
        return {name: rows[:, i] for i, name in enumerate(self.columns)}
