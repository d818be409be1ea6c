"""Let workers crash, leave and join, and the server go down.

A crash, or a departure, ends the life of a worker (`asyncsim.simulation.world`); the server counts it
until the failure is detected. When the worker is back it begins a new life, with the newest version:
that read costs the way down, no way up, and a service only where reads are visits of their own. So does
the read after a message that was given up.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.clusters.failures import Failure
from asyncsim.simulation.station import Station, Worker
from asyncsim.simulation.weather import Incidents, Weather
from asyncsim.traces.columns import APPLIED, CANCELLED, CRASH, FAILED_BY, LEAVE, NOTHING, RESENT, SPELLS, TABLES

if TYPE_CHECKING:
    from asyncsim.simulation.world import World

#: Rows and spells without an accepted message after which a run is given up; more for each worker.
_FRUITLESS, _FRUITLESS_OF_A_WORKER = 100_000, 1_000


class Absences:
    """The failures of a run, and the rows that they end.

    Attributes
    ----------
    jobs, reads_made : list of int
        How many reads of each worker have been consumed, and made.
    has_begun, under_way : list of bool
        Whether each worker has begun a computation without a row so far; whether its message or request is
        under way to the server, or at the server: a crash does not stop these.
    incarnation, incarnation_of_job : list of int
        How often each worker has lost its state: so far, and before its computation began.
    """

    def __init__(self, world: "World", weather: Weather):
        self._world, self._weather, self._clock = world, weather, world.clock
        n = len(weather.present)
        self.jobs = [0] * n
        self.reads_made = [int(is_present) for is_present in weather.present]
        self.has_begun = [False] * n
        self.under_way = [False] * n
        self._absences = [int(not is_present) for is_present in weather.present]  # spells under way
        self.incarnation = list(self._absences)
        self.incarnation_of_job = list(self._absences)
        self._spell: list[list[float]] = [[] for _ in range(n)]
        self._spells: list[list[float]] = []
        for index in range(n):
            if not weather.present[index]:
                self._spell[index] = [index, SPELLS.index("leave"), 0.0, math.nan, 0.0, 0.0, math.nan, -1]
                self._spells.append(self._spell[index])
        self._checkpoint, self._since_checkpoint, self._writing_until = 0, 0, 0.0
        self._down, self._when_up = False, list[Callable[[], None]]()
        self._outages_begun = 0
        self._fruitless, self._most_fruitless = 0, _FRUITLESS + _FRUITLESS_OF_A_WORKER * n
        for incidents in weather.incidents:
            if incidents is weather.outages:
                world.server.busy = self._service_time(world.server.busy, incidents)
                self._next_outage(incidents, 0)
            else:
                self._next_crash(incidents, 0)
        for index, changes in enumerate(weather.changes):
            for time, joins in changes:
                self._at(time, functools.partial(self._readmit if joins else self._leave, index))

    def table(self) -> dict[str, np.ndarray]:
        """Return the columns of `Trace.absences`."""
        columns = np.array(self._spells).reshape(-1, len(TABLES["absences"])).T
        return dict(zip(TABLES["absences"], columns, strict=True))

    # The reports of the world.

    def has_read_ahead(self, index: int) -> bool:
        """Return whether a worker has read for its next computation."""
        return self.reads_made[index] > self.jobs[index]

    def close_job(self, index: int, failed_by: int, outcome: int) -> bool:
        """Record why a worker's job ends; return whether its computation had begun."""
        self._world.causes.entries.extend((self.jobs[index], failed_by, self.incarnation_of_job[index]))
        if failed_by != RESENT:
            self.jobs[index] += 1
        if outcome < CANCELLED:
            self._fruitless = 0
        else:
            self._count_failure()
        has_begun = self.has_begun[index]
        self.has_begun[index] = failed_by == RESENT
        return has_begun

    def after_commit(self, worker: Worker, outcome: int) -> None:
        """Let workers continue after a message; its sender may be away."""
        index, gate, resume = worker.index, self._world.gate, self.resume
        self.close_job(index, NOTHING, outcome)
        self.under_way[index] = False
        released = gate.released(worker, outcome) if gate.holds else (worker,)
        if self._absences[index]:
            gate.forget(index)
            self._end_life(index)
            released = [peer for peer in released if peer is not worker]
        for peer in released:
            resume(peer)
        if outcome == APPLIED:
            self._after_version()

    def after_read(self, index: int) -> bool:
        """End the visit of a read; return whether its worker is present."""
        self.under_way[index] = False
        if self._absences[index]:
            self._end_life(index)
        return not self._absences[index]

    def resume(self, worker: Worker) -> None:
        """Let a worker continue after a commit."""
        world = self._world
        self.under_way[worker.index] = world.cluster.protocol == "write_then_read"  # to ask for its read
        world.resume(worker)

    def enter(self, index: int) -> None:
        """Begin a new life of a worker, once the server is up, if the worker is present and has none."""
        world = self._world
        if self._down:
            self._when_up.append(functools.partial(self.enter, index))
        elif not self._absences[index] and world.lives[index] is None:
            worker = world.begin_life(index)
            if world.gate.must_wait(index):
                world.gate.wait(worker)
                return
            self.under_way[index] = world.cluster.separate_reads
            world.enter(worker)

    # Workers.

    def _next_crash(self, incidents: Incidents, number: int) -> None:
        begin, end = incidents.spells.at(number)

        def crash() -> None:
            self._count_failure()
            for index in incidents.workers:
                self._remove(index, CRASH, incidents.failure.detect or 0.0)
            self._at(end, readmit)

        def readmit() -> None:
            for index in incidents.workers:
                self._readmit(index)
            self._next_crash(incidents, number + 1)

        self._at(begin, crash)

    def _leave(self, index: int) -> None:
        self._remove(index, LEAVE, detect=0.0)

    def _remove(self, index: int, cause: int, detect: float) -> None:
        """Begin an absence of a worker; its message stays if it is under way."""
        self._absences[index] += 1
        if self._absences[index] == 1:
            kind = SPELLS.index(FAILED_BY[cause])
            self._spell[index] = [index, kind, self._clock._now, *[math.nan] * 4, -1]
            self._spells.append(self._spell[index])
            if not self.under_way[index]:
                self._world.gate.forget(index)
                self._end_life(index)
            self.incarnation[index] += 1
        number = self.incarnation[index]
        if detect:
            self._at(self._clock._now + detect, functools.partial(self._detect, index, number))
        else:
            self._detect(index, number)

    def _end_life(self, index: int) -> None:
        """Cancel the jobs that a worker which is away would have computed."""
        world = self._world
        world.lives[index] = None
        world.computing.pop(index, None)
        cause = FAILED_BY.index(SPELLS[int(self._spell[index][1])])
        while self.has_read_ahead(index):
            world.add_row(index, CANCELLED, cause)

    def _detect(self, index: int, incarnation: int) -> None:
        """Remove a member that is still away."""
        gate = self._world.gate
        if self._down:
            self._when_up.append(functools.partial(self._detect, index, incarnation))
            return
        if not self._absences[index] or incarnation != self.incarnation[index] or index not in gate.members:
            return
        self._spell[index][4:6] = self._clock._now, len(self._world.steps)
        version = gate.version
        for worker in gate.dismiss(index):
            self.resume(worker)
        if gate.version > version:
            self._spell[index][7] = gate.version
            self._after_version()

    def _readmit(self, index: int) -> None:
        """End an absence of a worker, which gets the newest version."""
        self._absences[index] -= 1
        if self._absences[index]:
            return
        spell = self._spell[index]
        spell[3], spell[6] = self._clock._now, len(self._world.steps)
        if index not in self._world.gate.members:
            self._world.gate.admit(index)
        self.enter(index)

    # The server.

    def _next_outage(self, outages: Incidents, number: int) -> None:
        begin, end = outages.spells.at(number)
        self._outages_begun = number

        def go_down() -> None:
            self._count_failure()
            self._down = True
            self._at(end, restore)

        def restore() -> None:
            restored = len(self._world.steps), self._checkpoint
            self._spells.append([-1, SPELLS.index("outage"), begin, end, math.nan, math.nan, *restored])
            self._down = False
            self._since_checkpoint = 0
            self._next_outage(outages, number + 1)
            for worker in self._world.gate.restore():
                self.resume(worker)
            self._world.stop_outdated()
            waiting, self._when_up = self._when_up, []
            for action in waiting:
                action()

        self._at(begin, go_down)

    def _after_version(self) -> None:
        """Write a checkpoint if one is due, and stop computations that are now too stale."""
        outages = self._weather.outages
        if outages is not None and not self._down:
            self._write_checkpoint(outages)
        self._world.stop_outdated()

    def _write_checkpoint(self, outages: Incidents) -> None:
        outage = outages.failure
        self._since_checkpoint += 1
        if not outage.checkpoint_every or self._since_checkpoint < outage.checkpoint_every:
            return
        self._since_checkpoint = 0
        outage_begin = outages.spells.at(self._outages_begun)[0]
        write_end = self._clock._now + (outage.checkpoint_time or 0.0)
        self._writing_until = min(write_end, outage_begin)
        if write_end <= outage_begin:
            self._checkpoint = self._world.gate.version

    def _service_time(self, service: Callable[[int], float], outages: Incidents) -> Callable[[int], float]:
        """Return the function from a worker to a service's duration (s), checkpoints and outages included."""
        at, server, number = outages.spells.at, self._world.server, 0

        def service_time(index: int) -> float:
            nonlocal number
            now, lasts = self._clock._now, service(index)
            begin = time = max(now, self._writing_until)
            while at(number)[1] <= now:
                number += 1
            next_outage, remaining = number, lasts
            while at(next_outage)[0] < time + remaining:
                outage_begin, outage_end = at(next_outage)
                if outage_end > time:
                    if outage_begin <= begin:
                        begin = outage_end
                    remaining -= max(outage_begin - time, 0.0)
                    time = outage_end
                next_outage += 1
            if isinstance(server, Station):
                server.serve_time[index] = begin
            if time == now:
                return lasts
            takes = time + remaining - now
            while now + takes < begin:  # by round-off
                takes = math.nextafter(takes, math.inf)
            return takes

        return service_time

    # Shared by workers and server.

    def _count_failure(self) -> None:
        """Count a failure; raise InputError if too many came without an accepted message."""
        self._fruitless += 1
        if self._fruitless > self._most_fruitless:
            failures: tuple[Failure, ...] = self._world.cluster.failures
            raise InputError(
                f"failures = {', '.join(map(str, failures))}: so often that the server got no message "
                f"in {self._fruitless:,} failures; give longer times between them, or shorter computations"
            )

    def _at(self, time: float, action: Callable[[], None]) -> None:
        timeout = self._clock.timeout(max(time - self._clock._now, 0.0))
        timeout.callbacks.append(lambda _: action())
