"""Time without a server: topologies, traces against a plain loop, conservation of shares, and refusals."""

import heapq
import math
from collections import deque

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsim import Cluster, Gamma, InputError, Trace, plots, recorded, simulate, theory, topologies
from asyncsim.base.streams import Streams
from asyncsim.simulation.delays import delays

TOPOLOGIES = ["ring()", "exponential()", "one_peer_exponential()", "complete()", "base2()", "random_regular(2, seed=3)"]
MESSAGES = ["asynchronous()", "neighbours()", "neighbours(beside)", "overlap(1)", "overlap(3)"]


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
        if topology.degree is None or topology.degree < workers:
            matrices = topology.matrices(workers)
            assert (matrices >= 0).all()
            np.testing.assert_allclose(matrices.sum(axis=1), 1, atol=1e-15)
            np.testing.assert_allclose(matrices.sum(axis=2), 1, atol=1e-15)  # each of these is doubly stochastic


def test_one_peer_exponential_averages_powers_of_two_exactly():
    for workers in (2, 4, 8, 16, 64):
        assert (product(topologies.one_peer_exponential(), workers) == 1 / workers).all()
    assert abs(product(topologies.one_peer_exponential(), 12) - 1 / 12).max() == pytest.approx(0.042, abs=5e-4)


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
    assert uniform[:, 1].tolist() == [0.5, 0.5, 0, 0] and uniform[0].tolist() == [0.25, 0.5, 0.5, 0.5]
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
        expected = theory.ring_second_eigenvalue(workers)
        assert theory.second_eigenvalue("ring()", workers) == pytest.approx(expected, abs=1e-12)
        assert theory.spectral_gap("ring()", workers) == pytest.approx(1 - expected, abs=1e-12)
    assert theory.rounds_to_average("one_peer_exponential()", 16) == 4
    assert theory.rounds_to_average("one_peer_exponential()", 12) is None
    assert theory.rounds_to_average("base2()", 25) == len(topologies.base2().edges(25))
    assert theory.spectral_gap("base2()", 25) == theory.spectral_gap("complete()", 25) == 1.0
    gaps = [theory.spectral_gap(one, 25) for one in ("ring()", "one_peer_exponential()", "exponential()")]
    assert gaps == sorted(gaps)
    # What is left after many cycles.
    product_ = np.linalg.matrix_power(product(topologies.one_peer_exponential(), 12), 20)
    left = abs(product_ - 1 / 12).max() ** (1 / 80)
    assert left == pytest.approx(theory.consensus_rate("one_peer_exponential()", 12), rel=0.03)


def test_an_exchange_contracts():
    """On the complete graph exactly so in the mean; averaged over pairs, without sampling."""
    assert theory.pair_contraction("complete()", 16) == pytest.approx(1 - 1 / 15, abs=1e-12)
    x = np.random.default_rng(0).normal(size=6)
    x -= x.mean()
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    after = [sum(x**2) - (x[i] - x[j]) ** 2 / 2 for i, j in pairs]
    assert np.mean(after) == pytest.approx((1 - 1 / 5) * sum(x**2), rel=1e-12)
    # And along a trace, K sigma with a standard deviation over seeds.
    ratios = []
    for seed in range(40):
        frame = simulate(Cluster(16, "exponential(1)", policy="handshake()", topology="complete()"), 200, seed).frame
        x = np.random.default_rng(seed).normal(size=16)
        x -= x.mean()
        for i, j in zip(frame["worker"], frame["partner"], strict=True):
            before = x @ x
            x[[i, j]] = x[[i, j]].mean()
            ratios.append(x @ x / before)
    assert np.mean(ratios) == pytest.approx(1 - 1 / 15, abs=5 * np.std(ratios) / math.sqrt(len(ratios)))


