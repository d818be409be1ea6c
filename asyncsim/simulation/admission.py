"""The decisions of a timing policy, message by message: what becomes of each, and who goes on after it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from asyncsim.clusters.policy import Policy
from asyncsim.traces.trace import APPLIED, BUFFERED, DISCARDED

Member = TypeVar("Member")


class Admission(Generic[Member]):
    """The state of the server's policy.

    Attributes
    ----------
    version : int
        The newest there is.
    """

    def __init__(self, policy: Policy, workers: int):
        self.version = 0
        self._limit = policy.staleness_limit
        self._completes = rounds_of(workers) if policy.name == "rounds" else batches_of(policy.per_version(workers))
        self._waits_for_version = policy.waits_for_version
        self._bound = policy.bound
        self._clocks = [0] * workers
        self._workers_at = Counter({0: workers})
        self._slowest = 0
        self._waiting: list[Member] = []

    def take(self, index: int, read_version: int) -> int:
        """Return what becomes of a worker's message, computed from that version; make a version if it is the time."""
        if self.outdated(read_version):
            return DISCARDED
        if not self._completes(index):
            return BUFFERED
        self.version += 1
        return APPLIED

    def outdated(self, read_version: int) -> bool:
        """Return whether what is computed from that version is not taken up any more."""
        return self._limit is not None and self.version - read_version >= self._limit

    def who_goes_on(self, worker: Member, index: int, outcome: int) -> Sequence[Member]:
        """Return those who go on after a worker's message: itself, or not, and those who waited for it, first."""
        if self._bound is not None:
            return self._within_bound(worker, index, self._bound)
        if not self._waits_for_version or outcome == DISCARDED:
            return (worker,)
        self._waiting.append(worker)
        return self._all_waiting() if outcome == APPLIED else ()

    def _within_bound(self, worker: Member, index: int, bound: int) -> Sequence[Member]:
        clock = self._clocks[index]
        self._clocks[index] = clock + 1
        self._workers_at[clock] -= 1
        self._workers_at[clock + 1] += 1
        moved = clock == self._slowest and not self._workers_at[clock]
        if moved:
            del self._workers_at[clock]
            self._slowest += 1
        # All that wait have the same clock, one more than the bound allowed: whoever waits may go on now.
        released = self._all_waiting() if moved else []
        if clock + 1 - self._slowest > bound:
            self._waiting.append(worker)
        else:
            released.append(worker)
        return released

    def _all_waiting(self) -> list[Member]:
        waiting, self._waiting = self._waiting, []
        return waiting


def batches_of(count: int) -> Callable[[int], bool]:
    """Return the function that tells of each message taken up whether it is the last of its batch."""
    taken = 0

    def completes(index: int) -> bool:
        nonlocal taken
        taken = (taken + 1) % count
        return taken == 0

    return completes


def rounds_of(workers: int) -> Callable[[int], bool]:
    """Return the function that tells of each worker's message whether it makes a version; see `asyncsim.rounds`."""
    missing, due, ahead = set(range(workers)), set[int](), set[int]()

    def completes(index: int) -> bool:
        nonlocal missing, due, ahead
        if missing:
            missing.discard(index)
            if missing:
                return False
            due = set(range(workers)) - {index}
        elif index in due:
            due.discard(index)
        else:
            ahead.add(index)
            return False
        if not due:
            missing, ahead = set(range(workers)) - ahead, set()
        return True

    return completes
