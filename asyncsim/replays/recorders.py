"""Recorders: quantities of commits that a replay records besides the loss and the step's length.

A recorder is pure functions of a commit's inputs and outputs. It is computed in the same compiled
piece as the commit, in every form of computing, on every device and in ensembles. Its numbers of
each commit are columns of `Run.commits`; whole vectors, which it shows of a commit now and then,
are summarised in `Run.diagnostics`.

A user's recorder of the cosine between consecutive steps of the central variable::

    def cosine():
        def observe(last, commit):
            lengths = jnp.linalg.norm(last) * jnp.linalg.norm(commit.step)
            return commit.step, [jnp.vdot(last, commit.step) / jnp.maximum(lengths, 1e-30)]

        return Recorder(("cosine",), observe, init=lambda method, central: 0 * central, shared=True)

    replay(trace, method, problem, record=[cosine()])
"""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_count, require_fraction
from asyncsim.methods.method import Array, Method, State, Visit
from asyncsim.problems.problem import Problem
from asyncsim.replays.run import POSITION

#: Quantities of `energy` whose sum over each tensor is recorded; and the quantity that is their
#: ratio at each weight.
ENERGIES, ENERGY_RATIO = ("central_energy", "proxy_energy"), "weight_energy_ratio"


class Commit(NamedTuple):
    """The inputs and outputs of a commit; vectors have shape ``[parameters]``.

    Attributes
    ----------
    visit : Visit
        With the loss in ``visit.loss``.
    loss : float
        Mean loss of the minibatches that the update comes from.
    read, start : Array
        The worker's read, and the start of its local steps: the same unless the worker keeps a
        replica. Without a server both are its replica, mixed if it mixes.
    update : Array
        Sum of its local steps.
    message : tree
        Its message.
    diagnostics : Mapping[str, Array]
        The method's diagnostics of the message.
    origin : Array
        The central variable that the worker measures the server's movement from: its read, unless
        the method has another one.
    before, central : Array
        The central variable before and after the commit.
    step : Array
        ``central - before``; where the server adds the unchanged update, the update, before the sum
        is rounded.
    worker, memory, server : tree
        The method's states after the commit: on this worker, of this worker on the server, and of
        the server.
    proxy : Array
        The momentum that the method keeps of a process to be matched (`Method.proxy`); ``()``
        without one.
    """

    visit: Visit
    loss: Array
    read: Array
    start: Array
    update: Array
    message: State
    diagnostics: Mapping[str, Array]
    origin: Array
    before: Array
    central: Array
    step: Array
    worker: State
    memory: State
    server: State
    proxy: Any


def _no_state(method: Method, central: Array) -> State:
    return ()


def _nothing(state: State, commit: Commit) -> tuple[State, Sequence[Array]]:
    return state, ()


class Recorder(NamedTuple):
    """Quantities to record of commits, as pure functions.

    Attributes
    ----------
    columns : tuple of str
        Names of the numbers that ``observe`` returns: columns of `Run.commits`.
    observe : function
        ``observe(state, commit) -> (state, numbers)``: the new state, and a scalar for each column.
    init : function
        ``init(method, central) -> state``: the state before the first commit, from the method and
        the initial central variable; any tree of arrays.
    shared : bool
        Whether all commits share one state. Else each worker has its own, which only its own
        commits see.
    look : function, optional
        ``look(state, commit) -> {name: vector}``, with the state before ``observe``: vectors of
        shape ``[parameters]``. Their quantiles (of booleans: their shares) over all parameters and
        over each tensor are rows of `Run.diagnostics`.
    every : int
        Worker steps between two looks, plus one commit if there are several workers.
    additive : bool
        Whether each number is a sum over parameters. Then it is also recorded where servers commit
        the parts of a message at different times: ``observe`` sees each part, with states of its
        shard, and the numbers of a message are the sums over its parts.
    name : str
        Its call, for error messages; by default its columns.

    Notes
    -----
    A recorder is part of the compiled program: keep and reuse the object to compile once.
    """

    columns: tuple[str, ...] = ()
    observe: Callable[[State, Commit], tuple[State, Sequence[Array]]] = _nothing
    init: Callable[[Method, Array], State] = _no_state
    shared: bool = False
    look: Callable[[State, Commit], Mapping[str, Array]] | None = None
    every: int = 5
    additive: bool = False
    name: str = ""

    @property
    def title(self) -> str:
        """The name, or else the columns."""
        return self.name or ", ".join(self.columns) or "a recorder without columns"


