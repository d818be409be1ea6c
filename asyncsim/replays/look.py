"""Looks at whole vectors: what recorders show of a commit now and then, computed apart from the commits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Inbox, Memories, Method, State
from asyncsim.replays.central import meet, summed, take_up
from asyncsim.replays.commit import build_commit, looked
from asyncsim.replays.local import Constants, Flat, MakeParts, start_anew
from asyncsim.replays.members import over_members
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.state import Layout, Pieces, ReplayState, WorkerRow, of_workers


class Met(NamedTuple):
    """What the first commit of some planned pieces meets, copied."""

    central: Array
    server: State
    recorders: tuple[State, ...]
    row: WorkerRow
    read: Any
    pulled: Array  #: the central variable that its message is formed with
    memories: tuple[Memories, ...]  #: of all workers, for methods that see them
    other: Any = ()  #: without a server the messages taken up, or what `asyncsim.replays.central.meet` takes


def build_first(method: Method, layout: Layout) -> Callable[[ReplayState, Pieces], Met]:
    """Return the jitted function that copies what the first commit meets; running its piece overwrites the state."""

    def first(state: ReplayState, pieces: Pieces) -> Met:
        pulled = state.central
        if layout.separate_pushes:
            pulled = jnp.where(pieces.push_offset[0, 0] < 0, state.push_read[pieces.push_slot[0, 0]], pulled)
        row = jax.tree.map(lambda leaf: leaf[pieces.visit.worker[0, 0]], state.workers)
        memories: tuple[Memories, ...] = ()
        if method.sees_memories:
            rows = of_workers(state.workers.memory, layout.workers)
            newer = jax.tree.map(lambda leaf: leaf[:1], rows)
            nobody = jax.tree.leaves(rows)[0].shape[0]
            memories = (Memories(rows, newer, jnp.full(1, nobody, jnp.int32)),)
        read = state.read[pieces.slot[0, 0]] if layout.reads != "none" else ()
        other: Any = ()
        gossip = jax.tree.map(lambda leaf: leaf[0, 0], pieces.gossip)
        if method.mix is not None:
            other = Inbox(
                jax.tree.map(lambda leaf: leaf[gossip.sources], state.messages), gossip.weights, gossip.senders
            )
            if not method.sees_messages:
                other = summed(other)
        elif method.meet is not None:
            partner = jnp.where(gossip.partner < 0, pieces.visit.worker[0, 0], gossip.partner)
            states = of_workers(state.workers.method, layout.workers)
            other = jax.tree.map(lambda leaf: leaf[partner], states)
            if method.sees_messages:
                other = other, Inbox(states, (), ())
        return Met(state.central, state.server, state.recorders, row, read, pulled, memories, other)

    return jax.jit(first)


def build_look(
    parts: MakeParts, recorders: tuple[Recorder, ...], flat: Flat, layout: Layout
) -> Callable[..., list[dict[str, list[Array]]]]:
    """Return the jitted function that shows the first commit of some pieces: for each recorder that looks, by name.

    It repeats the commit and its gradient. Its arguments: the inputs of the commit, the training data, the constants of
    the run and the pieces. Each vector comes as the problem's tensors.
    """
    over = over_members if layout.members is not None else lambda function: function

    def look(met: Met, data: Any, constants: Constants, pieces: Pieces) -> list[dict[str, list[Array]]]:
        method, local, anew = parts(constants.numbers)
        commit = build_commit(method, layout.reads)
        visit, job, rows = jax.tree.map(lambda leaf: leaf[0, 0], (pieces.visit, pieces.job, pieces.rows))
        row, read = met.row, met.read
        if method.mix is not None:
            row, read = take_up(method, row, met.other, visit), None
        if anew is not None:
            row = start_anew(anew, row, read, pieces.fresh[0, 0])
        start = read if method.resume is None else method.resume(row.method, read)
        result = local(data, constants.key, start, row.learner, visit, job, rows)
        if method.meet is not None:
            row, _ = meet(method, row, met.other, pieces.gossip.partner[0, 0], visit)
        brought = start if read is None else read, start, result.update, result.loss, met.pulled, visit
        made, _ = commit(met.central, met.server, row, *brought, *met.memories)
        shown: list[dict[str, list[Array]]] = []
        # Recorders come with those of shared states last.
        for one, state in zip(recorders, (*met.row.recorders, *met.recorders), strict=True):
            if one.look is not None:
                found = over(functools.partial(looked, one))(state, made)
                shown.append({name: jax.tree.leaves(flat.unravel(value)) for name, value in found.items()})
        return shown

    return jax.jit(look)
