"""Rollouts: clocks against conservation, closed forms and a calculation by hand; logs of samples:
their staleness, the bound, the limit that binds, damaged rows, and the cluster that they show.
"""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from edits import log_of
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncsim.__main__ as command
from asyncsim import Cluster, InputError, Rollouts, simulate
from asyncsim.calibration.rollouts import calibrate_rollouts
from asyncsim.clusters.failures import crash, pause, slow
from asyncsim.theory import rollouts as theory
from asyncsim.traces.lag import check_lag
from asyncsim.traces.samples import binding_limit, law_of_staleness

QUEUES = (
    "pace(0)",
    "pace(1)",
    "pace(3)",
    "drop_oldest(1)",
    "drop_oldest(3)",
    "discard(4)",
    "keep()",
)


def learner(count, time=1.0, seed=0, failures=(), learners=1, **rollouts):
    cluster = Cluster(learners, time, rollouts=Rollouts(**rollouts), failures=failures)
    return simulate(cluster, count, seed, progress=False)


def mean_staleness(trace, weight="samples", warm_up=0.3):
    tables = trace.rollouts
    late = tables.samples["version"] >= warm_up * len(tables.updates)
    law = law_of_staleness(tables._replace(samples=tables.samples[late]), weight)
    return float((law.index * law).sum())


# Clocks.


FAILURES = [
    crash("exponential(9)", 1.0, on="slots", together=False),
    slow("exponential(5)", 2.0, 0.5, on="slots"),
    pause("exponential(7)", 1.0, on="slots"),
    crash("exponential(20)", 2.0, on="learners"),
]


@st.composite
def settings_of_rollouts(draw):
    group = draw(st.sampled_from((1, 2, 4)))
    updates = draw(st.sampled_from(("start", "in_flight", "abort_and_resume")))
    choices = {
        "length": ("exponential(1)", "constant(1)", "lognormal(1, 1)"),
        "submit": ("rollout", "group", "batch"),
        "consume": ("finished", "started"),
        "queue": QUEUES,
        "prefill": (0.0, 0.1) if updates != "start" else (0.0,),
        "transfer": (0.0, "exponential(0.3)"),
        "time": (0.2, 2.0, "exponential(0.5)"),
        "slots": range(1, 13),
        "learners": range(1, 4),
        "seed": range(100),
    }
    return {name: draw(st.sampled_from(values)) for name, values in choices.items()} | {
        "group": group,
        "batch": group * draw(st.integers(1, 4)),
        "updates": updates,
        "failures": [failure for failure in FAILURES if draw(st.booleans())],
    }


@given(settings_of_rollouts())
@settings(max_examples=80)
def test_ages_and_counts_of_samples_agree(setting):
    """Versions that passed while samples were open equal the open samples, summed over updates."""
    try:
        trace = learner(25, **setting)
    except InputError as error:
        assert "too stale" in str(error)
        return
    audit = trace.check()
    assert audit.holds
    assert audit.bound is None or setting["learners"] == 1
    samples = trace.samples
    trained = samples[samples["outcome"] == "trained"]
    assert trained.groupby("version").size().eq(setting["batch"]).all()
    assert trained.groupby(["version", "group"]).size().eq(setting["group"]).all()
    assert (np.diff(trained[["end_time", "ready_time", "take_time"]]) >= 0).all()
    busy = samples.sort_values(["slot", "start_time"])
    after = busy.groupby("slot")["start_time"].shift(-1)
    assert not (busy["end_time"] > after).any(), "a slot has one sample at a time"


def test_bounds_of_queues_are_those_of_one_learner():
    """Others make versions between a learner's check of its batch and its update."""
    rollouts = {"slots": 8, "length": "exponential(1)", "queue": "discard(0)"}
    lone, two = (learner(200, learners=count, **rollouts) for count in (1, 2))
    assert lone.check().bound == lone.samples.query("outcome == 'trained'")["staleness"].max() == 0
    assert two.samples.query("outcome == 'trained'")["staleness"].max() > 0 and two.check().holds


