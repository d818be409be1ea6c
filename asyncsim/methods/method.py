"""A method: pure functions from arrays to arrays, and the visit that they see.

A method never sees a clock, a queue or a data set. In a replay the parameters are one flat vector,
so that a method reads like its formula, unless it asks for the problem's tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Count, Positive, check_fields
from asyncsim.base.errors import InputError, require_choice, require_positive
from asyncsim.clusters.cluster import DISCIPLINES, PROTOCOLS
from asyncsim.clusters.policy import Policy, as_policy


def require_rate(argument: str, value: Any) -> Any:
    """Return ``value`` if it is a positive number or a schedule, a function of the Visit; else
    raise InputError.
    """
    return value if callable(value) else require_positive(argument, value)


def require_policy(argument: str, policy: Policy | str | None) -> Policy | None:
    """Return the policy that a method needs, parsed if it is text; None for any.

    Raises
    ------
    InputError
        For a value of another type, or text that is no policy.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise InputError(
            f"policy = {policy!r}: must be a policy, such as asyncsim.buffered(10), or None for any"
        )
    try:
        return as_policy(policy)
    except InputError as error:
        raise InputError(
            f"policy = {policy!r}: {str(error).removeprefix(f'policy = {policy!r}: ')}"
        ) from None


def require_optimizer(argument: str, value: Any) -> Any:
    """Return ``value`` if it is an optax transformation; raise InputError otherwise."""
    if not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise InputError(
            f"{argument} = {value!r}: must be an optimizer of optax, such as optax.adam(1e-3)"
        )
    return value


Array = jax.Array
State = Any  #: any tree of arrays, ``()`` for none
Schedule = Callable[["Visit"], Array]

#: The trees that a method's functions see instead of the parameters; see `Method`.
SPACES = ("vector", "tensors")

#: The error of Muon where all its steps would be those for vectors.
NO_MATRICES = (
    "Muon's steps are for matrices, and there is none among the parameters; choose another "
    "method or optimizer, or a problem with matrices"
)

#: The default rate of plain local steps.
LEARNING_RATE = 0.05


class Visit(NamedTuple):
    """The server visit that commits an update: a method's whole view of time. Scalars.

    Attributes
    ----------
    staleness : int
        Versions between the read for this gradient and the apply.
    worker, worker_step : int
        The committing worker, and the number of its commits that the server accepted before.
    commit : int
        Number of commits that the server accepted before.
    time : float
        Time of the apply (s).
    local_steps : int
        Gradients in the update.
    completes : bool
        Whether this message completes a version: methods that average step then, and only then.
        Under a policy that makes one version of several messages, the others only enter the buffer:
        reads see the central variable as the last completing message left it, whatever ``apply``
        has done with later ones. (A message that is formed in the visit sees the current one.)
    place, messages : int
        The message's place in its version, from zero, and the number of messages of that version;
        for an incomplete last version, the messages before the end of the trace.
    counted : Bool[Array, "workers"]
        On a trace with absences, the mask of the workers that the server counts; ``()`` elsewhere,
        where it counts all. `count_living` returns their number.
    kept : float
        Without a server, the share of the worker's state that it kept when it sent the rest; else
        ``()``.
    workers : int
        Number of workers in the training.
    delays : Int[Array, "parameters"]
        The staleness of each parameter of the read for this gradient; a scalar where reads are
        whole. ``staleness`` is the oldest group's.
    loss : float
        Mean loss of the update's minibatches, for message, apply and reply; ``()`` before the
        local steps.
    key : jax.random.key
        For random numbers of methods with ``needs_key``; ``()`` elsewhere. It depends only on the
        run's seed, the worker and ``worker_step``: two methods with one seed draw the same numbers,
        and adding a worker changes no other's. All functions of a visit get the same key; fold a
        number into it for independent draws. Only the optimizer gets a separate key for each local
        step of a window. ``init_worker`` and the other initial states get no key.
    """

    staleness: Array
    worker: Array
    worker_step: Array
    commit: Array
    time: Array
    local_steps: Array
    completes: Array | bool = True
    place: Array | int = 0
    messages: Array | int = 1
    kept: Array | tuple[()] = ()
    counted: Array | tuple[()] = ()
    workers: Array | int = 1
    delays: Array | tuple[()] = ()
    loss: Array | tuple[()] = ()
    key: Array | tuple[()] = ()


