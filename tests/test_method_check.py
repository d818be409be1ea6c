"""Methods checked before a replay: each message names the function, what it returned and what it
should.
"""

import dataclasses

import jax
import pytest

import asyncsim
from asyncsim import InputError, methods, problems
from asyncsim.methods import Timing
from asyncsim.replays.check import check_method

PROBLEM = problems.digits(hidden=(3,))
PARAMS = jax.eval_shape(PROBLEM.init, jax.random.key(0))


def damped(**fields):
    return methods.downpour()._replace(name="damped", **fields)


@pytest.mark.parametrize("text", ["barrier(8)", "neighbours(mix=before)", "cancel_stale(3)"])
def test_timing_takes_a_policys_text_as_a_cluster_does(text):
    timing = Timing(policy=text)
    assert timing == Timing(policy=asyncsim.clusters.policy.as_policy(text)) and hash(
        timing
    ) == hash(timing)
    assert dataclasses.replace(Timing(), policy=text) == timing
    check_method(damped(timing=timing), PARAMS)
    for policy in ("bariers(8)", asyncsim.buffered, 3):
        with pytest.raises(InputError, match="policy = "):
            Timing(policy=policy)


def test_a_method_with_a_policys_text_replays():
    trace = asyncsim.simulate(asyncsim.Cluster(4, 1.0, policy="barrier(2)"), 8)
    asyncsim.replay(trace, damped(timing=Timing(policy="barrier(count=2)")), PROBLEM)
    with pytest.raises(InputError, match=r"needs a trace with policy = barrier\(count=4\)"):
        asyncsim.replay(trace, damped(timing=Timing(policy="barrier(count=4)")), PROBLEM)


def by_loss(gradients, state, params=None, *, visit, **others):
    return jax.tree.map(lambda g: -g * visit.loss, gradients), state
