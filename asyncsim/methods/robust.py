"""Robust SGD: combines a version's messages by a rule of `asyncsim.aggregation`, not the mean."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Fraction
from asyncsim.base.errors import InputError
from asyncsim.byzantine.aggregation import RuleLike
from asyncsim.clusters.policy import Policy
from asyncsim.methods.buffer import group_means
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Rounds,
    State,
    Timing,
    completing,
    divisor,
    gradient_steps,
    never_zero,
    present,
    rate_at,
)

#: Policies whose versions have a known number of messages, at most one of each worker or their
#: mean.
POLICIES = ("barrier", "first_of", "buffered")


class RobustServer(NamedTuple):
    """The server's state."""

    rule: State
    momentum: State  #: shape ``[parameters]``; ``()`` without
    byzantine_share: Array  #: weight of the Byzantine messages in the last version
    byzantine_messages: Array  #: their share of its messages
    not_finite: Array  #: number of its messages that were not finite


@declared
def robust(
    rule: RuleLike = "median()",
    learning_rate: Rate = LEARNING_RATE,
    worker_momentum: Fraction = 0.0,
    server_momentum: Fraction = 0.0,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return SGD whose server combines a version's gradients by a rule that tolerates wrong ones.

    With ``g`` a worker's gradient (the sum of its local steps over the learning rate) and ``m`` its
    momentum::

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
        ``barrier()``, ``barrier(count)``, ``first_of(count)`` or ``buffered(count)``; None for the
        trace's policy.

    Notes
    -----
    Under ``buffered(count)`` a worker may have several messages in a version: they are replaced by
    their mean, so that a fast worker has no more weight than others. A version may then have fewer
    messages than the rule needs for its ``f``; the rule then uses the largest ``f`` that they
    allow. With the rule ``mean()`` and no momentum this is `batch_sgd`, up to round-off.

    References
    ----------
    El Mhamdi, Guerraoui and Rouault 2021, "Distributed momentum for Byzantine-resilient stochastic
    gradient descent", arXiv 2003.00010 (momentum at the workers); for the rules see
    `asyncsim.aggregation`.
    """
    if policy is not None and policy.name not in POLICIES:
        raise InputError(
            f"policy = {str(policy)!r}: a version needs several messages; choose from "
            f"{', '.join(POLICIES)}"
        )
    if policy is not None and policy.count is not None:
        rule.require(policy.per_version(workers=1))
    # A momentum that varies in an ensemble counts as present.
    at_worker, at_server = (
        not (isinstance(mu, float | int) and mu == 0) for mu in (worker_momentum, server_momentum)
    )

    def message(worker, update, start, central, visit):
        gradient = -update / divisor(rate_at(learning_rate, visit, update))
        if not at_worker:
            return gradient, worker, {}
        m = worker_momentum * worker + gradient
        return m, m, {}

    def init_server(central: Array) -> RobustServer:
        zero = jnp.zeros((), central.dtype)
        momentum = jnp.zeros_like(central) if at_server else ()
        return RobustServer(rule.init(central), momentum, zero, zero, jnp.int32(0))

    def receive(memory, message, visit):
        average = rule.averaging * memory + (1 - rule.averaging) * message
        return average, average

    def attacked(byzantine: Any) -> Method:
        def combine(server, central, messages, visits):
            in_version = present(messages, visits)
            # One message of each worker, in the order of the workers: rules break ties by the
            # first.
            group = _ranks(in_version, visits.worker)
            messages, number = group_means(messages, in_version, group, len(messages))
            nonempty, bad = number > 0, jnp.zeros(len(messages), bool)
            if byzantine is not None:
                bad = bad.at[group].max(in_version & jnp.asarray(byzantine)[visits.worker])
            aggregated = rule.combine(server.rule, messages, nonempty, visits.key)
            v = aggregated.vector
            if at_server:
                v = v + server_momentum * server.momentum
            dtype = central.dtype
            finite = jnp.isfinite(messages @ jnp.ones(messages.shape[1], dtype))
            after = RobustServer(
                rule=aggregated.state,
                momentum=v if at_server else (),
                byzantine_share=jnp.sum(jnp.where(bad, aggregated.share, 0)),
                byzantine_messages=jnp.sum(bad).astype(dtype) / jnp.sum(nonempty).astype(dtype),
                not_finite=jnp.sum(nonempty & ~finite, dtype=jnp.int32),
            )
            return Applied(central - rate_at(learning_rate, completing(visits), central) * v, after)

        return Method(
            optimizer=gradient_steps(never_zero(learning_rate)),
            message=message,
            combine=combine,
            receive=receive if rule.averaging else None,
            init_worker=jnp.zeros_like if at_worker else lambda central: (),
            init_server=init_server,
            init_memory=jnp.zeros_like if rule.averaging else lambda central: (),
            timing=Timing(policy=policy),
            needs_key=rule.needs_key,
            rounds=Rounds(require, attacked),
            coordinatewise=rule.coordinatewise,
        )

    def require(workers: int, policy: Policy) -> None:
        if policy.collective is not None:
            raise InputError(
                f"policy = {policy}: an all-reduce adds the messages, and a rule must see each; "
                "leave collective out"
            )
        rule.require(policy.per_version(workers))

    return attacked(None)


def _ranks(in_version: Array, worker: Array) -> Array:
    """Rank each message's worker among the workers that have messages."""
    before = jnp.tril(worker[:, None] == worker, -1) & in_version
    first = in_version & ~jnp.any(before, 1)
    return jnp.sum(first & (worker < worker[:, None]), 1, dtype=jnp.int32)
