"""Timing policies: a run by hand, and the closed forms of staleness."""

import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    barrier,
    buffered,
    first_of,
    simulate,
    theory,
)
from asyncsim.clusters.policy import as_policy
from asyncsim.theory import queue_theory, staleness_theory
from asyncsim.traces.phases import phases


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
