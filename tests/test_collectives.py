"""All-reduces: their times and bytes against messages passed one by one, behind a barrier, and
hidden by computing.
"""

import numpy as np
import pytest

from asyncsim import Cluster, simulate, theory
from asyncsim.clusters.collectives import (
    NETWORKS,
    Layer,
    bubbles,
    collective_bytes,
    collective_time,
    exposed_time,
)

BANDWIDTH, LATENCY, SIZE = 40.0, 0.3, 240.0


class Network:
    """Passes messages between nodes: a step of two nodes begins when both have ended theirs before.

    ``site``: of each node. ``seconds``: what a message takes, from its source, target and size.
    """

    def __init__(self, site, seconds):
        self.site, self.seconds = site, seconds
        self.values = np.random.default_rng(len(site)).normal(size=(len(site), 240))
        self.sum = self.values.sum(axis=0)
        self.sent, self.free, self.far = np.zeros(len(site)), np.zeros(len(site)), 0

    def step(self, messages):
        """Each of (from, to, slice, add): what is sent is what was there before the step."""
        values = [self.values[source, part].copy() for source, _, part, _ in messages]
        ends = {}
        for (source, to, part, add), value in zip(messages, values, strict=True):
            self.values[to, part] = self.values[to, part] + value if add else value
            self.sent[source] += len(value)
            self.far += len(value) * (self.site[source] != self.site[to])
            begin = max(self.free[source], self.free[to])
            for node in (source, to):
                end = begin + self.seconds(source, to, len(value))
                ends[node] = max(end, ends.get(node, 0.0))
        for node, end in ends.items():
            self.free[node] = end


