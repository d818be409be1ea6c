"""Gradients of commits that are dispatched a few at a time: in groups, each begun as planned."""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Method, State
from asyncsim.replays.local import Flat, Learner, LocalResult
from asyncsim.replays.schedule import Clock, Group, plan_groups
from asyncsim.replays.side_by_side import Start
from asyncsim.replays.state import Pieces


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
        self._clock: Clock = before._clock if before else Clock.start(threads)
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


def build_gradients(method: Method, local: Callable[..., LocalResult], flat: Flat, room: int) -> Callable[..., Made]:
    """Return the function that computes the gradients of ``count`` commits from ``begin`` on, one after the other.

    ``local`` is that of `asyncsim.replays.local.build_local`. ``into`` is memory for starts, updates and learners of so
    many as there is room for, filled with anything, unless that is one.
    """

    def start_of(read: Array, worker: State, learner: Learner) -> tuple[Any, Any, Learner]:
        if method.resume is None:
            return (), flat.unravel(read), learner
        start = method.resume(worker, read)
        return start, flat.unravel(start), learner

    def gradients(
        data: Any, key: Array, planned: Any, given: Sequence[Any], into: Any, begin: Array, count: Array
    ) -> Made:
        def one(place: Any) -> Made:
            # A switch, as to make one array of them and read its rows would copy both times. It returns the tree, whose
            # leaves are copied out of the vector in any case: what was read would be another copy, 2 % of the rate.
            start, params, learner = jax.lax.switch(place, [functools.partial(start_of, *own) for own in given])
            visit, job, rows = jax.tree.map(lambda leaf: leaf[begin + place, 0], planned)
            return Made(start, local(data, key, params, learner, visit, job, rows))

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
