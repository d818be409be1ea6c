"""Studies of outer momentum and of optimizers under delay: small runs, formulas and verdicts."""

import re

import numpy as np
import pandas as pd
import pytest

from asyncsim import methods, prescribed, problems, replay, study, theory
from asyncsim.study import command as commands
from asyncsim.study.finished import figures
from asyncsim.study.finished import read as read_study

outer_momentum = study.load("outer_momentum")
under_delay = study.load("optimizers_under_delay")

SMALL = {
    "outer_momentum": [
        *("--workers", "2", "--delays", "0", "--tune", "0.2", "0.6", "--server-momentum", "0.9"),
        *("--window", "2", "--steps", "4", "--problem", "quadratic"),
    ],
    "optimizers_under_delay": [
        *("--optimizers", "adamw_90", "muon", "--delays", "0", "1", "--tune", "1", "0.1"),
        *("--gradients", "6", "--stages", "2", "--problem", "digits(hidden=[4])"),
    ],
}


@pytest.fixture
def quick_limits(monkeypatch):
    monkeypatch.setattr(outer_momentum, "_LIMIT_COMMITS", 100)


# Outer momentum


@pytest.mark.parametrize("rule", ["nesterov", "heavy_ball"])
def test_outer_momentum_is_its_formula(rule):
    """The effective rate is the server's rate over one minus the momentum."""
    curvature, effective, momentum, local, window = np.array([1.0, 0.2]), 0.6, 0.8, 0.3, 2
    trace = prescribed(3, 40, 4, window=window)
    method = outer_momentum.outer(effective, momentum, rule, local)
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
def test_measured_limits_are_the_roots(delay, rule):
    trace = prescribed(delay, 2000, delay + 1)
    for momentum, limit in outer_momentum.measured_limits(trace, rule, (0.5, 0.9)).items():
        root = theory.momentum_stable_rate(momentum, delay, rule)
        assert limit == pytest.approx(root, rel=0.01)


def runs_of(harms, seeds=3, noise=0.02):
    """Return a summary in which momentum 0.9 has these harms, by case and comparison.

    Without momentum the loss is 1 at the effective rate 0.1, which is best, and 2 at 0.2.
    """
    rows = []
    for case, (equal_rate, equal_effective, best) in harms.items():
        losses = {("plain", 0.0): {0.1: 1.0, 0.2: 2.0}}
        for rule in ("nesterov", "heavy_ball"):
            losses[rule, 0.9] = {0.1: equal_effective, 0.2: best, 0.1 / (1 - 0.9): equal_rate}
        for seed in range(seeds):
            for (rule, momentum), curve in losses.items():
                for rate, loss in curve.items():
                    shift = noise * np.sin(seed + 10 * rate + momentum)
                    rows.append(
                        {
                            "case": case,
                            "seed": seed,
                            "rule": rule,
                            "server_momentum": momentum,
                            "effective_rate": rate,
                            "first_loss": 20.0,
                            "train_loss": loss * np.exp(shift),
                        }
                    )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("queue", "cause"),
    [
        ((10.0, 1.05, 1.0), "a larger effective rate, which only staleness makes harmful."),
        ((10.0, 9.0, 1.0), "staleness, not a larger effective rate."),
        # Half of ten, in logarithms.
        ((10.0, 10**0.5, 1.0), "undecided between a larger effective rate and staleness."),
        # A diverged run counts with the loss at its start.
        ((np.inf, 1.05, 1.0), "a larger effective rate, which only staleness makes harmful."),
    ],
)
def test_verdict_on_outer_momentum(queue, cause):
    table = outer_momentum.comparisons(runs_of({"fixed 0": (0.5, 1.0, 0.5), "queue": queue}))
    text = outer_momentum.verdict(table)
    assert text.count(cause) == 2
    assert text.startswith("Nesterov with momentum 0.9 behind the queue multiplies the loss by ")
    assert (
        len(re.findall(r"without staleness the equal rate multiplies it by 0\.(?:4|5)", text)) == 2
    )
    rows = table.set_index(["case", "rule", "comparison"])
    row = rows.loc["queue", "nesterov", "equal rate"]
    assert row["plain_rate"] == 0.1 and row["effective_rate"] == pytest.approx(1)
    assert row["harm"] == pytest.approx(min(queue[0], 20), rel=0.05)
    tuned = rows.loc["fixed 0", "nesterov", "each tuned"]
    assert tuned["harm"] == pytest.approx(0.5, rel=0.05)
    assert (table["low"] < table["harm"]).all() and (table["harm"] < table["high"]).all()


