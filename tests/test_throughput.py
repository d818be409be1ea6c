"""The throughput study: what its contenders compute, its table and its figure; never how fast
anything is.
"""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, Constant, InputError, methods, problems, replay, simulate, study
from asyncsim.benchmark import contenders, turns
from asyncsim.pages.command import draw_folder
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.study.finished import figures as figures_of

throughput = study.load("throughput")
figures = figures_of("throughput")
full = pytest.mark.full

METHODS = {"downpour": methods.downpour(learning_rate=0.1), "gem": methods.gem(learning_rate=0.1)}


def mnist(network: str):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((24, 28, 28), np.float32)
    images = {"image": image, "label": rng.integers(0, 10, 24, np.int32)}
    return mnist_from_arrays(images, images, batch_size=4, dropout=0.0, network=network)


#: Without randomness of their own, which PyTorch would draw otherwise.
PROBLEMS = {
    "quadratic": lambda: problems.quadratic(np.linspace(0.1, 1, 16)),
    "digits": lambda: problems.digits(batch_size=8, hidden=(16,)),
    "cnn": lambda: mnist("cnn"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few visits, and a handful of images."""
    monkeypatch.setattr(throughput, "VISITS", 50)
    monkeypatch.setattr(contenders, "_IMAGES", 640)


@pytest.fixture
def told(told):
    return lambda *arguments: told("throughput", *arguments, "--out=mine")


# What the contenders compute


@pytest.mark.parametrize("method", METHODS)
def test_the_usual_loop_computes_what_a_replay_does(method):
    # Two workers that never end at the same time: the loop's own random times are in no other order
    # then.
    cluster, problem = (
        Cluster(2, [Constant(1.0), Constant(1.37)], service=0.0),
        PROBLEMS["quadratic"](),
    )
    loop = contenders.UsualLoop(METHODS[method], problem, cluster)
    assert loop.run(20) > 0
    replayed = replay(simulate(cluster, 20), METHODS[method], problem, progress=False)
    np.testing.assert_allclose(loop.losses, replayed.commits["loss"], rtol=1e-4)
    np.testing.assert_allclose(loop.central, replayed.params, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize(
    ("task", "method"), [("digits", "gem"), ("quadratic", "downpour"), ("cnn", "downpour")]
)
def test_loops_in_jax_and_in_pytorch_compute_the_same(task, method):
    from asyncsim.benchmark import pytorch

    problem, cluster = PROBLEMS[task](), Cluster(3, "gamma(1, 0.2)", service=0.0)
    ours, theirs = (
        kind(METHODS[method], problem, cluster)
        for kind in (contenders.UsualLoop, pytorch.TorchLoop)
    )
    for loop in (ours, theirs):
        loop.run(8)
    # In float32; GEM divides by updates that may be as small as rounding, so a few elements may
    # differ by the clip.
    np.testing.assert_allclose(
        theirs.losses, np.array(ours.losses), rtol=2e-3 if method == "gem" else 1e-4
    )
    axes = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
    flat = np.concatenate(
        [tensor.numpy().transpose(axes[tensor.ndim]).reshape(-1) for tensor in theirs.central]
    )
    agree = np.isclose(flat, ours.central, rtol=0, atol=1e-4 * np.abs(ours.central).max())
    assert agree.mean() > (0.99 if method == "gem" else 0.99999)


@pytest.mark.parametrize(
    ("task", "way", "size"),
    [
        *(("quadratic", "map", 3), ("quadratic", "call", 1)),
        pytest.param("cnn", "vmap", 3, marks=full),
    ],
)
def test_gradients_alone_are_the_problems_gradients(task, way, size):
    problem = PROBLEMS[task]()
    alone = contenders.GradientsAlone(problem, workers=5)
    _, planned = alone._program(size, way)
    first = worker, _, rows = [leaf[0] for leaf in planned]
    assert len(set(np.asarray(worker).tolist())) == size
    _, trees = jax.jit(alone._piece, static_argnums=0)(
        way, alone._params, alone._data, alone._key, first
    )
    params = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(0))
    )
    for i in range(size):
        batch = jax.tree.map(lambda array, i=i: jnp.asarray(array)[rows[i]], problem.train)
        expected = jax.grad(problem.loss)(params, batch, jax.random.key(0))
        for got, wanted in zip(jax.tree.leaves(trees), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                got if way == "call" else got[i], wanted, rtol=1e-4, atol=1e-5
            )


def test_a_replay_that_diverges_is_named():
    case, cluster = turns.Case("quadratic", 2, "downpour"), Cluster(2, "gamma(1, 0.2)", service=0.0)
    run = contenders.replaying(
        case, cluster, methods.downpour(learning_rate=1e3), PROBLEMS["quadratic"](), 200
    )
    with pytest.raises(
        InputError, match="methods: quadratic, 2 workers, downpour: the replay diverged at commit"
    ):
        run(200)


# Turns


def test_ratios_are_of_the_same_turn_and_first_calls_do_not_count():
    called = []

    def of(name, rates):
        coming = iter([1e-9, *rates])

        def run(amount):
            called.append(name[0])
            return amount / next(coming)

        return turns.Contender(name, 10, run)

    sides = [of("replay", [9.0, 20.0, 10.0]), of("gradients alone", [10.0, 20.0, 40.0])]
    table = turns.measure(turns.Case("cnn", 100, "gem"), sides, 3)
    assert list(table.columns) == list(turns.COLUMNS) and called == [*"rg", *"rggrrg"]
    assert table.iloc[1, 4:].tolist() == pytest.approx([10, 20.0, 10.0, 40.0, 0.9, 0.25, 1.0])
    assert table["per_second"][0] == pytest.approx(10.0) and table["ratio"].isna().tolist() == [
        True,
        False,
    ]
    again = pd.concat([table.assign(workers=10, ratio=table["ratio"] / 2), table])
    assert (
        throughput.verdict(again) == "replay at 0.450 to 0.900 of the rate of its gradients alone"
    )


# The study


@pytest.mark.parametrize(
    ("task", "workers", "names"),
    [
        ("quadratic", [2, 3], ["gem"]),
        pytest.param("digits", [3], ["hogwild", "lsgd"], marks=full),
    ],
)
def test_study_of_replays(told, task, workers, names):
    arguments = [f"--tasks={task}", "--workers", *map(str, workers), f"--methods={','.join(names)}"]
    code, out, err = told(*arguments, "--repeats=2", "--seconds=.001")
    assert code == 0, err
    summary = pd.read_csv("mine/summary.csv")
    cases = [(count, name) for count in workers for name in names]
    assert (
        list(summary[["workers", "method"]].drop_duplicates().itertuples(index=False, name=None))
        == cases
    )
    loops = summary[summary["contender"].str.startswith("usual loop")]
    assert set(loops["method"]) == {"gem", "downpour"} & set(names)
    assert (summary["per_second_min"] <= summary["per_second"]).all() and (
        summary["per_second_min"] > 0
    ).all()
    assert out[-4].startswith("verdict: replay ")
    assert out[-2].startswith("wrote mine: config.json, summary.csv, made.json, report.html")
    assert json.loads(Path("mine/config.json").read_text())["methods"] == names
    assert f"{task}, {workers[-1]} workers, " in err[-1] and "turn 2 of 2" in err[-1]


def test_study_of_simulation_and_its_figure(told):
    code, out, err = told("--workers", "2", "3", "--repeats=1", "--tasks=trace")
    assert code == 0, err
    summary = pd.read_csv("mine/summary.csv")
    assert list(summary["contender"]) == ["simulate", "usual SimPy model"] * 2
    assert out[-4].startswith("verdict: simulation ") and out[-4].endswith(
        " times as fast as the usual SimPy model"
    )
    first = [path.read_bytes() for path in draw_folder(Path("mine"))]
    assert [path.read_bytes() for path in figures.draw("mine")] == first[
        :-1
    ]  # the last is the page
