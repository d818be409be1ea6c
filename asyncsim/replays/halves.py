"""A replay by two threads of a CPU, each of which holds half of every vector.

It is for vectors of middling length, methods that work element by element, and long waves (see
`asyncsim.replays.waves`). Some commits none of which depends on another, a group, are replayed in two steps: each
thread computes the gradients of half of the group, then makes all commits of the group on its half of the parameters.
The threads meet after each step, and read from memory what the other has made.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from asyncsim.methods.method import Array, Method
from asyncsim.replays.calls import Column, records
from asyncsim.replays.diagnosis import Formed, build_before, build_diagnose
from asyncsim.replays.division import Division
from asyncsim.replays.flat import Flat
from asyncsim.replays.gradients import Gradients
from asyncsim.replays.local import Learner, LocalResult
from asyncsim.replays.piece import PiecesOf, build_pieces
from asyncsim.replays.replay_state import Layout, Pieces, Records, ReplayState, initial_state
from asyncsim.replays.rows import entry, row, set_row
from asyncsim.replays.schedule import Span, independent
from asyncsim.replays.side_by_side import SideBySide, begin
from asyncsim.replays.tuning import GRADIENTS_A_HALF, GROUPS_AHEAD

#: Each has a half of all vectors.
THREADS = 2
#: The second half begins where a tensor does if each half then has this share of the parameters; else a tensor is cut
#: in two, which takes a quarter of a gradient's time (digits), at a multiple of so many elements.
_LEAST_SHARE, _CUT = 0.4, 64

#: What a thread's gradients are written to: of each half an array of shape ``[GRADIENTS_A_HALF, parameters]``.
Updates = tuple[Array, ...]


class Halved(NamedTuple):
    """`ReplayState` in two: each has its half of all vectors, and both have whatever is no vector.

    Attributes
    ----------
    halves : tuple of ReplayState
    memory : tuple of Updates
        For each thread's next gradients.
    """

    halves: tuple[ReplayState, ...]
    memory: tuple[Updates, ...]

    @property
    def central(self) -> Array:
        """The whole central variable."""
        return jnp.concatenate([half.central for half in self.halves])


class Made(NamedTuple):
    """What a thread's gradients made; losses have shape ``[GRADIENTS_A_HALF]``."""

    updates: Any  #: `Updates`, or of one half an array
    losses: Array


