"""The central variable without a server: the mean of workers' replicas and messages in flight.

A worker's last message counts by the share that the worker keeps of it and by the shares in flight
to its neighbours; before its first message, its initial replica counts whole. So each commit
replaces the shares that its worker mixes by its new message::

    central <- central + (message - kept * last message - sum of share * message taken up) / workers

Where workers meet in pairs, the replicas of both change. Under attack only honest workers' replicas
and messages count. Their shares and the weights that they carry need not sum to the number of
workers, so the sum is the server's state. The last message is the worker's memory, unless the
method finds it in the worker's own state (``last``).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Applied, Array, Inbox, Method, State, Visit

#: Weights below which no worker is left.
_NOTHING = 1e-6


class Mass(NamedTuple):
    """Replicas, and their weights, times their shares."""

    vector: Array
    weight: Any  #: ``()`` without an attack


class Sent(NamedTuple):
    """A message and its mass."""

    message: State
    mass: Any  #: a `Mass` under attack or with failures, zero from a Byzantine worker; else ``()``


def weighed(method: Method, honest: tuple[bool, ...]) -> Method:
    """Return the method without a server whose central variable is some workers' weighted mean.

    Messages may differ from their mass, which the replay keeps in its memory.
    """
    return method._replace(
        honest=honest,
        last=None,
        init_server=lambda central: jnp.asarray(sum(honest), central.dtype),
    )


def initial_memory(method: Method, central: Array) -> State:
    """Return a worker's memory before its first commit."""
    if method.mix is not None and method.last is None:
        return Mass(central, _unit_weight(method, central))
    return () if method.gossips else method.init_memory(central)


def take_up(method: Method, row: Any, inbox: Any, visit: Visit) -> Any:
    """Mix an inbox into a worker's row.

    The row's memory becomes the `Mass` that the worker's next message replaces.

    ``inbox`` is a `Sent`, the weighted sum of messages, or of methods that see their messages an
    `Inbox` of `Sent`.
    """
    assert method.mix is not None
    if method.sees_messages:
        present = _without_absent(inbox)
        inbox = summed(present)
        messages = present._replace(messages=present.messages.message)
    else:
        messages = inbox.message
    arrived = _mass(method, inbox.message) if method.honest is None else inbox.mass
    last = row.memory if method.last is None else _mass(method, method.last(row.method))
    last = honest_part(method, last, visit.worker)
    mixed = jax.tree.map(
        lambda old, new: jnp.asarray(visit.kept, old.dtype) * old + new, last, arrived
    )
    return row._replace(method=method.mix(row.method, messages, visit), memory=mixed)


def meet(
    method: Method, row: Any, partner_state: Any, partner: Array, visit: Visit
) -> tuple[Any, State]:
    """Average a worker's row with its partner's state; return both.

    The memory becomes the `Mass` that the worker's next replica replaces: both replicas less the
    partner's new one.
    """
    assert method.meet is not None
    worker_state = row.method
    averaged = method.meet(worker_state, partner_state, visit)
    # A worker without a partner commits alone: its state stays.
    new, new_partner = jax.tree.map(
        lambda old, mean: jnp.where(partner < 0, old, mean), (worker_state, partner_state), averaged
    )
    mass, partner_mass, new_partner_mass = (
        honest_part(method, _mass(method, state), worker)
        for state, worker in (
            (worker_state, visit.worker),
            (partner_state, partner),
            (new_partner, partner),
        )
    )
    # The partner's difference first: without a partner it is exactly zero.
    memory = jax.tree.map(lambda a, b, c: a + (b - c), mass, partner_mass, new_partner_mass)
    return row._replace(method=new, memory=memory), new_partner


def commit_mean(
    method: Method,
    server: State,
    central: Array,
    message: State,
    worker: State,
    mixed: Mass,
    visit: Visit,
) -> Applied:
    """Move the central variable by a commit.

    Parameters
    ----------
    server : Array
        Under attack the sum of all weights that count.
    message, worker : tree
        The new message, and the state of its worker.
    mixed : Mass
        The memory after `take_up` or `meet`.
    """
    new = _mass(method, message if method.mix is not None else worker)
    memory = new if method.mix is not None and method.last is None else ()
    gained = jax.tree.map(jnp.subtract, honest_part(method, new, visit.worker), mixed)
    if method.honest is None:
        step = gained.vector
        return Applied(central + step / jnp.asarray(visit.workers, step.dtype), server, memory)
    return Applied(*gain(method, central, server, gained), memory)


def gain(method: Method, central: Array, total: Array, mass: Mass) -> tuple[Array, Array]:
    """Add a mass to a weighted mean; return the mean and its weight."""
    # Where no weight is left, the mean stays: the division below would be by about zero.
    total = total + mass.weight
    assert method.honest is not None
    # Messages of Byzantine workers may have negative weights.
    size = total if all(method.honest) else jnp.abs(total)
    lasts = size > _NOTHING
    step = (mass.vector - mass.weight * central) / jnp.where(lasts, total, 1)
    return jnp.where(lasts, central + step, central), jnp.where(lasts, total, 0)


def replica_of(method: Method, carrier: State) -> Any:
    """Select the replica in a message, or in the state of a worker that meets others."""
    return jax.tree.leaves(carrier)[0] if method.replica is None else method.replica(carrier)


def summed(inbox: Inbox) -> Any:
    """Return the sum of the messages of an inbox, each times its weight."""
    return jax.tree.map(
        lambda leaf: jnp.tensordot(inbox.weights.astype(leaf.dtype), leaf, 1), inbox.messages
    )


def _without_absent(inbox: Inbox) -> Inbox:
    """Replace absent messages by zeros: their slots hold other messages."""

    def masked(leaf: Array) -> Array:
        present = inbox.weights.reshape(-1, *[1] * (leaf.ndim - 1)) > 0
        return jnp.where(present, leaf, jnp.zeros_like(leaf))

    return inbox._replace(messages=jax.tree.map(masked, inbox.messages))


def _mass(method: Method, carrier: State) -> Mass:
    """Return the replica of a message or state, and under attack its weight."""
    replica = replica_of(method, carrier)
    if not isinstance(replica, tuple):
        return Mass(replica, _unit_weight(method, replica))
    vector, weight = replica
    return Mass(vector, () if method.honest is None else weight)


def _unit_weight(method: Method, replica: Array) -> Any:
    """Return a replica's weight of 1."""
    return () if method.honest is None else jnp.ones((), replica.dtype)


def honest_part(method: Method, mass: Mass, worker: Array) -> Mass:
    """Return a worker's mass, or zeros if the worker is Byzantine."""
    if method.honest is None:
        return mass
    honest = jnp.asarray(method.honest)[worker]
    return jax.tree.map(lambda leaf: jnp.where(honest, leaf, jnp.zeros_like(leaf)), mass)
