"""What theory says of commits and computing workers, against simulated traces."""

import dataclasses

import pandas as pd
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
    rounds,
    simulate,
)
from asyncsim.clusters.policy import as_policy
from asyncsim.theory import (
    first_staleness,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)

MIXED = ["gamma(1, 0.2)"] * 4 + ["gamma(3, 0.2)"] * 4
SEEDS = 4
LINK = {"bandwidth": 1e3, "message_bytes": 200, "shared_bandwidth": True}
UNSERVED = "order statistics, without the network"

#: The name of what holds exactly, whether it tells the share of time that workers compute, and
#: clusters of which it holds.
EXACT = [
    ("nobody waits", True, Cluster(8, Gamma(1.0, 0.5), latency=(0.3, 0.1))),
    ("nobody waits", True, Cluster(8, MIXED, window=2, latency="exponential(0.2)")),
    (
        "nobody waits",
        True,
        Cluster(8, MIXED, service=0.2, discipline="lock_free", protocol="write_then_read"),
    ),
    ("nobody waits", True, Cluster(8, Gamma(1.0, 0.5), policy=rounds())),
    ("nobody waits", True, Cluster(1, Gamma(1.0, 0.5), service=0.5, policy=bounded_staleness(2))),
    ("nobody waits", True, Cluster(8, Gamma(1.0, 0.5), bandwidth=1e3, message_bytes=(100, 900))),
    ("machine repairman", True, Cluster(8, Gamma(1.0, 0.5), service=Exponential(0.1), latency=0.2)),
    (
        "order statistics",
        True,
        Cluster(8, Gamma(1.0, 0.5), window=2, latency=(0.2, 0.3), policy=barrier()),
    ),
    ("order statistics", False, Cluster(8, MIXED, policy=barrier(5))),
]
#: What bounds it, the least part of that which the cluster reaches, and clusters.
BOUNDED = [
    ("saturation bound", 0.9, Cluster(8, Gamma(1.0, 0.5), service=0.1)),
    ("saturation bound", 0.9, Cluster(8, Gamma(1.0, 0.5), **LINK | {"message_bytes": (20, 200)})),
    ("saturation bound", 0.9, Cluster(8, MIXED, policy=bounded_staleness(2))),
    (
        "saturation bound",
        0.999,
        Cluster(8, 1.0, service=0.5, protocol="write_then_read", policy=barrier()),
    ),
    ("saturation bound", 0.9, Cluster(8, Gamma(1.0, 0.5), **LINK, policy=barrier(2))),
    # Who waits or is under way misses versions, and gets fewer than there are.
    (
        "order statistics",
        0.8,
        Cluster(
            8,
            0.3,
            service=0.8,
            discipline="lowest_rank",
            **LINK | {"bandwidth": 400.0},
            policy=barrier(1),
        ),
    ),
    (UNSERVED, 0.2, Cluster(10, 1.0, latency=("exponential(10)", 0.0), **LINK, policy=barrier(1))),
    (
        "saturation bound",
        0.6,
        Cluster(8, "uniform(0.5, 1.5)", window=2, service=0.5, policy=barrier(6)),
    ),
    ("saturation bound", 0.6, Cluster(8, Gamma(1.0, 0.5), policy=first_of(3))),
    ("saturation bound", 0.5, Cluster(8, Exponential(1.0), policy=discard_stale(4))),
    (
        "machine repairman",
        0.5,
        Cluster(8, Exponential(1.0), service=Exponential(0.1), policy=discard_stale(4)),
    ),
    (
        "order statistics",
        0.995,
        Cluster(8, [1.0] * 7 + [3.0], service=0.5, discipline="lock_free", policy=barrier(7)),
    ),
    # Who is served for a message that came too late may see the version that is made meanwhile.
    (
        UNSERVED,
        0.85,
        Cluster(
            100,
            0.1,
            service=1.0,
            latency=("mixture([0, 20], [0.8, 0.2])", 0.0),
            protocol="write_then_read",
            discipline="lock_free",
            policy=barrier(1),
        ),
    ),
    ("saturation bound", 0.5, Cluster(8, Exponential(2.0), policy=bounded_staleness(2))),
]
#: By what a mean over so many commits may lie beyond, or aside: a commit of each worker at either
#: end.
ENDS = 8e-3


def first_of_each(cases: list[tuple]) -> list:
    """The first of each name; the others are of the full matrix."""
    names = [name for name, *_ in cases]
    return [
        pytest.param(*case, marks=[] if names.index(case[0]) == place else pytest.mark.full)
        for place, case in enumerate(cases)
    ]


def summaries(cluster: Cluster) -> pd.DataFrame:
    return pd.DataFrame(
        [simulate(cluster, 2_000, seed).summary(warm_up=200) for seed in range(SEEDS)]
    )


def within(values: pd.Series, expected: float) -> bool:
    """Whether a mean over seeds is within five of its standard errors, and what the ends may do."""
    return abs(values.mean() - expected) < 5 * values.std() / SEEDS**0.5 + ENDS * expected


@pytest.mark.parametrize(("name", "tells_computing", "cluster"), first_of_each(EXACT))
def test_exact_rates(name, tells_computing, cluster):
    known = throughput_theory(cluster)
    assert (known.name, known.exact, known.computing is not None) == (name, True, tells_computing)
    measured = summaries(cluster)
    assert within(measured["throughput"], known.commits)
    if tells_computing:
        assert within(measured["computing_share"], known.computing)


@pytest.mark.parametrize(("name", "reached", "cluster"), first_of_each(BOUNDED))
def test_bounds_of_rates(name, reached, cluster):
    known = throughput_theory(cluster)
    assert (known.name, known.exact) == (name, False)
    measured = summaries(cluster).mean()
    assert reached * known.commits < measured["throughput"] < known.commits * (1 + ENDS)
    if known.computing is not None:
        assert measured["computing_share"] < known.computing * (1 + ENDS)


