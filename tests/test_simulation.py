"""The simulation: runs by hand, random numbers and queueing theory; `test_world` has what holds of
every trace.
"""

import ciw
import numpy as np
import pytest
from scipy import stats
from world import LAWS

from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Exponential, Gamma, Uniform
from asyncsim.clusters.policy import barrier, discard_stale
from asyncsim.simulation.delays import delays
from asyncsim.simulation.simulate import simulate
from asyncsim.traces.phases import IN_WORDS

# A standard normal is beyond 5 sigma with probability 6e-7; the seeds are fixed besides.
K_SIGMA = 5.0
BATCHES = 40

TIMES = ["start_time", "arrive_time", "serve_time", "commit_time"]


def rows(trace, *names):
    return [tuple(row) for row in trace.frame[list(names)].itertuples(index=False)]


def test_exchange_by_hand():
    # At 3 the message of worker 1 arrives (scheduled at 0) before the service of worker 0 ends
    # (scheduled at 2): it waits for no time.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0), 4)
    names = ("worker", "job", "read_version", "read_time", *TIMES, "staleness", "version")
    assert rows(trace, *names) == [
        (0, 0, 0, 0.0, 0.0, 2.0, 2.0, 3.0, 0, 1),
        (1, 0, 0, 0.0, 0.0, 3.0, 3.0, 4.0, 1, 2),
        (0, 1, 1, 3.0, 3.0, 5.0, 5.0, 6.0, 1, 3),
        (1, 1, 2, 4.0, 4.0, 7.0, 7.0, 8.0, 1, 4),
    ]
    assert rows(trace, "read_arrive_time", "read_serve_time") == [(0, 0), (0, 0), (2, 2), (3, 3)]
    assert rows(trace, "push_version", "push_time") == [(0, 3.0), (1, 4.0), (2, 6.0), (3, 8.0)]
    assert trace.open_reads[["worker", "job", "read_version", "read_time"]].to_numpy().tolist() == [
        [0, 2, 3, 6.0],
        [1, 2, 4, 8.0],
    ]
    # Worker 0 is back at 8 too. Its arrival was scheduled at 6, before the end of the service at 8.
    assert trace.present.to_numpy().tolist() == [[0, 8.0]]


@pytest.mark.parametrize(("latency", "first"), [(0.0, 1.5), (1e-9, 1.75)])
def test_a_write_without_latency_waits_beside_the_reads(latency, first):
    """All reads come at 1; worker 0 is served again at once, as it is the first in rank, unless it
    comes too late.
    """
    options = {
        "service": 0.25,
        "protocol": "read_then_write",
        "exclusive": False,
        "discipline": "lowest_rank",
    }
    (row,) = rows(
        simulate(Cluster(3, 1.0, latency=latency, **options), 9), "worker", "commit_time"
    )[:1]
    assert row == (0, pytest.approx(first, abs=1e-6))


def test_window_and_latency_by_hand():
    cluster = Cluster(1, 2.0, service=1.0, latency=(0.5, 0.25), window=3)
    trace = simulate(cluster, 2)
    assert rows(trace, "local_steps", *TIMES, "staleness") == [
        (3, 0.0, 6.5, 6.5, 7.5, 0),
        (3, 7.75, 14.25, 14.25, 15.25, 0),
    ]


def test_exclusive_read_then_write_by_hand():
    # The same times as an exchange; the next gradient is from the version before the own commit.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0, protocol="read_then_write"), 4)
    assert rows(
        trace, "worker", "read_version", "read_time", "push_version", "commit_time", "staleness"
    ) == [
        (0, 0, 0.0, 0, 3.0, 0),
        (1, 0, 0.0, 1, 4.0, 1),
        (0, 0, 3.0, 2, 6.0, 2),
        (1, 1, 4.0, 3, 8.0, 2),
    ]


def test_separate_read_then_write_by_hand():
    # 0 compute 2, request up 0.5, read 2.5-3.5, reply down 0.25 + 1, message up 0.5 + 1, write
    # 6.25-7.25, acknowledgement down 0.25: the next round starts at 7.5 from what was read at 3.5.
    cluster = Cluster(
        1,
        2.0,
        1.0,
        (0.5, 0.25),
        bandwidth=4,
        message_bytes=4,
        protocol="read_then_write",
        exclusive=False,
    )
    trace = simulate(cluster, 3)
    assert rows(trace, *TIMES) == [
        (0.0, 6.25, 6.25, 7.25),
        (7.5, 13.75, 13.75, 14.75),
        (15.0, 21.25, 21.25, 22.25),
    ]
    names = (
        "read_version",
        "read_arrive_time",
        "read_serve_time",
        "read_time",
        "push_version",
        "push_time",
    )
    assert rows(trace, *names, "staleness") == [
        (0, 0.0, 0.0, 0.0, 0, 3.5, 0),
        (0, 2.5, 2.5, 3.5, 1, 11.0, 1),
        (1, 10.0, 10.0, 11.0, 2, 18.5, 1),
    ]
    assert trace.open_reads[["read_version", "read_time"]].to_numpy().tolist() == [[2, 18.5]]


