"""Commits in pieces, by one compiled loop: the gradients of a piece at once, then its commits one after the other.

A piece has room for ``piece_size`` commits. Its rows are gathered, its gradients are one batch, its commits, each of
which depends on the one before, an unrolled loop, what is recorded of them is taken of all, and its rows are scattered.
For an accelerator XLA fuses the commits of a method that works element by element into one kernel. What a piece has
room for and does not make is computed too, by the method's functions as well, and dropped.

On a CPU, vectors of more than a few parameters have pieces of one commit (the form "single"), whose rows are moved by
dynamic slices; gathers and scatters copy all of the state there. So does XLA wherever it fuses the read of a row with
what comes after a write: hence reading, and committing and writing, are loops of one turn. XLA takes them for loops of
unknown length, and fuses nothing across their ends.

On several devices the rows of the state and the gradients of a piece are divided by worker, its commits by parameter;
what has to move between devices is left to JAX.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.methods.method import Array, Inbox, Memories, Method
from asyncsim.replays.central import Sent, honest_part
from asyncsim.replays.lives import lose_message, lose_worker, return_worker
from asyncsim.replays.local import Constants, LocalResult, MakeParts, Parts
from asyncsim.replays.members import over_members
from asyncsim.replays.observing import columns, observe
from asyncsim.replays.recorders import Commit, Recorder
from asyncsim.replays.state import GossipOfPiece, Layout, Pieces, ReadsOfPiece, ReplayState, WorkerRow, of_workers
from asyncsim.replays.step import Held, Place, begin, finish
from asyncsim.replays.waves import Change


class InPieces:
    """Computes commits on a state whose rows are in one array: forms "batch" and "single".

    ``parts`` makes the functions of the method of numbers; ``make`` is `asyncsim.replays.state.initial_state`, or the
    same of an ensemble, from numbers, parameters, the problem's state and sizes.
    """

    def __init__(
        self,
        parts: MakeParts,
        recorders: tuple[Recorder, ...],
        layout: Layout,
        devices: tuple[Any, ...],
        make: Callable[..., ReplayState],
    ):
        self._devices, self._make, self._workers = devices, make, layout.workers
        self._divided = _Divided(devices)
        self._initial: dict[Any, Callable[..., ReplayState]] = {}
        members = () if layout.members is None else (layout.members,)
        shape = (layout.piece_size, *members, len(columns(recorders)))

        def advance(state: ReplayState, data: Any, constants: Constants, pieces: Pieces, count: Array):
            run_piece = _build_piece(parts(constants.numbers), recorders, layout, self._divided)

            def one(index: Array, carry: tuple[ReplayState, Array]) -> tuple[ReplayState, Array]:
                state, numbers = carry
                state, made = run_piece(state, data, constants.key, jax.tree.map(lambda leaf: leaf[index], pieces))
                return state, jax.lax.dynamic_update_index_in_dim(numbers, made, index, 0)

            numbers = jnp.zeros((pieces.size.shape[0], *shape), state.central.dtype)
            return jax.lax.fori_loop(0, count, one, (state, numbers))

        #: From the state (used up), the training data, the constants of the run, some planned pieces and how many of
        #: them to run, to the state and the numbers of each commit, ``[pieces, piece_size, columns]``.
        self.advance = jax.jit(advance, donate_argnums=0)

        def drop_message(state: ReplayState, *given: Any) -> ReplayState:
            return lose_message(parts(given[0]).method, state, *given[1:])

        def end_life(state: ReplayState, *given: Any) -> ReplayState:
            return lose_worker(parts(given[0]).method, state, *given[1:])

        def begin_life(state: ReplayState, *given: Any) -> ReplayState:
            return return_worker(parts(given[0]), state, *given[1:])

        self._lose_message, self._end_life, self._begin_life = (
            jax.jit(function, donate_argnums=0) for function in (drop_message, end_life, begin_life)
        )

    def initial_state(self, numbers: Any, params: Any, problem_state: Any, **sizes: int) -> ReplayState:
        """Return the state at version zero, each array made where it will lie; rows are a multiple of the devices."""
        sizes = {name: -(-count // len(self._devices)) * len(self._devices) for name, count in sizes.items()}
        key = tuple(sizes.values())
        if key not in self._initial:
            make = functools.partial(self._make, **sizes)
            shardings = self._divided.of_state(jax.eval_shape(make, numbers, params, problem_state))
            self._initial[key] = jax.jit(make, out_shardings=shardings)
        return self._initial[key](numbers, params, problem_state)

    def from_whole(self, state: ReplayState) -> ReplayState:
        """Return the state copied, as it is donated when it is gone on from."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, device=self._devices[0]), state)

    def server_of(self, state: ReplayState) -> Any:
        """Return a copy of all that the server holds: what it restores after an outage."""
        return jax.tree.map(jnp.array, (state.central, state.server, state.workers.memory))

    def with_server(self, state: ReplayState, held: Any, slots: np.ndarray, push_slots: np.ndarray) -> ReplayState:
        """Return the state with what the server held, which some slots read then."""
        central, server, memory = jax.tree.map(jnp.array, held)
        read, push_read = state.read.at[slots].set(central), state.push_read.at[push_slots].set(central)
        workers = state.workers._replace(memory=memory)
        return state._replace(central=central, server=server, read=read, push_read=push_read, workers=workers)

    def changed(self, state: ReplayState, change: Change, numbers: Any, initial: Array) -> ReplayState:
        """Return the state after a message is lost without a server, or a worker goes or is back.

        ``initial`` is the initial replica.
        """
        if change.kind == "message":
            state = self._lose_message(state, numbers, change.place, change.share)
        elif change.kind == "end":
            state = self._end_life(state, numbers, change.place, change.share)
        else:
            state = self._begin_life(state, numbers, change.place, change.source, initial)
        return state if len(self._devices) == 1 else jax.device_put(state, self._divided.of_state(state))

    def problem_states(self, state: ReplayState) -> Any:
        """Return the problem's non-trained state of all workers."""
        return of_workers(state.workers.learner.problem, self._workers)


