"""Clusters with servers: workers compute, travel, wait, are served and read, under a gate.

A worker waits for one thing at a time, so it *is* its next event, used repeatedly: no process and
no request object, and two events per visit when the network takes no time. Its cycle is a chain of
steps, built at the start: a step lets a worker act and calls the step that follows. The protocols,
in `_visits`, are ways to chain them. With several servers the chain forks after the computation,
into one branch per server, and joins before the next computation.

A `Worker` is one *life* of a worker. A crash ends it, unless its message is under way to the
server; then the visit ends it. A step of a life that has ended does nothing. Job ``j`` of a worker
always computes from its read ``j``, read 0 being version 0 at time 0, so a read that is open when a
life ends belongs to a cancelled row.
"""

import functools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from simpy.events import EventPriority

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.simulation.absences import FRUITLESS, FRUITLESS_OF_A_WORKER, ServerAbsences
from asyncsim.simulation.clock import Clock, Record
from asyncsim.simulation.delays import delays
from asyncsim.simulation.gates import Batches, Trials
from asyncsim.simulation.journeys import DOWN, UP, Journeys
from asyncsim.simulation.rollouts import Slots
from asyncsim.simulation.shards import Shard, SplitMessages
from asyncsim.simulation.station import Station, Step, Worker
from asyncsim.simulation.weather import Weather
from asyncsim.traces.bookkeeping import FAILURE_RECORD
from asyncsim.traces.columns import APPLIED, CANCELLED, DISCARDED, LOSS, LOST, NOTHING, RESENT

#: The priority of an event that comes after all others of its instant.
_AFTER_VISITS = EventPriority(2)