class Halves:
    """The `asyncsim.replays.programs.Way` of a state in halves, in pieces of one commit."""

    looks_ahead = False

    def __init__(
        self, method: Method, local: Callable[..., LocalResult], flat: Flat, layout: Layout, dtype: Any, device: Any
    ):
        parameters = layout.division.parameters
        params = jax.eval_shape(flat.unravel, jax.ShapeDtypeStruct((parameters,), dtype))
        bounds = halves_of([leaf.size for leaf in jax.tree.leaves(params)])
        learner = Learner(jax.eval_shape(method.optimizer.init, params), ())
        layouts = [
            layout._replace(division=Division(1, 1, end - at, by_parameters=False), in_turn=False) for at, end in bounds
        ]
        self._device, self._sees_loss = device, method.sees_loss
        self._gradients = SideBySide(_build_gradients(local, flat, bounds, learner), THREADS, used_up=(0,))
        self._commits = [SideBySide(_build_commits(method, own), THREADS, used_up=(0,)) for own in layouts]
        self._before = [build_before(method, own) for own in layouts]
        diagnose = build_diagnose(method, flat, layout)
        self._diagnose = jax.jit(lambda formed, update, *given: diagnose(_join(formed), _join(update), *given))
        # Compiled, as that takes NumPy's arrays many times as quickly as device_put.
        self._put = jax.jit(lambda *arrays: arrays, out_shardings=SingleDeviceSharding(device))

        def halve(state: ReplayState) -> Halved:
            def half(at: int, end: int) -> ReplayState:
                def cut(leaf: Array, axes: int = 1) -> Array:
                    return leaf[..., at:end] if leaf.ndim >= axes and leaf.shape[-1] == parameters else leaf

                # A number of each worker is no vector, also where there are as many workers as parameters.
                workers = jax.tree.map(lambda leaf: cut(leaf, axes=2), state.workers)
                central, server, read, form = jax.tree.map(cut, tuple(state[:-1]))
                return ReplayState(central, server, read, form, workers)

            memory = [[jnp.zeros((GRADIENTS_A_HALF, end - at), dtype) for at, end in bounds] for _ in range(THREADS)]
            return Halved(tuple(half(*own) for own in bounds), tuple(map(tuple, memory)))

        def make(params: Any, problem_state: Any, slots: int, form_slots: int, workers: int) -> Halved:
            return halve(initial_state(method, flat, params, problem_state, slots, form_slots, workers))

        self._halve = jax.jit(halve)
        self._make = jax.jit(make, static_argnames=("slots", "form_slots", "workers"))

    def advance(
        self, state: Halved, data: Any, key: Array, pieces: Pieces, count: np.int32
    ) -> tuple[Halved, Records, Sequence[Array]]:
        """Run the first ``count`` planned pieces."""
        groups = list(independent(pieces, int(count), THREADS * GRADIENTS_A_HALF))
        key, planned, places = self._put(key, pieces, _places(groups, pieces))
        to_compute = data, key, (planned.visit, planned.job, planned.rows, planned.slot)
        to_commit = planned._replace(job=places, rows=())
        halves, memory = state
        compute, commit = self._calls(halves, memory, to_compute, to_commit)
        recorded: list[_OfGroup] = []
        first: Any = None
        for at, end in groups:
            reads, spans = _reads(halves), _spans(at, end)
            made = _both(compute, [(memory[i], reads, *to_compute, *map(np.int32, spans[i])) for i in range(THREADS)])
            own = [tuple(Made(one.updates[i], one.losses) for one in made) for i in range(THREADS)]
            committed = _both(
                commit, [(halves[i], own[i], to_commit, np.int32(at), np.int32(end)) for i in range(THREADS)]
            )
            halves, squares, updates = zip(*committed, strict=True)
            memory = tuple(one.updates for one in made)
            recorded.append(_OfGroup((at, end), [one.losses for one in made], squares))
            if len(recorded) % GROUPS_AHEAD == 0:
                recorded[-GROUPS_AHEAD].wait()
            first = first or updates
        return Halved(halves, memory), records(recorded), first

    def before(self, state: Halved, pieces: Pieces) -> list[Formed]:
        """Return what the first commit will meet, as that of `asyncsim.replays.diagnosis.build_before` does."""
        return [before(half, pieces) for before, half in zip(self._before, state.halves, strict=True)]

    def diagnose(
        self, formed: list[Formed], update: Sequence[Array], pieces: Pieces, losses: Column
    ) -> dict[str, list[Array]]:
        """Return the diagnostics of the first commit, as that of `asyncsim.replays.diagnosis.build_diagnose` does."""
        # To look at a loss is to wait for it.
        return self._diagnose(formed, update, pieces, losses.first if self._sees_loss else ())

    def initial_state(self, params: Any, problem_state: Any, slots: int, form_slots: int, workers: int) -> Halved:
        """Return the state at version zero."""
        made = self._make(params, problem_state, slots=slots, form_slots=form_slots, workers=workers)
        return jax.device_put(made, self._device)

    def whole(self, state: Halved) -> ReplayState:
        """Return the state with whole vectors, copied."""
        return jax.tree.map(jnp.array, _join(state.halves))

    def problem_states(self, state: Halved) -> Any:
        """Return the problem's non-trained state of all workers, which is no vector."""
        return state.halves[0].workers.learner.problem

    def from_whole(self, state: ReplayState) -> Halved:
        """Return a state of whole vectors in halves, copied."""
        return jax.device_put(self._halve(state), self._device)

    def _calls(self, halves: Any, memory: Any, to_compute: Any, to_commit: Any) -> tuple[list[Any], list[Any]]:
        """Return what each thread calls: the gradients of a span, and the commits of a group on its half."""
        span = np.int32(0), np.int32(0)
        losses: Any = jax.ShapeDtypeStruct((GRADIENTS_A_HALF,), halves[0].central.dtype)
        compute = self._gradients.call_for(memory[0], _reads(halves), *to_compute, *span)
        commit = [
            commits.call_for(half, (Made(updates, losses),) * THREADS, to_commit, *span)
            for commits, half, updates in zip(self._commits, halves, memory[0], strict=True)
        ]
        return [compute] * THREADS, commit


