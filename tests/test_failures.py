"""Failures: runs by hand, and closed forms of rates."""

import formulas
import numpy as np
import pytest

from asyncsim import (
    Cluster,
    Gamma,
    failures,
    simulate,
    theory,
)
from asyncsim.traces.phases import IN_WORDS, phases

COMPUTE = Gamma(1.0, 0.2)


def test_a_crash_by_hand():
    # Worker 0 crashes at 2.5 while it computes, and at 6.5 (1.5 after it came back at 5) while its
    # message is served, from 6 to 7: it is applied, and the reply lost. Back at 9.
    crash = failures.crash(2.5, 2.5)
    trace = simulate(Cluster(1, 1.0, 1.0, failures=[crash]), 4)
    times = ["start_time", "send_time", "commit_time", "read_time"]
    names = ["job", *times, "version", "outcome", "failed_by", "incarnation"]
    assert trace.frame[names].to_numpy().tolist() == [
        [0, 0.0, 1.0, 2.0, 0.0, 1, "applied", "nothing", 0],
        [1, 2.0, 2.5, 2.5, 2.0, 1, "cancelled", "crash", 0],
        [2, 5.0, 6.0, 7.0, 5.0, 2, "applied", "nothing", 1],
        [3, 7.0, 7.5, 7.5, 7.0, 2, "cancelled", "crash", 1],
        [4, 10.0, 11.0, 12.0, 10.0, 3, "applied", "nothing", 2],
        [5, 12.0, 12.5, 12.5, 12.0, 3, "cancelled", "crash", 2],
        [6, 15.0, 16.0, 17.0, 15.0, 4, "applied", "nothing", 3],
    ]


def test_an_outage_by_hand():
    # The checkpoint of version 4, begun at 4.75, would take until 5.25. At 6 the server is back at
    # version 2, and serves who has waited since 4. The next checkpoint follows two versions later,
    # from 8 to 8.5.
    outage = failures.outage(every=5.0, lasts=1.0, checkpoint_every=2, checkpoint_time=0.5)
    frame = simulate(Cluster(2, 0.25, 1.0, failures=[outage]), 7).frame
    assert frame["commit_time"].tolist() == [1.25, 2.25, 3.75, 4.75, 7.0, 8.0, 9.5]
    assert frame["version"].tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert frame["restored"].tolist() == [-1, -1, -1, -1, 2, -1, -1]


@pytest.mark.parametrize(
    "policy",
    ["barrier", "first_of(7)", "bounded_staleness(0)", "rounds", "buckets(5)"],
)
def test_nobody_waits_for_the_dead(policy, detect=3.0):
    gone = failures.crash(every=4.0, lasts=1e6, detect=detect, workers=range(2, 8))
    trace = simulate(Cluster(8, "exponential(1)", policy=policy, failures=[gone]), 400)
    late = trace.frame[trace.frame["commit_time"] > 20]
    assert set(late["worker"]) == {0, 1} and (late["outcome"] == "applied").sum() > 100


def test_a_death_makes_the_version_that_waited_for_it():
    gone = failures.crash(every=1.5, lasts=1e6, detect=3.0, workers=2)
    trace = simulate(Cluster(3, [1.0, 1.2, 2.0], policy="barrier", failures=[gone]), 6)
    # All but the dead are there; 4.5 and 1.
    assert trace.frame["commit_time"].tolist()[:4] == [1.0, 1.2, 1.5, 5.5]
    assert trace.frame["version"].tolist()[:5] == [0, 0, 0, 1, 2]
    assert trace.frame["read_time"].tolist()[3:5] == [4.5, 4.5]
    assert trace.accepted.frame["version"].tolist()[:4] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("crash(exponential(5), exponential(2))", formulas.crash_rate(COMPUTE, 5.0, 2.0)),
        ("slow(exponential(5), gamma(3, 0.5), 0.25)", (5 + 3 * 0.25) / 8),
        ("pause(uniform(2, 8), exponential(2))", 5 / 7),
    ],
)
def test_rates_are_those_of_theory(failure, expected):
    trace = simulate(Cluster(100, COMPUTE, failures=[failure]), 20_000)
    counts = np.bincount(trace.accepted.frame["worker"], minlength=100)
    rates = counts / trace.frame["commit_time"].iloc[-1]
    assert abs(rates.mean() - expected) < 3 * rates.std(ddof=1) / 10
    if "crash" in failure:
        assert trace.summary(warm_up=0)["away_share"] == pytest.approx(2 / 7, abs=0.01)