def half_square(vector: Array) -> Array:
    """Return half the squared norm of a vector: its energy."""
    return jnp.vdot(vector, vector) / 2


def energy(momentum: float = 0.9, tensors: int = 0) -> Recorder:
    """Record the energies of the central variable and of a proxy, the momentum process to match.

    ``central_energy`` is half the square of the central variable's movement since the worker's
    read, including the worker's commit (with GEM since the worker's previous visit, as its rule has
    it). ``proxy_energy`` is half the square of the proxy's momentum ``m <- momentum * m + update``
    over the worker's updates; a method that has a proxy (GEM) is compared with it.

    Parameters
    ----------
    momentum : float
        In [0, 1).
    tensors : int
        Worker steps between two looks at single weights, 0 for none: of each tensor both energies,
        the distribution of their ratio over the weights, and the share of weights whose update
        opposes the central variable's movement.

    References
    ----------
    Hermans and Louppe 2018, arXiv 1805.08469, eq. 12 to 16.
    """
    return _energy(
        require_fraction("momentum", momentum), require_count("tensors", tensors, minimum=0)
    )


@functools.cache  # programs are cached by the recorder object: equal arguments need the same one
def _energy(mu: float, tensors: int) -> Recorder:
    def init(method: Method, central: Array) -> State:
        return () if method.proxy else jnp.zeros_like(central)

    def proxy(state: State, commit: Commit) -> tuple[State, Array]:
        # A method with a proxy needs no state here: its momentum comes with the commit.
        if isinstance(state, tuple):
            return (), commit.proxy
        after = mu * state + commit.update
        return after, after

    def observe(state: State, commit: Commit) -> tuple[State, Sequence[Array]]:
        state, m = proxy(state, commit)
        return state, (half_square(commit.central - commit.origin), half_square(m))

    def look(state: State, commit: Commit) -> Mapping[str, Array]:
        _, m = proxy(state, commit)
        values = (commit.central - commit.origin) ** 2 / 2, m**2 / 2
        opposite = (commit.before - commit.origin) * commit.update < 0
        return dict(zip(ENERGIES, values, strict=True)) | {"opposite_sign": opposite}

    return Recorder(
        ENERGIES,
        observe,
        init,
        look=look if tensors else None,
        every=max(tensors, 1),
        additive=True,
        name=f"energy(tensors={tensors})" if tensors else "energy()",
    )


def chosen() -> Recorder:
    """Record the part of Byzantine messages in the last version, of methods that combine by a rule.

    ``byzantine_share``: their part of the rule's result (the part of the selected messages, or the
    mean over coordinates); ``byzantine_messages``: their part of the messages; ``not_finite``: the
    number of messages that were not finite.
    """
    return _CHOSEN


def _chosen_state(method: Method, central: Array) -> State:
    if method.rounds is None:
        raise InputError(
            f"record: chosen() is for methods that combine messages by a rule, not {method.name}"
        )
    return ()


def _observe_chosen(state: State, commit: Commit) -> tuple[State, Sequence[Array]]:
    server = commit.server
    return (), (server.byzantine_share, server.byzantine_messages, server.not_finite)


_CHOSEN = Recorder(
    ("byzantine_share", "byzantine_messages", "not_finite"),
    _observe_chosen,
    init=_chosen_state,
    name="chosen()",
)


def diagnostics(every: int = 5) -> Recorder:
    """Record the method's diagnostics of messages (GEM: scaling factors), of a commit now and then.

    Parameters
    ----------
    every : int
        Worker steps between two recorded commits, plus one commit if there are several workers.
    """
    return _diagnostics(require_count("every", every))


@functools.cache
def _diagnostics(every: int) -> Recorder:
    return Recorder(look=show_diagnostics, every=every, name="diagnostics()")


def show_diagnostics(state: State, commit: Commit) -> Mapping[str, Array]:
    """Return the method's diagnostics of a message."""
    return commit.diagnostics