class _Divided:
    """How arrays are divided among devices; with one, nothing is said of it."""

    def __init__(self, devices: tuple[Any, ...]):
        self.devices = devices
        self._mesh = Mesh(np.array(devices), ("devices",))

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def of_state(self, state: ReplayState) -> Any:
        """Return the shardings of a state: rows of workers and slots by worker, all else everywhere."""
        if len(self.devices) == 1:
            return jax.tree.map(lambda leaf: jax.sharding.SingleDeviceSharding(self.devices[0]), state)
        everywhere = jax.tree.map(lambda leaf: self._sharding(), state)
        rows = [jax.tree.map(lambda leaf: self._sharding("devices"), state._asdict()[name]) for name in _ROWS]
        return everywhere._replace(**dict(zip(_ROWS, rows, strict=True)))

    def by_commit(self, tree: Any) -> Any:
        """Divide leaves ``[piece_size, ...]`` by commit."""
        if len(self.devices) == 1:
            return tree
        return jax.lax.with_sharding_constraint(tree, self._sharding("devices"))

    def by_parameter(self, tree: Any) -> Any:
        """Divide leaves ``[..., parameters]`` by parameter."""
        if len(self.devices) == 1:
            return tree

        def divide(leaf: Array) -> Array:
            return jax.lax.with_sharding_constraint(leaf, self._sharding(*[None] * (leaf.ndim - 1), "devices"))

        return jax.tree.map(divide, tree)


_ROWS = ("read", "push_read", "workers", "messages")


class _Carried(NamedTuple):
    """What a commit finds of those before it in its piece."""

    place: Place
    history: Any  #: the central variable before the piece and after each commit, if reads need it; else ``()``
    memory: Any  #: what commits have left of their workers' memories, if the method sees all; else ``()``


