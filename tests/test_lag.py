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
    table = samples[["read_version", "version", "group", "slot", "start_time", "end_time", "take_time"]]
    table = table.assign(version=table["version"].where(trained))
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
    report = check_lag(write(read_version=(row, version - 3)), bound=2)
    assert report.beyond == row
    assert f"violated first in row {row}" in str(report)


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
        ({"version": (3, -1)}, "row 3: version = -1.0: must be a whole number of at least 0"),
        ({"read_version": (5, 99)}, "row 5: version = "),
        ({"end_time": (2, -4.0)}, "row 2: end_time = -4.0: must not be before start_time"),
        ({"read_version": (1, "one")}, "row 1: read_version = one: must be a number"),
    ],
)
def test_bad_rows_are_named(log, change, message):
    with pytest.raises(InputError) as raised:
        check_lag(log[0]("log.csv", **change))
    assert message in str(raised.value)


def test_logs_that_are_none(tmp_path):
    with pytest.raises(InputError, match="no such file; give a log"):
        check_lag(tmp_path / "missing.csv")
    (tmp_path / "log.csv").write_text("version\n1\n")
    with pytest.raises(InputError, match="has no column read_version; it must have"):
        check_lag(tmp_path / "log.csv")
    (tmp_path / "log.parquet").write_text("no parquet")
    with pytest.raises(InputError, match="cannot be read"):
        check_lag(tmp_path / "log.parquet")
