"""Groups of tensors, and reads whose shards have different versions."""

import functools

import jax
import numpy as np
import pytest
from event_loop import deviation

from asyncsim import (
    InputError,
    methods,
    pipeline,
    prescribed,
    problems,
    replay,
)
from asyncsim.problems.partition import partition
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


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["0", "1", "2"], "tensor 3.bias is in no group"),
        (["0", "0.weight", "1", "2", "3"], "tensor 0.weight is in '0' and in '0.weight'"),
        (["0", "1", "2", "3", "4"], "no tensor of the problem is named '4'"),
        (9, "from 1 to 8, as the problem has 8 tensors"),
        (0, "from 1 to 8"),
    ],
)
def test_groups_that_are_no_partition_are_refused(groups, message):
    with pytest.raises(InputError, match=message):
        partition(DIGITS, groups)


RATE = 0.1

pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def perceptron(form):
    """A perceptron of three layers, whose commits are computed in this form on a CPU."""
    return problems.digits(batch_size=8, hidden=(6, 5) if form == "batch" else (32, 16))


def event_loop(trace, problem, delays, seed=0):
    """Descend with gradients of stated delays, keeping all versions of every layer; float64."""
    params, _ = start(problem, seed, np.float64)
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


@pytest.mark.parametrize("form", ["batch", "single"])
@pytest.mark.parametrize("name", VECTORS)
def test_a_replay_equals_a_loop_that_keeps_all_versions(name, form):
    (trace, delays), problem = VECTORS[name], perceptron(form)
    run = replay(trace, methods.downpour(RATE), problem, precision="float64", progress=False)
    expected = event_loop(trace, problem, delays)
    for found, value in zip(jax.tree.leaves(run.params), jax.tree.leaves(expected), strict=True):
        assert deviation(found, value) < 1e-12
    assert np.array_equal(
        trace.block_versions().min(1), np.arange(COMMITS) - run.commits["staleness"]
    )
