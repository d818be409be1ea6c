"""What a slow link costs gossip."""

import pandas as pd
import pytest
from world import MESSAGES

from asyncsim import Cluster, simulate, topologies

pytestmark = pytest.mark.usefixtures("float64")


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
