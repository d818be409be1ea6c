"""The comparing studies: each fulfils one contract, its own columns and tables are checked by hand,
and the tables, verdicts and figures of hand-made runs have known numbers.
"""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from gem_results import make_run

import asyncsim
from asyncsim import Trace, methods, problems, replay, simulate, study, theory
from asyncsim.base.errors import InputError
from asyncsim.base.files import write_csv, write_json
from asyncsim.clusters.laws import HalfNormal
from asyncsim.pages.page import shown_runs
from asyncsim.study import outcome
from asyncsim.study.comparison import Comparison, Results, costs
from asyncsim.study.finished import Finished, figures, read
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import sweep
from asyncsim.study.target import Target, time_to_target
from asyncsim.traces.phases import IN_WORDS

pytestmark = pytest.mark.usefixtures("quick_figures")

#: A small command of each study, its runs, its figures and its tables beside the ranking.
STUDIES = {
    "compare": (
        "--workers 3 --window 1 2 --tune 0.02 0.2 --methods downpour sgd --target 0.1",
        (8, {"curves", "rates"}, set()),
    ),
    "policies": (
        "--workers 4 --policy asynchronous barrier barrier(2) discard_stale(2) --service 0 "
        "--compute exponential(1) --target 0.2",
        (4, {"curves", "time"}, {"clusters.csv"}),
    ),
    "failures": (
        "--workers 3 --deaths 0 200 --policy asynchronous barrier --methods downpour",
        (4, {"curves", "rows", "time"}, {"clusters.csv"}),
    ),
    "leaders": (
        "--workers 4 --window 2 --gradients 8 --tune 0.1 --methods lsgd --group-size 2",
        (2, {"curves", "leaders", "identity"}, set()),
    ),
    "ringleader": (
        "--workers 5 --time-budget 30 --methods ringleader ia2sgd --tune 0.05 0.2 "
        "--problem digits(hidden=[4],batch_size=2,split=0.1)",
        (4, {"curves", "rates"}, set()),
    ),
    "robustness": (
        "--workers 8 --byzantine 2 --tune 0.4 --steps 12 --problem digits(hidden=[]) "
        "--batch-size 8 --rules trimmed_mean(f=f) --attack sign_flip(scale=10) alie",
        (6, {"curves", "rows"}, set()),
    ),
    "replicas": (
        "--workers 2 --window 5 --steps 6 --tune 0.1 --target 7 --methods parle entropy_sgd "
        "easgd(alpha=[0.2,0.3]) averaging",
        (6, {"curves"}, set()),
    ),
    "speedup": (
        "--workers 1 2 --methods downpour --time-budget 1 --steps 200",
        (2, {"curves"}, {"speedup.csv"}),
    ),
    "kappa": (
        "--workers 2 --methods gem(kappa=[1,2]) --steps 20 --diagnose-every 1",
        (2, {"curves"}, set()),
    ),
    "misspecification": ("--workers 1 2 --tune 0.1 0.2", (6, {"curves", "rates", "rows"}, set())),
    "gossip": (
        "--workers 4 --topology ring() complete() --tune 0.1 --target 0.3 --methods dpsgd downpour",
        (3, {"curves", "consensus"}, set()),
    ),
    "stability": (
        "--workers 2 3 --learning-rate 0.1 --methods downpour --no-limits",
        (2, {"curves", "rows"}, set()),
    ),
    "energy": (
        "--workers 1 2 --methods gem --diagnose-every 2",
        (2, {"curves", "energy"}, set()),
    ),
    "tensors": (
        "--workers 2 4 --effective-batch 8 --problem digits(hidden=[2])",
        (2, {"curves"}, {"tensors.csv"}),
    ),
    "windows": (
        "--workers 2 --window 1 3 --epochs 0.2 --methods agn downpour --problem digits(hidden=[2])",
        (4, {"curves", "agn"}, {"efficiency.csv", "staleness.csv"}),
    ),
    "generalization": (
        "--workers 2 --epochs 1 --methods gem --problem digits(hidden=[2]) --batch-size 64",
        (1, {"curves"}, set()),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("compare", "policies") else pytest.mark.full)
        for name in STUDIES
    ],
)
def test_a_comparison_keeps_its_contract(name, told, lenient):
    options, (count, drawn, tables) = STUDIES[name]
    usual = ["--seeds=1", "--steps=10", "--problem=quadratic", "--out=mine"]
    code, _, err = told(name, *usual, *options.split())
    assert code == 0, err
    results, folder = read("mine", name), Path("mine")
    summary = results.summary
    assert len(summary) == len(results.runs()) == count
    assert set(summary["status"]) == {"finished"}
    assert {path.stem for path in folder.glob("*.png")} >= drawn
    assert {path.name for path in folder.glob("*.csv")} >= {"comparison.csv", "tuning.csv", *tables}
    check_costs(results)
    check_best(results)
    CHECKS.get(name, lambda results: None)(results)

    def written():
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.name != "made.json"}

    if name != "compare":
        return
    # A lost run is computed again, figures are drawn again, and all files are as they were.
    before = written()
    shutil.rmtree(folder / summary["run_folder"].iloc[-1])
    for path in [*folder.glob("*.png"), *folder.glob("*.pdf")]:
        path.unlink()
    assert study.main([name, "--resume=mine"]) == 0
    assert written() == before


