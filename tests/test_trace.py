"""Traces: summaries counted by hand, prescribed staleness, and logs of visits."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import (
    Cluster,
    Constant,
    Exponential,
    Gamma,
    InputError,
    Mixture,
    Trace,
    prescribed,
    recorded,
    simulate,
)
from asyncsim.base.files import field_values
from asyncsim.traces.bookkeeping import COMMIT_RECORD
from asyncsim.traces.columns import Source
from asyncsim.traces.phases import IN_WORDS

# Summaries by hand


def test_summary_by_hand():
    # Worker 0 is served 2-3, 5-6, 8-9, ...; worker 1 arrives during the first service and waits for
    # no time: 3-4, 7-8, 11-12, ...
    # Commits at 3 (w0), 4 (w1), 6 (w0), 8 (w1), 9 (w0), 12 (w0), 12 would tie: stop at 9.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0), 5)
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
    # Worker 1 computes from 7 on, to the end at 10.
    seconds = dict.fromkeys(IN_WORDS, 0) | {
        "computing": 10,
        "sending": 3,
        "served": 3,
        "returning": 4,
    }
    assert {phase: 20 * summary[f"{phase}_share"] for phase in IN_WORDS} == pytest.approx(seconds)


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
    trace = simulate(Cluster(50, Gamma(1, 0.2), service=1.0), 7)
    assert trace.summary()["warm_up"] == 3
    with pytest.raises(InputError, match=r"warm_up = 7: leaves none of the 7 commits"):
        trace.summary(warm_up=7)
    with pytest.raises(InputError, match=r"warm_up = -1: must be at least 0"):
        trace.per_worker(warm_up=-1)


# Prescribed staleness


def test_constant_delay_by_hand():
    frame = prescribed(staleness=2, commits=5, workers=2, window=3).frame
    expected = {
        "commit": [0, 1, 2, 3, 4],
        "worker": [0, 1, 0, 1, 0],
        "job": [0, 0, 1, 1, 2],
        "local_steps": [3, 3, 3, 3, 3],
        "read_version": [0, 0, 0, 1, 2],
        "read_time": [0.0, 0.0, 0.0, 0.5, 1.0],
        "start_time": [0.0, 0.0, 0.0, 0.5, 1.0],
        "push_version": [0, 1, 2, 3, 4],
        "commit_time": [0.5, 1.0, 1.5, 2.0, 2.5],
        "staleness": [0, 1, 2, 2, 2],
        "version": [1, 2, 3, 4, 5],
        "outcome": ["applied"] * 5,
    }
    assert frame[[*expected]].to_dict("list") == expected


@pytest.mark.parametrize(
    ("stated", "staleness"),
    [
        (3.0, [0, 1, 2, 3, 3]),
        (Constant(3), [0, 1, 2, 3, 3]),
        (np.full(5, 3), [0, 1, 2, 3, 3]),
        ([5, 0, 10**18, 1, 4], [0, 0, 2, 1, 4]),
    ],
    ids=["number", "law", "array", "list"],
)
def test_a_delay_has_many_forms_and_is_clipped_to_the_commit_index(stated, staleness):
    assert prescribed(stated, commits=5, workers=2).frame["staleness"].tolist() == staleness


@pytest.mark.parametrize("law", [Gamma(9, 0.5), Mixture([Constant(2), Constant(20)], [0.5, 0.5])])
def test_a_law_is_rounded_to_the_nearest_whole_number(law):
    staleness = prescribed(law, 20_000, workers=10).frame["staleness"].to_numpy()[500:]
    rounded = np.rint(law.sample(np.random.default_rng(1), 400_000))
    standard_error = rounded.std() * np.sqrt(1 / len(staleness) + 1 / len(rounded))
    # Beyond 5 standard errors with probability 6e-7; the seeds are fixed besides.
    assert abs(staleness.mean() - rounded.mean()) < 5 * standard_error


def test_a_law_without_variance_does_not_overflow():
    trace = prescribed("pareto(mean=50, shape=1.05)", commits=3_000, workers=3)
    assert trace.frame["staleness"].between(0, np.arange(3_000)).all()


def test_draws_do_not_depend_on_the_length_and_do_not_come_back():
    law = Mixture([Gamma(2, 0.5), Exponential(20)], [0.5, 0.5])
    short, long = (prescribed(law, commits, 7, seed=3).frame for commits in (1_500, 4_096))
    assert short.equals(long.iloc[:1_500])
    staleness = long["staleness"].to_numpy()
    # Independent draws from this law are equal in a tenth of all pairs: far from half of them.
    for lag in (512, 1_024, 2_048):
        assert (staleness[1_024:2_048] == staleness[1_024 + lag : 2_048 + lag]).mean() < 0.5


# Logs of visits


PROTOCOLS = {
    "exchange": {},
    "read_then_write": {"protocol": "read_then_write"},
    "read_then_write, two visits": {"protocol": "read_then_write", "exclusive": False},
    "write_then_read": {"protocol": "write_then_read", "window": 2},
}
READ_TIMES = ["read_arrive_time", "read_serve_time", "read_time"]
SMALLEST = [name for name in COMMIT_RECORD if name != "send_time"]
LOG = pd.DataFrame(
    [
        (0, 0.0, 2.0, 2.0, 2.5),
        (1, 0.0, 2.1, 2.5, 3.0),
        (0, 2.5, 4.0, 4.0, 4.5),
        (1, 3.0, 4.2, 4.5, 5.0),
    ],
    columns=SMALLEST,
)

#: The reads that are part of the first three commits.
READS = pd.DataFrame({"worker": [0, 1, 0]}).assign(**{name: [2.5, 3.0, 4.5] for name in READ_TIMES})


def simulated(**options):
    return simulate(
        Cluster(5, "gamma(1, 0.5)", "exponential(0.1)", "exponential(0.1)", **options), 300, seed=1
    )


def all_reads(trace):
    tables = [
        table.loc[table["job"] > 0, ["worker", *READ_TIMES]]
        for table in (trace.frame, trace.open_reads)
    ]
    return pd.concat(tables)


@pytest.mark.parametrize("with_reads", [False, True])
@pytest.mark.parametrize("options", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_log_of_a_simulation_gives_its_trace(options, with_reads):
    """In any order, on a clock that does not begin at zero, and whether reads are told or follow
    from the commits.
    """
    trace = simulated(**options)
    if trace.separate_reads > with_reads:
        pytest.skip("reads of their own must be told")
    log = trace.frame[list(COMMIT_RECORD)].sample(frac=1, random_state=0)
    options = {**options, "reads": all_reads(trace) if with_reads else None}
    again = recorded(log, present=trace.present, seed=1, **options)
    keys = ["worker", "job"]
    for name in ("frame", "open_reads", "present"):
        tables = [getattr(entry, name) for entry in (again, trace)]
        if name == "open_reads":
            tables = [table.sort_values(keys).reset_index(drop=True) for table in tables]
        pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert field_values(again, Source) == field_values(trace, Source) | {"cluster": None}


def test_without_the_workers_clocks():
    """The computation is taken to begin when its read was served."""
    frame = recorded(LOG.drop(columns="start_time"), begin=0.0).frame
    assert frame["start_time"].tolist() == [0.0, 0.0, 2.5, 3.0]


@pytest.mark.parametrize(
    ("log", "send_time", "spent"),
    [
        (LOG.assign(send_time=[1.5, 1.1, 3.5, 4.2]), [1.5, 1.1, 3.5, 4.2], [5.3, 2.0, 0.7, 2.0]),
        (LOG, [np.nan] * 4, [7.3, 0.0, 0.7, 2.0]),
    ],
)
def test_the_time_at_which_messages_set_off_may_be_logged(log, send_time, spent):
    """Without it sending counts as computing."""
    trace = recorded(log, begin=0.0)
    np.testing.assert_array_equal(trace.frame["send_time"], send_time)
    summary, names = trace.summary(warm_up=0), ("computing", "sending", "waiting", "served")
    assert [10 * summary[f"{phase}_share"] for phase in names] == pytest.approx(spent)


def test_a_worker_that_is_killed_and_reads_afresh(tmp_path):
    """Its lost computation is a row; what it commits next was computed from the fresh read."""
    log = pd.DataFrame([(0, 4.5, 4.7, 4.7, 4.7), (0, 6.0, 7.0, 7.0, 7.5)], columns=SMALLEST)
    log = pd.concat([LOG, log]).assign(outcome=["applied"] * 4 + ["cancelled", "applied"])
    reads = log.rename(columns={"arrive_time": "read_arrive_time", "serve_time": "read_serve_time"})
    reads = reads.assign(read_time=reads["commit_time"], version=0)
    reads.loc[reads["outcome"] == "cancelled", READ_TIMES] = 5.8
    trace = recorded(log, reads=reads)
    rows = trace.frame[trace.frame["worker"] == 0]
    assert rows["job"].tolist() == [0, 1, 2, 3]
    assert rows["read_time"].tolist() == [0.0, 2.5, 4.5, 5.8]
    assert rows["read_version"].tolist() == [0, 1, 3, 4]
    assert rows["staleness"].tolist() == [0, 1, 0, 0]
    assert len(trace.accepted) == 5
    again = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert again.frame["outcome"].tolist()[3] == "cancelled"


def test_workers_are_numbered_from_zero():
    later = LOG.assign(worker=LOG["worker"] + 1)
    far = LOG.assign(worker=LOG["worker"].replace(1, 999_999_999))
    for log, workers, message in (
        (later, None, "worker 0 has none, though there is a worker 2; number the workers from 0"),
        (far, None, "there is a worker 999999999; number the workers from 0"),
        (far, 10**11, r"workers = \d+: a cluster of so many needs at least"),
    ):
        with pytest.raises(InputError, match=message):
            recorded(log, workers=workers)
    assert recorded(later, workers=3).workers == 3


def changed(row, **values):
    return LOG.assign(
        **{name: LOG[name].where(LOG.index != row, value) for name, value in values.items()}
    )
