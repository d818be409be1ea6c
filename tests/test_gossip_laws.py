"""Laws of gossip: what is conserved on any graph, how fast pairs agree, and what a slow link
costs.
"""

import math

import formulas
import jax
import pandas as pd
import pytest
from world import MESSAGES

from asyncsim import Cluster, methods, problems, replay, simulate, topologies

pytestmark = pytest.mark.usefixtures("float64")


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
    contraction = formulas.pair_contraction(topologies.as_topology(graph).neighbours(n))
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