def check_costs(results):
    """The traffic and the staleness of a run are those of its trace."""
    for row in results.summary.itertuples():
        trace = results.trace(row.trace_file)
        # A method of one worker sends nothing.
        is_alone = row.method.partition("(")[0] in ("sgd", "entropy_sgd")
        sent = 0 if is_alone else (trace.frame["outcome"] != "cancelled").sum()
        assert row.messages == 2 * sent
        assert row.staleness_mean == trace.summary()["staleness_mean"]
        run = results.run(row.run_folder)
        assert row.final_loss == pytest.approx(
            run.commits["loss"].tail(max(1, round(0.1 * len(trace.accepted)))).mean()
        )


def check_best(results):
    """Each row of the ranking is the first of its kind among the rows of all rates."""
    best, rates = results.table("comparison.csv"), results.table("tuning.csv")
    varied = {"workers", "window", "policy", "deaths", "topology", "method"}
    keys = [name for name in best if name in varied]
    assert not best.duplicated([*keys, *({"byzantine", "discipline"} & set(best))]).any()
    assert best["seeds"].eq(1).all() and set(best["learning_rate"]) <= set(rates["learning_rate"])


def check_policies(results):
    table = results.table("clusters.csv").set_index("policy")
    for policy, row in table.iterrows():
        (run,) = results.rows(policy=policy).itertuples()
        trace = results.trace(run.trace_file)
        facts, law = trace.summary(), theory.throughput_theory(trace.cluster)
        assert row["throughput"] == facts["throughput"]
        assert row["lost_time_share"] == facts["lost_time_share"]
        assert row["computing_share"] == facts["computing_share"]
        assert row["most"] == pytest.approx(4 * facts["share_max"])
        assert f"{law.commits:.2f}" in row["theory"] and law.name in row["theory"]
    assert table.loc["asynchronous", "computing_share"] == pytest.approx(1)
    assert table.loc["barrier", "computing_share"] < 0.8
    assert table.loc["discard_stale(2)", "lost_time_share"] > 0
    # The page shows the run of the first row.
    first = results.table("comparison.csv").iloc[0]
    ((title, _, _),) = shown_runs(results.folder)
    assert title == f"downpour, {first['policy']}, seed 0"


def check_failures(results):
    table = results.table("clusters.csv").set_index(["policy", "deaths"])
    for policy in ("asynchronous", "barrier"):
        without, with_deaths = (
            table.loc[(policy, deaths), "throughput"] for deaths in (0.0, 200.0)
        )
        assert table.loc[(policy, 0.0), "remaining"] == 1
        assert table.loc[(policy, 200.0), "remaining"] == pytest.approx(with_deaths / without)
    for row in results.summary.itertuples():
        absences = results.trace(row.trace_file).absences
        assert row.died == (absences["kind"] == "crash").sum() and row.kept == 1.0
    assert results.summary.loc[results.summary["deaths"] == 0, "died"].eq(0).all()


