"""What theory says of commits and computing workers, against simulated traces."""

import numpy as np
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    barrier,
    bounded_staleness,
    buffered,
    cancel_stale,
    discard_stale,
    first_of,
    prescribed,
    rounds,
    simulate,
    theory,
)
from asyncsim.theory.expected_staleness import staleness_theory
from asyncsim.theory.expected_throughput import computing_theory, queue_theory, throughput_theory

MIXED = ["gamma(1, 0.2)"] * 4 + ["gamma(3, 0.2)"] * 4
SEEDS = 8

#: The law that holds exactly, and clusters of which it does.
EXACT = [
    ("nobody waits", Cluster(8, Gamma(1.0, 0.5), latency=(0.3, 0.1))),
    ("nobody waits", Cluster(8, MIXED, window=2, latency="exponential(0.2)")),
    ("nobody waits", Cluster(8, MIXED, service=0.2, discipline="lock_free", protocol="write_then_read")),
    ("nobody waits", Cluster(8, Exponential(1.0), policy=buffered(3))),
    ("nobody waits", Cluster(8, Gamma(1.0, 0.5), policy=rounds())),
    ("machine repairman", Cluster(8, Gamma(1.0, 0.5), service=Exponential(0.1), latency=0.2)),
    ("order statistics", Cluster(8, Gamma(1.0, 0.5), window=2, latency=(0.2, 0.3), policy=barrier())),
    ("order statistics", Cluster(8, MIXED, policy=barrier())),
    ("order statistics", Cluster(8, MIXED, policy=barrier(5))),
    ("order statistics", Cluster(8, Exponential(2.0), policy=first_of(3))),
    ("bounded clocks", Cluster(8, Exponential(2.0), policy=bounded_staleness(2))),
]
#: The law that bounds it, and clusters of which it does.
BOUNDED = [
    ("saturation bound", Cluster(8, Gamma(1.0, 0.5), service=0.1)),
    ("saturation bound", Cluster(8, MIXED, service=0.3)),
    ("saturation bound", Cluster(8, Gamma(1.0, 0.5), bandwidth=1e3, message_bytes=200, shared_bandwidth=True)),
    ("saturation bound", Cluster(8, MIXED, policy=bounded_staleness(2))),
    ("saturation bound", Cluster(8, Gamma(1.0, 0.5), policy=first_of(3))),
    ("saturation bound", Cluster(8, "uniform(0.5, 1.5)", window=2, policy=barrier())),
    ("saturation bound", Cluster(8, Exponential(1.0), policy=discard_stale(4))),
    ("machine repairman", Cluster(8, Exponential(1.0), service=Exponential(0.1), policy=discard_stale(4))),
    ("order statistics", Cluster(8, Gamma(1.0, 0.5), service=0.05, policy=barrier())),
    ("order statistics", Cluster(8, Gamma(1.0, 0.5), latency="exponential(0.5)", policy=barrier(5))),
    ("bounded clocks", Cluster(8, Exponential(1.0), service=0.02, policy=bounded_staleness(2))),
]


def summaries(cluster: Cluster, name: str) -> np.ndarray:
    return np.array([simulate(cluster, 8_000, seed).summary(warm_up=800)[name] for seed in range(SEEDS)])


def within(values: np.ndarray, expected: float) -> bool:
    """Whether a mean over seeds is within five of its standard errors, and a commit of each worker at either end."""
    return abs(values.mean() - expected) < 5 * values.std(ddof=1) / SEEDS**0.5 + 2e-3 * expected


@pytest.mark.parametrize(("law", "cluster"), EXACT)
def test_exact_rates(law, cluster):
    known = throughput_theory(cluster)
    assert (known.law, known.exact) == (law, True)
    assert within(summaries(cluster, "throughput"), known.commits)
    computing = computing_theory(cluster)
    if computing is not None:
        assert within(summaries(cluster, "computing_share"), computing)


@pytest.mark.parametrize(("law", "cluster"), BOUNDED)
def test_bounds_of_rates(law, cluster):
    known = throughput_theory(cluster)
    assert (known.law, known.exact) == (law, False)
    assert summaries(cluster, "throughput").mean() < known.commits * (1 + 2e-3)
    computing = computing_theory(cluster)
    assert computing is None or summaries(cluster, "computing_share").mean() < computing * (1 + 2e-3)


def test_nothing_is_said_where_long_computations_are_stopped():
    for policy in (cancel_stale(4), barrier(5)):
        cluster = Cluster(8, "uniform(0.5, 1.5)", window=2, policy=policy)
        assert throughput_theory(cluster) is None and computing_theory(cluster) is None


def test_mean_staleness_of_bounded_clocks():
    cluster = Cluster(8, Exponential(2.0), policy=bounded_staleness(2))
    known = staleness_theory(cluster)
    assert known.mean == theory.bounded_clocks(8, 2).staleness and known.mean_law == "bounded clocks"
    assert within(summaries(cluster, "staleness_mean"), known.mean)


def test_throughput_and_utilisation_agree():
    for _, cluster in EXACT + BOUNDED:
        queue, known = queue_theory(cluster), throughput_theory(cluster)
        if queue is not None:
            assert queue.utilisation == pytest.approx(known.commits * cluster.service.mean)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1.0),
        ({"service": 0.5}, 2 / 3),  # one computes for 1 s, then is served for 0.5 s while the other computes
        ({"service": 0.5, "discipline": "lock_free"}, 2 / 3),
        ({"latency": (0.25, 0.75)}, 1.25 / 2),
        ({"service": 0.25, "protocol": "write_then_read"}, 1 / 1.75),  # read and write of the two in turn, once queued
        ({"compute": [1.0, 3.0], "policy": barrier()}, 4 / 6),
        ({"compute": [1.0, 3.0], "policy": barrier(1)}, 1.0),  # the slow one is stopped each time
        ({"compute": [1.0, 3.0], "policy": bounded_staleness(0)}, 4 / 6),
    ],
)
def test_share_of_time_that_workers_compute(given, share):
    trace = simulate(Cluster(2, **{"compute": 1.0} | given), 4_000)
    assert trace.summary()["computing_share"] == pytest.approx(share, rel=2e-3)


def test_a_pull_is_no_computing():
    cluster = Cluster(1, 1.0, service=0.25, protocol="read_then_write", exclusive=False)
    assert simulate(cluster, 1_000).summary()["computing_share"] == pytest.approx(1 / 1.5, rel=2e-3)


def test_a_prescribed_trace_says_nothing_of_computing():
    assert np.isnan(prescribed(staleness=3, commits=50, workers=4).summary()["computing_share"])
