"""Recordings in which workers died and came back: their calibration, and what it predicts."""

import numpy as np
import pytest
from edits import without_cluster

from asyncsim import Cluster, calibrate, failures, simulate
from asyncsim.calibration import examine
from asyncsim.calibration.prediction import LOST, predict
from asyncsim.traces.durations import deaths, times_of

CRASH = failures.crash(every="exponential(10)", lasts="gamma(3, 0.3)")
CLUSTER = Cluster(4, "gamma(0.5, 0.3)", 0.01, failures=[CRASH])


def test_rows_tell_of_deaths_what_spells_do():
    trace = simulate(CLUSTER, 1_000, seed=2)
    crashes = trace.spells[trace.spells["kind"] == "crash"]
    end = trace.frame["commit_time"].max()
    told, found = (
        times_of(deaths(known), range(4), end) for known in (trace, without_cluster(trace))
    )
    absent = np.minimum(crashes["end"].fillna(np.inf), end) - crashes["begin"]
    assert told.between.sum() == pytest.approx(4 * end - absent.sum())
    np.testing.assert_allclose(
        np.sort(told.away), np.sort((crashes["end"] - crashes["begin"])[crashes["end"] <= end])
    )
    # Not those of workers whose message was at the server, and those of workers that are away at
    # the end.
    assert 0.9 * len(told.between) <= len(found.between) <= len(told.between)
    assert found.away.mean() == pytest.approx(told.away.mean(), rel=0.05)
    assert deaths(simulate(Cluster(2, 1.0), 20)).empty


@pytest.mark.parametrize("recorded", [True, False])
def test_deaths_are_calibrated_and_predicted(recorded):
    trace = simulate(CLUSTER, 2_000, seed=1)
    found = examine(without_cluster(trace) if recorded else trace)
    (crash,) = found.cluster.failures
    deaths_ = int(found.table.set_index("what").loc["time to a death", "samples"])
    assert deaths_ > 60 and crash.every.mean == pytest.approx(10, rel=3 / deaths_**0.5)
    assert crash.lasts.mean == pytest.approx(3, rel=3 * 0.3 / deaths_**0.5)
    assert found.cluster.compute.mean == pytest.approx(0.5, rel=0.02)
    if recorded:
        return
    prediction = predict(trace, runs=19)
    rows = prediction.table.set_index("quantity")
    assert prediction.holds and rows.loc[LOST, "within"]
    assert 0 < rows.loc[LOST, "low"] < rows.loc[LOST, "measured"]


def _mean_and_throughput(law, every, commits, seeds, recorded=False):
    """Return the mean over seeds of the fitted mean and of the predicted throughput, relative to
    the true ones.
    """
    ratios = []
    for seed in range(seeds):
        crash = failures.crash(every=f"exponential({every})", lasts="exponential(1)")
        trace = simulate(Cluster(8, law, 0.001, failures=[crash]), commits, seed)
        cluster = calibrate(without_cluster(trace) if recorded else trace, per_worker=False)
        predicted = simulate(cluster, commits, seed + 100).summary()["throughput"]
        ratios.append((cluster.compute.mean, predicted / trace.summary()["throughput"]))
    return np.mean(ratios, axis=0)


@pytest.mark.parametrize(
    ("law", "recorded"), [("exponential(1)", True), ("lognormal(1, 0.5)", False)]
)
def test_cancelled_computations_are_censored(law, recorded):
    """Of the completed ones alone the mean is .66 (exponential) or .9, and the throughput 12 to 50
    % too high.
    """
    np.testing.assert_allclose(_mean_and_throughput(law, 2, 4_000, 2, recorded), 1, atol=0.03)


@pytest.mark.parametrize("exclusive", [True, False])
def test_every_kind_of_visit_is_calibrated_under_crashes(exclusive):
    """A worker that dies between its two visits has completed its computation."""
    crash = failures.crash(every="exponential(3)", lasts="exponential(1)")
    network = dict(latency="exponential(0.3)", protocol="read_then_write", exclusive=exclusive)
    trace = simulate(Cluster(6, "gamma(1, 0.5)", 0.01, failures=[crash], **network), 4_000, seed=0)
    cluster = calibrate(trace, per_worker=False)
    assert cluster.compute.mean == pytest.approx(1, rel=0.03)
    assert cluster.compute.std == pytest.approx(0.5, rel=0.05)


def test_windows_under_crashes_and_each_worker_by_itself():
    crash = failures.crash(every="exponential(4)", lasts="exponential(1)")
    trace = simulate(Cluster(4, "gamma(0.5, 0.5)", 0.01, window=4, failures=[crash]), 3_000, seed=0)
    assert calibrate(trace, per_worker=False).compute.mean == pytest.approx(0.5, rel=0.03)
    trace = simulate(
        Cluster(2, ["gamma(1, 0.5)", "exponential(2)"], 0.01, failures=[crash]), 4_000, seed=0
    )
    means = [law.mean for law in calibrate(trace).compute]
    assert means == pytest.approx([1, 2], rel=0.06)
    found = examine(trace, law="empirical")
    assert [law.mean for law in found.cluster.compute] == pytest.approx([1, 2], rel=0.1)
    again = found.resampled(np.random.default_rng(0))
    assert [law.mean for law in again.compute] == pytest.approx([1, 2], rel=0.1)