def check_leaders(results):
    assert results.summary["method"].tolist() == ["lsgd", "lsgd_groups"]
    row = results.summary.iloc[0]
    winners = study.load("leaders").leaders(results.run(row["run_folder"]).commits, 4)
    assert row["largest_share"] == pytest.approx(np.bincount(winners).max() / len(winners))
    assert results.summary["kept"].notna().tolist() == [True, False]
    assert results.config["target_of"] == "train_loss" and results.config["target"] == 0.1


def check_ringleader(results):
    # The whole horizon, of all clients, on one trace.
    assert results.summary["simulated_seconds"].between(20, 30).all()
    trace = results.trace(results.summary["trace_file"].iloc[0])
    assert trace.cluster.compute_laws == tuple(study.load("ringleader").client_times(5))


def check_replicas(results):
    # All compute as many gradients, and communicate as often as they say.
    assert [run.evaluations["gradients"].iloc[-1] for run in results.runs()] == [60] * 6
    summary = results.summary.set_index("method")
    nesterov = ["easgd(alpha=0.2)", "easgd(alpha=0.3)", "averaging", "data_parallel"]
    assert (summary.loc[nesterov, "method.local_momentum"] == 0.9).all()
    rounds = summary["rounds"].groupby("method").first().to_dict()
    usual = dict.fromkeys(rounds, 6)
    assert rounds == usual | {"entropy_sgd": 0, "data_parallel": 30}
    assert (summary["rounds_to_target"] <= summary["rounds"]).all()


def check_robustness(results):
    summary = results.summary
    # Of eight workers with two Byzantine ones ALIE is no attack: it is in no worst case.
    assert summary.loc[summary["attack"] == "alie", "is_weak"].all()
    best = results.table("comparison.csv").set_index(["method", "byzantine"])
    assert "alie" not in set(best["attack"]) and len(best) == 4
    accuracy = best["accuracy"]
    assert accuracy["batch_sgd", 2] < 0.3 < accuracy["trimmed_mean(f=f)", 2]
    assert set(summary["method.rule"].dropna()) == {"trimmed_mean(f=0)", "trimmed_mean(f=2)"}


def check_speedup(results):
    assert list(results.summary["batch_size"]) == [128 * 2, 128]
    laws = {str(results.trace(file).cluster.compute) for file in results.summary["trace_file"]}
    assert laws == {"gamma(mean=0.1, cv=0.2)", "gamma(mean=0.05, cv=0.2)"}
    # All commits within the second: each ends within one step of a worker.
    ends = [run.commits["commit_time"].iloc[-1] for run in results.runs()]
    assert all(1 - 0.1 * (1 + 5 * 0.2) <= end <= 1 for end in ends)
    table = results.table("speedup.csv")
    assert list(table["workers"]) == [1, 2] and list(table["reached"]) == [0, 1]
    assert np.isinf(table["time_to_target"][0]) and 0 < table["time_to_target"][1] < 1
    assert np.isnan(table["speedup"][0]) and table["speedup"][1] == 1.0


def check_kappa(results):
    # GEM's median of pi, over the last tenth of the commits.
    assert results.summary["method"].tolist() == ["gem(kappa=1)", "gem(kappa=2)"]
    for row, run in zip(results.summary.itertuples(), results.runs(), strict=True):
        shown = run.diagnostics
        late = shown[
            (shown["quantity"] == "pi") & (shown["tensor"] == "") & (shown["quantile"] == 0.5)
        ]
        late = late[late["commit"] >= 36]
        assert row.median_pi == pytest.approx(late["value"].mean(), rel=1e-12) and len(late) >= 1


def check_misspecification(results):
    cells = set(zip(results.summary["method"], results.summary["workers"], strict=True))
    assert cells == {("sgd", 1), ("gem", 2), ("downpour", 2)}


def check_energy(results):
    for row in results.summary.itertuples():
        (run,) = results.runs(workers=row.workers)
        # The last tenth has the last diagnosed commit alone, and all ten steps are a beginning.
        commit = run.diagnostics["commit"]
        shown = run.diagnostics[commit == commit.max()].set_index("quantity")["value"]
        quantiles = [getattr(row, f"weight_ratio_{q}") for q in ("05", "25", "50", "75", "95")]
        np.testing.assert_allclose(shown["weight_energy_ratio"][:5], quantiles, rtol=1e-6)
        shares = ["clipped_low", "clipped_high", "opposite_sign"]
        np.testing.assert_allclose(shown[shares], [getattr(row, name) for name in shares])
        ratio = outcome.energy_ratios(run.commits).median()
        assert row.first_steps == pytest.approx(ratio, rel=1e-6) and np.isnan(row.highest)


