"""What a method is: pure functions from arrays to arrays, and the visit they see.

A method never sees a clock, a queue or a data set. Inside the replay parameters are one flat vector,
so that a method reads like its formula.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.errors import InputError, require_positive
from asyncsim.clusters.policy import Policy, parse_policy


def require_rate(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is a positive number or a schedule (a function of the Visit)."""
    if not callable(value):
        require_positive(argument, value)


def require_policy(policy: Policy | str | None) -> Policy | None:
    """Return the timing policy that a method needs, which may be given as text; None for any.

    Raises
    ------
    InputError
        For anything else.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise InputError(f"policy = {policy!r}: must be a policy, such as asyncsim.buffered(10), or None for any")
    try:
        return parse_policy(policy)
    except InputError as error:
        raise InputError(f"policy = {policy!r}: {str(error).removeprefix(f'policy = {policy!r}: ')}") from None


def require_optimizer(argument: str, value: Any) -> Any:
    """Return ``value``; raise InputError unless it is a transformation of optax."""
    if not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise InputError(f"{argument} = {value!r}: must be an optimizer of optax, such as optax.adam(1e-3)")
    return value


Array = jax.Array
State = Any  #: any tree of arrays, ``()`` for none
Schedule = Callable[["Visit"], Array]

#: Of plain local steps, unless another is asked for.
LEARNING_RATE = 0.05


class Visit(NamedTuple):
    """The server visit that commits an update: all that a method may know of time. Scalars.

    Attributes
    ----------
    staleness : int
        Versions between the read that the gradient came from and the apply.
    worker, worker_step : int
        Who commits, and how many commits of its own the server took up before.
    commit : int
        How many commits the server took up before.
    time : float
        Time of the apply (s).
    local_steps : int
        Gradients in the update.
    completes : bool
        Whether this message completes a version: methods that average step then, and only then. Under a policy that
        makes one version of several messages, those that only enter the buffer do not: reads see the central variable
        as the last completing message left it, whatever ``apply`` has done with later ones. (Messages formed in the
        visit see it as it is.)
    place, messages : int
        The message's place in the version that it belongs to, from zero, and the number of messages of that version;
        of the last version of a trace, if it is incomplete, the messages before its end.
    counted : Bool[Array, "workers"]
        On a trace from which workers are away at times, whom the server counts; ``()`` elsewhere, where it counts all.
        `count_living` says how many.
    kept : float
        Without a server, the share of its own state that the worker kept when it sent the rest; else ``()``.
    workers : int
        How many take part in the training.
    loss : float
        Mean loss of the minibatches that the update comes from. Told to message, apply and reply of methods that say
        ``sees_loss``; ``()`` elsewhere.
    key : jax.random.key
        For random numbers of methods that say ``needs_key``; ``()`` for others. It depends on the run's seed, the
        worker and ``worker_step`` alone: two methods with one seed draw the same, and another worker changes nobody's
        numbers. All functions of a visit have the same, and those that draw apart fold a number into it; only the
        optimizer has one for each local step of a window. There is no key of the whole run: ``init_worker`` and the
        others have none.
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
    loss: Array | tuple[()] = ()
    key: Array | tuple[()] = ()


#: Fields of which the ``visits`` of `Method.combine` have one value for each message.
OF_MESSAGE = ("staleness", "worker", "worker_step", "commit", "time", "local_steps", "loss")


def completing(visits: Visit) -> Visit:
    """Return the visit that completes a version, from those of `Method.combine`."""
    last = visits.messages - 1
    return visits._replace(**{name: jax.tree.map(lambda own: own[last], getattr(visits, name)) for name in OF_MESSAGE})


def present(messages: State, visits: Visit) -> Array:
    """Return the mask of the rows of ``messages`` that belong to the version; see `Method.combine`."""
    return jnp.arange(jax.tree.leaves(messages)[0].shape[0], dtype=jnp.int32) < visits.messages


def count_living(visit: Visit) -> Array:
    """Return how many workers the server counts at a visit: all, but for those that it knows to be away."""
    return jnp.asarray(visit.workers) if isinstance(visit.counted, tuple) else jnp.sum(visit.counted, dtype=jnp.int32)


