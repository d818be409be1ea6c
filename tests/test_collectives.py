"""All-reduces: their times and bytes against messages passed one by one, behind a barrier, and
hidden by computing.
"""

import heapq

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
    """Passes messages between nodes step by step; a step lasts as long as its longest message."""

    def __init__(self, nodes):
        self.values = np.random.default_rng(nodes).normal(size=(nodes, 240))
        self.sum = self.values.sum(axis=0)
        self.sent, self.time = np.zeros(nodes), 0.0

    def step(self, messages):
        """Each of (from, to, slice, add): what is sent is what was there before the step."""
        values = [self.values[source, part].copy() for source, _, part, _ in messages]
        for (source, to, part, add), value in zip(messages, values, strict=True):
            self.values[to, part] = self.values[to, part] + value if add else value
            self.sent[source] += len(value)
        self.time += max(map(len, values)) / BANDWIDTH + LATENCY


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
        upper = np.array([bool(m & distance) for m in members])
        network.step(
            [
                (m, m ^ distance, slice(k := low[m] + length * (not u), k + length), True)
                for m, u in zip(members, upper, strict=True)
            ]
        )
        low += length * upper
        cuts.append(distance)
        distance //= 2
    for distance in reversed(cuts):
        network.step([(m, m ^ distance, slice(low[m], low[m] + length), False) for m in members])
        low = np.minimum(low, low[np.array(members) ^ distance])
        length *= 2


class Rendezvous(Network):
    """Lets the two nodes of a message begin when both have finished their previous messages."""

    def __init__(self, site, seconds):
        super().__init__(len(site))
        self.site, self.seconds, self.far = site, seconds, 0
        self.programs = [[] for _ in site]

    def step(self, messages):
        super().step(messages)
        pairs = {}
        for source, to, part, _ in messages:
            values = len(range(*part.indices(240)))
            pairs.setdefault(frozenset((source, to)), []).append((source, to, values))
            self.far += values * (self.site[source] != self.site[to])
        for pair, sent in pairs.items():
            for node in pair:
                self.programs[node].append((pair, sent))

    def run(self):
        """Return the time at which the last node is free."""
        free, waiting = [(0.0, node) for node in range(len(self.site))], set()
        while free:
            time, node = heapq.heappop(free)
            if not self.programs[node]:
                continue
            pair, sent = self.programs[node].pop(0)
            if pair not in waiting:
                waiting.add(pair)
                continue
            waiting.remove(pair)
            for partner in pair:
                heapq.heappush(
                    free, (time + max(self.seconds(*message) for message in sent), partner)
                )
        return time


