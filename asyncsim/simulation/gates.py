"""Gates: the state of a server's timing policy.

A gate takes a message, makes a version when one is complete, and names the workers that continue.
It counts *members*: workers that are not known to be away.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from asyncsim.clusters.policy import Policy
from asyncsim.simulation.station import Worker
from asyncsim.traces.columns import APPLIED, BUFFERED, DISCARDED


class Gate:
    """Makes a version of every message that is not too stale; the other gates build on it.

    Attributes
    ----------
    version : int
        The newest version.
    members : set of int
        The workers that the server counts.
    holds : bool
        Whether a worker may have to wait after its message.
    takes_all : bool
        Whether every message makes a version.
    """

    holds = False

    def __init__(self, policy: Policy, members: Iterable[int]):
        self.version = 0
        self.takes_all = type(self) is Gate and policy.staleness_limit is None
        self.members = set(members)
        self._limit = policy.staleness_limit or math.inf
        self._waiting: list[Worker] = []

    def take(self, index: int, read_version: int) -> int:
        """Return the outcome of a message that was computed from a version; count a new version."""
        # A discarded message must not fill the version under way, so it is checked first.
        if self.version - read_version >= self._limit:
            return DISCARDED
        if not self._completes(index):
            return BUFFERED
        self.version += 1
        return APPLIED

    def outdated(self, read_version: int) -> bool:
        """Return whether a message computed from a version is too stale to be accepted."""
        return self.version - read_version >= self._limit

    def released(self, worker: Worker, outcome: int) -> Sequence[Worker]:
        """Return the workers that continue after a message: waiting ones first, then its sender."""
        return (worker,)

    def admit(self, index: int) -> None:
        """Count a worker that joins or comes back."""
        self.members.add(index)

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member; return the workers that continue, if that completes a version."""
        self.members.discard(index)
        return ()

    def must_wait(self, index: int) -> bool:
        """Return whether a worker that comes back has to wait, as if it had not been away."""
        return False

    def wait(self, worker: Worker) -> None:
        """Let a worker that came back wait."""
        self._waiting.append(worker)

    def forget(self, index: int) -> None:
        """Drop a worker that went away from the waiting ones."""
        self._waiting = [worker for worker in self._waiting if worker.index != index]

    def renew(self) -> Sequence[Worker]:
        """Make a version without a message, of the buffered ones or of a checkpoint; return the
        workers that waited for it.
        """
        # A restored version counts as a new one, so that versions never decrease.
        self.version += 1
        self._empty()
        return self._release()

    def _completes(self, index: int) -> bool:
        """Take a message in; return whether it completes a version."""
        return True

    def _empty(self) -> None:
        """Drop the buffered messages."""

    def _release(self) -> list[Worker]:
        waiting, self._waiting = self._waiting, []
        return waiting


class Batches(Gate):
    """Makes a version of every ``count`` messages, or of those until the grace window closes.

    Attributes
    ----------
    close_later : function
        ``close_later(seconds, close)`` calls ``close`` after a grace window; set by the world.
    """

    close_later: Callable[[float, Callable[[], Sequence[Worker]]], None]

    def __init__(self, policy: Policy, members: Iterable[int], count: int):
        super().__init__(policy, members)
        self._count, self._grace = count, policy.grace
        self._collected = 0
        self._opened = 0  # grace windows so far

    def _completes(self, index: int) -> bool:
        self._collected += 1
        if self._grace is not None and self._collected == self._count:
            self._opened += 1
            self.close_later(self._grace, functools.partial(self._close, self._opened))
        if not self._is_full():
            return False
        self._empty()
        return True

    def _is_full(self) -> bool:
        return self._grace is None and self._collected >= self._count

    def _close(self, window: int) -> Sequence[Worker]:
        """Complete a version with its window; return the workers that waited for it."""
        # A message of the last worker, or a restored version, may have closed the window before.
        if window != self._opened or self._collected < self._count:
            return ()
        return self.renew()

    def _empty(self) -> None:
        self._collected = 0