class Memories(NamedTuple):
    """The memory of every worker, as its last commit left it or, before its first, as ``init_memory`` made it.

    In the replay it lies in two places: an array of all workers would have to be copied at every commit.

    Attributes
    ----------
    rows : tree
        Memories of some commits ago; leaves with leading axis ``workers``.
    newer : tree
        Those of the commits since; leaves with leading axis ``commits``, not all of which are there yet.
    worker : Int[Array, "commits"]
        Whose the newer ones are, each worker's once; ``workers`` where there is none yet.
    """

    rows: State
    newer: State
    worker: Array

    def of(self, worker: Array) -> State:
        """Return the memory of one worker."""
        newer = self.worker == worker
        is_newer, place = jnp.any(newer), jnp.argmax(newer)
        return jax.tree.map(lambda all_, new: jnp.where(is_newer, new[place], all_[worker]), self.rows, self.newer)

    def of_all(self, name: str) -> Array:
        """Return one field of all memories, NamedTuples, with a leading axis of workers.

        For numbers: of vectors, for their median say, it is a copy.
        """
        rows, newer = getattr(self.rows, name), getattr(self.newer, name)
        return rows.at[self.worker].set(newer, mode="drop")


#: Of a parameter, unless a study has another type.
_BITS = 32


@dataclass(frozen=True)
class Timing:
    """The timing that a method needs; None means that any will do.

    Attributes
    ----------
    workers, protocol, window, discipline, read_blocks, policy
        Fields of the trace's `asyncsim.Cluster`; other traces are refused. The policy may be a text.
    message_size : float
        Of the message, in vectors of parameters as they are sent down: 1/16 for two bits in the place of a number of
        32. Studies with a bandwidth give the method traces whose messages take so long on their way up; a replay takes
        any.
    message_share : function
        ``message_share(bits) -> float``: the ``message_size`` where a parameter has ``bits``. By default the message
        has the same number of bits as with 32-bit parameters, and at most that of all parameters.
    far_every, groups : int
        On a cluster with sites, of each worker's visits only every so many-th goes beyond its site, if each of so many
        groups of neighbours, worker ``i`` of ``n`` being in ``i * groups // n``, is at one site. Given together. A
        replay takes any trace.
    fewest_workers : int
        Workers that there must be at the least.
    """

    workers: int | None = None
    protocol: str | None = None
    window: int | None = None
    discipline: str | None = None
    read_blocks: int | None = None
    policy: Policy | None = None
    message_size: float | None = None
    message_share: Callable[[int], float] | None = None
    far_every: int | None = None
    groups: int | None = None
    fewest_workers: int | None = None

    if TYPE_CHECKING:  # what may be given; the fields say what is kept

        def __init__(
            self,
            workers: int | None = None,
            protocol: str | None = None,
            window: int | None = None,
            discipline: str | None = None,
            read_blocks: int | None = None,
            policy: Policy | str | None = None,
            message_size: float | None = None,
            message_share: Callable[[int], float] | None = None,
            far_every: int | None = None,
            groups: int | None = None,
            fewest_workers: int | None = None,
        ): ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", require_policy(self.policy))

    def size_of_message(self, bits: int) -> float | None:
        """Return the size of the message, in vectors of parameters of ``bits`` each; None for any."""
        if self.message_size is None or bits == _BITS:
            return self.message_size
        return min(1.0, self.message_size * _BITS / bits) if self.message_share is None else self.message_share(bits)


#: Of a method's timing, what only says how long messages travel: any trace will do.
OF_JOURNEYS = ("message_size", "message_share", "far_every", "groups")


class Applied(NamedTuple):
    """What the server holds after an apply."""

    central: Array
    server: State = ()
    memory: State = ()


def _no_state(central: Array) -> State:
    return ()


def add(server: State, central: Array, message: Array, memory: State, visit: Visit) -> Applied:
    """Add the message to the central variable: the server of most methods."""
    return Applied(central + message, server, memory)


def send_update(worker: State, update: Array, start: Array, central: Array, visit: Visit):
    """Send the sum of the local steps as it is."""
    return update, worker, {}


class Rounds(NamedTuple):
    """What a method has that combines messages by a robust rule; see `asyncsim.methods.robust`.

    Attributes
    ----------
    require : function
        ``require(workers, policy)`` raises InputError if the versions of such a cluster have too few messages.
    attacked : function
        ``attacked(byzantine)`` returns the method that records how much the messages of the Byzantine workers, a mask
        of all workers, counted.
    """

    require: Callable[[int, Policy], None]
    attacked: Callable[[Any], "Method"]


