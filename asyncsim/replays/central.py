"""The central variable without a server: the mean of the workers' replicas and of the messages in flight.

A worker's last message counts by the share that the worker keeps of it and by the shares in flight to its neighbours;
before its first message, its initial replica counts whole. So each commit replaces the shares that its worker mixes by
its new message::

    central <- central + (message - kept * last message - sum of share * message taken up) / workers

Where workers meet in pairs, the replicas of both change. Under attack only honest workers' replicas and messages
count. Their shares and the weights that they carry need not sum to the number of workers, so the sum is the server's
state. The last message is the worker's memory, unless the method finds it in the worker's own state (``last``).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Applied, Array, Method, State, Visit


class Mass(NamedTuple):
    """Replicas times their shares, and the sum of their weights times their shares; ``()`` without an attack."""

    vector: Array
    weight: Any


class Sent(NamedTuple):
    """A message, and under attack its `Mass`, which is zero from a Byzantine worker; else ``()``."""

    message: State
    mass: Any


def weighed(method: Method, honest: tuple[bool, ...]) -> Method:
    """Return a method without a server whose central variable is the weighted mean of some workers' messages.

    Messages may differ from their mass, which the replay keeps in its memory.
    """
    return method._replace(
        honest=honest, last=None, init_server=lambda central: jnp.asarray(sum(honest), central.dtype)
    )


def initial_memory(method: Method, central: Array) -> State:
    """Return a worker's memory before its first commit."""
    if method.mix is not None and method.last is None:
        return Mass(central, _ones(method, central))
    return () if method.mix is not None or method.meet is not None else method.init_memory(central)


def take_up(method: Method, row: Any, inbox: Sent, visit: Visit) -> Any:
    """Mix an inbox into a worker's row; its memory becomes the `Mass` that the worker's next message replaces."""
    assert method.mix is not None
    arrived = _mass(method, inbox.message) if method.honest is None else inbox.mass
    last = row.memory if method.last is None else _mass(method, method.last(row.method))
    last = _honest_part(method, last, visit.worker)
    mixed = jax.tree.map(lambda old, new: jnp.asarray(visit.kept, old.dtype) * old + new, last, arrived)
    return row._replace(method=method.mix(row.method, inbox.message, visit), memory=mixed)


def meet(method: Method, row: Any, partner_replica: Array, partner: Array, visit: Visit) -> tuple[Any, Array]:
    """Average a worker's row with its partner's replica; return the row and the replica.

    The memory becomes the `Mass` that the worker's next replica replaces: both replicas less the partner's new one.
    """
    assert method.meet is not None
    replicas = row.method, partner_replica
    averaged = method.meet(*replicas, visit)
    new, new_partner = (jnp.where(partner < 0, old, mean) for old, mean in zip(replicas, averaged, strict=True))
    mass, partner_mass, new_partner_mass = (
        _honest_part(method, Mass(replica, _ones(method, replica)), worker)
        for replica, worker in ((row.method, visit.worker), (partner_replica, partner), (new_partner, partner))
    )
    memory = jax.tree.map(lambda a, b, c: a + (b - c), mass, partner_mass, new_partner_mass)
    return row._replace(method=new, memory=memory), new_partner


def commit_mean(
    method: Method, server: State, central: Array, message: State, worker: State, mixed: Mass, visit: Visit
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
    new = _mass(method, message) if method.mix is not None else Mass(worker, _ones(method, worker))
    new = _honest_part(method, new, visit.worker)
    memory = new if method.mix is not None and method.last is None else ()
    step = new.vector - mixed.vector
    if method.honest is None:
        return Applied(central + step / jnp.asarray(visit.workers, step.dtype), server, memory)
    gained = new.weight - mixed.weight
    total = server + gained
    return Applied(central + (step - gained[..., None] * central) / total[..., None], total, memory)


def _mass(method: Method, message: State) -> Mass:
    """Return the replica that a message carries, and under attack its weight."""
    replica = jax.tree.leaves(message)[0] if method.replica is None else method.replica(message)
    if not isinstance(replica, tuple):
        return Mass(replica, _ones(method, replica))
    vector, weight = replica
    return Mass(vector, () if method.honest is None else weight)


def _ones(method: Method, replica: Array) -> Any:
    """Return the weight 1 for a replica without one, for each member of an ensemble."""
    return () if method.honest is None else jnp.ones(replica.shape[:-1], replica.dtype)


def _honest_part(method: Method, mass: Mass, worker: Array) -> Mass:
    """Return a worker's mass, or zeros if the worker is Byzantine."""
    if method.honest is None:
        return mass
    honest = jnp.asarray(method.honest)[worker]
    return jax.tree.map(lambda leaf: jnp.where(honest, leaf, jnp.zeros_like(leaf)), mass)