def test_theory_of_clusters_without_a_server():
    laws = ["gamma(1, 0.3)"] * 5 + ["gamma(3, 0.3)"]
    for policy in (*MESSAGES, "handshake()"):
        cluster = Cluster(6, laws, latency=0.5, policy=policy, topology="ring()")
        numbers, expected = simulate(cluster, 3000).summary(), theory.throughput_theory(cluster)
        slack = 0.03 if expected.exact else 0.0
        assert numbers["throughput"] <= expected.commits * (1 + 0.02)
        assert not expected.exact or numbers["throughput"] == pytest.approx(expected.commits, rel=slack)
        assert theory.queue_theory(cluster) is theory.saturating_workers(cluster) is None
        assert theory.staleness_theory(cluster).mean == 5 == pytest.approx(numbers["staleness_mean"], rel=0.02)


def test_handshakes_travel():
    """By hand: an exchange of 2 s holds two of 16 replicas, so that 4 end a second; without travel 16 would."""
    assert theory.throughput_theory(Cluster(16, 1.0, policy="handshake()", topology="ring()")).commits == 16
    for topology in ("ring()", "complete()"):
        cluster = Cluster(16, 1.0, latency=1.0, policy="handshake()", topology=topology)
        assert theory.throughput_theory(cluster).commits == pytest.approx(4)
        assert 2 <= simulate(cluster, 3_000).summary()["throughput"] <= 4
    # Short exchanges hold hardly anyone: each worker takes 1 + 2 * (0.1 + 1 / 20) s.
    cluster = Cluster(16, 1.0, latency=0.1, bandwidth=20, message_bytes=1, policy="handshake()", topology="ring()")
    assert theory.throughput_theory(cluster).commits == pytest.approx(16 / 1.3)
    # A line of four at two sites: the outer workers exchange in 0.2 s, the inner ones half of the time in 2 s.
    line = topologies.adjacency(np.eye(4, k=1) + np.eye(4, k=-1))
    apart = Cluster(4, 1.0, latency=0.1, sites=[2, 2], far_latency=1.0, policy="handshake()", topology=line)
    assert theory.throughput_theory(apart).commits == pytest.approx(2 / 1.2 + 2 / 2.1)
    assert simulate(apart, 3_000).summary()["throughput"] <= theory.throughput_theory(apart).commits


ARRIVE, APPLY, GO_ON = range(3)


def plain(cluster, commits, seed):
    """The usual loop: an event for each arrival, and a look at who may go on after each."""
    n, policy = cluster.workers, cluster.policy
    matrices = cluster.topology.matrices(n)
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency = delays([cluster.latency_up] * n, seed, "latency up")
    beside = policy.mix == "beside"
    events, rows, number = [], [], [0] * n
    box, idle, start, end = [[] for _ in range(n)], {}, [0.0] * n, [0.0] * n
    taken = [[] for _ in range(n)]

    def compute(i, now):
        start[i], end[i] = now, now + duration(i)
        heapq.heappush(events, (end[i], APPLY if not beside else GO_ON, i, None))

    def may_go_on(i):
        if policy.name == "asynchronous":
            return True
        job = number[i] - 1 - (policy.steps or 0)
        if job < 0:
            return True
        needed = np.count_nonzero(matrices[job % len(matrices)][i]) - (matrices[job % len(matrices)][i, i] > 0)
        return sum(k == job for _, k, _ in received[i]) == needed

    received = [[] for _ in range(n)]  # whatever has come: (row, job, share)
    for i in range(n):
        compute(i, 0.0)
    while len(rows) < commits:
        now, kind, i, message = heapq.heappop(events)
        if kind == ARRIVE:
            box[i].append(message)
            received[i].append(message)
            if i in idle and may_go_on(i):
                del idle[i]
                heapq.heappush(events, (now, APPLY if beside else GO_ON, i, "go"))
        elif kind == GO_ON and message is None:  # a gradient beside the messages, or a worker done: go on if it can
            if may_go_on(i):
                heapq.heappush(events, (now, APPLY if beside else GO_ON, i, "go"))
            else:
                idle[i] = True
        else:
            if kind == GO_ON or beside:
                job = number[i] - 1
                taken[i] = sorted(m for m in box[i] if policy.name != "neighbours" or m[1] == job)
                box[i] = [m for m in box[i] if m not in taken[i]]
            if kind == GO_ON:
                compute(i, now)
                continue
            shares = matrices[number[i] % len(matrices)][:, i]
            for taker in np.flatnonzero(shares):
                if taker != i:
                    arrives = now + latency(i)
                    heapq.heappush(events, (arrives, ARRIVE, int(taker), (len(rows), number[i], shares[taker])))
            rows.append((i, start[i], end[i], now, [m[0] for m in taken[i]], [m[2] for m in taken[i]], -1))
            taken[i], number[i] = [], number[i] + 1
            if beside:
                compute(i, now)
            else:
                heapq.heappush(events, (now, GO_ON, i, None))
    return rows