#: The fields of the ``visits`` of `Method.combine` that have one value for each message.
OF_MESSAGE = ("staleness", "worker", "worker_step", "commit", "time", "local_steps", "loss")


def completing(visits: Visit) -> Visit:
    """Return the visit that completes a version, from the visits of `Method.combine`."""
    last = visits.messages - 1
    return visits._replace(
        **{
            name: jax.tree.map(lambda values: values[last], getattr(visits, name))
            for name in OF_MESSAGE
        }
    )


def present(messages: State, visits: Visit) -> Array:
    """Return the mask of the rows of ``messages`` that belong to the version; see
    `Method.combine`.
    """
    return jnp.arange(jax.tree.leaves(messages)[0].shape[0], dtype=jnp.int32) < visits.messages


def count_living(visit: Visit) -> Array:
    """Count the workers that the server does not know to be away."""
    return (
        jnp.asarray(visit.workers)
        if isinstance(visit.counted, tuple)
        else jnp.sum(visit.counted, dtype=jnp.int32)
    )


class Memories(NamedTuple):
    """The memory of every worker after its last commit; before its first, from ``init_memory``.

    The replay stores it in two parts, because an array of all workers would be copied at every
    commit.

    Attributes
    ----------
    rows : tree
        Memories of some commits ago; leaves with leading axis ``workers``.
    newer : tree
        Memories of later commits; leaves with leading axis ``commits``, the last may still be
        unused.
    worker : Int[Array, "commits"]
        The worker of each newer memory, each at most once; ``workers`` marks an unused entry.
    """

    rows: State
    newer: State
    worker: Array

    def of(self, worker: Array) -> State:
        """Return the memory of a worker."""
        newer = self.worker == worker
        is_newer, place = jnp.any(newer), jnp.argmax(newer)
        return jax.tree.map(
            lambda table, new: jnp.where(is_newer, new[place], table[worker]), self.rows, self.newer
        )

    def of_all(self, name: str) -> Array:
        """Return one field of all memories, NamedTuples, with a leading axis of workers.

        Meant for scalars: for vectors it copies the whole table.
        """
        rows, newer = getattr(self.rows, name), getattr(self.newer, name)
        return rows.at[self.worker].set(newer, mode="drop")


class Inbox(NamedTuple):
    """The messages that a worker takes up in one step, for methods that see them one by one.

    Attributes
    ----------
    messages : tree
        Leaves with leading axis ``most``, the largest number of messages of a step in the trace.
        Absent messages are zeros.
    weights : Float[Array, "most"]
        The weight of each message; zero for absent messages.
    senders : Int[Array, "most"]
        The worker that sent each message; the number of workers for absent messages.
    """

    messages: State
    weights: Any
    senders: Any


#: Bits of a parameter, unless a study sets another type.
_BITS = 32


@dataclass(frozen=True)
class Timing:
    """The timing that a method needs; None means that any will do.

    Attributes
    ----------
    workers, protocol, window, discipline, policy
        Fields of the trace's `asyncsim.Cluster`; other traces are refused. The policy is a
        Policy, given as one or as text; ``barrier()`` stands for any barrier.
    message_size : float
        Size of the message relative to the vector of parameters that is sent down: 1/16 for 2 bits
        instead of 32. Studies with a bandwidth simulate the upward transfer accordingly; a replay
        accepts any trace.
    message_share : function
        ``message_share(bits) -> float``: the ``message_size`` for parameters of ``bits`` bits. By
        default the message keeps its number of bits, with all parameters as the upper bound.
    message_numbers : int
        Numbers in a message, however many parameters there are: 1 for a loss. Instead of
        ``message_size``.
    reply_size : float
        Size of the worker's read relative to the vector of parameters; by default 1.
    far_every, groups : int
        On a cluster with sites, only every ``far_every``-th visit of a worker leaves its site. This
        requires that each of the ``groups`` groups of neighbours is at one site; worker ``i`` of
        ``n`` is in group ``i * groups // n``. Give both or none. A replay accepts any trace.
    fewest_workers : int
        Smallest number of workers.
    """

    workers: Count | None = None
    protocol: Annotated[str, partial(require_choice, choices=PROTOCOLS)] | None = None
    window: Count | None = None
    discipline: Annotated[str, partial(require_choice, choices=DISCIPLINES)] | None = None
    policy: Annotated[Any, require_policy] = None
    message_size: Positive | None = None
    message_share: Callable[[int], float] | None = None
    message_numbers: Count | None = None
    reply_size: Positive | None = None
    far_every: Count | None = None
    groups: Count | None = None
    fewest_workers: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.message_size is not None and self.message_numbers is not None:
            raise InputError(
                f"message_numbers = {self.message_numbers}: is a second size of the message, whose "
                f"message_size is {self.message_size}; give one of them"
            )

    def size_of_message(self, bits: int) -> float | None:
        """Return the message's size relative to all parameters, of ``bits`` each; None for any."""
        if self.message_size is None or bits == _BITS:
            return self.message_size
        return (
            min(1.0, self.message_size * _BITS / bits)
            if self.message_share is None
            else self.message_share(bits)
        )

    def bytes_of_visit(self, up: float, down: float, bits: int) -> tuple[float, float]:
        """Return the bytes of a message and of a read.

        ``up``, ``down``: bytes of a message and of a read that are vectors of parameters; ``bits``:
        of each number. A lone worker sends nothing.
        """
        size, reply_size = self.size_of_message(bits), self.reply_size
        if self.workers == 1:
            return 0.0, 0.0  # a lone worker has the parameters
        if self.message_numbers is not None:
            up = min(up, self.message_numbers * bits / 8)
        elif size is not None:
            up = size * down
        return up, down if reply_size is None else reply_size * down


