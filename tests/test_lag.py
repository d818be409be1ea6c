"""Logs of rollouts: their staleness, the bound, the limit that binds, and damaged rows."""

import pandas as pd
import pytest

from asyncsim import Cluster, InputError, Rollouts, simulate
from asyncsim.traces.lag import check_lag


@pytest.fixture
def log(tmp_path):
    """A log of a simulated run, as a real system would write it."""
    rollouts = Rollouts(6, "exponential(1)", group=2, batch=4, queue="pace(2)", consume="started")
    trace = simulate(Cluster(1, 0.3, rollouts=rollouts), 40, progress=False)
    samples = trace.samples
    trained = samples["outcome"] == "trained"
    ends = trace.frame["commit_time"].to_numpy()
    table = samples[
        ["read_version", "version", "group", "slot", "start_time", "end_time", "take_time"]
    ]
    table = table.assign(version=table["version"].where(trained))
    table["outcome"] = samples["outcome"].astype(str)
    table["train_time"] = [ends[int(v)] if v == v else float("nan") for v in table["version"]]

    def write(name="log.parquet", **changes):
        changed = table.copy()
        for column, (row, value) in changes.items():
            changed[column] = changed[column].astype(object)
            changed.loc[row, column] = value
        path = tmp_path / name
        changed.to_csv(path, index=False) if name.endswith(".csv") else changed.to_parquet(path)
        return path

    return write, trace


@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
def test_a_log_of_a_simulated_run(log, name):
    write, trace = log
    report = check_lag(write(name), bound=2)
    law = trace.staleness()
    assert report.law.to_list() == pytest.approx(law.to_list())
    assert report.beyond is None and report.updates == 40
    assert report.open == pytest.approx(report.mean, abs=0.2)
    assert "bound 2: holds" in str(report)


def test_a_violated_bound_names_its_row(log):
    write, trace = log
    row = int((trace.samples["outcome"] == "trained").to_numpy().nonzero()[0][50])
    version = trace.samples["version"][row]
    changes = {"read_version": (row, version - 3)}
    report = check_lag(write(**changes), bound=2)
    assert report.beyond == row
    pair = f"which read {version - 3} and was trained at {version}; rows count from 0"
    assert f"bound 2: violated by 1 of 160 samples, first by row {row}, {pair}" in str(report)
    report = check_lag(write("log.csv", **changes), bound=2)
    assert f"first by row {row} (line {row + 2}), {pair}" in str(report)


@pytest.mark.parametrize("failures", [(), ("crash(every=exponential(6), lasts=1, on=slots)",)])
def test_an_export_of_samples_states_which_were_trained(tmp_path, failures):
    rollouts = Rollouts(8, "exponential(1)", group=2, batch=8, queue="discard(1)")
    cluster = Cluster(1, 0.2, rollouts=rollouts, failures=failures)
    trace = simulate(cluster, 10, progress=False)
    trace.samples.to_parquet(tmp_path / "samples.parquet")
    report = check_lag(tmp_path / "samples.parquet", bound=1)
    outcomes = trace.samples["outcome"].value_counts()
    assert outcomes["discarded"] > 0 and outcomes["open"] > 0
    assert report.samples - report.untrained == outcomes["trained"] == 80
    assert report.law.to_list() == pytest.approx(trace.staleness().to_list())
    assert report.beyond is None
    opened = (trace.samples["version"] - trace.samples["read_version"]).sum() / 80
    assert report.open == pytest.approx(opened)
    assert "the limit is unknown without take_time, train_time" in str(report)


def test_a_slot_generates_a_single_sample_at_a_time(tmp_path):
    rows = {"read_version": [0, 0, 0], "version": [0, 0, 0], "slot": [0, 1, 0]}
    log = pd.DataFrame(rows | {"start_time": [0, 0, 1], "end_time": [2, 5, 3]})
    log.to_csv(tmp_path / "log.csv", index=False)
    log.to_parquet(tmp_path / "log.parquet")
    overlap = r"row 2 \(line 4\): overlaps row 0 \(line 2\) in slot 0; give"
    with pytest.raises(InputError, match=overlap):
        check_lag(tmp_path / "log.csv")
    with pytest.raises(InputError, match="row 2: overlaps row 0 in slot 0; give"):
        check_lag(tmp_path / "log.parquet")
    log.assign(slot=[0, 1, 2]).to_parquet(tmp_path / "log.parquet")
    assert check_lag(tmp_path / "log.parquet").slots_busy == pytest.approx(9 / 15)


def test_the_limit_that_binds(tmp_path):
    rows = {"read_version": [0, 0, 1, 1], "version": [0, 0, 1, 1], "slot": [0, 1, 0, 1]}
    rows |= {"start_time": [0, 0, 1, 1], "end_time": [1, 1, 2, 2], "take_time": [1, 1, 2, 2]}
    path = tmp_path / "log.csv"
    pd.DataFrame(rows | {"train_time": [1.2, 1.2, 2.2, 2.2]}).to_csv(path)
    assert "the slots bind: they are busy 100%" in str(check_lag(path))
    pd.DataFrame({"read_version": [0], "version": [0]}).to_csv(path)
    assert "which limit binds is unknown" in str(check_lag(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": (3, -1)}, "row 3 (line 5): version = -1: must be a whole number of"),
        ({"read_version": (5, 99)}, "row 5 (line 7): version = "),
        ({"end_time": (2, -4.0)}, "row 2 (line 4): end_time = -4: must not be before start"),
        ({"read_version": (1, None)}, "row 1 (line 3): read_version is empty; log the version"),
        ({"outcome": (1, "ok")}, "row 1 (line 3): outcome = ok: must be trained, dropped,"),
    ],
)
def test_bad_rows_are_named(log, change, message):
    with pytest.raises(InputError) as raised:
        check_lag(log[0]("log.csv", **change))
    assert message in str(raised.value)
