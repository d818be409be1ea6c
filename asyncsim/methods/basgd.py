"""BASGD: asynchronous SGD whose server applies a robust rule to the means of buckets of
gradients.
"""

import jax.numpy as jnp

from asyncsim.base.declared import Count
from asyncsim.base.errors import InputError
from asyncsim.byzantine.aggregation import RuleLike
from asyncsim.clusters.policy import buckets
from asyncsim.methods.buffer import group_means
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Method,
    Timing,
    completing,
    divisor,
    gradient_steps,
    never_zero,
    present,
    rate_at,
)


@declared
def basgd(
    learning_rate: Rate = LEARNING_RATE, count: Count = 10, rule: RuleLike = "median()"
) -> Method:
    """Return BASGD, which applies a robust rule to the means of buckets of gradients.

    Worker ``s`` puts its gradients into bucket ``s mod count``. Once none is empty, ::

        central <- central - learning_rate * rule(mean of bucket 0, mean of bucket 1, ...)

    and the buckets are emptied. Workers never wait.

    Parameters
    ----------
    count : int
        Buckets, at most the workers. To tolerate ``f`` Byzantine workers use more than ``2 f``.
    rule : Rule or str
        One of `asyncsim.aggregation`, made for ``count`` messages.

    Notes
    -----
    The policy `asyncsim.buckets` decides when a version is complete. The learning rate is taken at
    the completing visit. With one bucket and the rule ``"mean()"`` this is asynchronous SGD.

    References
    ----------
    Yang and Li 2021, "BASGD: buffered asynchronous SGD for Byzantine learning", arXiv 2003.00937,
    algorithm 2.
    """
    rule.require(count)
    if rule.averaging:
        raise InputError(
            f"rule = {rule.text!r}: averages over each worker's messages, and a bucket has "
            "several workers'"
        )

    def message(worker, update, start, central, visit):
        return -update / divisor(rate_at(learning_rate, visit, update)), worker, {}

    def combine(server, central, messages, visits):
        means, _ = group_means(messages, present(messages, visits), visits.worker % count, count)
        aggregated = rule.combine(server, means, jnp.ones(count, bool), visits.key)
        return Applied(
            central - rate_at(learning_rate, completing(visits), central) * aggregated.vector,
            aggregated.state,
        )

    return Method(
        gradient_steps(never_zero(learning_rate)),
        message=message,
        combine=combine,
        init_server=rule.init,
        timing=Timing(policy=buckets(count)),
        needs_key=rule.needs_key,
        coordinatewise=rule.coordinatewise,
    )