def ring(network, members):
    count = len(members)
    parts = [slice(240 * k // count, 240 * (k + 1) // count) for k in range(count)]
    for step in range(2 * (count - 1)):
        add, ahead = step < count - 1, step if step < count - 1 else step - count
        network.step(
            [
                (m, members[(i + 1) % count], parts[(i - ahead) % count], add)
                for i, m in enumerate(members)
            ]
        )


def broadcast(network, members):
    have = 1
    while have < len(members):
        pairs = zip(members[:have], members[have : 2 * have], strict=False)
        network.step([(source, to, slice(None), False) for source, to in pairs])
        have *= 2


def tree(network, members):
    have = 1 << (len(members) - 1).bit_length()
    while have > 1:
        have //= 2
        pairs = zip(members[have : 2 * have], members[:have], strict=False)
        network.step([(source, to, slice(None), True) for source, to in pairs])
    broadcast(network, members)


def halving_doubling(network, members):
    low, length, cuts = np.zeros(len(members), int), 240, []
    distance = len(members) // 2
    while distance:
        length //= 2
        upper = np.array(members) & distance > 0
        sent = low + length * ~upper
        network.step([(m, m ^ distance, slice(sent[m], sent[m] + length), True) for m in members])
        low += length * upper
        cuts.append(distance)
        distance //= 2
    for distance in reversed(cuts):
        network.step([(m, m ^ distance, slice(low[m], low[m] + length), False) for m in members])
        low = np.minimum(low, low[np.array(members) ^ distance])
        length *= 2


def two_level(network, members):
    halves = [members[: len(members) // 2], members[len(members) // 2 :]]
    for half in halves:
        ring(network, half)
    ring(network, [half[0] for half in halves])
    for half in halves:
        broadcast(network, half)


@pytest.mark.parametrize(
    ("kind", "sites"),
    [
        (ring, [2]),
        (ring, [6]),
        (tree, [2]),
        (tree, [5]),
        (tree, [8]),
        (tree, [4, 4]),
        (tree, [1, 3, 4]),
        (tree, [2, 1, 2]),
        (halving_doubling, [2]),
        (halving_doubling, [8]),
        (halving_doubling, [4, 4]),
        (halving_doubling, [1, 3, 4]),
        (two_level, [4, 4]),
    ],
)
def test_times_and_bytes_are_those_of_passed_messages(kind, sites):
    """Between sites a message takes the time of their pair; here all are near in two levels."""
    nodes, count, rng = sum(sites), len(sites), np.random.default_rng(sum(sites))
    bandwidth, latency = rng.uniform(5, 30, (count, count)), rng.uniform(0.5, 4, (count, count))
    is_near = np.eye(count, dtype=bool) | (kind is two_level)
    rate, delay = np.where(is_near, BANDWIDTH, bandwidth), np.where(is_near, LATENCY, latency)
    site = np.repeat(range(count), sites)

    def seconds(source, to, values):
        pair = site[source], site[to]
        return values / rate[pair] + delay[pair]

    network = Network(site, seconds)
    kind(network, list(range(nodes)))
    # It is an all-reduce.
    np.testing.assert_allclose(network.values, np.tile(network.sum, (nodes, 1)))
    options = {"sites": sites if count > 1 else None}
    traffic = collective_bytes(kind.__name__, SIZE, nodes, **options)
    if count > 1 and kind is not two_level:
        np.fill_diagonal(bandwidth, 0)
        np.fill_diagonal(latency, 0)
        options |= {"far_bandwidth": bandwidth.tolist(), "far_latency": latency}
    time = collective_time(kind.__name__, SIZE, nodes, BANDWIDTH, LATENCY, **options)
    assert time == pytest.approx(network.free.max(), rel=1e-12)
    sent = network.sent
    assert (traffic.total, traffic.busiest) == pytest.approx((sent.sum(), sent.max()))
    assert count == 1 or traffic.far == pytest.approx(network.far)


def test_all_reduces_between_three_sites_by_hand():
    far = {"far_latency": [[0, 5, 1], [5, 0, 2], [3, 2, 0]], "sites": [1, 1, 2]}
    # Four steps around the leaders, of 5, 2 and 3 s: the longest way of four messages.
    assert collective_time("two_level", 0, 4, **far) == 5 + 2 + 3 + 5
    # Three nodes: two and one more, before and after.
    assert collective_time("halving_doubling", 8.0, 3, 2.0, 0.5) == 2 * 4.5 + 4.0 + 2 * 0.5


def test_the_pipelined_ring_hides_latency_between_sites():
    sites = {"sites": [24, 24, 16], "far_bandwidth": 1.25e8}
    far = collective_time("ring", 6e8, 64, 1.25e10, 0.0, far_latency=0.03, **sites)
    assert far == pytest.approx(126 * 6e8 / 64 / 1.25e8 + 0.03)  # 9.48 s, and no 126 latencies
    far = collective_time("ring", 6e8, 64, 1.25e10, 0.0, far_latency=3.0, **sites)
    mean = (61 * 6e8 / 64 / 1.25e10 + 3 * (6e8 / 64 / 1.25e8 + 3.0)) / 64
    assert 126 * mean <= far <= 128 * mean + 3.1


def test_between_sites_the_ring_is_as_quick_as_its_slowest_link_and_two_levels_pass_it_twice():
    near = collective_time("ring", SIZE, 8, BANDWIDTH, LATENCY)
    same = collective_time("ring", SIZE, 8, BANDWIDTH, LATENCY, sites=[3, 5])
    assert same == pytest.approx(near, rel=1e-12)
    far, piece = {"far_bandwidth": BANDWIDTH / 50}, SIZE / 8 / BANDWIDTH
    narrow = collective_time("ring", SIZE, 8, BANDWIDTH, 0.0, sites=[4, 4], **far)
    # All 14 pieces pass the narrow link, and the nodes after it wait for them; the last goes round
    # to them.
    assert 14 * 50 * piece <= narrow <= 14 * 50 * piece + 8 * piece
    far["far_latency"] = 2.0
    levels = collective_time("two_level", SIZE, 8, BANDWIDTH, LATENCY, sites=[4, 4], **far)
    inside = collective_time("ring", SIZE, 4, BANDWIDTH, LATENCY) + 2 * (SIZE / BANDWIDTH + LATENCY)
    assert levels == pytest.approx(inside + SIZE / BANDWIDTH * 50 + 2 * 2.0)


@pytest.mark.parametrize("compute", ["1", "exponential(1)"])
def test_a_round_is_the_slowest_computation_and_the_all_reduce(compute):
    """Of 32 exponential workers and .7 s: 4.759 s in theory."""
    size = 0.7 * 1e8 * 32 / 62
    policy = "barrier(collective=ring)"
    cluster = Cluster(32, compute, bandwidth=1e8, message_bytes=size, policy=policy)
    assert Cluster.from_dict(cluster.to_dict()) == cluster and str(cluster.policy) == policy
    rate, expected = theory.throughput_theory(cluster), theory.barrier_time(compute, 32) + 0.7
    assert rate.exact and 32 / rate.commits == pytest.approx(expected)
    rounds = 1000 if "exp" in compute else 30
    summary = simulate(cluster, 32 * rounds, seed=0).summary()
    spread = np.sqrt((1 / np.arange(1, 33) ** 2).sum() / rounds) if "exp" in compute else 1e-9
    duration = summary["duration"] / summary["versions"]
    assert abs(duration - expected) < 4 * spread
    assert summary["staleness_max"] == 0
    assert summary["returning_share"] == pytest.approx(0.7 / duration, rel=1e-3)


def test_the_living_make_the_all_reduce():
    """By hand: a round is 1 s of computing and the all-reduce of those who are there."""
    near = {"bandwidth": 10.0, "message_bytes": 10.0, "latency": 0.1}

    def first_and_last(collective, failure, workers=4, **sites):
        policy = f"barrier(collective={collective})"
        cluster = Cluster(workers, 1.0, **near, **sites, policy=policy, failures=[failure])
        frame = simulate(cluster, 60 * workers).frame
        durations = np.diff(frame["commit_time"][frame["worker"] == 0])
        return durations[[0, -1]].tolist()

    ring4, ring3, ring2 = (1 + 2 * (n - 1) * (1 / n + 0.1) for n in (4, 3, 2))
    left = first_and_last("ring", "leave(at=50, workers=[3])")
    assert left == pytest.approx([ring4, ring3])
    joined = first_and_last("ring", "join(at=50, workers=[3])")
    assert joined == pytest.approx([ring3, ring4])
    # Of two, and the third's message there and back.
    halving3 = 1 + (1 + 0.2) + 2 * (1 + 0.1)
    left = first_and_last("halving_doubling", "leave(at=50, workers=[3])")
    assert left == pytest.approx([1 + 1.5 + 0.4, halving3])
    far = {"sites": [2, 2], "far_latency": 1.0, "far_bandwidth": 1.0}
    left = first_and_last("two_level", "leave(at=90, site=1)", **far)
    assert left[1] == pytest.approx(ring2)
    crashed = first_and_last("ring", "crash(every=20, lasts=1e6, workers=[2])", 3)
    assert crashed == pytest.approx([ring3, ring2])


def test_the_bundled_networks_are_those_of_their_papers():
    vgg, resnet = NETWORKS["vgg_a"], NETWORKS["resnet50"]
    assert sum(layer.parameters for layer in vgg) == 132_863_336
    assert sum(layer.operations for layer in vgg) / 2 == pytest.approx(7.61e9, rel=1e-3)
    assert sum(layer.parameters for layer in resnet) == 25_557_032
    assert sum(layer.operations for layer in resnet) / 2 == pytest.approx(3.86e9, rel=1e-3)
    assert len([layer for layer in resnet if "skip" not in layer.name]) == 50


def waits(layers, computing, communicating):
    """Pass an iteration step by step: backward from the last layer, then forward from the first."""
    operations = np.array([layer.operations for layer in layers])
    seconds = computing * operations / operations.sum()
    left, total = np.zeros(len(layers)), np.zeros(len(layers))

    def send(time):
        for k in range(len(layers)):  # lower layers first
            sent = min(left[k], time)
            left[k], time = left[k] - sent, time - sent

    for k in reversed(range(len(layers))):
        send(seconds[k] * 2 / 3)
        left[k] = communicating[k]
    for k in range(len(layers)):
        total[k] = left[: k + 1].sum()
        send(total[k] + seconds[k] / 3)
    return total


def test_layers_share_the_network():
    vgg = NETWORKS["vgg_a"]
    spent = [collective_time("ring", 4.0 * layer.parameters, 64, 7e9) for layer in vgg]
    for computing in (0.0, 0.05, 0.1, 1.0):
        expected = waits(vgg, computing, spent)
        np.testing.assert_allclose(bubbles(vgg, computing, spent), expected, atol=1e-12)
    # A layer with the network to itself would wait for .067 s at most; one network takes .15 s for
    # all layers.
    operations = np.array([layer.operations for layer in vgg])
    below = (np.cumsum(operations) - operations) / operations.sum()
    assert max(spent - 0.05 * below) == pytest.approx(0.067, abs=1e-3)
    assert bubbles(vgg, 0.05, spent).sum() == pytest.approx(sum(spent) - 0.05, rel=0.01)
    generator = np.random.default_rng(0)
    for _ in range(50):
        layers = [Layer("", 1, operations) for operations in generator.exponential(size=6)]
        spent = generator.exponential(size=6) ** 3
        expected = waits(layers, 5.0, spent)
        np.testing.assert_allclose(bubbles(layers, 5.0, spent), expected, atol=1e-12)


def test_what_computing_hides():
    layers = [Layer("a", 100, 10), Layer("b", 100, 30), Layer("c", 200, 20)]

    def exposed(bucket, size=400.0, rate=100):
        return exposed_time(layers, 6.0, size, lambda sent: sent / rate, bucket)

    # Backward from 2 to 6 s: c is there at 3.333, b at 5.333, a at 6; one bucket each.
    assert exposed(1) == pytest.approx(3 + 1 / 3 + 4 - 6)
    assert exposed(1e9) == pytest.approx(4.0)  # one for all
    # The first bucket ends with c's 200 bytes, the second with a.
    assert exposed(200) == pytest.approx(2.0)
    # PyTorch's first bucket is full at 1 MiB, c; the others at 150 MB: a and b together.
    assert exposed(150e6, 400e6, 1e8) == pytest.approx(2.0)
    assert exposed(None) == pytest.approx(bubbles(layers, 6.0, [1, 1, 2]).sum())
