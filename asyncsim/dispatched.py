"""Commits dispatched one by one, each as two compiled programs: for long vectors on a CPU.

There it takes long to move rows of the ``[workers, parameters]`` arrays of `asyncsim.kernel`. Here every vector is an
array of its own, and what is only passed on is not copied: a worker reads the central variable itself. Gradients are
dispatched somewhat ahead of their turn to be committed, once all that they start from is, and computed side by side.
"""

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
from asyncsim.side_by_side import SideBySide, Start


class Apart(NamedTuple):
    """`ReplayState` with an array of its own for each row: a list for each axis of slots or workers."""

    central: Array
    server: State
    read: list[Array]
    form: list[Array]
    workers: list[WorkerRow]


class Made(NamedTuple):
    """What a gradient's program returns.

    Attributes
    ----------
    start : Array
        Where its local steps started; ``()`` if that is what the worker read.
    result : LocalResult
    """

    start: Any
    result: LocalResult


#: In the place of gradients that were committed: their memory is used for others.
_GONE: Any = None


class Dispatched:
    """The functions of `asyncsim.programs.Program` for a state whose rows are apart. Pieces have one commit each.

    At most ``at_once`` gradients are computed at a time.
    """

    def __init__(
        self,
        method: Method,
        local: Callable[..., LocalResult],
        flat: Flat,
        layout: Layout,
        device: Any,
        at_once: int,
    ):
        self._method, self._layout, self._flat, self._device = method, layout, flat, device
        self._diagnose = build_diagnose(method, flat, layout)
        # Gradients that are begun by the turn of the first of them.
        self._ahead = 1 if at_once == 1 else at_once + 1

        def gradient(data: Any, key: Array, read: Array, worker: State, learner: State, planned: Any, i: Array):
            visit, job, rows = jax.tree.map(lambda leaf: leaf[i, 0], planned)
            start = read if method.resume is None else method.resume(worker, read)
            return Made(() if method.resume is None else start, local(data, key, start, learner, visit, job, rows))

        self._gradient = SideBySide(gradient, at_once)
        self._commit = Passing(_build_commit_and_reply(method, layout), _REPLACED, _USED_UP)

    def advance(
        self, state: Apart, data: Any, key: Array, pieces: Pieces, count: np.int32
    ) -> tuple[Apart, Records, First]:
        """Run the first ``count`` of some planned pieces, as the function of `asyncsim.kernel.build_advance` does."""
        now = Apart(state.central, state.server, list(state.read), list(state.form), list(state.workers))
        chunk = self._chunk(now, data, key, pieces)
        begun: list[Callable[[], Made]] = []
        numbers: list[Array] = []
        first: Any = None
        commits = int(count)
        for i in range(commits):
            while len(begun) < min(i + self._ahead, commits) and chunk.ready(i, len(begun)):
                begun.append(self._begin(now, chunk, len(begun)))
            made, begun[i] = begun[i](), _GONE
            if i == 0:
                # A copy of the update, as the commit reuses its memory.
                first = First(self._start(now, chunk, 0, made), jnp.array(made.result.update))
            now, recorded = self._finish(now, chunk, i, made)
            numbers.append(recorded)
        return now, _records(numbers), first

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

    def _chunk(self, now: Apart, data: Any, key: Array, pieces: Pieces) -> "_Chunk":
        slots, workers = pieces.slot[:, 0].tolist(), pieces.visit.worker[:, 0].tolist()
        key, planned = jax.device_put((key, (pieces.visit, pieces.job, pieces.rows)), self._device)
        first = self._given(now, workers[0], slots[0])
        begin = self._gradient.start_for(data, key, *first, planned, np.int32(0))
        # A piece of one commit has no reads but those after it.
        reads, form_reads = (
            [row[:size] for row, size in zip(kind.slot.tolist(), kind.size.tolist(), strict=True)]
            for kind in (pieces.reads, pieces.form_reads)
        )
        return _Chunk(pieces, slots, workers, reads, form_reads, begin, (data, key), planned)

    def _given(self, now: Apart, worker: int, slot: int) -> tuple[Any, ...]:
        """Return the worker's part of what a gradient is computed from."""
        row = now.workers[worker]
        return now.read[slot], () if self._method.resume is None else row.method, row.learner

    def _begin(self, now: Apart, chunk: "_Chunk", i: int) -> Callable[[], Made]:
        """Dispatch the gradient of a commit; return what returns it."""
        own = self._given(now, chunk.workers[i], chunk.slots[i])
        return chunk.begin(i, *chunk.shared, *own, chunk.planned, np.int32(i))

    def _start(self, now: Apart, chunk: "_Chunk", i: int, made: Made) -> Array:
        return now.read[chunk.slots[i]] if self._method.resume is None else made.start

    def _finish(self, now: Apart, chunk: "_Chunk", i: int, made: Made) -> tuple[Apart, Array]:
        """Dispatch a commit and make the reads that follow it; return the state after it and what is recorded."""
        pieces, worker, slot = chunk.pieces, chunk.workers[i], chunk.slots[i]
        visits, *_ = chunk.planned
        form: Any = ()
        if self._layout.separate_forms:
            before = pieces.form_offset[i, 0] < 0
            form = now.form[pieces.form_slot[i, 0]] if before else now.central
        central, server, row, reply, recorded = self._commit(
            now.central,
            now.server,
            now.workers[worker]._replace(learner=()),
            now.read[slot],
            self._start(now, chunk, i, made),
            made.result.update,
            form,
            made.result.loss,
            visits,
            np.int32(i),
        )
        now.workers[worker] = row._replace(learner=made.result.learner)
        if self._layout.reads != "separate":
            now.read[slot] = reply
        for place in chunk.reads[i]:
            now.read[place] = central
        for place in chunk.form_reads[i]:
            now.form[place] = central
        return now._replace(central=central, server=server), recorded