def check_tensors(results):
    table = results.table("tensors.csv")
    names = ["[0]['bias']", "[0]['weight']", "[1]['bias']", "[1]['weight']"]
    assert table["tensor"].unique().tolist() == names
    shown = results.runs(workers=4)[0].diagnostics
    of_pi = shown[(shown["quantity"] == "pi") & (shown["tensor"] == names[1])]
    medians = table.query("workers == 4 and tensor == @names[1]")["pi_median"]
    np.testing.assert_allclose(medians, of_pi["value"])
    # Before anything has moved, an update is scaled by one, but for weights without a gradient.
    assert set(table[table["commit"] == 0]["pi_median"].round(3)) <= {0.0, 0.5, 1.0}


def check_windows(results):
    # With a window of one both methods are the same.
    runs = results.summary.set_index(["window", "method"])
    same = runs[["train_accuracy", "test_accuracy", "update_norm"]].loc[1]
    np.testing.assert_allclose(same.loc["agn"], same.loc["downpour"], rtol=1e-6)  # in float32
    assert results.table("efficiency.csv").set_index("window").loc[1, "efficiency"] == 1
    staleness = results.table("staleness.csv")
    assert staleness.groupby("window")["share"].sum().tolist() == pytest.approx([1, 1])


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.removeprefix("check_") in STUDIES
}


# The tables of hand-made runs


def hand_made(rows, study_of=None, cells=("method",), **config):
    """Return the tables of a comparison with some runs; ``rows``: columns by name."""
    runs = pd.DataFrame(rows)
    runs = runs.assign(seed=runs.groupby([*cells, "method.learning_rate"]).cumcount())
    runs["status"] = np.where(runs["train_loss"].isna(), "diverged", "finished")
    values = {name: runs[name].iloc[0] for name in cells if name != "method"}
    comparison = study_of or Comparison("compare", **config)
    cells = [SimpleNamespace(values=values)]
    finished = Finished(Path(), {}, runs)
    measure = Measure("accuracy", "most") if study_of else Measure("time_to_target")
    return Results(comparison, None, cells, Target(0.3), finished, measure).ranked()


def timed(method, rate, times, **columns):
    return [
        {
            "method": method,
            "method.learning_rate": rate,
            "time_to_target": time,
            "first_touch": time,
            "train_loss": 1.0,
            "simulated_seconds": 100.0,
            **columns,
        }
        for time in times
    ]


def test_rows_count_at_their_best_rate_and_are_ranked_within_a_setting():
    rows = [
        *timed("slow", 0.1, [40.0, 44.0, 42.0], window=1),
        *timed("slow", 0.2, [20.0, 22.0, 21.0], window=1),
        *timed("fast", 0.1, [10.0, 11.0, 10.5], window=1),
        *timed("slow", 0.1, [4.0, 4.4, 4.2], window=8),
        *timed("fast", 0.1, [np.inf, 12.0, 12.0], window=8),
    ]
    table = hand_made(rows, cells=("window", "method"))
    assert table.settings == ["window"] and table.compared == ["method"]
    best = table.best[["window", "method", "learning_rate", "time_to_target"]]
    assert best.to_numpy().tolist() == [
        [1, "fast", 0.1, 10.5],
        [1, "slow", 0.2, 21.0],
        [8, "slow", 0.1, pytest.approx(4.2)],
        [8, "fast", 0.1, np.inf],
    ]
    assert table.best["time_to_target_sd"][0] == 0.5
    # Twice as long with every seed, but for rounding: the interval is narrow around 2.
    assert table.best["low"][1] == pytest.approx(2) and table.best["high"][1] == pytest.approx(2)
    assert table.best["low"][3] < 1 and np.isinf(table.best["high"][3])
    table = hand_made(rows, cells=("window", "method"), compared=("method", "window"))
    assert table.settings == [] and table.best["window"].tolist() == [8, 1, 1, 8]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((0.2, 0.1), "curves cross: fast is first at the target, slow has the lowest training"),
        ((0.1, 0.2), ""),
        ((0.1, 0.1), ""),
    ],
)
def test_curves_that_cross_are_named(losses, said):
    rows = [
        *timed("fast", 0.1, [10.0, 11.0, 10.5], train_loss=losses[0]),
        *timed("slow", 0.1, [40.0, 44.0, 42.0], train_loss=losses[1]),
    ]
    table = hand_made(rows)
    words = table._crossing(table.best, list(table.best["method"]))
    assert words.startswith(said) and bool(words) == bool(said)