def plain_pairs(cluster, commits, seed):
    """Exchanges that queue at both replicas, and begin when they are the first at both."""
    n = cluster.workers
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency = delays([cluster.latency_up] * n, seed, "latency up")
    near = cluster.topology.neighbours(n)
    queues, events, rows, number = [deque() for _ in range(n)], [], [], [0] * n
    start, end = [0.0] * n, [0.0] * n

    def compute(i, now):
        start[i], end[i] = now, now + duration(i)
        heapq.heappush(events, (end[i], 1, i, None))

    def begin(pair, now):
        if queues[pair[0]][0] == pair == queues[pair[1]][0]:
            heapq.heappush(events, (now + latency(pair[0]) + latency(pair[0]), 0, pair[0], pair))

    for i in range(n):
        compute(i, 0.0)
    while len(rows) < commits:
        now, kind, i, pair = heapq.heappop(events)
        if kind == 1:
            block, place = divmod(number[i], 64)
            drawn = Streams(seed, "partner").generator(i, block).integers(len(near[i]), size=64)
            pair = (i, near[i][drawn[place]], number[i])
            queues[i].append(pair)
            queues[pair[1]].append(pair)
            begin(pair, now)
        else:
            rows.append((i, start[i], end[i], now, [], [], pair[1]))
            number[i] += 1
            for queue in (queues[i], queues[pair[1]]):
                queue.popleft()
            for first in {queue[0] for queue in (queues[i], queues[pair[1]]) if queue}:
                begin(first, now)
            compute(i, now)
    return rows


@pytest.mark.parametrize("policy", [*MESSAGES, "handshake()"])
@pytest.mark.parametrize("latency", ["0", "0.3", "exponential(2)"])
def test_traces_are_those_of_a_plain_loop(policy, latency):
    for topology, workers in (("ring()", 5), ("one_peer_exponential()", 6), ("base2()", 5), ("complete()", 1)):
        if policy == "handshake()" and (topology.startswith("one") or workers == 1):
            continue
        for law in (["gamma(1, 0.5)", "exponential(3)"] * 3)[:workers], "1":
            if law == "1" and policy == "handshake()" and latency != "0":
                continue  # exchanges that end at one instant may be written down in either order
            law = law if len(law) > 1 else law[0]
            cluster = Cluster(workers, law, latency=latency, policy=policy, topology=topology)
            frame = simulate(cluster, 150, seed=4).frame
            names = ["worker", "start_time", "send_time", "commit_time", "sources", "weights", "partner"]
            expected = (plain_pairs if policy == "handshake()" else plain)(cluster, 150, 4)
            pd.testing.assert_frame_equal(frame[names], pd.DataFrame(expected, columns=names), check_exact=True)


@st.composite
def gossips(draw):
    """A cluster with a random, strongly connected graph."""
    workers = draw(st.integers(1, 6))
    policy = draw(st.sampled_from([*MESSAGES, "handshake()"]))
    matrix = np.array(draw(st.lists(st.integers(0, 1), min_size=workers**2, max_size=workers**2)))
    matrix = matrix.reshape(workers, workers) | np.eye(workers, k=1, dtype=int)
    matrix[-1, 0] = 1
    if policy == "handshake()" or draw(st.booleans()):
        matrix = matrix | matrix.T
    latency = draw(st.sampled_from(["0", "0.7", "exponential(1.5)", "uniform(0, 2)"]))
    law = draw(st.sampled_from(["1", "gamma(1, 0.3)", "exponential(1)", "empirical([0, 1, 2])"]))
    topology = topologies.adjacency(matrix)
    return Cluster(workers, law, latency=latency, window=draw(st.integers(1, 2)), policy=policy, topology=topology)


