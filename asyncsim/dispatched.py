"""Commits dispatched one by one: for long vectors on a CPU.

There it takes long to move rows of the ``[workers, parameters]`` arrays of `asyncsim.kernel`. Here every vector is an
array of its own, and what is only passed on is not copied: a worker reads the central variable itself. Gradients are
dispatched in groups, ahead of their turn to be committed, once all that they start from is: groups are computed side
by side, the gradients of each one after the other.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.commits import build_commit
from asyncsim.diagnosis import Applying, Formed, build_diagnose
from asyncsim.flat import Flat
from asyncsim.local import LocalResult
from asyncsim.methods.method import Array, Method, State
from asyncsim.passing import Passing
from asyncsim.replay_state import First, Layout, Pieces, Records, ReplayState, WorkerRow, initial_state
from asyncsim.rows import set_row, tree_row
from asyncsim.side_by_side import SideBySide, Start


class Apart(NamedTuple):
    """`ReplayState` with an array of its own for each row: a list for each axis of slots or workers."""

    central: Array
    server: State
    read: list[Array]
    form: list[Array]
    workers: list[WorkerRow]
    upcoming: "_Chunk | None" = None  #: what follows, with gradients that are begun


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


class Group(NamedTuple):
    """Consecutive commits, from ``begin`` to before ``end``, whose gradients one program computes.

    ``made`` waits until that is dispatched, and returns what it makes.
    """

    begin: int
    end: int
    made: Callable[[], Made]


class Dispatched:
    """The functions of `asyncsim.programs.Program` for a state whose rows are apart. Pieces have one commit each.

    At most ``at_once`` groups, of up to ``room`` gradients, are computed at a time.
    """

    def __init__(
        self,
        method: Method,
        local: Callable[..., LocalResult],
        flat: Flat,
        layout: Layout,
        device: Any,
        at_once: int,
        room: int,
    ):
        self._method, self._layout, self._flat, self._device = method, layout, flat, device
        self._at_once, self._room = at_once, room
        self._diagnose = build_diagnose(method, flat, layout)
        self._gradients = SideBySide(_build_gradients(method, local, room), at_once)
        # An update that is alone in its group belongs to nobody else.
        used_up = (_UPDATES,) if room == 1 else ()
        self._commit = Passing(_build_commit_and_reply(method, layout, room), _REPLACED, used_up)

    def advance(
        self, state: Apart, data: Any, key: Array, pieces: Pieces, count: np.int32, following: Pieces | None
    ) -> tuple[Apart, Records, First]:
        """Run planned pieces, ``count`` and no padding, as the function of `asyncsim.kernel.build_advance` does.

        Of the pieces that are ``following``, if they are known, gradients are begun. The state given is used up.
        """
        now = state._replace(read=list(state.read), form=list(state.form), workers=list(state.workers))
        chunk = state.upcoming
        if chunk is None or chunk.pieces is not pieces:
            chunk = self._chunk(now, data, key, pieces, None)
        upcoming = None if following is None else self._chunk(now, data, key, following, chunk)
        assert chunk.commits == count
        numbers: list[Array] = []
        first: Any = None
        self._begin_groups(now, chunk, upcoming, 0)
        while len(numbers) < count:
            group = chunk.groups.popleft()
            made = group.made()
            if not numbers:
                start = now.read[chunk.slots[0]] if self._method.resume is None else self._first(made.start)
                first = First(start, self._first(made.result.update))
            for i in range(group.begin, group.end):
                now, recorded = self._finish(now, chunk, i, made, i - group.begin)
                numbers.append(recorded)
            self._begin_groups(now, chunk, upcoming, len(numbers))
        return now._replace(upcoming=upcoming), _records(numbers), first

    def before(self, state: Apart, pieces: Pieces) -> Formed:
        """Return what the first commit will meet, as the function of `asyncsim.diagnosis.build_before` does.

        Copied where a commit reuses the memory.
        """

        def copied(tree: Any) -> Any:
            return jax.tree.map(jnp.array, tree)

        row = state.workers[pieces.visit.worker[0, 0]]
        read_before = self._layout.separate_forms and pieces.form_offset[0, 0] < 0
        central = state.form[pieces.form_slot[0, 0]] if read_before else state.central
        applied: Any = ()
        if self._layout.diagnose_energy:
            read = state.read[pieces.slot[0, 0]]
            server, memory, proxy = copied((state.server, row.memory, row.proxy))
            applied = Applying(server, state.central, memory, read, proxy, ())
        return Formed(copied(row.method), central, applied)

    def diagnose(self, formed: Formed, first: First, pieces: Pieces, losses: "_Column") -> dict[str, list[Array]]:
        """Return the diagnostics of the first commit, as the function of `asyncsim.diagnosis.build_diagnose` does."""
        return self._diagnose(formed, first, pieces, losses.first)

    def initial_state(self, params: Any, problem_state: Any, slots: int, form_slots: int, workers: int) -> Apart:
        """Return the state at version zero."""
        one = initial_state(self._method, self._flat, params, problem_state, 1, 1, 1)
        one = jax.device_put(one, self._device)
        row = jax.tree.map(lambda leaf: leaf[0], one.workers)
        # Each worker's own, as a commit reuses the memory of what it replaces.
        rows = [jax.tree.map(jnp.array, row) for _ in range(workers)]
        return Apart(one.central, one.server, [one.central] * slots, [one.central] * form_slots, rows)

    def whole(self, state: Apart) -> ReplayState:
        """Return the state with all rows in one array, copied."""
        empty = jnp.zeros((0, *state.central.shape), state.central.dtype)
        read, form = (jnp.stack(rows) if rows else empty for rows in (state.read, state.form))
        workers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *state.workers)
        return ReplayState(state.central, jax.tree.map(jnp.array, state.server), read, form, workers)

    def problem_states(self, state: Apart) -> Any:
        """Return the problem's non-trained state of all workers, in one array a leaf."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(row.learner.problem for row in state.workers))

    def apart(self, state: ReplayState) -> Apart:
        """Return a state whose rows are in one array with its rows apart, copied."""
        state = jax.tree.map(lambda leaf: jnp.array(leaf, device=self._device), state)
        workers = range(len(jax.tree.leaves(state.workers)[0]))
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i], state.workers) for i in workers]
        return Apart(state.central, state.server, list(state.read), list(state.form), rows)

    def _chunk(self, now: Apart, data: Any, key: Array, pieces: Pieces, before: "_Chunk | None") -> "_Chunk":
        shared = data, *jax.device_put((key, (pieces.visit, pieces.job, pieces.rows)), self._device)
        given = [self._given(now, 0, 0)] * self._room
        return _Chunk(pieces, self._gradients.start_for(*shared, given, np.int32(0), np.int32(0)), shared, before)

    def _given(self, now: Apart, worker: int, slot: int) -> tuple[Any, ...]:
        """Return the worker's part of what a gradient is computed from."""
        row = now.workers[worker]
        return now.read[slot], () if self._method.resume is None else row.method, row.learner

    def _begin_groups(self, now: Apart, chunk: "_Chunk", upcoming: "_Chunk | None", done: int) -> None:
        """Dispatch the gradients that can be begun when so many of the chunk's commits are dispatched."""
        # A worker has one gradient at a time: where workers are few, shorter groups leave each thread one.
        longest = max(1, min(self._room, len(now.workers) // self._at_once))
        while True:
            source = chunk if chunk.begun < chunk.commits or upcoming is None else upcoming
            length = source.ready(done if source is chunk else done - chunk.commits, longest)
            waiting = len(chunk.groups) + (len(upcoming.groups) if upcoming else 0)
            # One group more than are computed, so that no thread idles; but a full one, as a short one may still grow.
            if length < (1 if waiting < self._at_once else longest) or waiting > self._at_once:
                return
            commits = range(source.begun, source.begun + length)
            given = [self._given(now, source.workers[i], source.slots[i]) for i in commits]
            source.dispatch(given + given[-1:] * (self._room - length), length)

    def _first(self, array: Array) -> Array:
        """Return a copy of what was made for the first commit of a group, as the commit may reuse its memory."""
        return jnp.array(array) if self._room == 1 else array[0]

    def _finish(self, now: Apart, chunk: "_Chunk", i: int, made: Made, place: int) -> tuple[Apart, Array]:
        """Dispatch a commit and make the reads that follow it; return the state after it and what is recorded."""
        pieces, worker, slot = chunk.pieces, chunk.workers[i], chunk.slots[i]
        *_, (visits, _, _) = chunk.shared
        form: Any = ()
        if self._layout.separate_forms:
            before = pieces.form_offset[i, 0] < 0
            form = now.form[pieces.form_slot[i, 0]] if before else now.central
        central, server, row, learner, reply, recorded = self._commit(
            now.central,
            now.server,
            now.workers[worker]._replace(learner=()),
            now.read[slot],
            made.start,
            made.result.update,
            form,
            made.result.loss,
            made.result.learner,
            visits,
            np.int32(i),
            np.int32(place),
        )
        now.workers[worker] = row._replace(learner=learner)
        if self._layout.reads != "separate":
            now.read[slot] = reply
        for other in chunk.reads[i]:
            now.read[other] = central
        for other in chunk.form_reads[i]:
            now.form[other] = central
        return now._replace(central=central, server=server), recorded


class _Chunk:
    """Some planned pieces of one commit each: what is known of the commits, and the groups begun and not committed.

    Attributes
    ----------
    pieces : Pieces
    commits : int
    slots, workers : list of int
        Of each commit.
    reads, form_reads : list of list of int
        The slots of reads after each commit.
    shared : tuple
        What all gradients need: the training data, the key, and visits, jobs and rows, on the device.
    begun : int
        Commits whose gradients are begun.
    groups : deque of Group
    """

    def __init__(self, pieces: Pieces, start: Start, shared: tuple[Any, ...], before: "_Chunk | None"):
        self.pieces, self.shared, self._start = pieces, shared, start
        self.commits = int(pieces.size.sum())
        self.slots, self.workers = pieces.slot[:, 0].tolist(), pieces.visit.worker[:, 0].tolist()
        # A piece of one commit has no reads but those after it.
        self.reads, self.form_reads = (
            [row[:size] for row, size in zip(kind.slot.tolist(), kind.size.tolist(), strict=True)]
            for kind in (pieces.reads, pieces.form_reads)
        )
        self.begun, self.groups = 0, deque[Group]()
        # After how many commits of the chunk a worker or a slot has changed last; zero or less if before the chunk.
        self._changed: dict[tuple[str, int], int] = {}
        self._turn = 0
        if before:
            self._changed = {what: after - before.commits for what, after in before._changed.items()}
            self._turn = before._turn
        self._ready_after = [self._needed(i) for i in range(self.commits)]

    def _needed(self, i: int) -> float:
        """Return how many commits of the chunk must be dispatched before a gradient; note what its own changes."""
        # Atomic reads wait in their workers' slots; separate ones are all among the pieces' reads.
        worker, slot = ("worker", self.workers[i]), ("slot", self.slots[i])
        needed = max(self._changed.get(worker, -math.inf), self._changed.get(slot, -math.inf))
        self._changed[worker] = i + 1
        self._changed |= {("slot", read): i + 1 for read in self.reads[i]}
        return needed

    def ready(self, done: int, longest: int) -> int:
        """Return the length of the next group that can be begun when so many commits are dispatched."""
        following = self._ready_after[self.begun : self.begun + longest]
        return sum(1 for _ in itertools.takewhile(lambda after: after <= done, following))

    def dispatch(self, given: Sequence[Any], length: int) -> None:
        """Dispatch the gradients of the next group, from what is given of each and fills the room."""
        begin = self.begun
        self.begun += length
        self._turn += 1
        made = self._start(self._turn, *self.shared, given, np.int32(begin), np.int32(length))
        self.groups.append(Group(begin, self.begun, made))


def _build_gradients(method: Method, local: Callable[..., LocalResult], room: int) -> Callable[..., Made]:
    """Return the function that computes the gradients of ``count`` commits from ``begin`` on, one after the other."""

    def gradients(data: Any, key: Array, planned: Any, given: Sequence[Any], begin: Array, count: Array) -> Made:
        def one(place: Any) -> Made:
            # A switch, as to make one array of them and read its rows would copy both times.
            read, worker, learner = jax.lax.switch(place, [lambda own=own: own for own in given])
            visit, job, rows = jax.tree.map(lambda leaf: leaf[begin + place, 0], planned)
            start = read if method.resume is None else method.resume(worker, read)
            return Made(() if method.resume is None else start, local(data, key, start, learner, visit, job, rows))

        if room == 1:  # without a loop, at whose end what is made would be copied
            return one(0)

        def next_one(place: Array, made: Made) -> Made:
            return jax.tree.map(lambda all_, new: set_row(all_, new, place), made, one(place))

        shapes = jax.eval_shape(one, 0)
        nothing = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape), leaf.dtype), shapes)
        return jax.lax.fori_loop(0, count, next_one, nothing)

    return gradients


