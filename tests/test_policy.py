"""Timing policies: their texts, runs by hand, and the closed forms of waiting and staleness."""

import numpy as np
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    Uniform,
    barrier,
    bounded_staleness,
    buffered,
    cancel_stale,
    discard_stale,
    first_of,
    simulate,
    theory,
)
from asyncsim.clusters.policy import as_policy
from asyncsim.theory import queue_theory, staleness_theory
from asyncsim.traces.phases import phases

# A standard normal is beyond 5 sigma with probability 6e-7; the seeds are fixed besides.
K_SIGMA = 5.0


# Staleness


@pytest.mark.parametrize(("count", "law"), [(5, Exponential(1.0)), (30, Gamma(1.0, 0.2))])
def test_mean_staleness_of_buffers(count, law):
    # FedBuff and softsync: (M - 1) / c for any law. The open reads at the end make the only
    # difference: their ages are below ten versions each, where the mean is below thirty.
    commits = 30_000
    trace = simulate(Cluster(30, law, policy=buffered(count)), commits)
    open_ages = (trace.frame["version"].iloc[-1] - trace.open_reads["read_version"]).sum()
    expected = 29 / count
    assert trace.frame["staleness"].mean() + open_ages / commits == pytest.approx(
        expected, rel=1e-12
    )
    assert staleness_theory(trace.cluster).mean == pytest.approx(expected)


@pytest.mark.parametrize("first", [5])
def test_mean_staleness_of_the_first_to_deliver(first):
    commits = 15_000
    trace = simulate(Cluster(20, Gamma(1.0, 0.5), 0.001, policy=first_of(first)), commits)
    open_ages = (trace.frame["version"].iloc[-1] - trace.open_reads["read_version"]).sum()
    expected = theory.first_staleness(20, first)
    assert trace.frame["staleness"].mean() + open_ages / commits == pytest.approx(
        expected, rel=1e-12
    )
    assert staleness_theory(trace.cluster).mean == pytest.approx(expected)


def test_staleness_theory_bounds_every_policy():
    for text in (
        "bounded_staleness(2)",
        "barrier(3)",
        "discard_stale(3)",
        "cancel_stale(2, 2)",
        "rounds",
        "trials(1.5, 2)",
        "buffered(2, grace=0.3)",
        "first_of(2, grace=0.3)",
    ):
        for protocol in ("exchange", "write_then_read"):
            cluster = Cluster(6, Gamma(1.0, 0.5), 0.02, protocol=protocol, policy=as_policy(text))
            low, high = staleness_theory(cluster).mean_bounds
            assert low <= simulate(cluster, 2_000).summary()["staleness_mean"] <= high
    assert queue_theory(Cluster(6, Exponential(1.0), Exponential(0.1), policy=barrier())) is None
    assert (
        queue_theory(Cluster(6, Exponential(1.0), Exponential(0.1), policy=buffered(2))) is not None
    )


# Times


def time_per_version(cluster, versions, batch=1):
    """Mean and standard error of the time between versions, from means over ``batch`` versions at a
    time.
    """
    commits = versions * cluster.policy.per_version(cluster.workers)
    frame = simulate(cluster, commits, seed=1).frame
    times = frame.loc[frame["outcome"] == "applied", "commit_time"].to_numpy()
    lasted = np.diff(times[::batch], prepend=0.0) / batch
    return lasted[1:].mean(), lasted[1:].std() / np.sqrt(len(lasted) - 1)


@pytest.mark.parametrize(
    ("policy", "law", "expected"),
    [
        # The next version is as far away as the first was: all start anew, or are memoryless.
        (barrier(), Exponential(1.0), theory.barrier_time(Exponential(1.0), 32)),
        (barrier(28), Exponential(1.0), 1.9752),
        (barrier(20), Uniform(0.5, 1.5), theory.barrier_time(Uniform(0.5, 1.5), 32, 20)),
        (cancel_stale(1, 8), Exponential(1.0), 8 / 32),
        (discard_stale(1, 8), Exponential(1.0), None),
        (buffered(8), Gamma(1.0, 0.5), 8 / 32),
    ],
    ids=str,
)
def test_time_per_version(policy, law, expected):
    mean, error = time_per_version(Cluster(32, law, policy=policy), 2_000, batch=20)
    if expected is None:  # Rennala without stops: what is under way when a version is made is lost
        expected = 8 * law.mean / 32
        assert mean - K_SIGMA * error > expected
        return
    assert abs(mean - expected) < K_SIGMA * error + 5e-5 * (expected == 1.9752)


#: algorithms.md, L10: throughput per worker under exponential clocks, relative to no bound; two
#: digits, simulated.
BOUNDED = {
    10: {0: 0.34, 2: 0.64},
    20: {2: 0.58, 20: 0.91},
}


