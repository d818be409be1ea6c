"""Trials that are cut and grace windows: against loops by hand."""

import heapq

import numpy as np
import pytest

from asyncsim import Cluster, Exponential, Gamma, simulate, theory, trials
from asyncsim.simulation.delays import delays
from asyncsim.traces.phases import phases

# Trials


def rounds_by_hand(laws, times, counts, rounds, seed):
    """Rows (worker, start, end, outcome) of a cluster without a network, in the order of ends."""
    duration, now, rows = delays(laws, seed, "compute"), 0.0, []
    for _ in range(rounds):
        of_round = []
        for worker, (time, count) in enumerate(zip(times, counts, strict=True)):
            start = now
            for _ in range(count):
                lasts = duration(worker)
                end = start + min(lasts, time)
                of_round.append((end, worker, start, lasts <= time))
                start = end
        rows += sorted(of_round)
        now = max(end for end, *_ in of_round)
    return rows


def test_rounds_of_trials_by_hand():
    laws = [Exponential(1.0), Gamma(1.0, 0.5), Exponential(3.0), Exponential(0.5)]
    times, counts, seed = (1.0, 1.2, 0.7, 5.0), (2, 1, 3, 2), 4
    expected = rounds_by_hand(laws, times, counts, 40, seed)
    successes = sum(success for *_, success in expected)
    trace = simulate(Cluster(4, laws, policy=trials(times, counts)), successes, seed)
    rows = trace.frame
    expected = expected[: len(rows)]
    for name, values in zip(
        ("commit_time", "worker", "start_time"), list(zip(*expected, strict=True))[:3], strict=True
    ):
        np.testing.assert_allclose(rows[name], values, rtol=1e-12)
    assert [outcome != "cancelled" for outcome in rows["outcome"]] == [row[3] for row in expected]
    # Each computation begins from its round's version, which counts the earlier rounds.
    assert (rows["read_version"] == np.arange(len(rows)) // sum(counts)).all()
    assert (rows["staleness"] == 0).all()
    # The last message of a round makes its version where the replay looks.
    accepted = trace.accepted.frame
    last = accepted.groupby("read_version").tail(1).index[:-1]
    assert np.flatnonzero(accepted["outcome"] == "applied").tolist()[: len(last)] == last.tolist()
    assert (
        accepted["version"] - (accepted["outcome"] == "applied") == accepted["read_version"]
    ).all()


def test_trials_of_constant_times():
    # Worker 1 needs 3 s and fails both of its trials: its round lasts 4 s. Worker 0 waits from 2.
    trace = simulate(Cluster(2, [1.0, 3.0], policy=trials(2.0, 2)), 4)
    names = ["worker", "job", "start_time", "commit_time", "read_version", "version", "outcome"]
    assert [tuple(row) for row in trace.frame[names].itertuples(index=False)] == [
        (0, 0, 0.0, 1.0, 0, 0, "buffered"),
        (1, 0, 0.0, 2.0, 0, 0, "cancelled"),
        (0, 1, 1.0, 2.0, 0, 0, "buffered"),
        (1, 1, 2.0, 4.0, 0, 0, "cancelled"),
        (0, 2, 4.0, 5.0, 1, 1, "buffered"),
        (1, 2, 4.0, 6.0, 1, 1, "cancelled"),
        (0, 3, 5.0, 6.0, 1, 1, "buffered"),
    ]
    held = phases(trace, [0]).query("phase == 'held'")
    assert held[["begin", "end"]].to_numpy().tolist() == [[2.0, 4.0]]
    assert trace.per_worker(0)[["commits", "cancelled"]].to_numpy().tolist() == [[4, 0], [0, 3]]
    numbers = trace.summary(warm_up=0)
    assert (numbers["cancelled_share"], numbers["versions"]) == (3 / 7, 1)
    # In 6 s each: worker 0 computes for 4 and waits for 2, worker 1 computes in vain.
    assert numbers["counted_share"] == pytest.approx(4 / 12)
    assert numbers["lost_to_discarded"] == pytest.approx(6 / 12)
    assert numbers["lost_to_waiting"] == pytest.approx(2 / 12)


def test_a_round_without_a_message_makes_no_version():
    cluster = Cluster(2, Exponential(1.0), policy=trials(0.05))
    trace = simulate(cluster, 30, seed=1)
    ends = trace.frame["start_time"].nunique()  # one instant per round
    assert int(trace.frame["version"].iloc[-1]) < 30 < ends


@pytest.mark.parametrize("window", [3])
def test_success_of_trials(window):
    laws, times = [Exponential(1.0), Gamma(2.0, 0.5), 1.0], [1.0, 3.0, 2.0]
    cluster = Cluster(3, laws, policy=trials(times), window=window)
    rows = simulate(cluster, 4_000, seed=2).frame
    share = (rows["outcome"] != "cancelled").groupby(rows["worker"]).agg(["mean", "count"])
    expected = np.array(theory.trial_success(cluster))
    assert expected[2] == (window == 1)
    error = np.sqrt(expected * (1 - expected) / share["count"])
    assert (abs(share["mean"] - expected) <= 5 * error).all()


# Grace windows


def windows_by_hand(ends, count, grace):
    """Return the version before each message, for messages served at these times, in order."""
    version, of_version, closes, versions = 0, 0, np.inf, []
    for end in ends:
        if end > closes:
            version, of_version, closes = version + 1, 0, np.inf
        versions.append(version)
        of_version += 1
        if of_version == count:
            closes = end + grace
    return versions


@pytest.mark.parametrize("grace", [0.3])
def test_a_quorum_with_grace_by_hand(grace):
    workers, commits, seed = 5, 400, 3
    duration = delays([Exponential(1.0)] * workers, seed, "compute")
    queue = [(duration(i), i) for i in range(workers)]
    heapq.heapify(queue)
    ends, senders = [], []
    for _ in range(commits):
        end, worker = heapq.heappop(queue)
        ends.append(end)
        senders.append(worker)
        heapq.heappush(queue, (end + duration(worker), worker))
    cluster = Cluster(workers, "exponential(1)", policy=f"buffered(3, grace={grace})")
    frame = simulate(cluster, commits, seed).frame
    assert frame["worker"].tolist() == senders
    assert frame["commit_time"].tolist() == ends
    versions = windows_by_hand(ends, 3, grace)
    assert frame["version"].tolist() == versions
    assert set(frame["outcome"]) == {"buffered"}
    # A worker reads in the visit of its message.
    read = frame["version"].groupby(frame["worker"]).shift(fill_value=0)
    assert frame["read_version"].tolist() == read.tolist()
    low, high = theory.staleness_theory(cluster).mean_bounds
    assert low <= frame["staleness"].mean() <= high


def test_workers_wait_for_the_end_of_the_window():
    # A quorum of one and 0.6 s: worker 1 arrives in the window of worker 0, worker 2 does not.
    # In the third version all have arrived before its window ends.
    trace = simulate(Cluster(3, [1.0, 1.5, 2.0], policy="first_of(1, grace=600 ms)"), 7)
    names = ["worker", "read_version", "read_time", "commit_time", "version", "outcome"]
    assert [tuple(row) for row in trace.frame[names].itertuples(index=False)] == [
        (0, 0, 0.0, 1.0, 0, "buffered"),
        (1, 0, 0.0, 1.5, 0, "buffered"),
        (2, 0, 0.0, 2.0, 1, "buffered"),
        (0, 1, 1.6, 2.6, 1, "buffered"),  # at the last instant
        (1, 1, 1.6, 3.1, 2, "buffered"),
        (0, 2, 2.6, 3.6, 2, "buffered"),
        (2, 2, 2.6, 4.6, 3, "buffered"),
    ]


def test_a_version_of_all_workers_needs_no_grace():
    trace = simulate(Cluster(2, [1.0, 1.25], policy="first_of(1, grace=10)"), 6)
    assert trace.frame["commit_time"].tolist() == [1.0, 1.25, 2.25, 2.5, 3.5, 3.75]
    assert trace.frame["outcome"].tolist() == ["buffered", "applied"] * 3
