"""Replays of several servers: which methods they suit, and the order of jobs and parts.

Their numbers are a part of `test_slow_replay`.
"""

import functools

import numpy as np
import pytest
from cases import make_problem
from coordinates import WORKERS, deviation_of_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shards import sharded

from asyncsim import Cluster, attacks, methods, replay, simulate
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import find_jobs, trace_of_shard
from asyncsim.replays.waves import find_waves, separate_reads

ROUND_OFF = 1e-12
#: Methods that parts of a vector do not suit: matrices; delays, which a replay of several servers
#: does not state; and messages with a count for each fragment.
WHOLE = ("ringmaster_lmo", "weight_prediction", "decoupled_diloco")
NAMED = {
    name: make
    for name, make in methods.METHODS.items()
    if name not in WHOLE and not (make().mix or make().meet)
}
RULES = ["trimmed_mean(f=1)", "geometric_median()"]
VARIANTS = {
    **{f"robust {rule}": functools.partial(methods.robust, rule) for rule in RULES},
    "gem, paper": lambda: methods.gem(variant="paper"),
    "adag, scaled": lambda: methods.adag(form="scaled"),
    "aeasgd, remembered": lambda: methods.aeasgd(order="remembered"),
    "lsgd, groups": lambda: methods.lsgd(groups=3, global_every=2),
}


# The property.


@pytest.mark.parametrize(
    "name", [*NAMED, *(pytest.param(n, marks=pytest.mark.full) for n in VARIANTS)]
)
def test_the_declaration_of_each_method_is_true(name):
    """A method on parts of a vector is part of the method on the vector, if and only if declared.

    A version has several messages; for variants also one.
    """
    method, variants = {**NAMED, **VARIANTS}[name](), (3, 1) if name in VARIANTS else (3,)
    largest = max(deviation_of_parts(method, messages) for messages in variants)
    assert largest < ROUND_OFF if method.coordinatewise else largest > 1e-3


@pytest.mark.parametrize("name", [name for name in attacks.ATTACKS if name != "label_flip"])
def test_the_declaration_of_each_attack_is_true(name):
    attack = attacks.ATTACKS[name](1, **({"z": 1.5} if name == "alie" else {}))
    attacked, _ = under_attack(methods.softsync(policy=None), None, attack, WORKERS)
    largest = deviation_of_parts(attacked, messages=3)
    assert largest < ROUND_OFF if attack.coordinatewise else largest > 1e-3


def test_where_all_servers_agree_the_replay_is_that_of_one_server():
    """With constant times each shard has the rows of a single server."""
    problem, method = make_problem("quadratic"), methods.downpour()
    times = {"compute": [1.0, 1.37, 2.21], "service": 0.3, "latency": (0.07, 0.11)}
    one, several = (
        replay(
            simulate(Cluster(3, **times, servers=servers), 30), method, problem, precision="float64"
        )
        for servers in (1, 4)
    )
    for name in ("commit", "commit_time", "worker", "worker_step", "staleness"):
        assert one.commits[name].tolist() == several.commits[name].tolist()
    for name in ("loss", "update_norm"):
        np.testing.assert_allclose(several.commits[name], one.commits[name], rtol=ROUND_OFF)
    np.testing.assert_allclose(
        several.evaluations["train_loss"], one.evaluations["train_loss"], rtol=ROUND_OFF
    )
    np.testing.assert_allclose(several.params, one.params, rtol=ROUND_OFF)


# The order of parts.


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cluster=sharded(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_job_comes_after_its_reads_and_before_its_parts(cluster, commits, seed):
    """A shard's trace has its parts, and slots hold each version to its last reader."""
    trace = simulate(cluster, commits, seed).accepted
    jobs = find_jobs(trace)
    first = jobs.table["first"]
    assert (jobs.depends_on[first] <= first).all()
    assert (np.diff(jobs.parts_at_end) >= 0).all() and len(jobs.parts_at_end) == commits
    for shard in range(cluster.servers):
        parts = jobs.parts[jobs.parts["shard"] == shard]
        of_shard, job, used_at = trace_of_shard(trace, jobs, shard)
        assert (
            sorted(job) == list(range(len(first))) and (used_at[len(parts) :] <= len(parts)).all()
        )
        for name in ("worker", "job", "read_version", "staleness", "push_version", "version"):
            assert of_shard.frame[name].tolist()[: len(parts)] == parts[name].tolist(), name
        waves, held = find_waves(of_shard, used_at=used_at), {}
        writes = separate_reads(waves.read, waves.slot)
        for position in range(len(parts) + 1 if waves.reads == "separate" else 0):
            held |= {s: p for p, s in zip(*writes, strict=True) if p == position}
            for row in np.flatnonzero(used_at == position):
                assert held.get(waves.slot[row], 0) == waves.read[row]
