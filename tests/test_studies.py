"""The studies at work: each fulfils one contract, and the columns and tables of some are checked
by hand.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from asyncsim import study, theory
from asyncsim.pages.page import shown_runs
from asyncsim.study import outcome
from asyncsim.study.finished import figures, read

pytestmark = pytest.mark.usefixtures("quick_figures")

EDGE = "a rate beyond it may be better"
#: Options of every comparison, unless its own say otherwise.
USUAL = "--seeds=1 --steps=10 --problem=quadratic "
#: A small command of each study, its runs if it is a comparison, some of its files, and words that
#: it prints.
STUDIES = {
    "compare": (
        "--workers 3 --window 1 2 --tune 0.02 0.2 --methods downpour sgd --target 0.1",
        8,
        "curves.png rates.png",
    ),
    "staleness": (
        "--workers 2 --steps 20 --problem digits",
        3,
        "curves.png",
        *("staleness, mean", "test accuracy", "diverged"),
        "] adaptive_staleness, seed 0: loss",
    ),
    "policies": (
        "--workers 4 --policy asynchronous barrier barrier(2) discard_stale(2) --service 0 "
        "--compute exponential(1) --target 0.2",
        4,
        "curves.png time.png clusters.csv",
    ),
    "failures": (
        "--workers 3 --deaths 0 200 --policy asynchronous barrier --methods downpour",
        4,
        "curves.png rows.png time.png clusters.csv",
    ),
    "leaders": (
        "--workers 4 --window 2 --gradients 8 --tune 0.1 --methods lsgd --group-size 2",
        2,
        "curves.png leaders.png identity.png",
    ),
    "ringleader": (
        "--workers 5 --time-budget 30 --methods ringleader ia2sgd --tune 0.05 0.2 "
        "--problem digits(hidden=[4],batch_size=2,split=0.1)",
        4,
        "curves.png rates.png",
    ),
    "robustness": (
        "--workers 8 --byzantine 2 --tune 0.4 --steps 12 --problem digits(hidden=[]) "
        "--batch-size 8 --rules trimmed_mean(f=f) --attack sign_flip(scale=10) alie",
        6,
        "curves.png rows.png",
    ),
    "replicas": (
        "--workers 2 --window 5 --steps 6 --tune 0.1 --target 7 --methods parle entropy_sgd "
        "easgd(alpha=[0.2,0.3]) averaging",
        6,
        "curves.png",
    ),
    "speedup": (
        "--workers 1 2 --methods downpour --time-budget 1 --steps 200",
        2,
        "curves.png speedup.csv",
    ),
    "kappa": (
        "--workers 2 --methods gem(kappa=[1,2]) --steps 20 --diagnose-every 1",
        2,
        "curves.png",
    ),
    "misspecification": ("--workers 1 2 --tune 0.1 0.2", 6, "curves.png rates.png rows.png"),
    "gossip": (
        "--workers 4 --steps 20 --topology ring() one_peer_exponential() --split 0.1 none "
        "--tune 0.1 --target 0.3 --compute [gamma(5,0.2)]+[gamma(1,0.2)]*3 "
        "--problem digits(hidden=[8]) --methods sgp adpsgd "
        "batch_sgd(policy='barrier(collective=ring)')",
        8,
        "curves.png consensus.png",
        "adpsgd on one_peer_exponential() is left out: ",
        "verdict: split 0.1: ",
        "verdict: split none: ",
    ),
    "stability": (
        "--workers 2 3 --learning-rate 0.1 --methods downpour --no-limits",
        2,
        "curves.png rows.png",
    ),
    "energy": ("--workers 1 2 --methods gem --diagnose-every 2", 2, "curves.png energy.png"),
    "tensors": (
        "--workers 2 4 --effective-batch 8 --problem digits(hidden=[2])",
        2,
        "curves.png tensors.csv",
    ),
    "windows": (
        "--workers 2 --window 1 3 --epochs 0.2 --methods agn downpour --problem digits(hidden=[2])",
        4,
        "curves.png agn.png efficiency.csv staleness.csv",
    ),
    "generalization": (
        "--workers 2 --epochs 1 --methods gem --problem digits(hidden=[2]) --batch-size 64",
        1,
        "curves.png",
    ),
    "delays optimizers": (
        "--optimizers adamw_90 --delays 0 1 --tune 1 0.1 --gradients 6 --stages 2 --seeds 2 "
        "--problem digits(hidden=[4])",
        None,
        "best.csv",
        EDGE,
    ),
    "delays outer_momentum": (
        "--workers 2 --delays 0 --tune 0.2 0.6 --server-momentum 0.9 --window 2 --gradients 16 "
        "--seeds 2 --problem quadratic",
        None,
        "best.csv",
        EDGE,
    ),
    "delays best_momentum": (
        "--delays 0 7 --gradients 200 --tune 0.5 3.3 --server-momentum 0.4 0.67 --seeds 2",
        None,
        "best.csv momentum.png",
        EDGE,
    ),
    "delays pipeline": (
        "--stages 2 --delays 3 --methods downpour --tune 0.1 0.3 --gradients 60 --seeds 2 "
        "--problem digits(hidden=[4])",
        None,
        "best.csv",
        EDGE,
    ),
    "momentum": (
        "--workers 3 --seeds 40 --steps 5 --compute exponential(1) constant(1)",
        None,
        "momentum.csv implicit.png",
        "exponential(1)",
    ),
    "ensembles": (
        "--workers 2 --steps 40 --seeds 1",
        None,
        "ensembles.png",
        "single accuracy",
    ),
    "checkpoint": (
        "--workers 4 --crashes 30 --seeds 1 --intervals 0.5 1 2",
        None,
        "checkpoint.png",
        "verdict: one seed: no order",
        "checkpoint=255",
    ),
    "checkpoint --server": (
        "--workers 4 --crashes 30 --seeds 1 --intervals 0.5 1 2 --compute 1 --service 1",
        None,
        "checkpoint.png",
        "checkpoint_every=255",
    ),
    "post_training": (
        "--slots 8 --batch 8 --group 2 --steps 20 --seeds 2 --tune 0.3 1.0 --split 3 --by-length "
        "--queues pace(0) discard(1) --corrections none truncated(2)",
        None,
        "rewards.png staleness.png split.csv",
        *("quickest update: ", "q1 to q4"),
        "(half way from the start to the best final reward)",
    ),
}
QUICK = ("compare", "staleness", "policies", "checkpoint", "checkpoint --server", "post_training")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in STUDIES],
)
def test_a_study_keeps_its_contract(name, told, lenient):
    options, runs, files, *words = STUDIES[name]
    study_name, folder = name.split()[0], Path("mine")
    options = (USUAL if runs else "") + options
    code, out, err = told(*name.split(), *options.split(), "--out=mine")
    assert code == 0, err
    printed = "\n".join([*out, *err])
    assert [word for word in ("verdict: ", *words) if word not in printed] == []
    results = read(folder, study_name)
    names = sorted(path.name for path in folder.iterdir())
    assert set(files.split()) <= set(names)
    (line,) = [line for line in out if line.startswith("wrote mine: ")]
    assert sorted(line.removeprefix("wrote mine: ").split(", ")) == names
    if runs:
        check_comparison(results, runs)
    # The function of a study's own numbers, if it has one.
    question = name.partition(" --")[0].split()[-1]
    globals().get(f"check_{question}", lambda results: None)(results)
    if runs and name != "compare":
        return
    # A lost run is computed again, tables and figures are made again, and all files are the same.
    before = written(folder)
    lost = folder / results.summary["run_folder"].iloc[-1] if runs else None
    for path in [*folder.glob("*.png"), *folder.glob("*.pdf"), *folder.glob("*.csv")]:
        path.unlink()
    shutil.rmtree(lost) if lost else next((folder / "parts").rglob("*.json")).unlink()
    assert told(study_name, "--resume=mine")[0] == 0
    assert written(folder) == before


def written(folder):
    """Return all files but that which says when a study ran, and those that were moved aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "made.json")
    return {path: path.read_bytes() for path in files if folder / "aside" not in path.parents}


