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
            for axis in (1, 2):  # each of these is doubly stochastic
                np.testing.assert_allclose(matrices.sum(axis), 1, atol=1e-15)


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
        edges = topologies.random_regular(degree, seed=1).matrices(workers)[0] > 0
        assert (edges.sum(axis=0) == degree + 1).all() and (edges == edges.T).all()
        assert (np.linalg.matrix_power(edges.astype(float), workers) > 0).all()


def test_shares_of_an_adjacency_matrix():
    star = np.zeros((4, 4))
    star[0, 1:] = star[1:, 0] = 1
    metropolis = topologies.adjacency(star).matrices(4)[0]
    assert metropolis[0].tolist() == [0.25] * 4 and metropolis[1].tolist() == [0.25, 0.75, 0, 0]
    uniform = topologies.adjacency(star, weights="uniform").matrices(4)[0]
    assert uniform[:, 1].tolist() == [0.5, 0.5, 0, 0] and uniform[0].tolist() == [0.25] + [0.5] * 3
    cycle = topologies.adjacency([[[0.5, 0.5], [0.5, 0.5]], np.eye(2)], weights="given")
    assert cycle.matrices(2).shape == (2, 2, 2) and topologies.as_topology(str(cycle)) == cycle

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
    names = ("ring()", "one_peer_exponential()", "exponential()")
    gaps = [theory.spectral_gap(topology, 25) for topology in names]
    assert gaps == sorted(gaps)
    # The largest distance after many cycles.
    cycles = np.linalg.matrix_power(product(topologies.one_peer_exponential(), 12), 20)
    rate = abs(cycles - 1 / 12).max() ** (1 / 80)
    assert rate == pytest.approx(theory.consensus_rate("one_peer_exponential()", 12), rel=0.03)


@pytest.mark.parametrize("policy", [*MESSAGES, "handshake()"])
def test_theory_of_clusters_without_a_server(policy):
    laws = ["gamma(1, 0.3)"] * 5 + ["gamma(3, 0.3)"]
    cluster = Cluster(6, laws, latency=0.5, policy=policy, topology="ring()")
    summary, rate = simulate(cluster, 3000).summary(), theory.throughput_theory(cluster)
    assert summary["throughput"] <= rate.commits * 1.02
    if rate.exact:
        assert summary["throughput"] == pytest.approx(rate.commits, rel=0.03)
    assert theory.queue_theory(cluster) is theory.saturating_workers(cluster) is None
    assert theory.staleness_theory(cluster).mean == 5
    assert summary["staleness_mean"] == pytest.approx(5, rel=0.02)


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
    exchanges = Cluster(7, laws, latency=1, policy="handshake()", topology="ring()")
    for entry in (trace, simulate(exchanges, 200)):
        queue = entry.queue()["in_system"]
        assert queue.iloc[-1] == len(entry.in_flight) and (queue >= 0).all()
        figure, axes = plt.subplots(1, 3)
        draw = plots.timeline, plots.queue_length, plots.staleness_histogram
        for part, function in zip(axes, draw, strict=True):
            function(part, entry)
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


def logged(trace, frame, in_flight):
    """Return a log whose sources are given by worker and job, and what is known beside."""
    pairs = list(zip(trace.frame["worker"], trace.frame["job"], strict=True))

    def named(rows):
        if isinstance(rows, list):
            return [pairs[row] if row in range(len(pairs)) else row for row in rows]
        return rows

    flying = in_flight.assign(row=named(in_flight["row"].tolist()))
    options = {"protocol": "gossip", "workers": trace.workers, "takes_up": trace.takes_up}
    options["in_flight"] = flying.rename(columns={"row": "source"})
    return frame[[*LOGGED, "job"]].assign(sources=frame["sources"].map(named)), options


@pytest.mark.parametrize("policy", ["overlap(2)", "neighbours(beside)", "handshake()"])
def test_recorded_traces_are_put_in_order(policy):
    """The rows of a trace, shuffled; then with clocks that differ."""
    trace = simulate(Cluster(5, Gamma(1, 0.4), latency=0.3, policy=policy, topology="ring()"), 80)
    log, options = logged(trace, trace.frame, trace.in_flight)
    again = recorded(log.drop(columns="job").sample(frac=1, random_state=1), **options)
    pd.testing.assert_frame_equal(again.frame, trace.frame, check_exact=True)
    assert again.in_flight.equals(trace.in_flight) and again.cluster is None
    if policy != "handshake()":
        clock, times = np.array([0, 0.4, 0, -0.2, 0.1]), ["start_time", "send_time", "commit_time"]
        log[times] += clock[log["worker"], None] + 1
        frame = recorded(log, **options, begin=0).frame
        pairs = zip(frame["worker"], frame["job"], strict=True)
        row_of = {pair: row for row, pair in enumerate(pairs)}
        for row in log.itertuples():
            sources = sorted(row_of[pair] for pair in row.sources)
            assert frame["sources"][row_of[row.worker, row.job]] == sources
        assert (np.diff(frame["commit_time"]) >= 0).all()


@pytest.mark.parametrize(
    ("name", "value"), [("row", 100), ("taker", 6), ("weight", 0.0), ("weight", 0.9)]
)
def test_contradictory_messages_in_flight_are_refused(name, value):
    trace = simulate(Cluster(6, Gamma(1, 0.3), latency=2, topology="ring()"), 100)
    in_flight = trace.in_flight.copy()
    in_flight.loc[0, name] = value
    log, options = logged(trace, trace.frame, in_flight)
    with pytest.raises(InputError, match=r"in_flight|more, or less, than all"):
        recorded(log, **options, begin=0.0)


def damaged(trace, name, row, value):
    frame = trace.frame.astype({"sources": object, "weights": object})
    frame.at[row, name] = value
    log, options = logged(trace, frame, trace.in_flight)
    return lambda: recorded(log, **options, begin=0.0)
