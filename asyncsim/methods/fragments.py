"""Fragments: parts of the parameters that replicas and a server exchange one at a time.

A worker keeps its replica. Version ``k`` of the server takes up fragment ``k mod count`` of the
workers' replicas, and its outer step appears ``overlap`` versions later. A worker merges a fragment
of the central variable into its replica once it has changed since the worker's last read.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_count,
    require_list,
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
    tensors: Sequence[int] | None

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


def _require_sizes(argument: str, sizes: Any) -> list[int]:
    """Return the sizes of tensors, checked."""
    return [
        require_count(f"{argument}[{i}]", size)
        for i, size in enumerate(require_list(argument, sizes))
    ]


Sizes = Annotated[Sequence[int], _require_sizes]


def check_exchange(exchange: Exchange) -> Exchange:
    """Check the hyper-parameters of methods with fragments against each other.

    Raises
    ------
    InputError
        For more fragments than tensors, or a step that comes after the fragment's next one.
    """
    count, overlap, tensors = exchange.fragments, exchange.overlap, exchange.tensors
    if overlap and overlap >= count:
        raise InputError(
            f"overlap = {overlap}: a fragment's step would come after its next one; give at most "
            f"fragments - 1 = {count - 1}"
        )
    if tensors is not None and count > len(tensors):
        raise InputError(
            f"fragments = {count}: there are {len(tensors)} tensors; give at most as many fragments"
        )
    return exchange


def fragments_of(parameters: int, count: int, tensors: Sequence[int] | None) -> Fragments:
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
