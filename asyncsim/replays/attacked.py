"""Replays under attack: a method, and a problem, some of whose workers are Byzantine; see `asyncsim.attacks`."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError
from asyncsim.base.threads import cached
from asyncsim.byzantine.attacks import Attack, WeakAttackWarning
from asyncsim.methods.buffer import group_means
from asyncsim.methods.check import check_method
from asyncsim.methods.method import Array, Memories, Method, State, present
from asyncsim.methods.recipe import recast
from asyncsim.problems.problem import BatchIndices, Problem
from asyncsim.replays.central import summed, weighed
from asyncsim.replays.programs import Same
from asyncsim.traces.trace import Trace


def under_attack(method: Method, problem: Problem, attack: Attack | None, workers: int) -> tuple[Method, Problem]:
    """Return a method and a problem of which some workers are Byzantine; the same objects for the same ones.

    Attacked methods that differ in numbers alone share a program, as they do without an attack.
    """
    if attack is None:
        return method, problem
    byzantine = tuple(attack.byzantine(workers).tolist())
    if attack.labels:
        problem = _flipped(Same(problem), attack.text, byzantine)
    return _same_attacked(Same(method), Same(attack), byzantine), problem


def among_the_living(method: Method, trace: Trace, attack: Attack | None) -> Method:
    """Return a method whose central variable is the mean of the living, if workers without a server are ever away.

    A method under attack has that mean already, of the honest.
    """
    if trace.protocol != "gossip" or trace.spells.empty or attack is not None:
        return method
    return _same_weighed(Same(method), trace.workers)


@cached(maxsize=64)
def _same_weighed(same_method: Same, workers: int) -> Method:
    return recast(same_method.value, ("weighed", workers), lambda method: weighed(method, (True,) * workers))


def require_attackable(method: Method, problem: Problem, attack: Attack, workers: int) -> None:
    """Raise InputError unless a method can be replayed under an attack."""
    attacked, problem = under_attack(method, problem, attack, workers)
    check_method(attacked, jax.eval_shape(lambda: problem.init(jax.random.key(0))), workers)


@cached(maxsize=64)
def _same_attacked(same_method: Same, same_attack: Same, mask: tuple[bool, ...]) -> Method:
    method, attack, byzantine = same_method.value, same_attack.value, np.array(mask)
    return recast(method, (same_attack, mask), lambda method: _attacked(method, attack, byzantine))


def _attacked(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    if method.mix is not None or method.meet is not None:
        return _without_server(method, attack, byzantine)
    if attack.corrupt is not None:
        method = _own_changed(method, attack, byzantine)
    if method.rounds is not None:
        own = {name: getattr(method, name) for name in ("message", "name", "needs_key")}
        method = method.rounds.attacked(byzantine)._replace(**own)
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
            f"attack = {attack.text!r}: needs messages that are vectors of parameters, and those of {method.name} "
            "are not; choose one of the own message: sign_flip, zero"
        )


def _waiting_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers know the messages of the version and change theirs."""
    change, combined = attack.change, method.combine
    assert change is not None and combined is not None

    def combine(server, central, messages, visits):
        rows = jax.tree.leaves(visits.worker)[0].shape[0]
        _require_vectors(method, attack, messages, (rows, *central.shape))
        is_bad = jnp.asarray(byzantine)
        means, number = group_means(messages, present(messages, visits), visits.worker, len(byzantine))
        there = number > 0
        changed = change(means, there & ~is_bad, there & is_bad, visits.key)
        is_changed = is_bad[visits.worker] & jnp.any(there & ~is_bad)
        messages = jnp.where(is_changed[:, None], changed[visits.worker], messages)
        return combined(server, central, messages, visits)

    return method._replace(combine=combine, needs_key=True)


