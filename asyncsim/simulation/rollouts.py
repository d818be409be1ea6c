"""Slots that generate samples on the world's clock, and the queue of samples for the learners.

A learner is a worker of the world. Before it computes it takes a batch here (`Slots.supply`); its
commit makes a version (`Slots.commit`), which reaches the slots after a transfer. A slot is its
next event, used repeatedly: one event for a sample.

Samples are numbered in the order of their first starts, so sample ``i`` belongs to group
``i // group``, and has the same length under every queue. A *row* is one attempt at a sample.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.simulation.absences import FRUITLESS, FRUITLESS_OF_A_WORKER
from asyncsim.simulation.clock import Clock
from asyncsim.simulation.delays import delays
from asyncsim.simulation.gates import Gate
from asyncsim.simulation.station import Step, Worker
from asyncsim.simulation.weather import Incidents, Weather
from asyncsim.traces.samples import (
    CANCELLED,
    DISCARDED,
    DROPPED,
    OPEN,
    SAMPLE_OUTCOMES,
    TRAINED,
    RolloutTables,
)

#: Blocks of columns that are filled later.
_BLOCK = 4096
_UNKNOWN, _NO_VERSION = array("d", [np.nan]) * _BLOCK, array("q", [-1]) * _BLOCK
_ALL_OPEN = array("b", [OPEN]) * _BLOCK
#: Groups that may be discarded in a row before a run is given up.
_MOST_DISCARDED = 10_000


class Slots:
    """The slots of a run, their samples and the queue.

    Parameters
    ----------
    clock, cluster, seed
        The clock, the cluster and the seed of the run.
    gate : Gate
        The learners' gate, which counts the versions.
    """

    def __init__(self, clock: Clock, cluster: Cluster, seed: int, gate: Gate):
        rollouts = cluster.rollouts
        assert rollouts is not None
        self._clock, self._gate, self._rollouts = clock, gate, rollouts
        self._draw_length = delays([rollouts.length], seed, "rollout length")
        self._transfer = delays([rollouts.transfer], seed, "rollout transfer")
        self._failures = [failure for failure in cluster.failures if failure.on == "slots"]
        self._weather = (
            Weather(self._failures, rollouts.slots, None, seed, "slot failure")
            if self._failures
            else None
        )
        self._aborts = rollouts.updates == "abort_and_resume"
        #: Whether a new version amid a sample changes when it ends; otherwise round-off would.
        slows = self._weather is not None and self._weather.slows
        self._reschedules = self._aborts or rollouts.prefill > 0 or slows

        count = rollouts.slots
        self._events = [Worker(clock, slot) for slot in range(count)]
        self._on_end: list[Callable[[Any], None]] = [self._finish]
        self._row_of = [-1] * count  # the row that each slot generates
        self._done = [0.0] * count
        self._since = [0.0] * count  # its progress (s), growing since (s)
        self._free = list(reversed(range(count)))
        self._crashes = [0] * count  # that keep each slot away
        self._version = 0  # the newest one at the slots

        self._lengths: list[float] = []  # by sample
        self._group, self._unit = rollouts.group, rollouts.unit
        self._free_for_unit = min(self._unit, count)  # slots
        queue = rollouts.queue
        window = np.inf if queue.eta is None else (queue.eta + 1) * rollouts.batch
        self._window_for_unit = window - self._unit  # at most, for another unit to begin
        self._limit, self._most_batches = queue.limit, queue.batches  # None without one
        self._started = 0  # samples
        self._pending = 0  # samples of the unit that has begun, not yet on a slot
        self._retries: deque[tuple[int, int]] = deque()  # samples and attempts that start again
        self._open = 0  # rows that have started and not ended
        self._window = 0  # samples that the pace counts
        self._in_transfer: deque[tuple[int, int]] = deque()  # versions, and samples they release

        self._rows: dict[int, list[int]] = {}  # by group
        self._unfinished: dict[int, int] = {}  # samples, by group, the oldest group first
        self._ready: list[int] = []  # groups that wait for a learner, in the order of consumption
        self._batches: dict[int, list[int]] = {}  # groups, by learner
        self._discarded = 0  # groups since the last batch
        self._fruitless = 0  # attempts cancelled since a sample was finished
        self._idle: deque[Callable[[], None]] = deque()  # learners without a batch

        # The record, row by row, and update by update. Columns that are filled later grow in
        # blocks.
        self._sample: list[int] = []
        self._slot: list[int] = []
        self._read: list[int] = []
        self._begun = array("d")  # attempt, start time and start version of each row
        self._end, self._ready_time, self._take_time = array("d"), array("d"), array("d")
        self._end_version, self._outcome = array("q"), array("b")
        self._switches: list[tuple[int, float, int]] = []
        self._updates: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Start the first samples and the failures of slots."""
        for incidents in [] if self._weather is None else self._weather.incidents:
            self._schedule_crash(incidents, 0)
        self._fill()

    # Learners.

    def supply(self, next_step: Step) -> Step:
        """Return the step at which a learner waits for a batch and continues with ``next_step``.

        A learner that lost its computation repeats it with the same batch.
        """

        def take(worker: Worker) -> None:
            if worker.index in self._batches or self._take_batch(worker.index):
                next_step(worker)
            else:
                self._idle.append(lambda: take(worker))

        return take

    def _take_batch(self, learner: int) -> bool:
        """Hand the next batch to a learner; return False if there is none."""
        rollouts = self._rollouts
        if self._limit is not None:
            self._discard_stale(self._limit)
        count = rollouts.batch // rollouts.group
        batch = self._ready[:count]
        if len(batch) < count:
            return False
        if rollouts.consume == "started" and self._unfinished:
            oldest_unfinished = next(iter(self._unfinished))
            if batch[-1] > oldest_unfinished:
                return False
        del self._ready[:count]
        for group in batch:
            for row in self._rows[group]:
                self._take_time[row] = self._clock._now
        self._batches[learner] = batch
        self._discarded = 0
        return True

    def commit(self, learner: int) -> None:
        """End the samples of a learner's batch, whose update has just made a version."""
        version, rollouts = self._gate.version, self._rollouts
        for group in self._batches.pop(learner):
            for row in self._rows.pop(group):
                self._end_version[row], self._outcome[row] = version - 1, TRAINED
        self._open -= rollouts.batch
        self._updates.append((self._open, len(self._ready) * rollouts.group))
        self._in_transfer.append((version, rollouts.batch))
        if self._aborts:
            self._stop_samples()
        delay = self._transfer(0)
        if delay > 0:
            self._clock.after(delay, lambda: self._receive(version))
        else:
            self._receive(version)

    def _receive(self, version: int) -> None:
        """Give the slots a version, and release the samples that it was trained on."""
        if version > self._version:  # unless a newer one was faster
            self._version = version
            if self._rollouts.updates != "start":
                for slot, row in enumerate(self._row_of):
                    if row >= 0:
                        self._switch(slot, row)
        while self._in_transfer and self._in_transfer[0][0] <= version:
            self._window -= self._in_transfer.popleft()[1]
        self._fill()

    # The queue.

    def _enqueue(self, group: int) -> None:
        """Queue a finished group, serve idle learners, and drop the groups beyond the limit."""
        del self._unfinished[group]
        for row in self._rows[group]:
            self._ready_time[row] = self._clock._now
        if self._rollouts.consume == "finished":
            self._ready.append(group)
        else:
            insort(self._ready, group)
        self._serve_learners()
        if self._most_batches is not None:
            most = self._most_batches * self._rollouts.batch
            while len(self._ready) * self._group > most:
                self._lose(self._ready.pop(0), DROPPED)
            self._serve_learners()

    def _discard_stale(self, limit: int) -> None:
        """Discard waiting groups whose oldest sample is too stale for the next update."""
        oldest_allowed = self._gate.version - limit
        for group in list(self._ready):
            if min(self._read[row] for row in self._rows[group]) < oldest_allowed:
                self._ready.remove(group)
                self._lose(group, DISCARDED)
                self._discarded += 1
        if self._discarded > _MOST_DISCARDED:
            raise InputError(
                f"rollouts: queue = {self._rollouts.queue}: {self._discarded:,} groups in a row "
                "were too stale, and no batch was complete; give a larger limit, fewer slots or a "
                "larger batch"
            )

    def _lose(self, group: int, outcome: int) -> None:
        """End the samples of a group that no learner will train on."""
        rows = self._rows.pop(group)
        for row in rows:
            self._end_row(row, outcome)
        self._window -= len(rows)

    def _serve_learners(self) -> None:
        for _ in range(len(self._idle)):
            self._idle.popleft()()

    # Samples.

    def _fill(self) -> None:
        """Start samples on free slots as long as the queue admits them."""
        if self._aborts and self._in_transfer:
            return
        free = self._free
        while free:
            if self._retries:
                self._start_sample(free.pop(), *self._retries.popleft())
                continue
            if not self._pending:
                if len(free) < self._free_for_unit or self._window > self._window_for_unit:
                    return
                self._pending = self._unit
                self._window += self._unit
            self._pending -= 1
            self._start_sample(free.pop(), self._started, 0)

    def _start_sample(self, slot: int, sample: int, attempt: int) -> None:
        row, now = len(self._sample), self._clock._now
        group = sample // self._group
        if sample == self._started:
            self._started += 1
            self._lengths.append(self._draw_length(0))
            if group not in self._rows:
                self._rows[group], self._unfinished[group] = [], self._group
        if row == len(self._outcome):
            for times in (self._end, self._ready_time, self._take_time):
                times.extend(_UNKNOWN)
            self._end_version.extend(_NO_VERSION)
            self._outcome.extend(_ALL_OPEN)
        self._rows[group].append(row)
        self._sample.append(sample)
        self._slot.append(slot)
        self._read.append(self._version)
        self._begun.extend((attempt, now, self._gate.version))
        self._open += 1
        self._row_of[slot] = row
        self._done[slot], self._since[slot] = 0.0, now
        self._schedule_end(slot, self._lengths[sample])

    def _schedule_end(self, slot: int, work: float, wait: float = 0.0) -> None:
        """Schedule the end of a sample that has ``work`` seconds left, after a wait (s)."""
        if self._weather is not None:
            work = self._weather.working_time(slot, self._clock._now + wait, work)
        event = self._events[slot]
        event.callbacks = self._on_end
        self._clock.schedule(event, delay=wait + work)

    def _finish(self, event: Any) -> None:
        slot = event.index
        row = self._row_of[slot]
        self._row_of[slot] = -1
        self._end[row] = self._clock._now
        self._fruitless = 0
        self._free.append(slot)
        self._count_finished(row)
        self._fill()

    def _count_finished(self, row: int) -> None:
        group = self._sample[row] // self._group
        unfinished = self._unfinished[group] - 1
        self._unfinished[group] = unfinished
        if not unfinished:
            self._enqueue(group)

    def _end_row(self, row: int, outcome: int) -> None:
        self._end_version[row], self._outcome[row] = self._gate.version, outcome
        self._open -= 1

    # Versions that change amid a sample.

    def _switch(self, slot: int, row: int) -> None:
        """Continue a sample with the newest version, after reading the sample so far again."""
        length, progress = self._lengths[self._sample[row]], self._progress(slot, row)
        self._switches.append((row, progress / length, self._version))
        if not self._reschedules:
            return
        wait = self._rollouts.prefill * progress
        self._done[slot], self._since[slot] = progress, self._clock._now + wait
        self._forget_end(slot)
        self._schedule_end(slot, length - progress, wait)

    def _stop_samples(self) -> None:
        """Stop all samples until the version that was just made reaches the slots."""
        for slot, row in enumerate(self._row_of):
            if row >= 0:
                self._done[slot], self._since[slot] = self._progress(slot, row), np.inf
                self._forget_end(slot)

    def _progress(self, slot: int, row: int) -> float:
        """Return the length (s) that a slot has generated of its sample."""
        since, now = self._since[slot], self._clock._now
        if now <= since:
            return self._done[slot]
        work = now - since
        if self._weather is not None:
            work = self._weather.work(slot, since, now)
        return min(self._done[slot] + work, self._lengths[self._sample[row]])

    def _forget_end(self, slot: int) -> None:
        """Make the scheduled end of a slot's sample do nothing."""
        self._events[slot].callbacks = []
        self._events[slot] = Worker(self._clock, slot)

    # Failures.

    def _schedule_crash(self, incidents: Incidents, number: int) -> None:
        begin, end = incidents.spells.at(number)
        self._clock.after(begin - self._clock._now, lambda: self._crash(incidents, number, end))

    def _crash(self, incidents: Incidents, number: int, end: float) -> None:
        """Cancel the samples of some slots, which come back later."""
        cancelled = []
        for slot in incidents.workers:
            self._crashes[slot] += 1
            if self._row_of[slot] >= 0:
                cancelled.append(self._row_of[slot])
                self._vacate(slot)
            elif slot in self._free:
                self._free.remove(slot)
        for row in cancelled:
            self._cancel(row)
        self._clock.after(end - self._clock._now, lambda: self._come_back(incidents, number))
        self._fill()

    def _cancel(self, row: int) -> None:
        """Cancel an attempt at a sample, which starts again.

        Raises
        ------
        InputError
            Too many attempts in a row were cancelled.
        """
        self._fruitless += 1
        if self._fruitless > FRUITLESS + FRUITLESS_OF_A_WORKER * self._rollouts.slots:
            failures = ", ".join(map(str, self._failures))
            raise InputError(
                f"failures = {failures}: so often that no sample was finished in "
                f"{self._fruitless:,} attempts; give longer times between them, or shorter samples"
            )
        self._rows[self._sample[row] // self._group].remove(row)
        self._end[row] = self._clock._now
        self._end_row(row, CANCELLED)
        self._retries.append((self._sample[row], int(self._begun[3 * row]) + 1))

    def _vacate(self, slot: int) -> None:
        self._row_of[slot] = -1
        self._forget_end(slot)

    def _come_back(self, incidents: Incidents, number: int) -> None:
        for slot in incidents.workers:
            self._crashes[slot] -= 1
            if not self._crashes[slot]:
                self._free.append(slot)
        self._schedule_crash(incidents, number + 1)
        self._fill()

    # The record.

    def tables(self) -> RolloutTables:
        """Return the tables of the trace."""
        count = len(self._sample)
        attempt, start, start_version = np.array(self._begun).reshape(count, 3).T
        columns: dict[str, Any] = {
            "sample": self._sample,
            "attempt": attempt.astype(np.int64),
            "slot": self._slot,
            "start_time": start,
            "end_time": self._end[:count],
            "ready_time": self._ready_time[:count],
            "take_time": self._take_time[:count],
            "read_version": self._read,
            "start_version": start_version.astype(np.int64),
            "version": self._end_version[:count],
        }
        samples = pd.DataFrame({name: np.array(values) for name, values in columns.items()})
        samples.insert(1, "group", samples["sample"] // self._rollouts.group)
        samples["length"] = np.array(self._lengths)[samples["sample"]]
        outcome = np.array(self._outcome[:count])
        samples["outcome"] = pd.Categorical.from_codes(outcome, SAMPLE_OUTCOMES)
        samples.loc[outcome == OPEN, "version"] = self._gate.version
        samples["staleness"] = samples["version"] - samples["read_version"]
        switches = pd.DataFrame(self._switches, columns=["row", "share", "version"])
        switches = switches.sort_values(["row", "share"], kind="stable", ignore_index=True)
        updates = np.array(self._updates, np.int64).reshape(-1, 2)
        return RolloutTables(samples, switches, pd.DataFrame(updates, columns=["open", "waiting"]))
