"""Units, networks that differ by worker, sites and slow links."""

import dataclasses
import json
import warnings

import numpy as np
import pytest

from asyncsim import (
    Cluster,
    SlowLinkWarning,
    Trace,
    barrier,
    failures,
    methods,
    per_worker,
    simulate,
    theory,
    topologies,
)
from asyncsim.base.units import BYTES, RATES, SECONDS, quantity
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.collectives import collective_time
from asyncsim.clusters.laws import Constant, Gamma, parse
from asyncsim.methods import Timing
from asyncsim.study.cell import meet


def throughput(cluster, commits):
    """Return what theory says of the rate of commits, and the rate of a simulation."""
    measured = simulate(cluster, commits).summary()["throughput"]
    return theory.throughput_theory(cluster), measured


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("35ms", SECONDS, 0.035),
        ("1.5e2 us", SECONDS, 1.5e-4),
        ("3", SECONDS, 3),
        ("1e-99999999999999999999999 ms", SECONDS, 0),
    ],
)
def test_quantities_are_the_nearest_floats(text, units, number):
    assert quantity("x", text, units) == number


def test_every_unit_has_its_factor():
    seconds = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1}
    seconds |= {"min": 60, "h": 60 * 60, "d": 24 * 60 * 60}
    powers = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
    sizes = {f"{prefix}B": 1000**power for prefix, power in powers.items()}
    sizes |= {f"{prefix}bit": 1000**power / 8 for prefix, power in powers.items()}
    sizes |= {f"{prefix}iB": 1024**power for prefix, power in zip("KMGT", range(1, 5), strict=True)}
    assert {unit: quantity("x", f"1 {unit}", SECONDS) for unit in SECONDS.factors} == seconds
    assert {unit: quantity("x", f"1 {unit}", BYTES) for unit in BYTES.factors} == sizes
    rates = {unit.removesuffix("/s"): quantity("x", f"1 {unit}", RATES) for unit in RATES.factors}
    assert rates == sizes


def test_laws_have_units_where_they_have_times():
    assert parse("gamma(mean=40 ms, cv=.2)") == Gamma("40 ms", 0.2) == Gamma(0.04, 0.2)
    assert parse("[1 ms, exponential(2 s)]*2")[2] == Constant(0.001)
    assert parse("mixture([1 ms, 2], [1, 3])").mean == pytest.approx(1.50025)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"protocol": "read_then_write", "exclusive": False},
        {"policy": barrier(3)},
        {"topology": "ring()", "policy": "neighbours()"},
        {"topology": "complete()", "policy": "handshake()"},
    ],
)
def test_journeys_last_as_long_as_those_of_their_worker(form, tmp_path):
    with_server = "topology" not in form
    latency, far_bandwidth = per_worker([0.1, "200 ms", 0.1, 0.1]), [1, 2] if with_server else 1
    near = {"latency": latency, "bandwidth": 8, "message_bytes": 2, "sites": [2, 2]}
    cluster = Cluster(4, 1.0, **near, far_latency=0.5, far_bandwidth=far_bandwidth, **form)
    trace = simulate(cluster, 40, 0)
    loaded = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert loaded.cluster == cluster == Cluster.from_dict(cluster.to_dict())
    assert "sites of 2 + 2, far latency 0.5 s, far bandwidth 1" in describe(cluster)
    frame = trace.frame
    worker, later = frame["worker"], frame[frame["job"] > 0]
    up, down = np.array([0.35, 0.45, 2.5, 2.5]), np.array([0.35, 0.45, 1.5, 1.5])
    if not form:
        np.testing.assert_allclose(frame["arrive_time"] - frame["send_time"], up[worker])
        returned = later["start_time"] - later["read_time"]
        np.testing.assert_allclose(returned, down[later["worker"]])
    elif "protocol" in form:
        np.testing.assert_allclose(frame["arrive_time"] - frame["push_time"], (up + down)[worker])
    elif cluster.policy.name == "neighbours":
        # The last of both neighbours' messages: 0.5 + 2 s from the other site.
        assert np.diff(frame["commit_time"][worker == 0])[:5] == pytest.approx(3.5)


