"""The simulation: a run by hand, and random numbers; `test_world` has what holds of every trace."""

import numpy as np
import pytest
from world import LAWS

from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Exponential, Gamma
from asyncsim.clusters.policy import barrier
from asyncsim.simulation.delays import delays
from asyncsim.simulation.simulate import simulate

# A standard normal is beyond 5 sigma with probability 6e-7; the seeds are fixed besides.
K_SIGMA = 5.0

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


def test_random_serves_all_who_wait_alike():
    # Constant times, always four waiting: each pick is one of four, whoever arrived first.
    cluster = Cluster(5, 1.0, service=1.0, discipline="random")
    worker = simulate(cluster, 4_000, seed=2).frame["worker"].to_numpy()[10:]
    counts = np.bincount(worker)
    # The wait of a worker is geometric, so a share's variance is below that of independent picks.
    assert np.abs(counts / len(worker) - 0.2).max() < K_SIGMA * np.sqrt(0.2 * 0.8 / len(worker))
    gaps = np.diff(np.flatnonzero(worker == 0))
    assert set(gaps) >= {2, 3, 4, 5, 6, 7, 8}


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


def test_constant_durations_do_not_depend_on_who_else_computes():
    """Three tenths of a second ten times are three seconds, with a random worker as without."""
    alone, beside = (
        simulate(Cluster(len(laws), laws, window=[10, 1, 1][: len(laws)]), 40).frame
        for laws in ([0.3, 3.0], [0.3, 3.0, Gamma(0.37, 0.2)])
    )
    times = beside.loc[beside["worker"] < 2, "commit_time"].to_numpy()
    assert len(times) > 4 and (times == alone["commit_time"].to_numpy()[: len(times)]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"latency": "exponential(0.3)", "window": 3},
        {"protocol": "read_then_write", "exclusive": False},
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
