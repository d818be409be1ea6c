"""Replays of several servers: equal to the loop over parts, for coordinate-wise methods."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import make_problem
from coordinates import WORKERS, deviation_of_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from sharded_loop import ShardedLoop
from test_shards import PROTOCOLS, sharded

from asyncsim import (
    Cluster,
    InputError,
    attacks,
    methods,
    recorders,
    replay,
    replay_ensemble,
    simulate,
)
from asyncsim.methods import Method, gradient_steps
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import find_parts, partition_of

ROUND_OFF = 1e-12
#: Methods that parts of a vector do not suit: matrices; delays, which a replay of several servers
#: does not state; messages with a count for each fragment; and a momentum that differs too little
#: after a few commits.
WHOLE = ("ringmaster_lmo", "weight_prediction", "decoupled_diloco", "gem_yellowfin")
NAMED = {
    name: make
    for name, make in methods.METHODS.items()
    if name not in WHOLE and not (make().mix or make().meet)
}
RULES = ["mean()", "median()", "trimmed_mean(f=1)", "geometric_median()", "krum(f=0)", "cge(f=1)"]
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


def test_methods_of_whole_vectors_are_not_declared_coordinatewise():
    assert not any(methods.METHODS[name]().coordinatewise for name in WHOLE)


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


def test_a_false_declaration_is_found():
    def message(worker, update, start, central, visit):
        return update / jnp.linalg.norm(update), worker, {}

    normalised = Method("normalised", {}, gradient_steps(0.1), message=message, coordinatewise=True)
    assert deviation_of_parts(normalised) > 0.1


@pytest.mark.parametrize("name", [name for name in attacks.ATTACKS if name != "label_flip"])
def test_the_declaration_of_each_attack_is_true(name):
    attack = attacks.ATTACKS[name](1, **({"z": 1.5} if name == "alie" else {}))
    for method, messages in ((methods.downpour(), 1), (methods.softsync(policy=None), 3)):
        attacked, _ = under_attack(method, None, attack, WORKERS)
        largest = deviation_of_parts(attacked, messages)
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
        pytest.param(
            {"policy": "discard_stale(3)"},
            lambda: methods.softsync(policy=None),
            marks=pytest.mark.full,
        ),
        pytest.param({}, lambda: methods.dana_zero(learning_rate=0.01), marks=pytest.mark.full),
        pytest.param({"window": 3}, methods.aeasgd, marks=pytest.mark.full),
        pytest.param({"policy": "barrier()"}, methods.easgd, marks=pytest.mark.full),
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
@settings(max_examples=5, deadline=None, derandomize=True)
@given(cluster=sharded(), which=st.integers(0, len(ANY_TIMING) - 1), seed=st.integers(0, 2**32))
def test_replays_of_drawn_clusters_equal_the_loop(cluster, which, seed):
    trace = simulate(cluster, 30, seed)
    assert max(deviations(trace, ANY_TIMING[which](), make_problem("quadratic"))) < ROUND_OFF


@pytest.mark.full
@pytest.mark.parametrize("servers", [("0.weight", "0.bias,1"), ("1", "0")], ids=str)
def test_groups_of_tensors_have_their_own_servers(servers):
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


def test_a_single_group_is_a_single_server():
    """Its rows and numbers are those of a cluster without named groups, to the last bit."""
    problem, method = make_problem("digits"), methods.downpour()
    runs = [replay(make_sharded(20, servers=servers), method, problem) for servers in (1, ("0,1",))]
    assert runs[0].commits.equals(runs[1].commits)
    assert runs[0].evaluations.equals(runs[1].evaluations)


# The order of parts.


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_parts_of_a_message_are_committed_at_different_places(protocol):
    trace = make_sharded(200, **protocol)
    parts = trace.accepted.parts
    whole = parts[parts["commit"] >= 0].groupby("commit")
    assert (whole["version"].nunique() > 1).mean() > 0.3
    assert (whole["staleness"].nunique() > 1).mean() > 0.3


@settings(max_examples=30, deadline=None, derandomize=True)
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


def test_most_jobs_of_a_wave_are_computed_at_once():
    """With 16 workers and nearly constant times, half of them or more: as with one server."""
    cluster = Cluster(**options(workers=16, compute="gamma(1, 0.2)", servers=4))
    order = find_parts(simulate(cluster, 400).accepted)
    waves, start = 0, 0
    while start < len(order.depends_on):
        start = max(int(np.searchsorted(order.depends_on, start, side="right")), start + 1)
        waves += 1
    assert len(order.first) / waves > 6


# Runs and ensembles.


def test_an_ensemble_runs_one_by_one():
    trace, problem = make_sharded(20), make_problem("quadratic")
    runs = replay_ensemble(trace, methods.downpour, problem, seeds=[0, 3], learning_rate=0.05)
    alone = replay(trace, methods.downpour(learning_rate=0.05), problem, seed=3)
    assert runs[1].commits.equals(alone.commits)
    with pytest.raises(InputError, match=r"batched = True: .* \(4\) run one by one"):
        replay_ensemble(trace, methods.downpour, problem, seeds=[0, 1], batched=True)


def test_a_longer_run_begins_like_a_shorter_one():
    """Parts of messages that are incomplete at the end are committed, too."""
    problem, method = make_problem("quadratic"), methods.gem()
    short, long = (
        replay(make_sharded(commits), method, problem, precision="float64", evaluate_every=1)
        for commits in (20, 40)
    )
    assert (short.commits == long.commits[:20]).all().all()
    at = long.evaluations["commit"] == 20
    np.testing.assert_allclose(
        short.evaluations["train_loss"].iloc[-1], long.evaluations["train_loss"][at], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": methods.qsgd()}, "method = 'qsgd': needs all parameters at one instant"),
        ({"method": methods.robust("krum(f=0)")}, "method = 'robust': needs all parameters"),
        ({"attack": "gaussian(1)"}, r"attack = 'gaussian\(.*': needs whole messages"),
        ({"record": [recorders.positions(2)]}, r"record: positions\(\): all parameters"),
        ({"record": [recorders.energy(tensors=1)]}, r"record: energy\(tensors=1\): all par"),
        (
            {"method": methods.gem(), "record": [recorders.diagnostics(), recorders.positions(2)]},
            r"record: diagnostics\(\), positions\(\): all parameters .* servers = 4",
        ),
        ({"servers": 20}, "servers = 20: each holds a part of the parameters, and there are 16"),
        ({"servers": ("0", "2")}, "servers: no tensor of the problem is named '2'"),
        ({"servers": ("0", "0.bias,1")}, "servers: the tensor 0.bias is in '0' and in"),
    ],
)
def test_what_needs_all_parameters_at_one_instant_is_refused(arguments, message):
    arguments = dict(arguments)
    trace = make_sharded(20, servers=arguments.pop("servers", 4))
    method = arguments.pop("method", methods.downpour())
    problem = make_problem("digits" if "tensor " in message else "quadratic")
    with pytest.raises(InputError, match=message):
        replay(trace, method, problem, **arguments)


def test_one_device_computes_several_servers():
    devices = jax.devices() * 2
    if len(set(devices)) > 1:
        with pytest.raises(InputError, match=r"devices: .* several servers \(4\) has one device"):
            replay(
                make_sharded(20), methods.downpour(), make_problem("quadratic"), devices=devices[:2]
            )


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([], "servers: names no group"),
        (["0", ""], "servers: '' names no tensors"),
        ([1], "servers: 1 names no"),
    ],
)
def test_names_of_groups_are_texts(servers, message):
    with pytest.raises(InputError, match=message):
        Cluster(2, 1.0, servers=servers)


def test_groups_are_recorded_with_the_cluster():
    cluster = Cluster(2, 1.0, servers=["0", "1,2"])
    assert cluster.servers == ("0", "1,2") and cluster.server_count == 2
    assert Cluster.from_dict(cluster.to_dict()) == cluster
