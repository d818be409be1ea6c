"""Time without a server: topologies, theory, records, and refusals."""

import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from world import MESSAGES

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    plots,
    recorded,
    simulate,
    theory,
    topologies,
)

TOPOLOGIES = [
    "ring()",
    "exponential()",
    "one_peer_exponential()",
    "complete()",
    "base2()",
    "random_regular(2, seed=3)",
]


def product(topology, workers):
    result = np.eye(workers)
    for matrix in topology.matrices(workers):
        result = matrix @ result
    return result


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_shares_sum_to_one_and_texts_are_read_back(text):
    topology = topologies.as_topology(text)
    assert topologies.as_topology(str(topology)) == topology
    for workers in (1, 2, 3, 4, 7, 12):
        if getattr(topology, "degree", 0) < workers:
            matrices = topology.matrices(workers)
            assert (matrices >= 0).all()
            np.testing.assert_allclose(matrices.sum(axis=1), 1, atol=1e-15)
            np.testing.assert_allclose(
                matrices.sum(axis=2), 1, atol=1e-15
            )  # each of these is doubly stochastic


def test_one_peer_exponential_averages_powers_of_two_exactly():
    for workers in (2, 4, 8, 16, 64):
        assert (product(topologies.one_peer_exponential(), workers) == 1 / workers).all()
    assert abs(product(topologies.one_peer_exponential(), 12) - 1 / 12).max() == pytest.approx(
        0.042, abs=5e-4
    )


def test_base2_averages_any_number_exactly():
    for workers in range(1, 100):
        matrices = topologies.base2().matrices(workers)
        np.testing.assert_allclose(product(topologies.base2(), workers), 1 / workers, atol=1e-15)
        assert len(matrices) <= 2 * math.log2(workers) + 2
        assert ((matrices > 0).sum(axis=1) <= 2).all()  # at most one partner
        assert (matrices == matrices.transpose(0, 2, 1)).all()


def test_random_graphs_are_regular_and_connected():
    for degree, workers in ((2, 9), (3, 20), (4, 7), (6, 8), (7, 8)):
        there = topologies.random_regular(degree, seed=1).matrices(workers)[0] > 0
        assert (there.sum(axis=0) == degree + 1).all() and (there == there.T).all()
        assert (np.linalg.matrix_power(there.astype(float), workers) > 0).all()


def test_shares_of_an_adjacency_matrix():
    star = np.zeros((4, 4))
    star[0, 1:] = star[1:, 0] = 1
    metropolis = topologies.adjacency(star).matrices(4)[0]
    assert metropolis[0].tolist() == [0.25] * 4 and metropolis[1].tolist() == [0.25, 0.75, 0, 0]
    uniform = topologies.adjacency(star, weights="uniform").matrices(4)[0]
    assert uniform[:, 1].tolist() == [0.5, 0.5, 0, 0] and uniform[0].tolist() == [
        0.25,
        0.5,
        0.5,
        0.5,
    ]
    given_ = topologies.adjacency([[[0.5, 0.5], [0.5, 0.5]], np.eye(2)], weights="given")
    assert given_.matrices(2).shape == (2, 2, 2) and topologies.as_topology(str(given_)) == given_

    class Graph:  # as networkx has them: a directed circle of three
        nodes = ("a", "b", "c")

        def adjacency(self):
            return iter([("a", {"b": {}}), ("b", {"c": {}}), ("c", {"a": {}})])

    circle = topologies.adjacency(Graph()).matrices(3)[0]
    assert circle.tolist() == [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]


def test_consensus():
    for workers in (3, 8, 25):
        expected = (1 + 2 * np.cos(2 * np.pi / workers)) / 3
        assert theory.second_eigenvalue("ring()", workers) == pytest.approx(expected, abs=1e-12)
        assert theory.spectral_gap("ring()", workers) == pytest.approx(1 - expected, abs=1e-12)
    assert theory.spectral_gap("base2()", 25) == theory.spectral_gap("complete()", 25) == 1.0
    gaps = [
        theory.spectral_gap(one, 25)
        for one in ("ring()", "one_peer_exponential()", "exponential()")
    ]
    assert gaps == sorted(gaps)
    # What is left after many cycles.
    product_ = np.linalg.matrix_power(product(topologies.one_peer_exponential(), 12), 20)
    left = abs(product_ - 1 / 12).max() ** (1 / 80)
    assert left == pytest.approx(theory.consensus_rate("one_peer_exponential()", 12), rel=0.03)


