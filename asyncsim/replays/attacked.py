"""Replays under attack: methods and problems with Byzantine workers; see `asyncsim.attacks`."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError
from asyncsim.base.files import field_values
from asyncsim.base.threads import cached
from asyncsim.byzantine.attacks import Attack, WeakAttackWarning
from asyncsim.methods.buffer import group_means
from asyncsim.methods.declared import recast
from asyncsim.methods.method import Array, Memories, Method, State, present
from asyncsim.problems.problem import BatchIndices, Problem
from asyncsim.replays.central import summed, weighed
from asyncsim.replays.check import check_method
from asyncsim.replays.programs import IdentityKey, on_vectors
from asyncsim.traces.trace import Trace


def under_attack(
    method: Method, problem: Problem, attack: Attack | None, workers: int
) -> tuple[Method, Problem]:
    """Return a method and a problem with Byzantine workers; equal arguments give the same objects.

    Attacked methods that differ in numbers alone share a program, as they do without an attack.
    """
    if attack is None:
        return method, problem
    byzantine = tuple(attack.byzantine(workers).tolist())
    if attack.labels:
        problem = _flipped(IdentityKey(problem), attack.text, byzantine)
    return _cached_attacked(IdentityKey(method), IdentityKey(attack), byzantine), problem


def among_the_living(method: Method, trace: Trace, attack: Attack | None) -> Method:
    """Return the method whose central variable is the mean of the living, if workers are ever away.

    This concerns traces without a server. A method under attack has the mean of the honest already.
    """
    if trace.protocol != "gossip" or trace.spells.empty or attack is not None:
        return method
    return _cached_weighed(IdentityKey(method), trace.workers)


@cached(maxsize=64)
def _cached_weighed(method_key: IdentityKey, workers: int) -> Method:
    return recast(
        method_key.value, ("weighed", workers), lambda method: weighed(method, (True,) * workers)
    )


def require_attackable(method: Method, problem: Problem, attack: Attack, workers: int) -> None:
    """Raise InputError unless a method can be replayed under an attack."""
    method = on_vectors(method, problem, jnp.result_type(float))
    attacked, problem = under_attack(method, problem, attack, workers)
    check_method(attacked, problem.shapes, workers)


def _forged(
    attack: Attack,
    byzantine: np.ndarray,
    known: tuple[Array, Array],
    messages: Array,
    senders: Array,
    key: Any,
) -> Array:
    """Return messages of which an attack that sees all has changed the Byzantine ones.

    Without an honest message that the attackers know, none is changed.

    Parameters
    ----------
    known : tuple of Array
        What the attackers know: a message of each worker, ``[workers, parameters]``, and the mask
        of those present.
    messages, senders : Array
        Shapes ``[n, parameters]`` and ``[n]``, or without ``n``; a sender beyond the workers is
        honest.

    Raises
    ------
    InputError
        The attack returns another shape.
    """
    assert attack.change is not None
    (table, is_present), is_bad = known, jnp.asarray(byzantine)
    honest = is_present & ~is_bad
    changed = attack.change(table, honest, is_present & is_bad, key)
    if jnp.shape(changed) != jnp.shape(table):
        raise InputError(
            f"attack = {attack.text}: change returned an array of shape {jnp.shape(changed)}; it "
            f"must return {jnp.shape(table)}, a message for each worker"
        )
    is_changed = _is_byzantine(byzantine, senders) & jnp.any(honest)
    return jnp.where(is_changed[..., None], changed.at[senders].get(mode="clip"), messages)


def _is_byzantine(byzantine: np.ndarray, senders: Array) -> Array:
    return jnp.asarray(byzantine).at[senders].get(mode="fill", fill_value=False)


@cached(maxsize=64)
def _cached_attacked(
    method_key: IdentityKey, attack_key: IdentityKey, mask: tuple[bool, ...]
) -> Method:
    method, attack, byzantine = method_key.value, attack_key.value, np.array(mask)
    return recast(method, (attack_key, mask), lambda method: _attacked(method, attack, byzantine))


def _attacked(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    if method.gossips:
        return _without_server(method, attack, byzantine)
    if attack.corrupt is not None:
        method = _own_changed(method, attack, byzantine)
    if method.rounds is not None:
        # The rule is rebuilt with the Byzantine workers, for its diagnostics; the changed message
        # and its key stay.
        functions = {name: getattr(method, name) for name in ("message", "name", "needs_key")}
        method = method.rounds.attacked(byzantine)._replace(**functions)
    if attack.change is None:
        return method
    return (
        _last_changed(method, attack, byzantine)
        if method.combine is None
        else _waiting_changed(method, attack, byzantine)
    )


def _require_vectors(method: Method, attack: Attack, message: Any, shape: tuple[int, ...]) -> None:
    """Raise InputError unless messages are vectors of parameters."""
    if getattr(message, "shape", None) != shape:
        raise InputError(
            f"attack = {attack.text!r}: needs messages that are vectors of parameters, and those "
            f"of {method.name} "
            "are not; choose one of the own message: sign_flip, zero"
        )


def _waiting_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers see a version's messages and change theirs."""
    combined = method.combine
    assert combined is not None

    def combine(server, central, messages, visits):
        rows = jax.tree.leaves(visits.worker)[0].shape[0]
        _require_vectors(method, attack, messages, (rows, *central.shape))
        # A worker may have several messages in a version: attacks see the mean of each worker.
        means, number = group_means(
            messages, present(messages, visits), visits.worker, len(byzantine)
        )
        known = means, number > 0
        messages = _forged(attack, byzantine, known, messages, visits.worker, visits.key)
        return combined(server, central, messages, visits)

    return method._replace(combine=combine, needs_key=True)