def test_theory_knows_of_each_workers_journey():
    far = Cluster(4, 1.0, sites=[2, 2], far_latency=0.5)
    rate, measured = throughput(far, 3_000)
    assert rate.exact and rate.computing == pytest.approx(0.75)
    assert rate.commits == pytest.approx(2 + 2 / 2)
    assert measured == pytest.approx(rate.commits, rel=0.01)
    seldom = dataclasses.replace(far, far_every=4)
    rate, measured = throughput(seldom, 3_000)
    assert rate.commits == pytest.approx(4 / 1.25)
    assert measured == pytest.approx(rate.commits, rel=0.01)
    frame = simulate(seldom, 100).frame
    ways = np.where((frame["job"] + 1) % 4, 0.0, 0.5)
    np.testing.assert_allclose(frame["arrive_time"] - frame["send_time"], ways, atol=1e-9)
    unlike = Cluster(4, "exponential(1)", "exponential(1)", per_worker([0, 0, 1, 1]))
    assert theory.queue_theory(unlike) is None
    barriers = theory.throughput_theory(dataclasses.replace(far, policy=barrier()))
    assert barriers.commits == pytest.approx(2) and not barriers.exact
    link = {"bandwidth": 4, "message_bytes": 1, "far_bandwidth": 2, "shared_bandwidth": True}
    rate, measured = throughput(Cluster(4, 0.1, **link, sites=[2, 2], far_latency=1), 2_000)
    assert 3 < measured <= rate.commits * 1.001


#: 4 workers near the server and 8 far ones; and 4 workers at two sites.
TWO = dict(workers=12, compute=1.0, sites=[4, 8], bandwidth=100, message_bytes=1, far_bandwidth=1)
EQUAL = dict(workers=4, compute=0.1, sites=[2, 2], bandwidth=1, message_bytes=1, far_bandwidth=1)


@pytest.mark.parametrize(
    ("sites", "policy", "rate", "least", "most"),
    [
        # Near workers take 1 + 2/100 s each; far ones share a link that takes 1 s a message.
        (TWO, "asynchronous()", 4 / 1.02 + 1, 0.99, 1.001),
        # Nobody is ahead of the far workers for ever, each of whom has an eighth of their link.
        (TWO, "bounded_staleness(3)", 12 / 8, 0.99, 1.002),
        (TWO, "barrier()", 12 / 8, 0.75, 1.002),
        # The two links of equal sites carry half of a version each: 2 s of messages, and not 4.
        (EQUAL, "barrier()", None, 0.6, 1),
        (EQUAL, "barrier(count=3)", None, 0.6, 1),
    ],
)
def test_a_sites_link_bounds_the_workers_of_that_site(sites, policy, rate, least, most):
    known, measured = throughput(Cluster(**sites, shared_bandwidth=True, policy=policy), 4_000)
    assert not known.exact and (rate is None or known.commits == pytest.approx(rate))
    assert least * known.commits < measured < most * known.commits


def test_a_worker_with_a_link_of_its_own_is_bounded_by_it():
    """Two messages of 1 s beside computing."""
    assert theory.throughput_theory(Cluster(**TWO)).commits == pytest.approx(4 / 1.02 + 8 / 3)


def test_all_reduces_know_of_sites():
    near = {"latency": 0.1, "bandwidth": 8.0, "message_bytes": 4.0}
    far = {"sites": [2, 2], "far_bandwidth": 2.0, "far_latency": 1.0}
    cluster = Cluster(4, 1.0, **near, **far, policy="barrier(collective=two_level)")
    expected = collective_time("two_level", 4.0, 4, 8.0, 0.1, **far)
    assert cluster.latency_down == Constant(expected)
    assert cluster.ways[0].latency[3] == Constant(0.0)


