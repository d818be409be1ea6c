"""What a server collects before it makes a version: the sum of messages and their number."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.methods.method import Applied, Array, State, Visit


class Buffer(NamedTuple):
    """Messages since the last version.

    Attributes
    ----------
    total : Array
        Their sum, shape ``[parameters]``.
    number : Array
        How many, a scalar.
    """

    total: Array
    number: Array


def empty_buffer(central: Array) -> Buffer:
    """Return a buffer that holds nothing."""
    return Buffer(jnp.zeros_like(central), jnp.zeros((), central.dtype))


def collect(buffer: Buffer, message: Array, visit: Visit) -> tuple[Array, Buffer]:
    """Put a message in; return the mean of what is there, and the buffer, emptied if the version is complete."""
    total, count = buffer.total + message, buffer.number + 1
    return total / count, Buffer(jnp.where(visit.completes, 0, total), jnp.where(visit.completes, 0, count))


def add_mean(server: Buffer, central: Array, message: Array, memory: State, visit: Visit) -> Applied:
    """Add the mean of a version's messages to the central variable once the version is complete."""
    mean, server = collect(server, message, visit)
    return Applied(jnp.where(visit.completes, central + mean, central), server, memory)