class _Chunk(NamedTuple):
    """Some planned pieces: of each commit slot, worker and the slots of reads after it; and what all gradients need."""

    pieces: Pieces
    slots: list[int]
    workers: list[int]
    reads: list[list[int]]
    form_reads: list[list[int]]
    begin: Start  # a gradient's program
    shared: tuple[Any, Array]  # the training data and the key
    planned: Any  # visits, jobs and rows, on the device

    def ready(self, now: int, then: int) -> bool:
        """Return whether commit ``then`` starts from nothing that commits from ``now`` on change.

        Atomic reads wait in their workers' slots; separate ones are all among the pieces' reads.
        """
        slot, worker = self.slots[then], self.workers[then]
        return all(self.workers[i] != worker and slot not in self.reads[i] for i in range(now, then))


#: For `Passing`: in the function below the server's state and the worker's row take the place of those before, and the
#: update is its own. The central variable and what was read or pulled of it have other owners.
_REPLACED, _USED_UP = {1: 1, 2: 2}, (5,)


def _build_commit_and_reply(method: Method, layout: Layout) -> Callable[..., Any]:
    """Return the function that makes a commit and its worker's read; the order of its arguments is that above."""
    commit, reply = build_commit(method, layout)

    def commit_and_reply(central, server, row, read, start, update, form, loss, visits, i):
        visit = jax.tree.map(lambda leaf: leaf[i, 0], visits)
        if method.sees_loss:
            visit = visit._replace(loss=loss.astype(visit.time.dtype))
        formed = form if layout.separate_forms else central
        after, server_after, made = commit(central, server, row, read, start, update, formed, visit)
        if layout.reads == "after":
            seen: Any = reply(server_after, after, made.memory, visit)
        else:
            seen = reply(server, central, row.memory, visit) if layout.reads == "before" else ()
        squares = made.squares
        numbers = loss.astype(central.dtype), jnp.sqrt(squares.update), squares.moved / 2, squares.proxy / 2
        return after, server_after, WorkerRow(made.method, made.memory, made.proxy, ()), seen, jnp.stack(numbers)

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
