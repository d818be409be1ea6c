"""Workers, and the stations at which they wait and are served.

Times are read from SimPy's ``_now``: its ``now`` is a property, and would be called five times a visit.
"""

from array import array
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL

from asyncsim.clusters.laws import Uniform
from asyncsim.simulation.delays import delays


class Worker(simpy.Event):
    """A worker, and the one event it waits for; ``callbacks`` holds what it does when that happens.

    Workers are in the order of their indices.
    """

    __slots__ = ("callbacks", "env", "index", "then")
    _ok = True
    _value = None

    def __init__(self, env: simpy.Environment, index: int):
        super().__init__(env)
        self.index = index
        self.then: Step = _nothing

    def __lt__(self, other: "Worker") -> bool:
        return self.index < other.index


#: Sets a worker going.
Step = Callable[[Worker], None]


def _nothing(worker: Worker) -> None:
    """Follow a visit that was never made."""


class Station:
    """Serves one worker at a time: the server, or one direction of the link that workers share.

    Several events of one instant happen in the order of `simpy.Resource`, which grants a place and
    gives it up by events of no duration. Such an event is left out when it would be the next anyway.

    Attributes
    ----------
    serving : Worker or None
        Who has the place.
    waiting : container
        Who waits for it, with ``append`` and, for whoever is next, ``popleft``.
    arrive_time, serve_time : array of float
        Each worker's last arrival here, and the begin of its last service, seconds.
    """

    def __init__(self, env: simpy.Environment, workers: int, busy: Callable[[int], float], waiting: Any):
        self.env = env
        self.busy = busy
        self.waiting = waiting
        self.serving: Worker | None = None
        self.arrive_time = array("d", [0.0]) * workers
        self.serve_time = array("d", [0.0]) * workers
        self._on_begin: list[Callable[[Any], None]] = [self._begin]
        self._on_end: list[Callable[[Any], None]] = [self._end]

    def visit(self, then: Step) -> Step:
        """Return the step that waits for the station, is served, and continues with ``then``."""
        env, waiting, arrive_time = self.env, self.waiting, self.arrive_time

        def arrive(worker: Worker) -> None:
            worker.then = then
            arrive_time[worker.index] = env._now
            if self.serving is None and not waiting:
                self._admit(worker)
            else:
                waiting.append(worker)
                if self.serving is None:
                    self._admit(waiting.popleft())

        return arrive

    def _admit_next(self, event: simpy.Event | None = None) -> None:
        if self.serving is None and self.waiting:
            self._admit(self.waiting.popleft())

    def _admit(self, worker: Worker) -> None:
        self.serving = worker
        env = self.env
        if env.peek() == env._now:
            worker.callbacks = self._on_begin
            env.schedule(worker)
        else:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        env = self.env
        index = worker.index
        self.serve_time[index] = env._now
        worker.callbacks = self._on_end
        env.schedule(worker, NORMAL, self.busy(index))

    def _end(self, worker: Worker) -> None:
        env = self.env
        self.serving = None
        waiting = self.waiting
        if waiting and env.peek() == env._now:
            # What is due in this instant happens before the place is given to another.
            release = env.event()
            release.callbacks.append(self._admit_next)
            release.succeed()
            worker.then(worker)
        else:
            worker.then(worker)
            if waiting and self.serving is None:
                self._admit(waiting.popleft())


class OpenStation:
    """Serves all visits at once, without a queue.

    Attributes
    ----------
    serving : None
        Nobody has the place alone.
    waiting : set of Worker
        Who is served.
    arrive_time, serve_time : array of float
        Each worker's last arrival here, at which its service begins, seconds.
    """

    serving = None

    def __init__(self, env: simpy.Environment, workers: int, busy: Callable[[int], float]):
        self.env = env
        self.busy = busy
        self.waiting: set[Worker] = set()
        self.arrive_time = self.serve_time = array("d", [0.0]) * workers

    def visit(self, then: Step) -> Step:
        """Return the step that is served at once, and continues with ``then``."""
        env, waiting, arrive_time = self.env, self.waiting, self.arrive_time

        def arrive(worker: Worker) -> None:
            arrive_time[worker.index] = env._now
            waiting.add(worker)
            worker.callbacks = ended
            env.schedule(worker, NORMAL, self.busy(worker.index))

        def end(worker: Worker) -> None:
            waiting.remove(worker)
            then(worker)

        ended: list[Callable[[Any], None]] = [end]
        return arrive


class _LowestRank(list):
    """Those that wait; the lowest worker index goes first."""

    def append(self, worker: Worker) -> None:
        heappush(self, worker)

    def popleft(self) -> Worker:
        return heappop(self)


class _Random(list):
    """Those that wait; each is as likely as the others to go first."""

    def __init__(self, seed: int, stream: str):
        super().__init__()
        self._uniform = delays([Uniform(0.0, 1.0)], seed, f"discipline{stream}")

    def popleft(self) -> Worker:
        chosen = int(self._uniform(0) * len(self)) if len(self) > 1 else 0
        self[chosen], self[-1] = self[-1], self[chosen]
        return self.pop()


def waiting_room(discipline: str, seed: int, stream: str = "") -> Any:
    """Return an empty container with ``append`` and, for whoever is next, ``popleft``.

    ``stream``: ends the name of the random stream.
    """
    if discipline == "lowest_rank":
        return _LowestRank()
    return _Random(seed, stream) if discipline == "random" else deque()
