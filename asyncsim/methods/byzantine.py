"""Kardam and Zeno++: the server drops updates that change too fast or oppose a trusted gradient."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Natural, NonNegative, Positive
from asyncsim.clusters.policy import asynchronous
from asyncsim.methods.damping import StalenessLaw, staleness_weight
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Timing,
    divisor,
    gradient_steps,
    local_steps,
    never_zero,
    rate_at,
)

#: Equal updates may differ by this many units of round-off, relative to their length.
_ROUNDING = 100


class KardamMemory(NamedTuple):
    """The server's memory of a worker; vectors of shape ``[parameters]``."""

    update: Array  #: the last update
    start: Array  #: the parameters at which it was computed
    sent: Array  #: the worker's last read, at which it computes its next update
    lipschitz: Array  #: the coefficient of the last two updates; negative before there are two
    read: Array  #: number of updates applied before the last read


class KardamServer(NamedTuple):
    """The server's state, shared by all workers."""

    applied: Array  #: number of updates applied
    last: Array  #: workers of the last ``2 f`` applied updates; -1 for none


@declared
def kardam(
    learning_rate: Rate = LEARNING_RATE,
    f: Natural = 1,
    law: StalenessLaw = "inverse",
    strength: Positive = 0.5,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return Kardam, which filters updates by their rate of change and damps them by staleness.

    A worker sends its update ``u`` (window 1: ``-learning_rate * gradient``), computed at ``s``;
    its previous update was ``u'`` at ``s'``. Its empirical Lipschitz coefficient is
    ``k = |u - u'| / |s - s'|``. The update is applied, :: ``u'`` at ``s'``. Its empirical Lipschitz
    coefficient is ``k = |u - u'| / |s - s'|``. The update is applied, ::

        central <- central + weight(staleness) * u

    if ``k`` is at most the ``(n - f) / n`` quantile of all workers' last coefficients, this one's
    included, and if at most ``f`` of the last ``2 f + 1`` applied updates, this one included, would
    be of one worker.

    Parameters
    ----------
    f : int
        Byzantine workers to tolerate, among at least ``3 f + 1`` workers; 0 for no filters.
    law, strength
        Of the weight: ``"inverse"`` or ``"exponential"`` in the paper.

    Notes
    -----
    The quantile of ``m`` known coefficients is the ``ceil(m (n - f) / n)``-th smallest; a worker's
    first update passes. For two updates at the same point (nothing was applied in between) the
    coefficient is infinite, or 0 if they are equal up to round-off. Non-finite updates are never
    applied. Every message counts as a version in the trace; the staleness here counts applied
    updates only. Commits whose ``update_norm`` is 0 were dropped.

    The frequency filter's window is from memory. The authors' program has other windows: a
    coefficient passes up to the 2/3 quantile of each worker's largest of 25, whatever ``f`` is, and
    after one rejection for each worker a message is let through. The coefficients contain the
    updates' rate, so that a schedule changes them.

    References
    ----------
    Damaskinos, El Mhamdi, Guerraoui, Patra and Taziki 2018, "Asynchronous Byzantine machine
    learning (the case of SGD)", arXiv 1802.07928.
    """
    weight = staleness_weight(law, strength, 0.0)

    def apply(server, central, message, memory, visit, memories):
        # The server knows where the worker computed, so a Byzantine worker cannot lie about it.
        update, start = message, memory.sent
        largest = jnp.asarray(jnp.finfo(central.dtype).max, central.dtype)
        moved, changed = (
            jnp.linalg.norm(start - memory.start),
            jnp.linalg.norm(update - memory.update),
        )
        # At the same point equal updates may differ by the order of their sums.
        rounding = _ROUNDING * jnp.finfo(central.dtype).eps * jnp.linalg.norm(update)
        k = jnp.where(
            moved > 0,
            changed / jnp.where(moved > 0, moved, 1),
            jnp.where(changed > rounding, largest, 0),
        )
        k = jnp.where(visit.worker_step == 0, -1, jnp.where(jnp.isfinite(k), k, largest))
        passes = jnp.isfinite(jnp.vdot(update, update))
        if f:
            all_k = memories.of_all("lipschitz").at[visit.worker].set(k)
            n, number = len(all_k), jnp.sum(all_k >= 0)
            passes &= (k < 0) | (
                jnp.sum((all_k >= 0) & (all_k < k)) < (number * (n - f) + n - 1) // n
            )
            passes &= jnp.sum(server.last == visit.worker) < f
        behind = visit._replace(staleness=server.applied - memory.read)
        central = jnp.where(passes, central + weight(behind, central) * update, central)
        applied = server.applied + passes.astype(server.applied.dtype)
        worker = jnp.asarray(visit.worker, server.last.dtype)
        last = (
            jnp.where(passes, jnp.append(server.last[1:], worker), server.last)
            if f
            else server.last
        )
        return Applied(
            central, KardamServer(applied, last), KardamMemory(update, start, central, k, applied)
        )

    def init_memory(central: Array) -> KardamMemory:
        undefined = jnp.full((), -1, central.dtype)
        return KardamMemory(jnp.zeros_like(central), central, central, undefined, jnp.int32(0))

    return Method(
        local_steps(learning_rate, optimizer),
        apply=apply,
        init_server=lambda central: KardamServer(jnp.int32(0), jnp.full(2 * f, -1, jnp.int32)),
        init_memory=init_memory,
        timing=Timing(protocol="exchange", policy=asynchronous(), fewest_workers=3 * f + 1),
        sees_memories=True,
    )


@declared
def zeno_pp(
    learning_rate: Rate = LEARNING_RATE,
    trusted: Natural | None = None,
    rho: NonNegative = 0.001,
    epsilon: NonNegative = 0.0,
) -> Method:
    """Return Zeno++: gradients are scaled to the length of a trusted one and must agree with it.

    The server trusts one worker: its last gradient is the validation gradient ``v``, and is never
    applied. With ``g`` another worker's gradient::

        u = |v| / |g| * g central <- central - learning_rate * u if learning_rate * <v, u> - rho
        |u|^2 + learning_rate * epsilon >= 0

    Parameters
    ----------
    trusted : int, optional
        The trusted worker; None for the last one.
    rho : float
        Zero or above.
    epsilon : float
        Zero or above: how far below zero a score may be.

    Notes
    -----
    The cluster decides how often ``v`` is renewed, by the trusted worker's law of compute times and
    its latency, which is zero beside the server; the authors' program renews it every ten applied
    updates. Where the problem is split the trusted worker has its own examples. No update is
    applied before its first gradient. Its visits, and dropped updates, count as versions in the
    trace, which this method ignores. The penalty has the length of ``u``, as in the paper; the
    program takes the length of ``g`` before scaling.

    References
    ----------
    Xie, Koyejo and Gupta 2020, "Zeno++: robust fully asynchronous SGD", arXiv 1903.07020.
    """

    def message(worker, update, start, central, visit):
        return -update / divisor(rate_at(learning_rate, visit, update)), worker, {}

    def apply(server, central, message, memory, visit):
        rate = rate_at(learning_rate, visit, central)
        length = jnp.linalg.norm(message)
        usable = jnp.isfinite(length) & (length > 0)
        u = jnp.where(usable, message, 0) * (jnp.linalg.norm(server) / jnp.where(usable, length, 1))
        score = rate * jnp.vdot(server, u) - rho * jnp.vdot(u, u) + rate * epsilon
        is_trusted = visit.worker == (
            jnp.asarray(visit.workers) - 1 if trusted is None else trusted
        )
        after = jnp.where(~is_trusted & usable & (score >= 0), central - rate * u, central)
        return Applied(after, jnp.where(is_trusted, message, server), memory)

    return Method(
        gradient_steps(never_zero(learning_rate)),
        message=message,
        apply=apply,
        init_server=jnp.zeros_like,
        timing=Timing(fewest_workers=max(2, (trusted or 0) + 1)),
    )
