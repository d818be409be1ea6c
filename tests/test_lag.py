"""Logs of rollouts: their staleness, the bound, the limit that binds, and damaged rows."""

import re

import numpy as np
import pandas as pd
import pytest
from edits import log_of

from asyncsim import Cluster, InputError, Rollouts, simulate
from asyncsim.traces.lag import check_lag


@pytest.fixture
def log(tmp_path):
    """A log of a simulated run, as a real system would write it."""
    rollouts = Rollouts(6, "exponential(1)", group=2, batch=4, queue="pace(2)", consume="started")
    trace = simulate(Cluster(1, 0.3, rollouts=rollouts), 40, progress=False)
    table = log_of(trace)
    table["version"] = table["version"].where(table["outcome"] == "trained")

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
    assert np.isnan(report.open) and "unknown without start_time, train_time" in str(report)
    assert "the limit is unknown without take_time, train_time" in str(report)
    log = log_of(trace)
    log.to_parquet(tmp_path / "complete.parquet")
    audited = trace.check().open / 80
    assert check_lag(tmp_path / "complete.parquet").open == pytest.approx(audited)
    # Without the version of their discard, samples count until the end of their generation.
    log["version"] = log["version"].where(log["outcome"] == "trained")
    log.to_parquet(tmp_path / "log.parquet")
    assert 0.7 * audited < check_lag(tmp_path / "log.parquet").open <= audited


def test_a_slot_generates_a_single_sample_at_a_time(tmp_path):
    rows = {"read_version": [0, 0, 0], "version": [0, 0, 0], "slot": [0, 1, 0]}
    log = pd.DataFrame(rows | {"start_time": [0, 0, 1], "end_time": [2, 5, 3]})
    log.to_csv(tmp_path / "log.csv", index=False)
    log.to_parquet(tmp_path / "log.parquet")
    overlap = r"row 2 \(line 4\) overlaps row 0 \(line 2\) in slot 0; give"
    with pytest.raises(InputError, match=overlap):
        check_lag(tmp_path / "log.csv")
    with pytest.raises(InputError, match="row 2 overlaps row 0 in slot 0; give"):
        check_lag(tmp_path / "log.parquet")
    log.assign(slot=[0, 1, 2]).to_parquet(tmp_path / "log.parquet")
    assert check_lag(tmp_path / "log.parquet").slots_busy == pytest.approx(9 / 15)


def test_the_limit_that_binds(tmp_path):
    rows = {"read_version": [0, 0, 1, 1], "version": [0, 0, 1, 1], "slot": [0, 1, 0, 1]}
    rows |= {"start_time": [0, 0, 1, 1], "end_time": [1, 1, 2, 2], "take_time": [1, 1, 2, 2]}
    path = tmp_path / "log.csv"
    pd.DataFrame(rows | {"train_time": [1, 1, 2, 2]}).to_csv(path)
    assert "the slots bind: they are busy 100%" in str(check_lag(path))
    pd.DataFrame({"read_version": [0], "version": [0]}).to_csv(path)
    assert "which limit binds is unknown" in str(check_lag(path))


def planted(**changes):
    """Return 12 samples in 6 updates of 2, each two versions old but for the first, with changes.

    A change is a function of the table, the values of a column, or one value by row.
    """
    version = np.arange(12) // 2
    log = pd.DataFrame({"read_version": np.maximum(version - 2, 0), "version": version})
    log = log.assign(group=version, slot=np.arange(12) % 6, outcome="trained")
    log["train_time"] = version + 1.0
    log["take_time"] = log["train_time"] - 0.5
    log["start_time"] = log["read_version"] + 0.25 * (log["version"] % 2)
    log["start_time"] = np.where(version < 2, 0.0, log["start_time"])
    log["end_time"] = np.maximum(log["take_time"] - 0.2, 0.1)
    for column, change in changes.items():
        if isinstance(change, dict):
            log[column] = log[column].astype(object)
            for row, value in change.items():
                log.loc[row, column] = value
        else:
            log[column] = change(log) if callable(change) else change
    return log