def test_a_rate_that_is_harmful_without_staleness_too():
    harms = {"fixed 0": (9.0, 1.0, 0.5), "queue": (10.0, 1.05, 1.0)}
    text = outer_momentum.verdict(outer_momentum.comparisons(runs_of(harms)))
    assert text.count("a larger effective rate, not staleness.") == 2


def test_no_verdict_on_outer_momentum_from_one_seed():
    table = outer_momentum.comparisons(runs_of({"queue": (10.0, 1.0, 1.0)}, seeds=1))
    assert "one seed cannot show the noise" in outer_momentum.verdict(table)
    table = outer_momentum.comparisons(runs_of({"fixed 0": (10.0, 1.0, 1.0)}))
    assert "no run behind the queue" in outer_momentum.verdict(table)


# Optimizers under delay


def test_the_variant_of_the_study_is_the_methods():
    """With adaptive 1 the study's optimizer is that of `methods.server_optimizer`."""
    trace = prescribed([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 10, 2)
    problem = problems.quadratic([1.0, 0.1])
    make = under_delay.OPTIMIZERS["adamw_90"].make
    for adaptive in (True, False):
        tried, method = (
            replay(trace, each, problem, precision="float64", progress=False).params
            for each in (
                under_delay.tried(0.3, float(adaptive), "adamw_90"),
                methods.server_optimizer(optimizer=make(0.3), adaptive=adaptive),
            )
        )
        np.testing.assert_allclose(tried, method, rtol=1e-12)


def delayed(gaps, seeds=3):
    """Return a summary with these gaps of optimizers by source; the best rate falls with delay."""
    rows = []
    for optimizer, by_source in gaps.items():
        for source, delay in (("fixed", 0), ("fixed", 2), ("queue", 2), ("pipeline", 1.5)):
            gap = by_source.get(source, 0.0) if delay else 0.0
            for seed in range(seeds):
                for rate in (0.1, 0.01):
                    best = rate == (0.1 if not delay else 0.01)
                    rows.append(
                        {
                            "source": source,
                            "delay": delay,
                            "optimizer": optimizer,
                            "adaptive": False,
                            "learning_rate": rate,
                            "seed": seed,
                            "first_loss": 2.3,
                            "train_loss": 0.5 + gap + 0.02 * np.sin(seed + 7 * delay)
                            if best
                            else np.inf,
                        }
                    )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("muon", "adamw", "words"),
    [
        (0.1, 0.6, "Muon bears delay better than AdamW 0.95 at equal tuning: with fixed delays"),
        (0.9, 0.6, "Muon bears delay worse than AdamW 0.95 at equal tuning: with fixed delays"),
    ],
)
def test_verdict_on_muon(muon, adamw, words):
    gaps = {"muon": {"fixed": muon, "queue": 0.2}, "adamw_95": {"fixed": adamw, "queue": 0.2}}
    gaps["adamw_90"] = {"fixed": 1.2}
    table = under_delay.gap_table(delayed(gaps))
    text = under_delay.verdict(table)
    assert text.startswith(words)
    rises = re.search(r"rises by (\S+) and that of AdamW 0.95 by (\S+),", text)
    np.testing.assert_allclose([float(rise) for rise in rises.groups()], [muon, adamw], atol=0.03)
    row = table.set_index(["optimizer", "source", "delay"]).loc[("muon", "fixed", 2)]
    assert (row["learning_rate"], row["shift"]) == (0.01, pytest.approx(0.1))
    assert row["gap"] == pytest.approx(muon, abs=0.03) and row["low"] < row["gap"] < row["high"]


# Both


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_small_studies(name, tmp_path, capsys, quick_limits):
    options = [name, *SMALL[name], "--seeds", "2"]
    whole = tmp_path / "whole"
    assert commands.main([*options, "--out", str(whole)]) == 0
    out = capsys.readouterr().out
    assert "multiplies the loss by" in out or "Muon bears delay" in out
    assert "a rate beyond it may be better" in out
    finished = read_study(whole, name)
    for path in figures(name).draw(whole):
        assert path.stat().st_size > 10_000
    assert set(finished.summary["status"]) <= {"finished", "diverged"}
