"""What theory says of commits, queues and computing workers, against simulated traces."""

import pandas as pd
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    barrier,
    bounded_staleness,
    buffered,
    cancel_stale,
    discard_stale,
    first_of,
    rounds,
    simulate,
)
from asyncsim.theory import (
    first_staleness,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)


def eight(compute="gamma(1, 0.5)", **options):
    return Cluster(8, compute, **options)


MIXED = ["gamma(1, 0.2)"] * 4 + ["gamma(3, 0.2)"] * 4
SEEDS = 4
LINK = {"bandwidth": 1e3, "message_bytes": 200, "shared_bandwidth": True}
LOCK_FREE = {"discipline": "lock_free", "protocol": "write_then_read"}
SERVED = Exponential(0.1)
UNSERVED = "order statistics, without the network"

#: The name of what holds exactly, whether it tells the share of time that workers compute, and
#: clusters of which it holds.
EXACT = [
    ("nobody waits", True, eight(latency=(0.3, 0.1))),
    ("nobody waits", True, eight(MIXED, window=2, latency="exponential(0.2)")),
    ("nobody waits", True, eight(MIXED, service=0.2, **LOCK_FREE)),
    ("nobody waits", True, eight(policy=rounds())),
    ("nobody waits", True, Cluster(1, "gamma(1, 0.5)", 0.5, policy=bounded_staleness(2))),
    ("nobody waits", True, eight(bandwidth=1e3, message_bytes=(100, 900))),
    ("machine repairman", True, eight(service=SERVED, latency=0.2)),
    ("order statistics", True, eight(window=2, latency=(0.2, 0.3), policy=barrier())),
    ("order statistics", False, eight(MIXED, policy=barrier(5))),
]
#: What bounds it, the least part of that which the cluster reaches, and clusters.
BOUNDED = [
    ("saturation bound", 0.9, eight(service=0.1)),
    ("saturation bound", 0.9, eight(MIXED, policy=bounded_staleness(2))),
    (
        "saturation bound",
        0.999,
        eight(1.0, service=0.5, protocol="write_then_read", policy=barrier()),
    ),
    ("saturation bound", 0.9, eight(**LINK, policy=barrier(2))),
    # Who waits or is under way misses versions, and gets fewer than there are.
    (
        "order statistics",
        0.8,
        eight(
            0.3,
            service=0.8,
            discipline="lowest_rank",
            **LINK | {"bandwidth": 400.0},
            policy=barrier(1),
        ),
    ),
    (UNSERVED, 0.2, Cluster(10, 1.0, latency=("exponential(10)", 0.0), **LINK, policy=barrier(1))),
    ("saturation bound", 0.6, eight("uniform(0.5, 1.5)", window=2, service=0.5, policy=barrier(6))),
    (
        "machine repairman",
        0.5,
        eight("exponential(1)", service=SERVED, policy=discard_stale(4)),
    ),
    (
        "order statistics",
        0.995,
        eight([1.0] * 7 + [3.0], service=0.5, discipline="lock_free", policy=barrier(7)),
    ),
    # Who is served for a message that came too late may see the version that is made meanwhile.
    (
        UNSERVED,
        0.85,
        Cluster(
            100,
            0.1,
            1.0,
            latency=("mixture([0, 20], [0.8, 0.2])", 0.0),
            **LOCK_FREE,
            policy=barrier(1),
        ),
    ),
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
    traces = (simulate(cluster, 2_000, seed) for seed in range(SEEDS))
    return pd.DataFrame([trace.summary(warm_up=200) for trace in traces])


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


def test_nothing_is_said_where_long_computations_are_stopped():
    for policy in (cancel_stale(4), barrier(5)):
        assert throughput_theory(eight("uniform(0.5, 1.5)", window=2, policy=policy)) is None


@pytest.mark.parametrize(
    ("visits", "cluster"),
    [
        (1, eight(service=SERVED, latency=0.2)),
        (1, eight(service=0.1)),
        (2, eight(service=0.1, protocol="write_then_read")),
        (2, eight(service=0.05, protocol="read_then_write", exclusive=False)),
    ],
)
def test_the_queue_is_that_of_the_rate(visits, cluster):
    queue, rate = queue_theory(cluster), throughput_theory(cluster)
    utilisation = rate.commits * visits * cluster.service.mean
    assert queue.exact == rate.exact and queue.utilisation == pytest.approx(utilisation)
    in_system = summaries(cluster)[["queue_mean", "utilisation"]].sum(axis=1)
    if queue.exact:
        assert within(in_system, queue.in_system)
    else:
        assert in_system.mean() > queue.in_system * (1 - ENDS)


@pytest.mark.parametrize(
    ("column", "share", "compute", "options"),
    [
        ("computing_share", 1.0, 1.0, {}),
        # One computes for 1 s, then is served for 0.5 s while the other computes.
        ("computing_share", 2 / 3, 1.0, {"service": 0.5}),
        ("computing_share", 2 / 3, 1.0, {"service": 0.5, "discipline": "lock_free"}),
        ("computing_share", 1 / 2, 1.0, {"latency": (0.25, 0.75)}),
        (
            "computing_share",
            1 / 2,
            1.0,
            {"service": 0.1, "latency": 0.2, "protocol": "read_then_write", "exclusive": False},
        ),
        # Read and write of the two in turn, once queued.
        ("computing_share", 1 / 1.75, 1.0, {"service": 0.25, "protocol": "write_then_read"}),
        ("computing_share", 4 / 6, [1.0, 3.0], {"policy": barrier()}),
        ("computing_share", 4 / 6, [1.0, 3.0], {"policy": bounded_staleness(0)}),
        # The second computes in vain, until it is stopped each time.
        ("computing_share", 1.0, [1.0, 3.0], {"policy": barrier(1)}),
        ("lost_time_share", 0.5, [1.0, 3.0], {"policy": barrier(1)}),
        # The second's message always comes too late.
        ("lost_time_share", 0.5, [1.0, 3.5], {"policy": discard_stale(2)}),
        ("lost_time_share", 0.0, 1.0, {"policy": barrier()}),
    ],
)
def test_shares_of_the_workers_time(column, share, compute, options):
    summary = simulate(Cluster(2, compute, **options), 1_000).summary()
    assert summary[column] == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "knee"),
    [
        ({}, pytest.approx(51)),
        ({"protocol": "write_then_read"}, 26),
        ({"service": 0.0}, None),
        ({"discipline": "lock_free"}, None),
        ({"policy": barrier()}, None),
    ],
)
def test_a_server_saturates_at_the_knee(options, knee):
    assert saturating_workers(Cluster(3, 1.0, **{"service": 0.02} | options)) == knee