@settings(max_examples=60, deadline=None)
@given(gossips(), st.integers(1, 80), st.integers(0, 5))
def test_shares_are_conserved(cluster, commits, seed):
    """The weights of push-sum, sent along the trace, sum to the number of workers with what is in flight."""
    trace = simulate(cluster, commits, seed)
    frame, longer = trace.frame, simulate(cluster, commits + 40, seed)
    pd.testing.assert_frame_equal(longer.frame.head(commits), frame, check_exact=True)
    weight, sent = np.ones(cluster.workers), np.zeros(commits)
    last = np.full(cluster.workers, -1)
    for row in frame.itertuples():
        inbox = sum(share * sent[source] for source, share in zip(row.sources, row.weights, strict=True))
        weight[row.worker] = sent[row.commit] = row.kept * weight[row.worker] + inbox
        last[row.worker] = row.commit
    kept = np.where(last >= 0, trace.kept_after[last], 1.0)
    flying = (trace.in_flight["weight"] * sent[trace.in_flight["row"]]).sum()
    assert kept @ weight + flying == pytest.approx(cluster.workers, abs=1e-12)
    # Rows of others since the own last one: each version ages all reads but one.
    ages = commits - trace.open_reads["read_version"]
    assert frame["staleness"].sum() + ages.sum() - commits * (cluster.workers - 1) == 0 or trace.workers == 1
    for part in ("computing_share", "waiting_share"):
        assert math.isnan(trace.summary()[part]) or 0 <= trace.summary()[part] <= 1


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
    trace = simulate(Cluster(8, 1.0, latency=2.5, policy=policy, topology="ring()"), 8 * 41)
    times = trace.frame["commit_time"].to_numpy()
    assert (times[-1] - times[7]) / 40 == pytest.approx(lasts)


def test_random_numbers_are_those_of_a_server():
    laws = ["gamma(1, 0.4)"] * 3 + ["exponential(2)"] * 2
    names = ["worker", "start_time", "commit_time"]
    without, served = (simulate(Cluster(5, laws, topology=one), 300, 7).frame[names] for one in ("ring()", None))
    pd.testing.assert_frame_equal(without, served, check_exact=True)


def test_who_waits_for_whom():
    """Neighbours of a slow worker wait for it, and theirs for them; nobody waits without a barrier."""
    laws = [1.0] * 6 + [4.0]
    trace = simulate(Cluster(7, laws, policy="neighbours()", topology="ring()"), 700)
    waits, table = trace.waits(), trace.per_worker(0)
    assert waits[0, 6] > 200 and waits[5, 6] > 200 and waits[6].sum() == 0
    np.testing.assert_allclose(waits.sum(axis=1), table["mean_wait"] * table["commits"])
    assert simulate(Cluster(7, laws, topology="ring()"), 700).waits().sum() == 0
    for one in (trace, simulate(Cluster(7, laws, latency=1, policy="handshake()", topology="ring()"), 200)):
        queue = one.queue()
        assert queue["in_system"].iloc[-1] == len(one.in_flight) and (queue["in_system"] >= 0).all()
        figure, axes = plt.subplots(1, 4)
        plots.timeline(axes[0], one)
        plots.queue_length(axes[1], one)
        plots.staleness_histogram(axes[2], one)
        plots.waits(axes[3], one)
        figure.canvas.draw()
        plt.close(figure)


LOGGED = ["worker", "start_time", "send_time", "commit_time", "sources", "weights", "kept", "partner"]