def _own_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers change their own messages."""

    def message(worker, update, start, central, visit):
        sent, worker, diagnostics = method.message(worker, update, start, central, visit)
        return (
            _changed_leaves(sent, attack, jnp.asarray(byzantine)[visit.worker], visit.key),
            worker,
            diagnostics,
        )

    return method._replace(message=message, needs_key=True)


def _changed_leaves(message: State, attack: Attack, is_bad: Array, key: Any) -> State:
    """Return a message whose floating-point arrays a Byzantine worker has changed separately."""
    assert attack.corrupt is not None
    leaves, tree = jax.tree.flatten(message)
    changed = [
        jnp.where(is_bad, attack.corrupt(leaf, jax.random.fold_in(key, _ATTACK_DRAWS + i)), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, changed)


#: Folded into a visit's key for draws of attacks: independent of the method's draws.
_ATTACK_DRAWS = 2**30


def _without_server(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method without a server under an attack on workers' messages or labels.

    Raises
    ------
    InputError
        Workers meet in pairs and send no messages.
    """
    changed, honest = method, tuple((~byzantine).tolist())
    if method.meet is not None and not attack.labels:
        raise InputError(
            f"attack = {attack.text!r}: changes messages, and workers of {method.name} meet in "
            "pairs; choose label_flip, or a method whose workers send messages, such as sgp"
        )
    if attack.corrupt is not None:
        changed = _own_changed(changed, attack, byzantine)
    if attack.change is not None:
        changed = _inbox_changed(changed, attack, byzantine)
    # Last, as it removes ``last``, which the attack on inboxes needs.
    return weighed(changed, honest)


def _inbox_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers form a message for each receiver.

    The senders know the latest message of each honest sender that the receiver takes up in the same
    step, and the receiver's last message.
    """
    mix, last = method.mix, method.last
    assert mix is not None
    if last is None:
        raise InputError(
            f"attack = {attack.text!r}: knows the receiver's last message, and {method.name} does "
            "not give it; add "
            "last=lambda worker: ... to the method"
        )

    def attacked_mix(worker, inbox, visit):
        workers = len(byzantine)

        def formed_for_the_receiver() -> State:
            replica, unravel = ravel_pytree(last(worker))
            vectors = jax.vmap(lambda message: ravel_pytree(message)[0])(inbox.messages)
            # Scatters with equal indices have no order: older messages of a sender are dropped.
            later = jnp.triu(inbox.senders[:, None] == inbox.senders, 1)
            latest = jnp.where(jnp.any(later, axis=1), workers, inbox.senders)
            states = jnp.zeros((workers, replica.size), replica.dtype)
            states = states.at[latest].set(vectors, mode="drop").at[visit.worker].set(replica)
            is_present = jnp.zeros(workers, bool).at[latest].set(True, mode="drop")
            is_present = is_present.at[visit.worker].set(True)
            known = states, is_present
            return jax.vmap(unravel)(
                _forged(attack, byzantine, known, vectors, inbox.senders, visit.key)
            )

        # Most inboxes have no Byzantine sender: a conditional skips the attack for them.
        from_bad = jnp.any(_is_byzantine(byzantine, inbox.senders))
        messages = jax.lax.cond(from_bad, formed_for_the_receiver, lambda: inbox.messages)
        inbox = inbox._replace(messages=messages)
        return mix(worker, inbox if method.sees_messages else summed(inbox), visit)

    return method._replace(mix=attacked_mix, sees_messages=True, needs_key=True)


def warn_of_weakness(attack: Attack | None, workers: int) -> None:
    """Warn of an attack without effect on this number of workers."""
    if attack is not None:
        attack.byzantine(workers)  # raises a clearer error for too few workers
    if weakness := weakness_text(attack, workers):
        warnings.warn(weakness, WeakAttackWarning, stacklevel=3)


def weakness_text(attack: Attack | None, workers: int) -> str:
    """Return the reason why an attack has no effect on this number of workers, or ``""``."""
    reason = "" if attack is None else attack.weakness(workers)
    return f"attack = {attack.text!r}: {reason}" if attack is not None and reason else ""


class LastMemory(NamedTuple):
    """A worker's memory under an attack that knows the last messages."""

    method: State  #: the memory of the method
    last: Array  #: the last message as an honest worker sends it, shape ``[parameters]``
    sent: Array  #: whether the worker has sent a message