def test_a_worst_case_counts_a_diverged_run_as_accuracy_0():
    """At 0.1 a seed diverges under the worst attack, and yet its mean accuracy is above the worst
    of 0.2.
    """
    rows = [
        {
            "method": "median()",
            "byzantine": 2,
            "attack": attack,
            "is_weak": False,
            "method.learning_rate": rate,
            "accuracy": accuracy,
            "train_loss": np.nan if accuracy == 0 else 1.0,
        }
        for rate, attack, accuracies in (
            (0.1, "alie", [0.9, 0.9, 0.9]),
            (0.2, "alie", [0.3, 0.3, 0.3]),
            (0.1, "zero", [0.9, 0.9, 0.0]),
            (0.2, "zero", [0.8, 0.8, 0.8]),
        )
        for accuracy in accuracies
    ]
    robustness = study.load("robustness").run.__self__
    (worst,) = hand_made(rows, robustness, ("byzantine", "attack", "method")).best.to_dict(
        "records"
    )
    assert (worst["learning_rate"], worst["attack"], worst["seeds"]) == (0.1, "zero", 3)
    assert worst["accuracy"] == pytest.approx(0.6)


def test_speedups_are_over_the_fewest_workers_that_reach_the_target():
    rows = [
        *timed("gem", 0.1, [np.inf, 30.0], workers=1, batch_size=8),
        *timed("gem", 0.1, [5.0, 7.0], workers=2, batch_size=4),
        *timed("gem", 0.1, [8.0, 16.0], workers=4, batch_size=2),
        *timed("gem", 0.1, [2.0, 4.0], workers=8, batch_size=1),
    ]
    table = hand_made(rows, cells=("workers", "method"))
    tables, (text, _) = study.load("speedup").speedups(table)
    speedup = tables["speedup.csv"]
    assert speedup["speedup"].tolist()[1:] == [1, 0.5, 2] and np.isnan(speedup["speedup"].iloc[0])
    assert speedup["reached"].tolist() == [1, 2, 2, 2]
    assert speedup["time_to_target"].tolist() == [np.inf, 6, 12, 3]
    assert "with every seed" in text


def test_the_goodput_of_failures_is_what_deaths_and_restores_leave(monkeypatch):
    failures = study.load("failures")
    clusters = pd.DataFrame(
        {
            "policy": ["barrier", "asynchronous", "barrier", "asynchronous"],
            "deaths": [0.0, 0.0, 20.0, 20.0],
            "throughput": [2.0, 4.0, 1.5, 3.6],
            "theory": "",
            "kept": [1.0, 1.0, 0.8, 1.0],
            "died": [0, 0, 3, 3],
        }
    )
    monkeypatch.setitem(
        failures.goodput.__globals__, "costs_of_clusters", lambda *_, **__: clusters.copy()
    )
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
    columns = study.load("energy").compliance(None, run, type("Trace", (), {"workers": 2}))
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
    rows = []
    policies = ("asynchronous", "barrier", "first_of(2)")
    for (place, policy), rate, seed in itertools.product(
        enumerate(policies, 1), (0.1, 0.5), (0, 1)
    ):
        bad = (policy, rate) == ("barrier", 0.5)
        run = make_run("gem", 2, steps=10, seed=seed, diverged_at=5 if bad else None)
        run.evaluations["train_loss"] *= place * rate / run.evaluations["train_loss"].iloc[-1]
        name = f"runs/{place}-{rate}-{seed}"
        run.save(tmp_path / name)
        loss = np.nan if bad else place * rate + seed / 100
        labels = {"workers": 2, "policy": policy, "learning_rate": rate, "method": "gem"}
        rows.append(
            labels
            | {"seed": seed, "status": run.status, "train_loss": loss, "run_folder": name}
            | {"method.learning_rate": rate, "trace_file": ""}
        )
    summary = pd.DataFrame(rows)
    cells = [
        {"policy": policy, "learning_rate": rate} for policy in policies for rate in (0.1, 0.5)
    ]
    config = {"study": "policies", "problem": "digits", "compared": ["policy"], "tune": [0.1, 0.5]}
    config |= {"measure": "train_loss", "target": 0.3, "target_of": "train_loss", "cells": cells}
    write_json(tmp_path / "config.json", config)
    comparison = Comparison("policies", compared=("policy",))
    first = [SimpleNamespace(values=cells[0])]
    finished = Finished(tmp_path, config, summary)
    table = Results(comparison, None, first, Target(0.3), finished, Measure("train_loss")).ranked()
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
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert np.array(lines["asynchronous"]) == pytest.approx(np.array([[0.1, 0.105], [0.5, 0.505]]))
    assert len(lines["barrier"]) == 1  # the other rate diverges
    assert module.rows(results) is None
    figure = module.time(results)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["gradients that counted", "waiting", "failed"]
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