def test_write_then_read_by_hand():
    # w0 writes 2-3; w1 writes 3-4; w0 reads 4-5; w1 reads 5-6; w0 writes 7-8, reads 8-9; w1 writes
    # 9-10.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0, protocol="write_then_read"), 4)
    assert rows(trace, "worker", *TIMES, "read_version", "read_time", "staleness") == [
        (0, 0.0, 2.0, 2.0, 3.0, 0, 0.0, 0),
        (1, 0.0, 3.0, 3.0, 4.0, 0, 0.0, 1),
        (0, 5.0, 7.0, 7.0, 8.0, 2, 5.0, 0),
        (1, 6.0, 9.0, 9.0, 10.0, 2, 6.0, 1),
    ]
    assert rows(trace, "read_arrive_time", "read_serve_time")[2:] == [(3.0, 4.0), (4.0, 5.0)]
    # Worker 1 has written and not yet read: it holds nothing.
    assert trace.open_reads[["worker", "job", "read_version"]].to_numpy().tolist() == [[0, 2, 3]]


def test_shared_bandwidth_by_hand():
    # Up: w0 1-2, w1 2-3. Server: 2-2.5, 3-3.5. Down: w0 2.5-3.5, w1 3.5-4.5. Up: w0 4.5-5.5, w1
    # 5.5-6.5.
    shared = Cluster(2, 1.0, 0.5, bandwidth=2, message_bytes=2, shared_bandwidth=True)
    assert rows(simulate(shared, 4), "worker", *TIMES) == [
        (0, 0.0, 2.0, 2.0, 2.5),
        (1, 0.0, 3.0, 3.0, 3.5),
        (0, 3.5, 5.5, 5.5, 6.0),
        (1, 4.5, 6.5, 6.5, 7.0),
    ]
    # Messages of half the size up. Up: w0 1-1.5, w1 1.5-2. Server: 1.5-2, 2-2.5. Down: w0 2-3, w1
    # 3-4.
    lighter = Cluster(2, 1.0, 0.5, bandwidth=2, message_bytes=(1, 2), shared_bandwidth=True)
    assert rows(simulate(lighter, 3), "worker", *TIMES) == [
        (0, 0.0, 1.5, 1.5, 2.0),
        (1, 0.0, 2.0, 2.0, 2.5),
        (0, 3.0, 4.5, 4.5, 5.0),
    ]
    # Each with the bandwidth to itself, both arrive at 2; then w1 waits.
    alone = Cluster(2, 1.0, 0.5, bandwidth=2, message_bytes=2)
    assert rows(simulate(alone, 4), "worker", *TIMES) == [
        (0, 0.0, 2.0, 2.0, 2.5),
        (1, 0.0, 2.0, 2.5, 3.0),
        (0, 3.5, 5.5, 5.5, 6.0),
        (1, 4.0, 6.0, 6.0, 6.5),
    ]


def test_latency_comes_after_the_shared_link_and_does_not_block_it():
    cluster = Cluster(2, 1.0, 0.25, (0.5, 0.0), bandwidth=1, message_bytes=1, shared_bandwidth=True)
    assert rows(simulate(cluster, 2), "worker", "arrive_time") == [(0, 2.5), (1, 3.5)]


def test_lowest_rank_starves_the_highest():
    # Workers 0 and 1 keep the server busy: whenever it is free, one of them waits.
    cluster = Cluster(3, [1.0, 1.1, 1.2], service=2.0, discipline="lowest_rank")
    assert simulate(cluster, 20).frame["worker"].tolist() == [0, 1] * 10
    fifo = simulate(Cluster(3, [1.0, 1.1, 1.2], service=2.0), 21)
    assert fifo.frame["worker"].tolist() == [0, 1, 2] * 7