def test_slots_that_never_finish_a_sample_end_the_run(monkeypatch):
    monkeypatch.setattr("asyncsim.simulation.rollouts.FRUITLESS", 100)
    monkeypatch.setattr("asyncsim.simulation.rollouts.FRUITLESS_OF_A_WORKER", 0)
    with pytest.raises(InputError, match=r"crash.* no sample was finished in 101 attempts; give"):
        learner(1, slots=1, length=1.0, failures=[crash(0.5, 0.1, on="slots")])


def test_rows_and_shares_by_hand():
    """Two slots, samples of 1 s, batches of two, updates of 0.5 s: one version per second."""
    trace = learner(10, 0.5, slots=2, length=1.0, batch=2, queue="keep()")
    rows = trace.samples[["slot", "start_time", "take_time", "read_version", "version"]].head(6)
    assert rows.to_numpy().tolist() == [
        [0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 1, 2, 0, 1],
        [1, 1, 2, 0, 1],
        [0, 2, 3, 1, 2],
        [1, 2, 3, 1, 2],
    ]
    assert trace.frame["commit_time"].tolist() == np.arange(1.5, 11).tolist()
    expected = {"update_time": 1, "slots_busy": 1, "learner_busy": 0.5, "warm_up": 2}
    expected |= {"staleness_mean": 1, "staleness_tokens_mean": 1, "samples_lost": 0}
    assert expected.items() <= trace.summary().items()
    assert binding_limit(1.0, 0.5) == "slots"
    assert binding_limit(0.9, 1.0) == "learner" and binding_limit(0.5, 0.5) == "queue"


@pytest.mark.parametrize("consume", ["finished", "started"])
@pytest.mark.parametrize("eta", [0, 4])
def test_pacing_keeps_the_mean_staleness_at_eta(eta, consume):
    setting = {"slots": 400, "length": "lognormal(1, 1)", "group": 4, "batch": 16}
    trace = learner(200, 0.01, queue=f"pace({eta})", consume=consume, **setting)
    assert mean_staleness(trace) == pytest.approx(eta, abs=0.03)
    assert consume == "finished" or trace.samples["staleness"].max() == eta


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_closed_forms(number):
    draws = np.random.default_rng(number)
    batch, slots = int(draws.choice((32, 64))), int(draws.integers(64, 160))
    rho = draws.uniform(0.4, 0.9) if number % 2 else draws.uniform(1.3, 2.5)
    setting = {
        "slots": slots,
        "length": f"gamma(mean=1, cv={draws.uniform(0.3, 1):.3f})",
        "group": 1 if number >= 3 else int(draws.choice((2, 8))),
        "batch": batch,
        "queue": "keep()" if rho < 1 else f"drop_oldest({draws.integers(1, 4)})",
        "updates": "in_flight" if number >= 3 else "start",
    }
    time, weight = rho * batch / slots, "tokens" if number >= 3 else "samples"
    expected = theory.mean_staleness(Rollouts(**setting), time, weight)
    trace = learner(1_500, time, **setting)
    assert mean_staleness(trace, weight) == pytest.approx(expected, rel=0.02)
    if number >= 3:
        switches = len(trace.rollouts.switches) / len(trace.samples)
        assert switches == pytest.approx(slots / (batch * max(1.0, rho)), rel=0.02)


def test_share_of_samples_that_discarding_keeps():
    setting = {"slots": 32, "length": "gamma(1, 0.7)", "batch": 16, "queue": "discard(2)"}
    trace = learner(4_000, 0.3, **setting)
    outcomes = trace.samples["outcome"].value_counts()
    share = outcomes["trained"] / (outcomes["trained"] + outcomes["discarded"])
    assert share == pytest.approx(theory.kept_share(Rollouts(**setting), 0.3), rel=0.02)