#: The fields of a method's timing that only affect transfer times: a replay accepts any trace.
OF_SIZES = ("message_size", "message_share", "message_numbers", "reply_size")
OF_JOURNEYS = (*OF_SIZES, "far_every", "groups")


class Applied(NamedTuple):
    """The server's and the worker's state after an apply."""

    central: Array
    server: State = ()
    memory: State = ()


def _no_state(central: Array) -> State:
    return ()


def add(server: State, central: Array, message: Array, memory: State, visit: Visit) -> Applied:
    """Add the message to the central variable, as the server of most methods does."""
    return Applied(jax.tree.map(lambda x, sent: x + sent, central, message), server, memory)


def send_update(worker: State, update: Array, start: Array, central: Array, visit: Visit):
    """Send the sum of the local steps, unchanged."""
    return update, worker, {}


class Rounds(NamedTuple):
    """The extra functions of `asyncsim.methods.robust`, which combines messages by a robust rule.

    Attributes
    ----------
    require : function
        ``require(workers, policy)`` raises InputError if a version of such a cluster has too few
        messages.
    attacked : function
        ``attacked(byzantine)`` returns the method that records the weight of the Byzantine workers'
        messages; ``byzantine`` is a mask of all workers.
    """

    require: Callable[[int, Policy], None]
    attacked: Callable[[Any], "Method"]


