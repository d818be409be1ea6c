"""Laws of gossip: what is conserved on any graph, how fast pairs agree, and what a slow link
costs.
"""

import math

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import MESSAGES, gossips

from asyncsim import Cluster, methods, problems, replay, simulate, theory, topologies
from asyncsim.replays.replay import Replay

pytestmark = pytest.mark.usefixtures("float64")


@settings(max_examples=5)
@given(gossips(), st.integers(1, 60), st.integers(0, 5))
def test_what_workers_hold_and_what_is_in_flight_is_conserved(cluster, commits, seed):
    """Of a replay: what workers keep and what is in flight is the central variable, and weights sum
    to the workers.
    """
    trace, n = simulate(cluster, commits, seed), cluster.workers
    kind = (
        {"commit": "dpsgd", "read": "sgp"}[trace.takes_up]
        if cluster.policy.name != "handshake"
        else "adpsgd"
    )
    method = methods.adpsgd(0.1) if kind == "adpsgd" else methods.METHODS[kind](0.1, policy=None)
    problem = problems.quadratic(np.linspace(0.2, 1, 4), start=np.linspace(-1, 2, 4), noise=0.3)
    rows = np.arange(1, commits + 1)
    running = Replay(trace, method, problem, seed, precision="float64", stops=rows, form="single")

    def replicas():
        """Return the vectors, biased ones of push-sum, and their weights."""
        state = jax.tree.map(np.array, running.state.workers.method)
        if kind == "sgp":
            return state.biased + state.update, state.weight
        return state if kind == "adpsgd" else state.replica, np.ones(n)

    sent = []
    for worker, stop in zip(trace.frame["worker"], rows, strict=True):
        running.advance(int(stop))
        sent.append([own[worker] for own in replicas()])
    (own, weights), central = replicas(), np.array(running.state.central)
    if kind == "adpsgd":
        np.testing.assert_allclose(central, own.mean(axis=0), rtol=1e-12, atol=1e-12)
        return
    last = np.full(n, -1)
    last[trace.frame["worker"]] = np.arange(commits)
    kept = np.where(last >= 0, trace.kept_after[last], 1.0)
    flying = [(one.weight, *sent[one.row]) for one in trace.in_flight.itertuples()]
    total = kept @ own + sum((share * vector for share, vector, _ in flying), np.zeros(4))
    np.testing.assert_allclose(n * central, total, rtol=1e-12, atol=1e-12)
    if kind == "sgp":
        mass = sum(share * weight for share, _, weight in flying)
        assert kept @ weights + mass == pytest.approx(n, abs=1e-12)
        assert trace.summary()["in_flight_mass"] == pytest.approx(mass, abs=1e-12)


@pytest.mark.parametrize("graph", ["complete()", pytest.param("ring()", marks=pytest.mark.full)])
def test_consensus_distance_of_adpsgd_is_that_of_the_contraction(graph):
    """Exponential clocks, and gradients that are noise alone: what an exchange takes away a step
    brings back.

    On the complete graph of ``n`` an exchange leaves ``1 - 1 / (n - 1)`` of the expected squared
    distance from the mean, and a step of variance ``s`` adds ``(1 - 1 / n) s``; so in the long run
    it is ``(1 - 1 / n) (n - 1) s``, of which the consensus distance is the mean over the workers.
    On other graphs the contraction is a bound.
    """
    n, size, rate = 8, 400, 0.5
    trace = simulate(
        Cluster(n, "exponential(1)", topology=graph, policy="handshake()"), n * 1_000, seed=2
    )
    problem = problems.custom(
        lambda key: {"x": jax.numpy.zeros(size)},
        lambda params, batch, key: params["x"] @ jax.random.normal(key, (size,), params["x"].dtype),
        name="noise",
    )
    run = replay(
        trace, methods.adpsgd(rate), problem, precision="float64", evaluate_every=5, progress=False
    )
    found = run.evaluations["consensus_distance"].iloc[
        20:
    ]  # 40 commits apart each: (1 - 1 / 7)**40 = 0.002
    contraction = theory.pair_contraction(graph, n)
    added = (1 - 1 / n) * size * rate**2
    expected = added / (1 - contraction) / n
    slack = 5 * found.std() / math.sqrt(len(found))
    if graph == "complete()":
        assert contraction == pytest.approx(1 - 1 / (n - 1), abs=1e-12)
        assert found.mean() == pytest.approx(expected, abs=slack) and slack < 0.05 * expected
    else:
        assert 0.2 * expected < found.mean() < expected + slack


def test_a_slow_link_is_slow():
    """Each message on it, both ways; by rounds of the ring all are as slow; with nobody waiting
    nobody is.
    """
    for text in ("ring()", "adjacency([[0,1,1],[1,0,1],[1,1,0]], metropolis)"):
        topology = topologies.slow_links(text, [(1, 0, 5)])
        assert topologies.as_topology(str(topology)) == topology and "[[0, 1, 5]]" in repr(topology)
    base = {
        "workers": 3,
        "compute": 1.0,
        "latency": 0.5,
        "bandwidth": 8,
        "message_bytes": 2,
        "policy": "neighbours()",
    }
    for slow, lasts in ((1, 1.75), (5, 4.75), (0.5, 1.75)):
        topology = topologies.slow_links("ring()", [[0, 1, slow]])
        trace = simulate(Cluster(**base, topology=topology), 3 * 20)
        times = trace.frame["commit_time"].to_numpy()
        assert (times[-1] - times[2]) / 19 == pytest.approx(lasts)
    meet = {"policy": "handshake()", "topology": topologies.slow_links("ring()", [[0, 1, 5]])}
    frame = simulate(Cluster(**{**base, **meet, "workers": 2}), 1).frame
    assert frame["commit_time"][0] == pytest.approx(1 + 2 * 5 * 0.75)


@pytest.mark.parametrize("policy", [*MESSAGES, "handshake()"])
def test_links_that_are_as_slow_as_all_change_nothing(policy):
    links = [[i, (i + 1) % 5, 1] for i in range(5)]
    options = {
        "workers": 5,
        "compute": "gamma(1, 0.5)",
        "latency": "exponential(0.4)",
        "policy": policy,
    }
    frames = [
        simulate(Cluster(**options, topology=one), 200).frame
        for one in ("ring()", f"slow_links(ring(), {links})")
    ]
    pd.testing.assert_frame_equal(*frames, check_exact=True)
