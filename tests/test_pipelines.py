"""Groups of tensors, and reads whose shards have different versions."""

import functools

import jax
import numpy as np
import pytest
from cases import EVERY, stopping
from event_loop import deviation, forced_deviation

from asyncsim import (
    Trace,
    methods,
    pipeline,
    prescribed,
    problems,
)
from asyncsim.base.files import field_values
from asyncsim.problems.partition import partition
from asyncsim.traces.columns import Source


def shapes(problem):
    return jax.eval_shape(problem.init, jax.random.key(0))


DIGITS = shapes(problems.digits(hidden=(64, 64, 64)))


def test_groups_of_tensors_partition_the_flat_vector():
    assert partition(DIGITS, ["0,2", "1", "[3]"]) == (
        ("0,2", "1", "[3]"),
        (0, 4160, 8320, 12480, 13130),
        (0, 1, 0, 2),
    )
    assert partition(DIGITS, ["[0]['weight'],[0]['bias']", "1,2,3"]).bounds == (0, 4160, 13130)
    assert partition(DIGITS, 3, by_layer=True).names == ("0", "1", "2,3")
    six = partition(DIGITS, 6)
    assert len(six.names) == 6 and np.diff(six.bounds).max() == 4160


RATE, MU = 0.1, 0.8

pytestmark = pytest.mark.usefixtures("float64")


COMMITS = 2 * EVERY
DRAWN = np.random.default_rng(0).integers(0, 9, (COMMITS, 2))
#: A trace and the delay of each group of layers in each commit.
DELAYS = {
    "stashed": (pipeline(3, COMMITS), np.tile([2, 1, 0], (COMMITS, 1))),
    "2bw": (pipeline(3, COMMITS, "2bw"), np.ones((COMMITS, 3), int)),
    "two stages": (pipeline(["0,1", "2"], COMMITS), np.tile([1, 0], (COMMITS, 1))),
    "first layer": (
        prescribed({"1,2": 0, "0": 12}, COMMITS, workers=4),
        np.tile([0, 12], (COMMITS, 1)),
    ),
    "split": (
        prescribed({"0,2": DRAWN[:, 0], "1": DRAWN[:, 1]}, COMMITS, workers=5),
        DRAWN[:, :2],
    ),
}


@pytest.mark.parametrize("name", DELAYS)
def test_groups_of_layers_are_read_as_late_as_stated(name):
    trace, delays = DELAYS[name]
    commits = np.arange(COMMITS)
    expected = commits[:, None] - np.minimum(delays, commits[:, None])
    np.testing.assert_array_equal(trace.group_versions(), expected)
    np.testing.assert_array_equal(commits - expected.min(1), trace.frame["staleness"])


@pytest.mark.parametrize(("name", "form"), [("gem", "single"), ("weight_prediction", "batch")])
def test_methods_with_states_equal_the_loop_over_events(name, form):
    trace, problem = DELAYS["split"][0], problems.digits(batch_size=8, hidden=(6, 5))
    replayed = stopping(trace, methods.METHODS[name](0.02), problem, form)
    deviations = forced_deviation(replayed, EVERY)
    assert max(deviations.values()) < 1e-11, deviations


# Methods: on a quadratic whose layers are coupled, in NumPy alone.

WIDTHS = (3, 2, 4)
MATRIX = (lambda a: a @ a.T / 9 + 0.1 * np.eye(9))(np.random.default_rng(1).normal(size=(9, 9)))


@functools.cache
def coupled():
    """Half a quadratic form of three layers."""

    def loss(params, batch, key):
        x = jax.numpy.concatenate(params)
        return x @ jax.numpy.asarray(MATRIX, x.dtype) @ x / 2

    return problems.Problem(
        "coupled",
        lambda key: [jax.numpy.ones(width) for width in WIDTHS],
        loss,
        lambda params, state, data: {"loss": loss(params, None, None)},
        config={},
    )


def momentum_loop(name, delays):
    """The central variable after each commit of a method, ``[commits + 1, parameters]``."""
    x, v, path, published = np.ones(9), np.zeros(9), [np.ones(9)], [np.ones(9)]
    for commit, delay in enumerate(np.minimum(delays, np.arange(len(delays))[:, None])):
        late = np.repeat(delay, WIDTHS)
        read = np.array(published)[commit - late, np.arange(9)]
        u = -RATE * MATRIX @ read
        v = MU * v + (u if name == "weight_prediction" else (1 - MU) * u)
        x = x + v
        ahead = {"weight_prediction": late * v, "async_nesterov": MU * v, "heavy ball": 0 * v}[name]
        path.append(x)
        published.append(x + ahead)
    return np.array(path)


@pytest.mark.parametrize(
    ("name", "timing", "layers"),
    [
        ("weight_prediction", "split", [0, 1, 0]),
        ("async_nesterov", "stashed", [0, 1, 2]),
        ("heavy ball", "split", [0, 1, 0]),
    ],
)
def test_methods_of_pipelines_equal_a_numpy_loop(name, timing, layers):
    trace, delays = DELAYS[timing]
    method = {
        "weight_prediction": lambda: methods.weight_prediction(RATE, MU),
        "async_nesterov": lambda: methods.async_nesterov(RATE, MU),
        "heavy ball": lambda: methods.async_nesterov(RATE, MU, look_ahead=False),
    }[name]()
    replayed = stopping(trace, method, coupled())
    expected = momentum_loop(name, delays[:, layers])
    for stop in (EVERY, COMMITS):
        replayed.advance(stop)
        assert deviation(replayed.state.central, expected[stop]) < 1e-10


# Traces.


def test_a_trace_of_groups_is_saved_and_summarised(tmp_path):
    trace = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 200, workers=10, seed=1)
    loaded = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert field_values(loaded, Source) == field_values(trace, Source) and loaded.reads.equals(
        trace.reads
    )
    assert np.array_equal(loaded.group_versions(), trace.group_versions())
    of_shard = (np.arange(200)[:, None] - trace.group_versions())[50:].mean(axis=0)
    assert (of_shard[0], of_shard[1]) == (24, 0) and 2 < of_shard[2] < 4
    assert trace.summary(warm_up=50)["staleness_mean"] == pytest.approx(of_shard.mean())
    assert trace.frame["staleness"][50:].min() == 24  # of the oldest
    assert repr(trace) == (
        "<Trace of 200 commits by 10 workers in 3 groups of tensors, prescribed, seed 1>"
    )
    longer = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 300, workers=10, seed=1)
    assert np.array_equal(longer.group_versions()[:200], trace.group_versions())
    fewer = prescribed({"2": "exponential(3)", "0,1": 2}, 200, workers=10, seed=1)
    assert np.array_equal(fewer.group_versions()[:, 0], trace.group_versions()[:, 2])
