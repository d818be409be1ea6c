"""The replay divided over several devices: the same numbers as the loop over events."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    EVERY,
    FORCED,
    METHODS,
    OWN,
    PROTOCOLS,
    counting,
    make_method,
    make_problem,
    make_trace,
    stateful_problem,
)
from event_loop import forced_deviation
from jax.sharding import Mesh, PartitionSpec

import asyncsim.replays.plan
import asyncsim.replays.replay
import asyncsim.replays.tuning
from asyncsim import Cluster, Gamma, InputError, problems, replay, simulate
from asyncsim.replays.dispatched import Apart
from asyncsim.replays.division import DEVICES, Division
from asyncsim.replays.replay import Replay
from asyncsim.replays.tuning import current_devices, gradients_at_once
from asyncsim.replays.ways import pieces_at_once

COMMITS = 300
#: Plain, with replicas that live on, with losses that the server sees, with replies.
LANES = ("gem", "aeasgd", "lsgd", "dana_zero")
TORN = {"protocol": "write_then_read", "discipline": "lock_free", "read_blocks": 3}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def devices(count):
    return jax.devices()[:count]


def divided(trace, method, problem, count):
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    return Replay(trace, method, problem, precision="float64", stops=stops, diagnose_every=0, devices=devices(count))


def combinations():
    """Three devices divide neither the commits of a piece nor the parameters evenly; two, on digits, both."""
    default = {("quadratic", "gem, paper", "read_then_write, two visits", 3)}
    # How a replay is divided depends on the method, and on the slots that a protocol needs; not on both at once.
    by_method = {("quadratic", method, "exchange", 3) for method in METHODS if method != "gem, paper"}
    by_protocol = {("quadratic", method, protocol, 3) for method in ("gem", "downpour") for protocol in PROTOCOLS}
    by_problem = {("digits", "gem", protocol, 2) for protocol in PROTOCOLS}
    for case in sorted(default | by_method | by_protocol | by_problem):
        marks = [] if case in default else pytest.mark.full
        yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@pytest.mark.parametrize(("problem", "method", "protocol", "count"), list(combinations()))
def test_divided_replay_is_the_loop_teacher_forced(problem, method, protocol, count):
    trace = make_trace(protocol, workers=1 if method == "sgd" else 7, commits=COMMITS)
    found = forced_deviation(divided(trace, make_method(method), make_problem(problem), count), EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
@pytest.mark.parametrize("case", OWN)
def test_own_methods_are_divided_by_commits_only(case, lenient):
    make, protocol, window = OWN[case]
    trace = make_trace(protocol, window, commits=COMMITS)
    found = forced_deviation(divided(trace, make(), make_problem("quadratic"), 3), EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "server state",
        "server memory, backup",
        "message with the central variable, and resume",
    ],
)
def test_own_methods_that_say_so_are_divided_by_parameters(case, lenient):
    make, protocol, window = OWN[case]
    trace, method = make_trace(protocol, window, commits=COMMITS), make()._replace(elementwise=True)
    running = divided(trace, method, make_problem("quadratic"), 3)
    assert {shard.data.shape[-1] for shard in running.state.read.addressable_shards} == {6}  # of 16, filled up to 18
    found = forced_deviation(running, EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
def test_a_problem_with_state():
    trace, method = make_trace(window=3, commits=COMMITS), make_method("gem")
    found = forced_deviation(divided(trace, method, stateful_problem(), 2), EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
def test_numbers_of_as_many_workers_as_parameters():
    trace = make_trace(workers=16, commits=4 * EVERY)
    found = forced_deviation(divided(trace, counting(), make_problem("quadratic"), 2), EVERY)
    assert max(found.values()) < FORCED, found


def test_each_device_holds_its_part_of_every_worker():
    running = divided(make_trace(commits=COMMITS), make_method("gem"), make_problem("digits"), 2)
    vectors = [leaf for leaf in jax.tree.leaves(running.state) if leaf.ndim == 2 and leaf.size]
    assert len(vectors) == 3  # what was read, momentum, pulled
    for leaf in vectors:
        assert [shard.data.size for shard in leaf.addressable_shards] == [leaf.size // 2] * 2


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_runs_repeat_and_record_as_on_one_device(precision):
    trace, method, problem = make_trace(commits=COMMITS), make_method("downpour"), make_problem("digits")
    one, two, again = (
        replay(trace, method, problem, precision=precision, progress=False, devices=devices(count))
        for count in (1, 2, 2)
    )
    assert two.commits.equals(again.commits) and two.evaluations.equals(again.evaluations)
    assert two.diagnostics.equals(again.diagnostics)
    tolerance = 1e-4 if precision == "float32" else 1e-10  # DOWNPOUR does not amplify round-off
    for table in ("commits", "evaluations", "diagnostics"):
        found, expected = getattr(two, table), getattr(one, table)
        assert list(found.columns) == list(expected.columns)
        numbers = expected.select_dtypes("number").columns
        np.testing.assert_allclose(found[numbers], expected[numbers], rtol=tolerance, atol=tolerance)
    assert jax.tree.map(np.shape, two.params) == jax.tree.map(np.shape, one.params)


@pytest.mark.full
def test_gems_diagnostics_on_two_devices():
    trace, method, problem = make_trace(commits=20), make_method("gem"), make_problem("digits")
    one, two = (
        replay(trace, method, problem, precision="float64", diagnose_every=1, progress=False, devices=devices(count))
        for count in (1, 2)
    )
    assert len(one.diagnostics) > 0
    np.testing.assert_allclose(two.diagnostics["value"], one.diagnostics["value"], atol=1e-9)


def test_all_devices_unless_one_is_chosen_or_there_is_little_to_divide():
    def current(parameters, divided=True):
        return current_devices(parameters, 10, divided)

    assert current(10_000) == (jax.devices()[0],)  # the tests' choice
    with jax.default_device(jax.devices()[1]):
        assert current(10_000) == (jax.devices()[1],)
    with jax.default_device(None):
        assert current(10_000) == tuple(jax.devices())
        assert len(current(16)) == 1
        assert len(current(10_000, divided=False)) == 1


@pytest.mark.full
def test_no_more_devices_of_a_cpu_than_workers():
    """One worker's commits each depend on the one before, so that a second device would have nothing to do."""
    problem = dataclasses.replace(problems.digits(), map_on_cpu=True)
    with jax.default_device(None):
        used = {
            workers: Replay(make_trace(workers=workers, commits=40), make_method("downpour"), problem).devices
            for workers in (1, 2, 7)
        }
    assert used == {1: tuple(devices(1)), 2: tuple(devices(2)), 7: tuple(devices(3))}