def test_random_serves_all_who_wait_alike():
    # Constant times, always four waiting: each pick is one of four, whoever arrived first.
    cluster = Cluster(5, 1.0, service=1.0, discipline="random")
    worker = simulate(cluster, 4_000, seed=2).frame["worker"].to_numpy()[10:]
    counts = np.bincount(worker)
    # The wait of a worker is geometric, so a share's variance is below that of independent picks.
    assert np.abs(counts / len(worker) - 0.2).max() < K_SIGMA * np.sqrt(0.2 * 0.8 / len(worker))
    gaps = np.diff(np.flatnonzero(worker == 0))
    assert set(gaps) >= {2, 3, 4, 5, 6, 7, 8}


def test_repeats_and_seeds():
    cluster = Cluster(4, Gamma(1, 0.5), Exponential(0.1), discipline="random")
    first, again, other = (simulate(cluster, 100, seed) for seed in (5, 5, 6))
    assert first.frame.equals(again.frame)
    assert not first.frame["commit_time"].equals(other.frame["commit_time"])
    # More than one block of draws a worker.
    assert (
        first.frame.groupby("worker").size().min()
        < 64
        < simulate(cluster, 400).frame.groupby("worker").size().min()
    )


def by_job(trace, name):
    return trace.frame.set_index(["worker", "job"])[name]


def test_another_discipline_or_service_leaves_the_computations():
    base = Cluster(6, Gamma(1, 0.5), Exponential(0.3))
    for other in (
        Cluster(6, Gamma(1, 0.5), Exponential(0.3), discipline="random"),
        Cluster(6, Gamma(1, 0.5), Exponential(0.3), discipline="lowest_rank"),
        Cluster(6, Gamma(1, 0.5), 0.1, protocol="write_then_read"),
    ):
        durations = []
        for cluster in (base, other):
            trace = simulate(cluster, 300, seed=8)
            durations.append(by_job(trace, "arrive_time") - by_job(trace, "start_time"))
        common = durations[0].index.intersection(durations[1].index)
        assert len(common) > 100
        # A duration is the difference of two times of up to 100 s, each rounded to 1.4e-14 s.
        np.testing.assert_allclose(durations[0][common], durations[1][common], rtol=0, atol=6e-14)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_delays_depend_on_the_worker_alone(law):
    def drawn(laws, order):
        take = delays(laws, 3, "compute")
        values = {worker: [] for worker in set(order)}
        for worker in order:
            values[worker].append(take(worker))
        return values

    in_turn = drawn([law] * 2, [0, 1] * 150)
    assert in_turn == drawn([law] * 2, [1] * 150 + [0] * 150)
    assert in_turn[1] == drawn([Exponential(9), law, law], [1] * 150)[1]


def test_delays_of_several_steps_are_sums_of_draws():
    law = Gamma(1.0, 0.5)
    take = delays([Exponential(1.0), law], 3, "compute", steps=3)
    drawn = [take(1) for _ in range(128)]
    streams = Streams(3, "compute")
    expected = [law.sample(streams.generator(1, block), (64, 3)).sum(axis=1) for block in (0, 1)]
    np.testing.assert_array_equal(drawn, np.concatenate(expected))
    constant = delays([Constant(0.25), Constant(1.5)], 3, "compute", steps=3)
    assert [constant(0), constant(1), constant(0)] == [0.75, 4.5, 0.75]


# Theory


