"""Fragments: parts of the parameters that replicas and a server exchange one at a time.

A worker keeps its replica. Version ``k`` of the server takes up fragment ``k mod count`` of the
workers' replicas, and its outer step appears ``overlap`` versions later. A worker merges a fragment
of the central variable into its replica once it has changed since the worker's last read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_count,
    require_fraction,
    require_list,
    require_positive,
)
from asyncsim.methods.method import Applied, Array


class Fragments(NamedTuple):
    """Numbers of the parameters' fragments and blocks.

    Attributes
    ----------
    total : int
        The number of fragments.
    of : Int[ndarray, "parameters"]
        The fragment of each parameter.
    blocks : Int[ndarray, "parameters"]
        The tensor of each parameter, or its fragment where the tensors are unknown.
    """

    total: int
    of: np.ndarray
    blocks: np.ndarray

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return int(self.blocks[-1]) + 1


class Exchange(NamedTuple):
    """The hyper-parameters of methods with fragments."""

    server_rate: Any
    server_momentum: Any
    fragments: int
    overlap: int
    blend: float
    tensors: list[int] | None

    def parts(self, parameters: int) -> Fragments:
        """Return the fragments of a vector."""
        return fragments_of(parameters, self.fragments, self.tensors)

    def merge(self, worker: "FragmentWorker", read: Array) -> "FragmentWorker":
        """Merge the changed fragments of a read: ``blend * replica + (1 - blend) * read``."""
        fragments = self.parts(read.size)
        of = jnp.asarray(fragments.of)
        differs = (read != worker.last_read).astype(jnp.int32)
        changed = jax.ops.segment_max(differs, of, fragments.total) > 0
        mixed = self.blend * worker.replica + (1 - self.blend) * read
        replica = jnp.where(changed[of], mixed, worker.replica)
        return FragmentWorker(replica, read, jnp.where(changed, 0, worker.steps))

    def outer_step(self, server: "FragmentServer", central: Array, progress: Array) -> Applied:
        """Take up the version's fragment of ``progress``, and step with the fragment that is due.

        With ``D`` the progress of the fragment of ``overlap`` versions before, Nesterov's step::

            m       <- server_momentum m + D
            central <- central + server_rate (server_momentum m + D)
        """
        of, count = jnp.asarray(self.parts(central.size).of), self.fragments
        mu = self.server_momentum
        pending = jnp.where(of == server.version % count, progress, server.pending)
        is_due = of == (server.version - self.overlap) % count
        is_due &= server.version >= self.overlap
        m = jnp.where(is_due, mu * server.momentum + pending, server.momentum)
        central = jnp.where(is_due, central + self.server_rate * (mu * m + pending), central)
        return Applied(central, FragmentServer(m, pending, server.version + 1))


def check_exchange(
    server_rate: float,
    server_momentum: float,
    fragments: int,
    overlap: int,
    blend: float,
    tensors: Sequence[int] | None,
) -> Exchange:
    """Check the hyper-parameters of methods with fragments.

    Raises
    ------
    InputError
        For no fragment, more than tensors, or a step that comes after the fragment's next one.
    """
    rate = require_positive("server_rate", server_rate)
    mu = require_fraction("server_momentum", server_momentum)
    count = require_count("fragments", fragments)
    overlap = require_count("overlap", overlap, minimum=0)
    if overlap and overlap >= count:
        raise InputError(
            f"overlap = {overlap}: a fragment's step would come after its next one; give at most "
            f"fragments - 1 = {count - 1}"
        )
    require_fraction("blend", blend)
    if tensors is None:
        return Exchange(rate, mu, count, overlap, blend, None)
    sizes = [
        require_count(f"tensors[{i}]", size)
        for i, size in enumerate(require_list("tensors", tensors))
    ]
    if count > len(sizes):
        raise InputError(
            f"fragments = {count}: there are {len(sizes)} tensors; give at most as many fragments"
        )
    return Exchange(rate, mu, count, overlap, blend, sizes)


def fragments_of(parameters: int, count: int, tensors: list[int] | None) -> Fragments:
    """Return the fragments of a vector.

    Without tensors they are runs of equally many parameters, as nearly as possible; with the sizes
    of tensors, tensor ``i`` belongs to fragment ``i mod count``.

    Raises
    ------
    InputError
        There are more fragments than parameters, or the tensors do not add up to these.
    """
    if tensors is None:
        if count > parameters:
            raise InputError(
                f"fragments = {count}: the problem has {parameters} parameters; give at most as "
                "many fragments"
            )
        of = (np.arange(parameters) * count // parameters).astype(np.int32)
        return Fragments(count, of, of)
    if sum(tensors) != parameters:
        raise InputError(
            f"tensors = {tensors}: have {sum(tensors)} parameters, the problem has {parameters}; "
            "give the sizes of jax.tree.leaves of its parameters"
        )
    blocks = np.repeat(np.arange(len(tensors), dtype=np.int32), tensors)
    return Fragments(count, blocks % count, blocks)


class FragmentServer(NamedTuple):
    """The server's state."""

    momentum: Array  #: shape ``[parameters]``, a fragment changes with its step
    pending: Array  #: shape ``[parameters]``, the last combined progress of each fragment
    version: Array


class FragmentWorker(NamedTuple):
    """A worker's state."""

    replica: Array  #: shape ``[parameters]``
    last_read: Array  #: the central variable at its last read, shape ``[parameters]``
    steps: Array  #: its local steps since it took up each fragment, shape ``[fragments]``


def begin_server(central: Array) -> FragmentServer:
    """Return the server's state at the start."""
    return FragmentServer(jnp.zeros_like(central), jnp.zeros_like(central), jnp.int32(0))


def begin_worker(central: Array, count: int) -> FragmentWorker:
    """Return a worker's state at the start."""
    return FragmentWorker(central, central, jnp.zeros(count, central.dtype))