@pytest.mark.parametrize("policy", ["overlap(2)", "neighbours(beside)", "handshake()"])
def test_recorded_traces_are_put_in_order(policy):
    """The rows of a trace, shuffled; sources by worker and job; then with clocks that differ."""
    trace = simulate(Cluster(5, Gamma(1, 0.4), latency=0.3, policy=policy, topology="ring()"), 80)
    frame, flying = trace.frame, trace.in_flight.rename(columns={"row": "source"})

    def named(row):
        return (int(frame["worker"][row]), int(frame["job"][row]))

    log = frame[LOGGED].assign(sources=[[named(row) for row in sources] for sources in frame["sources"]])
    messages = flying.assign(source=[named(row) for row in flying["source"]])
    options = {"protocol": "gossip", "workers": 5, "takes_up": trace.takes_up, "in_flight": messages}
    again = recorded(log.sample(frac=1, random_state=1), **options)
    pd.testing.assert_frame_equal(again.frame, frame, check_exact=True)
    assert again.in_flight.equals(trace.in_flight) and again.cluster is None
    if policy != "handshake()":
        clock = np.array([0, 0.4, 0, -0.2, 0.1])[log["worker"]] + 1
        shifted = log.assign(**{name: log[name] + clock for name in ("start_time", "send_time", "commit_time")})
        other = recorded(shifted.assign(job=frame["job"]), **options, begin=0).frame
        place = {pair: row for row, pair in enumerate(zip(other["worker"], other["job"], strict=True))}
        for row, sources in enumerate(log["sources"]):
            at = place[named(row)]
            assert other["sources"][at] == sorted(place[pair] for pair in sources)
        assert (np.diff(other["commit_time"]) >= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": [[(1, 0)], [(0, 0)]], "weights": [[0.5], [0.5]]}, "takes up what came after it"),
        ({"sources": [[], [(0, 1)]]}, r"a source of row 1 is \(0, 1\)"),
        ({"sources": [[], 3]}, "must be lists"),
        ({"sources": [[], [7]]}, "a source of row 1 is 7"),
        ({"weights": [[], []]}, "not as many sources as weights"),
        ({"job": [0, 1]}, "job of row 1 is 1.*must count"),
        ({"commit_time": [1, 0.5], "start_time": [0, 1]}, "must not be before start_time"),
        ({"kept": [1, 0.5]}, "must be 1 in the first row"),
    ],
)
def test_contradictory_records_are_refused(change, message):
    log = {"worker": [0, 1], "start_time": [0, 0], "commit_time": [1, 2], "sources": [[], [0]], "weights": [[], [0.5]]}
    assert recorded(log | {"kept": [1, 1]}, protocol="gossip").frame["sources"].tolist() == [[], [0]]
    with pytest.raises(InputError, match=message):
        recorded(log | {"kept": [1, 1]} | change, protocol="gossip")


def test_a_trace_is_saved_and_loaded(tmp_path):
    for policy in ("overlap(2)", "neighbours(beside)", "handshake()"):
        cluster = Cluster(6, Gamma(1, 0.3), latency="exponential(2)", policy=policy, topology="ring()")
        trace = simulate(cluster, 100)
        again = Trace.load(trace.save(tmp_path / f"{policy}.parquet"))
        pd.testing.assert_frame_equal(again.frame, trace.frame, check_exact=True)
        assert again.in_flight.equals(trace.in_flight) and again.source == trace.source
        assert again.takes_up == ("read" if policy == "overlap(2)" else "commit") and "Trace of 100" in repr(again)


def damaged(trace, name, row, value):
    frame = trace.frame.copy()
    frame[name] = frame[name].astype(object) if name in ("sources", "weights") else frame[name]
    frame.at[row, name] = value
    return lambda: Trace.of(frame, trace.source, trace.open_reads, in_flight=trace.in_flight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sources", [60, 3], "sources of row 50 is .*must be earlier rows"),
        ("sources", [-1, 3], "must be earlier rows"),
        ("sources", 3, "of row 50 must be lists"),
        ("sources", [0.5, 1.5], "lists of rows"),
        ("sources", [3], "has 1 sources and 2 weights"),
        ("sources", [3, 3], "sources of row 50 is"),
        ("weights", [0.9, 0.1], "more, or less, than all"),
        ("weights", [1 / 3, -0.1], "above 0 and at most 1"),
        ("kept", 0.5, "more, or less, than all"),
        ("kept", -0.5, "must be from 0 to 1"),
        ("partner", 9, "from 0 to 5, or -1"),
        ("read_version", 0, "own last row|versions since the read"),
        ("outcome", "buffered", "must be"),
    ],
)
def test_contradictory_traces_are_refused(name, value, message):
    trace = simulate(Cluster(6, Gamma(1, 0.3), policy="neighbours()", topology="ring()"), 100)
    with pytest.raises(InputError, match=message):
        damaged(trace, name, 50, value)()


