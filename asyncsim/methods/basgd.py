"""BASGD: asynchronous SGD whose server applies a robust rule to the means of buckets of gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.base.errors import InputError, require_count
from asyncsim.byzantine.aggregation import Rule, parse_rule
from asyncsim.clusters.policy import buckets
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Schedule,
    State,
    Timing,
    divisor,
    gradient_steps,
    never_zero,
    rate_at,
    require_rate,
)
from asyncsim.methods.recipe import shares_programs


class BasgdServer(NamedTuple):
    """The buckets since the last version."""

    total: Array  #: sum of each bucket's gradients, shape ``[buckets, parameters]``
    number: Array  #: number of its gradients, shape ``[buckets]``
    rule: State  #: state of the rule


@shares_programs
def basgd(learning_rate: float | Schedule = LEARNING_RATE, count: int = 10, rule: Rule | str = "median()") -> Method:
    """Return BASGD, which applies a robust rule to the means of buckets of gradients.

    Worker ``s`` puts its gradients into bucket ``s mod count``. Once none is empty, ::

        central <- central - learning_rate * rule(mean of bucket 0, mean of bucket 1, ...)

    and the buckets are emptied. Workers never wait.

    Parameters
    ----------
    count : int
        Buckets, at most the workers. With ``f`` Byzantine workers more than ``2 f``, of which ``f`` may be theirs.
    rule : Rule or str
        One of `asyncsim.aggregation`, made for ``count`` messages.

    Notes
    -----
    When a version is made is timing: the policy `asyncsim.buckets`. The learning rate is that at the visit which makes
    it. With one bucket and the rule ``"mean()"`` this is asynchronous SGD.

    References
    ----------
    Yang and Li 2021, "BASGD: buffered asynchronous SGD for Byzantine learning", arXiv 2003.00937, algorithm 2.
    """
    require_rate("learning_rate", learning_rate)
    require_count("count", count)
    made = parse_rule(rule)
    made.require(count)
    if made.averaging:
        raise InputError(
            f"rule = {made.text!r}: averages over each worker's messages, and a bucket has several workers'"
        )

    def message(worker, update, start, central, visit):
        return -update / divisor(rate_at(learning_rate, visit, update)), worker, {}

    def apply(server, central, message, memory, visit):
        place = visit.worker % count
        total, number = server.total.at[place].add(message), server.number.at[place].add(1)

        def step(_):
            found = made.aggregate(server.rule, total / number[:, None], None, visit.key)
            rate = rate_at(learning_rate, visit, central)
            emptied = BasgdServer(jnp.zeros_like(total), jnp.zeros_like(number), found.state)
            return central - rate * found.vector, emptied

        def wait(_):
            return central, BasgdServer(total, number, server.rule)

        central, server = jax.lax.cond(jnp.asarray(visit.completes), step, wait, None)
        return Applied(central, server, memory)

    def init_server(central: Array) -> BasgdServer:
        return BasgdServer(
            jnp.zeros((count, *central.shape), central.dtype), jnp.zeros(count, central.dtype), made.init(central)
        )

    return Method(
        name="basgd",
        hyperparameters={"learning_rate": learning_rate, "count": count, "rule": made.text},
        optimizer=gradient_steps(never_zero(learning_rate)),
        message=message,
        apply=apply,
        init_server=init_server,
        timing=Timing(policy=buckets(count)),
        needs_key=made.needs_key,
    )
