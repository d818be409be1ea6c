"""The study of delays: its methods are their formulas, its tables and verdicts those of hand-made
summaries, and each question runs, resumes and draws.
"""

import numpy as np
import pandas as pd
import pytest

from asyncsim import (
    Exponential,
    methods,
    prescribed,
    problems,
    replay,
    simulate,
    study,
    theory,
)
from asyncsim.clusters.cluster import Cluster
from asyncsim.study import command as commands
from asyncsim.study.delays import names_of, tabulate
from asyncsim.study.finished import figures
from asyncsim.study.finished import read as read_study

delays = study.load("delays")


# Methods


@pytest.mark.parametrize("rule", ["nesterov", "heavy_ball"])
def test_outer_momentum_is_its_formula(rule):
    """The effective rate is the server's rate over one minus the momentum."""
    curvature, effective, momentum, local, window = np.array([1.0, 0.2]), 0.6, 0.8, 0.3, 2
    trace = prescribed(3, 40, 4, window=window)
    method = delays.outer(effective, momentum, rule, local)
    problem = problems.quadratic(curvature)
    run = replay(trace, method, problem, precision="float64", progress=False)
    path, m = [np.ones(2)], 0.0
    for version in trace.frame["read_version"]:
        change = path[version] * ((1 - local * curvature) ** window - 1)
        m = momentum * m + change
        step = momentum * m + change if rule == "nesterov" else m
        path.append(path[-1] + effective * (1 - momentum) * step)
    np.testing.assert_allclose(run.params, path[-1], rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(("delay", "rule"), [(1, "heavy_ball"), (4, "nesterov")])
def test_the_largest_stable_rate_is_that_of_theory(delay, rule):
    """Two per cent below it a quadratic's loss shrinks, two per cent above it grows."""
    trace = prescribed(delay, 2000, delay + 1)
    root = theory.momentum_stable_rate(0.9, delay, rule)
    for factor in (0.98, 1.02):
        method = delays.outer(factor * root, 0.9, rule, 1.0)
        problem = problems.quadratic([1.0])
        run = replay(trace, method, problem, precision="float64", progress=False)
        early, late = (
            run.commits["loss"].iloc[part].max() for part in np.split(np.arange(2000), 2)
        )
        assert (late > early) == (factor > 1)


def test_momentum_is_on_the_server():
    curvature, n, momentum = np.array([1.0, 0.1]), 3, -0.5
    trace = simulate(Cluster(n, Exponential(1.0)), 60)
    method, problem = delays.heavy_ball(0.2, momentum), problems.quadratic(curvature)
    run = replay(trace, method, problem, precision="float64", progress=False)
    path, m = [np.ones(2)], 0.0
    for version in trace.frame["read_version"]:
        m = momentum * m - 0.2 * curvature * path[version]
        path.append(path[-1] + m)
    np.testing.assert_allclose(run.params, path[-1], rtol=1e-10)


def test_the_adaptive_optimizer_is_the_methods():
    """With adaptive 1 the study's optimizer is that of `methods.server_optimizer`."""
    trace = prescribed([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 10, 2)
    problem = problems.quadratic([1.0, 0.1])
    make = delays.OPTIMIZERS["adamw_90"][1]
    for adaptive in (True, False):
        tried, method = (
            replay(trace, each, problem, precision="float64", progress=False).params
            for each in (
                delays.tried(0.3, float(adaptive), "adamw_90"),
                methods.server_optimizer(optimizer=make(0.3), adaptive=adaptive),
            )
        )
        np.testing.assert_allclose(tried, method, rtol=1e-12)


# Tables and verdicts


def runs_of(losses, seeds=3):
    """Return a summary from the losses of rows ``{keys: {rate: loss}}``; rows that are not listed
    at a rate are not there. Seeds scale all losses alike, but for one per cent.
    """
    rows = []
    for keys, curve in losses.items():
        for rate, loss in curve.items():
            for seed in range(seeds):
                noise = 2.0**seed * np.exp(0.01 * np.sin(seed + 10 * rate + len(str(keys))))
                row = dict(keys, learning_rate=rate, seed=seed, status="finished")
                rows.append({**row, "first_loss": 50.0, "train_loss": loss * noise})
    return pd.DataFrame(rows)


def row(**values):
    return tuple(values.items())


FRESH, LATE = {"source": "fixed", "delay": 0}, {"source": "fixed", "delay": 2}
OPTIMIZERS = {
    row(optimizer="muon", **FRESH): {0.1: 1.0, 0.01: 2.0},
    row(optimizer="muon", **LATE): {0.1: 3.0, 0.01: 1.2},
    row(optimizer="sgd", **FRESH): {0.1: 0.5, 0.01: 2.0},
    row(optimizer="sgd", **LATE): {0.1: np.inf, 0.01: 2.0},
}


def test_rows_count_at_their_best_rates_and_pairs_share_seeds():
    keys = ["source", "delay", "optimizer"]
    tables = tabulate(runs_of(OPTIMIZERS), keys, FRESH)
    best = tables.best.set_index(["optimizer", "delay"])
    assert best["learning_rate"].to_dict() == {
        ("muon", 0): 0.1,
        ("muon", 2): 0.01,
        ("sgd", 0): 0.1,
        ("sgd", 2): 0.01,
    }
    # The geometric mean of the seeds' factors 1, 2 and 4 is 2.
    assert best.loc[("muon", 2), "loss"] == pytest.approx(2 * 1.2, rel=0.02)
    assert best["ratio"].tolist() == pytest.approx([1, 1.2, 1, 4], rel=0.03)
    assert (best["low"] <= best["ratio"]).all() and (best["ratio"] <= best["high"]).all()
    assert best.loc[("muon", 2), ["low", "high"]].between(1.1, 1.3).all()  # paired over the seeds
    # A diverged run counts with the loss at its start.
    untuned = [1, 3, 1, 50 / (2 * 0.5)]
    assert best["untuned"].tolist() == pytest.approx(untuned, rel=0.03)
    assert len(tables.rates) == 8


def test_the_verdict_names_the_best_and_what_equals_it():
    question = delays.QUESTIONS["optimizers"]
    question = question._replace(compared=("optimizer",))
    tables = tabulate(runs_of(OPTIMIZERS), ["source", "delay", "optimizer"], FRESH)
    (text,) = question.verdicts(tables.pairs)
    assert text == "fixed: muon is the best optimizer (95% confidence, 3 seeds)"
    equal = {**OPTIMIZERS, row(optimizer="sgd", **LATE): {0.01: 0.6}}
    tables = tabulate(runs_of(equal), ["source", "delay", "optimizer"], FRESH)
    (text,) = question.verdicts(tables.pairs)
    assert text.startswith("fixed: undecided: ") and "leads, within the noise" in text
    first, _ = text.splitlines()
    assert len(first.split()) <= 15
    tables = tabulate(runs_of(OPTIMIZERS, seeds=1), ["source", "delay", "optimizer"], FRESH)
    assert list(question.verdicts(tables.pairs)) == ["fixed: one seed: no order"]
    alone = {key: losses for key, losses in OPTIMIZERS.items() if "sgd" in str(key)}
    tables = tabulate(runs_of(alone), ["source", "delay", "optimizer"], FRESH)
    assert list(question.verdicts(tables.pairs)) == ["fixed: sgd is the only optimizer"]


def test_edges_are_those_of_each_variant():
    """Rates of optimizers have different ranges."""
    losses = {
        row(optimizer="muon", **FRESH): {0.1: 1.0, 0.01: 2.0, 0.001: 3.0},
        row(optimizer="sgd", **FRESH): {10.0: 2.0, 1.0: 1.0, 0.1: 3.0},
    }
    question = delays.QUESTIONS["optimizers"]._replace(columns=("optimizer",))
    muon, sgd = question._edges(tabulate(runs_of(losses), ["source", "delay", "optimizer"], FRESH))
    assert muon.startswith("best at the largest rate of --tune, 0.1: fixed muon") and sgd == ""


def test_rows_are_named_without_zeros():
    table = pd.DataFrame({"rule": ["plain", "nesterov"], "server_momentum": [0.0, 0.9]})
    names = ["plain", "nesterov server momentum 0.9"]
    assert names_of(table, ["rule", "server_momentum"]).tolist() == names
    assert names_of(table, ["server_momentum"]).tolist()[0] == "server momentum 0"


def test_profiles_have_one_mean():
    for stages, staleness in ((2, 3), (4, 6), (5, 4)):
        for profile in delays.profiles(stages, staleness).values():
            assert np.mean(profile) == staleness


# The study

SMALL = {
    "optimizers": [
        *("--optimizers", "adamw_90", "--delays", "0", "1", "--tune", "1", "0.1"),
        *("--gradients", "6", "--stages", "2", "--problem", "digits(hidden=[4])"),
    ],
    "outer_momentum": [
        *("--workers", "2", "--delays", "0", "--tune", "0.2", "0.6", "--server-momentum", "0.9"),
        *("--window", "2", "--gradients", "16", "--problem", "quadratic"),
    ],
    "best_momentum": [
        *("--delays", "0", "7", "--gradients", "200", "--tune", "0.5", "3.3"),
        *("--server-momentum", "0.4", "0.67"),
    ],
    "pipeline": [
        *("--stages", "2", "--delays", "3", "--problem", "digits(hidden=[4])"),
        *("--methods", "downpour", "--tune", "0.1", "0.3", "--gradients", "60"),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("question", SMALL)
def test_each_question_runs_resumes_and_draws(question, tmp_path, capsys, quick_figures):
    options = ["delays", question, *SMALL[question], "--seeds", "2"]
    whole = tmp_path / "whole"
    assert commands.main([*options, "--out", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "a rate beyond it may be better" in printed and "verdict: " in printed
    finished = read_study(whole, "delays")
    assert finished.config["question"] == question
    files = {path: path.read_bytes() for path in whole.glob("*.csv")}
    assert all(path.exists() for path in figures("delays").draw(whole))
    next((whole / "parts").iterdir()).unlink()
    for path in files:
        path.unlink()
    assert commands.main(["delays", "--resume", str(whole)]) == 0
    assert {path: path.read_bytes() for path in files} == files
    if question == "best_momentum":
        check_momentum(finished)


def check_momentum(finished):
    """Heavy ball with condition number 100: 0.669, at a rate of 3.3 over the largest curvature."""
    best = finished.table("best.csv")
    best = best.loc[best.groupby("delay")["loss"].idxmin()].set_index("delay")
    assert tuple(best.loc[0, ["server_momentum", "learning_rate"]]) == (0.67, 3.3)
    assert best.loc[7, "server_momentum"] <= 0.4
    axes = figures("delays").momentum(finished).axes[0]
    (implicit,) = (line for line in axes.get_lines() if "implicit" in line.get_label())
    assert np.interp(4, *implicit.get_data()) == pytest.approx(0.75, abs=1e-3)