@pytest.mark.full
def test_the_best_interval_of_checkpoints_is_dalys():
    every, cost, lasts = 80.0, 1.6, 3.0
    intervals = np.array([8, 12, 16, 20, 28])
    kept = []
    for versions in intervals.tolist():
        outage = failures.outage(f"exponential({every})", lasts, versions, cost)
        frame = simulate(Cluster(6, 0.1, 1.0, failures=[outage]), 60_000, seed=3).frame
        # Of a server that is always busy, a version a second, those that no restore undoes.
        restored = frame["restored"].where(frame["restores"] > 0).shift(-1).bfill()
        undone = frame["version"] > restored
        kept.append((frame["outcome"] == "applied")[~undone].sum() / frame["commit_time"].iloc[-1])
        assert kept[-1] == pytest.approx(
            theory.checkpoint_efficiency(versions, cost, every, lasts), rel=0.02
        )
    a, b, _ = np.polyfit(np.log(intervals), kept, 2)
    best = np.exp(-b / (2 * a))
    assert best == pytest.approx(theory.daly_interval(cost, every), rel=0.15)
    assert best == pytest.approx(theory.young_interval(cost, every), rel=0.15)


def test_a_site_fails_at_once():
    crash = "crash(exponential(9), 1, site=1)"
    spells = simulate(Cluster(5, "exponential(1)", sites=[2, 3], failures=[crash]), 300).spells
    assert set(spells["worker"]) == {2, 3, 4}
    assert spells.groupby("begin")["worker"].nunique().eq(3).all()


@pytest.mark.parametrize(
    "protocol",
    [dict(protocol="write_then_read"), dict(protocol="read_then_write", exclusive=False)],
)
def test_the_goodput_of_a_joiner_that_is_never_served_adds_up(protocol):
    """Worker 5 comes to a saturated server that serves the lowest first: it is held until 5 s, then
    it waits.
    """
    options = {"discipline": "lowest_rank", "failures": ["join(at=5, workers=[5])"], **protocol}
    trace = simulate(Cluster(6, 1.0, 0.6, **options), 60, seed=0)
    assert 5 in set(trace.present["worker"]) - set(trace.frame["worker"])
    summary = trace.summary(0)
    lost = [value for name, value in summary.items() if name.startswith("lost_to_")]
    assert summary["counted_share"] + sum(lost) == pytest.approx(1, abs=1e-9)
    (waiting,) = phases(trace, [5]).query("phase == 'waiting'")[["begin", "end"]].to_numpy()
    assert waiting == pytest.approx([5, summary["duration"]])


def test_times_add_up_while_a_message_is_sent_again():
    """The trace ends while worker 0's second message, lost once, is on its way."""
    visits = {"protocol": "read_then_write", "exclusive": False}
    cluster = Cluster(3, "gamma(1, 0.3)", failures="loss(probability=0.4, timeout=0.7)", **visits)
    summary = simulate(cluster, 40, seed=0).summary(0)
    shares = sum(summary[f"{phase}_share"] for phase in IN_WORDS)
    assert shares == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    "failure", ["crash(every=7.3, lasts=4)", "loss(probability=0.3, timeout=0.5, resend=False)"]
)
@pytest.mark.parametrize(
    ("protocol", "service", "down"),
    [
        (dict(), 0.0, 0.3),
        (dict(protocol="read_then_write", exclusive=False), 0.01, 0.1),
    ],
)
def test_a_read_after_a_failure_costs_the_way_down(failure, protocol, service, down):
    """As docs/clusters.md says: no way up, and a service where reads are visits of their own."""
    cluster = Cluster(
        1, 1.0, 0.01, 0.1, bandwidth=10, message_bytes=2, failures=[failure], **protocol
    )
    frame = simulate(cluster, 60, seed=0).frame
    failed = frame["outcome"].shift().isin(["cancelled", "lost"])
    row = frame[failed].iloc[0]
    ended = frame["commit_time"].shift()[failed].iloc[0] + (4 if "crash" in failure else 0)
    if "loss" in failure and not protocol.get(
        "exclusive", True
    ):  # it read before it sent what was lost
        assert row["read_time"] < ended and row["start_time"] == pytest.approx(ended)
        return
    assert row["read_time"] - ended == pytest.approx(service)
    assert row["start_time"] - row["read_time"] == pytest.approx(down)