def test_an_exchange_contracts():
    """On the complete graph exactly so in the mean; averaged over pairs, without sampling."""
    x = np.random.default_rng(0).normal(size=6)
    x -= x.mean()
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    after = [sum(x**2) - (x[i] - x[j]) ** 2 / 2 for i, j in pairs]
    assert np.mean(after) == pytest.approx((1 - 1 / 5) * sum(x**2), rel=1e-12)


def test_theory_of_clusters_without_a_server():
    laws = ["gamma(1, 0.3)"] * 5 + ["gamma(3, 0.3)"]
    for policy in (*MESSAGES, "handshake()"):
        cluster = Cluster(6, laws, latency=0.5, policy=policy, topology="ring()")
        numbers, expected = simulate(cluster, 3000).summary(), theory.throughput_theory(cluster)
        slack = 0.03 if expected.exact else 0.0
        assert numbers["throughput"] <= expected.commits * (1 + 0.02)
        assert not expected.exact or numbers["throughput"] == pytest.approx(
            expected.commits, rel=slack
        )
        assert theory.queue_theory(cluster) is theory.saturating_workers(cluster) is None
        assert (
            theory.staleness_theory(cluster).mean
            == 5
            == pytest.approx(numbers["staleness_mean"], rel=0.02)
        )


def test_exchanges_hold_two_replicas():
    """Six workers of negligible computing whose exchange takes a second make three a second."""
    cluster = Cluster(6, 0.001, latency=0.5, policy="handshake()", topology="ring()")
    assert theory.throughput_theory(cluster).commits == pytest.approx(3)


def test_the_age_of_messages_is_that_after_the_warm_up():
    trace = simulate(Cluster(4, "exponential(1)", latency=3, topology="ring()"), 60)
    sources = trace.frame["sources"]
    ages = [[row - source for source in sources[row]] for row in range(60)]
    late = np.concatenate(ages[30:])
    assert trace.summary(30)["message_age_mean"] == pytest.approx(late.mean())
    assert late.mean() > np.concatenate(ages[:30]).mean() + 1


@pytest.mark.parametrize(
    ("policy", "lasts"),
    [
        ("neighbours()", 3.5),
        ("neighbours(beside)", 2.5),
        ("asynchronous()", 1.0),
        ("overlap(1)", 1.75),
        ("overlap(3)", 1.0),
    ],
)
def test_what_a_round_lasts(policy, lasts):
    """Computing and latency; the longer of the two; or one and a round's share of the other."""
    cluster = Cluster(8, 1.0, latency=2.5, policy=policy, topology="ring()")
    times = simulate(cluster, 8 * 41).frame["commit_time"].to_numpy()
    assert (times[-1] - times[7]) / 40 == pytest.approx(lasts)
    assert 8 / theory.throughput_theory(cluster).commits == pytest.approx(lasts)
    failing = dataclasses.replace(cluster, failures="crash(9, 1)")
    assert theory.throughput_theory(failing) is None


