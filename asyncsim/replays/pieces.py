"""Commits in pieces, by one compiled loop: all gradients of a piece, then its commits in order.

A piece has room for ``piece_size`` commits. Its rows are gathered; its gradients are one batch; its
commits, each dependent on the previous one, are an unrolled loop; recorders observe all of them;
and its rows are scattered. For an accelerator XLA fuses the commits of a method that works
element by element into one kernel. Padding is computed too, also by the method's functions, and
dropped.

On a CPU, vectors of more than a few parameters have pieces of one commit (the form "single"), see
`asyncsim.replays.rows`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Memories, Visit
from asyncsim.replays.central import Sent, honest_part
from asyncsim.replays.lives import lose_message, lose_worker, return_worker
from asyncsim.replays.local import Constants, Flat, LocalResult, MakeParts, Parts
from asyncsim.replays.observing import columns, observe
from asyncsim.replays.plan import visit_key
from asyncsim.replays.recorders import Commit
from asyncsim.replays.rows import gather, over_commits, put_rows, put_separate, tied
from asyncsim.replays.state import (
    Layout,
    Pieces,
    Recorders,
    ReplayState,
    WorkerRow,
    initial_state,
)
from asyncsim.replays.step import ServerState, StepInputs, StepOutputs, begin, finish
from asyncsim.replays.waves import Change

#: Maps a function over the members of an ensemble along the axes of its arguments; or returns it.
Over = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]


class InPieces:
    """Computes commits on a state whose rows are in one array: forms "batch" and "single".

    ``parts`` makes the functions of the method of numbers; ``flat`` converts between the problem's
    tree and the vector; ``over`` maps functions over the members of an ensemble.
    """

    def __init__(
        self,
        parts: MakeParts,
        recorders: Recorders,
        layout: Layout,
        device: Any,
        flat: Flat,
        over: Over,
    ):
        self._over = over

        def first(numbers: Any, *arguments: Any, **sizes: Any) -> ReplayState:
            sizes["version_messages"] = layout.version_messages
            return initial_state(parts(numbers).method, recorders, flat, *arguments, **sizes)

        #: Builds the state at version zero.
        self.initial_state = starting(first, device, over)
        shape = layout.piece_size, len(columns(recorders))
        #: The numbers have shape ``[pieces, piece_size, columns]``.
        self.advance = in_turn(
            lambda numbers: Piece(parts(numbers), recorders, layout).run,
            lambda state, pieces: jnp.zeros((len(pieces.size), *shape), state.central.dtype),
            over,
            axes_of(Pieces),
        )

        def jitted(change: Callable[..., ReplayState], *axes: Any) -> Callable[..., ReplayState]:
            def changed(state: ReplayState, numbers: Any, *arguments: Any) -> ReplayState:
                return change(parts(numbers), state, *arguments)

            return jax.jit(over(changed, (0, 0, *axes)), donate_argnums=0)

        self._changes = {
            "message": jitted(lose_message, None, None),
            "end": jitted(lose_worker, None, None),
            "begin": jitted(return_worker, None, None, 0),
        }

    def server_of(self, state: ReplayState) -> Any:
        """Copy the server's states, which it restores after an outage."""
        return jax.tree.map(jnp.array, (state.central, state.server, state.workers.memory))

    def with_server(
        self, state: ReplayState, checkpoint: Any, slots: np.ndarray, push_slots: np.ndarray
    ) -> ReplayState:
        """Restore the server's states from a checkpoint; some slots read the restored variable."""
        # Copied again: the state is donated, and later restores may need the same checkpoint.
        central, server, memory = jax.tree.map(jnp.array, checkpoint)
        write = self._over(lambda rows, at, row: rows.at[at].set(row), (0, None, 0))
        read = write(state.read, slots, central)
        push_read = write(state.push_read, push_slots, central)
        workers = state.workers._replace(memory=memory)
        return state._replace(
            central=central, server=server, read=read, push_read=push_read, workers=workers
        )

    def changed(
        self, state: ReplayState, change: Change, numbers: Any, initial: Any
    ) -> ReplayState:
        """Apply a loss of a message, or the end or begin of a worker's life, without a server.

        ``initial`` is the initial replica of a worker whose life begins.
        """
        arguments = (change.source, initial) if change.kind == "begin" else (change.share,)
        return self._changes[change.kind](state, numbers, change.place, *arguments)

    def central(self, state: ReplayState) -> Array:
        """Return the central variable."""
        return state.central

    def problem_states(self, state: ReplayState) -> Any:
        """Return the problem's non-trained state of all workers."""
        return state.workers.learner.problem