def _last_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers change messages by all workers' last ones."""

    def init_memory(central: Array) -> LastMemory:
        return LastMemory(method.init_memory(central), jnp.zeros_like(central), jnp.bool_(False))

    def apply(server, central, message, memory, visit, memories):
        _require_vectors(method, attack, message, central.shape)

        def changed() -> Array:
            messages = memories.of_all("last").at[visit.worker].set(message)
            has_sent = memories.of_all("sent").at[visit.worker].set(True)
            known = messages, has_sent
            return _forged(attack, byzantine, known, message, visit.worker, visit.key)

        sent = jax.lax.cond(_is_byzantine(byzantine, visit.worker), changed, lambda: message)
        method_memories: tuple[Memories, ...] = ()
        if method.sees_memories:
            method_memories = (
                Memories(memories.rows.method, memories.newer.method, memories.worker),
            )
        applied = method.apply(server, central, sent, memory.method, visit, *method_memories)
        # The honest message is remembered, so that attacks never build on their own forgeries.
        return applied._replace(memory=LastMemory(applied.memory, message, jnp.bool_(True)))

    reply = method.reply
    return method._replace(
        apply=apply,
        init_memory=init_memory,
        reply=None
        if reply is None
        else lambda server, central, memory, visit: reply(server, central, memory.method, visit),
        sees_memories=True,
        needs_key=True,
    )


class DoubledExamples(NamedTuple):
    """All examples with the true labels, then all with reversed labels."""

    examples: Any


class _FlippedRows:
    """`BatchIndices` whose Byzantine workers draw from the second half of `DoubledExamples`."""

    def __init__(self, rows: BatchIndices, shifts: np.ndarray):
        self._rows, self._shifts = rows, shifts

    def rows(self, worker: Any, *arguments: Any) -> np.ndarray:
        """Return the example indices; see `BatchIndices.rows`."""
        return self._rows.rows(worker, *arguments) + self._shifts[np.asarray(worker)][:, None, None]


@dataclasses.dataclass(frozen=True, eq=False)
class _Flipped(Problem):
    honest: Any = None  #: the problem with honest workers
    byzantine: tuple[bool, ...] = ()

    def batch_indices(self, seed: int, workers: int) -> Any:
        """Return the problem's indices, shifted for Byzantine workers."""
        shifts = self.honest.examples * np.array(self.byzantine, np.int32)
        return _FlippedRows(self.honest.batch_indices(seed, workers), shifts)


@cached(maxsize=8)
def _flipped(problem_key: IdentityKey, text: str, byzantine: tuple[bool, ...]) -> Problem:
    """Return the problem whose Byzantine workers have reversed labels; its data are held twice."""
    problem = problem_key.value
    label = problem.train.get("label") if isinstance(problem.train, Mapping) else None
    if label is None or np.asarray(label).dtype.kind not in "iu":
        raise InputError(
            f"attack = {text!r}: {problem.name} has no whole numbers in train['label'] to reverse"
        )
    examples = problem.examples
    twice = {name: np.concatenate([array, array]) for name, array in problem.train.items()}
    twice["label"][examples:] = np.max(label) - np.asarray(label)

    def loss(params: Any, *arguments: Any) -> Any:
        *state, batch, key = arguments
        return problem.loss(params, *state, batch.examples, key)

    def evaluate(params: Any, state: Any, data: Any) -> Any:
        if isinstance(data, DoubledExamples):
            # Evaluations see the true labels alone.
            data = jax.tree.map(lambda array: array[:examples], data.examples)
        return problem.evaluate(params, state, data)

    fields = field_values(problem, Problem)
    # The honest problem divides its examples among workers; the flipped one must not do it again.
    undivided = {"split": None}
    changed = dict(loss=loss, evaluate=evaluate, train=DoubledExamples(twice), **undivided)
    return _Flipped(**(fields | changed), honest=problem, byzantine=byzantine)