# The target


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
    times = pd.Series(range(len(losses)))
    assert time_to_target(times, pd.Series(losses), target, hold) == pytest.approx(time)


def test_accuracies_are_reached_from_below():
    evaluations = pd.DataFrame({"commit_time": [0.0, 1.0, 2.0], "test_accuracy": [0.0, 0.5, 0.875]})
    target = Target(0.75, "test_accuracy")
    assert str(target) == "a test accuracy of 0.75"
    # Half of the way in the logarithm of the error.
    assert target.time(evaluations) == pytest.approx(1.5, rel=1e-5)
    exact = evaluations.assign(test_accuracy=np.array([0.5, 0.9, 1.0], np.float32))
    reached = [Target(most, "test_accuracy").time(exact) for most in (0.9, 1.0)]
    assert reached == pytest.approx([1, 2], rel=1e-4)
    assert np.isinf(Target(0.9, "test_accuracy").time(evaluations))


def test_a_target_is_bounded_by_the_evaluations_around_it():
    trace = simulate(asyncsim.Cluster(workers=3, compute="constant(1)", service=0.1), 12)
    times = trace.frame["commit_time"].to_numpy()
    commits = [0, 1, 2, 6, 12]
    losses = [9.0, 8.0, 4.0, 1.0, 0.5]
    clock = np.r_[0.0, times][commits]
    evaluations = pd.DataFrame({"commit": commits, "commit_time": clock, "train_loss": losses})

    def bounds(value):
        return Target(value).bounded(evaluations, trace)[1:]

    assert bounds(9.5) == (0.0, 0.0) and bounds(0.1) == (np.inf, np.inf)
    assert bounds(8.5) == (times[0], times[0])  # the first commit met it
    assert bounds(2.0) == (times[2], times[5])
    run = make_run("gem", 3, steps=4)
    run.evaluations = evaluations
    reached = Target(2.0).reached(run, trace)
    assert [reached[f"gradients_to_target_{bound}"] for bound in ("low", "high")] == [3, 6]
    assert 3 <= reached["gradients_to_target"] <= 6


@pytest.mark.parametrize(
    ("losses", "rises"),
    [
        ([1.0, 2.0, 3.0], True),
        ([1.0, 2.0, np.nan], True),
        ([1.0, 2.0, 1.5], False),
        ([1.0, 2.0, 3.0, 0.5], False),  # as with momentum
        ([1.0, 0.5, 3.0], False),
        ([1.0, 2.0], False),
    ],
)
def test_a_loss_that_rises_from_the_start_is_noticed(losses, rises):
    trace = simulate(asyncsim.Cluster(workers=1, compute="constant(1)"), len(losses))
    run = make_run("gem", 1, steps=len(losses))
    commits = np.arange(len(losses))
    table = {"commit": commits, "commit_time": 1.0 * commits, "train_loss": losses}
    run.evaluations = pd.DataFrame(table)
    assert Target(0.1).reached(run, trace)["rises"] == rises


