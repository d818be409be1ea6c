"""The study of policies: its tables are those of its traces and runs, and its figures show them."""

import contextlib
import io
import re

import numpy as np
import pytest

from asyncsim import study, theory
from asyncsim.base.console import number_text
from asyncsim.pages.page import two_runs
from asyncsim.study import ranking
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read
from asyncsim.study.target import Target

policies = study.load("policies")
figures = figures_of("policies")
SMALL = {
    "workers": (4,),
    "steps": 30,
    "seeds": 2,
    "problem": "quadratic",
    "target": 0.2,
    "compute": "exponential(1)",
}
#: What is waiting, in vain, and neither.
POLICIES = ("asynchronous", "barrier", "barrier(2)", "discard_stale(2)")


pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of four policies, and what was printed."""
    out = tmp_path_factory.mktemp("results") / "policies"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        policies.run(policies.Config(**SMALL, service=0.0, policy=POLICIES, out=out))
    return read(out, "policies"), printed.getvalue()


def test_tables_are_of_the_traces_and_the_runs(results):
    finished, printed = results
    folder, summary = finished.folder, finished.summary
    assert list(summary["policy"].unique()) == list(POLICIES) and len(summary) == 2 * len(POLICIES)
    table = finished.table(policies.POLICIES).set_index("policy")
    for policy, row in table.iterrows():
        traces = [
            finished.trace(name) for name in summary.loc[summary["policy"] == policy, "trace_file"]
        ]
        found = [trace.summary() for trace in traces]
        assert row["throughput"] == pytest.approx(np.mean([one["throughput"] for one in found]))
        assert row["in_vain"] == pytest.approx(np.mean([one["lost_time_share"] for one in found]))
        accepted = np.mean([one["counted_share"] for one in found])
        assert row["computing"] - row["in_vain"] == pytest.approx(accepted)
        assert re.search(rf"\b{re.escape(policy)} .* {number_text(accepted)} ", printed)
        assert row["most"] == pytest.approx(4 * np.mean([one["share_max"] for one in found]))
        known = theory.throughput_theory(traces[0].cluster)
        assert (row["theory"], row["theory_name"], row["exact"]) == (
            known.commits,
            known.name,
            known.exact,
        )
    for policy, commits in (("asynchronous", 1), ("barrier", 4)):  # of a version
        row = table.loc[policy]
        assert row["throughput"] == pytest.approx(
            commits * row["versions"], rel=1e-12 if commits == 1 else 0.01
        )
    assert (
        table["computing"].loc["asynchronous"] == pytest.approx(1)
        and table["computing"].loc["barrier"] < 0.8
    )
    assert (
        table["in_vain"].loc[["asynchronous", "barrier"]].max()
        == 0
        < table["in_vain"].loc["discard_stale(2)"]
    )
    times = finished.table(policies.TIMES)
    assert set(times["policy"]) == set(POLICIES) and (times["reached"] <= times["seeds"]).all()
    assert times["time_to_target"].is_monotonic_increasing and times["above_low"].notna().any()
    assert "not distinguishable" in printed or "distinguishable from all others" in printed
    assert "4.00 (nobody waits)" in printed
    assert printed.startswith("workers 4; window 1; means over 2 traces; ")
    assert {path.name for path in folder.glob("*.png")} == {"policies.png", "loss.png"}


def test_without_methods_there_are_traces_alone(capsys):
    options = {**SMALL, "service": 0.0, "policy": ("asynchronous", "barrier"), "window": (1, 3)}
    folder, summary = policies.run(policies.Config(**options, methods=()))
    assert (
        len(summary) == 2 * 2 * 2
        and not (folder / "runs").exists()
        and not (folder / policies.TIMES).exists()
    )
    table = read(folder, "policies").table(policies.POLICIES).set_index(["policy", "window"])
    assert table.loc[("asynchronous", 3), "throughput"] == pytest.approx(4 / 3, rel=0.2)
    assert (
        table.loc["barrier", "staleness_mean"].max()
        == 0
        < table.loc["asynchronous", "staleness_mean"].min()
    )
    assert {path.name for path in folder.glob("*.png")} == {"policies.png"}
    files = {
        path: path.read_bytes() for path in (folder / "summary.csv", *folder.rglob("*.parquet"))
    }
    capsys.readouterr()
    policies.run(policies.Config(**options, methods=(), resume=folder))
    assert capsys.readouterr().err.count(": read") == 8
    assert {path: path.read_bytes() for path in files} == files


def test_policies_that_miss_the_target_are_compared_at_the_end_and_at_one_time(results):
    finished, _ = results
    times = finished.table(policies.TIMES)
    names = list(times["policy"])
    by = ["policy", "workers", "window", "method", "learning_rate"]
    text = ranking.course(finished, times, names, by, Target(0.2))
    ends, at_time = {}, {}
    runs = {name: finished.runs(policy=name) for name in names}
    tables = {name: [run.evaluations for run in runs[name]] for name in names}
    time = min(rows["commit_time"].iloc[-1] for seeds in tables.values() for rows in seeds)
    for name, seeds in tables.items():
        ends[name] = np.mean([rows["train_loss"].iloc[-1] for rows in seeds])
        at_time[name] = np.mean(
            [np.interp(time, rows["commit_time"], rows["train_loss"]) for rows in seeds]
        )
    best = min(at_time, key=at_time.get)
    low, high = (number_text(choose(ends.values())) for choose in (min, max))
    assert f"accepted gradients the training loss is {low} to {high}; " in text
    assert text.endswith(
        f"at {number_text(time)} s (the last common time) {best} is lowest "
        f"({number_text(at_time[best])})"
    )
    missed = times.assign(time_to_target=np.inf, reached=0)
    measure = ranking.Measure("time_to_target")
    assert ranking.verdict(missed, names, measure, "policy", "a training loss of 0.2", text) == (
        f"no policy reached a training loss of 0.2; {text}"
    )


@pytest.mark.full
def test_each_policy_and_window_is_at_its_best_rate():
    options = {
        **SMALL,
        "seeds": 1,
        "policy": ("asynchronous", "barrier"),
        "window": (1, 2),
        "tune": (0.05, 0.2),
    }
    folder, summary = policies.run(policies.Config(**options))
    finished = read(folder, "policies")
    assert len(summary) == 2 * 2 * 2 and len(finished.table(policies.TUNING)) == 2 * 2 * 2
    times = finished.table(policies.TIMES)
    assert len(times) == 4 and times["time_to_target"].is_monotonic_increasing
    for row in times.itertuples():
        own = summary[(summary["policy"] == row.policy) & (summary["window"] == row.window)]
        means = own.groupby("method.learning_rate")["time_to_target"].mean()
        assert means.idxmin() == row.learning_rate and means.min() == pytest.approx(
            row.time_to_target
        )
    assert len(figures.loss(finished).axes) == 2


def test_the_page_names_the_policy_of_the_run_with_the_least_loss(results):
    finished, _ = results
    least = finished.summary.sort_values("train_loss").iloc[0]
    ((title, _, _),) = two_runs(finished.folder)
    assert title == f"downpour, {least['policy']}, seed {least['seed']}"


def test_the_bars_are_the_parts_of_the_time(results):
    finished, _ = results
    table = finished.table(policies.POLICIES)
    (axes,) = figures.time_spent(finished).axes
    drawn = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    np.testing.assert_allclose(drawn["computing in vain"], table["in_vain"])
    np.testing.assert_allclose(
        np.add(drawn["computing accepted gradients"], drawn["computing in vain"]),
        table["computing"],
    )
    np.testing.assert_allclose(drawn["held by the policy"], table["held"])
    np.testing.assert_allclose(np.sum(list(drawn.values()), axis=0), 1)
    assert [text.get_text() for text in axes.get_yticklabels()] == list(POLICIES)
