"""The replay on two devices of a CPU: one computes the gradients of a piece while the other commits the piece before.

Gradients keep a core's arithmetic busy and commits its memory, so both together take little longer than the slower one.
Both devices run one program (`advance`), in which each does its own part and skips the other's, as loops over no
commits. The state of the replay lies on the committing device, that of the local optimizers and of the problem on the
computing one; each array has a place on both, with a leading axis of two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from asyncsim.commits import Committed, Squares, build_commits
from asyncsim.division import DEVICES
from asyncsim.gradients import build_gradients
from asyncsim.kernel import finish_piece, read_starts, with_losses
from asyncsim.local import Learner, LocalResult
from asyncsim.methods.method import Array, Method
from asyncsim.replay_state import First, Layout, Pieces, Records, ReplayState
from asyncsim.rows import read_rows, row, set_row, write_rows

COMPUTES, COMMITS = 0, 1  #: Positions of the two devices.


class Flow(NamedTuple):
    """What goes from step to step besides the state; rows of a piece have shape ``[piece_size, parameters]``.

    Attributes
    ----------
    results : LocalResult
        Of the piece at hand, on the computing device. On the other its update holds where the gradients of the next
        piece start: what each device sends.
    read, start, learner, committed
        Memory that is filled anew in each step; ``start`` is ``()`` if it is what was read.
    losses, squares
        What is recorded, of all pieces.
    first : Array
        Of the first commit the start of its gradient on the computing device, its update on the other.
    """

    results: LocalResult
    read: Array
    start: Any
    learner: Learner
    committed: Committed
    losses: Array
    squares: Squares
    first: Array


def build_pipeline(
    method: Method, local: Callable[..., LocalResult], layout: Layout, mesh: Mesh
) -> Callable[[ReplayState, Any, Array, Pieces, Array], tuple[ReplayState, Records, First]]:
    """Return the jitted function of `asyncsim.kernel.build_advance` for two devices, one ahead of the other."""
    size = layout.division.piece_size
    gradients = build_gradients(local, layout)
    commits = build_commits(method, layout)

    def advance(states: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        device = lax.axis_index(DEVICES)
        state = jax.tree.map(lambda leaf: leaf[0], states)

        def piece(index: Array, who: int) -> Pieces:
            """Return a piece, empty for the device that has no part in it or if there is none."""
            found = jax.tree.map(lambda leaf: row(leaf, jnp.clip(index, 0, pieces.size.shape[0] - 1)), pieces)
            is_there = (index >= 0) & (index < count) & (device == who)
            none = jnp.int32(0)

            def only(number: Array) -> Array:
                return jnp.where(is_there, number, none)

            return found._replace(
                size=only(found.size),
                reads=found.reads._replace(size=only(found.reads.size)),
                form_reads=found.form_reads._replace(size=only(found.form_reads.size)),
            )

        def rows(state: ReplayState, piece: Pieces, read: Array, start: Any) -> tuple[Array, Any]:
            read = read_rows(state.read, piece.slot, piece.size, read)
            if method.resume is None:
                return read, ()
            return read, read_starts(method, state.workers.method, read, piece, start)

        def send_starts(state: ReplayState, piece: Pieces, results: LocalResult, flow: Flow) -> tuple[LocalResult, Any]:
            """Return the results with the starts of a piece in the place of the update, and the memory used."""
            if method.resume is None:
                return results._replace(update=rows(state, piece, results.update, ())[0]), flow.read
            read, start = rows(state, piece, flow.read, results.update)
            return results._replace(update=start), read

        def step(index: Array, carry: tuple[ReplayState, Flow]) -> tuple[ReplayState, Flow]:
            state, flow = carry
            now, before, following = piece(index, COMPUTES), piece(index - 1, COMMITS), piece(index + 1, COMMITS)
            # To the computing device the starts of this piece, to the other the updates of the one before.
            received = lax.ppermute(flow.results.update, DEVICES, [(COMPUTES, COMMITS), (COMMITS, COMPUTES)])
            if method.sees_loss:
                before = with_losses(before, lax.ppermute(flow.results.loss, DEVICES, [(COMPUTES, COMMITS)]))
            learner = read_rows(state.workers.learner, now.visit.worker, now.size, flow.learner)
            results = gradients.run(data, key, received, learner, now, flow.results)
            # For the first commit's diagnostics: the computing device receives its start in step 0, the committing one
            # its update in step 1. A loop of one turn or none, as a condition would copy the vector at every step.
            turns = jnp.int32(index == jnp.where(device == COMPUTES, 0, 1))
            first = lax.fori_loop(0, turns, lambda _, first: received[0], flow.first)
            learners = write_rows(state.workers.learner, results.learner, now.visit.worker, now.size)
            # Read once more: keeping the rows from the step before would take copies of all of them.
            read, start = rows(state, before, flow.read, flow.start)
            begins = read if method.resume is None else start
            state, committed = finish_piece(layout, commits, state, before, read, begins, received, flow.committed)
            state = state._replace(workers=state.workers._replace(learner=learners))
            results, read = send_starts(state, following, results, flow._replace(read=read))
            flow = Flow(
                results=results,
                read=read,
                start=start,
                learner=learner,
                committed=committed,
                losses=set_row(flow.losses, results.loss.astype(flow.losses.dtype), index),
                squares=jax.tree.map(lambda all_, one: set_row(all_, one, index), flow.squares, committed.squares),
                first=first,
            )
            return state, flow

        flow = empty_flow(state, data, key, pieces)
        results, read = send_starts(state, piece(jnp.int32(0), COMMITS), flow.results, flow)
        state, flow = lax.fori_loop(0, count + 1, step, (state, flow._replace(results=results, read=read)))
        return jax.tree.map(lambda leaf: leaf[None], (state, recorded(device, flow), flow.first))

    def recorded(device: Array, flow: Flow) -> Records:
        """Return the records, of which each device knows some."""
        losses = jnp.where(device == COMPUTES, flow.losses[:-1], 0)
        # A piece's commits come a step after its gradients.
        squares = jax.tree.map(lambda all_: jnp.where(device == COMMITS, all_[1:], 0), flow.squares)
        losses, squares = lax.psum((losses, squares), DEVICES)
        return Records(losses, jnp.sqrt(squares.update), squares.moved / 2, squares.proxy / 2)

    def empty_flow(state: ReplayState, data: Any, key: Array, pieces: Pieces) -> Flow:
        def rows(leaf: Array) -> Array:
            return jnp.zeros((size, *leaf.shape[1:]), leaf.dtype)

        vectors, dtype = rows(state.central[None]), state.central.dtype
        learner = jax.tree.map(rows, state.workers.learner)
        method_rows, memory, proxy = jax.tree.map(rows, tuple(state.workers[:3]))
        history = vectors if layout.keeps_history else ()
        nothing = Squares(*(jnp.zeros(size, dtype) for _ in Squares._fields))
        results = gradients.empty(data, key, vectors, learner, jax.tree.map(lambda leaf: leaf[0], pieces))
        steps = pieces.size.shape[0] + 1
        return Flow(
            results=results,
            read=vectors,
            start=vectors if method.resume else (),
            learner=learner,
            committed=Committed(method_rows, memory, proxy, history, nothing),
            losses=jnp.zeros((steps, size), dtype),
            squares=Squares(*(jnp.zeros((steps, size), dtype) for _ in Squares._fields)),
            first=jnp.zeros_like(state.central),
        )

    own, everywhere = PartitionSpec(DEVICES), PartitionSpec()
    mapped = jax.shard_map(
        advance,
        mesh=mesh,
        in_specs=(own, everywhere, everywhere, everywhere, everywhere),
        out_specs=(own, own, own),
        check_vma=False,
    )

    def on_both(state: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        state, records, first = mapped(state, data, key, pieces, count)
        records = jax.tree.map(lambda leaf: leaf[0], records)
        return state, records, First(first[COMPUTES], first[COMMITS])

    return jax.jit(on_both, donate_argnums=0)