def test_a_longer_trace_begins_like_a_shorter_one_and_failures_change_no_length():
    setting = {"slots": 6, "length": "exponential(1)", "group": 2, "batch": 4, "queue": "pace(2)"}
    short, long = learner(10, **setting), learner(20, **setting)
    begun = short.samples["start_time"] < short.frame["commit_time"].iloc[-1]
    columns = ["sample", "slot", "start_time", "read_version", "length"]
    pd.testing.assert_frame_equal(
        short.samples.loc[begun, columns], long.samples.loc[: begun.sum() - 1, columns]
    )
    failing = learner(10, failures=[crash("exponential(3)", 1.0, on="slots")], **setting)
    lengths = [trace.samples.groupby("sample")["length"].first() for trace in (short, failing)]
    shared = min(map(len, lengths))
    assert lengths[0][:shared].equals(lengths[1][:shared])
    assert (failing.samples["outcome"] == "cancelled").any()


# Logs


def write(log, path):
    log.to_csv(path, index=False) if path.suffix == ".csv" else log.to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
def test_a_log_of_a_simulated_run_and_a_violated_bound(tmp_path, name):
    setting = {"slots": 6, "length": "exponential(1)", "group": 2, "batch": 4}
    trace = learner(40, 0.3, queue="pace(2)", consume="started", **setting)
    log = log_of(trace)
    is_trained = log["outcome"] == "trained"
    log["version"] = log["version"].where(is_trained)
    report = check_lag(write(log, tmp_path / name), bound=2)
    assert report.law.to_list() == pytest.approx(trace.staleness().to_list())
    assert report.beyond is None and report.updates == 40
    assert report.open == pytest.approx(report.mean, abs=0.2)
    assert "bound 2: holds" in str(report)
    row = int(np.flatnonzero(is_trained)[50])
    version = int(log["version"][row])
    log.loc[row, "read_version"] = version - 3
    report = check_lag(write(log, tmp_path / name), bound=2)
    line = f" (line {row + 2})" if name == "log.csv" else ""
    pair = f"which read {version - 3} and was trained at {version}; rows count from 0"
    assert report.beyond == row
    assert f"bound 2: violated by 1 of 160 samples, first by row {row}{line}, {pair}" in str(report)


@pytest.mark.parametrize("failures", [(), ("crash(every=exponential(6), lasts=1, on=slots)",)])
def test_an_export_of_samples_states_which_were_trained(tmp_path, failures):
    setting = {"slots": 8, "length": "exponential(1)", "group": 2, "batch": 8}
    trace = learner(10, 0.2, failures=failures, queue="discard(1)", **setting)
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


def test_the_limit_that_binds(tmp_path):
    rows = {"read_version": [0, 0, 1, 1], "version": [0, 0, 1, 1], "slot": [0, 1, 0, 1]}
    rows |= {"start_time": [0, 0, 1, 1], "end_time": [1, 1, 2, 2], "take_time": [1, 1, 2, 2]}
    log, path = pd.DataFrame(rows | {"train_time": [1, 1, 2, 2]}), tmp_path / "log.csv"
    log.to_csv(path)
    assert "the slots bind: they are busy 100%" in str(check_lag(path))
    log.assign(end_time=[0.5, 1, 1.5, 2]).to_csv(path)
    assert check_lag(path).slots_busy == pytest.approx(0.75)
    log[["read_version", "version"]].to_csv(path)
    assert "which limit binds is unknown" in str(check_lag(path))