#: For `Passing`: in the function below the server's state and the worker's row take the place of those before. The
#: central variable and what was read or pulled of it have other owners.
_REPLACED, _UPDATES = {1: 1, 2: 2}, 5


def _build_commit_and_reply(method: Method, layout: Layout, room: int) -> Callable[..., Any]:
    """Return the function that makes a commit, of the gradient in that ``place`` of its group, and its worker's read.

    The order of its arguments is that above.
    """
    commit, reply = build_commit(method, layout)

    def commit_and_reply(central, server, row, read, starts, updates, form, losses, learners, visits, i, place):
        visit = jax.tree.map(lambda leaf: leaf[i, 0], visits)
        made = starts, updates, losses, learners
        start, update, loss, learner = tree_row(made, place) if room > 1 else made
        if method.resume is None:
            start = read
        if method.sees_loss:
            visit = visit._replace(loss=loss.astype(visit.time.dtype))
        formed = form if layout.separate_forms else central
        after, server_after, left = commit(central, server, row, read, start, update, formed, visit)
        if layout.reads == "after":
            seen: Any = reply(server_after, after, left.memory, visit)
        else:
            seen = reply(server, central, row.memory, visit) if layout.reads == "before" else ()
        squares = left.squares
        numbers = loss.astype(central.dtype), jnp.sqrt(squares.update), squares.moved / 2, squares.proxy / 2
        worker = WorkerRow(left.method, left.memory, left.proxy, learner=())
        return after, server_after, worker, learner, seen, jnp.stack(numbers)

    return commit_and_reply


class _Column:
    """A number of each commit, ``[commits, 1]``, that is waited for when it is asked for."""

    def __init__(self, numbers: Sequence[Array], place: int):
        self._numbers, self._place = numbers, place

    @property
    def first(self) -> Array:
        """That of the first commit, ``[1, 1]``."""
        return self._numbers[0][self._place].reshape(1, 1)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        column = np.array([np.asarray(number)[self._place] for number in self._numbers], dtype)
        return column.reshape(-1, 1)


def _records(numbers: Sequence[Array]) -> Records:
    columns: Any = [_Column(numbers, place) for place in range(len(Records._fields))]
    return Records(*columns)
