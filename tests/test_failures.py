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


def test_a_crash_by_hand():
    # Worker 0 crashes at 2.5 while it computes, and at 6.5 (1.5 after it came back at 5) while its
    # message is served, from 6 to 7: it is applied, and the reply lost. Back at 9.
    crash = failures.crash(2.5, 2.5)
    trace = simulate(Cluster(1, 1.0, 1.0, failures=[crash]), 4)
    names = [
        "job",
        "start_time",
        "send_time",
        "commit_time",
        "read_time",
        "version",
        "outcome",
        "failed_by",
        "incarnation",
    ]
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
    assert trace.frame["commit_time"].tolist()[:4] == [
        1.0,
        1.2,
        1.5,
        5.5,
    ]  # all but the dead are there; 4.5 and 1
    assert (
        trace.frame["version"].tolist()[:5] == [0, 0, 0, 1, 2]
        and (trace.frame["read_time"][3:5] == 4.5).all()
    )
    assert trace.accepted.frame["version"].tolist()[:4] == [0, 1, 1, 2]


def rate(trace):
    """The commits per second of a worker: mean and standard error."""
    per_worker = np.bincount(trace.accepted.frame["worker"], minlength=trace.workers)
    rates = per_worker / trace.frame["commit_time"].iloc[-1]
    return rates.mean(), rates.std(ddof=1) / np.sqrt(trace.workers)


def test_rates_are_those_of_theory():
    compute = Gamma(1.0, 0.2)
    trace = simulate(
        Cluster(100, compute, failures=["crash(exponential(5), exponential(2))"]), 20_000
    )
    mean, error = rate(trace)
    assert abs(mean - formulas.crash_rate(compute, 5.0, 2.0)) < 3 * error
    mean, error = rate(
        simulate(
            Cluster(100, compute, failures=["slow(exponential(5), gamma(3, 0.5), 0.25)"]), 20_000
        )
    )
    assert abs(mean - (5 + 3 * 0.25) / 8) < 3 * error
    mean, error = rate(
        simulate(Cluster(100, compute, failures=["pause(uniform(2, 8), exponential(2))"]), 20_000)
    )
    assert abs(mean - 5 / 7) < 3 * error
    away = trace.summary(warm_up=0)["away_share"]
    assert away == pytest.approx(2 / 7, abs=0.01)


@pytest.mark.full
def test_the_best_interval_of_checkpoints_is_dalys():
    every, cost, lasts = 80.0, 1.6, 3.0
    intervals = np.array([8, 12, 16, 20, 28])
    kept = []
    for versions in intervals.tolist():
        outage = failures.outage(f"exponential({every})", lasts, versions, cost)
        trace = simulate(Cluster(6, 0.1, 1.0, failures=[outage]), 60_000, seed=3)
        summary = trace.summary()
        # Of a server that is always busy, a version a second.
        kept.append(useful(trace) / summary["duration"])
        assert kept[-1] == pytest.approx(
            theory.checkpoint_efficiency(versions, cost, every, lasts), rel=0.02
        )
    a, b, _ = np.polyfit(np.log(intervals), kept, 2)
    best = np.exp(-b / (2 * a))
    assert best == pytest.approx(theory.daly_interval(cost, every), rel=0.15)
    assert best == pytest.approx(theory.young_interval(cost, every), rel=0.15)


def useful(trace):
    """How many versions no restore has undone."""
    frame = trace.frame[trace.frame["outcome"] == "applied"]
    restored = (
        trace.frame["restored"]
        .where(trace.frame["restores"] > 0)
        .shift(-1)
        .bfill()
        .loc[frame.index]
    )
    return int((~(frame["version"] > restored)).sum())


def test_a_site_fails_at_once():
    cluster = Cluster(
        5, "exponential(1)", sites=[2, 3], failures=["crash(exponential(9), 1, site=1)"]
    )
    spells = simulate(cluster, 300).spells
    assert (
        set(spells["worker"]) == {2, 3, 4}
        and (spells.groupby("begin")["worker"].nunique() == 3).all()
    )


@pytest.mark.parametrize(
    "protocol",
    [dict(protocol="write_then_read"), dict(protocol="read_then_write", exclusive=False)],
)
def test_the_goodput_of_a_joiner_that_is_never_served_adds_up(protocol):
    """Worker 5 comes to a saturated server that serves the lowest first: it is held until 5 s, then
    it waits.
    """
    cluster = Cluster(
        6, 1.0, 0.6, discipline="lowest_rank", failures=["join(at=5, workers=[5])"], **protocol
    )
    trace = simulate(cluster, 60, seed=0)
    assert 5 in trace.present["worker"].to_list() and 5 not in trace.frame["worker"].to_list()
    numbers = trace.summary(0)
    parts = [
        value
        for name, value in numbers.items()
        if name == "counted_share" or name.startswith("lost_to_")
    ]
    assert sum(parts) == pytest.approx(1, abs=1e-9)
    waiting = phases(trace, [5]).query("phase == 'waiting'")[["begin", "end"]].to_numpy()
    assert waiting == pytest.approx(np.array([[5, numbers["duration"]]]))


def test_times_add_up_while_a_message_is_sent_again():
    """The trace ends while worker 0's second message, lost once, is on its way."""
    cluster = Cluster(
        3,
        "gamma(1, 0.3)",
        protocol="read_then_write",
        exclusive=False,
        failures="loss(probability=0.4, timeout=0.7)",
    )
    shares = simulate(cluster, 40, seed=0).summary(0)
    phases_share = [shares[f"{phase}_share"] for phase in IN_WORDS]
    assert sum(phases_share) == pytest.approx(1, abs=1e-9)


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