def planted(**changes):
    """Return 12 samples in 6 updates of 2, each two versions old but for the first, with changes.

    A change is a function of the table, the values of a column, or one value by row.
    """
    version = np.arange(12) // 2
    read = np.maximum(version - 2, 0)
    log = pd.DataFrame({"read_version": read, "version": version, "group": version})
    log = log.assign(slot=np.arange(12) % 6, outcome="trained", train_time=version + 1.0)
    log["take_time"] = version + 0.5
    log["start_time"] = np.where(version < 2, 0.0, read + 0.25 * (version % 2))
    log["end_time"] = version + 0.3
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
        (planted(slot={1: 0}), "row 1 overlaps row 0 in slot 0; give"),
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
    if name == "log.csv":
        message = re.sub(r"row (\d+)", lambda row: f"{row[0]} (line {int(row[1]) + 2})", message)
    try:
        path = write(log, tmp_path / name)
    except pa.ArrowException:
        pytest.skip("parquet has one type for a column")
    try:
        text = str(check_lag(path))
    except InputError as error:
        text = str(error)
    assert message in text


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_log_is_judged_by_its_header_and_length_before_it_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(pd, "read_parquet", None)
    with pytest.raises(InputError, match="misses version"):
        check_lag(write(planted().drop(columns="version"), tmp_path / name))
    monkeypatch.setattr("os.sysconf", lambda name: 1)  # bytes of memory
    with pytest.raises(InputError, match="a table of its length needs at least"):
        check_lag(write(planted(), tmp_path / name))


@pytest.mark.parametrize("form", ["dates", "dates of a zone", "intervals"])
@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_dates_and_intervals_count_from_the_first(tmp_path, form, name):
    times = ["start_time", "end_time", "take_time", "train_time"]
    log = planted()
    seconds = check_lag(write(log, tmp_path / "seconds.csv"))
    dates = log[times].apply(pd.to_timedelta, unit="s")
    if form != "intervals":
        dates = DATE.tz_localize("Asia/Tokyo" if "zone" in form else None) + dates
    path = write(log.assign(**dict(dates)), tmp_path / name)
    assert str(check_lag(path)) == str(seconds)


# The cluster of a log


def test_samples_that_crashes_cut_short_are_censored(tmp_path):
    """Counted as whole ones, they give mean lengths up to a tenth too short."""
    setting = {"slots": 8, "length": "lognormal(1, 0.9)", "group": 2, "batch": 8}
    crashes = ["crash(every=exponential(4), lasts=1, on=slots)"]
    trace = learner(100, 0.3, failures=crashes, queue="pace(1)", **setting)
    log_of(trace).to_parquet(tmp_path / "log.parquet")
    fitted = calibrate_rollouts(tmp_path / "log.parquet")
    samples = trace.samples.dropna(subset="end_time")
    whole = samples.drop_duplicates("sample", keep="last")
    assert fitted.rollouts.length.mean == pytest.approx(whole["length"].mean(), rel=0.03)
    (fitted_crash,) = fitted.failures
    assert fitted_crash.on == "slots" and fitted_crash.every.mean == pytest.approx(4, rel=0.1)


def test_samples_that_are_open_at_the_end_are_censored(tmp_path):
    """An exponential law's mean is the time of all samples over the number of those that ended."""
    trace = learner(24, 0.3, slots=16, length="exponential(4)", batch=8, queue="keep()")
    log = log_of(trace).drop(columns="group")
    log.to_parquet(tmp_path / "log.parquet")
    last = max(log[name].max() for name in ("end_time", "take_time", "train_time"))
    seconds = log["end_time"].fillna(last) - log["start_time"]
    has_ended = log["end_time"].notna()
    assert 0.05 < 1 - has_ended.mean() < 0.5
    length = calibrate_rollouts(tmp_path / "log.parquet", law="exponential").rollouts.length
    assert length.mean == pytest.approx(seconds.sum() / has_ended.sum(), rel=1e-6)


def test_the_command_that_checks_a_log(tmp_path, capsys):
    pd.DataFrame({"read_version": [0, 0, 0], "version": [0, 1, 2]}).to_csv(tmp_path / "log.csv")
    assert command.main(["check-lag", str(tmp_path / "log.csv"), "--bound", "1"]) == 1
    violation = "bound 1: violated by 1 of 3 samples, first by row 2 (line 4), which read 0"
    assert violation in capsys.readouterr().out
    assert command.main(["check-lag", str(tmp_path / "log.csv"), "--bound", "2"]) == 0
    assert command.main(["check-lag", str(tmp_path / "none.csv")]) == 2
    assert "no such file\nhint: give a log" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["check-lag", "-h"])
    assert "before the update that uses it" in " ".join(capsys.readouterr().out.split())
