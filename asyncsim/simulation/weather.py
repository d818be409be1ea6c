"""Draw the failures of a cluster, independently of a run.

The begins and ends of slow spells, crashes and outages come from separate streams. So the end of a
computation, or of a service, is known when it begins.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncsim.base.errors import InputError
from asyncsim.clusters.failures import Failure, presences
from asyncsim.clusters.laws import Law, Uniform
from asyncsim.simulation.delays import delays

#: Spells in one computation after which the run is given up.
_SPELLS_OF_A_STEP = 1_000_000


class Spells:
    """An alternating process: a gap, then a spell of ``lasts`` seconds, drawn on demand."""

    def __init__(self, gap: Callable[[int], float], lasts: Callable[[int], float], index: int):
        self._gap, self._lasts, self._index = gap, lasts, index
        self._drawn: list[tuple[float, float]] = []

    def at(self, number: int) -> tuple[float, float]:
        """Return the begin and the end of a spell."""
        while len(self._drawn) <= number:
            begin = (self._drawn[-1][1] if self._drawn else 0.0) + self._gap(self._index)
            self._drawn.append((begin, begin + self._lasts(self._index)))
        return self._drawn[number]


class Incidents(NamedTuple):
    """The crashes of workers that are hit at the same times, or the outages of the server."""

    failure: Failure
    workers: list[int]
    spells: Spells


class Weather:
    """The failures of a run.

    Attributes
    ----------
    changes : list
        For each worker its departures and returns, in order: pairs of time (s) and whether it
        joins.
    present : list of bool
        Whether each worker is present at the start.
    incidents : list of Incidents
        The crashes and outages, in the order of the cluster's failures.
    outages : Incidents or None
        The outages of the server.
    slows, loses : bool
        Whether workers may be slow or pause, and whether messages may be lost.
    """

    def __init__(
        self,
        failures: Sequence[Failure],
        workers: int,
        sites: Sequence[int] | None,
        seed: int,
        prefix: str = "failure",
    ):
        self.changes = presences(failures, workers, sites)
        self.present = [not changes or not changes[0][1] for changes in self.changes]
        self.incidents: list[Incidents] = []
        self.outages: Incidents | None = None
        self._seed, self._workers, self._sites = seed, workers, sites
        self._speeds: list[list[tuple[Spells, float]]] = [[] for _ in self.present]
        self._passed: list[list[int]] = [
            [] for _ in self.present
        ]  # spells that are over, of each of these
        self._losses: list[list[tuple[Failure, Callable[[int], float]]]] = [
            [] for _ in self.present
        ]
        self.slows = any(failure.speed is not None for failure in failures)
        self.loses = any(failure.name == "loss" for failure in failures)
        numbers: dict[str, int] = {}
        for failure in failures:
            name = failure.name.removeprefix("job_")  # a job's crashes are drawn like a worker's
            number = numbers[name] = numbers.get(name, -1) + 1
            self._draw(failure, f"{prefix} {name} {number}")

    def working_time(self, index: int, now: float, work: float) -> float:
        """Return the duration (s) of a computation that begins now.

        ``work`` is its duration at full speed.

        Raises
        ------
        InputError
            The worker hardly ever works.
        """
        if not self._speeds[index]:
            return work
        time = now
        for speed, until in itertools.islice(self._paces(index, now), _SPELLS_OF_A_STEP):
            # Undisturbed work keeps its drawn duration; a difference of times would round it.
            if speed > 0 and time + work / speed <= until:
                return work if time == now and speed == 1.0 else time + work / speed - now
            work -= (until - time) * speed
            time = until
        raise InputError(
            f"failures: a computation of worker {index} is not done after {_SPELLS_OF_A_STEP:,} "
            "spells"
        )

    def work(self, index: int, begin: float, end: float) -> float:
        """Return the work (s at full speed) that is done from ``begin`` to ``end``."""
        total, time = 0.0, begin
        for speed, until in self._paces(index, begin):
            total += speed * (min(until, end) - time)
            time = until
            if time >= end:
                break
        return total

    def _paces(self, index: int, time: float) -> Iterator[tuple[float, float]]:
        """Yield a worker's speeds from a time (s) on, each with the time until which it lasts."""
        spells, passed = self._speeds[index], self._passed[index]
        # Time only grows from call to call, so that spells which are over are skipped for good.
        for process, (speeds, _) in enumerate(spells):
            while speeds.at(passed[process])[1] <= time:
                passed[process] += 1
        ahead = list(passed)  # a copy: the next computation may begin before these spells end
        while True:
            speed, until = 1.0, math.inf
            for process, (speeds, factor) in enumerate(spells):
                while speeds.at(ahead[process])[1] <= time:
                    ahead[process] += 1
                begin, end = speeds.at(ahead[process])
                speed *= factor if begin <= time else 1.0
                until = min(until, end if begin <= time else begin)
            yield speed, until
            time = until

    def loss(self, index: int) -> Failure | None:
        """Return the failure that loses a message sent now; None if it arrives."""
        # A failure draws only if the earlier ones let the message pass.
        for failure, chance in self._losses[index]:
            if chance(index) < failure.probability:
                return failure
        return None

    def _draw(self, failure: Failure, purpose: str) -> None:
        groups = [[0]]
        if not failure.restores:
            groups = failure.groups(self._workers, self._sites)
        if failure.name == "loss":
            chance = self._delays(Uniform(0.0, 1.0), purpose)
            for index in itertools.chain.from_iterable(groups):
                self._losses[index].append((failure, chance))
        if failure.every is None:
            return
        gap = self._delays(failure.every, f"{purpose} every")
        lasts = self._delays(failure.lasts, f"{purpose} lasts")
        for group in groups:
            # All workers of a group share its spells, drawn from the stream of the first.
            spells = Spells(gap, lasts, group[0])
            if failure.speed is None:
                self.incidents.append(Incidents(failure, group, spells))
                continue
            for index in group:
                self._speeds[index].append((spells, failure.speed))
                self._passed[index].append(0)
        if failure.restores:
            self.outages = self.incidents[-1]

    def _delays(self, law: Law, purpose: str) -> Callable[[int], float]:
        return delays([law] * self._workers, self._seed, purpose)
