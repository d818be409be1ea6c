"""Workers, and the stations at which they wait and are served.

Times come from SimPy's ``_now``: its ``now`` is a property, which a visit would call five times.
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
    """A worker, and at once the event it waits for; ``callbacks`` holds the step that follows.

    Workers are ordered by their indices.
    """

    __slots__ = ("callbacks", "env", "index", "next_step")
    _ok = True
    _value = None

    def __init__(self, env: simpy.Environment, index: int):
        super().__init__(env)
        self.index = index
        self.next_step: Step = _nothing

    def __lt__(self, other: "Worker") -> bool:
        return self.index < other.index


#: Lets a worker act at an instant.
Step = Callable[[Worker], None]


def _nothing(worker: Worker) -> None:
    """Do nothing: the step of a worker before its first visit."""


class Station:
    """Serves one worker at a time: the server, or one direction of the link that workers share.

    Several events of one instant happen in the order of `simpy.Resource`, which grants a place and
    gives it up by events of no duration. Such an event is omitted when it would be the next anyway.

    Attributes
    ----------
    serving : Worker or None
        The worker in service.
    waiting : container
        The waiting workers, with ``append`` and ``popleft``, which returns the next to be served.
    arrive_time, serve_time : array of float
        Each worker's last arrival here, and the begin of its last service, seconds.
    """

    def __init__(
        self, env: simpy.Environment, workers: int, busy: Callable[[int], float], waiting: Any
    ):
        self.env = env
        self.busy = busy
        self.waiting = waiting
        self.serving: Worker | None = None
        self.arrive_time = array("d", [0.0]) * workers
        self.serve_time = array("d", [0.0]) * workers
        self._on_begin: list[Callable[[Any], None]] = [self._begin]
        self._on_end: list[Callable[[Any], None]] = [self._end]

    def visit(self, next_step: Step) -> Step:
        """Return the step of a visit, which waits, is served, and continues with ``next_step``."""
        env, waiting, arrive_time = self.env, self.waiting, self.arrive_time

        def arrive(worker: Worker) -> None:
            worker.next_step = next_step
            arrive_time[worker.index] = env._now
            if self.serving is None and not waiting:
                self._admit(worker)
            else:
                # A free station with a queue is between two services: the discipline chooses.
                waiting.append(worker)
                if self.serving is None:
                    self._admit(waiting.popleft())

        return arrive

    def close(self) -> None:
        """Send all workers away, without a service; events on their way do nothing."""
        self.serving = None
        self.waiting.clear()

    def _admit_next(self, event: simpy.Event | None = None) -> None:
        if self.serving is None and self.waiting:
            self._admit(self.waiting.popleft())

    def _admit(self, worker: Worker) -> None:
        self.serving = worker
        env = self.env
        # Events that are due at this instant come before the begin of the service.
        if env.peek() == env._now:
            worker.callbacks = self._on_begin
            env.schedule(worker)
        else:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        if self.serving is not worker:  # closed meanwhile
            return
        env = self.env
        index = worker.index
        self.serve_time[index] = env._now
        worker.callbacks = self._on_end
        env.schedule(worker, NORMAL, self.busy(index))

    def _end(self, worker: Worker) -> None:
        if self.serving is not worker:
            return
        env = self.env
        self.serving = None
        waiting = self.waiting
        if waiting and env.peek() == env._now:
            # Events that are due at this instant come before the next worker's service.
            release = env.event()
            release.callbacks.append(self._admit_next)
            release.succeed()
            worker.next_step(worker)
        else:
            worker.next_step(worker)
            # The step itself may have begun a service here, in a protocol of two visits.
            if waiting and self.serving is None:
                self._admit(waiting.popleft())


class OpenStation:
    """Serves all visits at once, without a queue.

    Attributes
    ----------
    serving : None
        No worker has the station alone.
    waiting : set of Worker
        The workers in service.
    arrive_time, serve_time : array of float
        Each worker's last arrival here, at which its service begins, seconds.
    """

    serving = None

    def __init__(self, env: simpy.Environment, workers: int, busy: Callable[[int], float]):
        self.env = env
        self.busy = busy
        self.waiting: set[Worker] = set()
        self.arrive_time = self.serve_time = array("d", [0.0]) * workers

    def visit(self, next_step: Step) -> Step:
        """Return the step of a visit, which is served at once, and continues with ``next_step``."""
        env, waiting, arrive_time = self.env, self.waiting, self.arrive_time

        def arrive(worker: Worker) -> None:
            arrive_time[worker.index] = env._now
            waiting.add(worker)
            worker.callbacks = ended
            env.schedule(worker, NORMAL, self.busy(worker.index))

        def end(worker: Worker) -> None:
            waiting.remove(worker)
            next_step(worker)

        ended: list[Callable[[Any], None]] = [end]
        return arrive


class _LowestRank(list):
    """A waiting room whose lowest worker index goes first."""

    def append(self, worker: Worker) -> None:
        heappush(self, worker)

    def popleft(self) -> Worker:
        return heappop(self)


class _Random(list):
    """A waiting room whose workers are equally likely to go first."""

    def __init__(self, seed: int, stream: str):
        super().__init__()
        self._uniform = delays([Uniform(0.0, 1.0)], seed, f"discipline{stream}")

    def popleft(self) -> Worker:
        chosen = int(self._uniform(0) * len(self)) if len(self) > 1 else 0
        # The last entry is removed in constant time; the order of the others does not matter.
        self[chosen], self[-1] = self[-1], self[chosen]
        return self.pop()


def waiting_room(discipline: str, seed: int, stream: str = "") -> Any:
    """Return an empty container with ``append`` and ``popleft``, which applies the discipline.

    ``stream``: the end of the random stream's name.
    """
    if discipline == "lowest_rank":
        return _LowestRank()
    return _Random(seed, stream) if discipline == "random" else deque()