class Method(NamedTuple):
    """An algorithm as pure functions closed over its hyper-parameters.

    A commit calls them in this order, on vectors of shape ``[parameters]``::

        worker = refresh(worker, read)                # by default unchanged
        start = resume(worker, read)                  # by default the worker's last read
        update = sum of the local optimizer's steps, from start
        message, worker, diagnostics = message(worker, update, start, central, visit)
        central, server, memory = apply(server, central, message, memory, visit)    # or combine
        read = reply(server, central, memory, visit)  # by default the central variable; next read

    Without a server (`asyncsim.topologies`) ``mix`` comes first, or ``meet`` replaces ``apply`` and
    comes before ``message``. The central variable is then the mean of the workers' replicas and of
    the messages in flight (`asyncsim.replays.central`); ``apply`` and the memory are not used.

    Attributes
    ----------
    name : str
    hyperparameters : Mapping[str, Any]
        For tables and files: numbers, texts, lists of them. An array is written as the list of all
        its entries.
    optimizer : optax.GradientTransformation
        The worker's local optimizer, applied to the problem's own tree; its state stays with the
        worker. ``update`` is called with ``visit=``, and with ``start=``, the parameters from which
        the visit's local steps began, if it takes extra arguments.
    message : function
        Forms the worker's message, with the central variable at the visit; a vector or any tree of
        arrays. The diagnostics, named vectors (shares if boolean), are recorded at intervals.
    apply : function
        The server's step. ``server`` is shared (buffers, counters, moments); ``memory`` belongs to
        this worker, for example its last gradient. A method that needs a table of all workers'
        gradients stores each row in ``memory`` and totals, such as their sum, in ``server``.
    combine : function, optional
        ``combine(server, central, messages, visits) -> Applied``, instead of ``apply``: the
        server's step with all messages of a version, once its last message has arrived. Until then
        messages wait. ``messages`` is a message with a leading axis of messages, in the order of
        their visits; rows beyond the version's (``visits.messages``, see `present`) are
        meaningless. ``visits`` is the visit that completes the version; its ``staleness``,
        ``worker``, ``worker_step``, ``commit``, ``time``, ``local_steps`` and ``loss`` have the
        same axis. The memory of `Applied` is not used.
    receive : function, optional
        ``receive(memory, message, visit) -> (message, memory)``: with ``combine``, returns the
        message that waits and the worker's new memory. By default both stay unchanged.
    init_worker, init_server, init_memory : function
        From the initial central variable to the initial states.
    resume : function, optional
        ``resume(worker, read)``: the worker's starting point, for methods with persistent replicas.
        With ``mix`` there is no read: None. With ``reply`` a worker's read is its replica.
    refresh : function, optional
        ``refresh(worker, read) -> worker``: takes the worker's last read into its state, before
        ``resume``, for methods with persistent replicas and a server.
    look_ahead : function, optional
        ``look_ahead(optimizer_state)``: the offset from the parameters at which the gradient of a
        local step is computed, a tree like theirs.
    reply : function, optional
        ``reply(server, central, memory, visit)``: the vector that the worker reads, instead of the
        central variable, with the states at the read: after its own commit, or before it under the
        protocol "read_then_write". A worker's first read is the initial central variable, with
        ``resume`` its initial replica. Traces whose reads are separate visits are refused, unless
        the method has ``same_reply``.
    origin : function, optional
        ``origin(worker, read)``: the central variable from which the worker measures the server's
        movement; by default its last read.
    proxy : function, optional
        ``proxy(worker)``: the momentum of the matched process, for methods that store it; for the
        others `asyncsim.recorders.energy` computes it on request.
    mix : function, optional
        ``mix(worker, inbox, visit) -> worker``, for workers that send each other messages: updates
        the worker's state before its gradient. ``inbox`` is the weighted sum of the messages taken
        up, or with ``sees_messages`` an `Inbox`; ``visit.kept`` is the weight of the worker's own
        state. ``message`` forms the message to its neighbours, a tree of floating-point arrays.
    replica : function, optional
        With ``mix``, ``replica(message)`` selects the worker's replica in its message, a vector;
        for push-sum the biased replica and its weight. It is also applied to sums of messages, so
        it may only select. With ``meet``, ``replica(state)`` selects it in the worker's state. By
        default the message or state, or the first entry of a tuple.
    last : function, optional
        ``last(worker)``: with ``mix``, computes the worker's last message, or its initial one, from
        its state. By default the replay stores it, at the cost of a vector for each worker.
    meet : function, optional
        ``meet(replica, partner, visit) -> (replica, partner)``, for workers that meet in pairs:
        updates the states of both, any trees, at once, when the first commits, before its
        ``message``. The message is also the committing worker's read for its next gradient, a
        vector.
    timing : Timing
        The timing that the trace must have.
    same_reply : bool
        Whether all workers get the same reply to a version: ``reply`` then looks at neither the
        memory nor the worker of the visit, and is formed once, in the visit that made the version.
    coordinatewise : bool
        Whether each entry of the vectors of all functions depends on that entry of the arguments,
        on numbers of the visit and on states that do not depend on other entries: no norm, no
        median over parameters, no draws. Then several servers may hold a shard each and commit
        their parts of a message at different times (``Cluster(servers=4)``); other methods are
        refused there.
    sees_memories : bool
        Whether ``apply`` takes a sixth argument, the `Memories` of all workers before this commit.
    sees_messages : bool
        Whether ``mix`` sees its messages one by one, in an `Inbox`.
    needs_key : bool
        Whether visits have a key, for methods that draw random numbers.
    rounds : Rounds, optional
        Robust methods only; see there.
    honest : tuple of bool, optional
        Without a server and under attack, the mask of the workers whose replicas and messages count
        for the central variable; set by the replay.
    space : {"vector", "tensors"}
        With ``"tensors"`` the server's functions, ``init_server``, ``apply``, ``combine`` and
        ``reply``, see and return the problem's own tree of parameters: as the central variable, and
        in place of each vector of parameters in a message. The workers' functions see vectors.
    recipe : Recipe, optional
        Set by `asyncsim.methods.declared`.
    """

    optimizer: optax.GradientTransformation
    name: str = ""
    hyperparameters: Mapping[str, Any] = MappingProxyType({})
    message: Callable[..., tuple[State, State, Mapping[str, Array]]] = send_update
    apply: Callable[..., Applied] = add
    combine: Callable[[State, Array, State, Visit], Applied] | None = None
    receive: Callable[[State, State, Visit], tuple[State, State]] | None = None
    init_worker: Callable[[Array], State] = _no_state
    init_server: Callable[[Array], State] = _no_state
    init_memory: Callable[[Array], State] = _no_state
    resume: Callable[[State, Any], Array] | None = None
    refresh: Callable[[State, Array], State] | None = None
    look_ahead: Callable[[State], Any] | None = None
    reply: Callable[[State, Array, State, Visit], Array] | None = None
    origin: Callable[[State, Array], Array] | None = None
    proxy: Callable[[State], Array] | None = None
    mix: Callable[[State, State, Visit], State] | None = None
    meet: Callable[[State, State, Visit], tuple[State, State]] | None = None
    replica: Callable[[State], Any] | None = None
    last: Callable[[State], State] | None = None
    timing: Timing = Timing()
    same_reply: bool = False
    coordinatewise: bool = False
    sees_memories: bool = False
    sees_messages: bool = False
    needs_key: bool = False
    rounds: Rounds | None = None
    honest: tuple[bool, ...] | None = None
    space: str = "vector"
    recipe: Any = None

    @property
    def gossips(self) -> bool:
        """Whether there is no server: workers send each other messages, or meet."""
        return self.mix is not None or self.meet is not None

    @property
    def has_replicas(self) -> bool:
        """Whether workers have persistent replicas, so that they may start apart."""
        return self.resume is not None or self.meet is not None

    @property
    def reads_replica(self) -> bool:
        """Whether a worker's read is its replica, and not the central variable."""
        return self.meet is not None or (self.resume is not None and self.reply is not None)

    def __repr__(self) -> str:
        """Return the name with the hyper-parameters, not the functions."""
        values = (f"{name}={value!r}" for name, value in self.hyperparameters.items())
        return f"Method({self.name}: {', '.join(values)})"


