"""What a replay carries from piece to piece, what it is told about each, and what it records."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.replays.division import Division
from asyncsim.replays.flat import Flat
from asyncsim.replays.local import Learner

#: Momentum of the proxy that a replay keeps for methods without one, unless another is asked for.
PROXY_MOMENTUM = 0.9


class Layout(NamedTuple):
    """What the compiled program depends on besides method and problem.

    Attributes
    ----------
    division : Division
        Of a piece and its vectors over devices.
    in_turn : bool
        Whether a device computes its lanes' gradients one after the other, not as one batch.
    reads_size, form_reads_size : int
        Room for separate reads and separate reads for messages in a piece.
    reads : {"after", "before", "separate"}
    separate_forms : bool
    window : int
        Local steps of each commit.
    proxy_momentum : float
        Of the proxy that the replay keeps for methods without one.
    diagnose_energy : bool
        Whether the energies are among the diagnostics, weight by weight.
    members : int or None
        Runs of an ensemble that are replayed as one: whatever is said to be a vector of shape ``[parameters]`` then has
        shape ``[members, parameters]``, and a number recorded of a commit is one for each member.
    read_blocks : int
        Blocks of the parameters that are read one after the other; 1 if reads are whole.
    windows_differ : bool
        Whether some commits have fewer local steps than the window.
    way : str
        The module that replays, see `asyncsim.replays.ways`.
    """

    division: Division
    in_turn: bool
    reads_size: int
    form_reads_size: int
    reads: str
    separate_forms: bool
    window: int
    proxy_momentum: float
    diagnose_energy: bool = False
    members: int | None = None
    read_blocks: int = 1
    windows_differ: bool = False
    way: str = "kernel"

    @property
    def of_members(self) -> tuple[int, ...]:
        """Shape of what is a scalar for a single run."""
        return () if self.members is None else (self.members,)

    @property
    def keeps_history(self) -> bool:
        """Whether reads may see the central variable between any two commits of a piece."""
        return self.reads == "separate" or self.separate_forms


class WorkerRow(NamedTuple):
    """All that belongs to one worker; in the replay's state each leaf has a leading axis of workers."""

    method: State
    memory: State
    proxy: State
    learner: State  #: a `Learner`; ``()`` where it is handled apart


class ReplayState(NamedTuple):
    """The replay between two pieces.

    Attributes
    ----------
    central : Float[Array, "parameters"]
    server : tree
        The method's own state on the server.
    read : Float[Array, "slots parameters"]
        What was read and waits for its commits.
    form : Float[Array, "form_slots parameters"]
        What messages will be formed with, if that is read apart.
    workers : WorkerRow
        Leaves with leading axis ``workers``.
    """

    central: Array
    server: State
    read: Array
    form: Array
    workers: WorkerRow


class ReadsOfPiece(NamedTuple):
    """Separate reads that fall into a piece: how many, and for each the slot and the commits of the piece it sees."""

    size: Array
    slot: Array  # [reads_size]
    offset: Array  # [reads_size]
    block: Any = ()  # [reads_size], which block of the parameters is read; () if all of them are


class Pieces(NamedTuple):
    """The plan of consecutive pieces, all leaves with leading axis ``pieces``; see `Layout` for the sizes."""

    size: Array  # commits in the piece
    slot: Array  # [piece_size]
    form_slot: Array  # [piece_size]
    form_offset: Array  # [piece_size], commits of this piece that the read for the message saw; -1: before this piece
    visit: Visit  # [piece_size]
    job: Array  # [piece_size]
    rows: Array  # [piece_size, window, batch] examples; in an ensemble [piece_size, members, window, batch]
    reads: ReadsOfPiece
    form_reads: ReadsOfPiece


class Records(NamedTuple):
    """What is recorded of each commit, ``[pieces, piece_size]``."""

    loss: Array
    update_norm: Array
    central_energy: Array
    proxy_energy: Array


def initial_state(
    method: Method, flat: Flat, params: Any, problem_state: Any, slots: int, form_slots: int, workers: int
) -> ReplayState:
    """Return the replay's state at version zero, from the problem's initial parameters and non-trained state."""
    central = flat.ravel(params)
    server = method.init_server(central)
    row = WorkerRow(
        method=method.init_worker(central),
        memory=method.init_memory(central),
        proxy=() if method.proxy else jnp.zeros_like(central),
        learner=Learner(method.optimizer.init(params), problem_state),
    )
    return ReplayState(
        # Copies: the state is donated, and neither its parts nor the user's own arrays may share memory with it.
        central=jnp.array(central),
        server=jax.tree.map(jnp.array, server),
        read=_repeat(central, slots),
        form=_repeat(central, form_slots),
        workers=jax.tree.map(lambda leaf: _repeat(jnp.asarray(leaf), workers), row),
    )


def state_specs(state: ReplayState, division: Division) -> ReplayState:
    """Return how each leaf of the state lies on the devices."""
    specs = jax.tree.map(division.spec, state)
    # A number of each worker is no vector, also where there are as many workers as parameters.
    rows = jax.tree.map(lambda leaf: division.spec(leaf) if leaf.ndim > 1 else PartitionSpec(), state.workers)
    # Local optimizers and the problem's state are trees of the problem's own shapes: every device holds them all.
    learner = jax.tree.map(lambda leaf: PartitionSpec(), state.workers.learner)
    return specs._replace(workers=rows._replace(learner=learner))


def _repeat(leaf: Array, count: int) -> Array:
    return jnp.array(jnp.broadcast_to(leaf, (count, *leaf.shape)))