def test_mean_staleness_in_closed_form():
    """What `world.staleness_is_conserved` counts, over the messages of a version."""
    for count in (5, 30):
        theory_of = staleness_theory(Cluster(30, Exponential(1.0), policy=buffered(count)))
        assert theory_of.mean == pytest.approx(29 / count)
    cluster = Cluster(20, 1.0, 0.001, policy=first_of(5))
    assert staleness_theory(cluster).mean == pytest.approx(first_staleness(20, 5)) == 3


@pytest.mark.parametrize(
    "policy",
    [
        "bounded_staleness(2)",
        "barrier(3)",
        "discard_stale(3)",
        "cancel_stale(2, 2)",
        "rounds",
        "trials(1.5, 2)",
        "buffered(2, grace=0.3)",
        "first_of(2, grace=0.3)",
    ],
)
def test_staleness_theory_bounds_every_policy(policy):
    for protocol in ("exchange", "write_then_read"):
        cluster = Cluster(6, "gamma(1, 0.5)", 0.02, protocol=protocol, policy=policy)
        low, high = staleness_theory(cluster).mean_bounds
        assert low <= simulate(cluster, 500).summary()["staleness_mean"] <= high


def test_queues_are_known_where_the_server_replies_at_once():
    assert queue_theory(eight("exponential(1)", service=SERVED, policy=barrier())) is None
    assert queue_theory(eight("exponential(1)", service=SERVED, policy=buffered(2))) is not None