def starting(make: Callable[..., Any], device: Any, over: Over) -> Callable[..., Any]:
    """Return the function that builds the first state on its device.

    From numbers, the start, the problem's state and sizes, as ``make``; compiled for each sizes.
    """

    @functools.cache
    def compiled(**sizes: Any) -> Callable[..., Any]:
        first = over(functools.partial(make, **sizes), (0, 0, None))
        return jax.jit(first, out_shardings=jax.sharding.SingleDeviceSharding(device))

    return lambda *arguments, **sizes: compiled(**sizes)(*arguments)


def axes_of(kind: Any) -> Any:
    """Return the axes of members of planned pieces: only the examples differ between members."""
    return kind(**{name: 0 if name == "rows" else None for name in kind._fields})


def keyed(pieces: Any, constants: Constants) -> Any:
    """Return planned pieces whose visits have keys, if the run has one for them."""
    if isinstance(constants.visits_key, tuple):
        return pieces

    def with_key(visit: Any) -> Any:
        def key(worker: Array, step: Array) -> Array:
            return visit_key(constants.visits_key, worker, step)

        keys = jax.vmap(key)(visit.worker.ravel(), visit.worker_step.ravel())
        return visit._replace(key=keys.reshape(visit.worker.shape))

    def is_visit(leaf: Any) -> bool:
        return isinstance(leaf, Visit)

    return jax.tree.map(
        lambda leaf: with_key(leaf) if is_visit(leaf) else leaf, pieces, is_leaf=is_visit
    )


