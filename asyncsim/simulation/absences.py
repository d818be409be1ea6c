"""Let workers crash, leave and join, and the server go down.

A crash, or a departure, ends the life of a worker; the others count the worker until the failure is
detected. When the worker is back, it begins a new life.

With a server (`asyncsim.simulation.world`) a new life begins with the newest version: that read
costs the way down, no way up, and a service only where reads are separate visits. So does the read
after a message that was given up. Without a server see `asyncsim.simulation.peers`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from simpy.events import NORMAL, EventPriority

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.simulation.clock import Clock, Record
from asyncsim.simulation.gates import Gate
from asyncsim.simulation.station import OpenStation, Station, Step, Worker
from asyncsim.simulation.weather import Incidents, Weather
from asyncsim.traces.columns import (
    APPLIED,
    CANCELLED,
    CRASH,
    FAILED_BY,
    LEAVE,
    NOTHING,
    RESENT,
    SPELLS,
    TABLES,
)

#: Rows and spells without an accepted message after which a run ends in an error; more per worker.
FRUITLESS, FRUITLESS_OF_A_WORKER = 100_000, 1_000


class Lives(Protocol):
    """The lives of workers, of which `Absences` gives notice."""

    @property
    def counted(self) -> set[int]:
        """The workers that the others count."""

    def end_life(self, index: int, cause: int, /) -> None:
        """End a life: the worker goes away."""

    def dismiss(self, index: int) -> None:
        """Count a worker no more."""

    def begin_life(self, index: int) -> None:
        """Begin a life: the worker is back."""


class Absences:
    """The absences of workers: when they begin, are detected and end.

    Parameters
    ----------
    cluster, weather, clock, rows
        The cluster, its failures, the clock and the rows of the run.
    lives : Lives
    fruitless : str
        The end of the error about too many failures.
    priority : EventPriority
        Of failures; by default failures at an instant come with other events, as scheduled.

    Attributes
    ----------
    away : list of int
        The number of each worker's current absences, which may overlap.
    incarnation : list of int
        The number of times that each worker has lost its state.
    """

    def __init__(
        self,
        cluster: Cluster,
        weather: Weather,
        clock: Clock,
        rows: Record,
        lives: Lives,
        fruitless: str,
        priority: EventPriority = NORMAL,
    ):
        self._failures = cluster.failures
        self._weather = weather
        self._clock = clock
        self._rows = rows
        self._lives, self._priority = lives, priority
        self._fruitless_text = fruitless
        n = cluster.workers
        self.away = [int(not is_present) for is_present in weather.present]
        self.incarnation = list(self.away)
        self._spell: list[list[float]] = [[] for _ in range(n)]
        self._spells: list[list[float]] = []
        for index in range(n):
            if self.away[index]:  # it joins later: as if it had left at time 0
                self._spell[index] = [
                    index,
                    SPELLS.index("leave"),
                    0.0,
                    math.nan,
                    0.0,
                    0.0,
                    math.nan,
                    -1,
                ]
                self._spells.append(self._spell[index])
        self._fruitless, self._most_fruitless = 0, FRUITLESS + FRUITLESS_OF_A_WORKER * n

    def table(self) -> dict[str, np.ndarray]:
        """Return the columns of `Trace.absences`."""
        columns = np.array(self._spells).reshape(-1, len(TABLES["absences"])).T
        return dict(zip(TABLES["absences"], columns, strict=True))

    def schedule(self) -> None:
        """Schedule the first failure of each kind."""
        # Ties between failures depend on this order.
        for incidents in self._weather.incidents:
            self.next_incident(incidents, 0)
        for index, changes in enumerate(self._weather.changes):
            for time, joins in changes:
                self.at(time, functools.partial(self._readmit if joins else self._leave, index))

    def cause(self, index: int) -> int:
        """Return the cause of a worker's absence: a position in `FAILED_BY`."""
        return FAILED_BY.index(SPELLS[int(self._spell[index][1])])

    def count_row(self, is_accepted: bool) -> None:
        """Count failures since the last accepted message; raise InputError for too many."""
        self._fruitless = 0 if is_accepted else self._fruitless + 1
        if self._fruitless > self._most_fruitless:
            failures = ", ".join(map(str, self._failures))
            raise InputError(
                f"failures = {failures}: so often that {self._fruitless_text} in "
                f"{self._fruitless:,} failures; give longer times between them, or shorter "
                "computations"
            )

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at a time (s)."""
        self._clock.after(time - self._clock._now, action, self._priority)

    def next_incident(self, incidents: Incidents, number: int) -> None:
        """Schedule a crash of some workers, and the end of their absence."""
        begin, end = incidents.spells.at(number)

        def crash() -> None:
            self.count_row(is_accepted=False)
            for index in incidents.workers:
                self._remove(index, CRASH, incidents.failure.detect)
            self.at(end, readmit)

        def readmit() -> None:
            for index in incidents.workers:
                self._readmit(index)
            # Scheduled only now: incidents are drawn as far as the run goes.
            self.next_incident(incidents, number + 1)

        self.at(begin, crash)

    def detect(self, index: int, incarnation: int) -> None:
        """Dismiss a worker, if it is still away."""
        # If it returned and was lost again, its incarnation is new, and a later detection counts.
        is_current = self.away[index] and incarnation == self.incarnation[index]
        if is_current and index in self._lives.counted:
            self._spell[index][4:6] = self._clock._now, len(self._rows)
            self._lives.dismiss(index)

    def _leave(self, index: int) -> None:
        self._remove(index, LEAVE, detect=0.0)

    def _remove(self, index: int, cause: int, detect: float) -> None:
        """Begin an absence of a worker."""
        self.away[index] += 1
        # Absences may overlap, and only the first ends a life.
        if self.away[index] == 1:
            kind = SPELLS.index(FAILED_BY[cause])
            self._spell[index] = [index, kind, self._clock._now, *[math.nan] * 4, -1]
            self._spells.append(self._spell[index])
            self._lives.end_life(index, cause)
            self.incarnation[index] += 1
        number = self.incarnation[index]
        if detect:
            self.at(self._clock._now + detect, functools.partial(self.detect, index, number))
        else:
            self.detect(index, number)

    def _readmit(self, index: int) -> None:
        """End an absence of a worker."""
        self.away[index] -= 1
        if not self.away[index]:
            spell = self._spell[index]
            # The columns ``end`` and ``to_row``.
            spell[3], spell[6] = self._clock._now, len(self._rows)
            self._lives.begin_life(index)


class Visitors(Protocol):
    """Workers of a server, and their rows; see `asyncsim.simulation.world.World`."""

    cluster: Cluster
    clock: Clock
    gate: Gate
    server: Station | OpenStation
    steps: Record
    causes: Record
    lives: list[Worker | None]
    computing: dict[int, Worker]
    resume: Step
    enter: Step

    def begin_life(self, index: int) -> Worker:
        """Begin a life of a worker."""

    def add_row(self, index: int, outcome: int, failed_by: int) -> None:
        """Record a job that did not end with a message."""

    def stop_outdated(self) -> None:
        """Stop computations that are too stale."""

    def close(self) -> None:
        """Drop all messages at the servers."""


class ServerAbsences(Absences):
    """The failures of a run with a server, and the rows that they end.

    Attributes
    ----------
    jobs, reads_made : list of int
        The numbers of each worker's consumed reads, and of all its reads.
    has_begun, under_way : list of bool
        Whether each worker has begun a computation without a row so far; whether its message or
        request is under way to the server, or at the server: a crash does not stop these.
    incarnation_of_job : list of int
        The number of losses of each worker's state before its computation began.
    """

    def __init__(self, world: Visitors, weather: Weather):
        fruitless = "the server got no message"
        super().__init__(world.cluster, weather, world.clock, world.steps, self, fruitless)
        self._world = world
        n = len(weather.present)
        self.jobs = [0] * n
        # Read 0 is version 0 at time 0, of workers that are present.
        self.reads_made = [int(is_present) for is_present in weather.present]
        self.has_begun = [False] * n
        self.under_way = [False] * n
        self.incarnation_of_job = list(self.incarnation)
        self._checkpoint, self._since_checkpoint, self._writing_until = 0, 0, 0.0
        self._saved_at = 0.0
        self._down, self._when_up = False, list[Callable[[], None]]()
        self._outages_begun = 0
        #: Whether checkpoints are the job's, for which its workers wait.
        self._saves_job = weather.outages is not None and weather.outages.failure.is_of_job
        # Outages and checkpoints prolong the service, so that its end is known at its begin.
        if weather.outages is not None:
            world.server.busy = self._service_time(world.server.busy, weather.outages)
        self.schedule()

    # The reports of the world.

    def has_read_ahead(self, index: int) -> bool:
        """Return whether a worker has read for its next computation."""
        return self.reads_made[index] > self.jobs[index]

    def close_job(self, index: int, failed_by: int, outcome: int) -> bool:
        """Record the end of a worker's job; return whether its computation had begun."""
        self._world.causes.entries.extend(
            (self.jobs[index], failed_by, self.incarnation_of_job[index])
        )
        if failed_by != RESENT:  # a resent message belongs to the same job
            self.jobs[index] += 1
        self.count_row(outcome < CANCELLED)
        has_begun = self.has_begun[index]
        self.has_begun[index] = failed_by == RESENT
        return has_begun

    def after_commit(self, worker: Worker, outcome: int) -> None:
        """Let workers continue after a message; its sender may be away."""
        index, gate, resume = worker.index, self._world.gate, self.resume
        self.close_job(index, NOTHING, outcome)
        self.under_way[index] = False
        released = gate.released(worker, outcome) if gate.holds else (worker,)
        # The message of an absent sender counts, but its sender does not continue.
        if self.away[index]:
            gate.forget(index)
            self._end_life(index)
            released = [peer for peer in released if peer is not worker]
        if outcome == APPLIED and self._saves_job:
            self._after_version()
        for peer in released:
            resume(peer)
        if outcome == APPLIED and not self._saves_job:
            self._after_version()

    def after_release(self, workers: Sequence[Worker], is_new_version: bool) -> None:
        """Let workers continue at an instant without a message, with a new version or none."""
        for worker in workers:
            self.resume(worker)
        if is_new_version:
            self._after_version()

    def after_read(self, index: int) -> bool:
        """End the visit of a read; return whether its worker is present."""
        self.under_way[index] = False
        if self.away[index]:
            self._end_life(index)
        return not self.away[index]

    def resume(self, worker: Worker) -> None:
        """Let a worker continue after a commit."""
        world = self._world
        self.under_way[worker.index] = (
            world.cluster.protocol == "write_then_read"
        )  # to ask for its read
        if self._saves_job and self._writing_until > self._clock._now:
            self.at(self._writing_until, functools.partial(self._resume_living, worker))
        else:
            world.resume(worker)

    def _resume_living(self, worker: Worker) -> None:
        """Let a worker continue after a checkpoint, unless the job has crashed."""
        if self._world.lives[worker.index] is worker:
            self._world.resume(worker)

    def enter(self, index: int) -> None:
        """Begin a new life of a worker, once the server is up, if the worker is present and has
        none.
        """
        world = self._world
        if self._down:
            self._when_up.append(functools.partial(self.enter, index))
        elif not self.away[index] and world.lives[index] is None:
            worker = world.begin_life(index)
            # The version under way may hold a message of the worker's last life.
            if world.gate.must_wait(index):
                world.gate.wait(worker)
                return
            self.under_way[index] = world.cluster.separate_reads
            world.enter(worker)

    # Workers.

    def end_life(self, index: int, cause: int) -> None:
        """End the life of a worker that goes away, unless its message is under way."""
        if not self.under_way[index]:
            self._world.gate.forget(index)
            self._end_life(index)

    @property
    def counted(self) -> set[int]:
        """The workers that the server counts."""
        return self._world.gate.members

    def detect(self, index: int, incarnation: int) -> None:
        """Dismiss a worker that is still away, once the server is up."""
        if self._down:
            self._when_up.append(functools.partial(self.detect, index, incarnation))
        else:
            super().detect(index, incarnation)

    def dismiss(self, index: int) -> None:
        """Count a worker no more; release who waited for it."""
        gate = self._world.gate
        version = gate.version
        # The others may have waited for this worker only.
        self.after_release(gate.dismiss(index), gate.version > version)

    def begin_life(self, index: int) -> None:
        """Count a worker that is back, and send it the newest version."""
        if index not in self.counted:
            self._world.gate.admit(index)
        self.enter(index)

    def _end_life(self, index: int) -> None:
        """Cancel the jobs that a worker which is away would have computed."""
        world = self._world
        world.lives[index] = None
        world.computing.pop(index, None)
        # Every read needs a row: job ``j`` computes from read ``j``, also in the next life.
        while self.has_read_ahead(index):
            world.add_row(index, CANCELLED, self.cause(index))

    # The server.

    def next_incident(self, incidents: Incidents, number: int) -> None:
        """Schedule a crash of some workers, or an outage, and its end."""
        if incidents is self._weather.outages:
            self._next_outage(incidents, number)
        else:
            super().next_incident(incidents, number)

    def _next_outage(self, outages: Incidents, number: int) -> None:
        begin, end = outages.spells.at(number)
        self._outages_begun = number

        def go_down() -> None:
            self.count_row(is_accepted=False)
            self._down = True
            if outages.failure.is_of_job:
                self._end_round()
            self.at(end, restore)

        def restore() -> None:
            restored = len(self._world.steps), self._checkpoint
            self._spells.append(
                [-1, SPELLS.index("outage"), begin, end, math.nan, math.nan, *restored]
            )
            self._down = False
            self._since_checkpoint, self._saved_at = 0, end
            self._next_outage(outages, number + 1)
            for worker in self._world.gate.renew():
                self.resume(worker)
            self._world.stop_outdated()
            if outages.failure.is_of_job:
                for index in range(len(self.away)):
                    self._readmit(index)
            # In the order in which they came during the outage.
            waiting, self._when_up = self._when_up, []
            for action in waiting:
                action()

        self.at(begin, go_down)

    def _end_round(self) -> None:
        """End the lives of all workers, and drop their messages."""
        self._world.close()
        for index in range(len(self.away)):
            self.under_way[index] = False
            # The job's crash is known at once: no worker is counted out.
            self._remove(index, CRASH, detect=0.0)

    def _after_version(self) -> None:
        """Write a checkpoint if one is due, and stop computations that are now too stale."""
        outages = self._weather.outages
        if outages is not None and not self._down:
            self._write_checkpoint(outages)
        self._world.stop_outdated()

    def _write_checkpoint(self, outages: Incidents) -> None:
        outage, now = outages.failure, self._clock._now
        self._since_checkpoint += 1
        if not outage.is_due(self._since_checkpoint, now - self._saved_at):
            return
        self._since_checkpoint = 0
        # An outage that begins during the writing loses the checkpoint, and ends the writing.
        outage_begin = outages.spells.at(self._outages_begun)[0]
        write_end = now + outage.saving
        self._writing_until, self._saved_at = min(write_end, outage_begin), write_end
        if write_end <= outage_begin:
            self._checkpoint = self._world.gate.version

    def _service_time(
        self, service: Callable[[int], float], outages: Incidents
    ) -> Callable[[int], float]:
        """Return the function from a worker to a service's duration (s), checkpoints and outages
        included.
        """
        at, server, number = outages.spells.at, self._world.server, 0

        def service_time(index: int) -> float:
            nonlocal number
            now, lasts = self._clock._now, service(index)
            # While the server writes a checkpoint or is down, a service waits; then it resumes.
            begin = time = max(now, self._writing_until)
            while at(number)[1] <= now:
                number += 1
            next_outage, remaining = number, lasts
            while at(next_outage)[0] < time + remaining:
                outage_begin, outage_end = at(next_outage)
                if outage_end > time:
                    if outage_begin <= begin:  # the service has not begun yet
                        begin = outage_end
                    remaining -= max(outage_begin - time, 0.0)
                    time = outage_end
                next_outage += 1
            if isinstance(server, Station):
                server.serve_time[index] = begin
            if time == now:  # undisturbed: exactly the drawn duration
                return lasts
            takes = time + remaining - now
            while now + takes < begin:  # by round-off
                takes = math.nextafter(takes, math.inf)
            return takes

        return service_time