def check_comparison(results, runs):
    """Check the traffic, the staleness and the ranking of a comparison."""
    assert len(results.summary) == len(results.runs()) == runs
    assert set(results.summary["status"]) == {"finished"}
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
    # Each row of the ranking is the first of its kind among the rows of all rates.
    best, rates = results.table("comparison.csv"), results.table("tuning.csv")
    varied = {"workers", "window", "policy", "deaths", "topology", "split", "method"}
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
    throughput = table["throughput"].unstack()
    remains = throughput.div(throughput[0.0], axis=0)
    np.testing.assert_allclose(table["remaining"].unstack(), remains)
    for row in results.summary.itertuples():
        absences = results.trace(row.trace_file).absences
        assert row.died == (absences["kind"] == "crash").sum() and row.kept == 1.0
        assert row.deaths or not row.died


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
    assert list(results.table("speedup.csv")["reached"]) == [0, 1]


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


def check_gossip(results):
    """Replicas are as far apart as their runs say, and each method runs in its place."""
    rows = results.summary[np.isinf(results.summary["split"])]
    assert list(rows[["topology", "method"]].itertuples(index=False, name=None)) == [
        ("ring()", "sgp"),
        ("ring()", "adpsgd"),
        ("one_peer_exponential()", "sgp"),
        ("all-reduce", "batch_sgd"),
    ]
    for row in results.summary.itertuples():
        run, trace = results.run(row.run_folder), results.trace(row.trace_file)
        assert [law.mean for law in trace.cluster.compute_laws] == [5, 1, 1, 1]
        assert run.config["problem_config"].get("split", np.inf) == row.split
        if row.topology == "all-reduce":
            assert np.isnan([row.consensus_distance, row.spectral_gap]).all()
        else:
            distances = run.evaluations["consensus_distance"]
            assert row.consensus_distance == pytest.approx(distances[1:].mean())
            assert row.spectral_gap == theory.spectral_gap(row.topology, 4)