def gradient_steps(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Return gradient descent as an optax transformation, with steps ``-learning_rate * gradient``.

    Parameters
    ----------
    learning_rate : float or function
        A schedule is a function of the Visit:
        ``lambda visit: 0.1 / (1 + 0.01 * visit.worker_step)``. (JAX divides whole numbers in
        float32, as in ``visit.worker_step / 100``, also in float64 runs.)

    Raises
    ------
    InputError
        For a learning rate that is not above zero.
    """
    require_rate("learning_rate", learning_rate)

    def update(gradients, state, params=None, *, visit=None, **_):
        return jax.tree.map(
            lambda gradient: -rate_at(learning_rate, visit, gradient) * gradient, gradients
        ), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def rate_at(learning_rate: Any, visit: Any, like: Array) -> Any:
    """Return the learning rate at a visit; if traced, cast to the type of ``like``."""
    rate = learning_rate(visit) if callable(learning_rate) else learning_rate
    return rate.astype(like.dtype) if isinstance(rate, jax.Array) else rate


#: Replaces a rate of zero in divisions: a power of two, so that it causes no rounding.
_FAINT = 2.0**-60


def divisor(rate: Any) -> Any:
    """Return a learning rate to divide by; a schedule's zero is replaced by a tiny number."""
    return jnp.where(rate == 0, _FAINT, rate) if isinstance(rate, jax.Array) else rate or _FAINT


def never_zero(learning_rate: float | Schedule) -> float | Schedule:
    """Return the rate of local steps; never zero, as ``update / divisor(rate)`` is the gradient."""
    return (
        (lambda visit: divisor(learning_rate(visit))) if callable(learning_rate) else learning_rate
    )


def local_steps(
    learning_rate: float | Schedule, optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation:
    """Return the workers' local optimizer; the default is plain steps.

    Raises
    ------
    InputError
        For a learning rate beside an optimizer, which has its own.
    """
    if optimizer is None:
        return gradient_steps(learning_rate)
    if not (isinstance(learning_rate, float) and learning_rate == LEARNING_RATE):
        raise InputError(
            f"learning_rate = {learning_rate!r}: the optimizer has its own learning rate; give one "
            "of them"
        )
    return optimizer