def two_level(network, members):
    halves = [members[: len(members) // 2], members[len(members) // 2 :]]
    before = network.time
    for half in halves:  # at the same time
        network.time = before
        ring(network, half)
    ring(network, [half[0] for half in halves])
    before = network.time
    for half in halves:
        network.time = before
        broadcast(network, half)


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        (ring, 2),
        (ring, 6),
        (tree, 2),
        (tree, 5),
        (tree, 8),
        (halving_doubling, 2),
        (halving_doubling, 8),
        (two_level, 8),
    ],
)
def test_times_and_bytes_are_those_of_passed_messages(kind, nodes):
    network, sites = Network(nodes), [nodes // 2] * 2 if kind is two_level else None
    kind(network, list(range(nodes)))
    np.testing.assert_allclose(
        network.values, np.tile(network.sum, (nodes, 1))
    )  # it is an all-reduce
    time = collective_time(kind.__name__, SIZE, nodes, BANDWIDTH, LATENCY, sites=sites)
    assert time == pytest.approx(network.time, rel=1e-12)
    traffic = collective_bytes(kind.__name__, SIZE, nodes, sites)
    assert traffic.total == pytest.approx(network.sent.sum()) and traffic.busiest == pytest.approx(
        network.sent.max()
    )
    if kind is ring:
        assert traffic.busiest == pytest.approx(2 * SIZE * (nodes - 1) / nodes)


@pytest.mark.parametrize(
    ("kind", "sites"),
    [
        (tree, [4, 4]),
        (tree, [1, 3, 4]),
        (tree, [2, 1, 2]),
        (halving_doubling, [4, 4]),
        (halving_doubling, [1, 3, 4]),
    ],
)
def test_messages_between_sites_take_the_time_of_their_pair(kind, sites):
    nodes = sum(sites)
    rng, count = np.random.default_rng(nodes), len(sites)
    bandwidth, latency = rng.uniform(5, 30, (count, count)), rng.uniform(0.5, 4, (count, count))
    for matrix in (bandwidth, latency):
        np.fill_diagonal(matrix, 0)
    site = np.repeat(range(count), sites)

    def seconds(source, to, values):
        pair = site[source], site[to]
        is_near = pair[0] == pair[1]
        rate, delay = (BANDWIDTH, LATENCY) if is_near else (bandwidth[pair], latency[pair])
        return values / rate + delay

    network = Rendezvous(site, seconds)
    kind(network, list(range(nodes)))
    np.testing.assert_allclose(network.values, np.tile(network.sum, (nodes, 1)))
    far = {"far_bandwidth": bandwidth.tolist(), "far_latency": latency}
    time = collective_time(kind.__name__, SIZE, nodes, BANDWIDTH, LATENCY, sites=sites, **far)
    assert time == pytest.approx(network.run(), rel=1e-12)
    assert collective_bytes(kind.__name__, SIZE, nodes, sites).far == pytest.approx(network.far)


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
    narrow = collective_time(
        "ring", SIZE, 8, BANDWIDTH, 0.0, sites=[4, 4], far_bandwidth=BANDWIDTH / 50
    )
    # All 14 pieces pass the narrow link, and the nodes after it wait for them; the last goes round
    # to them.
    assert (
        14 * 50 * SIZE / 8 / BANDWIDTH
        <= narrow
        <= 14 * 50 * SIZE / 8 / BANDWIDTH + 8 * SIZE / 8 / BANDWIDTH
    )
    far = {"far_bandwidth": BANDWIDTH / 50, "far_latency": 2.0}
    levels = collective_time("two_level", SIZE, 8, BANDWIDTH, LATENCY, sites=[4, 4], **far)
    inside = collective_time("ring", SIZE, 4, BANDWIDTH, LATENCY) + 2 * (SIZE / BANDWIDTH + LATENCY)
    assert levels == pytest.approx(inside + SIZE / BANDWIDTH * 50 + 2 * 2.0)
    assert collective_bytes("two_level", SIZE, 8, [4, 4]).far == 2 * SIZE


@pytest.mark.parametrize("compute", ["1", "exponential(1)"])
def test_a_round_is_the_slowest_computation_and_the_all_reduce(compute):
    """Of 32 exponential workers and .7 s: 4.759 s in theory."""
    size = 0.7 * 1e8 * 32 / 62
    cluster = Cluster(
        32, compute, bandwidth=1e8, message_bytes=size, policy="barrier(collective=ring)"
    )
    assert (
        Cluster.from_dict(cluster.to_dict()) == cluster
        and str(cluster.policy) == "barrier(collective=ring)"
    )
    known = theory.throughput_theory(cluster)
    expected = theory.barrier_time(compute, 32) + 0.7
    assert known.exact and 32 / known.commits == pytest.approx(expected)
    rounds = 1000 if "exp" in compute else 30
    found = simulate(cluster, 32 * rounds, seed=0).summary()
    spread = np.sqrt((1 / np.arange(1, 33) ** 2).sum() / rounds) if "exp" in compute else 1e-9
    assert abs(found["duration"] / found["versions"] - expected) < 4 * spread
    assert found["staleness_max"] == 0
    assert found["returning_share"] == pytest.approx(
        0.7 / (found["duration"] / found["versions"]), rel=1e-3
    )


def test_the_living_make_the_all_reduce():
    """By hand: a round is 1 s of computing and the all-reduce of those who are there."""
    near = dict(bandwidth=10.0, message_bytes=10.0, latency=0.1)

    def rounds(collective, workers, failure, **sites):
        cluster = Cluster(
            workers,
            1.0,
            **near,
            **sites,
            policy=f"barrier(collective={collective})",
            failures=[failure],
        )
        frame = simulate(cluster, 60 * workers).frame
        return np.diff(frame["commit_time"][frame["worker"] == 0])

    ring4, ring3, ring2 = (2 * (n - 1) * (1 / n + 0.1) for n in (4, 3, 2))
    left = rounds("ring", 4, "leave(at=50, workers=[3])")
    assert left[0] == pytest.approx(1 + ring4) and left[-1] == pytest.approx(1 + ring3)
    joined = rounds("ring", 4, "join(at=50, workers=[3])")
    assert joined[0] == pytest.approx(1 + ring3) and joined[-1] == pytest.approx(1 + ring4)
    halved = rounds("halving_doubling", 4, "leave(at=50, workers=[3])")
    assert halved[0] == pytest.approx(1 + 1.5 + 0.4)
    assert halved[-1] == pytest.approx(
        1 + (1 + 0.2) + 2 * (1 + 0.1)
    )  # of two, and the third's message there and back
    far = dict(sites=[2, 2], far_latency=1.0, far_bandwidth=1.0)
    assert rounds("two_level", 4, "leave(at=90, site=1)", **far)[-1] == pytest.approx(1 + ring2)
    crashed = rounds("ring", 3, "crash(every=20, lasts=30, workers=[2])")
    assert crashed.min() == pytest.approx(1 + ring2) and crashed[0] == pytest.approx(1 + ring3)


def test_the_bundled_networks_are_those_of_their_papers():
    vgg, resnet = NETWORKS["vgg_a"], NETWORKS["resnet50"]
    assert sum(layer.parameters for layer in vgg) == 132_863_336
    assert sum(layer.operations for layer in vgg) / 2 == pytest.approx(7.61e9, rel=1e-3)
    assert sum(layer.parameters for layer in resnet) == 25_557_032
    assert sum(layer.operations for layer in resnet) / 2 == pytest.approx(3.86e9, rel=1e-3)
    assert len([one for one in resnet if "skip" not in one.name]) == 50


def waits(layers, computing, communicating):
    """Pass an iteration step by step: backward from the last layer, then forward from the first."""
    seconds = (
        computing
        * np.array([layer.operations for layer in layers])
        / sum(layer.operations for layer in layers)
    )
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
        np.testing.assert_allclose(
            bubbles(vgg, computing, spent), waits(vgg, computing, spent), atol=1e-12
        )
    # A layer with the network to itself would wait for .067 s at most; one network takes .15 s for
    # all layers.
    below = np.cumsum([0.0, *(layer.operations for layer in vgg)])[:-1] / sum(
        layer.operations for layer in vgg
    )
    assert max(spent - 0.05 * below) == pytest.approx(0.067, abs=1e-3)
    assert bubbles(vgg, 0.05, spent).sum() == pytest.approx(sum(spent) - 0.05, rel=0.01)
    generator = np.random.default_rng(0)
    for _ in range(50):
        layers = [Layer("", 1, operations) for operations in generator.exponential(size=6)]
        spent = generator.exponential(size=6) ** 3
        np.testing.assert_allclose(
            bubbles(layers, 5.0, spent), waits(layers, 5.0, spent), atol=1e-12
        )


def test_what_computing_hides():
    layers = [Layer("a", 100, 10), Layer("b", 100, 30), Layer("c", 200, 20)]

    def seconds(size):
        return size / 100

    # Backward from 2 to 6 s: c is there at 3.333, b at 5.333, a at 6; one bucket each.
    assert exposed_time(layers, 6.0, 400.0, seconds, bucket_bytes=1) == pytest.approx(
        3 + 1 / 3 + 4 - 6
    )
    assert exposed_time(layers, 6.0, 400.0, seconds, bucket_bytes=1e9) == pytest.approx(
        4.0
    )  # one for all
    # The first bucket ends with c's 200 bytes, the second with a.
    assert exposed_time(layers, 6.0, 400.0, seconds, bucket_bytes=200) == pytest.approx(2.0)
    # PyTorch's first bucket is full at 1 MiB, c; the others at 150 MB: a and b together.
    assert exposed_time(layers, 6.0, 400e6, lambda size: size / 1e8, 150e6) == pytest.approx(2.0)
    assert exposed_time(layers, 6.0, 400.0, seconds) == pytest.approx(
        bubbles(layers, 6.0, [1, 1, 2]).sum()
    )
