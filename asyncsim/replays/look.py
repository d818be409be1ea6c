"""Looks at whole vectors: what recorders show of a commit now and then, computed apart from the commits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Memories, Method, State
from asyncsim.replays.local import Constants, Flat, MakeParts
from asyncsim.replays.members import over_members
from asyncsim.replays.observing import looked
from asyncsim.replays.pieces import gather
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.state import Layout, Pieces, ReplayState, of_workers
from asyncsim.replays.step import Held, Place, begin, finish


class Met(NamedTuple):
    """What the first commit of some planned pieces meets, copied."""

    place: Place
    recorders: tuple[State, ...]  #: states that all commits share
    held: Held
    memories: tuple[Memories, ...]  #: of all workers, for methods that see them


def build_first(method: Method, layout: Layout) -> Callable[[ReplayState, Pieces], Met]:
    """Return the jitted function that copies what the first commit meets; running its piece overwrites the state."""

    def first(state: ReplayState, pieces: Pieces) -> Met:
        held = gather(method, layout, state, jax.tree.map(lambda leaf: leaf[0], pieces))
        held = jax.tree.map(lambda leaf: leaf[0], held)
        if layout.separate_pushes:
            held = held._replace(pulled=jnp.where(pieces.push_offset[0, 0] < 0, held.pulled, state.central))
        memories: tuple[Memories, ...] = ()
        if method.sees_memories:
            rows = of_workers(state.workers.memory, layout.workers)
            newer = jax.tree.map(lambda leaf: leaf[:1], rows)
            memories = (Memories(rows, newer, jnp.full(1, layout.workers, jnp.int32)),)
        return Met(Place(state.central, state.server, state.waiting), state.recorders, held, memories)

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
        # Without a server a worker returns between two pieces, see `asyncsim.replays.lives`.
        held, start = begin(method, None if layout.gossip else anew, met.held)
        job, rows = pieces.job[0, 0], pieces.rows[0, 0]
        result = local(data, constants.key, start, held.row.learner, held.visit, job, rows)
        commit = finish(method, layout.reads, met.place, held, start, result, *met.memories).commit
        shown: list[dict[str, list[Array]]] = []
        # Recorders come with those of shared states last.
        for one, state in zip(recorders, (*met.held.row.recorders, *met.recorders), strict=True):
            if one.look is not None:
                found = over(functools.partial(looked, one))(state, commit)
                shown.append({name: jax.tree.leaves(flat.unravel(value)) for name, value in found.items()})
        return shown

    return jax.jit(look)