def test_evaluations_begin_at_every_commit_until_the_target_is_met():
    trace = simulate(asyncsim.Cluster(workers=2, compute="constant(1)"), 80)
    problem, method = problems.quadratic([1.0, 0.1]), methods.downpour(learning_rate=0.05)
    until = Target(0.3).is_met_at
    run = replay(trace, method, problem, evaluate_every=10, evaluate_until=until, progress=False)
    plain = replay(trace, method, problem, evaluate_every=10, progress=False)
    commits = run.evaluations["commit"].to_numpy()
    met = commits[np.argmax(run.evaluations["train_loss"] <= 0.3)]
    assert 1 < met < 60 and set(plain.evaluations["commit"]) <= set(commits)
    early, late = np.diff(commits[commits <= met]), np.diff(commits[commits > met])
    assert (early <= np.maximum(1, 0.1 * commits[1 : len(early) + 1])).all()
    assert set(late) == {20}


def test_rates_are_chosen_on_further_seeds_over_half_of_the_steps(tmp_path, capsys):
    config = study.load("staleness").Config(
        workers=2,
        steps=8,
        seeds=2,
        methods=("downpour", "sgd(learning_rate=0.02)"),
        problem="quadratic",
        tune=(0.01, 0.1),
        tune_seeds=1,
        out=tmp_path / "r",
    )
    folder, summary = study.load("staleness").run(config)
    trials = pd.read_csv(folder / "trials.csv")
    assert set(trials["seed"]) == {100_000} and set(summary["seed"]) == {0, 1}
    best = trials[trials["method"] == "downpour"].set_index("learning_rate")["train_loss"].idxmin()
    shown = summary.set_index("method")["method.learning_rate"]
    assert set(shown["downpour"]) == {best} and set(shown.filter(like="sgd")) == {0.02}
    lengths = {len(Trace.load(folder / file)) for file in trials["trace_file"]}
    assert 2 * max(lengths) == len(Trace.load(folder / summary["trace_file"].iloc[0])) == 16
    assert "chosen on 1 further seed" in capsys.readouterr().out
    assert set(read(folder, "staleness").table("tuning.csv")["seeds"]) == {1}


# The traffic


def _round(methods, **options):
    """Simulate three rounds of a method's cluster; return the seconds and the bytes of a round."""
    config = study.load("compare").Config(
        problem="quadratic", methods=methods, compute="1", **options
    )
    (cell,) = sweep(config, [{}])
    (method,) = cell.methods
    cluster, _ = cell.cluster_of(method)
    trace = simulate(cluster, 3 * cluster.workers)
    traffic = costs(cell, method, trace)
    first, *_, last = trace.frame["commit_time"].unique()
    return (last - first) / 2, 1e9 * traffic["gigabytes"] / 3, traffic["messages"]


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
        far = dict(sites=(1, 2), far_latency="2", bandwidth=40.0, message_bytes=80.0)
        window = methods.METHODS[method]().timing.window or 1
        measured = _round((method,), workers=3, latency="0.5", service="0.25", **far)
        assert measured == (pytest.approx(window + 0.25), 0, 0)


def test_a_rule_needs_the_messages_that_an_all_reduce_adds():
    robust = methods.robust()
    trace = simulate(asyncsim.Cluster(4, 1.0, policy="barrier(collective=ring)"), 8)
    with pytest.raises(InputError, match="an all-reduce adds the messages"):
        asyncsim.replay(trace, robust, problems.quadratic([1.0]))


# Options


def judged(**options):
    """Two parameters that move towards one; measured also by their distance."""

    def evaluate(params, data):
        return {"loss": jnp.mean((params - 1) ** 2), "gap": 1 - jnp.mean(params)}

    problem = problems.custom(
        lambda key: jnp.zeros(2),
        lambda params, batch, key: jnp.mean((params - 1) ** 2),
        evaluate=evaluate,
    )
    options = {"tune": (0.1, 0.2)} | options
    config = study.load("compare").Config
    return config(problem=problem, methods=("downpour",), workers=2, steps=4, **options)


def test_the_target_is_of_the_measure_and_one_that_the_start_meets_is_noted(capsys):
    compare = study.load("compare")

    def goal(**options):
        return compare.Config(**options).goal_on(None)

    assert goal(measure="test_accuracy", target=0.9) == Target(0.9, "test_accuracy", 2)
    assert goal(measure="test_accuracy") == Target(0.95, "test_accuracy", 2)
    assert goal(measure="train_gap", best="most").of == goal().of == "train_loss"
    assert goal(measure="test_loss", target_of="train_accuracy").of == "train_accuracy"
    compare.run(judged(seeds=1, target=5.0, tune=None))
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
        study.load("compare").run(judged(**options))


