"""The comparison of methods: its table, its measures and its figure."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import asyncsim
from asyncsim import Trace, methods, problems, simulate, study
from asyncsim.base.errors import InputError
from asyncsim.pages.page import two_runs
from asyncsim.replays.run import Run
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read
from asyncsim.study.sweep import sweep
from asyncsim.study.target import Target, time_to_target

compare = study.load("compare")
figures = figures_of("compare")
SMALL = {"workers": 3, "steps": 20, "seeds": 2, "evaluate_every": 2}


pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.mark.full
def test_methods_of_their_own_timing_and_tuned_rates_are_sorted(capsys):
    config = compare.Config(
        **SMALL, problem="quadratic", methods=("downpour", "sgd"), tune=(0.02, 0.2), target=0.1
    )
    folder, summary = compare.run(config)
    assert len(summary) == 2 * 2 * 2
    assert capsys.readouterr().err.count("it gets its own traces") == 1
    table = pd.read_csv(folder / compare.TABLE)
    assert sorted(table["method"]) == ["downpour", "sgd"]
    assert table["time_to_target"].is_monotonic_increasing
    for row in table.itertuples():
        rivals = summary[summary["method"] == row.method]["method.learning_rate"].unique()
        assert set(rivals) == {0.02, 0.2} and row.learning_rate in rivals
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", "tuning.png"}
    every = pd.read_csv(folder / compare.TUNING)
    assert (
        len(every) == 4 and every["best"].sum() == 2 and set(every["learning_rate"]) == {0.02, 0.2}
    )
    assert {"time_to_target", "gradients_to_target", "first_touch"} <= set(summary)


def test_the_page_animates_the_best_of_the_table_and_the_axis_holds_every_target_reached():
    """SGD has one worker and needs longer; the least loss at the end is of another rate than the
    least time.
    """
    options = {
        "problem": "quadratic(noise=1.0)",
        "methods": ("downpour", "sgd"),
        "tune": (0.05, 0.15),
        "target": 0.4,
    }
    folder, summary = compare.run(compare.Config(**SMALL | {"hold": 0}, **options))
    table = pd.read_csv(folder / compare.TABLE)
    best = table.iloc[0]
    least = summary.loc[
        summary.loc[summary["trace_file"] == summary["trace_file"].iloc[0], "train_loss"].idxmin()
    ]
    assert (least["method"], least["method.learning_rate"]) != (
        best["method"],
        best["learning_rate"],
    )
    ((title, run, _),) = two_runs(folder)
    assert title == f"{best['method']} at rate {best['learning_rate']}, seed 0"
    assert run.config["hyperparameters"]["learning_rate"] == best["learning_rate"]
    finished = read(folder, "compare")
    rows = summary.merge(table[["method", "learning_rate"]])
    reached = rows["time_to_target"][np.isfinite(rows["time_to_target"])]
    assert len(reached) and figures.curves(finished).axes[0].get_xlim()[1] > reached.max()


@pytest.mark.full
def test_target_and_costs_are_those_of_runs_and_traces():
    config = compare.Config(**SMALL, methods=("downpour",), learning_rate=0.1, target=1.7, hold=0)
    folder, summary = compare.run(config)
    row = pd.read_csv(folder / compare.TABLE).iloc[0]
    times, gradients = [], []
    for run_folder, trace_file in summary[["run_folder", "trace_file"]].to_numpy():
        evaluations = Run.load(folder / run_folder).evaluations
        at = next(entry.Index for entry in evaluations.itertuples() if entry.train_loss <= 1.7)
        (before, after), losses = (
            evaluations["commit_time"].loc[at - 1 : at],
            evaluations["train_loss"],
        )
        part = np.log(losses[at - 1] / 1.7) / np.log(losses[at - 1] / losses[at])
        times.append(before + part * (after - before))
        frame = Trace.load(folder / trace_file).frame
        gradients.append((frame["commit_time"] <= times[-1]).sum())
    assert (
        row["time_to_target"] == pytest.approx(np.mean(times))
        and row["first_touch"] == row["time_to_target"]
    )
    assert row["time_to_target_sd"] == pytest.approx(np.std(times, ddof=1))
    np.testing.assert_allclose(summary["time_to_target"], times)
    np.testing.assert_allclose(summary["gradients_to_target"], gradients)
    assert row["gradients_to_target"] == np.mean(gradients)
    assert row["reached"] == 2 and row["discarded"] == 0
    assert row["messages"] == 2 * len(frame) and row["gigabytes"] == pytest.approx(
        2 * 60 * 17_226 * 4 / 1e9
    )


def _round(methods, **options):
    """Simulate three rounds of a method's cluster; return the seconds and the bytes of a round."""
    config = compare.Config(problem="quadratic", methods=methods, compute="1", **options)
    (cell,) = sweep(config, [{}])
    (method,) = cell.methods
    cluster, _ = cell.cluster_of(method)
    trace = simulate(cluster, 3 * cluster.workers)
    costs = compare._costs(cell, method, trace)
    first, *_, last = trace.frame["commit_time"].unique()
    return (last - first) / 2, 1e9 * costs["gigabytes"] / 3, costs["messages"]


