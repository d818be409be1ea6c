"""The state that a replay carries from piece to piece, and the plan of the pieces."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.base.tracing import naming_failures
from asyncsim.methods.method import OF_MESSAGE, Array, Method, State, Visit
from asyncsim.replays.central import Sent, initial_memory
from asyncsim.replays.local import Flat, Learner
from asyncsim.replays.recorders import Recorder

#: A replay's recorders, those with shared states last.
Recorders = tuple[Recorder, ...]


class Layout(NamedTuple):
    """The properties of a compiled program besides method, problem and recorders.

    Attributes
    ----------
    form : {"batch", "single"}
        How commits are computed, see `asyncsim.replays.tuning`.
    piece_size : int
        Commits that a piece has room for.
    workers : int
        Of the trace.
    reads : {"after", "before", "separate", "message", "none"}
        When a worker reads for its next computation, see `asyncsim.replays.waves`.
    reads_size, push_reads_size : int
        Room for separate reads, and for separate reads for messages, in a piece.
    separate_pushes : bool
        Whether messages are formed with the central variable of a visit before the commit's own.
    bounds, owners : tuple of int
        Where reads are not whole: run ``i`` of the parameters is ``bounds[i]:bounds[i + 1]``, and
        has the version of block ``owners[i]`` of the read. Else ``()``.
    window : int
        Local steps of each commit.
    windows_differ : bool
        Whether some commits have fewer.
    unrolled : int
        Commits of a piece that are unrolled.
    version_messages : int
        The most messages of a version.
    gossip : bool
        Whether there is no server: workers take up each other's messages, or meet.
    restarts : bool
        Whether workers lose their state and restart.
    partition : asyncsim.problems.partition.Partition or None
        With several servers, the partition of the vector among them; the other entries are those of
        jobs.
    shards : tuple of Layout
        With several servers, of each one's commits.
    """

    form: str
    piece_size: int
    workers: int
    reads: str
    reads_size: int = 0
    push_reads_size: int = 0
    separate_pushes: bool = False
    bounds: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    window: int = 1
    windows_differ: bool = False
    gossip: bool = False
    unrolled: int = 1
    restarts: bool = False
    version_messages: int = 1
    partition: Any = None
    shards: "tuple[Layout, ...]" = ()

    @property
    def keeps_history(self) -> bool:
        """Whether reads may see the central variable between any two commits of a piece."""
        return self.reads == "separate" or self.separate_pushes or self.reads_size > 0


class Start(NamedTuple):
    """The initial parameters of a run."""

    params: Any  #: the central variable, the problem's tree
    #: The workers' replicas, the same tree with a leading axis of workers; None: as ``params``.
    replicas: Any = None

    def of_worker(self, method: Method, worker: int) -> Any:
        """Return the tree from which a worker starts."""
        if self.replicas is None or not method.has_replicas:
            return self.params
        return jax.tree.map(lambda leaf: leaf[worker], self.replicas)


class WorkerRow(NamedTuple):
    """The states of one worker; in the replay's state each leaf has a leading axis of workers."""

    method: State
    memory: State
    recorders: tuple[State, ...]  #: of the recorders whose states are not shared
    learner: Any  #: a `Learner`


class Waiting(NamedTuple):
    """Messages of an incomplete version, by their places in it."""

    messages: Any  #: leaves with an axis of messages in front
    visits: Visit  #: the fields `OF_MESSAGE` with the same axis; the others are ``()``


def of_message(visit: Visit) -> Visit:
    """Return the part of a visit that a waiting message keeps."""
    dropped: Any = {name: () for name in Visit._fields if name not in OF_MESSAGE}
    return visit._replace(**dropped)


def visit_kinds(method: Method) -> Visit:
    """Return the shapes and types of a visit that knows its loss."""

    def visit() -> Visit:
        number, real = jnp.int32(0), jnp.zeros(())
        return Visit(
            **dict.fromkeys(Visit._fields, number)
            | {
                "time": real,
                "loss": real,
                "completes": jnp.bool_(True),
                "counted": (),
                "kept": real if method.gossips else (),
                "key": jax.random.key(0, impl="threefry2x32") if method.needs_key else (),
            }
        )

    return jax.eval_shape(visit)


def no_messages(method: Method, row: WorkerRow, central: Array, count: int) -> Any:
    """Return room for the messages of a version; ``()`` if the method combines none."""
    if method.combine is None:
        return ()

    def send(row: WorkerRow, central: Array, visit: Visit) -> Waiting:
        message, *_ = method.message(row.method, central, central, central, visit)
        if method.receive is not None:
            message, _ = method.receive(row.memory, message, visit)
        return Waiting(message, of_message(visit))

    # Traced, not computed: a message's shape depends on the method alone.
    kinds = jax.eval_shape(send, row, central, visit_kinds(method))
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), kinds)


