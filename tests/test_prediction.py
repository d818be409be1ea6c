"""Predictions hold where the durations stay what they were, and fail, with the reason, where they
do not.
"""

import re

import numpy as np
import pytest
from edits import without_cluster
from test_calibration import stretched

from asyncsim import Cluster, simulate
from asyncsim.calibration.prediction import extrapolate, predict

#: Enough for a band: the same cluster is outside once in ten with these.
RUNS = 19
CLUSTER = Cluster(4, "gamma(0.05, 0.2)", "gamma(0.004, 0.3)")
TRACE = without_cluster(simulate(CLUSTER, 600, seed=1))


def twice(**options):
    values = {
        "workers": 8,
        "compute": "gamma(0.05, 0.2)",
        "service": "gamma(0.004, 0.3)",
        **options,
    }
    return without_cluster(simulate(Cluster(**values), 600, seed=2))


def row(prediction, quantity):
    return prediction.table.set_index("quantity").loc[quantity]


@pytest.fixture(scope="module")
def halves():
    return predict(TRACE, seed=0, runs=RUNS)


def test_the_later_half_of_a_simulated_recording(halves, tmp_path):
    assert halves.holds
    assert list(halves.table) == ["quantity", "predicted", "low", "high", "measured", "within"]
    throughput = row(halves, "throughput (commits/s)")
    assert throughput["measured"] == pytest.approx(TRACE.summary(300)["throughput"])
    assert throughput["predicted"] == pytest.approx(4 / 0.055, rel=0.05)
    rates = [run.values["throughput"] for run in halves.runs]
    assert throughput[["low", "high"]].tolist() == np.quantile(rates, [0.025, 0.975]).tolist()
    assert row(halves, "staleness, mean")["predicted"] == pytest.approx(3, abs=0.02)
    assert 0 < row(halves, "staleness, distance")["measured"] < 0.15
    assert halves.reasons == ()
    assert "the later half of 600 commits by 4 workers, from the earlier half: holds" in halves.text
    written = halves.draw(tmp_path / "prediction")
    assert [path.name for path in written] == ["prediction.png", "prediction.pdf"]
    assert all(path.stat().st_size > 5_000 for path in written)


def test_the_same_seed_predicts_the_same(halves):
    again = predict(TRACE, seed=0, runs=RUNS)
    assert again.table.equals(halves.table)
    assert not predict(TRACE, seed=1, runs=3).table.equals(predict(TRACE, seed=0, runs=3).table)


def test_a_later_half_that_is_slower_is_called_out():
    prediction = predict(stretched(TRACE, 1.5, 300), seed=0, runs=RUNS)
    assert not prediction.holds
    throughput = row(prediction, "throughput (commits/s)")
    assert throughput["predicted"] / throughput["measured"] == pytest.approx(1.5, rel=0.1)
    for what in ("compute", "service"):
        said = rf"{what} times in the later half are 1\.[3-7]\d \S \d\.\d\d times as long"
        assert any(re.fullmatch(said, told) for told in prediction.reasons), prediction.reasons
    assert "fails" in prediction.text


def test_twice_the_workers():
    prediction = extrapolate(TRACE, twice(), seed=0, runs=RUNS)
    assert prediction.holds
    assert prediction.cluster.workers == 8
    assert row(prediction, "staleness, mean")["predicted"] == pytest.approx(7, abs=0.05)
    assert prediction.reasons == ()


def test_workers_that_contend_are_called_out():
    prediction = extrapolate(TRACE, twice(compute="gamma(0.09, 0.2)"), seed=0, runs=RUNS)
    assert not prediction.holds
    told = next(
        told
        for told in prediction.reasons
        if told.startswith("compute times with 8 workers are 1.8")
    )
    assert told.endswith("the workers contend for their processors")