@pytest.mark.parametrize(
    ("collective", "seconds", "sent"),
    [
        # 4 workers, 80 bytes at 40 bytes/s, .5 s a message. Six messages of a quarter, one after
        # the other.
        ("ring", 6 * (0.5 + 0.5), 2 * 3 * 80),
        ("tree", 4 * (2.0 + 0.5), 2 * 3 * 80),  # two levels up, two down
        # A half, a quarter, a quarter, a half.
        ("halving_doubling", 1.0 + 0.5 + 0.5 + 1.0 + 4 * 0.5, 4 * 1.5 * 80),
        ("shared_link", 4 * 2.0 + 0.5 + 4 * 2.0 + 0.5, 8 * 80),
        # A ring of two at each site, a ring of two between them, a message to the other at each.
        ("two_level", 2 * (1.0 + 0.5) + 2 * (1.0 + 0.5) + 2.5, 4 * 80 + 2 * 80 + 2 * 80),
    ],
)
@pytest.mark.parametrize("method", ["batch_sgd", "batch_sgd(policy='barrier(collective={})')"])
def test_a_round_of_each_collective_by_hand(method, collective, seconds, sent):
    """Whether the cluster has the all-reduce or the method asks for it: a second of computing, then
    the all-reduce.
    """
    options = dict(workers=4, latency="0.5", bandwidth=40.0, message_bytes=80.0)
    if collective == "two_level":
        options["sites"] = (2, 2)
    if method == "batch_sgd":
        options["policy"] = f"barrier(collective={collective})"
    measured = _round((method.format(collective),), **options)
    assert measured == (pytest.approx(1 + seconds), pytest.approx(sent), 24)


def test_a_lone_worker_has_no_network():
    for method in ("sgd", "entropy_sgd"):
        far = dict(sites=(1, 2), far_latency="2", server_site=1, bandwidth=40.0, message_bytes=80.0)
        window = methods.METHODS[method]().timing.window or 1
        measured = _round((method,), workers=3, latency="0.5", service="0.25", **far)
        assert measured == (pytest.approx(window + 0.25), 0, 0)


def test_a_rule_needs_the_messages_that_an_all_reduce_adds():
    robust = methods.robust()
    trace = simulate(asyncsim.Cluster(4, 1.0, policy="barrier(collective=ring)"), 8)
    with pytest.raises(InputError, match="an all-reduce adds the messages"):
        asyncsim.replay(trace, robust, problems.quadratic([1.0]))


@pytest.mark.parametrize(
    ("losses", "target", "hold", "time"),
    [
        ([4.0, 1.0, 0.25], 0.5, 0, 1.5),  # half of the way in the logarithm
        ([4.0, 1.0, 0.25], 5.0, 0, 0.0),  # met from the start
        ([4.0, 1.0, 3.0, 0.5], 1.0, 0, 1.0),  # the first time counts
        ([4.0, 0.0], 1.0, 0, 0.75),  # no logarithm
        ([4.0, 1.0, np.nan], 0.5, 0, np.inf),
        ([4.0, 1.0, 4.0, 1.0, 0.5, 0.25], 2.0, 1, 2.5),  # the first touch is not held
        ([4.0, 1.0, 4.0, 1.0, 0.5, 0.25], 2.0, 2, 2.5),
        ([4.0, 1.0, 4.0, 1.0, 0.5], 2.0, 2, np.inf),  # nor is what the run's end cuts off
        ([1.0, 1.0], 2.0, 2, np.inf),
    ],
)
def test_time_to_a_target_is_read_between_evaluations(losses, target, hold, time):
    assert time_to_target(
        pd.Series(range(len(losses))), pd.Series(losses), target, hold
    ) == pytest.approx(time)


def test_accuracies_are_reached_from_below():
    evaluations = pd.DataFrame({"commit_time": [0.0, 1.0, 2.0], "test_accuracy": [0.0, 0.5, 0.875]})
    target = Target(0.75, "test_accuracy")
    assert str(target) == "a test accuracy of 0.75"
    assert target.time(evaluations) == pytest.approx(
        1.5, rel=1e-5
    )  # half of the way in the logarithm of the error
    exact = evaluations.assign(test_accuracy=np.array([0.5, 0.9, 1.0], np.float32))
    assert [Target(most, "test_accuracy").time(exact) for most in (0.9, 1.0)] == pytest.approx(
        [1, 2], rel=1e-4
    )
    assert np.isinf(Target(0.9, "test_accuracy").time(evaluations))


