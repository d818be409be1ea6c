"""The trace: its file, whole or not at all, and its summary against numbers counted by hand."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncsim.base.errors import InputError
from asyncsim.base.files import field_values
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Gamma, Uniform
from asyncsim.simulation.simulate import simulate
from asyncsim.traces.archive import FORMAT
from asyncsim.traces.columns import TABLES, Source
from asyncsim.traces.phases import IN_WORDS
from asyncsim.traces.prescription import prescribed
from asyncsim.traces.trace import Trace

# compute 2 and 3 s, service 1 s; the second of the two arrives while the first is being served:
#   worker 0: 2-3, 5-6, 8-9, ...      worker 1: waits 3-3, 3-4, 7-8, 11-12, ...
BY_HAND = Cluster(2, [2.0, 3.0], service=1.0)

TRACES = {
    "exchange": simulate(Cluster(5, Gamma(1, 0.5), service=0.1), 60, seed=3),
    "separate reads": simulate(
        Cluster(
            5, [1, 2, 3, 4, Uniform(1, 2)], 0.3, (0.1, 0.2), protocol="write_then_read", window=2
        ),
        60,
        seed=1,
    ),
    "lock_free": simulate(
        Cluster(5, Gamma(1, 0.5), 0.3, protocol="write_then_read", discipline="lock_free"),
        50,
    ),
    "more workers than commits": simulate(Cluster(50, Gamma(1, 0.2), service=1.0), 7),
    "prescribed": prescribed("exponential(5)", commits=50, workers=4, seed=2),
}


@pytest.fixture
def trace():
    return TRACES["separate reads"]


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_trace_comes_back_and_gives_the_same_bytes(trace, tmp_path):
    path = trace.save(tmp_path / "first.parquet")
    assert path == tmp_path / "first.parquet"
    first, loaded = path.read_bytes(), Trace.load(path)
    assert np.array_equal(loaded.group_versions(), trace.group_versions())
    for name in ("frame", "open_reads", "present"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(trace, name), check_exact=True)
    assert field_values(loaded, Source) == field_values(trace, Source)
    assert len({loaded, trace}) == 2  # a trace is compared by identity
    assert trace.save(tmp_path / "second.parquet").read_bytes() == first
    assert loaded.save(tmp_path / "third.parquet").read_bytes() == first


def test_the_file_is_ordinary_parquet_with_units_inside(trace, tmp_path):
    path = trace.save(tmp_path / "trace.parquet")
    columns = pd.read_parquet(path)
    assert list(columns) == [f"{table}.{column}" for table in TABLES for column in TABLES[table]]
    assert columns["steps.commit_time"][0].tolist() == trace.steps["commit_time"].tolist()
    header = json.loads(pq.read_schema(path).metadata[b"asyncsim"])
    assert header["units"]["steps.commit_time"] == "s"
    assert header["source"]["seed"] == 1
    assert Cluster.from_dict(header["source"]["cluster"]) == trace.cluster
    assert {"asyncsim", "numpy", "simpy"} <= set(header["source"]["versions"])


def test_missing_file(tmp_path):
    with pytest.raises(
        InputError, match=r"nowhere.parquet': no such file; give one that Trace.save wrote"
    ):
        Trace.load(tmp_path / "nowhere.parquet")


def test_a_trace_too_large_for_the_memory_is_not_read(trace, tmp_path, monkeypatch):
    path = trace.save(tmp_path / "trace.parquet")
    monkeypatch.setattr("os.sysconf", lambda name: 1)  # bytes of memory
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(InputError, match=r"a trace of its length needs at least .* GiB of memory"):
        Trace.load(path)


@pytest.mark.parametrize("header", [None, b"{}"])
def test_parquet_but_not_a_trace(tmp_path, header):
    path = tmp_path / "other.parquet"
    metadata = None if header is None else {b"asyncsim": header}
    pq.write_table(pa.table({"x": [1, 2]}).replace_schema_metadata(metadata), path)
    with pytest.raises(
        InputError, match=r"other.parquet': not a trace; give a file that Trace.save wrote"
    ):
        Trace.load(path)


def rewrite_header(path, change):
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"asyncsim"])
    change(header)
    pq.write_table(table.replace_schema_metadata({b"asyncsim": json.dumps(header).encode()}), path)


def test_another_format(trace, tmp_path):
    path = trace.save(tmp_path / "trace.parquet")
    rewrite_header(path, lambda header: header.update(format=FORMAT + 1))
    with pytest.raises(
        InputError,
        match=rf"a trace of format {FORMAT + 1}, this asyncsim reads {FORMAT}; use the version",
    ):
        Trace.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["source"].update(colour="red"),
        lambda header: header["source"]["cluster"].update(compute="fast"),
        lambda header: header["source"].update(seed=2),
        lambda header: header["units"].update({"steps.commit_time": "ms"}),
        lambda header: header.update(sha256="0" * 64),
        lambda header: header.clear() or header.update(format=FORMAT),
    ],
)
def test_a_damaged_header(trace, tmp_path, change):
    path = trace.save(tmp_path / "trace.parquet")
    rewrite_header(path, change)
    with pytest.raises(
        InputError, match=r"trace.parquet': a damaged trace .*; copy it again, or make it again"
    ):
        Trace.load(path)


def test_no_damaged_file_loads_other_values(trace, tmp_path):
    """Bits are flipped, stretches replaced and ends cut, also in the part that describes the rest.

    Each is refused in one line; a few bits have no meaning.
    """
    path = trace.save(tmp_path / "trace.parquet")
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    outcomes = []
    for place in generator.integers(len(whole) - 8, size=60).tolist():
        flipped = bytes([whole[place] ^ 1 << place % 8])
        for damage in (flipped + whole[place + 1 :], generator.bytes(8) + whole[place + 8 :], b""):
            path.write_bytes(whole[:place] + damage)
            try:
                again = Trace.load(path)
            except InputError as error:
                outcomes.append("\n" not in str(error))
            else:
                assert all(getattr(again, name).equals(getattr(trace, name)) for name in TABLES)
                assert field_values(again, Source) == field_values(trace, Source)
    assert all(outcomes) and len(outcomes) > 150


def test_traces_are_never_written_over(trace, tmp_path):
    path = trace.save(tmp_path / "trace.parquet")
    before = path.read_bytes()
    for there in (path, tmp_path):
        with pytest.raises(
            InputError, match=r"path = .*: exists already; give another, or remove it first"
        ):
            TRACES["exchange"].save(there)
    assert path.read_bytes() == before


def test_summary_by_hand():
    # Commits at 3 (w0), 4 (w1), 6 (w0), 8 (w1), 9 (w0), 12 (w0), 12 would tie: stop at 9.
    trace = simulate(BY_HAND, 5)
    assert trace.frame["commit_time"].tolist() == [3.0, 4.0, 6.0, 8.0, 9.0]
    assert trace.frame["worker"].tolist() == [0, 1, 0, 1, 0]
    summary = trace.summary(warm_up=0)
    # Services 2-3, 3-4, 5-6, 7-8, 8-9: busy 5 of 9 s. Nobody waits.
    # Staleness 0, 1, 1, 1, 1: each commit follows one of the other worker.
    expected = {
        "workers": 2,
        "commits": 5,
        "warm_up": 0,
        "duration": 9.0,
        "throughput": 5 / 9,
        "staleness_mean": 0.8,
        "staleness_std": 0.4,
        "staleness_min": 0,
        "staleness_median": 1.0,
        "staleness_q90": 1.0,
        "staleness_q99": 1.0,
        "staleness_max": 1,
        "staleness_mean_over_workers": (2 / 3 + 1) / 2,
        "share_min": 0.4,
        "share_max": 0.6,
        "computing_share": 13 / 18,  # 0-2, 3-5, 6-8 and 0-3, 4-7, 8-9
        "sending_share": 0.0,
        "waiting_share": 0.0,
        "served_share": 5 / 18,
        "held_share": 0.0,
        "returning_share": 0.0,
        "away_share": 0.0,
        "lost_time_share": 0.0,
        "counted_share": 13 / 18,
        "lost_to_waiting": 5 / 18,
        "lost_to_sending": 0.0,
        "lost_to_discarded": 0.0,
        "lost_to_failed": 0.0,
        "lost_to_restoring": 0.0,
        "versions": 5,
        "discarded_share": 0.0,
        "cancelled_share": 0.0,
        "utilisation": 5 / 9,
        "wait_mean": 0.0,
        "queue_mean": 0.0,
        "queue_max": 0,
    }
    assert list(summary) == list(expected)
    assert summary == pytest.approx(expected, rel=1e-12)


def test_the_staleness_of_a_summary_is_its_law():
    law = [0, 0, 0, 1, 2, 3, 4, 5, 8, 20]
    summary = prescribed([0] * 20 + law, 30, 4).summary(20)
    expected = {"mean": 4.3, "std": np.std(law), "min": 0, "median": 2.5, "max": 20}
    # Linear between the values of the order: .9 and .99 of the way from the first to the tenth.
    expected |= {"q90": 8 + 0.1 * 12, "q99": 8 + 0.91 * 12}
    assert {name: summary[f"staleness_{name}"] for name in expected} == pytest.approx(expected)


def test_parts_of_the_workers_time_by_hand():
    # Worker 0 computes 0-2, sends 2-3, is served 3-4, gets its reply at 6; worker 1 computes 0-3,
    # arrives at 4, is served 4-5, gets its reply at 7. The reads of worker 0 are followed by 6-8
    # (computing), 8-9, 9-10.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0, latency=(1.0, 2.0)), 3)
    assert trace.frame[["send_time", "arrive_time"]].to_numpy().tolist() == [
        [2.0, 3.0],
        [3.0, 4.0],
        [8.0, 9.0],
    ]
    summary = trace.summary(warm_up=0)
    spent = {what: 20 * summary[f"{what}_share"] for what in IN_WORDS}
    # Worker 1 computes from 7 on, to the end at 10.
    expected = {
        "computing": 10,
        "sending": 3,
        "waiting": 0,
        "served": 3,
        "held": 0,
        "returning": 4,
        "away": 0,
    }
    assert spent == pytest.approx(expected)


def test_waiting_and_queue_by_hand():
    # Three arrive at 1, services 1-3, 3-5, 5-7; the first is back at 4, the second at 6, the third
    # at 8.
    trace = simulate(Cluster(3, 1.0, service=2.0), 3)
    summary = trace.summary(warm_up=0)
    assert trace.present["worker"].tolist() == [0, 1]
    assert trace.present["arrive_time"].tolist() == [4.0, 6.0]
    assert summary["wait_mean"] == pytest.approx((0 + 2 + 4) / 3)
    # Waiting: 1-3 worker 1; 1-5 worker 2; 4-7 worker 0; 6-7 worker 1: 2 + 4 + 3 + 1 seconds of 7.
    assert summary["queue_mean"] == pytest.approx(10 / 7)
    assert summary["queue_max"] == 2
    assert summary["utilisation"] == pytest.approx(6 / 7)
    steps = trace.queue()
    assert steps["time"].tolist() == [0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert steps["in_system"].tolist() == [0, 3, 2, 3, 2, 3, 2]


def test_per_worker_counts_also_those_without_a_commit():
    trace = simulate(Cluster(3, [1.0, 1.0, 100.0], service=0.25), 4)
    workers = trace.per_worker(warm_up=0)
    assert workers["worker"].tolist() == [0, 1, 2]
    assert workers["commits"].tolist() == [2, 2, 0]
    assert workers["share"].tolist() == [0.5, 0.5, 0.0]
    np.testing.assert_array_equal(workers["mean_staleness"], [0.5, 1.0, np.nan])
    np.testing.assert_array_equal(workers["mean_wait"], [0.0, 0.125, np.nan])


def test_warm_up_is_checked_and_never_more_than_half():
    trace = TRACES["more workers than commits"]
    assert trace.summary()["warm_up"] == 3
    with pytest.raises(InputError, match=r"warm_up = 7: leaves none of the 7 commits"):
        trace.summary(warm_up=7)
    with pytest.raises(InputError, match=r"warm_up = -1: must be at least 0"):
        trace.per_worker(warm_up=-1)
