"""Replays of several servers: equal to the loop over parts, for coordinate-wise methods."""

import functools

import jax
import numpy as np
import optax
import pytest
from cases import make_problem
from coordinates import WORKERS, deviation_of_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from sharded_loop import ShardedLoop
from test_shards import sharded

from asyncsim import (
    Cluster,
    attacks,
    methods,
    recorders,
    replay,
    simulate,
)
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import find_parts, partition_of

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


def options(**changes):
    """The arguments of a cluster whose parts of a message are committed at different times."""
    times = {"service": "exponential(0.1)", "latency": "exponential(0.2)"}
    return {"workers": 5, "compute": "gamma(1, 0.5)", **times, "servers": 4, **changes}


@functools.cache
def make_sharded(commits=40, **changes):
    return simulate(Cluster(**options(**changes)), commits)


@jax.enable_x64(True)
def deviations(trace, method, problem, attack=None):
    """Return the relative deviations from the loop, of the commits' columns and the parameters."""
    run = replay(
        *(trace, method, problem),
        precision="float64",
        record=[recorders.energy()],
        attack=attack,
        progress=False,
    )
    method, problem = under_attack(method, problem, attack, trace.workers)
    partition = partition_of(problem, trace.cluster.servers)
    entries = [[] for _ in partition.names]
    for owner, begin, end in zip(
        partition.owners, partition.bounds, partition.bounds[1:], strict=False
    ):
        entries[owner] += range(begin, end)
    table, central = ShardedLoop(trace, method, problem, [np.array(of) for of in entries]).run()
    columns = ["loss", "update_norm", "central_energy", "proxy_energy"]
    found = [*run.commits[columns].to_numpy().T, ravel_pytree(run.params)[0]]
    return [
        np.abs(vector - expected).max() / np.abs(expected).max()
        for vector, expected in zip(found, [*table.T, central], strict=True)
    ]


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


# The numbers.


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, methods.gem),
        pytest.param(
            {"protocol": "read_then_write", "exclusive": False},
            methods.gem,
            marks=pytest.mark.full,
        ),
        pytest.param({"policy": "buffered(3)"}, methods.robust, marks=pytest.mark.full),
        pytest.param(
            {"protocol": "write_then_read", "policy": "rounds()"},
            methods.malenia,
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_replay_equals_the_loop_over_parts(changes, method):
    if "policy" in changes and (policy := method().timing.policy) is not None:
        changes = {**changes, "policy": policy}
    trace = make_sharded(**changes)
    assert max(deviations(trace, method(), make_problem("quadratic"))) < ROUND_OFF


ANY_TIMING = [methods.gem, methods.aeasgd, lambda: methods.softsync(policy=None)]


@pytest.mark.full
@settings(max_examples=2, deadline=None, derandomize=True)
@given(cluster=sharded(), which=st.integers(0, len(ANY_TIMING) - 1), seed=st.integers(0, 2**32))
def test_replays_of_drawn_clusters_equal_the_loop(cluster, which, seed):
    trace = simulate(cluster, 30, seed)
    assert max(deviations(trace, ANY_TIMING[which](), make_problem("quadratic"))) < ROUND_OFF


@pytest.mark.full
def test_groups_of_tensors_have_their_own_servers(servers=("0.weight", "0.bias,1")):
    """The first group may have runs on both sides of another, and the groups any order."""
    trace = make_sharded(servers=servers)
    method = methods.downpour(optimizer=optax.sgd(0.05, momentum=0.9))
    assert max(deviations(trace, method, make_problem("digits"))) < ROUND_OFF


@pytest.mark.full
def test_an_attack_knows_the_messages_of_its_shard():
    trace, problem = make_sharded(), make_problem("quadratic")
    attack = attacks.alie(1, z=1.5)
    assert max(deviations(trace, methods.downpour(), problem, attack)) < ROUND_OFF


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
    """Slots hold each version from its commit to its last reader; no two versions share one."""
    trace = simulate(cluster, commits, seed).accepted
    order, parts = find_parts(trace), trace.parts
    parts = parts[parts["outcome"].isin(["applied", "buffered"])].reset_index(drop=True)
    assert order.depends_on[order.first].tolist() <= order.first.tolist()
    assert (order.depends_on[order.first] <= order.first).all()
    assert (np.diff(order.parts_at_end) >= 0).all() and len(order.parts_at_end) == commits
    versions = trace.reads[trace.reads["shard"] >= 0].set_index(["worker", "job", "shard"])
    versions = versions["version"]
    for shard in range(cluster.servers):
        rows, held = parts[parts["shard"] == shard], {}
        held[order.read_slot[:, shard][_reads_of(order, versions, shard) == 0].max(initial=0)] = 0
        for part in rows.itertuples():
            job = order.job[part.Index]
            read = versions[(part.worker, part.job, shard)]
            assert held.get(order.read_slot[job, shard], 0) == read
            if order.separate_pushes:
                assert held.get(order.push_slot[part.Index], 0) == part.push_version
            if part.outcome == "applied" and order.write_slot[part.Index] < order.slots[shard]:
                held[order.write_slot[part.Index]] = part.version


def _reads_of(order, versions, shard):
    jobs = zip(order.worker.tolist(), order.number.tolist(), strict=True)
    return np.array([versions[(worker, number, shard)] for worker, number in jobs])


# Runs and ensembles.