def gather(method: Method, layout: Layout, state: ReplayState, piece: Pieces) -> Held:
    """Read what the commits of a piece meet; leaves with an axis of commits."""
    single = layout.form == "single"
    meets = method.meet is not None

    def read(index: Any) -> tuple[WorkerRow, Any, Any, Any]:
        worker, slot, push_slot, gossip = index
        other: Any = ()
        if method.mix is not None:
            other = _inbox(state.messages, gossip, single, method.sees_messages)
        elif meets:
            other = _take(state.workers.method, jnp.maximum(gossip.partner, 0), single)
            if method.sees_messages:  # of all workers, for the one commit of the piece
                states = of_workers(state.workers.method, layout.workers)
                other = other, Inbox(jax.tree.map(lambda leaf: leaf[None], states), (), ())
        pulled = _take(state.push_read, push_slot, single) if layout.separate_pushes else ()
        seen = _take(state.read, slot, single) if layout.reads != "none" else ()
        return _take(state.workers, worker, single), seen, pulled, other

    index = piece.visit.worker, piece.slot, piece.push_slot, piece.gossip
    row, seen, pulled, other = _apart(single, piece.size, read, index)
    return Held(piece.visit, row, seen, pulled, other, partner=piece.gossip.partner if meets else (), fresh=piece.fresh)


