"""Malenia SGD: steps with every worker's mean gradient at one point, for heterogeneous data."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Count
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Timing,
    count_living,
    gradient_steps,
)


class MaleniaMemory(NamedTuple):
    """The server's memory of a worker: its gradients at the point of ``step``."""

    total: Array  #: their sum, shape ``[parameters]``
    number: Array
    step: Array


class MaleniaServer(NamedTuple):
    """The server's state, shared by all workers."""

    total: Array  #: sum over the workers of their mean gradients at the newest point
    inverses: Array  #: sum over these workers of one over the number of their gradients
    filled: Array  #: number of these workers
    step: Array  #: steps so far
    version: Array  #: versions so far
    point_version: Array  #: the version in which the newest point appears


@declared
def malenia(learning_rate: Rate = LEARNING_RATE, count: Count = 1) -> Method:
    """Return Malenia SGD.

    The server collects ``B_i`` gradients ``g_ij`` of each worker ``i`` of ``n``, all at the newest
    point, until the harmonic mean of the ``B_i`` is at least ``count / n``, and then steps::

        central <- central - learning_rate / n * sum over i of (sum over j of g_ij) / B_i

    ``count``: the paper's ``S``. Up to ``n`` workers, one gradient of each suffices, as in the
    authors' program; more lowers the noise.

    Notes
    -----
    Workers never wait and are never stopped: the trace is plain asynchronous, most visits do not
    move the central variable, and a worker's first gradient after a step, which it computed at the
    previous point, is discarded. In the authors' program (MaleniaSGD in vectozavr/ringmaster-lmo)
    a step stops all computations; no policy here does so after a number of messages that varies.
    The trace's staleness counts visits.

    On a trace with failures ``n`` excludes the workers that the server knows to be away.

    References
    ----------
    Tyurin and Richtarik 2023, "Optimal time complexities of parallel stochastic optimization
    methods under a fixed computation model", arXiv 2305.12387, section on heterogeneous data.
    """

    def apply(server, central, message, memory, visit):
        is_fresh = server.version - visit.staleness >= server.point_version
        empty = memory.step != server.step
        before = jnp.where(empty, 0, memory.number)
        old_total = jnp.where(empty, 0, memory.total)
        number = jnp.where(is_fresh, before + 1, before)
        worker_total = jnp.where(is_fresh, old_total + message, old_total)
        total = (
            server.total
            + worker_total / jnp.maximum(number, 1)
            - old_total / jnp.maximum(before, 1)
        )
        inverses = server.inverses + _inverse(number) - _inverse(before)
        filled = server.filled + ((before == 0) & (number > 0)).astype(jnp.int32)
        n = count_living(visit)
        # The harmonic mean n / inverses; the table may have rows of absent workers.
        # Rounding must not delay a step that is due.
        is_enough = (n * n).astype(central.dtype) >= (1 - 1e-5) * count * inverses
        does_step = is_fresh & (filled >= n) & is_enough
        after = MaleniaServer(
            total=jnp.where(does_step, 0, total),
            inverses=jnp.where(does_step, 0, inverses),
            filled=jnp.where(does_step, 0, filled),
            step=server.step + does_step.astype(jnp.int32),
            version=server.version + jnp.asarray(visit.completes, jnp.int32),
            point_version=jnp.where(does_step, server.version + 1, server.point_version),
        )
        central = jnp.where(
            does_step, central + total / jnp.maximum(filled, 1).astype(central.dtype), central
        )
        return Applied(central, after, MaleniaMemory(worker_total, number, server.step))

    def init_server(central):
        nothing, zero = jnp.zeros((), central.dtype), jnp.int32(0)
        return MaleniaServer(jnp.zeros_like(central), nothing, zero, zero, zero, zero)

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=init_server,
        init_memory=lambda central: MaleniaMemory(
            jnp.zeros_like(central), jnp.zeros((), central.dtype), jnp.int32(0)
        ),
        timing=Timing(window=1),
        coordinatewise=True,
    )


def _inverse(number: Array) -> Array:
    """Return 1 / number, or 0 for 0."""
    return jnp.where(number > 0, 1 / jnp.maximum(number, 1), 0)
