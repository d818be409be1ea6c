"""Robust SGD: a rule of `asyncsim.aggregation` in the place of the mean of a version's messages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError, require_fraction
from asyncsim.byzantine.aggregation import Rule, parse_rule
from asyncsim.clusters.policy import Policy
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Rounds,
    Schedule,
    State,
    Timing,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
    require_policy,
    require_rate,
)
from asyncsim.methods.recipe import shares_programs

#: Under these a version has a number of messages that is known, and each worker's at most once or their mean.
POLICIES = ("barrier", "first_of", "buffered")


class RobustMemory(NamedTuple):
    """What the server keeps of a worker."""

    message: Array  #: its last, or the mean of those in the version ``round``, or its average; ``[parameters]``
    number: Array  #: how many messages of that version
    round: Array  #: the version that it belongs to; -1 before the first


class RobustServer(NamedTuple):
    """The server's state."""

    rule: State
    momentum: State  #: shape ``[parameters]``; ``()`` without
    round: Array  #: versions so far
    byzantine_share: Array  #: of the last version, how much the Byzantine messages counted
    byzantine_messages: Array  #: and which part of the messages they were
    not_finite: Array  #: and how many messages were not finite


@shares_programs
def robust(
    rule: Rule | str = "median()",
    learning_rate: float | Schedule = LEARNING_RATE,
    worker_momentum: float = 0.0,
    server_momentum: float = 0.0,
    policy: Policy | str | None = "barrier()",
) -> Method:
    """Return SGD whose server combines a version's gradients by a rule that withstands some wrong ones.

    With ``g`` a worker's gradient (the sum of its local steps over the learning rate) and ``m`` its momentum::

        m       <- worker_momentum m + g                                      sent
        v       <- server_momentum v + rule(messages of the version)          once it is complete
        central <- central - learning_rate v

    Parameters
    ----------
    rule : Rule or str
        Of `asyncsim.aggregation`: ``"krum(f=3)"``, ``"nnm(trimmed_mean(f=2))"``.
    worker_momentum, server_momentum : float
        In [0, 1): before the rule, and after it.
    policy : Policy or str
        ``barrier()``, ``barrier(count)``, ``first_of(count)`` or ``buffered(count)``; None for that of the trace.

    Notes
    -----
    The rule is given the messages that the version has. Under ``buffered(count)`` a worker may have several of them:
    their mean is one message, so that a quick worker has no more say than others; a version may then have fewer than
    the rule needs for its ``f``, and is combined with the largest that they allow. With the rule ``mean()`` and no
    momentum this is `batch_sgd`, up to round-off.

    References
    ----------
    El Mhamdi, Guerraoui and Rouault 2021, "Distributed momentum for Byzantine-resilient stochastic gradient descent",
    arXiv 2003.00010 (momentum at the workers); for the rules see `asyncsim.aggregation`.
    """
    chosen = parse_rule(rule)
    require_rate("learning_rate", learning_rate)
    require_fraction("worker_momentum", worker_momentum)
    require_fraction("server_momentum", server_momentum)
    needed = require_policy(policy)
    if needed is not None and needed.name not in POLICIES:
        raise InputError(
            f"policy = {str(needed)!r}: a version needs several messages; choose from {', '.join(POLICIES)}"
        )
    if needed is not None and needed.count is not None:
        chosen.require(needed.count)
    # Whether a worker has at most one message in a version.
    once = needed is not None and needed.name != "buffered"
    # A momentum of an ensemble is not known to be zero.
    at_worker, at_server = (not (isinstance(mu, float | int) and mu == 0) for mu in (worker_momentum, server_momentum))

    def message(worker, update, start, central, visit):
        gradient = -update / divisor(rate_at(learning_rate, visit, update))
        if not at_worker:
            return gradient, worker, {}
        m = worker_momentum * worker + gradient
        return m, m, {}

    def init_server(central: Array) -> RobustServer:
        none = jnp.zeros((), central.dtype)
        momentum = jnp.zeros_like(central) if at_server else ()
        return RobustServer(chosen.init(central), momentum, jnp.int32(0), none, none, jnp.int32(0))

    def init_memory(central: Array) -> RobustMemory:
        return RobustMemory(jnp.zeros_like(central), jnp.zeros((), central.dtype), jnp.int32(-1))

    def make(change: Any, byzantine: np.ndarray | None) -> Method:
        def apply(server, central, message, memory, visit, memories):
            again = memory.round == server.round
            number = jnp.where(again, memory.number, 0) + 1
            if chosen.averaging:
                kept = chosen.averaging * memory.message + (1 - chosen.averaging) * message
            elif once:
                kept = message
            else:
                kept = jnp.where(again, memory.message + (message - memory.message) / number, message)

            def complete() -> tuple[Array, RobustServer]:
                messages = memories.of_all("message").at[visit.worker].set(kept)
                there = (memories.of_all("round") == server.round).at[visit.worker].set(True)
                bad = jnp.zeros(len(there), bool) if byzantine is None else there & byzantine
                if change is not None:
                    messages = change(messages, there & ~bad, bad, visit.key)
                # All are there, as a rule, and masks cost time.
                made = jax.lax.cond(
                    jnp.all(there),
                    lambda: chosen.aggregate(server.rule, messages, None, visit.key),
                    lambda: chosen.aggregate(server.rule, messages, there, visit.key),
                )
                v = made.vector + server_momentum * server.momentum if at_server else made.vector
                dtype = central.dtype
                after = RobustServer(
                    rule=made.state,
                    momentum=v if at_server else (),
                    round=server.round + 1,
                    byzantine_share=jnp.sum(jnp.where(bad, made.share, 0)),
                    byzantine_messages=jnp.sum(bad).astype(dtype) / jnp.sum(there).astype(dtype),
                    not_finite=jnp.sum(
                        there & ~jnp.isfinite(messages @ jnp.ones(messages.shape[1], dtype)), dtype=jnp.int32
                    ),
                )
                return central - rate_at(learning_rate, visit, central) * v, after

            after, changed = jax.lax.cond(visit.completes, complete, lambda: (central, server))
            # A version's number is never negative, which XLA does not know: the worker's row is written after all rows
            # have been read. They would else be copied for each message, which takes as long as a gradient.
            kept = jnp.where(changed.round < 0, 0, kept)
            return Applied(after, changed, RobustMemory(kept, number, server.round))

        return Method(
            name="robust",
            hyperparameters=dict(
                rule=chosen.text,
                learning_rate=learning_rate,
                worker_momentum=worker_momentum,
                server_momentum=server_momentum,
                policy=None if needed is None else str(needed),
            ),
            optimizer=gradient_steps(never_zero(learning_rate)),
            message=message,
            apply=apply,
            init_worker=jnp.zeros_like if at_worker else lambda central: (),
            init_server=init_server,
            init_memory=init_memory,
            timing=Timing(policy=needed),
            sees_memories=True,
            needs_key=chosen.needs_key or change is not None,
            rounds=Rounds(require, make),
        )

    def require(workers: int, policy: Policy) -> None:
        chosen.require(policy.per_version(workers))

    return make(None, None)