def test_staleness_is_geometric_with_exponential_times_and_an_instant_server():
    # L2: P(k) = (1/n) (1 - 1/n)^k. Commits 8 n apart share a worker's silence with probability
    # (1 - 1/n)^(8 n) = 3e-4: as good as independent. Level 1e-3, fixed seed.
    workers, apart = 10, 80
    staleness = (
        simulate(Cluster(workers, Exponential(1.0)), 160_000, seed=0)
        .frame["staleness"]
        .to_numpy()[200::apart]
    )
    edges = np.arange(0, 40, 2)
    observed = np.bincount(np.minimum(staleness // 2, 20), minlength=21)
    tail = (1 - 1 / workers) ** np.append(edges, 40)
    expected = len(staleness) * np.append(-np.diff(tail), tail[-1])
    assert expected.min() > 5
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_staleness_of_unequal_exponential_workers():
    # L2: worker i is geometric with mean (1 - p) / p, p its share of the rate: 7, 7, 3, 1.
    trace = simulate(Cluster(4, [Exponential(1 / rate) for rate in (1, 1, 2, 4)]), 60_000, seed=1)
    means = trace.per_worker()
    p = np.array([1, 1, 2, 4]) / 8
    # A worker's staleness are independent: the commits of others between two of its own.
    error = np.sqrt(1 - p) / p / np.sqrt(means["commits"])
    assert (np.abs(means["mean_staleness"] - (1 - p) / p) < K_SIGMA * error).all()


def test_round_robin_with_constant_times():
    # L4: strict turns; staleness 0, 1, ..., n - 1 and then n - 1 for ever.
    for service in (0.0, 0.01, 0.5):
        frame = simulate(Cluster(8, 1.0, service=service), 200).frame
        np.testing.assert_array_equal(frame["worker"], np.arange(200) % 8)
        np.testing.assert_array_equal(frame["staleness"], np.minimum(np.arange(200), 7))
    # L9, constant times: min(N / (Z + S), 1 / S) exactly.
    for workers, throughput in ((5, 5 / 1.1), (11, 10.0), (20, 10.0)):
        times = (
            simulate(Cluster(workers, 1.0, service=0.1), 40 * workers)
            .frame["commit_time"]
            .to_numpy()
        )
        rounds = times[20 * workers :: workers]
        assert (len(rounds) - 1) * workers / (rounds[-1] - rounds[0]) == pytest.approx(
            throughput, rel=1e-9
        )


def batch_means(time, in_system, commit_time):
    """Return throughput and mean population of equal lengths of time, after a tenth as warm-up."""
    edges = np.linspace(0.1 * commit_time[-1], commit_time[-1], BATCHES + 1)
    area = np.concatenate([[0.0], np.cumsum(np.diff(time) * in_system[:-1])])
    at = np.searchsorted(time, edges, side="right") - 1
    population = np.diff(area[at] + in_system[at] * (edges - time[at])) / np.diff(edges)
    commits = np.diff(np.searchsorted(commit_time, edges, side="right")) / np.diff(edges)
    return commits, population


def assert_mean(batches, expected):
    error = batches.std(ddof=1) / np.sqrt(BATCHES)
    assert abs(batches.mean() - expected) < K_SIGMA * error, (batches.mean(), expected, error)


# L9: machine repairman with Z = 1, S = 0.1; throughput and population at the server by workers.
REPAIRMAN = [(5, 4.36048, 0.63952), (10, 7.85418, 2.14582), (20, 9.98131, 10.01869)]


@pytest.mark.parametrize("compute", [Exponential(1.0), Gamma(1.0, 0.2)], ids=str)
@pytest.mark.parametrize(("workers", "throughput", "population"), REPAIRMAN)
def test_repairman(compute, workers, throughput, population):
    # Exponential service: the law of the computations makes no difference, only its mean.
    trace = simulate(Cluster(workers, compute, Exponential(0.1)), 60_000, seed=workers)
    steps = trace.queue().to_numpy().T
    commits, in_system = batch_means(*steps, trace.frame["commit_time"].to_numpy())
    assert_mean(commits, throughput)
    assert_mean(in_system, population)
    summary = trace.summary(warm_up=6_000)
    assert summary["queue_mean"] + summary["utilisation"] == pytest.approx(
        in_system.mean(), rel=0.02
    )
    assert summary["utilisation"] == pytest.approx(0.1 * summary["throughput"], rel=0.02)


def test_little_and_the_response_time_law():
    # Exact but for the two ends: waits add up to the queue's area; N = X (R + Z).
    trace = simulate(Cluster(20, Gamma(1, 0.5), Uniform(0.02, 0.08)), 20_000, seed=4)
    summary = trace.summary(warm_up=0)
    assert summary["queue_mean"] == pytest.approx(
        summary["throughput"] * summary["wait_mean"], rel=1e-3
    )
    frame = trace.frame
    response = (frame["commit_time"] - frame["arrive_time"]).mean()
    thinking = (frame["arrive_time"] - frame["start_time"]).mean()
    assert summary["throughput"] * (response + thinking) == pytest.approx(20, rel=2e-3)


def test_against_ciw_on_a_closed_network():
    # Neither law exponential: no closed form, so another simulator. Node 1 computes, node 2 serves.
    workers, horizon = 10, 1_200.0
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential([1e-9, float("inf")]), None],
        batching_distributions=[ciw.dists.Deterministic(workers), ciw.dists.Deterministic(1)],
        service_distributions=[ciw.dists.Gamma(4, 0.25), ciw.dists.Uniform(0.06, 0.18)],
        number_of_servers=[float("inf"), 1],
        routing=[[0.0, 1.0], [1.0, 0.0]],
    )
    ciw.seed(1)
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_time(horizon)
    served = sorted(
        (r.exit_date, r.waiting_time) for r in simulation.get_all_records() if r.node == 2
    )
    trace = simulate(Cluster(workers, Gamma(1.0, 0.5), Uniform(0.06, 0.18)), len(served), seed=1)
    waits = (trace.frame["serve_time"] - trace.frame["arrive_time"]).to_numpy()
    samples = [(np.array([exit for exit, _ in served]), np.array([wait for _, wait in served]))]
    samples.append((trace.frame["commit_time"].to_numpy(), waits))
    for measure in (throughput_batches, wait_batches):
        ours, theirs = (measure(*sample) for sample in samples)
        error = np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / BATCHES)
        assert abs(ours.mean() - theirs.mean()) < K_SIGMA * error, (
            measure,
            ours.mean(),
            theirs.mean(),
            error,
        )


