"""Gradients of commits that are dispatched a few at a time: in groups, each begun as planned.

Which gradients are computed together, by which thread and in which order is planned beforehand from the trace, as if
each local step took the same time and nothing else took any. Nothing depends on how long it really takes but the speed.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, State
from asyncsim.replays.local import Constants, Flat, Learner, LocalResult, MakeParts
from asyncsim.replays.side_by_side import Start
from asyncsim.replays.state import Pieces


class Group(NamedTuple):
    """Consecutive commits whose gradients one call computes.

    Attributes
    ----------
    begin, end : int
        From the first to before the last, counted from the first commit of the chunk.
    thread : int
        Which starts the call.
    after : int
        Commits of this chunk that must be dispatched before. 0: all of the chunk before; -k: all of that but its last
        k.
    """

    begin: int
    end: int
    thread: int
    after: int


class Schedule(NamedTuple):
    """When everything is done by the plan of a chunk, in local steps.

    Attributes
    ----------
    free : list of float
        When each thread is.
    computing : list of int
        The commits of its last group.
    made : list of float
        When each of the chunk's commits is.
    """

    free: list[float]
    computing: list[int]
    made: list[float]

    @classmethod
    def start(cls, threads: int) -> "Schedule":
        """Return the clock before the first chunk."""
        return cls([0.0] * threads, [0] * threads, [])


def plan_groups(
    needed: Sequence[float], steps: Sequence[int], room: int, ahead: int, before: Schedule
) -> tuple[list[Group], Schedule]:
    """Plan the groups of a chunk, in the order in which they are begun.

    The thread that is free first takes the first commits whose gradients can be begun by then; those that cannot yet
    are passed over. It takes consecutive ones, up to ``room`` and to its share of all that can be begun or are being
    computed: no commit of a group is made before the group's last gradient, so that longer ones would keep other
    threads waiting.

    Parameters
    ----------
    needed : sequence of float
        How many commits of the chunk must be made before a gradient can be begun; zero or less if it hangs on one of
        the chunk before, less than any number if on none.
    steps : sequence of int
        Local steps of each commit.
    room : int
        Commits that a group may have.
    ahead : int
        How far ahead of the commits a gradient may be begun, as what it makes has to be kept until then.
    before : Schedule
        Where the plan of the chunk before has ended.
    """
    free, computing, made, count = [*before.free], [*before.computing], list[float](), len(needed)
    finished = [math.inf] * count
    groups = []

    def ready(i: int) -> float:
        own, earlier = needed[i], len(before.made) + needed[i]
        if own > 0:
            return made[int(own) - 1] if own <= len(made) else math.inf
        return before.made[int(earlier) - 1] if earlier > 0 else 0.0

    while len(made) < count:
        thread = min(range(len(free)), key=free.__getitem__)
        reach = range(len(made), min(count, len(made) + ahead))
        waiting = {i: ready(i) for i in reach if finished[i] == math.inf}
        now = max(free[thread], min(waiting.values()))
        can_begin = [i for i, then in waiting.items() if then <= now]
        computed = sum(length for length, until in zip(computing, free, strict=True) if until > now)
        longest = max(1, min(room, (len(can_begin) + computed) // len(free)))
        begin = can_begin[0]
        end = begin + sum(1 for place, i in enumerate(can_begin[:longest]) if i == begin + place)
        groups.append(Group(begin, end, thread, after=int(max(end - ahead, *needed[begin:end]))))
        free[thread], computing[thread] = now + sum(steps[begin:end]), end - begin
        finished[begin:end] = [free[thread]] * (end - begin)
        while len(made) < count and finished[len(made)] < math.inf:
            last = made or before.made
            made.append(max(finished[len(made)], last[-1] if last else 0.0))
    return groups, Schedule(free, computing, made)


class Made(NamedTuple):
    """What the program of a group's gradients returns: leaves with a leading axis of ``room``, unless that is one.

    Attributes
    ----------
    start : Array
        Where their local steps started; ``()`` if that is what the worker read.
    result : LocalResult
    """

    start: Any
    result: LocalResult


class Begun(NamedTuple):
    """A group whose gradients are begun; ``made`` waits until they are dispatched, and returns what that makes."""

    group: Group
    made: Callable[[], Made]


class Chunk:
    """Some planned pieces of one commit each: what is known of the commits, and the groups begun and not committed.

    Attributes
    ----------
    pieces : Pieces
    commits : int
    slots, workers : list of int
        Of each commit.
    reads, push_reads : list of list of int
        The slots of reads after each commit.
    shared : tuple
        What all gradients need: the training data, the key, and visits, jobs and rows, on the device.
    planned : deque of Group
        Those that are not begun.
    begun : dict
        Groups by their first commits.
    spare : list
        Memory for what groups make (see `build_gradients`), which no commit needs any longer.
    """

    def __init__(
        self,
        pieces: Pieces,
        start: Start,
        shared: tuple[Any, ...],
        threads: int,
        room: int,
        before: "Chunk | None",
    ):
        self.pieces, self.shared, self._start = pieces, shared, start
        self.commits = int(pieces.size.sum())
        commits = slice(self.commits)  # the others are padding
        self.slots, self.workers = pieces.slot[commits, 0].tolist(), pieces.visit.worker[commits, 0].tolist()
        # A piece of one commit has no reads but those after it.
        self.reads, self.push_reads = (
            [row[:size].tolist() for row, size in zip(kind.slot[commits], kind.size[commits].tolist(), strict=True)]
            for kind in (pieces.reads, pieces.push_reads)
        )
        # After how many commits of the chunk a worker or a slot has changed last; zero or less if before the chunk.
        self._changed: dict[tuple[str, int], int] = {}
        self._clock: Schedule = before._clock if before else Schedule.start(threads)
        if before:
            self._changed = {what: after - before.commits for what, after in before._changed.items()}
        needed = [self._needed(i) for i in range(self.commits)]
        steps = pieces.visit.local_steps[: self.commits, 0].tolist()
        # As much as each thread computes, and one group more, so that none idles.
        groups, self._clock = plan_groups(needed, steps, room, (threads + 1) * room, self._clock)
        self.planned, self.begun = deque(groups), dict[int, Begun]()
        self.spare: list[Any] = before.spare if before else []

    def _needed(self, i: int) -> float:
        """Return how many commits of the chunk must be dispatched before a gradient; note what its own changes."""
        # Atomic reads wait in their workers' slots; separate ones are all among the pieces' reads.
        worker, slot = ("worker", self.workers[i]), ("slot", self.slots[i])
        needed = max(self._changed.get(worker, -math.inf), self._changed.get(slot, -math.inf))
        self._changed[worker] = i + 1
        self._changed |= {("slot", read): i + 1 for read in self.reads[i]}
        return needed

    def next_group(self, done: int) -> Group | None:
        """Return the group that is to be begun next, if it can be when so many commits are dispatched."""
        return self.planned[0] if self.planned and self.planned[0].after <= done else None

    def dispatch(self, given: Sequence[Any], into: Any) -> None:
        """Dispatch the gradients of the next group, from what is given of each and fills the room, into memory."""
        group = self.planned.popleft()
        length = np.int32(group.end - group.begin)
        made = self._start(group.thread, *self.shared, given, into, np.int32(group.begin), length)
        self.begun[group.begin] = Begun(group, made)


def build_gradients(parts: MakeParts, flat: Flat, room: int) -> Callable[..., Made]:
    """Return the function that computes the gradients of ``count`` commits from ``begin`` on, one after the other.

    ``parts`` works on the problem's own tree. ``into`` is memory for starts, updates and learners of as many as there
    is room for, filled with anything, unless that is one.
    """

    def start_of(resume: Any, read: Array, worker: State, learner: Learner) -> tuple[Any, Any, Learner]:
        if resume is None:
            return (), flat.unravel(read), learner
        start = resume(worker, read)
        return start, flat.unravel(start), learner

    def gradients(
        data: Any, constants: Constants, planned: Any, given: Sequence[Any], into: Any, begin: Array, count: Array
    ) -> Made:
        method, local, _ = parts(constants.numbers)

        def one(place: Any) -> Made:
            # A switch, as to make one array of them and read its rows would copy both times. It returns the tree, whose
            # leaves are copied out of the vector in any case: what was read would be another copy, 2 % of the rate.
            start, params, learner = jax.lax.switch(
                place, [functools.partial(start_of, method.resume, *own) for own in given]
            )
            visit, job, rows = jax.tree.map(lambda leaf: leaf[begin + place, 0], planned)
            return Made(start, local(data, constants.key, params, learner, visit, job, rows))

        if room == 1:  # without a loop, at whose end what is made would be copied
            start, result = one(0)
            return Made(start, result._replace(update=flat.ravel(result.update)))

        def next_one(place: Array, made: Made) -> Made:
            start, (update, *other) = one(place)
            starts, (updates, *others) = made
            starts, others = jax.tree.map(
                lambda leaf, own: jax.lax.dynamic_update_index_in_dim(leaf, own, place, 0),
                (starts, others),
                (start, other),
            )
            return Made(starts, LocalResult(flat.set_row(updates, update, place), *others))

        starts, updates, learners = into
        losses = jnp.zeros(room, jax.eval_shape(one, 0).result.loss.dtype)
        return jax.lax.fori_loop(0, count, next_one, Made(starts, LocalResult(updates, losses, learners)))

    return gradients