class Method(NamedTuple):
    """One algorithm, as pure functions closed over its hyper-parameters.

    A commit runs through them in this order, vectors having shape ``[parameters]``::

        start = resume(worker, read)                  # else what the worker read from the server
        update = sum of the local optimizer's steps, from start
        message, worker, diagnostics = message(worker, update, start, central, visit)
        central, server, memory = apply(server, central, message, memory, visit)    # or combine
        read = reply(server, central, memory, visit)  # else the central variable, for the worker's next commit

    Without a server (`asyncsim.topologies`) ``mix`` comes first, or ``meet`` in the place of ``apply`` before
    ``message``. The central variable is then the mean of the workers' replicas and of the messages in flight
    (`asyncsim.replays.central`); ``apply`` and the memory are not used.

    Attributes
    ----------
    name : str
    hyperparameters : Mapping[str, Any]
        For tables and files: numbers, texts, lists of them. An array is written as the list of all its entries.
    optimizer : optax.GradientTransformation
        The worker's local optimizer, applied to the problem's own tree; its state stays with the
        worker. ``update`` is called with ``visit=``, and with ``start=``, the parameters from which the visit's local
        steps began, if it takes extra arguments.
    message : function
        What the worker sends, formed with the central variable as it is at the visit; a vector or any
        tree of arrays. The diagnostics, named vectors (shares if boolean), are recorded now and then.
    apply : function
        What the server does. ``server`` is shared (buffers, counters, moments); ``memory`` is what the
        server keeps for this one worker (its last gradient, say): a method that needs a table of all workers'
        gradients keeps each row there and what it needs of all of them, their sum say, in ``server``.
    combine : function, optional
        ``combine(server, central, messages, visits) -> Applied``, in the place of ``apply``: what the server makes of
        the messages of a version, once the message that completes it has come. Until then messages wait. ``messages``
        is a message with an axis of messages in front, in the order of their visits; behind those of the version
        (``visits.messages``, see `present`) are rows without meaning. ``visits`` is the visit that completes the
        version, of which ``staleness``, ``worker``, ``worker_step``, ``commit``, ``time``, ``local_steps`` and ``loss``
        have the same axis. The memory of `Applied` is not used.
    receive : function, optional
        ``receive(memory, message, visit) -> (message, memory)``: with ``combine``, the message that waits in the place
        of the one sent, and the memory of its worker. By default the message, and the memory stays.
    init_worker, init_server, init_memory : function
        From the initial central variable to the initial states.
    resume : function, optional
        ``resume(worker, read)``: where the worker starts from, for methods whose replicas live on. With ``mix`` nothing
        is read: None.
    look_ahead : function, optional
        ``look_ahead(optimizer_state)``: how far from the parameters the gradient of a local step is computed, a tree
        like theirs.
    reply : function, optional
        ``reply(server, central, memory, visit)``: what the worker reads at its visit in the place of the central
        variable, with the states as they are at the read: after its own commit, or before it if the protocol is to read
        then write. A worker's first read is the initial central variable. Reads that are visits of their own have no
        reply: such traces are refused.
    origin : function, optional
        ``origin(worker, read)``: the central variable that the worker measures the server's movement from;
        else the one it read.
    proxy : function, optional
        ``proxy(worker)``: the momentum of the process to be matched, for methods that keep it; for the others
        `asyncsim.recorders.energy` does, if it is asked for.
    mix : function, optional
        ``mix(worker, inbox, visit) -> worker``, for workers that send each other messages: the worker's state before
        its gradient. ``inbox`` is the sum of the messages that it takes up, each times its weight; ``visit.kept`` its
        share of its own state. ``message`` is what it sends to its neighbours, a tree of floating-point arrays.
    replica : function, optional
        ``replica(message)``: with ``mix``, the worker's replica in its message, a vector; or for push-sum the biased
        replica and its weight. A selection, as it is also called with sums of messages. By default the message, or the
        first entry of a message that is a tuple.
    last : function, optional
        ``last(worker)``: with ``mix``, the worker's last message, or its initial one, from the worker's state. By
        default the replay keeps it, which costs a vector of each worker.
    meet : function, optional
        ``meet(own, other, visit) -> (own, other)``, for workers that meet in pairs: the states of both, which are their
        replicas, vectors, at once, when the first commits, before its ``message``. What it reads for its next gradient
        is its message.
    timing : Timing
        What the trace must provide.
    sees_loss : bool
        Whether visits tell the loss, for methods whose values depend on it.
    sees_memories : bool
        Whether ``apply`` takes a sixth argument, the `Memories` of all workers as they are before this commit.
    needs_key : bool
        Whether visits have a key, for methods that draw random numbers.
    rounds : Rounds, optional
        Of methods that combine a version's messages at once.
    honest : tuple of bool, optional
        Without a server and under attack, the workers whose replicas and messages count for the central variable; set
        by the replay.
    recipe : Recipe, optional
        How it was made; see `asyncsim.methods.shares_programs`.
    """

    name: str
    hyperparameters: Mapping[str, Any]
    optimizer: optax.GradientTransformation
    message: Callable[..., tuple[State, State, Mapping[str, Array]]] = send_update
    apply: Callable[..., Applied] = add
    combine: Callable[[State, Array, State, Visit], Applied] | None = None
    receive: Callable[[State, State, Visit], tuple[State, State]] | None = None
    init_worker: Callable[[Array], State] = _no_state
    init_server: Callable[[Array], State] = _no_state
    init_memory: Callable[[Array], State] = _no_state
    resume: Callable[[State, Any], Array] | None = None
    look_ahead: Callable[[State], Any] | None = None
    reply: Callable[[State, Array, State, Visit], Array] | None = None
    origin: Callable[[State, Array], Array] | None = None
    proxy: Callable[[State], Array] | None = None
    mix: Callable[[State, State, Visit], State] | None = None
    meet: Callable[[State, State, Visit], tuple[State, State]] | None = None
    replica: Callable[[State], Any] | None = None
    last: Callable[[State], State] | None = None
    timing: Timing = Timing()
    sees_loss: bool = False
    sees_memories: bool = False
    needs_key: bool = False
    rounds: Rounds | None = None
    honest: tuple[bool, ...] | None = None
    recipe: Any = None

    def __repr__(self) -> str:
        """Return the name with the hyper-parameters, not the functions."""
        values = (f"{name}={value!r}" for name, value in self.hyperparameters.items())
        return f"Method({self.name}: {', '.join(values)})"


