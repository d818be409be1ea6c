"""Commits dispatched a few at a time: for long vectors on a CPU.

There it takes long to move rows of the ``[workers, parameters]`` arrays of `asyncsim.replays.kernel`. Here every vector
is an array of its own, and what is only passed on is not copied: a worker reads the central variable itself. Gradients
are dispatched in groups, ahead of their turn to be committed, once all that they start from is: groups are computed
side by side, the gradients of each one after the other. So are its commits, in one call.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Method, State
from asyncsim.replays.allocation import keep, trim
from asyncsim.replays.calls import Column, build_call, calls, records
from asyncsim.replays.diagnosis import Applying, Formed, build_diagnose
from asyncsim.replays.flat import Flat
from asyncsim.replays.groups import Chunk, Made, build_gradients
from asyncsim.replays.local import LocalResult
from asyncsim.replays.replay_state import Layout, Pieces, Records, ReplayState, WorkerRow, initial_state
from asyncsim.replays.side_by_side import SideBySide
from asyncsim.replays.tuning import AHEAD, commits_between_trims

#: Where `asyncsim.replays.groups.build_gradients`' function gets memory for what it makes.
_INTO = 4


class Apart(NamedTuple):
    """`ReplayState` with an array of its own for each row: a list for each axis of slots or workers."""

    central: Array
    server: State
    read: list[Array]
    form: list[Array]
    workers: list[WorkerRow]
    upcoming: Chunk | None = None  #: what follows, with gradients that are begun


class Dispatched:
    """The `asyncsim.replays.programs.Way` of a state whose rows are apart, in pieces of one commit.

    At most ``at_once`` groups, of up to ``room`` gradients, are computed at a time.
    """

    looks_ahead = True

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
        self._gradients = SideBySide(build_gradients(method, local, flat, room), at_once, used_up=(_INTO,))
        self._trim_every, self._made = commits_between_trims(layout.division.parameters), itertools.count(1)
        if not self._trim_every:  # of very long vectors, free memory is given back instead
            keep()
        # A message that is formed of what an earlier read saw may need what a commit of the same group makes.
        self._together = 1 if layout.separate_forms else room
        self._commit = build_call(method, layout, room)

    def advance(
        self, state: Apart, data: Any, key: Array, pieces: Pieces, count: np.int32, following: Pieces | None
    ) -> tuple[Apart, Records, Array]:
        """Run planned pieces, ``count`` and no padding.

        Of the pieces that are ``following``, if they are known, gradients are begun. The state given is used up.
        """
        now, chunk = state, state.upcoming
        if chunk is None or chunk.pieces is not pieces:
            chunk = self._chunk(now, data, key, pieces, None)
        upcoming = None if following is None else self._chunk(now, data, key, following, chunk)
        assert chunk.commits == count
        recorded: list[Array] = []
        first: Any = None
        done = 0
        while done < count:
            self._begin_groups(now, chunk, upcoming, done)
            group, wait = chunk.begun.pop(done)
            made = wait()
            if not done:
                update = made.result.update
                first = update if self._room == 1 else update[0]  # a copy where groups use memory again
            for commits in calls(group, self._together):
                now, numbers = self._finish(now, chunk, commits, made, commits[0] - group.begin)
                recorded.append(numbers)
                if self._trim_every:
                    self._limit_memory(recorded)
            if self._room > 1:
                chunk.spare.append((made.start, made.result.update, made.result.learner))
            done = group.end
        self._begin_groups(now, chunk, upcoming, done)
        return now._replace(upcoming=upcoming), records(recorded), first

    def before(self, state: Apart, pieces: Pieces) -> Formed:
        """Return what the first commit will meet, as that of `asyncsim.replays.diagnosis.build_before` does.

        Copied where a commit reuses the memory.
        """

        def copied(tree: Any) -> Any:
            return jax.tree.map(jnp.array, tree)

        row = state.workers[pieces.visit.worker[0, 0]]
        worker = copied(row.method)
        read_before = self._layout.separate_forms and pieces.form_offset[0, 0] < 0
        central = state.form[pieces.form_slot[0, 0]] if read_before else state.central
        read = state.read[pieces.slot[0, 0]]
        start = read if self._method.resume is None else self._method.resume(worker, read)
        applied: Any = ()
        if self._layout.diagnose_energy:
            server, memory, proxy = copied((state.server, row.memory, row.proxy))
            applied = Applying(server, state.central, memory, read, proxy, ())
        return Formed(worker, start, central, applied)

    def diagnose(self, formed: Formed, update: Array, pieces: Pieces, losses: Column) -> dict[str, list[Array]]:
        """Return the diagnostics of the first commit, as that of `asyncsim.replays.diagnosis.build_diagnose` does."""
        # To look at a loss is to wait for it.
        return self._diagnose(formed, update, pieces, losses.first if self._method.sees_loss else ())

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

    def from_whole(self, state: ReplayState) -> Apart:
        """Return a state whose rows are in one array with its rows apart, copied."""
        state = jax.tree.map(lambda leaf: jnp.array(leaf, device=self._device), state)
        workers = range(len(jax.tree.leaves(state.workers)[0]))
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i], state.workers) for i in workers]
        return Apart(state.central, state.server, list(state.read), list(state.form), rows)

    def _chunk(self, now: Apart, data: Any, key: Array, pieces: Pieces, before: Chunk | None) -> Chunk:
        shared = data, *jax.device_put((key, (pieces.visit, pieces.job, pieces.rows)), self._device)
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
                commits = range(group.begin, group.end)
                given = [self._given(now, source.workers[i], source.slots[i]) for i in commits]
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

        Returns the state after them and what is recorded of each, ``[commits, numbers]``.
        """
        workers, slots = ([of[i] for i in commits] for of in (chunk.workers, chunk.slots))
        *_, (visits, _, _) = chunk.shared
        centrals, server, rows, learners, replies, recorded = self._commit(
            now.central,
            now.server,
            [now.workers[worker]._replace(learner=()) for worker in workers],
            [now.read[slot] for slot in slots],
            [self._form(now, chunk.pieces, i) for i in commits],
            made,
            visits,
            np.int32(commits[0]),
            np.int32(place),
        )
        for turn, i in enumerate(commits):
            now.workers[workers[turn]] = rows[turn]._replace(learner=learners[turn])
            if self._layout.reads != "separate":
                now.read[slots[turn]] = replies[turn]
            for other in chunk.reads[i]:
                now.read[other] = centrals[turn]
            for other in chunk.form_reads[i]:
                now.form[other] = centrals[turn]
        return now._replace(central=centrals[-1], server=server), recorded

    def _form(self, now: Apart, pieces: Pieces, i: int) -> Any:
        """Return what a commit's message is formed of, if not of the central variable that the commit meets."""
        if not self._layout.separate_forms:
            return ()
        return now.form[pieces.form_slot[i, 0]] if pieces.form_offset[i, 0] < 0 else now.central