def halves_of(sizes: Sequence[int]) -> tuple[Span, Span]:
    """Return the halves of vectors that are made of tensors of these sizes.

    They are never of the same length: by that they are told from arrays that are no vectors, see `_join`.
    """
    whole = sum(sizes)
    borders = [end for end in itertools.accumulate(sizes) if _LEAST_SHARE <= end / whole <= 1 - _LEAST_SHARE]
    cut = (whole // 2 - 1) // _CUT * _CUT or 1
    middle = min((end for end in borders if 2 * end != whole), key=lambda end: abs(2 * end - whole), default=cut)
    return (0, middle), (middle, whole)


def _spans(at: Any, end: Any) -> tuple[Any, Any]:
    """Return which commits of a group have gradients of each thread, as integers of the kind given.

    The second may have none.
    """
    middle = (at + end + 1) // 2
    return (at, middle), (middle, end)


def _places(groups: Sequence[Span], pieces: Pieces) -> np.ndarray:
    """Return where each commit finds its update among those of its thread, ``[pieces, 1]``."""
    places = np.zeros_like(pieces.job)
    for group in groups:
        for at, end in _spans(*group):
            places[at:end, 0] = np.arange(end - at)
    return places


def _reads(halves: Sequence[ReplayState]) -> tuple[Array, ...]:
    return tuple(half.read for half in halves)


def _both(calls: Sequence[Callable[..., Any]], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Dispatch the call of each thread; this one is the first."""
    second = begin(THREADS, 1, calls[1], *arguments[1])
    return [calls[0](*arguments[0]), second()]


def _build_gradients(
    local: Callable[..., LocalResult], flat: Flat, bounds: Sequence[Span], learner: Learner
) -> Callable[..., Made]:
    """Return the function that computes the gradients of commits from ``at`` to ``end``, one after the other.

    ``local`` is that of `asyncsim.replays.local.build_local`; ``learner`` has no leaves.
    """

    def write(memory: Updates, tree: Any, place: Array) -> Updates:
        """Write an update part by part: to concatenate it first takes half as long as the gradient (digits)."""
        written, at = list(memory), 0
        for leaf in jax.tree.leaves(tree):
            for half, (begins, ends) in enumerate(bounds):
                low, high = max(at, begins), min(at + leaf.size, ends)
                if low < high:
                    part = leaf.reshape(-1)[low - at : high - at].astype(written[half].dtype)
                    where = place, jnp.asarray(low - begins, place.dtype)
                    written[half] = jax.lax.dynamic_update_slice(written[half], part[None], where)
            at += leaf.size
        return tuple(written)

    def gradients(
        memory: Updates, reads: Sequence[Array], data: Any, key: Array, planned: Any, at: Array, end: Array
    ) -> Made:
        def one(place: Array, made: Made) -> Made:
            visit, job, rows, slot = jax.tree.map(lambda leaf: leaf[at + place, 0], planned)
            params = flat.unravel(jnp.concatenate([row(read, slot) for read in reads]))
            result = local(data, key, params, learner, visit, job, rows)
            losses = set_row(made.losses, result.loss.astype(made.losses.dtype), place)
            return Made(write(made.updates, result.update, place), losses)

        losses = jnp.zeros(GRADIENTS_A_HALF, memory[0].dtype)
        return jax.lax.fori_loop(0, end - at, one, Made(memory, losses))

    return gradients


def _build_commits(method: Method, layout: Layout) -> Callable[..., tuple[ReplayState, Array, Array]]:
    """Return the function that makes the commits from ``at`` to ``end`` on one half.

    Its results are the state, the squared norms ``[pieces, norms]``, zero of commits that it does not make, and the
    update of the first commit. The commits are those of pieces, their updates those that the threads have made: of the
    first before those of the second, at the places that are the jobs.
    """

    def take(made: Made, key: Any, lanes: Array, learner: Learner, piece: Pieces, into: Any) -> LocalResult:
        return LocalResult(made.updates, row(made.losses, piece.job[0])[None], learner)

    def update_of(updates: Array, piece: Pieces, i: Array) -> Array:
        return row(updates, entry(piece.job, i))

    run_pieces = build_pieces(method, Gradients(empty=lambda *_: (), run=take, update_of=update_of), layout)

    def commits(half: ReplayState, made: Sequence[Made], pieces: Pieces, at: Array, end: Array):
        no_key: Any = ()
        to_run = [PiecesOf(own, *span) for own, span in zip(made, _spans(at, end), strict=True)]
        half, ran = run_pieces(half, no_key, pieces, to_run)
        return half, jnp.concatenate(ran.squares, 1), ran.first

    return commits


class _OfGroup:
    """What is recorded of the commits of a group, ``[commits, numbers]``; waited for when it is asked for."""

    def __init__(self, group: Span, losses: Sequence[Array], squares: Sequence[Array]):
        self._group, self._losses, self._squares = group, losses, squares

    def wait(self) -> None:
        """Wait until the commits are made."""
        jax.block_until_ready(self._squares)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        at, end = self._group
        first, second = (np.asarray(of_half)[at:end] for of_half in self._squares)
        update, moved, proxy = (first + second).T
        spans = zip(self._losses, _spans(at, end), strict=True)
        losses = np.concatenate([np.asarray(own)[: stop - start] for own, (start, stop) in spans])
        return np.stack([losses, np.sqrt(update), moved / 2, proxy / 2], 1)

    def __getitem__(self, where: Any) -> np.ndarray:
        return np.asarray(self)[where]


def _join(halves: Sequence[Any]) -> Any:
    """Return trees with halves of vectors as one with whole vectors. What both have alike is no vector."""

    def join(*leaves: Array) -> Array:
        return leaves[0] if leaves[0].shape == leaves[1].shape else jnp.concatenate(leaves, -1)

    return jax.tree.map(join, *halves)