class World:
    """One run on a cluster with one server or several.

    Attributes
    ----------
    shards : list of Shard
        The servers, each with its shard of the parameters; one with all of them.
    steps, reads : Record
        The messages and cancelled computations, and the reads, in the order in which their services
        ended.
    causes : Record
        With failures, for each row of ``steps``: its job, the failure that lost it, and the earlier
        losses of its worker's state.
    absences : ServerAbsences or None
        With failures, the absences of workers and of the server.
    lives : list of Worker or None
        The current life of each worker; None for a worker that may not continue.
    """

    def __init__(self, cluster: Cluster, seed: int):
        n = cluster.workers
        self.cluster, self.seed = cluster, seed
        self.clock = Clock()
        self.causes = Record(FAILURE_RECORD)
        failures = [failure for failure in cluster.failures if failure.on != "slots"]
        self.weather = Weather(failures, n, cluster.sites, seed) if failures else None
        present = [True] * n if self.weather is None else self.weather.present
        self.first = [index for index in range(n) if present[index]]
        self.lives: list[Worker | None] = [None] * n
        self.accepted: list[int] = []
        servers = range(cluster.server_count)
        self.shards = [Shard(cluster, self.first, self.clock, seed, number) for number in servers]
        self._split = (
            SplitMessages(cluster, self.first, self.clock, self.lives, self.accepted)
            if cluster.server_count > 1
            else None
        )
        messages = self._split or self.shards[0]
        self.gate, self.steps, self.reads = messages.gate, messages.steps, messages.reads
        self._last_read, self._read_version = messages.last_read, messages.read_version
        self.server = self.shards[0].station
        self.computing: dict[int, Worker] = {}  # where computations may be stopped
        self._stops = cluster.policy.stops_computations and self._split is None
        self._trial_times = cluster.policy.trial_times(n)
        #: Cut trials since the last accepted message, and the messages accepted before.
        self._cuts_in_vain, self._accepted_before_cut = 0, 0
        self._began_from: dict[int, list[int]] = defaultdict(
            list
        )  # workers by the version they began from
        self.start_time, self.send_time = array("d", [0.0]) * n, array("d", [0.0]) * n
        self._visit_counts = [0] * n
        # It schedules the first failures: events of one instant happen in the order of scheduling.
        self.absences = None if self.weather is None else ServerAbsences(self, self.weather)
        #: Whether each read is part of a commit's visit, at its instant, and has no separate
        #: record.
        has_own_reads = cluster.separate_reads or self.gate.holds or self._stops or self.weather
        self.reads_are_commits = not (has_own_reads or self._split)
        self.slots = (
            None if cluster.rollouts is None else Slots(self.clock, cluster, seed, self.gate)
        )
        if isinstance(self.gate, Batches):
            self.gate.close_later = self._close_later
        self.compute = self._cycle()

    def run(self, commits: int, report: Callable[[int], None]) -> None:
        """Run until the server has accepted ``commits`` messages; report the progress."""
        # With one server its record is the record of all reads; a set names it once.
        reads = {self.reads, *(shard.reads for shard in self.shards)}
        for record in reads:
            for index in self.first:
                record.entries.extend((index, 0, 0.0, 0.0, 0.0))
        for index in self.first:
            worker = self.lives[index] = Worker(self.clock, index)
            self.compute(worker)
        # After the learners, which then wait for a batch in the order of their indices.
        if self.slots is not None:
            self.slots.begin()
        records = [self.causes, self.steps, self.reads]
        records += [record for shard in self.shards for record in (shard.steps, shard.reads)]
        self.clock.run_until(commits, self.accepted, records, report)

    def present(self) -> dict[str, np.ndarray]:
        """Return the visits that wait or are served: worker, arrival and shard."""
        visits = [
            (worker.index, shard.station.arrive_time[worker.index], number)
            for number, shard in enumerate(self.shards)
            for worker in sorted({*shard.station.waiting, shard.station.serving} - {None})
        ]
        names = ("worker", "arrive_time", "shard")
        return dict(zip(names, np.array(visits).reshape(-1, len(names)).T, strict=True))

    # The cycle of a worker.

    def _cycle(self) -> Step:
        """Chain a worker's steps from one computation to the next, and return the computation."""
        # The steps form a ring: the list is filled once the steps after the computation exist.
        computed: list[Callable[[Any], None]] = []
        compute = self._compute(computed)
        if self.slots is not None:
            compute = self.slots.supply(compute)
        if self._split is None:
            computed.append(self._visits(self.shards[0], compute))
        else:
            departures = [self._visits(shard, self._split.join(compute)) for shard in self.shards]
            computed.append(self._split.fork(self.shards, departures))
        return compute

    def _visits(self, shard: Shard, compute: Step) -> Step:
        """Chain the steps from the end of a computation to the next; return the first of them.

        ``resume`` is the step after a commit; ``enter`` the first step of a returning worker.
        """
        cluster, visit = self.cluster, shard.station.visit
        exists = None if self.weather is None else self._exists
        way_up, way_down = (
            Journeys(
                self.clock, cluster, self.seed, direction, self._visit_counts, exists, shard.stream
            ).before
            for direction in (UP, DOWN)
        )
        if self.weather is not None and cluster.collective_time:
            way_down = self._all_reduce
        up = (
            way_up
            if self.weather is None
            else lambda step, loaded=True: self._send(way_up(step, loaded), loaded)
        )
        commit, read = functools.partial(self._commit, shard), functools.partial(self._read, shard)
        if cluster.protocol == "exchange":
            self.resume = self.enter = read(way_down(compute))
            take = visit(commit(self.resume))
            if any(failure.is_of_job for failure in cluster.failures):
                # A job resumes with its parameters on the workers; earlier messages are lost.
                self.enter = read(compute)
                return up(lambda worker: take(worker) if self._exists(worker) else None)
            return up(take)
        if cluster.protocol == "write_then_read":
            self.resume = self.enter = visit(read(way_down(compute), ends_visit=True))
            return up(visit(commit(self.resume)))
        if not cluster.separate_reads:
            self.resume = way_down(compute)
            self.enter = read(self.resume)
            return up(visit(read(commit(self.resume))))
        self.resume = way_down(compute, loaded=False)
        self.enter = visit(read(self.resume, ends_visit=True))
        # Request up, version down; then message up, acknowledgement down.
        write = up(visit(commit(self.resume)))
        return up(visit(read(way_down(write), ends_visit=True)), loaded=False)

    def _exists(self, worker: Worker) -> bool:
        return self.lives[worker.index] is worker

    def _compute(self, computed: list[Callable[[Any], None]]) -> Step:
        clock, lives, computing, visits = self.clock, self.lives, self.computing, self._visit_counts
        start_time, send_time = self.start_time, self.send_time
        last_read, read_version = self._last_read, self._read_version
        duration = delays(self.cluster.compute_laws, self.seed, "compute", self.cluster.windows)
        gate, absences, stops = self.gate, self.absences, self._stops
        counts, may_end = self.cluster.far_every > 1, stops or absences is not None
        working_time = (
            None if self.weather is None or not self.weather.slows else self.weather.working_time
        )

        def end(worker: Worker) -> None:
            if lives[worker.index] is worker:
                if stops:
                    del computing[worker.index]
                computed[0](worker)

        callbacks: list[Callable[[Any], None]] = [end] if may_end else computed
        trial_times = self._trial_times
        cut_callbacks: list[Callable[[Any], None]] = [self._cut]

        def compute(worker: Worker) -> None:
            index = worker.index
            if may_end and lives[index] is not worker:
                return
            if counts:  # only every `far_every`-th visit is far
                visits[index] += 1
            version = read_version[index] = last_read[index]
            start_time[index] = now = clock._now
            lasts = duration(index)
            if absences is not None:
                absences.has_begun[index] = True
                absences.incarnation_of_job[index] = absences.incarnation[index]
                if working_time is not None:
                    lasts = working_time(index, now, lasts)
            worker.callbacks = callbacks
            if trial_times is not None and lasts > trial_times[index]:
                lasts, worker.callbacks = trial_times[index], cut_callbacks
            send_time[index] = now + lasts
            clock.schedule(worker, delay=lasts)
            if stops:
                computing[index] = worker
                if gate.outdated(version):  # too stale already, after its journey
                    self._stop(index)
                else:
                    self._began_from[version].append(index)

        return compute

    def _all_reduce(self, next_step: Step, loaded: bool = True) -> Step:
        """Return the step that waits for the all-reduce of the gate's members, and continues with
        ``next_step``.
        """
        clock, gate, arrival = self.clock, self.gate, [next_step]
        seconds: dict[frozenset[int], float] = {}  # by members, which seldom change

        def depart(worker: Worker) -> None:
            members = frozenset(gate.members)
            if members not in seconds:
                seconds[members] = self.cluster.collective_time_of(members)
            worker.callbacks = arrival
            clock.schedule(worker, delay=seconds[members])

        return depart

    def _send(self, next_step: Step, loaded: bool) -> Step:
        """Return the step that sends a message, or a request, which may be lost if ``loaded``."""
        weather, absences, lives = self.weather, self.absences, self.lives
        assert weather is not None and absences is not None
        under_way, may_be_lost = absences.under_way, loaded and weather.loses

        def send(worker: Worker) -> None:
            index = worker.index
            # The life may have ended since the last step.
            if lives[index] is not worker:
                return
            loss = weather.loss(index) if may_be_lost else None
            if loss is None:
                under_way[index] = True
                next_step(worker)
                return
            worker.callbacks = [lambda worker: self._time_out(worker, loss.resend, send)]
            self.clock.schedule(worker, delay=loss.timeout)

        return send

    def _time_out(self, worker: Worker, resend: bool, send: Step) -> None:
        """Resend a lost message, or give it up."""
        index, absences = worker.index, self.absences
        assert absences is not None
        if self.lives[index] is not worker:
            return
        self.add_row(index, LOST, RESENT if resend else LOSS)
        if resend:
            # The next row of the same job computes nothing.
            self.start_time[index] = self.send_time[index] = self.clock._now
            send(worker)
        elif absences.has_read_ahead(index):
            self.compute(worker)
        else:  # without a read to compute from, the worker begins like a returning one
            self.lives[index] = None
            absences.enter(index)

    def _commit(self, shard: Shard, next_step: Step) -> Step:
        """Return the end of a visit at which a message is taken; released workers continue with
        ``next_step``.
        """
        clock, gate, stops, absences = self.clock, shard.gate, self._stops, self.absences
        steps: Callable[[tuple[float, ...]], None] = shard.steps.entries.extend
        accepted: Callable[[int], None] = self.accepted.append
        if self._split is not None:  # which accepts whole messages
            steps, accepted = self._split.count_commits(shard), lambda index: None
        start_time, send_time, read_version = self.start_time, self.send_time, shard.read_version
        arrive_time, serve_time = shard.station.arrive_time, shard.station.serve_time
        take, holds, takes_all, slots = gate.take, gate.holds, gate.takes_all, self.slots

        def commit(worker: Worker) -> None:
            index = worker.index
            if takes_all:  # the common case without a call
                gate.version += 1
                outcome = APPLIED
            else:
                outcome = take(index, read_version[index])
            computed = start_time[index], send_time[index], arrive_time[index]
            steps((index, *computed, serve_time[index], clock._now, outcome, gate.version))
            if outcome != DISCARDED:
                accepted(index)
            if slots is not None:
                slots.commit(index)
            # With failures the sender may be away, and a version may need a checkpoint.
            if absences is not None:
                absences.after_commit(worker, outcome)
                return
            if holds:
                for released in gate.released(worker, outcome):
                    next_step(released)
            else:
                next_step(worker)
            if stops and outcome == APPLIED:
                self.stop_outdated()

        return commit

    def _read(self, shard: Shard, next_step: Step, ends_visit: bool = False) -> Step:
        """Return the step that reads the newest version, at the end of a separate visit if
        ``ends_visit``.
        """
        clock, gate, last_read, absences = self.clock, shard.gate, shard.last_read, self.absences
        reads: Callable[[tuple[float, ...]], None] = shard.reads.entries.extend
        if self._split is not None:
            reads = self._split.count_reads(shard)
        arrive_time, serve_time = shard.station.arrive_time, shard.station.serve_time

        def note_version(worker: Worker) -> None:
            last_read[worker.index] = gate.version
            next_step(worker)

        def read(worker: Worker) -> None:
            index = worker.index
            version = last_read[index] = gate.version
            reads((index, version, arrive_time[index], serve_time[index], clock._now))
            if absences is not None:
                absences.reads_made[index] += 1
                if ends_visit and not absences.after_read(index):
                    return
            next_step(worker)

        if not self.reads_are_commits:
            return read
        # `note_version` serves the staleness limit; a gate that takes all messages has none.
        return next_step if gate.takes_all else note_version

    # Stopped computations, and jobs without a message.

    def stop_outdated(self) -> None:
        """Stop the computations that the newest version has made too stale, in the order of
        workers.
        """
        if not self._stops or (limit := self.cluster.policy.staleness_limit) is None:
            return
        # Computations from older versions were stopped before.
        version = self.gate.version - limit
        for index in sorted(set(self._began_from.pop(version, ()))):
            if index in self.computing and self._read_version[index] == version:
                self._stop(index)

    def _stop(self, index: int) -> None:
        """Stop a computation and send its worker the newest version."""
        del self.computing[index]
        self.add_row(index, CANCELLED, NOTHING)
        worker = self.begin_life(index)
        self.resume(worker) if self.absences is None else self.absences.resume(worker)

    def _cut(self, worker: Worker) -> None:
        """Cut a trial; its worker starts the next one at once, or waits for the end of the round.

        Raises
        ------
        InputError
            Too many trials in a row were cut.
        """
        index, gate, now = worker.index, self.gate, self.clock._now
        assert isinstance(gate, Trials)
        if self.lives[index] is not worker:
            return
        if len(self.accepted) > self._accepted_before_cut:
            self._cuts_in_vain, self._accepted_before_cut = 0, len(self.accepted)
        self._cuts_in_vain += 1
        if self._cuts_in_vain > FRUITLESS + FRUITLESS_OF_A_WORKER * self.cluster.workers:
            raise InputError(
                f"policy = {self.cluster.policy}: no computation ended within its trial's time in "
                f"{self._cuts_in_vain:,} trials; give a longer time, or shorter computations"
            )
        self.add_row(index, CANCELLED, NOTHING)
        if gate.count_trial(index):
            # The next job computes from the same version, without a visit.
            self.reads.entries.extend((index, self._read_version[index], math.nan, math.nan, now))
            if self.absences is not None:
                self.absences.reads_made[index] += 1
            self.compute(worker)
            return
        self.server.arrive_time[index] = self.server.serve_time[index] = now
        version = gate.version
        self._continue(gate.cut(worker), version)

    def _close_later(self, seconds: float, close: Callable[[], Sequence[Worker]]) -> None:
        """Complete a version after a grace window, if it is still the same one."""

        def end_window() -> None:
            version = self.gate.version
            self._continue(close(), version)

        # Messages that are served at the last instant come before.
        self.clock.after(seconds, end_window, _AFTER_VISITS)

    def _continue(self, workers: Sequence[Worker], version: int) -> None:
        """Let workers continue where a version later than ``version`` was made without a message,
        or none.
        """
        if self.absences is not None:
            self.absences.after_release(workers, self.gate.version > version)
            return
        for worker in workers:
            self.resume(worker)

    def close(self) -> None:
        """Drop all messages at the servers."""
        for shard in self.shards:
            assert isinstance(shard.station, Station)
            shard.station.close()

    def begin_life(self, index: int) -> Worker:
        """Begin a life of a worker at this instant, as if it had just been served."""
        worker = self.lives[index] = Worker(self.clock, index)
        self.server.arrive_time[index] = self.server.serve_time[index] = self.clock._now
        return worker

    def add_row(self, index: int, outcome: int, failed_by: int) -> None:
        """Record a job that did not end with a message at the server."""
        now = self.clock._now
        # A stopped computation has a scheduled end that it does not reach.
        start, send = self.start_time[index], min(self.send_time[index], now)
        if self.absences is not None and not self.absences.close_job(index, failed_by, outcome):
            start = send = now
        self.steps.entries.extend((index, start, send, now, now, now, outcome, self.gate.version))
