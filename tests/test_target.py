"""The time to a target, and the evaluations around it."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from gem_results import make_run

from asyncsim import Cluster, InputError, methods, problems, replay, simulate, study
from asyncsim.study.target import Target, time_to_target

compare = study.load("compare")
NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("losses", "target", "hold", "time"),
    [
        ([4.0, 1.0, 0.25], 0.5, 0, 1.5),  # half of the way in the logarithm
        ([4.0, 1.0, 0.25], 5.0, 0, 0.0),  # met from the start
        ([4.0, 1.0, 3.0, 0.5], 1.0, 0, 1.0),  # the first time counts
        ([4.0, 0.0], 1.0, 0, 0.75),  # no logarithm
        ([4.0, 1.0, NAN], 0.5, 0, INF),
        ([4.0, 1.0, 4.0, 1.0, 0.5, 0.25], 2.0, 1, 2.5),  # the first touch is not held
        ([4.0, 1.0, 4.0, 1.0, 0.5, 0.25], 2.0, 2, 2.5),
        ([4.0, 1.0, 4.0, 1.0, 0.5], 2.0, 2, INF),  # nor is what the run's end cuts off
        ([1.0, 1.0], 2.0, 2, INF),
    ],
)
def test_time_to_a_target_is_read_between_evaluations(losses, target, hold, time):
    times = pd.Series(range(len(losses)))
    assert time_to_target(times, pd.Series(losses), target, hold) == pytest.approx(time)


def test_accuracies_are_reached_from_below():
    def time(target, accuracies):
        evaluations = {"commit_time": [0.0, 1.0, 2.0], "test_accuracy": accuracies}
        return Target(target, "test_accuracy").time(pd.DataFrame(evaluations))

    assert str(Target(0.75, "test_accuracy")) == "a test accuracy of 0.75"
    # Half of the way in the logarithm of the error.
    assert time(0.75, [0.0, 0.5, 0.875]) == pytest.approx(1.5, rel=1e-5)
    exact = np.array([0.5, 0.9, 1.0], np.float32)
    assert [time(target, exact) for target in (0.9, 1.0)] == pytest.approx([1, 2], rel=1e-4)
    assert time(0.9, [0.0, 0.5, 0.875]) == INF


def test_a_target_is_bounded_by_the_evaluations_around_it():
    trace = simulate(Cluster(workers=3, compute="constant(1)", service=0.1), 12)
    times, commits = trace.frame["commit_time"].to_numpy(), [0, 1, 2, 6, 12]
    evaluations = pd.DataFrame({"commit": commits, "train_loss": [9.0, 8.0, 4.0, 1.0, 0.5]})
    evaluations["commit_time"] = np.r_[0.0, times][commits]
    for target, bounds in (
        (9.5, (0.0, 0.0)),
        (8.5, (times[0], times[0])),  # the first commit met it
        (2.0, (times[2], times[5])),
        (0.1, (INF, INF)),
    ):
        assert Target(target).bounded(evaluations, trace)[1:] == bounds
    run = make_run("gem", 3, steps=4)
    run.evaluations = evaluations
    reached = Target(2.0).reached(run, trace)
    low, middle, high = (reached[f"gradients_to_target{end}"] for end in ("_low", "", "_high"))
    assert (low, high) == (3, 6) and low <= middle <= high


@pytest.mark.parametrize(
    ("losses", "rises"),
    [
        ([1.0, 2.0, 3.0], True),
        ([1.0, 2.0, NAN], True),
        ([1.0, 2.0, 1.5], False),
        ([1.0, 2.0, 3.0, 0.5], False),  # as with momentum
        ([1.0, 0.5, 3.0], False),
        ([1.0, 2.0], False),
    ],
)
def test_a_loss_that_rises_from_the_start_is_noticed(losses, rises):
    trace = simulate(Cluster(workers=1, compute="constant(1)"), len(losses))
    run, commits = make_run("gem", 1, steps=len(losses)), np.arange(len(losses))
    table = {"commit": commits, "commit_time": 1.0 * commits, "train_loss": losses}
    run.evaluations = pd.DataFrame(table)
    assert Target(0.1).reached(run, trace)["rises"] == rises


def test_evaluations_begin_at_every_commit_until_the_target_is_met():
    trace = simulate(Cluster(workers=2, compute="constant(1)"), 80)
    problem, method = problems.quadratic([1.0, 0.1]), methods.downpour(learning_rate=0.05)
    evaluations, plain = (
        replay(trace, method, problem, evaluate_every=10, progress=False, **options).evaluations
        for options in ({"evaluate_until": Target(0.3).is_met_at}, {})
    )
    commits = evaluations["commit"].to_numpy()
    met = commits[np.argmax(evaluations["train_loss"] <= 0.3)]
    assert 1 < met < 60 and set(plain["commit"]) <= set(commits)
    early, late = np.diff(commits[commits <= met]), np.diff(commits[commits > met])
    assert (early <= np.maximum(1, 0.1 * commits[1 : len(early) + 1])).all()
    assert set(late) == {20}


def judged(**options):
    """Run a comparison of two parameters that move towards one; measured also by their distance."""

    def loss(params, batch, key):
        return jnp.mean((params - 1) ** 2)

    def evaluate(params, data):
        return {"loss": loss(params, data, None), "gap": 1 - jnp.mean(params)}

    problem = problems.custom(lambda key: jnp.zeros(2), loss, evaluate=evaluate)
    options = {"tune": (0.1, 0.2), "workers": 2, "steps": 4} | options
    compare.run(compare.Config(problem=problem, methods=("downpour",), **options))


def test_the_target_is_of_the_measure():
    def goal(**options):
        return compare.Config(**options).goal_on(None)

    assert goal(measure="test_accuracy", target=0.9) == Target(0.9, "test_accuracy", 2)
    assert goal(measure="test_accuracy") == Target(0.95, "test_accuracy", 2)
    assert goal(measure="train_gap", best="most").of == goal().of == "train_loss"
    assert goal(measure="test_loss", target_of="train_accuracy").of == "train_accuracy"


def test_a_target_that_the_start_meets_is_noted(capsys):
    judged(seeds=1, target=5.0, tune=None)
    note = (
        "note: the start, at 1, meets a training loss of 5 already in 1 of 1 seeds; give a lower "
        "--target"
    )
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "train_gab"}, "measure = 'train_gab': unknown; did you mean 'train_gap'"),
        ({"measure": "train_gap"}, "best = 'least' or 'most'"),
        ({"best": "most"}, "smaller values of time_to_target are better; leave it out"),
        ({"time_budget": 1e-6}, "ends before the first commit of seed 0; give more"),
    ],
)
def test_measures_without_values_or_a_direction_and_no_time_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        judged(**options)
