"""How a piece's work and the replay's vectors are divided over devices.

The gradients of a piece are divided by commits: commit ``i`` belongs to lane ``i // devices`` of device
``i % devices``. Its vectors, and with them the work of committing, are divided by parameters if the method works
element by element (each device holds one shard of every row and commits its part of every update); else every device
holds whole vectors and makes all commits. Between the two the rows of a piece change hands: one all-to-all before the
gradients and one after, nothing during the commits.

On several hosts the same program runs as it is: the mesh then has the devices of all processes, and each process plans
the same pieces from the same trace. That has not been tried.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from asyncsim.replays.tuning import DIVIDED, EVEN, FOLDED_BELOW, FOLDED_FROM, FOLDS

Array = jax.Array

#: Name of the mesh's one axis.
DEVICES = "devices"


class Division(NamedTuple):
    """What is divided, and how. Rows of a piece have shape ``[piece_size, shard]``, in the order of commits.

    Attributes
    ----------
    devices : int
    lanes : int
        Room for commits on each device in a piece; ``piece_size = devices * lanes``.
    parameters : int
        Of the problem.
    by_parameters : bool
        Whether vectors are divided; False on one device.
    """

    devices: int
    lanes: int
    parameters: int
    by_parameters: bool

    @property
    def piece_size(self) -> int:
        """Room for commits in a piece."""
        return self.devices * self.lanes

    @property
    def shard(self) -> int:
        """Length of the part of a vector that a device holds."""
        if not self.by_parameters:
            return self.parameters
        least = -(-self.parameters // self.devices)
        return least if least < DIVIDED else -(-least // EVEN) * EVEN

    @property
    def padded(self) -> int:
        """Length of a whole vector with what fills up the last shards."""
        return self.shard * self.devices if self.by_parameters else self.parameters

    def own_count(self, count: Array) -> Array:
        """Return how many of a piece's commits this device computes."""
        return count if self.devices == 1 else (count - lax.axis_index(DEVICES) + self.devices - 1) // self.devices

    def lanes_of(self, count: Array) -> Array:
        """Return how many lanes a piece's commits take, on the device that has most of them."""
        return (count + self.devices - 1) // self.devices

    def own(self, tree: Any) -> Any:
        """Return this device's lanes of leaves ``[piece_size, ...]`` in the order of commits."""
        if self.devices == 1:
            return tree
        device = lax.axis_index(DEVICES)

        def lanes(leaf: Array) -> Array:
            split = leaf.reshape(self.lanes, self.devices, *leaf.shape[1:])
            return lax.dynamic_index_in_dim(split, device, 1, keepdims=False)

        return jax.tree.map(lanes, tree)

    def to_lanes(self, rows: Array) -> Array:
        """Return whole vectors, ``[lanes, padded]``, for this device's commits."""
        if self.devices == 1:
            return rows
        if not self.by_parameters:
            return self.own(rows)
        shards = rows.reshape(self.lanes, self.devices, self.shard)
        return lax.all_to_all(shards, DEVICES, 1, 2, tiled=True).reshape(self.lanes, self.padded)

    def to_shards(self, whole: Array) -> Array:
        """Return this device's part of the vectors of all lanes, ``[piece_size, shard]``."""
        if self.devices == 1:
            return whole
        if not self.by_parameters:
            return self.of_all(whole)
        rows = whole.reshape(self.lanes, 1, self.padded)
        return lax.all_to_all(rows, DEVICES, 2, 1, tiled=True).reshape(self.piece_size, self.shard)

    def of_all(self, tree: Any) -> Any:
        """Return leaves ``[lanes, ...]`` of every device together, ``[piece_size, ...]`` in the order of commits."""
        if self.devices == 1:
            return tree

        def join(leaf: Array) -> Array:
            return lax.all_gather(leaf, DEVICES, axis=1).reshape(self.piece_size, *leaf.shape[1:])

        return jax.tree.map(join, tree)

    def squares(self, vectors: Sequence[Array]) -> list[Array]:
        """Return this device's part of vectors' squared norms; of those of an ensemble one for each member."""
        if self.padded > self.parameters:
            held = self.parameters - lax.axis_index(DEVICES) * self.shard
            there = jnp.arange(self.shard, dtype=jnp.int32) < held
            vectors = [jnp.where(there, vector, 0) for vector in vectors]
        if vectors[0].ndim > 1:
            return [jnp.sum(vector * vector, -1) for vector in vectors]
        size = vectors[0].size
        if not FOLDED_FROM <= size < FOLDED_BELOW:
            return [jnp.vdot(vector, vector) for vector in vectors]
        # Part upon part, of all vectors at once: XLA makes one pass of it over whatever they are computed from.
        end = size // FOLDS * FOLDS
        parts = [jnp.reshape(vector[:end] ** 2, (FOLDS, -1)) for vector in vectors]
        zeros = [jnp.zeros((), vector.dtype) for vector in vectors]
        folded = lax.reduce(parts, zeros, lambda one, other: [a + b for a, b in zip(one, other, strict=True)], (0,))
        return [
            jnp.sum(parts) + jnp.vdot(vector[end:], vector[end:]) if end < size else jnp.sum(parts)
            for vector, parts in zip(vectors, folded, strict=True)
        ]

    def total(self, parts: Any) -> Any:
        """Return the sum of the devices' parts of squared norms."""
        return lax.psum(parts, DEVICES) if self.by_parameters else parts

    def spec(self, leaf: Any) -> PartitionSpec:
        """Return how an array of the replay's state lies on the devices: vectors along their last axis."""
        if self.by_parameters and leaf.ndim and leaf.shape[-1] == self.padded:
            return PartitionSpec(*[None] * (leaf.ndim - 1), DEVICES)
        return PartitionSpec()