def in_turn(
    build: Callable[[Any], Callable[..., Any]],
    room: Callable[[Any, Any], Array],
    over: Over,
    axes: Any,
) -> Callable[..., Any]:
    """Return the jitted function that runs pieces, or rounds of them, one after the other.

    From the state (donated), the training data, the constants of the run, planned pieces and the
    number of them to run, to the state and the numbers of each piece. Not donated, the state would
    be copied at each chunk.

    ``build``: from the method's numbers to the function that runs a piece. ``room``: from the state
    and the pieces to zeros in the place of all numbers. ``axes``: of members of the pieces.
    """

    def advance(state: Any, data: Any, constants: Constants, pieces: Any, count: Array) -> Any:
        run_piece, pieces = build(constants.numbers), keyed(pieces, constants)

        def run_next(index: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, numbers = carry
            piece = jax.tree.map(lambda leaf: leaf[index], pieces)
            state, of_piece = run_piece(state, data, constants.key, piece)
            return state, jax.lax.dynamic_update_index_in_dim(numbers, of_piece, index, 0)

        # A traced count: a shorter last chunk runs the same program.
        return jax.lax.fori_loop(0, count, run_next, (state, room(state, pieces)))

    return jax.jit(over(advance, (0, None, 0, axes, None)), donate_argnums=0)


class _Carried(NamedTuple):
    """The states that the commits of a piece pass on to the next one."""

    server_state: ServerState
    #: The central variable before the piece and after each commit, if reads need it; else ``()``.
    history: Any
    #: The memories that commits of the piece have left, if the method sees all; else ``()``.
    memory: Any


class Piece:
    """The program of a piece: its gradients at once, then its commits in order."""

    def __init__(self, parts: Parts, recorders: Recorders, layout: Layout):
        self._method, self._local, restart = parts
        # Without a server a worker returns between two pieces, see `asyncsim.replays.lives`.
        self._restart = None if layout.gossip else restart
        self._layout = layout
        self._size, self._single = layout.piece_size, layout.form == "single"
        self._shape = layout.piece_size, len(columns(recorders))
        self._of_workers, self._shared = (
            [recorder for recorder in recorders if recorder.shared == shared]
            for shared in (False, True)
        )

    def run(
        self, state: ReplayState, data: Any, key: Array, piece: Pieces
    ) -> tuple[ReplayState, Array]:
        """Run the piece; return the next state and the commits' numbers."""
        arguments = piece, *self.compute(state, data, key, piece)
        if not self._single:
            return self._commit_and_write(state, *arguments)

        def turn(i: Array, carry: Any) -> Any:
            return self._commit_and_write(carry[0], *tied(arguments, i))

        no_numbers = jnp.zeros(self._shape, state.central.dtype)
        return jax.lax.fori_loop(0, piece.size, turn, (state, no_numbers))

    def compute(
        self, state: ReplayState, data: Any, key: Array, piece: Pieces
    ) -> tuple[StepInputs, Array, LocalResult]:
        """Take the local steps of all commits; return their inputs, starts and results."""

        def of_commit(
            inputs: StepInputs, job: Array, rows: Array
        ) -> tuple[StepInputs, Array, LocalResult]:
            inputs, start = begin(self._method, self._restart, inputs)
            learner, visit = inputs.row.learner, inputs.visit
            return inputs, start, self._local(data, key, start, learner, visit, job, rows)

        inputs = gather(self._method, self._layout, state, piece)
        return over_commits(self._size, of_commit, inputs, piece.job, piece.rows)

    def _commit_and_write(
        self,
        state: ReplayState,
        piece: Pieces,
        inputs: StepInputs,
        start: Array,
        result: LocalResult,
    ) -> tuple[ReplayState, Array]:
        # Padding beyond the piece's size: computed like commits, and masked wherever it would
        # write.
        valid = jnp.arange(self._size, dtype=piece.size.dtype) < piece.size
        end, outputs = self.commit(state, piece, valid, inputs, start, result)
        commits = outputs.commit
        states, shared, numbers = self._observe(state, inputs.row.recorders, valid, commits)
        row = WorkerRow(commits.worker, commits.memory, states, result.learner)
        state = self._write(state, piece, valid, inputs.partner, end, outputs, row)
        return state._replace(recorders=shared), numbers

    def commit(
        self,
        state: ReplayState,
        piece: Pieces,
        valid: Array,
        inputs: StepInputs,
        start: Array,
        result: LocalResult,
    ) -> tuple[_Carried, StepOutputs]:
        """Commit in order; return the states at the end, and the outputs of all commits."""
        method, layout, size = self._method, self._layout, self._size

        def step(before: _Carried, of_commit: Any) -> tuple[_Carried, StepOutputs]:
            index, is_valid, offset, inputs, start, result = of_commit
            if layout.separate_pushes:
                # Offset 0 is the start of the piece, k its k-th commit; a negative one is a read
                # before the piece.
                in_piece = jax.lax.dynamic_index_in_dim(
                    before.history, jnp.maximum(offset, 0), keepdims=False
                )
                inputs = inputs._replace(pulled=jnp.where(offset < 0, inputs.pulled, in_piece))
            memories: tuple[Memories, ...] = ()
            if method.sees_memories:
                # Rows of the state are those before the piece; earlier commits of the piece
                # override theirs, and the number of workers, which is no worker's, marks the later
                # ones.
                is_earlier = jnp.arange(size, dtype=index.dtype) < index
                newer = jnp.where(is_earlier, piece.visit.worker, inputs.visit.workers)
                memories = (Memories(state.workers.memory, before.memory, newer),)
            # A piece of one commit has no padding, and a select would copy the central variable.
            mask = is_valid if size > 1 else None
            arguments = before.server_state, inputs, start, result, *memories
            outputs = finish(method, layout.reads, *arguments, is_valid=mask)
            history, memory = before.history, before.memory
            if layout.keeps_history:
                version = outputs.read if method.same_reply else outputs.server_state.central
                history = jax.lax.dynamic_update_index_in_dim(history, version, index + 1, 0)
            if method.sees_memories:
                memory = jax.tree.map(
                    lambda leaf, new: leaf.at[index].set(new), memory, outputs.commit.memory
                )
            after = _Carried(outputs.server_state, history, memory)
            carried: Any = ()  # not stacked: only the state at the end is used
            return after, outputs._replace(server_state=carried)

        central = state.central
        keeps, sees = layout.keeps_history, method.sees_memories
        first = _Carried(
            ServerState(central, state.server, state.waiting),
            history=jnp.broadcast_to(central, (size + 1, *central.shape)) if keeps else (),
            memory=inputs.row.memory if sees else (),
        )
        index = jnp.arange(size, dtype=piece.slot.dtype)
        of_commits = index, valid, piece.push_offset, inputs, start, result
        # At least 2: unrolled whole, also a single commit, the scan becomes straight-line code.
        unroll = max(2, min(size, layout.unrolled))
        return jax.lax.scan(step, first, of_commits, unroll=unroll)

    def _observe(
        self, state: ReplayState, rows: Any, valid: Array, commits: Commit
    ) -> tuple[Any, Any, Array]:
        """Return the recorders' states, of the workers and shared, and the commits' numbers."""
        after, numbers = over_commits(
            self._size, functools.partial(observe, self._of_workers), rows, commits
        )
        if not self._shared:
            return after, state.recorders, numbers

        def next_shared(states: Any, of_commit: Any) -> Any:
            is_valid, commit = of_commit
            after, numbers = observe(self._shared, states, commit, base=False)
            return jax.tree.map(
                lambda new, old: jnp.where(is_valid, new, old), after, states
            ), numbers

        # In order, unlike the recorders above: each commit sees the state of the one before.
        shared, shared_numbers = jax.lax.scan(next_shared, state.recorders, (valid, commits))
        return after, shared, jnp.concatenate([numbers, shared_numbers], -1)

    def _write(
        self,
        state: ReplayState,
        piece: Pieces,
        valid: Array,
        partner: Any,
        end: _Carried,
        outputs: StepOutputs,
        row: WorkerRow,
    ) -> ReplayState:
        """Write reads, rows of workers and messages, and the states at the end of the piece."""
        method, layout, commits = self._method, self._layout, outputs.commit
        put = functools.partial(put_rows, valid=valid, single=self._single)
        read, push_read = state.read, state.push_read
        workers, messages = state.workers, state.messages
        if layout.reads not in ("separate", "none"):
            read = put(read, outputs.read, piece.slot)
        if layout.keeps_history:
            read = put_separate(read, end.history, piece.reads, layout)
            push_read = put_separate(push_read, end.history, piece.push_reads, layout)
        if method.meet is not None:
            # The partner's row first: without a partner it is the worker's row, written again
            # below.
            partner = jnp.where(partner < 0, piece.visit.worker, partner)
            workers = workers._replace(method=put(workers.method, outputs.partner_state, partner))
        if method.mix is not None:
            # The form "single" writes unconditionally: messages without a taker go to a spare row.
            last = jax.tree.leaves(messages)[0].shape[0] - 1
            is_sent = piece.gossip.message_slot >= 0
            message_slot = jnp.where(is_sent, piece.gossip.message_slot, last)
            part = jax.vmap(functools.partial(honest_part, method))
            mass = part(commits.memory, piece.visit.worker)
            sent = Sent(commits.message, () if method.honest is None else mass)
            messages = put(messages, sent, message_slot, valid=valid & is_sent)
        workers = put(workers, row, piece.visit.worker)
        central, server, waiting = end.server_state
        return ReplayState(
            central, server, state.recorders, read, push_read, workers, messages, waiting
        )