def test_very_long_vectors_keep_to_one_device_of_a_cpu(monkeypatch):
    problem = dataclasses.replace(problems.digits(), map_on_cpu=True)
    monkeypatch.setattr(asyncsim.replays.ways, "VERY_LONG_VECTOR", problem.parameter_count)
    with jax.default_device(None):
        assert Replay(make_trace(commits=40), make_method("gem"), problem).devices == tuple(devices(1))


@pytest.mark.parametrize(
    ("rule", "timing", "dispatched"), [("gem", {}, True), ("gem", TORN, False), ("lsgd", {}, False)]
)
def test_one_device_of_a_cpu_where_commits_are_dispatched(rule, timing, dispatched, monkeypatch):
    problem = dataclasses.replace(problems.digits(), map_on_cpu=True)
    monkeypatch.setattr(asyncsim.replays.tuning, "_LONG_VECTOR", 0)
    monkeypatch.setattr(asyncsim.replays.ways, "gradients_at_once", lambda: 4)
    trace = simulate(Cluster(7, Gamma(1.0, cv=0.3), service=0.02, **timing), 40, 0)
    with jax.default_device(None):
        running = Replay(trace, make_method(rule), problem)
        assert running.devices == tuple(devices(1 if dispatched else 3))
        assert isinstance(running.running._held, Apart) is dispatched
        assert pieces_at_once(trace, make_method(rule), problem) == (4 if dispatched else 3)


def test_gradients_at_once_are_at_most_the_cores_and_four(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    for count, expected in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, n=count: set(range(n)), raising=False)
        assert gradients_at_once() == expected
    monkeypatch.setenv("NPROC", "2")
    assert gradients_at_once() == 2


@pytest.mark.parametrize("given", [[], [3], 2, "cpu"])
def test_what_is_no_device(given):
    with pytest.raises(InputError, match=r"devices = .*: must be one or more different devices"):
        replay(make_trace(commits=20), make_method("gem"), make_problem("quadratic"), devices=given)