class Barrier(Batches):
    """Makes a version of the first ``count`` messages, or of all members'; senders wait for the
    version.
    """

    holds = True

    def __init__(self, policy: Policy, members: Iterable[int], count: int):
        super().__init__(policy, members, count)
        self._delivered = set[int]()

    def released(self, worker: Worker, outcome: int) -> Sequence[Worker]:
        """Return all waiting workers once the version is made; the sender of a discarded message at
        once.
        """
        if outcome == DISCARDED:
            return (worker,)
        self._waiting.append(worker)
        return self._release() if outcome == APPLIED else ()

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member, which may complete the version."""
        self.members.discard(index)
        # Without a collected message there is nothing to apply.
        return self.renew() if self._collected and self._is_full() else ()

    def must_wait(self, index: int) -> bool:
        """Return whether the version holds a message of this worker already."""
        return index in self._delivered

    def _completes(self, index: int) -> bool:
        self._delivered.add(index)
        return super()._completes(index)

    def _is_full(self) -> bool:
        if super()._is_full():
            return True
        # The sizes first: comparing the sets at every message takes longer.
        return len(self._delivered) >= len(self.members) and self._delivered >= self.members

    def _empty(self) -> None:
        super()._empty()
        self._delivered.clear()


class Trials(Gate):
    """Makes a version of the messages of a round, once every member has made its trials; see
    `asyncsim.trials`.

    Attributes
    ----------
    remaining : dict
        The trials that members have left in the round; members without any are left out.
    """

    holds = True

    def __init__(self, policy: Policy, members: Iterable[int], counts: Sequence[int]):
        super().__init__(policy, members)
        self._counts = counts
        self._empty()

    def released(self, worker: Worker, outcome: int) -> Sequence[Worker]:
        """Return all waiting workers once the round is over; else the sender, if it has a trial
        left.
        """
        if worker.index not in self.members or (
            outcome == BUFFERED and worker.index in self.remaining
        ):
            return (worker,)
        self._waiting.append(worker)
        return self._release() if outcome == APPLIED else ()

    def count_trial(self, index: int) -> bool:
        """Count a trial that has ended; return whether its worker has another one in the round."""
        trials = self.remaining.pop(index, 0) - 1
        if trials > 0:
            self.remaining[index] = trials
        return trials > 0

    def cut(self, worker: Worker) -> Sequence[Worker]:
        """Let a worker wait whose last trial was cut; return the workers that continue."""
        self._waiting.append(worker)
        return self._end_round()

    def admit(self, index: int) -> None:
        """Count a worker; the round under way waits for its trials."""
        self.members.add(index)
        self.remaining[index] = self._counts[index]

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member and its trials, which may end the round."""
        self.members.discard(index)
        return () if self.remaining.pop(index, None) is None else self._end_round()

    def must_wait(self, index: int) -> bool:
        """Return whether the worker has made all trials of the round."""
        return index not in self.remaining

    def _end_round(self) -> Sequence[Worker]:
        """Begin the next round if all trials have ended, after a version if there is a message."""
        if self.remaining:
            return ()
        self.version += self._collected > 0
        self._empty()
        return self._release()

    def _completes(self, index: int) -> bool:
        self._collected += 1
        if self.count_trial(index) or self.remaining:
            return False
        self._empty()
        return True

    def _empty(self) -> None:
        self._collected = 0
        self.remaining = {index: self._counts[index] for index in self.members}