@pytest.mark.parametrize("workers", [1, 10])
def test_bounded_clocks_in_closed_form(workers):
    harmonic = sum(1 / k for k in range(1, workers + 1))
    assert theory.bounded_clocks(workers, 0) == pytest.approx(
        (1 / harmonic, (workers - 1) / 2), rel=1e-12
    )
    for bound in range(5):
        # The difference of two clocks is uniform on 2 bound + 3 values, and at the ends one of them
        # waits.
        assert theory.bounded_clocks(2, bound).throughput == pytest.approx(
            1 - 1 / (2 * bound + 3), rel=1e-12
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("workers", "bound"), [(n, s) for n, values in BOUNDED.items() for s in values]
)
def test_throughput_of_bounded_staleness(workers, bound):
    commits = 30_000
    frame = simulate(
        Cluster(workers, Exponential(1.0), policy=bounded_staleness(bound)), commits, seed=2
    ).frame
    # From when the clocks have spread; then in parts longer than what is remembered: some s**2 of
    # time.
    parts = np.diff(frame["commit_time"].to_numpy()[4_999::1_000]) / 1_000 * workers
    found, error = 1 / parts.mean(), parts.std() / np.sqrt(len(parts)) / parts.mean() ** 2
    # Published with two digits, from a simulation: one more or less of the last.
    assert abs(found - BOUNDED[workers][bound]) < K_SIGMA * error + 0.01
    if bound > (3 if workers == 10 else 2):
        return
    exact = theory.bounded_clocks(workers, bound)
    assert abs(found - exact.throughput) < K_SIGMA * error
    stale = frame["staleness"].to_numpy()[5_000:].reshape(-1, 1_000).mean(axis=1)
    # With bound 0 every round has each staleness once: exact but for rounding.
    assert abs(stale.mean() - exact.staleness) < K_SIGMA * stale.std() / np.sqrt(len(stale)) + 1e-12


# The dataclass, its text, and what is refused


# What is told of a trace


def test_barrier_by_hand():
    # Versions at 2 (workers 0, 1), 4 and so on; worker 2, which needs 3 s, never delivers.
    trace = simulate(Cluster(3, [1.0, 2.0, 3.0], policy=barrier(2)), 4)
    names = [
        "worker",
        "job",
        "start_time",
        "commit_time",
        "read_version",
        "staleness",
        "version",
        "outcome",
    ]
    assert [tuple(row) for row in trace.frame[names].itertuples(index=False)] == [
        (0, 0, 0.0, 1.0, 0, 0, 0, "buffered"),
        (1, 0, 0.0, 2.0, 0, 0, 1, "applied"),
        (2, 0, 0.0, 2.0, 0, 1, 1, "cancelled"),
        (0, 1, 2.0, 3.0, 1, 0, 1, "buffered"),
        (1, 1, 2.0, 4.0, 1, 0, 2, "applied"),
        (2, 1, 2.0, 4.0, 1, 1, 2, "cancelled"),
    ]
    summary = trace.summary(warm_up=0)
    assert (
        summary["commits"],
        summary["versions"],
        summary["duration"],
        summary["throughput"],
    ) == (4, 2, 4.0, 1.0)
    assert (summary["discarded_share"], summary["cancelled_share"]) == (0.0, 2 / 6)
    assert summary["staleness_max"] == 0
    assert trace.per_worker(0)[["commits", "cancelled"]].to_numpy().tolist() == [
        [2, 0],
        [2, 0],
        [0, 2],
    ]
    # Worker 0 waits for worker 1 each time.
    doing = phases(trace, range(3))
    held, computing = (
        doing.loc[doing["phase"] == phase, ["worker", "begin", "end"]].to_numpy().tolist()
        for phase in ("held", "computing")
    )
    assert held == [[0, 1.0, 2.0], [0, 3.0, 4.0]]
    assert computing == [[0, 0, 1], [0, 2, 3], [1, 0, 2], [1, 2, 4], [2, 0, 2], [2, 2, 4]]


def test_discarding_by_hand():
    # Versions by worker 0 at 1, 2, 3; the message of worker 1, read at version 0, is served at 2.5.
    trace = simulate(Cluster(2, [1.0, 2.5], policy=discard_stale(2)), 4)
    names = ["worker", "commit_time", "read_version", "staleness", "version", "outcome"]
    assert [tuple(row) for row in trace.frame[names].itertuples(index=False)][:4] == [
        (0, 1.0, 0, 0, 1, "applied"),
        (0, 2.0, 1, 0, 2, "applied"),
        (1, 2.5, 0, 2, 2, "discarded"),
        (0, 3.0, 2, 0, 3, "applied"),
    ]
    stopped = simulate(Cluster(2, [1.0, 2.5], policy=cancel_stale(2)), 4)
    assert [tuple(row) for row in stopped.frame[names].itertuples(index=False)][2] == (
        1,
        2.0,
        0,
        2,
        2,
        "cancelled",
    )
    assert stopped.accepted.frame["commit"].tolist() == [0, 1, 2, 3]
    assert stopped.accepted.worker_step.tolist() == [0, 1, 2, 3]
    assert repr(stopped) == (
        f"<Trace of 4 commits and {len(stopped) - 4} lost computations by 2 workers, exchange, "
        "seed 0>"
    )