def gradient_steps(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Return plain gradient descent as an optax transformation: the step is ``-learning_rate * gradient``.

    Parameters
    ----------
    learning_rate : float or function
        A schedule is a function of the Visit, ``lambda visit: 0.1 / (1 + 0.01 * visit.worker_step)`` say. (JAX divides
        whole numbers in float32, ``visit.worker_step / 100``, also in float64 runs.)

    Raises
    ------
    InputError
        For a learning rate that is not above zero.
    """
    require_rate("learning_rate", learning_rate)

    def update(gradients, state, params=None, *, visit=None, **_):
        return jax.tree.map(lambda gradient: -rate_at(learning_rate, visit, gradient) * gradient, gradients), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def rate_at(learning_rate: Any, visit: Any, like: Array) -> Any:
    """Return the learning rate at a visit; of the type of ``like`` if traced, so that no schedule ever promotes."""
    rate = learning_rate(visit) if callable(learning_rate) else learning_rate
    return rate.astype(like.dtype) if isinstance(rate, jax.Array) else rate


#: In the place of a rate that is zero: a power of two, so that nothing is rounded by it.
_FAINT = 2.0**-60


def divisor(rate: Any) -> Any:
    """Return a learning rate to divide by: a faint one in the place of the zero of a schedule."""
    return jnp.where(rate == 0, _FAINT, rate) if isinstance(rate, jax.Array) else rate or _FAINT


def never_zero(learning_rate: float | Schedule) -> float | Schedule:
    """Return the rate of local steps whose gradients are needed, ``update / divisor(rate)``, where it is zero too."""
    return (lambda visit: divisor(learning_rate(visit))) if callable(learning_rate) else learning_rate


def local_steps(
    learning_rate: float | Schedule, optimizer: optax.GradientTransformation | None
) -> tuple[dict[str, Any], optax.GradientTransformation]:
    """Return the workers' local optimizer and the hyper-parameters that name it: plain steps unless one is given.

    Raises
    ------
    InputError
        For a learning rate that is not above zero, or that was changed although an optimizer has its own; for what is
        no optimizer.
    """
    require_rate("learning_rate", learning_rate)
    if optimizer is None:
        return {"learning_rate": learning_rate}, gradient_steps(learning_rate)
    if not (isinstance(learning_rate, float) and learning_rate == LEARNING_RATE):
        raise InputError(
            f"learning_rate = {learning_rate!r}: the optimizer that is given has its own; give one of them"
        )
    # One that was asked for by its name says so.
    named = dict(getattr(optimizer, "hyperparameters", {"optimizer": "optax"}))
    return named, require_optimizer("optimizer", optimizer)