class Turns(Gate):
    """Collects a message of every member, then makes a version of the next of each; see
    `asyncsim.rounds`.
    """

    def __init__(self, policy: Policy, members: Iterable[int]):
        super().__init__(policy, members)
        self._missing, self._due, self._ahead = set(self.members), set[int](), set[int]()

    def admit(self, index: int) -> None:
        """Count a worker; the round under way waits for it if it still collects."""
        if self._missing or not self.members:
            self._missing.add(index)
        self.members.add(index)

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member from the round."""
        collects = bool(self._missing)
        for workers in (self.members, self._missing, self._due):
            workers.discard(index)
        if collects and not self._missing:
            self._due = set(self.members)  # only its message was missing
        self._begin_phase()
        return ()

    def _completes(self, index: int) -> bool:
        if self._missing:
            self._missing.discard(index)
            if self._missing:
                return False
            # The last of the collected messages makes a version; so does the next of each other.
            self._due = self.members - {index}
        elif index in self._due:
            self._due.discard(index)
        else:  # a second message in this phase belongs to the next collection
            self._ahead.add(index)
            return False
        self._begin_phase()
        return True

    def _begin_phase(self) -> None:
        """Begin the next round where this one is over."""
        if not self._missing and not self._due:
            self._missing, self._ahead = self.members - self._ahead, set()
            if not self._missing:  # all members are ahead: the next message of each makes a version
                self._due = set(self.members)

    def _empty(self) -> None:
        self._missing, self._due, self._ahead = set(self.members), set(), set()


class Buckets(Gate):
    """Makes a version when every bucket of the members holds a message; see `asyncsim.buckets`."""

    def __init__(self, policy: Policy, members: Iterable[int], count: int):
        super().__init__(policy, members)
        self._count = count
        self._filled = set[int]()
        self._required = {index % count for index in self.members}

    def admit(self, index: int) -> None:
        """Count a worker; its bucket must be filled."""
        self.members.add(index)
        self._required.add(index % self._count)

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member; a bucket without members may stay empty."""
        self.members.discard(index)
        # If all buckets are filled now, the next message completes the version.
        self._required = {member % self._count for member in self.members}
        return ()

    def _completes(self, index: int) -> bool:
        self._filled.add(index % self._count)
        if not self._filled >= self._required:
            return False
        self._empty()
        return True

    def _empty(self) -> None:
        self._filled.clear()


class Clocks(Gate):
    """Makes a version of every message; no worker may be more than ``bound`` commits ahead of the
    slowest.
    """

    holds = True

    def __init__(self, policy: Policy, members: Iterable[int], workers: int, bound: int):
        super().__init__(policy, members)
        self._bound = bound
        self._clocks = [0] * workers
        self._workers_at = Counter({0: len(self.members)})
        self._slowest = 0

    def released(self, worker: Worker, outcome: int) -> Sequence[Worker]:
        """Advance the sender's clock; return the workers that are within the bound again."""
        index = worker.index
        if index not in self.members:  # counted as dead: its message moves no clock
            return (worker,)
        clock = self._clocks[index]
        self._clocks[index] = clock + 1
        self._workers_at[clock] -= 1
        self._workers_at[clock + 1] += 1
        moved = clock == self._slowest and not self._workers_at[clock]
        if moved:
            del self._workers_at[clock]
            self._slowest += 1
        # All waiting workers have the same clock, one more than the bound allowed.
        released = self._release() if moved else []
        if clock + 1 - self._slowest > self._bound:
            self._waiting.append(worker)
        else:
            released.append(worker)
        return released

    def admit(self, index: int) -> None:
        """Count a worker, with the clock of the slowest."""
        self._catch_up()
        self._clocks[index] = self._slowest
        self._workers_at[self._slowest] += 1
        self.members.add(index)

    def dismiss(self, index: int) -> Sequence[Worker]:
        """Remove a member; release all waiting workers if no other was as slow."""
        self.members.discard(index)
        self._workers_at[self._clocks[index]] -= 1
        return self._release() if self._catch_up() else ()

    def must_wait(self, index: int) -> bool:
        """Return whether the worker is too far ahead."""
        return self._clocks[index] - self._slowest > self._bound

    def renew(self) -> Sequence[Worker]:
        """Count a restored version; clocks keep counting, and waiting workers wait on."""
        self.version += 1
        return ()

    def _catch_up(self) -> bool:
        """Return whether the slowest member is at a higher clock than before."""
        before = self._slowest
        # Dismissed workers leave clocks with a count of zero.
        clocks = [clock for clock, count in self._workers_at.items() if count > 0]
        self._slowest = max(before, min(clocks, default=before))
        return self._slowest > before


def gate_of(policy: Policy, workers: int, members: Iterable[int]) -> Gate:
    """Return the gate of a policy."""
    count = policy.per_version(workers)
    if policy.name == "trials":
        return Trials(policy, members, policy.trials_of(workers))
    if policy.name == "rounds":
        return Turns(policy, members)
    if policy.name == "buckets":
        return Buckets(policy, members, count)
    if policy.bound is not None:
        return Clocks(policy, members, workers, policy.bound)
    if policy.waits_for_version:
        return Barrier(policy, members, count)
    if count == 1 and policy.grace is None:
        return Gate(policy, members)
    return Batches(policy, members, count)