@pytest.mark.parametrize(
    ("policy", "round_time"),
    [
        ("overlap(1)", 2.0),
        ("overlap(5)", 1.0),
        ("neighbours(before)", 4.0),
        ("neighbours(beside)", 3.0),
    ],
)
def test_a_round_without_a_server_waits_for_messages_on_their_way(policy, round_time):
    """One second of computing, three of travel."""
    cluster = Cluster(6, 1.0, latency=3.0, topology="ring()", policy=policy)
    assert 6 / throughput_theory(cluster).commits == round_time
    times = simulate(cluster, 6 * 101).frame["commit_time"]
    assert times.iloc[-1] - times.iloc[0] == pytest.approx(100 * round_time, abs=2 * round_time)
    assert throughput_theory(dataclasses.replace(cluster, failures="crash(9, 1)")) is None


def test_nothing_is_said_where_long_computations_are_stopped():
    for policy in (cancel_stale(4), barrier(5)):
        assert throughput_theory(Cluster(8, "uniform(0.5, 1.5)", window=2, policy=policy)) is None


@pytest.mark.parametrize(
    ("visits", "cluster"),
    [
        (1, Cluster(8, Gamma(1.0, 0.5), service=Exponential(0.1), latency=0.2)),
        (1, Cluster(8, Gamma(1.0, 0.5), service=0.1)),
        (2, Cluster(8, Gamma(1.0, 0.5), service=0.1, protocol="write_then_read")),
        (2, Cluster(8, Gamma(1.0, 0.5), service=0.05, protocol="read_then_write", exclusive=False)),
    ],
)
def test_the_queue_is_that_of_the_rate(visits, cluster):
    queue, rate = queue_theory(cluster), throughput_theory(cluster)
    assert queue.exact == rate.exact and queue.utilisation == pytest.approx(
        rate.commits * visits * cluster.service.mean
    )
    in_system = summaries(cluster)[["queue_mean", "utilisation"]].sum(axis=1)
    assert (
        within(in_system, queue.in_system)
        if queue.exact
        else in_system.mean() > queue.in_system * (1 - ENDS)
    )


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1.0),
        (
            {"service": 0.5},
            2 / 3,
        ),  # one computes for 1 s, then is served for 0.5 s while the other computes
        ({"service": 0.5, "discipline": "lock_free"}, 2 / 3),
        ({"latency": (0.25, 0.75)}, 1 / 2),
        (
            {"service": 0.1, "latency": 0.2, "protocol": "read_then_write", "exclusive": False},
            1 / 2,
        ),
        (
            {"service": 0.25, "protocol": "write_then_read"},
            1 / 1.75,
        ),  # read and write of the two in turn, once queued
        ({"compute": [1.0, 3.0], "policy": barrier()}, 4 / 6),
        ({"compute": [1.0, 3.0], "policy": barrier(1)}, 1.0),  # the slow one is stopped each time
        ({"compute": [1.0, 3.0], "policy": bounded_staleness(0)}, 4 / 6),
    ],
)
def test_share_of_time_that_workers_compute(given, share):
    trace = simulate(Cluster(2, **{"compute": 1.0} | given), 1_500)
    assert trace.summary()["computing_share"] == pytest.approx(share, rel=5e-3)


@pytest.mark.parametrize(
    ("cluster", "share"),
    [
        (
            Cluster(2, [1.0, 3.0], policy=barrier(1)),
            0.5,
        ),  # the second computes in vain, until it is stopped
        (
            Cluster(2, [1.0, 3.5], policy=discard_stale(2)),
            0.5,
        ),  # the second's message always comes too late
        (Cluster(2, 1.0, policy=barrier()), 0.0),
    ],
)
def test_share_of_time_that_comes_to_nothing(cluster, share):
    assert simulate(cluster, 1_000).summary()["lost_time_share"] == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize(
    ("policy", "visit"),
    [
        ("discard_stale(2)", {"protocol": "read_then_write", "exclusive": False}),
        *(
            (policy, {"protocol": "write_then_read"})
            for policy in ("discard_stale(2)", "barrier(2)", "cancel_stale(3)")
        ),
    ],
)
def test_what_is_lost_was_computed(policy, visit):
    summary = simulate(
        Cluster(6, "gamma(1, 0.5)", service=0.2, policy=policy, **visit), 500
    ).summary()
    assert 0 < summary["lost_time_share"] < summary["computing_share"] < 1


def test_a_server_saturates_at_the_knee():
    assert saturating_workers(Cluster(3, Gamma(1.0, 0.2), service=0.02)) == pytest.approx(51)
    assert (
        saturating_workers(Cluster(3, Gamma(1.0, 0.2), service=0.02, protocol="write_then_read"))
        == 26
    )
    for unknown in ({"service": 0.0}, {"discipline": "lock_free"}, {"policy": barrier()}):
        assert saturating_workers(Cluster(3, **{"compute": 1.0, "service": 0.02} | unknown)) is None


def test_mean_staleness_in_closed_form():
    """What `world.staleness_is_conserved` counts, over the messages of a version."""
    for count in (5, 30):
        theory_of = staleness_theory(Cluster(30, Exponential(1.0), policy=buffered(count)))
        assert theory_of.mean == pytest.approx(29 / count)
    cluster = Cluster(20, Gamma(1.0, 0.5), 0.001, policy=first_of(5))
    assert staleness_theory(cluster).mean == pytest.approx(first_staleness(20, 5)) == 3


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