def directions(problem: Problem, target: Any = None, every: int = 5) -> Recorder:
    """Record the direction of updates, as cosines.

    ``gradient_cosine``: of a worker's update with the descent direction of the whole training loss
    where its local steps began. ``target_cosine``: of the update with the way from the central
    variable that it meets to the target. ``previous_cosine``: of the central variable's step with
    its previous one. NaN at other commits, and where a vector is zero.

    Parameters
    ----------
    problem : Problem
        The problem of the replay. The gradient of its evaluation costs as much as a gradient on
        all examples; a non-trained state is the initial one.
    target : tree, optional
        Parameters like the problem's, such as the final ones of the same replay without this
        recorder.
    every : int
        Steps of a worker between two recorded commits.
    """
    require_count("every", every)
    names = ["gradient_cosine", "previous_cosine"]
    if target is not None:
        names.append("target_cosine")
        shapes, expected = (jax.tree.map(jnp.shape, tree) for tree in (target, problem.shapes))
        if shapes != expected:
            raise InputError(
                f"target: parameters of shapes {shapes}: must be like the problem's, {expected}"
            )

    def in_precision(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.asarray(
                leaf, dtype if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else None
            ),
            tree,
        )

    def descent(vector: Array) -> Array:
        shapes = problem.shapes
        _, unravel = ravel_pytree(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, vector.dtype), shapes)
        )
        data = in_precision(problem.train, vector.dtype)
        state = in_precision(problem.init_state(), vector.dtype) if problem.init_state else None
        return -jax.grad(lambda x: problem.evaluate(unravel(x), state, data)["loss"])(vector)

    def observe(previous: Array, commit: Commit) -> tuple[State, Sequence[Array]]:
        dtype = commit.central.dtype

        def cosines() -> Array:
            pairs = [(commit.update, descent(commit.start)), (commit.step, previous)]
            if target is not None:
                vector, _ = ravel_pytree(in_precision(target, dtype))
                pairs.append((commit.update, vector - commit.before))
            lengths = [jnp.linalg.norm(a) * jnp.linalg.norm(b) for a, b in pairs]
            return jnp.stack([jnp.vdot(a, b) / n for (a, b), n in zip(pairs, lengths, strict=True)])

        # A conditional: commits between the recorded ones cost no gradient.
        numbers = jax.lax.cond(
            commit.visit.worker_step % every == 0,
            cosines,
            lambda: jnp.full(len(names), jnp.nan, dtype),
        )
        return commit.step, list(numbers)

    def init(method: Method, central: Array) -> Array:
        if central.size != problem.parameter_count:
            raise InputError(
                f"record: directions(problem): the problem {problem.name!r} has "
                f"{counted(problem.parameter_count, 'parameter')}, and that of the replay "
                f"{central.size:,}; give the recorder the problem of the replay"
            )
        return jnp.zeros_like(central)

    # Shared states are updated commit by commit, which keeps the conditional one.
    return Recorder(tuple(names), observe, init, shared=True, name="directions()")


def positions(dimensions: int = 48) -> Recorder:
    """Record the central variable relative to its start, in few coordinates that keep distances.

    Each coordinate is the sum of a part of the parameters with random signs, the same in all runs:
    the mean square keeps a vector's length, with a relative deviation of about
    ``sqrt(1 / (2 dimensions))``. A worker's read is the central variable of its version, so these
    coordinates give all distances between reads and the central variable: a page's animation draws
    them.

    Parameters
    ----------
    dimensions : int
        Columns ``position_0``, ``position_1``, ...
    """
    return _positions(require_count("dimensions", dimensions))


@functools.cache
def _positions(dimensions: int) -> Recorder:
    def sketch(vector: Array, signs: Array) -> Array:
        # Padded and folded, not multiplied by a matrix: one pass over the vector.
        signed = jnp.pad(vector * signs.astype(vector.dtype), (0, -vector.shape[0] % dimensions))
        return signed.reshape(-1, dimensions).sum(0)

    def init(method: Method, central: Array) -> State:
        signs = jax.random.rademacher(
            jax.random.key(zlib.crc32(b"positions")), central.shape, jnp.int8
        )
        return signs, sketch(central, signs)

    def observe(state: State, commit: Commit) -> tuple[State, Sequence[Array]]:
        signs, start = state
        return state, list(sketch(commit.central, signs) - start)

    return Recorder(
        tuple(f"{POSITION}{place}" for place in range(dimensions)),
        observe,
        init,
        shared=True,
        name="positions()",
    )