@pytest.mark.full
def test_a_target_that_is_not_held_until_the_end_is_said(capsys):
    options = {"workers": 2, "steps": 8, "seeds": 2, "evaluate_every": 2, "problem": "quadratic"}
    _, first = compare.run(compare.Config(**options, methods=("downpour",)))
    folder, _ = compare.run(
        compare.Config(
            **options, methods=("downpour",), target=1.001 * first["train_loss"].max(), hold=4
        )
    )
    row = pd.read_csv(folder / compare.TABLE).iloc[0]
    assert row["reached"] == 0 and row["cut_off"] == row["touched"] == 2
    assert (
        "touched by 2 of 2 seeds, but 2 runs ended before it was held: increase --steps"
        in capsys.readouterr().out
    )


def judged(**options):
    """Two parameters that move towards one; measured also by how far they have come and by how far
    they have to go.
    """

    def evaluate(params, data):
        return {
            "loss": jnp.mean((params - 1) ** 2),
            "come": jnp.mean(params),
            "gap": 1 - jnp.mean(params),
        }

    problem = problems.custom(
        lambda key: jnp.zeros(2),
        lambda params, batch, key: jnp.mean((params - 1) ** 2),
        evaluate=evaluate,
    )
    return compare.Config(
        problem=problem, methods=("downpour",), workers=2, steps=4, **{"tune": (0.1, 0.2)} | options
    )


def test_a_target_of_what_is_measured_and_one_that_the_start_meets(capsys):
    def goal(**options):
        return compare.Config(**options).goal

    assert goal(measure="test_accuracy", target=0.9) == Target(0.9, "test_accuracy", 2)
    assert goal(measure="test_accuracy") == Target(0.95, "test_accuracy", 2)
    assert goal(measure="train_come", best="most").of == goal().of == "train_loss"
    assert goal(measure="test_loss", target_of="train_accuracy").of == "train_accuracy"
    compare.run(judged(seeds=1, target=5.0, tune=None))
    assert (
        "note: the start meets a training loss of 5 already in 1 of 1 seeds; give a lower --target"
        in (capsys.readouterr().err)
    )


@pytest.mark.full
def test_a_budget_of_time_is_the_same_for_all():
    options = {
        "workers": 4,
        "seeds": 2,
        "problem": "quadratic",
        "methods": ("downpour", "sgd"),
        "compute": "1",
    }
    folder, summary = compare.run(compare.Config(**options, service=0.0, time_budget=30.5))
    assert (summary["simulated_seconds"] == 30).all()
    finished = read(folder, "compare")
    assert {len(finished.trace(file).accepted) for file in summary["trace_file"]} == {4 * 30, 30}
    with pytest.raises(
        InputError, match=r"^time_budget = 0\.5: ends before the first commit of seed 0; give more$"
    ):
        compare.run(compare.Config(**options, time_budget=0.5))


def test_measures_that_there_are_not_are_listed():
    with pytest.raises(
        InputError,
        match=r"^measure = 'train_gab': unknown; did you mean 'train_gap'\? choose from ",
    ):
        compare.run(judged(measure="train_gab"))
    with pytest.raises(InputError, match=r"^measure = 'train_come': .* best = 'least' or 'most'$"):
        compare.run(judged(measure="train_come"))
    with pytest.raises(
        InputError,
        match=r"^best = 'most': smaller values of time_to_target are better; leave it out$",
    ):
        compare.run(judged(best="most"))


@pytest.mark.parametrize("options", [{"learning_rate": 100.0, "x64": True}, {"steps": 1}])
@pytest.mark.full
def test_runs_that_diverge_or_are_short_or_lone_are_drawn_in_silence(options, recwarn):
    given = {
        "workers": 3,
        "steps": 100,
        "seeds": 2,
        "problem": "quadratic",
        "methods": ("sgd", "gem"),
        **options,
    }
    folder, summary = compare.run(compare.Config(**given))
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
    figure = figures.curves(read(folder, "compare"))
    diverged = (summary["status"] == "diverged").any()
    assert diverged == ("learning_rate" in options)
    assert np.isfinite(figure.axes[0].get_ylim()).all()


@pytest.mark.full
def test_figures_draw_the_measure_in_one_panel():
    twins = [methods.downpour()._replace(name=name) for name in ("one", "other")]
    options = {
        "workers": 2,
        "steps": 30,
        "seeds": 2,
        "methods": tuple(twins),
        "problem": "digits(hidden=[8])",
    }
    folder, _ = compare.run(compare.Config(**options, measure="test_accuracy", compute="1"))
    figure = figures.curves(read(folder, "compare"))
    assert len(figure.axes) == 1 and figure.axes[0].get_ylabel() == "test accuracy"
    table = pd.read_csv(folder / compare.TABLE)
    assert table["same_as_above"].tolist() == [False, True]