def _own_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers change their own messages."""

    def message(worker, update, start, central, visit):
        sent, worker, diagnostics = method.message(worker, update, start, central, visit)
        return _changed_leaves(sent, attack, jnp.asarray(byzantine)[visit.worker], visit.key), worker, diagnostics

    return method._replace(message=message, needs_key=True)


def _changed_leaves(message: State, attack: Attack, is_bad: Array, key: Any) -> State:
    """Return a message whose floating-point arrays a Byzantine worker has changed, each by itself."""
    assert attack.corrupt is not None
    leaves, tree = jax.tree.flatten(message)
    changed = [
        jnp.where(is_bad, attack.corrupt(leaf, jax.random.fold_in(key, _OWN + i)), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, changed)


#: Folded into a visit's key for what attacks draw: none of the method's own draws.
_OWN = 2**30


def _without_server(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method without a server that an attack changes where workers mix or meet."""
    changed, honest = method, tuple((~byzantine).tolist())
    if method.meet is not None and (attack.corrupt is not None or attack.change is not None):
        changed = _shown_changed(changed, attack, byzantine)
    elif method.mix is not None and attack.corrupt is not None:
        changed = _own_changed(changed, attack, byzantine)
    if method.mix is not None and attack.change is not None:
        changed = _inbox_changed(changed, attack, byzantine)
    return weighed(changed, honest)


def _inbox_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose workers take up messages that Byzantine senders form for each receiver.

    The senders know the honest messages that the receiver takes up in the same step, of each sender
    the latest, and the receiver's own last message.
    """
    mix, last = method.mix, method.last
    assert mix is not None and attack.change is not None
    change = attack.change
    if last is None:
        raise InputError(
            f"attack = {attack.text!r}: knows the receiver's last message, and {method.name} does not give it; add "
            "last=lambda worker: ... to the method"
        )

    def attacked_mix(worker, inbox, visit):
        is_bad, workers = jnp.asarray(byzantine), len(byzantine)
        from_bad = is_bad.at[inbox.senders].get(mode="fill", fill_value=False)

        def formed_for_the_receiver() -> State:
            replica, unravel = ravel_pytree(last(worker))
            vectors = jax.vmap(lambda message: ravel_pytree(message)[0])(inbox.messages)
            later = jnp.triu(inbox.senders[:, None] == inbox.senders, 1)
            latest = jnp.where(jnp.any(later, axis=1), workers, inbox.senders)
            known = jnp.zeros((workers, replica.size), replica.dtype)
            known = known.at[latest].set(vectors, mode="drop").at[visit.worker].set(replica)
            present = jnp.zeros(workers, bool).at[latest].set(True, mode="drop").at[visit.worker].set(True)
            honest = present & ~is_bad
            formed = change(known, honest, present & is_bad, visit.key).at[inbox.senders].get(mode="clip")
            return jax.vmap(unravel)(jnp.where((from_bad & jnp.any(honest))[:, None], formed, vectors))

        messages = jax.lax.cond(jnp.any(from_bad), formed_for_the_receiver, lambda: inbox.messages)
        inbox = inbox._replace(messages=messages)
        return mix(worker, inbox if method.sees_messages else summed(inbox), visit)

    return method._replace(mix=attacked_mix, sees_messages=True, needs_key=True)


def _shown_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers show a changed state to the worker that they meet.

    Those that know the honest states know all of them, at the instant of the meeting, but those of
    workers that are away.
    """

    def presents(state, inbox, visit):
        is_bad = jnp.asarray(byzantine)
        key = jax.random.fold_in(visit.key, visit.worker)
        if attack.corrupt is not None:
            state = _changed_leaves(state, attack, is_bad[visit.worker], key)
        if attack.change is None:
            return state
        change = attack.change
        present = jnp.bool_(True) if isinstance(visit.counted, tuple) else visit.counted
        honest = present & ~is_bad

        def formed() -> State:
            vectors = jax.vmap(lambda state: ravel_pytree(state)[0])(inbox.messages)
            formed = change(vectors, honest, present & is_bad, key)
            return ravel_pytree(state)[1](formed[visit.worker])

        return jax.lax.cond(is_bad[visit.worker] & jnp.any(honest), formed, lambda: state)

    return method._replace(presents=presents, sees_messages=attack.change is not None, needs_key=True)


def warn_of_weakness(attack: Attack | None, workers: int) -> None:
    """Warn of an attack without effect on this number of workers."""
    if attack is not None:
        attack.byzantine(workers)  # its error says more
    if weakness := weakness_text(attack, workers):
        warnings.warn(weakness, WeakAttackWarning, stacklevel=3)


