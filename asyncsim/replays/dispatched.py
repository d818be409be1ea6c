"""Commits dispatched a few at a time: for long vectors on a CPU.

There it takes long to move rows of the ``[workers, parameters]`` arrays of `asyncsim.replays.pieces`. Here every vector
is an array of its own, and what is only passed on is not copied: a worker reads the central variable itself. Gradients
are dispatched in groups, ahead of their turn to be committed, once all that they start from is: groups are computed
side by side, the gradients of each one after the other. So are its commits, in one call.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Method, State
from asyncsim.replays.commit import build_commit, observe, row_after
from asyncsim.replays.groups import Chunk, Group, Made, build_gradients
from asyncsim.replays.local import Constants, Flat, MakeParts, Parts, start_anew
from asyncsim.replays.look import Met
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.side_by_side import Passing, SideBySide, keep, trim
from asyncsim.replays.state import Layout, Pieces, ReplayState, WorkerRow, initial_state
from asyncsim.replays.tuning import AHEAD, commits_between_trims

#: Where `asyncsim.replays.groups.build_gradients`' function gets memory for what it makes.
_INTO = 4
#: For `Passing`: results 1 and 2 of the call, the server's and the recorders' states and the workers' rows, may have
#: the memory of arguments 1 and 2. The central variable and what was read of it have other owners.
_REPLACED = {1: 1, 2: 2}


class Apart(NamedTuple):
    """`ReplayState` with an array of its own for each row: a list for each axis of slots or workers."""

    central: Array
    server: State
    recorders: tuple[State, ...]
    read: list[Array]
    push_read: list[Array]
    workers: list[WorkerRow]
    upcoming: Chunk | None = None  #: what follows, with gradients that are begun


class Dispatched:
    """Computes commits on a state whose rows are apart, in pieces of one: what `InPieces` does, and looking ahead.

    At most ``at_once`` groups, of up to ``room`` gradients, are computed at a time.
    """

    looks_ahead = True

    def __init__(
        self,
        parts: MakeParts,
        method: Method,
        recorders: tuple[Recorder, ...],
        flat: Flat,
        layout: Layout,
        device: Any,
        at_once: int,
        room: int,
        parameters: int,
    ):
        self._parts, self._method, self._recorders, self._layout = parts, method, recorders, layout
        self._flat, self._device, self._at_once, self._room = flat, device, at_once, room
        self._gradients = SideBySide(build_gradients(parts, flat, room), at_once, used_up=(_INTO,))
        self._trim_every, self._made = commits_between_trims(parameters), itertools.count(1)
        if not self._trim_every:  # of very long vectors, free memory is given back instead
            keep()
        # A message that is formed of what an earlier read saw may need what a commit of the same group makes.
        self._together = 1 if layout.separate_pushes else room
        self._commit = _build_call(parts, recorders, layout, room)
        self._anew: Callable[..., Any] | None = None
        if layout.restarts:
            self._anew = jax.jit(lambda numbers, *arguments: start_anew(_anew(parts(numbers)), *arguments))

    def advance(
        self, state: Apart, data: Any, constants: Constants, pieces: Pieces, count: np.int32, following: Pieces | None
    ) -> tuple[Apart, "Numbers"]:
        """Run planned pieces, ``count`` and no padding.

        Of the pieces that are ``following``, if they are known, gradients are begun. The state given is used up.
        """
        now, chunk = state, state.upcoming
        if chunk is None or chunk.pieces is not pieces:
            chunk = self._chunk(now, data, constants, pieces, None)
        upcoming = None if following is None else self._chunk(now, data, constants, following, chunk)
        assert chunk.commits == count
        recorded: list[Array] = []
        done = 0
        while done < count:
            self._begin_groups(now, chunk, upcoming, done)
            group, wait = chunk.begun.pop(done)
            made = wait()
            for commits in _calls(group, self._together):
                now, numbers = self._finish(now, chunk, commits, made, commits[0] - group.begin)
                recorded.append(numbers)
                if self._trim_every:
                    self._limit_memory(recorded)
            if self._room > 1:
                chunk.spare.append((made.start, made.result.update, made.result.learner))
            done = group.end
        self._begin_groups(now, chunk, upcoming, done)
        return now._replace(upcoming=upcoming), Numbers(recorded)

    def first(self, state: Apart, pieces: Pieces) -> Met:
        """Return what the first commit meets, copied where a commit reuses the memory."""
        row = state.workers[pieces.visit.worker[0, 0]]
        server, recorders, row = jax.tree.map(jnp.array, (state.server, state.recorders, row))
        pulled = self._pulled(state, pieces, 0) if self._layout.separate_pushes else state.central
        return Met(state.central, server, recorders, row, state.read[pieces.slot[0, 0]], pulled, ())

    def initial_state(
        self, numbers: Any, params: Any, problem_state: Any, slots: int, push_slots: int, workers: int
    ) -> Apart:
        """Return the state at version zero."""
        one = initial_state(self._parts(numbers).method, self._recorders, self._flat, params, problem_state, 1, 1, 1)
        one = jax.device_put(one, self._device)
        row = jax.tree.map(lambda leaf: leaf[0], one.workers)
        # Each worker's own, as a commit reuses the memory of what it replaces.
        rows = [jax.tree.map(jnp.array, row) for _ in range(workers)]
        reads = [one.central] * slots, [one.central] * push_slots
        return Apart(one.central, one.server, one.recorders, *reads, rows)

    def whole(self, state: Apart) -> ReplayState:
        """Return the state with all rows in one array, copied."""
        empty = jnp.zeros((0, *state.central.shape), state.central.dtype)
        read, push_read = (jnp.stack(rows) if rows else empty for rows in (state.read, state.push_read))
        workers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *state.workers)
        server, recorders = jax.tree.map(jnp.array, (state.server, state.recorders))
        return ReplayState(state.central, server, recorders, read, push_read, workers)

    def from_whole(self, state: ReplayState) -> Apart:
        """Return a state whose rows are in one array with its rows apart, copied."""
        state = jax.tree.map(lambda leaf: jnp.array(leaf, device=self._device), state)
        workers = range(len(jax.tree.leaves(state.workers)[0]))
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i], state.workers) for i in workers]
        return Apart(state.central, state.server, state.recorders, list(state.read), list(state.push_read), rows)

    def server_of(self, state: Apart) -> Any:
        """Return a copy of all that the server holds: what it restores after an outage."""
        return state.central, *jax.tree.map(jnp.array, (state.server, [row.memory for row in state.workers]))

    def with_server(self, state: Apart, held: Any, slots: np.ndarray, push_slots: np.ndarray) -> Apart:
        """Return the state with what the server held, which some slots read then."""
        central, (server, memories) = held[0], jax.tree.map(jnp.array, held[1:])
        for rows, own in ((state.read, slots), (state.push_read, push_slots)):
            for slot in own.tolist():
                rows[slot] = central
        workers = [row._replace(memory=memory) for row, memory in zip(state.workers, memories, strict=True)]
        return state._replace(central=central, server=server, workers=workers, upcoming=None)

    def problem_states(self, state: Apart) -> Any:
        """Return the problem's non-trained state of all workers, in one array a leaf."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(row.learner.problem for row in state.workers))

    def _chunk(self, now: Apart, data: Any, constants: Constants, pieces: Pieces, before: Chunk | None) -> Chunk:
        shared = data, *jax.device_put((constants, (pieces.visit, pieces.job, pieces.rows)), self._device)
        given = [self._given(now, 0, 0)] * self._room
        start = self._gradients.start_for(*shared, given, self._memory_like(now), np.int32(0), np.int32(0))
        return Chunk(pieces, start, shared, self._at_once, self._room, before)

    def _given(self, now: Apart, worker: int, slot: int) -> tuple[Any, ...]:
        """Return the worker's part of what a gradient is computed from."""
        row = now.workers[worker]
        return now.read[slot], () if self._method.resume is None else row.method, row.learner

    def _memory_like(self, now: Apart) -> Any:
        """Return the shapes of the memory for what a group makes, see `asyncsim.replays.groups.build_gradients`."""
        if self._room == 1:
            return ()
        one = () if self._method.resume is None else now.central, now.central, now.workers[0].learner
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self._room, *leaf.shape), leaf.dtype), one)

    def _memory(self, now: Apart, source: Chunk) -> Any:
        """Return memory for what a group makes: that of an earlier one, if there is some."""
        if source.spare:
            return source.spare.pop()
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, device=self._device), self._memory_like(now))

    def _begin_groups(self, now: Apart, chunk: Chunk, upcoming: Chunk | None, done: int) -> None:
        """Dispatch the gradients that can be begun when so many of the chunk's commits are dispatched."""
        for source, passed in ((chunk, done), (upcoming, done - chunk.commits)):
            while source and (group := source.next_group(passed)):
                if self._anew is not None:
                    for i in range(group.begin, group.end):
                        worker, read = source.workers[i], now.read[source.slots[i]]
                        numbers = source.shared[1].numbers
                        now.workers[worker] = self._anew(numbers, now.workers[worker], read, source.pieces.fresh[i, 0])
                given = [self._given(now, source.workers[i], source.slots[i]) for i in range(group.begin, group.end)]
                source.dispatch(given + given[-1:] * (self._room - len(given)), self._memory(now, source))
            if source and source.planned:
                return

    def _limit_memory(self, recorded: Sequence[Array]) -> None:
        """Wait for a commit not long before the last, and trim now and then."""
        assert self._room == 1  # so that each call has one commit
        if len(recorded) >= AHEAD:
            recorded[-AHEAD].block_until_ready()
        if next(self._made) % self._trim_every == 0:
            trim()

    def _finish(self, now: Apart, chunk: Chunk, commits: range, made: Made, place: int) -> tuple[Apart, Array]:
        """Dispatch commits of a group, from that place of it on, and make the reads that follow each.

        Returns the state after them and the numbers of each, ``[commits, columns]``.
        """
        workers, slots = ([of[i] for i in commits] for of in (chunk.workers, chunk.slots))
        _, constants, (visits, _, _) = chunk.shared
        separate = self._layout.separate_pushes
        centrals, (server, recorders), rows, learners, seen, numbers = self._commit(
            now.central,
            (now.server, now.recorders),
            [now.workers[worker]._replace(learner=()) for worker in workers],
            [now.read[slot] for slot in slots],
            [self._pulled(now, chunk.pieces, i) if separate else () for i in commits],
            made,
            visits,
            np.int32(commits[0]),
            np.int32(place),
            constants.numbers,
        )
        for turn, i in enumerate(commits):
            now.workers[workers[turn]] = rows[turn]._replace(learner=learners[turn])
            if self._layout.reads != "separate":
                now.read[slots[turn]] = seen[turn]
            for other in chunk.reads[i]:
                now.read[other] = centrals[turn]
            for other in chunk.push_reads[i]:
                now.push_read[other] = centrals[turn]
        return now._replace(central=centrals[-1], server=server, recorders=recorders), numbers

    def _pulled(self, now: Apart, pieces: Pieces, i: int) -> Array:
        """Return the central variable that a commit's message is formed with, where that is read apart."""
        return now.push_read[pieces.push_slot[i, 0]] if pieces.push_offset[i, 0] < 0 else now.central


