"""Timing policies: their texts, runs by hand, and the closed forms of waiting and staleness."""

import json

import numpy as np
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    Trace,
    Uniform,
    asynchronous,
    barrier,
    bounded_staleness,
    buffered,
    cancel_stale,
    discard_stale,
    first_of,
    rounds,
    simulate,
    theory,
    trials,
)
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.policy import POLICIES, WITHOUT_SERVER, Policy, parse_policy
from asyncsim.theory import queue_theory, staleness_theory
from asyncsim.traces.phases import phases

# A standard normal is beyond 5 sigma with probability 6e-7; the seeds are fixed besides.
K_SIGMA = 5.0


# Staleness


@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("law", [Exponential(1.0), Gamma(1.0, 0.2)])
def test_mean_staleness_of_buffers(count, law):
    # FedBuff and softsync: (M - 1) / c for any law. The open reads at the end make the only
    # difference: their ages are below ten versions each, where the mean is below thirty.
    commits = 30_000
    trace = simulate(Cluster(30, law, policy=buffered(count)), commits)
    open_ages = (trace.frame["version"].iloc[-1] - trace.open_reads["read_version"]).sum()
    expected = theory.batch_staleness(30, count)
    assert trace.frame["staleness"].mean() + open_ages / commits == pytest.approx(
        expected, rel=1e-12
    )
    assert staleness_theory(trace.cluster).mean == pytest.approx(expected)


@pytest.mark.parametrize("first", [1, 5, 15])
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
            cluster = Cluster(
                6, Gamma(1.0, 0.5), 0.02, protocol=protocol, policy=parse_policy(text)
            )
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
        (barrier(), Gamma(1.0, 0.3), theory.barrier_time(Gamma(1.0, 0.3), 32)),
        (barrier(20), Uniform(0.5, 1.5), theory.barrier_time(Uniform(0.5, 1.5), 32, 20)),
        (first_of(8), Exponential(1.0), theory.barrier_time(Exponential(1.0), 32, 8)),
        (cancel_stale(1, 8), Exponential(1.0), theory.batch_time(Exponential(1.0), 32, 8)),
        (discard_stale(1, 8), Exponential(1.0), None),
        (buffered(8), Exponential(1.0), theory.batch_time(Exponential(1.0), 32, 8)),
        (buffered(8), Gamma(1.0, 0.5), theory.batch_time(Gamma(1.0, 0.5), 32, 8)),
    ],
    ids=str,
)
def test_time_per_version(policy, law, expected):
    mean, error = time_per_version(Cluster(32, law, policy=policy), 2_000, batch=20)
    if expected is None:  # Rennala without stops: what is under way when a version is made is lost
        expected = theory.batch_time(law, 32, 8)
        assert mean - K_SIGMA * error > expected
        return
    assert abs(mean - expected) < K_SIGMA * error + 5e-5 * (expected == 1.9752)


#: algorithms.md, L10: throughput per worker under exponential clocks, relative to no bound; two
#: digits, simulated.
BOUNDED = {
    10: {0: 0.34, 2: 0.64, 5: 0.79, 20: 0.93},
    20: {0: 0.279, 2: 0.58, 5: 0.74, 20: 0.91},
}


@pytest.mark.parametrize("workers", [1, 2, 5, 10])
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


ALL = [
    "asynchronous()",
    "bounded_staleness(bound=3)",
    "buffered(count=4)",
    "first_of(count=2)",
    "barrier()",
    "barrier(count=3)",
    "discard_stale(limit=4, count=1)",
    "cancel_stale(limit=4, count=2)",
    "rounds()",
    "buckets(count=2)",
    "buffered(count=2, grace=0.5)",
    "first_of(count=2, grace=0.5)",
    "trials(time=0.8, count=2)",
    "trials(time=[0.8, 1, 1, 1.5, 2], count=[1, 2, 1, 3, 1])",
]


@pytest.mark.parametrize("text", ALL)
def test_policies_are_written_and_read(text, tmp_path):
    policy = parse_policy(text)
    assert str(policy) == text
    assert Policy(**json.loads(json.dumps(policy.to_dict()))) == policy
    cluster = Cluster(5, Gamma(1.0, 0.5), 0.1, policy=policy)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert describe(cluster).endswith(text) == (policy != asynchronous())
    trace = simulate(cluster, 50)
    again = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert again.frame.equals(trace.frame) and again.policy == policy


def test_texts_may_be_short():
    assert parse_policy("rounds") == rounds()
    assert parse_policy(" bounded_staleness( 3 )") == bounded_staleness(3)
    assert parse_policy("discard_stale(2, count=5)") == discard_stale(2, 5)
    assert parse_policy("(rounds)") == rounds()
    assert parse_policy("trials([200 ms, 2 s])") == trials([0.2, 2.0])
    assert parse_policy("buffered(2, grace=1 min)") == buffered(2, 60.0)
    assert {parse_policy(text).name for text in ALL} == set(POLICIES) - set(WITHOUT_SERVER[1:])


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
    assert doing.held.to_numpy().tolist() == [[0, 1.0, 2.0], [0, 3.0, 4.0]]
    computing = doing.computing.sort_values(["worker", "begin"]).to_numpy().tolist()
    assert computing == [[0, 0, 1], [0, 2, 3], [1, 0, 2], [1, 2, 4], [2, 0, 2], [2, 2, 4]]


def test_who_still_waits_at_the_end_is_drawn_to_the_end():
    trace = simulate(Cluster(3, [1.0, 2.0, 3.0], policy=bounded_staleness(0)), 2)
    assert phases(trace, range(3)).held.to_numpy().tolist() == [[0, 1.0, 2.0]]


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
