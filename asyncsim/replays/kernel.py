"""A replay by one compiled loop over pieces, of whole vectors: on any device, and on several.

What a piece does is `asyncsim.replays.piece`'s, row by row, or `asyncsim.replays.batched`'s, all rows at once.

On several devices each runs the same program on its own lanes and its own part of the vectors, see
`asyncsim.replays.division`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncsim.methods.method import Array, Method
from asyncsim.replays.batched import build_batched_pieces
from asyncsim.replays.commits import Squares
from asyncsim.replays.diagnosis import build_before, build_diagnose
from asyncsim.replays.division import DEVICES, Division
from asyncsim.replays.flat import Flat
from asyncsim.replays.gradients import build_gradients
from asyncsim.replays.local import LocalResult
from asyncsim.replays.piece import PiecesOf, build_pieces
from asyncsim.replays.replay_state import Layout, Pieces, Records, ReplayState, state_specs


class Kernel:
    """The `asyncsim.replays.programs.Way` of whole vectors, whose state is a `ReplayState`.

    ``make`` is `asyncsim.replays.replay_state.initial_state` less its first two arguments, or the same of an ensemble.
    """

    looks_ahead = False

    def __init__(
        self,
        method: Method,
        local: Callable[..., LocalResult],
        flat: Flat,
        layout: Layout,
        devices: tuple[Any, ...],
        make: Callable[..., ReplayState],
    ):
        mesh = Mesh(np.array(devices), (DEVICES,))
        self._device = devices[0]
        self.advance = _build_advance(method, local, layout, mesh)
        self.before = build_before(method, layout)
        self.diagnose = build_diagnose(method, flat, layout)
        in_place = len(devices) == 1
        self.initial_state = _make_in_place(make) if in_place else _make_divided(make, layout.division, mesh)

    def whole(self, state: ReplayState) -> ReplayState:
        """Return the state as it is."""
        return state

    def from_whole(self, state: ReplayState) -> ReplayState:
        """Return the state copied, as it is donated when it is gone on from."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, device=self._device), state)

    def problem_states(self, state: ReplayState) -> Any:
        """Return the problem's non-trained state of all workers."""
        return state.workers.learner.problem


def _build_advance(
    method: Method, local: Callable[..., LocalResult], layout: Layout, mesh: Mesh
) -> Callable[[ReplayState, Any, Array, Pieces, Array], tuple[ReplayState, Records, Array]]:
    """Return the jitted function `Kernel.advance`; the number of pieces is part of its compiled shape."""
    division = layout.division
    build = build_batched_pieces if layout.way == "batched" else build_pieces
    run_pieces = build(method, build_gradients(local, layout), layout)

    def advance(state: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        state, made = run_pieces(state, key, pieces, [PiecesOf(data, jnp.int32(0), count)])
        in_order = jnp.swapaxes(division.of_all(jnp.swapaxes(made.losses, 0, 1)), 0, 1)
        return state, _records(in_order, division.total(made.squares)), made.first

    if division.devices == 1:
        return jax.jit(advance, donate_argnums=0)

    everywhere = PartitionSpec()

    @functools.partial(jax.jit, donate_argnums=0)
    def on_all(state: ReplayState, data: Any, key: Array, pieces: Pieces, count: Array):
        specs = state_specs(state, division)
        return jax.shard_map(
            advance,
            mesh=mesh,
            in_specs=(specs, everywhere, everywhere, everywhere, everywhere),
            out_specs=(specs, everywhere, specs.central),
            check_vma=False,
        )(state, data, key, pieces, count)

    return on_all


def _records(losses: Array, squares: Squares) -> Records:
    """Return what is recorded of commits, from their losses and squared norms."""
    return Records(losses, *squares.recorded())


def _make_in_place(make: Callable[..., ReplayState], **options: Any) -> Callable[..., ReplayState]:
    """Return the function compiled, so that no array is made twice."""
    return jax.jit(make, static_argnames=("slots", "form_slots", "workers"), **options)


def _make_divided(make: Callable[..., ReplayState], division: Division, mesh: Mesh) -> Callable[..., ReplayState]:
    """Return the function compiled to make each array where it will lie: no device ever holds all of it."""

    @functools.cache
    def compiled_for(sizes: tuple[tuple[str, int], ...], structure: Any, shapes: tuple[Any, ...]):
        arguments = jax.tree.unflatten(structure, shapes)
        specs = state_specs(jax.eval_shape(functools.partial(make, **dict(sizes)), *arguments), division)
        return _make_in_place(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def made(*arguments: Any, **sizes: int) -> ReplayState:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return compiled_for(tuple(sizes.items()), structure, shapes)(*arguments, **sizes)

    return made
