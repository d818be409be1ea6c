"""The clock of a simulation, a SimPy environment, and the record of its rows."""

from array import array
from collections.abc import Callable, Sequence
from heapq import heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL

#: Commits between two updates of the progress bar: a fraction of a second.
_BLOCK = 20_000


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
