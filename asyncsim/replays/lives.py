"""The lives of workers without a server: their replicas and messages leave and join the mean.

The central variable is the mean of the living workers' replicas and of the messages in flight, by
their weights. These need not sum to the number of workers, so the sum is the server's state
(`asyncsim.replays.central.weighed`). A death takes the share that the worker kept of its last
message; a lost message takes its share. A returning worker adds the replica that it copied, with
weight one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.methods.method import Array, Method
from asyncsim.replays.central import Mass, gain, honest_part, replica_of
from asyncsim.replays.local import Parts
from asyncsim.replays.state import ReplayState


def lose_message(parts: Parts, state: ReplayState, slot: Array, share: Array) -> ReplayState:
    """Subtract a share of a message that waits in a slot from the mean."""
    lost = jax.tree.map(
        lambda leaf: -jnp.asarray(share, leaf.dtype) * leaf[slot], state.messages.mass
    )
    return _gain(parts.method, state, lost)


def lose_worker(parts: Parts, state: ReplayState, worker: Array, share: Array) -> ReplayState:
    """Subtract a worker's remaining share of its last message, or its replica, from the mean."""
    method = parts.method
    mass = honest_part(method, _mass(method, state, worker), worker)
    return _gain(
        method, state, jax.tree.map(lambda leaf: -jnp.asarray(share, leaf.dtype) * leaf, mass)
    )


def return_worker(
    parts: Parts, state: ReplayState, worker: Array, source: Array, initial: Array
) -> ReplayState:
    """Restart a worker with a copy of the source's replica; -1: with the initial replica."""
    method, _, restart = parts
    assert restart is not None
    copied = _mass(method, state, jnp.maximum(source, 0))
    # A Byzantine worker may send a replica and a weight of zero.
    weight = jnp.where(copied.weight == 0, 1, copied.weight)
    replica = jnp.where(source < 0, initial, copied.vector / weight)
    mass, (method_state, learner) = Mass(replica, jnp.ones_like(copied.weight)), restart(replica)
    row = state.workers._replace(
        method=method_state, learner=learner, memory=mass if method.mix is not None else ()
    )

    def write(leaves: Any, values: Any) -> Any:
        return jax.tree.map(lambda leaf, value: leaf.at[worker].set(value), leaves, values)

    workers = state.workers._replace(
        **{
            name: write(getattr(state.workers, name), getattr(row, name))
            for name in ("method", "learner", "memory")
        }
    )
    # Where workers mix, nothing is read: `begin` sets the read.
    read = state.read if method.mix is not None else state.read.at[worker].set(replica)
    return _gain(
        method, state._replace(workers=workers, read=read), honest_part(method, mass, worker)
    )


def _mass(method: Method, state: ReplayState, worker: Array) -> Mass:
    """Return a worker's last message, or its replica where workers meet."""
    if method.mix is not None:
        return jax.tree.map(lambda leaf: leaf[worker], state.workers.memory)
    replica = replica_of(method, jax.tree.map(lambda leaf: leaf[worker], state.workers.method))
    return Mass(replica, jnp.ones((), replica.dtype))


def _gain(method: Method, state: ReplayState, mass: Mass) -> ReplayState:
    central, total = gain(method, state.central, state.server, mass)
    return state._replace(central=central, server=total)