def test_contradictory_messages_in_flight_are_refused():
    trace = simulate(Cluster(6, Gamma(1, 0.3), latency=2, topology="ring()"), 100)
    for name, value in (("row", 100), ("taker", 6), ("weight", 0.0), ("arrive_time", math.nan), ("weight", 0.9)):
        in_flight = trace.in_flight.copy()
        in_flight.loc[0, name] = value
        with pytest.raises(InputError, match=r"in_flight|more, or less, than all"):
            Trace.of(trace.frame, trace.source, trace.open_reads, in_flight=in_flight)


RING = {"workers": 4, "compute": 1, "topology": "ring()"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"service": 0.1}, "service = .*there is no server"),
        ({"discipline": "random"}, "discipline = 'random'.*leave discipline out"),
        ({"protocol": "write_then_read"}, "protocol = "),
        ({"protocol": "read_then_write", "exclusive": False}, "exclusive|protocol"),
        ({"protocol": "write_then_read", "discipline": "lock_free", "read_blocks": 2}, "there is no server"),
        ({"latency": (0, 1)}, "one way"),
        ({"bandwidth": 1, "message_bytes": (1, 2)}, "one way"),
        ({"bandwidth": 1, "message_bytes": 1, "shared_bandwidth": True}, "shared_bandwidth = True"),
        ({"policy": "barrier()"}, "policy = barrier.*is a server's.*handshake"),
        ({"policy": "bounded_staleness(3)"}, "is a server's"),
        ({"policy": "handshake()", "topology": "exponential()"}, "directed"),
        ({"policy": "overlap(0)"}, "steps = 0: must be at least 1"),
        ({"policy": "neighbours(mix=behind)"}, "mix = 'behind'"),
        ({"policy": "neighbours()", "topology": None}, "without a server; give a topology"),
        ({"policy": "handshake()", "topology": None}, "without a server; give a topology"),
        ({"topology": "rng()"}, "did you mean 'ring"),
        ({"topology": "ring(3)"}, "parameters given"),
        ({"topology": topologies.ring}, r"call it, as in topologies.ring\(\)"),
        ({"topology": 3}, "must be a topology"),
        ({"topology": "random_regular(4)"}, "at most 3"),
        ({"topology": "random_regular(3)", "workers": 5}, "odd number"),
        ({"topology": "random_regular(1)"}, "no connected graph"),
        ({"topology": "adjacency([[0, 1], [1, 0]])"}, "a graph of 2 workers, and there are 4"),
        ({"topology": "adjacency([[0, 1, 0], [1, 0, 0], [0, 0, 0]])"}, "not connected: worker 2"),
        ({"topology": "adjacency([[0, 1, 0], [1, 0, 0], [1, 0, 0]])"}, "not strongly connected.*from worker 2"),
        (
            {"topology": "adjacency([[0, 0, 1], [1, 0, 0], [0, 1, 0]], metropolis)"},
            "directed graph; give weights='uniform'",
        ),
        ({"topology": "adjacency([[0.5, 0.6], [0.5, 0.5]], given)"}, "column 1 sums to 1.1"),
        ({"topology": "adjacency([[0, 1]])"}, "must be square"),
        ({"topology": "adjacency([[0, -1], [1, 0]])"}, "zero or above"),
        ({"topology": "adjacency([[0, x], [1, 0]])"}, "numbers"),
    ],
)
def test_bad_input(values, message):
    with pytest.raises(InputError, match=message):
        Cluster(**{**RING, **values})