def _build_piece(
    parts: Parts, recorders: tuple[Recorder, ...], layout: Layout, divided: _Divided
) -> Callable[..., tuple[ReplayState, Array]]:
    """Return the function that runs a piece: to the state after it, and the numbers of its commits."""
    (method, local, anew), size = parts, layout.piece_size
    # Without a server a worker returns between two pieces, see `asyncsim.replays.lives`.
    restart = None if layout.gossip else anew
    single = layout.form == "single"
    own = [one for one in recorders if not one.shared]
    shared = [one for one in recorders if one.shared]
    over = over_members if layout.members is not None else lambda function: function
    observe_own = over(lambda states, commit: observe(own, states, commit))
    observe_shared = over(lambda states, commit: observe(shared, states, commit, base=False))
    members = () if layout.members is None else (layout.members,)
    numbers_shape = (*members, len(columns(recorders)))

    def each(function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of each commit: of all at once, or of the only one without an axis of one."""
        if size > 1:
            return jax.vmap(function)(*given)
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], given)))

    def run_piece(state: ReplayState, data: Any, key: Array, piece: Pieces) -> tuple[ReplayState, Array]:
        def compute(held: Held, job: Array, rows: Array) -> tuple[Held, Array, LocalResult]:
            held, start = begin(method, restart, held)
            return held, start, local(data, key, start, held.row.learner, held.visit, job, rows)

        held = gather(method, layout, state, piece)
        rows = divided.by_commit((held.row, held.read, held.pulled, held.other))
        held = held._replace(**dict(zip(("row", "read", "pulled", "other"), rows, strict=True)))
        held, start, result = each(compute, held, piece.job, piece.rows)
        result = divided.by_commit(result)
        row, *vectors = held.row, held.read, held.pulled, start, result.update
        method_state, memory, *vectors = divided.by_parameter((row.method, row.memory, *vectors))
        row = row._replace(method=method_state, memory=memory)
        held = held._replace(row=row, read=vectors[0], pulled=vectors[1])
        given = piece, held, vectors[2], result._replace(update=vectors[3])
        if not single:
            return commit_and_write(state, *given)
        none = jnp.zeros((size, *numbers_shape), state.central.dtype)

        def turn(i: Array, carry: Any) -> Any:
            return commit_and_write(carry[0], *_tied(given, i))

        return jax.lax.fori_loop(0, piece.size, turn, (state, none))

    def commit_and_write(
        state: ReplayState, piece: Pieces, held: Held, start: Array, result: LocalResult
    ) -> tuple[ReplayState, Array]:
        there = jnp.arange(size, dtype=piece.size.dtype) < piece.size

        def step(before: _Carried, of_commit: Any) -> tuple[_Carried, tuple[Commit, Any, Any]]:
            index, is_there, offset, held, start, result = of_commit
            if layout.separate_pushes:
                # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read before the piece.
                in_piece = jax.lax.dynamic_index_in_dim(before.history, jnp.maximum(offset, 0), keepdims=False)
                held = held._replace(pulled=jnp.where(offset < 0, held.pulled, in_piece))
            memories: tuple[Memories, ...] = ()
            if method.sees_memories:
                newer = jnp.where(jnp.arange(size, dtype=index.dtype) < index, piece.visit.worker, held.visit.workers)
                memories = (Memories(of_workers(state.workers.memory, layout.workers), before.memory, newer),)
            made = is_there if size > 1 else None
            left = finish(method, layout.reads, before.place, held, start, result, *memories, made=made)
            place = left.place
            history, memory = before.history, before.memory
            if layout.keeps_history:
                history = jax.lax.dynamic_update_index_in_dim(history, place.central, index + 1, 0)
            if method.sees_memories:
                memory = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), memory, left.commit.memory)
            return _Carried(place, history, memory), (left.commit, left.read, left.other)

        central = divided.by_parameter(state.central)
        first = _Carried(
            Place(central, state.server, state.waiting),
            history=jnp.broadcast_to(central, (size + 1, *central.shape)) if layout.keeps_history else (),
            memory=held.row.memory if method.sees_memories else (),
        )
        of_commits = (jnp.arange(size, dtype=piece.slot.dtype), there, piece.push_offset, held, start, result)
        # To unroll all is to be without a loop, also of a single commit.
        end, (commits, seen, other) = jax.lax.scan(step, first, of_commits, unroll=max(2, min(size, layout.unrolled)))

        after, numbers = each(observe_own, held.row.recorders, commits)
        recorder_states = state.recorders
        if shared:

            def next_shared(states: Any, of_commit: Any) -> Any:
                is_there, commit = of_commit
                after, numbers = observe_shared(states, commit)
                return jax.tree.map(lambda new, old: jnp.where(is_there, new, old), after, states), numbers

            recorder_states, more = jax.lax.scan(next_shared, recorder_states, (there, commits))
            numbers = jnp.concatenate([numbers, more], -1)

        read, push_read = state.read, state.push_read
        if layout.reads not in ("separate", "none"):
            read = _put(read, seen, piece.slot, there, single)
        if layout.keeps_history:
            read = _put_separate(read, end.history, piece.reads, layout)
            push_read = _put_separate(push_read, end.history, piece.push_reads, layout._replace(read_blocks=1))
        row = divided.by_commit(WorkerRow(commits.worker, commits.memory, after, result.learner))
        workers, messages = state.workers, state.messages
        if method.meet is not None:
            partner = jnp.where(held.partner < 0, piece.visit.worker, held.partner)
            workers = workers._replace(method=_put(workers.method, other, partner, there, single))
        if method.mix is not None:
            last = jax.tree.leaves(messages)[0].shape[0] - 1
            taken = piece.gossip.message_slot >= 0
            message_slot = jnp.where(taken, piece.gossip.message_slot, last)
            mass = jax.vmap(functools.partial(honest_part, method))(commits.memory, piece.visit.worker)
            sent = Sent(commits.message, () if method.honest is None else mass)
            messages = _put(messages, sent, message_slot, there & taken, single)
        workers = _put(workers, row, piece.visit.worker, there, single)
        central, server, waiting = end.place
        state = ReplayState(central, server, recorder_states, read, push_read, workers, messages, waiting)
        return state, numbers

    return run_piece


def _tied(tree: Any, i: Array) -> Any:
    """Return the tree, of which XLA cannot tell that it is the same in each turn of a loop over ``i``.

    It would else take work out of the loop: to read a row of the state, which is then copied, or passes over memory.
    """

    def tie(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + jnp.minimum(i, 0).astype(leaf.dtype)
        return jax.lax.optimization_barrier((leaf, i))[0]

    return jax.tree.map(tie, tree)


def _apart(single: bool, count: Array, function: Callable[[Any], Any], index: Any) -> Any:
    """Return what a function returns: where pieces have one commit, from a loop of one turn."""
    if not single:
        return function(index)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, index))
    return jax.lax.fori_loop(0, count, lambda i, _: function(_tied(index, i)), nothing)


def _take(tree: Any, index: Array, single: bool) -> Any:
    """Return rows of the leaves."""
    if single:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index[0], 1), tree)
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _inbox(messages: Any, gossip: GossipOfPiece, single: bool, one_by_one: bool) -> Any:
    """Return the sums of the messages that commits take up, each times its weight, or each message."""
    if one_by_one:

        def rows(leaf: Array) -> Array:
            if not single:
                return leaf[gossip.sources]
            take = functools.partial(jax.lax.dynamic_index_in_dim, leaf, keepdims=False)
            return jax.lax.map(take, gossip.sources[0])[None]

        return Inbox(jax.tree.map(rows, messages), gossip.weights, gossip.senders)
    if not single:
        return jax.tree.map(
            lambda leaf: jnp.einsum("ij,ij...->i...", gossip.weights.astype(leaf.dtype), leaf[gossip.sources]), messages
        )

    def add(j: Array, total: Any) -> Any:
        slot, weight = gossip.sources[0, j], gossip.weights[0, j]

        def added(own: Array, leaf: Array) -> Array:
            return own + weight.astype(leaf.dtype) * jax.lax.dynamic_slice_in_dim(leaf, slot, 1)

        return jax.tree.map(added, total, messages)

    nothing = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), messages)
    return jax.lax.fori_loop(0, gossip.taken[0], add, nothing)


def _put(tree: Any, rows: Any, index: Array, there: Array, single: bool) -> Any:
    """Return the tree with the rows that are ``there``, each at another index."""
    if single:
        return jax.tree.map(lambda leaf, own: jax.lax.dynamic_update_slice_in_dim(leaf, own, index[0], 0), tree, rows)

    def write(leaf: Array, own: Array) -> Array:
        # Beyond the end each at a place of its own: what is dropped, and that no two are the same.
        places = jnp.where(there, index, leaf.shape[0] + jnp.arange(there.size, dtype=index.dtype))
        return leaf.at[places].set(own, mode="drop", unique_indices=True)

    return jax.tree.map(write, tree, rows)


def _put_separate(array: Array, history: Array, reads: ReadsOfPiece, layout: Layout) -> Array:
    """Write what separate reads saw: the central variable after as many commits of the piece as their offset."""
    if reads.slot.size == 0:
        return array
    if layout.read_blocks > 1 or layout.form == "single":
        return _copy_blocks(array, history, reads, layout.read_blocks)
    there = jnp.arange(reads.slot.size, dtype=reads.size.dtype) < reads.size
    # A slot that is free again within the piece comes twice: only its last read stays.
    again = jnp.any(jnp.triu((reads.slot[:, None] == reads.slot) & there, 1), axis=1)
    return _put(array, history[reads.offset], reads.slot, there & ~again, single=False)


def _copy_blocks(array: Array, source: Array, reads: ReadsOfPiece, blocks: int) -> Array:
    """Copy blocks of rows of ``source`` into rows of ``array``, one read after the other.

    The last axis is cut into ``blocks`` blocks of the same width, the last of which may be shorter or empty.
    """
    columns = array.shape[-1]
    width = -(-columns // blocks)
    shape = (1, *array.shape[1:-1], width)
    within = (jnp.int32(0),) * (array.ndim - 2)

    def copy(i: Array, array: Array) -> Array:
        begin = reads.block[i] * jnp.int32(width) if blocks > 1 else jnp.int32(0)
        # A slice cannot reach over the end: the last one begins before its block, and leaves what is there.
        at = jnp.minimum(begin, jnp.int32(columns - width))
        seen = jax.lax.dynamic_slice(source, (reads.offset[i], *within, at), shape)
        if blocks > 1:
            there = jax.lax.dynamic_slice(array, (reads.slot[i], *within, at), shape)
            seen = jnp.where(at + jnp.arange(width, dtype=jnp.int32) < begin, there, seen)
        return jax.lax.dynamic_update_slice(array, seen, (reads.slot[i], *within, at))

    return jax.lax.fori_loop(0, reads.size, copy, array)
