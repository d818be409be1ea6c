"""The throughput study: what its contenders compute, its table and its figure; never how fast
anything is.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, Constant, InputError, methods, problems, replay, simulate, study
from asyncsim.pages.command import draw_folder
from asyncsim.study.finished import figures as figures_of

throughput = study.load("throughput")
figures = figures_of("throughput")
METHODS = {"downpour": methods.downpour(learning_rate=0.1), "gem": methods.gem(learning_rate=0.1)}


def quadratic():
    return problems.quadratic(np.linspace(0.1, 1, 16))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few visits, and a handful of images."""
    monkeypatch.setattr(throughput, "VISITS", 50)
    monkeypatch.setattr(throughput, "IMAGES", 640)


@pytest.fixture
def told(told):
    return lambda *arguments: told("throughput", *arguments, "--out=mine")


# What the contenders compute


@pytest.mark.parametrize("method", METHODS)
def test_the_usual_loop_computes_what_a_replay_does(method):
    # Two workers that never end at the same time: the loop's own random times are in no other order
    # then.
    cluster, problem = Cluster(2, [Constant(1.0), Constant(1.37)], service=0.0), quadratic()
    central, losses = throughput.usual_loop(METHODS[method], problem, cluster)(20)
    replayed = replay(simulate(cluster, 20), METHODS[method], problem, progress=False)
    np.testing.assert_allclose(losses, replayed.commits["loss"], rtol=1e-4)
    np.testing.assert_allclose(central, replayed.params, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_alone_are_the_problems_gradients(batch):
    problem = problems.digits(batch_size=8, hidden=(4,))
    losses, squares = throughput.gradients_alone(problem, 5, batch)(1)
    params, place = problem.init(jax.random.key(0)), 7  # the second gradient of worker 2
    rows = throughput.task_of(problem, 5).rows([2], [1])[0]
    minibatch = jax.tree.map(lambda array: jnp.asarray(array)[rows], problem.train)
    loss, gradient = jax.value_and_grad(problem.loss)(params, minibatch, jax.random.key(0))
    assert len(losses) == throughput._GRADIENTS
    np.testing.assert_allclose(losses[place], loss, rtol=1e-4)
    square = sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(squares[place], square, rtol=1e-4)


def test_a_replay_that_diverges_is_named():
    case, method = throughput.Case("quadratic", 2, "downpour"), methods.downpour(learning_rate=1e3)
    trace = simulate(Cluster(2, "gamma(1, 0.2)", service=0.0), 200)
    message = "methods: quadratic, 2 workers, downpour: the replay diverged at commit"
    with pytest.raises(InputError, match=message):
        throughput.replayed(case, trace, method, quadratic(), 200)


# Turns


def test_ratios_are_of_the_same_turn_and_first_calls_do_not_count(monkeypatch):
    called, clock = [], [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])

    def of(name, rates):
        coming = iter([1.0, *rates])

        def run(amount):
            called.append(name[0])
            clock[0] += amount / next(coming)

        return throughput.Contender(name, 10, run)

    sides = [of("replay", [9.0, 20.0, 10.0]), of("gradients alone", [10.0, 20.0, 40.0])]
    table = throughput.measure(throughput.Case("cnn", 100, "gem"), sides, 3)
    assert called == [*"rg", *"rggrrg"]
    assert table.iloc[1, 4:].tolist() == pytest.approx([10, 20.0, 10.0, 40.0, 0.9, 0.25, 1.0])
    assert table["per_second"][0] == pytest.approx(10.0) and table["ratio"].isna().tolist() == [
        True,
        False,
    ]
    again = pd.concat([table.assign(workers=10, ratio=table["ratio"] / 2), table])
    (line,) = throughput.verdicts(again)
    assert line == "replay at 0.450 to 0.900 of the rate of its gradients alone"


# The study


@pytest.mark.parametrize(
    ("task", "workers", "names"),
    [
        ("quadratic", [2, 3], ["gem"]),
        pytest.param("digits", [3], ["hogwild", "lsgd"], marks=pytest.mark.full),
    ],
)
def test_study_of_replays(told, task, workers, names):
    options = [f"--tasks={task}", "--workers", *map(str, workers), "--methods", *names]
    code, out, err = told(*options, "--repeats=2", "--seconds=.001")
    assert code == 0, err
    summary = pd.read_csv("mine/summary.csv")
    cases = [*summary[["workers", "method"]].drop_duplicates().itertuples(index=False, name=None)]
    assert cases == [(count, name) for count in workers for name in names]
    loops = summary[summary["contender"] == "usual loop"]
    assert set(loops["method"]) == {"gem", "downpour"} & set(names)
    assert summary["per_second_min"].gt(0).all()
    assert (summary["per_second_min"] <= summary["per_second"]).all()
    assert out[-4].startswith("verdict: replay ")
    assert out[-2].startswith("wrote mine: config.json, summary.csv, made.json, report.html")
    assert json.loads(Path("mine/config.json").read_text())["methods"] == names
    assert f"{task}, {workers[-1]} workers, " in err[-1] and "turn 2 of 2" in err[-1]


def test_study_of_simulation_and_its_figure(told):
    code, out, err = told("--workers", "2", "3", "--repeats=1", "--tasks=trace")
    assert code == 0, err
    assert list(pd.read_csv("mine/summary.csv")["contender"]) == ["simulate"] * 2
    assert re.fullmatch(r"verdict: simulation of .* visits/s", out[-4])
    *first, _ = [path.read_bytes() for path in draw_folder(Path("mine"))]  # the last is the page
    assert [path.read_bytes() for path in figures.draw("mine")] == first