class ReplayState(NamedTuple):
    """The replay between two pieces.

    Attributes
    ----------
    central : Float[Array, "parameters"]
    server : tree
        The method's own state on the server.
    recorders : tuple of tree
        States of the recorders whose states are shared.
    read : Float[Array, "slots parameters"]
        Reads that wait for their commits.
    push_read : Float[Array, "push_slots parameters"]
        Central variables that messages will be formed with, if they are read in another visit.
    workers : WorkerRow
        Leaves with leading axis ``workers``.
    messages : tree
        `asyncsim.replays.central.Sent` that wait to be taken up by other workers, with at least one
        row more than slots: there the form "single" writes messages that no worker takes up.
    waiting : Waiting
        Messages that wait for their version; ``()`` of methods without ``combine``.
    """

    central: Array
    server: State
    recorders: tuple[State, ...]
    read: Array
    push_read: Array
    workers: WorkerRow
    messages: Any = ()
    waiting: Any = ()


class ReadsOfPiece(NamedTuple):
    """The separate reads of a piece."""

    size: Array  # number of reads
    slot: Array  # [reads_size]
    offset: Array  # [reads_size], commits of the piece before the read


class Pieces(NamedTuple):
    """The plan of consecutive pieces; leaves have a leading axis ``pieces``; see `Layout`."""

    size: Array  # commits in the piece
    slot: Array  # [piece_size], or [piece_size, groups]
    push_slot: Array  # [piece_size]
    push_offset: Array  # [piece_size], commits of the piece before the message's read; -1: outside
    visit: Visit  # [piece_size]
    job: Array  # [piece_size]
    rows: Array  # examples, [piece_size, window, batch]
    reads: ReadsOfPiece
    push_reads: ReadsOfPiece
    gossip: Any = ()  # a `GossipOfPiece` without a server
    fresh: Any = ()  # [piece_size], whether the worker starts afresh; () if none does


class JobPieces(NamedTuple):
    """The plan of consecutive pieces of jobs, of several servers; leaves as those of `Pieces`.

    ``visit`` is of the job's first part.
    """

    size: Array
    visit: Visit
    job: Array
    rows: Array
    place: Array  # [piece_size], in the table of local steps
    read_slot: Array  # [piece_size, shards]


class PlannedRounds(NamedTuple):
    """The plan of consecutive rounds of several servers; see `asyncsim.replays.parts`.

    Leaves have leading axes ``rounds, pieces``; pieces without a job or a part come last.
    """

    jobs: JobPieces
    parts: tuple[Pieces, ...]  # of each shard; their rows are places in the table of local steps
    complete: Array  # [rounds, most], the places of the messages that are complete after it


class GossipOfPiece(NamedTuple):
    """The messages that the commits of a piece take up; see `asyncsim.replays.waves.Gossip`."""

    sources: Array  # [piece_size, most]
    weights: Array  # [piece_size, most]
    source_count: Array  # [piece_size], messages taken up
    message_slot: Array  # [piece_size]
    partner: Array  # [piece_size]
    senders: Array  # [piece_size, most]


def initial_state(
    method: Method,
    recorders: Recorders,
    flat: Flat,
    start: Start,
    problem_state: Any,
    slots: int,
    push_slots: int,
    workers: int,
    message_slots: int = 0,
    version_messages: int = 1,
) -> ReplayState:
    """Build the replay's state at version zero from the start and the problem's state."""
    central = flat.ravel(start.params)
    with naming_failures("record: init(method, central)"):
        worker_states, shared_states = (
            tuple(
                recorder.init(method, central)
                for recorder in recorders
                if recorder.shared == shared
            )
            for shared in (False, True)
        )

    def row_from(params: Any) -> WorkerRow:
        replica = flat.ravel(params)
        return WorkerRow(
            method=method.init_worker(replica),
            memory=initial_memory(method, replica),
            recorders=worker_states,
            learner=Learner(method.optimizer.init(params), problem_state),
        )

    def repeated(leaf: Any, count: int) -> Array:
        leaf = jnp.asarray(leaf)
        return jnp.array(jnp.broadcast_to(leaf, (count, *leaf.shape)))

    row = row_from(start.params)
    rows = jax.tree.map(lambda leaf: repeated(leaf, workers), row)
    read = repeated(central, 0 if method.mix is not None else slots)
    if method.has_replicas and start.replicas is not None:
        rows = jax.tree.map(jnp.array, jax.vmap(row_from)(start.replicas))
        if method.reads_replica:
            read = jax.vmap(flat.ravel)(start.replicas)

    messages: Any = ()
    if method.mix is not None:
        vectors = central, central, central
        kinds, *_ = jax.eval_shape(method.message, row.method, *vectors, visit_kinds(method))
        sent = Sent(kinds, () if method.honest is None else row.memory)
        messages = jax.tree.map(
            lambda leaf: jnp.zeros((message_slots, *leaf.shape), leaf.dtype), sent
        )
    return ReplayState(
        # Copies: the state is donated, and neither its parts nor the user's arrays may share memory
        # with it.
        central=jnp.array(central),
        server=jax.tree.map(jnp.array, method.init_server(central)),
        recorders=jax.tree.map(jnp.array, shared_states),
        read=read,
        push_read=repeated(central, push_slots),
        workers=rows,
        messages=messages,
        waiting=no_messages(method, row, central, version_messages),
    )