def test_a_bandwidth_for_which_messages_take_for_ever_is_questioned():
    with pytest.warns(SlowLinkWarning, match=r"one message takes 200 s, a computation 1 s"):
        Cluster(4, 1.0, bandwidth=100, message_bytes="20 kB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cluster(4, 1.0, bandwidth="100 kbit/s", message_bytes="20 kB")


def test_failures_have_units_and_sites():
    text = "crash(every=exponential(2 h), lasts=2 min, detect=30 s, site=1)"
    crash = failures.crash("exponential(7200)", 120, detect=30, site=1)
    cluster = Cluster(4, 1.0, sites=[2, 2], far_latency="40 ms", far_every=2, failures=[text])
    assert cluster.failures == (crash,) and Cluster.from_dict(cluster.to_dict()) == cluster


def test_ten_visits_to_a_server_at_the_first_of_three_sites_by_hand(tmp_path):
    """Worker 0 is at the server, worker 1 is 30 s and 10 s away, worker 2 is 5 s and 20 s away.

    Up: 12 bytes at 6 bytes/s from site 1, 3 bytes/s from site 2, and in no time inside. Down: at
    4 and 2 bytes/s.
    """
    latency = [[0, 10, 20], ["30 s", 0, 1], [5, 1, 0]]
    cluster = Cluster(
        3,
        [18.0, 10.0, 11.0],
        service=1.0,
        message_bytes=12,
        sites=[1, 1, 1],
        far_latency=latency,
        far_bandwidth=[[0, 4, 2], [6, 0, 1], ["24 bit/s", 1, 0]],
    )
    frame = simulate(cluster, 10).frame
    # Round trips: 1 computes 10, goes 32, is served 1, returns 13; 0: 18 and 1; 2: 11, 9, 1, 26.
    assert frame["worker"].tolist() == [0, 2, 0, 1, 0, 2, 0, 0, 1, 0]
    assert frame["arrive_time"].tolist() == [18, 20, 37, 42, 56, 67, 75, 94, 98, 113]
    np.testing.assert_array_equal(frame["commit_time"], frame["arrive_time"] + 1)
    array = np.array([[0, 10, 20], [30, 0, 1], [5, 1, 0]])
    for matrix in (f"{latency}".replace("'", ""), array):
        assert dataclasses.replace(cluster, far_latency=matrix) == cluster
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    text = "1 + 1 + 1, far latency 1 to 30 s by pair, far bandwidth 1 to 6 by pair (bytes/s)"
    assert text in describe(cluster)
    rate = theory.throughput_theory(cluster).commits
    assert rate == pytest.approx(1 / 56 + 1 / 19 + 1 / 47)
    # Two workers stay as far from the server as they were; a lone one has no network.
    pair = meet(cluster, Timing(workers=2))
    arrivals = simulate(pair, 4).frame["arrive_time"].tolist()
    assert pair.sites == (1, 1) and arrivals == [18, 37, 42, 56]
    alone = meet(cluster, methods.sgd().timing)
    assert alone.sites is None and simulate(alone, 2).frame["arrive_time"].tolist() == [18, 37]


def test_a_reply_to_a_dead_worker_is_no_visit():
    """Worker 0 dies at 1.4, before the reply of 1.6; its second computation makes the far visit."""
    far = {"far_latency": 1.0, "sites": (1, 1), "far_every": 2}
    crash = "crash(every=1.4, lasts=0.05, workers=[0])"
    cluster = Cluster(2, 1.0, latency=0.3, **far, failures=crash)
    frame = simulate(cluster, 4).accepted.frame.query("worker == 0")
    # Back at 1.45, the newest version after 0.3, a computation, and the far way.
    assert frame["arrive_time"].tolist() == pytest.approx([1.3, 1.45 + 0.3 + 1 + 1])


# Slow links without a server


def test_a_slow_link_is_slow():
    """Each message on it, both ways; by rounds of the ring all are as slow."""
    for text in ("ring()", "adjacency([[0,1,1],[1,0,1],[1,1,0]], metropolis)"):
        topology = topologies.slow_links(text, [(1, 0, 5)])
        assert topologies.as_topology(str(topology)) == topology and "[[0, 1, 5]]" in repr(topology)
    network = {"latency": 0.5, "bandwidth": 8, "message_bytes": 2}
    for slow, lasts in ((1, 1.75), (5, 4.75), (0.5, 1.75)):
        topology = topologies.slow_links("ring()", [[0, 1, slow]])
        cluster = Cluster(3, 1.0, **network, policy="neighbours()", topology=topology)
        times = simulate(cluster, 3 * 20).frame["commit_time"].to_numpy()
        assert (times[-1] - times[2]) / 19 == pytest.approx(lasts)
    meet = {"policy": "handshake()", "topology": topologies.slow_links("ring()", [[0, 1, 5]])}
    frame = simulate(Cluster(2, 1.0, **network, **meet), 1).frame
    assert frame["commit_time"][0] == pytest.approx(1 + 2 * 5 * 0.75)