class Numbers:
    """The numbers of the commits of some calls, ``[commits, 1, columns]``, waited for when they are asked for."""

    def __init__(self, of_calls: Sequence[Array]):
        self._of_calls = of_calls

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        numbers = np.concatenate([np.asarray(of_call) for of_call in self._of_calls])[:, None]
        return numbers if dtype is None else numbers.astype(dtype)


def _anew(parts: Parts) -> Callable[[Array], Any]:
    assert parts.anew is not None
    return parts.anew


def _calls(group: Group, most: int) -> Iterator[range]:
    """Yield a group's commits, as many for each call as a power of two says, so that few numbers are compiled."""
    begin = group.begin
    while begin < group.end:
        length = 1 << min(most, group.end - begin).bit_length() - 1
        yield range(begin, begin + length)
        begin += length


def _build_call(parts: MakeParts, recorders: tuple[Recorder, ...], layout: Layout, room: int) -> Passing:
    """Return the function that makes some commits of a group, one after the other, and what their workers read then.

    ``room`` is that of `asyncsim.replays.groups.Made`: how many gradients a group has at most.
    """
    own_count = sum(not one.shared for one in recorders)

    def commits_and_reads(central, states, rows, reads, pulled, made, visits, i, place, numbers):
        """Make the commits from ``i`` of a chunk on, whose gradients are those from ``place`` of their group on.

        ``states`` are the server's and those that all commits' recorders share; ``rows``, ``reads`` and ``pulled``
        lists of each commit's worker's row, what that worker read, and what its message is formed with if that is
        separate; ``made`` the group's gradients; ``visits`` the chunk's; ``numbers`` those of the method.
        """
        method = parts(numbers).method
        commit = build_commit(method, layout.reads)
        server, shared = states
        centrals, left, learners, seen, recorded = [], [], [], [], []
        for turn, (row, read, push) in enumerate(zip(rows, reads, pulled, strict=True)):
            visit = jax.tree.map(lambda leaf, at=i + turn: leaf[at, 0], visits)
            own = jax.tree.map(functools.partial(_row, index=place + turn), made) if room > 1 else made
            start = read if method.resume is None else own.start
            push = push if layout.separate_pushes else central
            done, next_read = commit(central, server, row, read, start, own.result.update, own.result.loss, push, visit)
            states, of_commit = observe(recorders, (*row.recorders, *shared), done)
            central, server, shared = done.central, done.server, states[own_count:]
            centrals.append(central)
            left.append(row_after(done, states[:own_count]))
            learners.append(own.result.learner)
            seen.append(next_read)
            recorded.append(of_commit)
        return centrals, (server, shared), left, learners, seen, jnp.stack(recorded)

    return Passing(commits_and_reads, _REPLACED)


def _row(leaf: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