def test_a_device_given_twice():
    with pytest.raises(InputError, match="different devices"):
        replay(make_trace(commits=20), make_method("gem"), make_problem("quadratic"), devices=devices(1) * 2)


@pytest.mark.parametrize("by_parameters", [True, False])
@pytest.mark.parametrize("parameters", [11, 12])
def test_rows_change_hands_and_come_back_in_order(by_parameters, parameters):
    division = Division(devices=3, lanes=2, parameters=parameters, by_parameters=by_parameters)
    rows = np.arange(6 * division.padded, dtype=float).reshape(6, -1)

    def there_and_back(rows):
        whole = division.to_lanes(rows)
        return whole, division.to_shards(whole), division.of_all(division.own(jax.numpy.arange(6)))

    split = PartitionSpec(None, DEVICES) if by_parameters else PartitionSpec()
    outputs = (PartitionSpec(DEVICES), split, PartitionSpec())
    mapped = jax.shard_map(
        there_and_back, mesh=Mesh(devices(3), DEVICES), in_specs=(split,), out_specs=outputs, check_vma=False
    )
    whole, back, commits = mapped(rows)
    np.testing.assert_array_equal(whole, rows[[0, 3, 1, 4, 2, 5]])  # the lanes of one device after the other's
    np.testing.assert_array_equal(back, rows)
    np.testing.assert_array_equal(commits, np.arange(6))


@pytest.mark.parametrize(
    ("method", "in_turn", "elementwise"),
    [
        pytest.param("gem", False, True, marks=pytest.mark.full),
        *(pytest.param(*case, True, marks=pytest.mark.full) for case in itertools.product(LANES, [False, True])),
        *(pytest.param(method, False, False, marks=pytest.mark.full) for method in LANES),
    ],
)
def test_several_lanes_on_each_device_are_the_loop(method, in_turn, elementwise, monkeypatch):
    """Pieces of eight commits of seven workers: never full; shards that are filled up."""
    usual, sizes = asyncsim.replays.plan.tuning, {"piece_sizes": (8,), "in_turn": in_turn}
    monkeypatch.setattr("asyncsim.replays.plan.tuning", lambda *given: usual(*given)._replace(**sizes))
    monkeypatch.setattr("asyncsim.replays.division.DIVIDED", 1)
    rule = make_method(method)._replace(elementwise=elementwise)
    running = divided(make_trace(commits=COMMITS), rule, make_problem("quadratic"), 2)
    found = forced_deviation(running, EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.parametrize(
    "parameters",
    [2_007, *(pytest.param(size, marks=pytest.mark.full) for size in (1_999, 2_000, 17_226, 32_767, 32_768))],
)
def test_squared_norms_of_vectors_of_members_and_of_shards(parameters):
    """Also where they are summed part upon part, with and without a rest."""
    vector = np.random.default_rng(0).standard_normal(parameters)
    expected = [vector @ vector, 4 * vector @ vector]
    given = [jnp.asarray(vector), 2 * jnp.asarray(vector)]
    whole = Division(devices=1, lanes=1, parameters=parameters, by_parameters=False)
    np.testing.assert_allclose(whole.squares(given), expected, rtol=1e-13)  # sums of thousands of terms
    np.testing.assert_allclose(whole.squares([one.astype("float32") for one in given]), expected, rtol=1e-5)
    np.testing.assert_allclose(whole.squares([jnp.stack(given)])[0], expected, rtol=1e-13)

    shards = Division(devices=3, lanes=1, parameters=parameters, by_parameters=True)
    filled_up = np.pad(vector, (0, shards.padded - parameters), constant_values=1e3)
    mapped = jax.shard_map(
        lambda shard: shards.total(shards.squares([shard, 2 * shard])),
        mesh=Mesh(devices(3), DEVICES),
        in_specs=PartitionSpec(DEVICES),
        out_specs=PartitionSpec(),
    )
    np.testing.assert_allclose(mapped(filled_up), expected, rtol=1e-13)


def test_shards():
    division = Division(devices=3, lanes=2, parameters=10, by_parameters=True)
    assert (division.piece_size, division.shard, division.padded) == (6, 4, 12)
    assert [division.lanes_of(count) for count in (1, 3, 4, 6)] == [1, 1, 2, 2]
    whole = division._replace(by_parameters=False)
    assert (whole.shard, whole.padded) == (10, 10)
    assert division._replace(parameters=17_226).shard == 5_760  # 90 times 64, the first from 5,742 on