def test_who_waits_for_whom():
    """Neighbours of a slow worker wait for it, and theirs for them; nobody waits without a
    barrier.
    """
    laws = [1.0] * 6 + [4.0]
    trace = simulate(Cluster(7, laws, policy="neighbours()", topology="ring()"), 700)
    waits, table = trace.waits(), trace.per_worker(0)
    assert waits[0, 6] > 200 and waits[5, 6] > 200 and waits[6].sum() == 0
    np.testing.assert_allclose(waits.sum(axis=1), table["mean_wait"] * table["commits"])
    assert simulate(Cluster(7, laws, topology="ring()"), 700).waits().sum() == 0
    for one in (
        trace,
        simulate(Cluster(7, laws, latency=1, policy="handshake()", topology="ring()"), 200),
    ):
        queue = one.queue()
        assert queue["in_system"].iloc[-1] == len(one.in_flight) and (queue["in_system"] >= 0).all()
        figure, axes = plt.subplots(1, 4)
        plots.timeline(axes[0], one)
        plots.queue_length(axes[1], one)
        plots.staleness_histogram(axes[2], one)
        plots.waits(axes[3], one)
        figure.canvas.draw()
        plt.close(figure)


LOGGED = [
    "worker",
    "start_time",
    "send_time",
    "commit_time",
    "sources",
    "weights",
    "kept",
    "partner",
]


@pytest.mark.parametrize("policy", ["overlap(2)", "neighbours(beside)", "handshake()"])
def test_recorded_traces_are_put_in_order(policy):
    """The rows of a trace, shuffled; sources by worker and job; then with clocks that differ."""
    trace = simulate(Cluster(5, Gamma(1, 0.4), latency=0.3, policy=policy, topology="ring()"), 80)
    frame, flying = trace.frame, trace.in_flight.rename(columns={"row": "source"})

    def named(row):
        return (int(frame["worker"][row]), int(frame["job"][row]))

    log = frame[LOGGED].assign(
        sources=[[named(row) for row in sources] for sources in frame["sources"]]
    )
    messages = flying.assign(source=[named(row) for row in flying["source"]])
    options = {
        "protocol": "gossip",
        "workers": 5,
        "takes_up": trace.takes_up,
        "in_flight": messages,
    }
    again = recorded(log.sample(frac=1, random_state=1), **options)
    pd.testing.assert_frame_equal(again.frame, frame, check_exact=True)
    assert again.in_flight.equals(trace.in_flight) and again.cluster is None
    if policy != "handshake()":
        clock = np.array([0, 0.4, 0, -0.2, 0.1])[log["worker"]] + 1
        shifted = log.assign(
            **{name: log[name] + clock for name in ("start_time", "send_time", "commit_time")}
        )
        other = recorded(shifted.assign(job=frame["job"]), **options, begin=0).frame
        place = {
            pair: row for row, pair in enumerate(zip(other["worker"], other["job"], strict=True))
        }
        for row, sources in enumerate(log["sources"]):
            at = place[named(row)]
            assert other["sources"][at] == sorted(place[pair] for pair in sources)
        assert (np.diff(other["commit_time"]) >= 0).all()


def test_contradictory_messages_in_flight_are_refused():
    trace = simulate(Cluster(6, Gamma(1, 0.3), latency=2, topology="ring()"), 100)
    for name, value in (("row", 100), ("taker", 6), ("weight", 0.0), ("weight", 0.9)):
        in_flight = trace.in_flight.copy()
        in_flight.loc[0, name] = value
        with pytest.raises(InputError, match=r"in_flight|more, or less, than all"):
            as_log(trace, trace.frame, in_flight)
    assert as_log(trace, trace.frame, trace.in_flight).frame.equals(trace.frame)


def as_log(trace, frame, in_flight):
    pairs = dict(enumerate(zip(frame["worker"], frame["job"], strict=True)))

    def named(rows):
        return [pairs.get(row, row) for row in rows] if isinstance(rows, list) else rows

    in_flight = in_flight.assign(row=named(in_flight["row"].tolist()))
    return recorded(
        frame.drop(columns=["commit", "outcome"]).assign(sources=frame["sources"].map(named)),
        protocol="gossip",
        workers=trace.workers,
        begin=0.0,
        in_flight=in_flight.rename(columns={"row": "source"}),
        takes_up=trace.takes_up,
    )


def damaged(trace, name, row, value):
    frame = trace.frame.copy()
    frame[name] = frame[name].astype(object) if name in ("sources", "weights") else frame[name]
    frame.at[row, name] = value
    return lambda: as_log(trace, frame, trace.in_flight)