ONE_UPDATE = "must be that of the other samples of its version"
LATE_READS = {"read_version": lambda log: np.floor(log["end_time"])}
DATE = pd.Timestamp("2026-11-28 03:00")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (planted(version={3: -1}), "version of row 3 is -1; it must be a whole number of"),
        (planted(read_version={5: 99}), "version of row 5 is 2; it must not be below read_version"),
        (planted(end_time={2: -4.0}), "end_time of row 2 is -4; it must not be before start"),
        (planted(read_version={1: None}), "read_version of row 1 is empty"),
        (planted(read_version={1: 0.5}), "read_version of row 1 is 0.5; it must be a whole"),
        (planted(outcome={1: "ok"}), "outcome of row 1 is ok; it must be trained, dropped,"),
        (planted(version={11: 1e300}), "version of row 11 is 1e+300; it must be a whole"),
        (planted(version=[True] * 12), "version of row 0 is True; it must be a finite number"),
        (planted(version={4: "two"}), "version of row 4 is two; it must be a finite number"),
        (planted(version={4: None}), "version of row 4 is empty; it is of a trained sample"),
        (planted(version=np.nan, outcome="dropped"), "has no trained sample"),
        # Reads and updates that contradict each other.
        (planted(**LATE_READS), "read_version of row 2 is 1; it was made after the sample's start"),
        (planted(**LATE_READS), "the mean staleness is 0.000, and by the times 1.500; log the"),
        (planted(read_version={8: 3}), "read_version of row 8 is 3; it was made after"),
        (planted().drop([6, 7]), "version of row 6 is 4; it must be 0, or that of another"),
        (planted(train_time={5: 3.4}), f"train_time of row 5 is 3.4; it {ONE_UPDATE}"),
        (planted(take_time={5: 2.6}), f"take_time of row 5 is 2.6; it {ONE_UPDATE}"),
        (planted(version={10: 4, 11: 4}), f"take_time of row 10 is 5.5; it {ONE_UPDATE}"),
        (
            planted(train_time={4: 4.5, 5: 4.5}),
            "train_time of row 6 is 4; it must not be before the end of the update before",
        ),
        (planted(group={4: 1, 5: 1}), "version of row 4 is 2; it must be that of its group's"),
        (planted(group={4: None}), "group of row 4 is empty; it must name the group"),
        (planted(slot={4: None}), "slot of row 4 is empty; it must name the slot"),
        (planted(slot=0), "overlaps row"),
        # Times.
        (planted(train_time={4: None, 5: None}), "train_time of row 4 is empty; it must be known"),
        (planted(start_time={4: None}), "start_time of row 4 is empty; it must be known"),
        (planted(end_time={4: "3 ms"}), "end_time of row 4 is 3 ms; it must be a finite number"),
        (planted(end_time=DATE), "holds dates, and another time seconds; log all alike"),
        # Doubts and counts that are no errors.
        (planted(version=lambda log: log["version"] + 1), "no sample has version 0: if the log"),
        # Of a log that begins later there is none, too, and that is no doubt.
        (
            planted(version=lambda log: log["version"] + 2, group=lambda log: log["version"]),
            "would use both better\nthe mean staleness is 4.000",
        ),
        (
            planted(read_version={5: 1}, start_time={5: 1.0}),
            "mean 1.417, largest 2; of the oldest sample of an update 1.500",
        ),
        (
            planted(read_version=0),
            "the mean staleness is 2.500, and 1.500 updates ended during a sample: slots read",
        ),
        (planted(slot=np.nan), "the limit is unknown without slot, start_time, end_time"),
        (planted(), "open samples per batch: 1.500\n"),
        # The open samples count until the last update, beyond which they were never taken.
        (
            planted(version={10: 99, 11: 99}, outcome={10: "open", 11: "open"}),
            "open samples per batch: 1.800\n",
        ),
    ],
)
@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_planted_logs(tmp_path, log, message, name):
    path = tmp_path / name
    if name == "log.csv":
        log.to_csv(path, index=False)
        message = re.sub(r"row (\d+)", lambda row: f"{row[0]} (line {int(row[1]) + 2})", message)
    else:
        if any(str in (types := {*map(type, log[column])}) and len(types) > 1 for column in log):
            pytest.skip("parquet has one type for a column")
        log.to_parquet(path)
    try:
        text = str(check_lag(path))
    except InputError as error:
        text = str(error)
    assert message in text


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_log_is_judged_by_its_header_and_length_before_it_is_read(tmp_path, monkeypatch, name):
    path = tmp_path / name

    def refused(log, message):
        log.to_csv(path, index=False) if name == "log.csv" else log.to_parquet(path)
        with pytest.raises(InputError, match=message):
            check_lag(path)

    monkeypatch.setattr(pd, "read_parquet", None)
    refused(planted().drop(columns="version"), "misses version")
    monkeypatch.setattr("os.sysconf", lambda name: 1)  # bytes of memory
    refused(planted(), "a table of its length needs at least .* GiB of memory")


@pytest.mark.parametrize("form", ["dates", "dates of a zone", "intervals"])
@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_dates_and_intervals_count_from_the_first(tmp_path, form, name):
    times = ["start_time", "end_time", "take_time", "train_time"]
    log, path = planted(), tmp_path / name
    log.to_csv(tmp_path / "seconds.csv")
    dates = log[times].apply(pd.to_timedelta, unit="s")
    if form != "intervals":
        dates = DATE.tz_localize("Asia/Tokyo" if "zone" in form else None) + dates
    log = log.assign(**dict(dates))
    log.to_csv(path) if name == "log.csv" else log.to_parquet(path)
    assert str(check_lag(path)) == str(check_lag(tmp_path / "seconds.csv"))
