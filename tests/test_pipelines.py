"""Groups of tensors, and reads whose shards have different versions."""

import functools

import jax
import numpy as np
import pytest
from event_loop import deviation, forced_deviation

from asyncsim import (
    Trace,
    methods,
    pipeline,
    prescribed,
    problems,
    recorders,
    replay,
)
from asyncsim.problems.partition import partition
from asyncsim.replays.replay import Replay
from asyncsim.replays.running import start


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


RATE = 0.1

pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def perceptron(form):
    """A perceptron of three layers, whose commits are computed in this form on a CPU."""
    return problems.digits(batch_size=8, hidden=(6, 5) if form == "batch" else (32, 16))


def event_loop(trace, problem, delays, seed=0):
    """Descend with gradients of stated delays, keeping all versions of every layer; float64."""
    params = start(problem, seed, np.float64, 1)[0].params
    versions = [[jax.tree.map(np.asarray, layer)] for layer in params]
    gradient = jax.jit(jax.grad(lambda params, batch: problem.loss(params, batch, None)))
    batches = problem.batch_indices(seed, trace.workers)
    data = {**problem.train, "image": problem.train["image"].astype(np.float64)}
    for commit, delay in enumerate(delays):
        worker, job = commit % trace.workers, commit // trace.workers
        rows = batches.rows([worker], [job])[0, 0]
        read = [
            layer[commit - min(late, commit)] for layer, late in zip(versions, delay, strict=True)
        ]
        gradients = gradient(read, {name: values[rows] for name, values in data.items()})
        for layer, of_layer in zip(versions, gradients, strict=True):
            layer.append(
                {name: layer[-1][name] - RATE * np.asarray(of_layer[name]) for name in of_layer}
            )
    return [layer[-1] for layer in versions]


COMMITS = 90
DRAWN = np.random.default_rng(0).integers(0, 9, (COMMITS, 3))
#: A trace and the delay of each layer in each commit.
VECTORS = {
    "stashed": (pipeline(3, COMMITS), np.tile([2, 1, 0], (COMMITS, 1))),
    "2bw": (pipeline(3, COMMITS, "2bw"), np.ones((COMMITS, 3), int)),
    "two stages": (pipeline(["0,1", "2"], COMMITS), np.tile([1, 1, 0], (COMMITS, 1))),
    "first layer": (
        prescribed({"1,2": 0, "0": 12}, COMMITS, workers=4),
        np.tile([12, 0, 0], (COMMITS, 1)),
    ),
    "drawn": (
        prescribed({str(i): DRAWN[:, i] for i in range(3)}, COMMITS, workers=5),
        DRAWN,
    ),
    "split": (
        prescribed({"0,2": DRAWN[:, 0], "1": DRAWN[:, 1]}, COMMITS, workers=5),
        DRAWN[:, [0, 1, 0]],
    ),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, ("batch", "single")[place % 2]) for place, name in enumerate(VECTORS)],
)
def test_a_replay_equals_a_loop_that_keeps_all_versions(name, form):
    (trace, delays), problem = VECTORS[name], perceptron(form)
    run = replay(trace, methods.downpour(RATE), problem, precision="float64", progress=False)
    expected = event_loop(trace, problem, delays)
    for found, value in zip(jax.tree.leaves(run.params), jax.tree.leaves(expected), strict=True):
        assert deviation(found, value) < 1e-12
    assert np.array_equal(
        trace.block_versions().min(1), np.arange(COMMITS) - run.commits["staleness"]
    )


@pytest.mark.parametrize("name", ["gem", "weight_prediction"])
def test_methods_with_states_equal_the_loop_over_events(name):
    trace, stops = VECTORS["split"][0], np.arange(30, COMMITS + 1, 30)
    method = methods.METHODS[name](0.02)
    replayed = Replay(
        trace,
        method,
        perceptron("single"),
        precision="float64",
        stops=stops,
        record=[recorders.energy()],
    )
    deviations = forced_deviation(replayed, every=30)
    assert max(deviations.values()) < 1e-11, deviations


# Methods: on a quadratic whose layers are coupled, in NumPy alone.

MU = 0.8
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


@pytest.mark.parametrize("name", ["weight_prediction", "async_nesterov", "heavy ball"])
@pytest.mark.parametrize("timing", ["stashed", "split"])
def test_methods_of_pipelines_equal_a_numpy_loop(name, timing):
    trace, delays = VECTORS[timing]
    method = {
        "weight_prediction": lambda: methods.weight_prediction(RATE, MU),
        "async_nesterov": lambda: methods.async_nesterov(RATE, MU),
        "heavy ball": lambda: methods.async_nesterov(RATE, MU, look_ahead=False),
    }[name]()
    stops = np.arange(30, COMMITS + 1, 30)
    replayed = Replay(trace, method, coupled(), precision="float64", stops=stops)
    expected = momentum_loop(name, delays)
    for stop in stops.tolist():
        replayed.advance(stop)
        assert deviation(replayed.state.central, expected[stop]) < 1e-10


# Traces.


def test_a_trace_of_groups_is_saved_and_summarised(tmp_path):
    trace = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 200, workers=10, seed=1)
    loaded = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert loaded.source == trace.source and loaded.reads.equals(trace.reads)
    assert np.array_equal(loaded.block_versions(), trace.block_versions())
    of_shard = (np.arange(200)[:, None] - trace.block_versions())[50:].mean(axis=0)
    assert (of_shard[0], of_shard[1]) == (24, 0) and 2 < of_shard[2] < 4
    assert trace.summary(warm_up=50)["staleness_mean"] == pytest.approx(of_shard.mean())
    assert trace.frame["staleness"][50:].min() == 24  # of the oldest
    assert repr(trace) == (
        "<Trace of 200 commits by 10 workers in 3 groups of tensors, prescribed, seed 1>"
    )
    longer = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 300, workers=10, seed=1)
    assert np.array_equal(longer.block_versions()[:200], trace.block_versions())
    fewer = prescribed({"2": "exponential(3)", "0,1": 2}, 200, workers=10, seed=1)
    assert np.array_equal(fewer.block_versions()[:, 0], trace.block_versions()[:, 2])