def check_best_momentum(results):
    """Heavy ball with condition number 100: 0.669, at a rate of 3.3 over the largest curvature."""
    best = results.table("best.csv")
    best = best.loc[best.groupby("delay")["loss"].idxmin()].set_index("delay")
    assert tuple(best.loc[0, ["server_momentum", "learning_rate"]]) == (0.67, 3.3)
    assert best.loc[7, "server_momentum"] <= 0.4
    axes = figures("delays").momentum(results).axes[0]
    (implicit,) = (line for line in axes.get_lines() if "implicit" in line.get_label())
    assert np.interp(4, *implicit.get_data()) == pytest.approx(0.75, abs=1e-3)


def check_momentum(results):
    """Theory holds where its assumptions do, within five standard errors."""
    memoryless, constant = results.table("momentum.csv").itertuples()
    assert (memoryless.assumptions_hold, constant.assumptions_hold) == (True, False)
    assert abs(memoryless.momentum_measured - 2 / 3) < 5 * memoryless.standard_error < 0.5
    assert abs(memoryless.step_measured - 1 / 9) < 5 * memoryless.step_error < 0.5
    assert constant.staleness_std == 0
    assert len(results.summary) == 80 and (results.summary["status"] == "finished").all()
    assert results.config["compute"] == ["exponential(1)", "constant(1)"]


def check_ensembles(results):
    single, pair = results.summary.sort_values("models").itertuples()
    assert (single.models, pair.models) == (1, 2) and single.test_loss == single.single_loss
    # The mean of probabilities is never worse, in log loss, than its members are on average.
    assert pair.test_loss < pair.single_loss


def check_checkpoint(results):
    """The law holds for a job, and for a server that is always busy."""
    table = results.table("intervals.csv")
    np.testing.assert_allclose(table["goodput"], table["law"], rtol=0.08)
    # A crash loses half an interval, on average, and crashes come every 30 minutes, about 30 times.
    np.testing.assert_allclose(table["lost"], table["interval"] / 2 / 1800, rtol=0.5)
    assert table["multiple"].iloc[0] == 1  # Daly's is the best
    (axes,) = figures("checkpoint").checkpoint(results).axes
    assert axes.get_xlabel() == "interval between checkpoints (s)"
    assert axes.get_ylabel() == "goodput (share of time)"
    (law,) = [line for line in axes.lines if line.get_label().startswith("law")]
    assert len(law.get_xdata()) > 3 * len(table)


def check_post_training(results):
    """Synchronous training has no staleness, and discarding trains on shorter samples."""
    queues, summary = results.table("queues.csv").set_index("queue"), results.summary
    pace, discard = queues.loc["pace(0)"], queues.loc["discard(1)"]
    assert pace[["staleness_mean", "staleness_max", "samples_lost"]].tolist() == [0, 0, 0]
    assert discard["staleness_max"] <= 1 and discard["lost_share"] > 0.2
    assert discard["length_trained"] < 0.95 * discard["length_started"]
    rewards = results.table("rewards.csv").set_index(["queue", "correction"])["reward"]
    assert np.ptp(rewards["pace(0)"]) < 1e-5
    means = summary.groupby(["queue", "correction", "learning_rate"])["reward"].mean()
    assert rewards.to_dict() == pytest.approx(means.groupby(level=[0, 1]).max().to_dict())
    split = results.table("split.csv")
    assert split["update_time"].is_monotonic_increasing
    assert (len(summary), len(split)) == (2 * 2 * 2 * 2, 2 * 2)