def test_without_methods_policies_have_traces_alone(capsys):
    policies = study.load("policies")
    options = {"workers": 4, "steps": 30, "seeds": 2, "problem": "quadratic", "service": 0.0}
    options |= {"compute": "exponential(1)", "policy": ("asynchronous", "barrier")}
    config = policies.Config(**options, window=(1, 3), methods=())
    folder, summary = policies.run(config)
    assert len(summary) == 2 * 2 * 2 and not (folder / "runs").exists()
    assert not (folder / "comparison.csv").exists()
    table = read(folder, "policies").table("clusters.csv").set_index(["policy", "window"])
    assert table.loc[("asynchronous", 3), "throughput"] == pytest.approx(4 / 3, rel=0.2)
    staleness = table["staleness_mean"]
    assert staleness["barrier"].max() == 0 < staleness["asynchronous"].min()
    assert {path.name for path in folder.glob("*.png")} == {"time.png"}


def test_disciplines_differ_in_who_is_served():
    policies = study.load("policies")
    options = {"workers": 4, "steps": 10, "seeds": 1, "problem": "quadratic", "service": 0.5}
    options["compute"] = "gamma(1, 0.2)"
    disciplines = ("fifo", "lowest_rank")
    config = policies.Config(**options, policy="asynchronous", discipline=disciplines, methods=())
    folder, _ = policies.run(config)
    ranks = read(folder, "policies").table("ranks.csv")
    assert list(ranks["worker"]) == [0, 1, 2, 3] * 2
    assert ranks.groupby("discipline")["share"].sum().tolist() == pytest.approx([1, 1])
    # Four workers of demand 0.5/1.5 each: the queue is never empty for long, and the last rank
    # waits behind all others.
    assert ranks.loc[ranks["discipline"] == "fifo", "share"].min() >= 0.2
    lowest = ranks[ranks["discipline"] == "lowest_rank"].set_index("worker")["share"]
    assert lowest[3] < 0.2 < lowest[0]


def test_reading_options_leaves_the_types_of_other_studies(recwarn):
    for name in ("robustness", "policies", "replicas"):
        study.configure(name, [])
    assert not [warning for warning in recwarn if "does not match" in str(warning.message)]


def test_any_option_may_have_several_values():
    _, config = study.configure(
        "compare", ["--window", "4", "16", "--policy", "barrier", "first_of(2)"]
    )
    assert config.points() == [
        {"window": window, "policy": policy}
        for window in (4, 16)
        for policy in ("barrier", "first_of(2)")
    ]
    assert config.at(window=16).window == 16 and config.at(window=16).policy == "barrier"


def test_client_times_are_those_of_the_paper():
    laws = study.load("ringleader").client_times(100)
    assert sorted(law.low for law in laws) == list(range(1, 101))
    assert [law.scale for law in laws] == pytest.approx(np.sqrt(np.arange(1, 101)))
    assert all(isinstance(law, HalfNormal) for law in laws)


def test_a_leader_rests_where_the_gradient_is_zero(tmp_path):
    options = "--workers 4 --window 1 --tune 0.01 --gradients 1500 --seeds 1 --x64"
    methods = ("lgd(pull=0.005)", "easgd(alpha=0.005)", "lsgd")
    typed = [*options.split(), "--problem", "wells(tilt=0.3)", "--methods", *methods]
    module, config = study.configure("leaders", [*typed, "--out", str(tmp_path / "out")])
    folder, _ = module.run(config)
    table = pd.read_csv(folder / "comparison.csv").set_index("method")
    assert table.loc["lgd", "gradient"] < 1e-8 and table.loc["lsgd", "gradient"] < 1e-6
    assert table.loc["easgd", "gradient"] == pytest.approx(0.486, abs=1e-3)


def test_the_leader_is_who_told_the_least_loss_last():
    commits = pd.DataFrame({"worker": [1, 0, 1, 2, 1], "loss": [0.5, 0.7, 0.9, 0.8, 0.1]})
    assert study.load("leaders").leaders(commits, 4).tolist() == [1, 1, 0, 0, 1]