def weakness_text(attack: Attack | None, workers: int) -> str:
    """Return the reason why an attack has no effect on this number of workers; empty if it has one."""
    reason = "" if attack is None else attack.weakness(workers)
    return f"attack = {attack.text!r}: {reason}" if attack is not None and reason else ""


class LastMemory(NamedTuple):
    """What is kept of a worker under an attack that knows the last messages."""

    own: State  #: of the method
    last: Array  #: the last message as an honest worker sends it, shape ``[parameters]``
    sent: Array  #: whether there is one


def _last_changed(method: Method, attack: Attack, byzantine: np.ndarray) -> Method:
    """Return the method whose Byzantine workers change their messages, knowing all workers' last ones."""
    assert attack.change is not None
    change = attack.change

    def init_memory(central: Array) -> LastMemory:
        return LastMemory(method.init_memory(central), jnp.zeros_like(central), jnp.bool_(False))

    def apply(server, central, message, memory, visit, memories):
        _require_vectors(method, attack, message, central.shape)
        is_bad = jnp.asarray(byzantine)

        def changed() -> Array:
            messages = memories.of_all("last").at[visit.worker].set(message)
            there = memories.of_all("sent").at[visit.worker].set(True)
            made = change(messages, there & ~is_bad, there & is_bad, visit.key)
            return jnp.where(jnp.any(there & ~is_bad), made[visit.worker], message)

        sent = jax.lax.cond(is_bad[visit.worker], changed, lambda: message)
        own: tuple[Memories, ...] = ()
        if method.sees_memories:
            own = (Memories(memories.rows.own, memories.newer.own, memories.worker),)
        made = method.apply(server, central, sent, memory.own, visit, *own)
        return made._replace(memory=LastMemory(made.memory, message, jnp.bool_(True)))

    reply = method.reply
    return method._replace(
        apply=apply,
        init_memory=init_memory,
        reply=None
        if reply is None
        else lambda server, central, memory, visit: reply(server, central, memory.own, visit),
        sees_memories=True,
        needs_key=True,
    )


class Both(NamedTuple):
    """Examples with their own labels, and then again with reversed ones."""

    examples: Any


class _FlippedRows:
    """`BatchIndices` whose Byzantine workers draw from the second half of `Both`."""

    def __init__(self, own: BatchIndices, moved: np.ndarray):
        self._own, self._moved = own, moved

    def rows(self, worker: Any, *given: Any) -> np.ndarray:
        """Return the example indices; see `BatchIndices.rows`."""
        return self._own.rows(worker, *given) + self._moved[np.asarray(worker)][:, None, None]


@dataclasses.dataclass(frozen=True, eq=False)
class _Flipped(Problem):
    own: Any = None  #: the problem with honest workers
    byzantine: tuple[bool, ...] = ()

    def batch_indices(self, seed: int, workers: int) -> Any:
        """Return those of the problem, moved to the other labels; see `Problem.batch_indices`."""
        moved = self.own.examples * np.array(self.byzantine, np.int32)
        return _FlippedRows(self.own.batch_indices(seed, workers), moved)


@cached(maxsize=8)
def _flipped(same: Same, text: str, byzantine: tuple[bool, ...]) -> Problem:
    """Return the problem whose Byzantine workers compute with reversed labels, from data that are held twice."""
    problem = same.value
    label = problem.train.get("label") if isinstance(problem.train, Mapping) else None
    if label is None or np.asarray(label).dtype.kind not in "iu":
        raise InputError(f"attack = {text!r}: {problem.name} has no whole numbers in train['label'] to reverse")
    examples = problem.examples
    twice = {name: np.concatenate([array, array]) for name, array in problem.train.items()}
    twice["label"][examples:] = np.max(label) - np.asarray(label)

    def loss(params: Any, *given: Any) -> Any:
        *state, batch, key = given
        return problem.loss(params, *state, batch.examples, key)

    def evaluate(params: Any, state: Any, data: Any) -> Any:
        if isinstance(data, Both):
            data = jax.tree.map(lambda array: array[:examples], data.examples)
        return problem.evaluate(params, state, data)

    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
    # How examples are divided among workers is left to the problem itself.
    changed = dict(loss=loss, evaluate=evaluate, train=Both(twice), sharded=False, shards=None, dirichlet=None)
    return _Flipped(**(fields | changed), own=problem, byzantine=byzantine)