def throughput_batches(exit_time, wait):
    edges = exit_time[np.linspace(500, len(exit_time) - 1, BATCHES + 1).astype(int)]
    return np.diff(np.searchsorted(exit_time, edges)) / np.diff(edges)


def wait_batches(exit_time, wait):
    return np.array([batch.mean() for batch in np.array_split(wait[500:], BATCHES)])


def test_constant_durations_do_not_depend_on_who_else_computes():
    """Three tenths of a second ten times are three seconds, with a random worker as without."""
    alone, beside = (
        simulate(Cluster(len(laws), laws, window=[10, 1, 1][: len(laws)]), 40).frame
        for laws in ([0.3, 3.0], [0.3, 3.0, Gamma(0.37, 0.2)])
    )
    times = beside.loc[beside["worker"] < 2, "commit_time"].to_numpy()
    assert len(times) > 4 and (times == alone["commit_time"].to_numpy()[: len(times)]).all()


def test_lock_free_utilisation_counts_who_is_in_service_at_the_end():
    trace = simulate(
        Cluster(20, Exponential(1.0), service=Exponential(20.0), discipline="lock_free"),
        100,
        seed=1,
    )
    queue, begin, end = trace.queue(), *trace.frame["commit_time"].to_numpy()[[19, -1]]
    time = np.r_[begin, queue["time"][(queue["time"] > begin) & (queue["time"] < end)], end]
    there = queue["in_system"].to_numpy()[
        np.searchsorted(queue["time"], time[:-1], side="right") - 1
    ]
    assert trace.summary()["utilisation"] == pytest.approx(there @ np.diff(time) / (end - begin))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"latency": "exponential(0.3)", "window": 3},
        {"protocol": "read_then_write", "exclusive": False},
        {"protocol": "write_then_read", "latency": 0.2},
        {"bandwidth": 1e3, "message_bytes": 100, "shared_bandwidth": True},
        {"policy": discard_stale(3)},
        {"policy": barrier(2), "latency": 0.1},
    ],
    ids=str,
)
def test_messages_set_off_when_they_are_computed(options):
    """With the times that a worker draws for its jobs one after the other; those that are stopped
    do not count.
    """
    cluster = Cluster(4, "gamma(1, 0.5)", service="exponential(0.1)", **options)
    frame = simulate(cluster, 200, seed=3).frame
    draw = delays(cluster.compute_laws, 3, "compute", cluster.windows)
    drawn = [[draw(worker) for _ in range(frame["job"].max() + 1)] for worker in range(4)]
    ended = frame[frame["outcome"] != "cancelled"]
    expected = [
        drawn[worker][job] for worker, job in zip(ended["worker"], ended["job"], strict=True)
    ]
    assert (ended["send_time"] - ended["start_time"]).tolist() == pytest.approx(expected)
    assert (ended["send_time"] <= ended["arrive_time"]).all()


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ({"protocol": "write_then_read", "discipline": "lock_free"}, 138),
        ({"protocol": "write_then_read"}, 192),
        ({}, 56),
        ({"policy": "first_of(1)"}, 3),
    ],
)
def test_shares_of_a_short_trace_make_one(options, seed):
    """With replies that take much longer or much shorter than the others: the last one has no end
    in the trace.
    """
    cluster = Cluster(2, 0.01, "exponential(0.1)", "exponential(1)", **options)
    shares = simulate(cluster, 4, seed).summary()
    assert sum(shares[f"{phase}_share"] for phase in IN_WORDS) == pytest.approx(1, abs=1e-9)


def test_nobody_waits_at_a_server_without_locks():
    summary = simulate(Cluster(4, "exponential(1)", 2.0, discipline="lock_free"), 8).summary()
    assert summary["waiting_share"] == 0
    assert summary["served_share"] == pytest.approx(summary["utilisation"] / 4)
