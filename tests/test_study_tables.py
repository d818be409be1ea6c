"""The tables, verdicts and figures of the studies, of hand-made summaries with known numbers."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from gem_results import make_run

from asyncsim import study
from asyncsim.base.files import write_csv
from asyncsim.study import outcome
from asyncsim.study.comparison import Comparison, Results
from asyncsim.study.delays import names_of, tabulate
from asyncsim.study.finished import Finished, figures
from asyncsim.study.ranking import Measure
from asyncsim.study.target import Target
from asyncsim.traces.phases import IN_WORDS

delays = study.load("delays")
NAN, INF = np.nan, np.inf


def hand_made(runs, study_of=None, cells=("method",), **config):
    """Return the tables of a comparison with some runs, which are lists of rows or a table."""
    runs = pd.DataFrame(runs)
    runs = runs.assign(seed=runs.groupby([*cells, "method.learning_rate"]).cumcount())
    runs["status"] = np.where(runs["train_loss"].isna(), "diverged", "finished")
    values = {name: runs[name].iloc[0] for name in cells if name != "method"}
    comparison = study_of or Comparison("compare", **config)
    measure = Measure("accuracy", "most") if study_of else Measure("time_to_target")
    finished = Finished(Path(), {}, runs)
    cells = [SimpleNamespace(values=values)]
    return Results(comparison, None, cells, Target(0.3), finished, measure).ranked()


def timed(method, rate, times, train_loss=1.0, **columns):
    row = {"method": method, "method.learning_rate": rate, "train_loss": train_loss, **columns}
    row["simulated_seconds"] = 100.0
    return [{**row, "time_to_target": time, "first_touch": time} for time in times]


def test_rows_count_at_their_best_rate_and_are_ranked_within_a_setting():
    rows = [
        *timed("slow", 0.1, [40.0, 44.0, 42.0], window=1),
        *timed("slow", 0.2, [20.0, 22.0, 21.0], window=1),
        *timed("fast", 0.1, [10.0, 11.0, 10.5], window=1),
        *timed("slow", 0.1, [4.0, 4.4, 4.2], window=8),
        *timed("fast", 0.1, [INF, 12.0, 12.0], window=8),
    ]
    table = hand_made(rows, cells=("window", "method"))
    assert table.settings == ["window"] and table.compared == ["method"]
    best = table.best[["window", "method", "learning_rate", "time_to_target"]]
    assert best.to_numpy().tolist() == [
        [1, "fast", 0.1, 10.5],
        [1, "slow", 0.2, 21.0],
        [8, "slow", 0.1, pytest.approx(4.2)],
        [8, "fast", 0.1, INF],
    ]
    assert table.best["time_to_target_sd"][0] == 0.5
    # Twice as long with every seed, up to rounding: the interval is narrow around 2.
    assert table.best[["low", "high"]].loc[1].tolist() == pytest.approx([2, 2])
    assert table.best["low"][3] < 1 and np.isinf(table.best["high"][3])
    table = hand_made(rows, cells=("window", "method"), compared=("method", "window"))
    assert table.settings == [] and table.best["window"].tolist() == [8, 1, 1, 8]


@pytest.mark.parametrize(
    ("losses", "start"),
    [
        ((0.2, 0.1), "curves cross: fast is first at the target, slow has the lowest training"),
        ((0.1, 0.2), ""),
        ((0.1, 0.1), ""),
    ],
)
def test_curves_that_cross_are_named(losses, start):
    rows = [
        *timed("fast", 0.1, [10.0, 11.0, 10.5], losses[0]),
        *timed("slow", 0.1, [40.0, 44.0, 42.0], losses[1]),
    ]
    table = hand_made(rows)
    words = table._crossing(table.best, list(table.best["method"]))
    assert words.startswith(start) and bool(words) == bool(start)


def test_a_worst_case_counts_a_diverged_run_as_accuracy_0():
    """At 0.1 a seed diverges under the worst attack, and yet its mean accuracy is above the worst
    of 0.2.
    """
    columns = ["method.learning_rate", "attack", "accuracy"]
    rows = [
        (rate, attack, accuracy)
        for rate, attack, accuracies in (
            (0.1, "alie", [0.9, 0.9, 0.9]),
            (0.2, "alie", [0.3, 0.3, 0.3]),
            (0.1, "zero", [0.9, 0.9, 0.0]),
            (0.2, "zero", [0.8, 0.8, 0.8]),
        )
        for accuracy in accuracies
    ]
    runs = pd.DataFrame(rows, columns=columns).assign(method="median()", byzantine=2, is_weak=False)
    runs["train_loss"] = np.where(runs["accuracy"] == 0, NAN, 1)
    robustness = study.load("robustness").run.__self__
    table = hand_made(runs, robustness, ("byzantine", "attack", "method")).best
    (worst,) = table.itertuples()
    assert (worst.learning_rate, worst.attack, worst.seeds) == (0.1, "zero", 3)
    assert worst.accuracy == pytest.approx(0.6)


def test_speedups_are_over_the_fewest_workers_that_reach_the_target():
    times = {1: [INF, 30.0], 2: [5.0, 7.0], 4: [8.0, 16.0], 8: [2.0, 4.0]}
    rows = [
        row
        for workers, of_seeds in times.items()
        for row in timed("gem", 0.1, of_seeds, workers=workers, batch_size=8 // workers)
    ]
    table = hand_made(rows, cells=("workers", "method"))
    tables, (text, _) = study.load("speedup").speedups(table)
    speedup = tables["speedup.csv"]
    assert speedup["speedup"].tolist() == pytest.approx([NAN, 1, 0.5, 2], nan_ok=True)
    assert speedup["reached"].tolist() == [1, 2, 2, 2]
    assert speedup["time_to_target"].tolist() == [INF, 6, 12, 3]
    assert "with every seed" in text


def test_the_goodput_of_failures_is_what_deaths_and_restores_leave(monkeypatch):
    failures = study.load("failures")
    columns = ["policy", "deaths", "throughput", "kept", "died"]
    rows = [
        ("barrier", 0.0, 2.0, 1.0, 0),
        ("asynchronous", 0.0, 4.0, 1.0, 0),
        ("barrier", 20.0, 1.5, 0.8, 3),
        ("asynchronous", 20.0, 3.6, 1.0, 3),
    ]
    clusters = pd.DataFrame(rows, columns=columns).assign(theory="")
    names = failures.goodput.__globals__
    monkeypatch.setitem(names, "costs_of_clusters", lambda *_, **__: clusters.copy())
    keyed = SimpleNamespace(keys=["policy", "deaths", "method"])
    tables, (*_, text) = failures.goodput(keyed)
    assert tables["clusters.csv"]["remaining"].tolist() == pytest.approx([1, 1, 0.6, 0.9])
    assert text == ""
    clusters["died"] = 0
    assert failures.goodput(keyed)[1][-1].startswith("no worker died in these runs")


def test_energies_at_the_beginning_and_at_the_highest_later():
    run = make_run("gem", 2, steps=40)
    step = run.commits["commit"] / 2
    ratio = np.select([step < 10, (step >= 20) & (step < 21), step == 30], [8.0, 4.0, 9.0], 2.0)
    run.commits["central_energy"], run.commits["proxy_energy"] = ratio, 1.0
    columns = study.load("energy").compliance(None, run, SimpleNamespace(workers=2))
    # Medians of the first steps, and of each later stretch of a worker step, which has two commits.
    assert (columns["first_steps"], columns["highest"]) == (8, 5.5)


def test_the_final_loss_of_a_run_is_the_mean_of_its_last_evaluations():
    run = make_run(steps=10)
    losses = run.evaluations["train_loss"].to_numpy()
    columns = {"status": "finished", "first_loss": losses[0], "train_loss": losses[-5:].mean()}
    assert outcome.ends(run, last=5) == pytest.approx(columns)
    diverged = outcome.ends(make_run(steps=10, diverged_at=9), last=5)
    assert diverged["train_loss"] == np.inf and diverged["status"] == "diverged"


@pytest.fixture
def results(tmp_path):
    """A folder of three policies at two rates, of runs made by hand; the loss at the end is the
    rate times the number of the policy, and one run diverges.
    """
    rows, policies = [], ("asynchronous", "barrier", "first_of(2)")
    for policy, rate, seed in itertools.product(policies, (0.1, 0.5), (0, 1)):
        diverges, loss = (policy, rate) == ("barrier", 0.5), rate * (policies.index(policy) + 1)
        run = make_run("gem", 2, steps=10, seed=seed, diverged_at=5 if diverges else None)
        run.evaluations["train_loss"] *= loss / run.evaluations["train_loss"].iloc[-1]
        folder = run.save(tmp_path / "runs" / f"{len(rows)}").relative_to(tmp_path)
        loss = NAN if diverges else loss + seed / 100
        row = {"workers": 2, "policy": policy, "learning_rate": rate, "method": "gem", "seed": seed}
        row |= {"status": run.status, "train_loss": loss, "method.learning_rate": rate}
        rows.append({**row, "run_folder": str(folder), "trace_file": ""})
    cells = [
        dict(zip(("policy", "learning_rate"), cell, strict=True))
        for cell in itertools.product(policies, (0.1, 0.5))
    ]
    config = {"study": "policies", "problem": "digits", "compared": ["policy"], "tune": [0.1, 0.5]}
    config |= {"measure": "train_loss", "target": 0.3, "target_of": "train_loss", "cells": cells}
    finished = Finished(tmp_path, config, pd.DataFrame(rows))
    comparison, cells = (
        Comparison("policies", compared=("policy",)),
        [SimpleNamespace(values=cells[0])],
    )
    table = Results(comparison, None, cells, Target(0.3), finished, Measure("train_loss")).ranked()
    write_csv(tmp_path / "comparison.csv", table.best)
    write_csv(tmp_path / "tuning.csv", table.rates)
    clusters = {"policy": policies[:2], "throughput": [2.0, 1.0], "counted_share": [0.9, 0.6]}
    lost = {"lost_to_waiting": [0.1, 0.1], "lost_to_failed": [0.0, 0.3]}
    unused = dict.fromkeys(("lost_to_sending", "lost_to_discarded", "lost_to_restoring"), 0.0)
    write_csv(tmp_path / "clusters.csv", pd.DataFrame({**clusters, **lost, **unused}))
    return finished


def test_figures_draw_the_numbers_of_the_tables(results):
    module = figures("comparison")
    assert results.table("comparison.csv")["policy"].tolist() == [
        "asynchronous",
        "barrier",
        "first_of(2)",
    ]
    (axes,) = module.curves(results).axes
    ends = {line.get_label(): line.get_ydata()[-1] for line in axes.lines[:3]}
    assert ends == pytest.approx({"asynchronous": 0.1, "barrier": 0.2, "first_of(2)": 0.3})
    (axes,) = module.rates(results).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert lines["asynchronous"] == pytest.approx(np.array([[0.1, 0.105], [0.5, 0.505]]))
    assert len(lines["barrier"]) == 1  # the other rate diverges
    assert module.rows(results) is None
    figure = module.time(results)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["gradients that counted", "waiting", "failed"]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(widths, [0.9, 0.6, 0.1, 0.1, 0.0, 0.3])
    assert "90% of the workers' time with asynchronous, the most" in figure.get_label()


def test_gradients_in_vain_do_not_count_in_the_figure_of_the_time(results):
    idle = dict.fromkeys((f"{phase}_share" for phase in IN_WORDS), 0.0)
    shares = {"computing_share": [0.9, 0.6], "lost_time_share": [0.5, 0.0]}
    clusters = {"policy": ["asynchronous", "barrier"], "throughput": [2.0, 1.0]}
    write_csv(results.folder / "clusters.csv", pd.DataFrame({**clusters, **idle, **shares}))
    figure = figures("comparison").time(results)
    assert figure.get_label() == (
        "Gradients that count take 60% of the workers' time with barrier, the most, and 40% with "
        "asynchronous, the least."
    )
    widths = {bar.get_width() for bar in figure.axes[0].patches}
    assert sorted(widths - {0.0}) == pytest.approx([0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("workers", "rate", "methods"), [(8, 0.1, []), (2, 0.01, ["gem"]), (8, 0.01, []), (2, 0.1, [])]
)
def test_runs_too_slow_to_learn_are_told_from_unstable_ones(workers, rate, methods):
    """Where it is stable with 4 workers at 0.05."""
    rows = [("gem", 4, 0.05, True), ("gem", workers, rate, False)]
    rows += [("downpour", 2, 0.01, True), ("downpour", 4, 0.05, False)]
    trials = pd.DataFrame(rows, columns=["method", "workers", "learning_rate", "stable"])
    assert study.load("stability").too_slow(trials) == methods


def test_the_nearest_cluster_is_of_all_methods_each_at_its_best_rate():
    """Mean squares of the best rates: (0.01 + 0.36) / 2 without service, (0.04 + 0.09) / 2 with."""
    columns = ["method", "service", "learning_rate", "deviation"]
    rows = [
        ("gem", "0", 0.05, 0.1),
        ("gem", "0", 0.01, 0.5),
        ("gem", "0.2", 0.05, 0.2),
        ("gem", "0.2", 0.01, 0.6),
        ("downpour", "0", 0.05, 0.6),
        ("downpour", "0", 0.01, NAN),
        ("downpour", "0.2", 0.05, 0.4),
        ("downpour", "0.2", 0.01, 0.3),
    ]
    rates = pd.DataFrame(rows, columns=columns).merge(pd.DataFrame({"workers": [5, 20]}), "cross")
    table = SimpleNamespace(compared=["service"], rates=rates)
    fit = study.load("forensics").clusters(table)[0]["fit.csv"]
    assert fit["service"].tolist() == ["0.2", "0"]
    assert fit["deviation"].tolist() == pytest.approx([0.065**0.5, 0.185**0.5])


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
    question = delays.QUESTIONS["optimizers"]._replace(compared=("optimizer",))

    def verdict(losses, seeds=3):
        tables = tabulate(runs_of(losses, seeds), ["source", "delay", "optimizer"], FRESH)
        (text,) = question.verdicts(tables.pairs)
        return text

    assert verdict(OPTIMIZERS) == "fixed: muon is the best optimizer (95% confidence, 3 seeds)"
    text = verdict({**OPTIMIZERS, row(optimizer="sgd", **LATE): {0.01: 0.6}})
    assert text.startswith("fixed: undecided: ") and "leads, within the noise" in text
    assert len(text.splitlines()[0].split()) <= 15
    assert verdict(OPTIMIZERS, seeds=1) == "fixed: one seed: no order"
    alone = {key: losses for key, losses in OPTIMIZERS.items() if "sgd" in str(key)}
    assert verdict(alone) == "fixed: sgd is the only optimizer"


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


def ensembles_of(losses):
    """Return the summary of ensembles from their test losses, by method and number of models, seed
    by seed.
    """
    rows = [
        (method, models, seed, 0, loss, loss, loss, loss)
        for (method, models), of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    measures = [f"{of}_{name}" for of in ("test", "single") for name in ("loss", "accuracy")]
    return pd.DataFrame(rows, columns=["method", "models", "seed", "diverged", *measures])


def test_ensembles_are_ranked_by_their_loss():
    """All models of a seed may diverge; such an ensemble comes last."""
    losses = {("sgd", 1): [0.5, 0.6], ("sgd", 2): [0.4, 0.45], ("gem", 1): [0.1, NAN]}
    table = study.load("ensembles").ranked_ensembles(ensembles_of(losses).drop(columns="diverged"))
    ranks = table[["method", "models", "diverged"]].itertuples(index=False, name=None)
    assert list(ranks) == [("sgd", 2, 0), ("sgd", 1, 0), ("gem", 1, 1)]


@pytest.mark.parametrize(
    "losses", [{"sgd": [0.2, 0.1]}, {"gem": [NAN, 0.1], "downpour": [NAN, NAN]}]
)
def test_the_figure_of_ensembles_has_their_losses(losses):
    """Also of models that have diverged, and of a job that failed."""
    table = ensembles_of(
        {
            (name, models): [loss] * 2
            for name, of in losses.items()
            for models, loss in enumerate(of, 1)
        }
    )
    table = pd.concat([table, pd.DataFrame({"method": ["sgd"], "seed": [2]})])
    finished = Finished(Path(), {"study": "ensembles"}, table)
    (axes, _) = figures("ensembles").ensembles(finished).axes
    finite = [[loss for loss in of if loss == loss] for of in losses.values()]
    assert [line.get_ydata().tolist() for line in axes.lines] == [
        curve for curve in finite for _ in range(2)
    ]


def test_the_figure_of_the_distances_has_a_point_for_each_method_and_topology(tmp_path):
    columns = ["topology", "method", "spectral_gap", "consensus_distance"]
    rows = [
        ("ring()", "sgp", 0.25, 0.5),
        ("complete()", "sgp", 1.0, 0.125),
        ("server", "downpour", NAN, NAN),
    ]
    table = pd.DataFrame(rows, columns=columns).assign(seeds=2, consensus_distance_sd=0.01)
    for name in ("comparison", "tuning"):
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    config = {"study": "gossip", "problem": "digits", "measure": "time_to_target"}
    config |= {"compared": ["method", "topology"], "cells": [{"topology": "ring()"}]}
    figure = figures("gossip").consensus(Finished(tmp_path, config, table))
    points = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert points == [[[0.25, 0.5], [1.0, 0.125]]]
    assert "is lowest for sgp at spectral gap 1 (0.125)" in figure.get_label()
