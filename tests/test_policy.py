"""Timing policies: their texts, runs by hand, and the closed forms of waiting and staleness."""

import numpy as np
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    barrier,
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


def test_mean_staleness_in_closed_form():
    """What `world.staleness_is_conserved` counts, over the messages of a version."""
    for count in (5, 30):
        theory_of = staleness_theory(Cluster(30, Exponential(1.0), policy=buffered(count)))
        assert theory_of.mean == pytest.approx(29 / count)
    cluster = Cluster(20, Gamma(1.0, 0.5), 0.001, policy=first_of(5))
    assert staleness_theory(cluster).mean == pytest.approx(theory.first_staleness(20, 5)) == 3


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
            assert low <= simulate(cluster, 500).summary()["staleness_mean"] <= high
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
        (barrier(28), Exponential(1.0), 1.9752),
        (cancel_stale(1, 8), Exponential(1.0), 8 / 32),
        (discard_stale(1, 8), Exponential(1.0), None),
    ],
    ids=str,
)
def test_time_per_version(policy, law, expected):
    mean, error = time_per_version(Cluster(32, law, policy=policy), 600, batch=20)
    if expected is None:  # Rennala without stops: what is under way when a version is made is lost
        expected = 8 * law.mean / 32
        assert mean - K_SIGMA * error > expected
        return
    assert abs(mean - expected) < K_SIGMA * error + 5e-5 * (expected == 1.9752)


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
