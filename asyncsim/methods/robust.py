"""Robust SGD: a rule of `asyncsim.aggregation` in the place of the mean of a version's messages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.base.errors import InputError, require_fraction
from asyncsim.byzantine.aggregation import Rule, parse_rule
from asyncsim.clusters.policy import Policy
from asyncsim.methods.buffer import group_means
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Rounds,
    Schedule,
    State,
    Timing,
    completing,
    divisor,
    gradient_steps,
    never_zero,
    present,
    rate_at,
    require_policy,
    require_rate,
)
from asyncsim.methods.recipe import shares_programs

#: Under these a version has a number of messages that is known, and each worker's at most once or their mean.
POLICIES = ("barrier", "first_of", "buffered")


class RobustServer(NamedTuple):
    """The server's state."""

    rule: State
    momentum: State  #: shape ``[parameters]``; ``()`` without
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
        return RobustServer(chosen.init(central), momentum, none, none, jnp.int32(0))

    def receive(memory, message, visit):
        average = chosen.averaging * memory + (1 - chosen.averaging) * message
        return average, average

    def attacked(byzantine: Any) -> Method:
        def combine(server, central, messages, visits):
            in_version = present(messages, visits)
            # One message of each worker, in the order of the workers: of equal ones rules choose the first.
            group = _ranks(in_version, visits.worker)
            messages, number = group_means(messages, in_version, group, len(messages))
            there, bad = number > 0, jnp.zeros(len(messages), bool)
            if byzantine is not None:
                bad = bad.at[group].max(in_version & jnp.asarray(byzantine)[visits.worker])
            # All are there, as a rule, and masks cost time.
            made = jax.lax.cond(
                jnp.all(there),
                lambda: chosen.aggregate(server.rule, messages, None, visits.key),
                lambda: chosen.aggregate(server.rule, messages, there, visits.key),
            )
            v = made.vector + server_momentum * server.momentum if at_server else made.vector
            dtype = central.dtype
            finite = jnp.isfinite(messages @ jnp.ones(messages.shape[1], dtype))
            after = RobustServer(
                rule=made.state,
                momentum=v if at_server else (),
                byzantine_share=jnp.sum(jnp.where(bad, made.share, 0)),
                byzantine_messages=jnp.sum(bad).astype(dtype) / jnp.sum(there).astype(dtype),
                not_finite=jnp.sum(there & ~finite, dtype=jnp.int32),
            )
            return Applied(central - rate_at(learning_rate, completing(visits), central) * v, after)

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
            combine=combine,
            receive=receive if chosen.averaging else None,
            init_worker=jnp.zeros_like if at_worker else lambda central: (),
            init_server=init_server,
            init_memory=jnp.zeros_like if chosen.averaging else lambda central: (),
            timing=Timing(policy=needed),
            needs_key=chosen.needs_key,
            rounds=Rounds(require, attacked),
        )

    def require(workers: int, policy: Policy) -> None:
        chosen.require(policy.per_version(workers))

    return attacked(None)


def _ranks(there: Array, worker: Array) -> Array:
    """Return the place of each message's worker among the workers that have messages, in their order."""
    before = jnp.tril(worker[:, None] == worker, -1) & there
    first = there & ~jnp.any(before, 1)
    return jnp.sum(first & (worker < worker[:, None]), 1, dtype=jnp.int32)
