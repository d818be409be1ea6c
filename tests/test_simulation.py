"""The simulation: runs by hand, and random numbers; `test_world` has what holds of every trace."""

import numpy as np
import pytest

from asyncsim import Cluster, Constant, Exponential, Gamma, simulate, theory, trials
from asyncsim.base.streams import Streams
from asyncsim.simulation.delays import delays
from asyncsim.traces.phases import phases


def rows(table, *names):
    return [tuple(row) for row in table[list(names)].itertuples(index=False)]


def test_exchange_by_hand():
    # At 3 the message of worker 1 arrives (scheduled at 0) before the service of worker 0 ends
    # (scheduled at 2): it waits for no time.
    trace = simulate(Cluster(2, [2.0, 3.0], service=1.0), 4)
    frame, times = trace.frame, ("start_time", "arrive_time", "serve_time", "commit_time")
    names = ("worker", "job", "read_version", "read_time", *times, "staleness", "version")
    assert rows(frame, *names) == [
        (0, 0, 0, 0.0, 0.0, 2.0, 2.0, 3.0, 0, 1),
        (1, 0, 0, 0.0, 0.0, 3.0, 3.0, 4.0, 1, 2),
        (0, 1, 1, 3.0, 3.0, 5.0, 5.0, 6.0, 1, 3),
        (1, 1, 2, 4.0, 4.0, 7.0, 7.0, 8.0, 1, 4),
    ]
    assert rows(frame, "read_arrive_time", "read_serve_time") == [(0, 0), (0, 0), (2, 2), (3, 3)]
    assert rows(frame, "push_version", "push_time") == [(0, 3.0), (1, 4.0), (2, 6.0), (3, 8.0)]
    open_reads = rows(trace.open_reads, "worker", "job", "read_version", "read_time")
    assert open_reads == [(0, 2, 3, 6.0), (1, 2, 4, 8.0)]
    # Worker 0 is back at 8 too. Its arrival was scheduled at 6, before the end of the service at 8.
    assert trace.present.to_numpy().tolist() == [[0, 8.0]]


def test_delays_of_several_steps_are_sums_of_draws():
    law = Gamma(1.0, 0.5)
    draw = delays([Exponential(1.0), law], 3, "compute", steps=3)
    drawn = [draw(1) for _ in range(128)]
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


# Trials that are cut, and grace windows


def test_trials_of_constant_times():
    # Worker 1 needs 3 s and fails both of its trials: its round lasts 4 s. Worker 0 waits from 2.
    trace = simulate(Cluster(2, [1.0, 3.0], policy=trials(2.0, 2)), 4)
    names = ["worker", "job", "start_time", "commit_time", "read_version", "version", "outcome"]
    assert rows(trace.frame, *names) == [
        (0, 0, 0.0, 1.0, 0, 0, "buffered"),
        (1, 0, 0.0, 2.0, 0, 0, "cancelled"),
        (0, 1, 1.0, 2.0, 0, 0, "buffered"),
        (1, 1, 2.0, 4.0, 0, 0, "cancelled"),
        (0, 2, 4.0, 5.0, 1, 1, "buffered"),
        (1, 2, 4.0, 6.0, 1, 1, "cancelled"),
        (0, 3, 5.0, 6.0, 1, 1, "buffered"),
    ]
    held = phases(trace, [0]).query("phase == 'held'")
    assert rows(held, "begin", "end") == [(2.0, 4.0)]
    assert rows(trace.per_worker(0), "commits", "cancelled") == [(4, 0), (0, 3)]
    numbers = trace.summary(warm_up=0)
    assert (numbers["cancelled_share"], numbers["versions"]) == (3 / 7, 1)
    # In 6 s each: worker 0 computes for 4 and waits for 2, worker 1 computes in vain.
    assert numbers["counted_share"] == pytest.approx(4 / 12)
    assert numbers["lost_to_discarded"] == pytest.approx(6 / 12)
    assert numbers["lost_to_waiting"] == pytest.approx(2 / 12)


def test_a_round_without_a_message_makes_no_version():
    frame = simulate(Cluster(2, Exponential(1.0), policy=trials(0.05)), 30, seed=1).frame
    rounds = frame["start_time"].nunique()  # one instant per round
    assert frame["version"].iloc[-1] < 30 < rounds


def test_success_of_trials():
    laws, times = [Exponential(1.0), Gamma(2.0, 0.5), 1.0], [1.0, 3.0, 2.0]
    cluster = Cluster(3, laws, policy=trials(times), window=3)
    frame = simulate(cluster, 4_000, seed=2).frame
    share = (frame["outcome"] != "cancelled").groupby(frame["worker"]).agg(["mean", "count"])
    expected = np.array(theory.trial_success(cluster))
    assert expected[2] == 0 < expected[:2].min()
    error = np.sqrt(expected * (1 - expected) / share["count"])
    assert (abs(share["mean"] - expected) <= 5 * error).all()


def test_workers_wait_for_the_end_of_the_window():
    # A quorum of one and 0.6 s: worker 1 arrives in the window of worker 0, worker 2 does not.
    # In the third version all have arrived before its window ends.
    trace = simulate(Cluster(3, [1.0, 1.5, 2.0], policy="first_of(1, grace=600 ms)"), 7)
    names = ["worker", "read_version", "read_time", "commit_time", "version", "outcome"]
    assert rows(trace.frame, *names) == [
        (0, 0, 0.0, 1.0, 0, "buffered"),
        (1, 0, 0.0, 1.5, 0, "buffered"),
        (2, 0, 0.0, 2.0, 1, "buffered"),
        (0, 1, 1.6, 2.6, 1, "buffered"),  # at the last instant
        (1, 1, 1.6, 3.1, 2, "buffered"),
        (0, 2, 2.6, 3.6, 2, "buffered"),
        (2, 2, 2.6, 4.6, 3, "buffered"),
    ]


def test_a_version_of_all_workers_needs_no_grace():
    trace = simulate(Cluster(2, [1.0, 1.25], policy="first_of(1, grace=10)"), 6)
    assert trace.frame["commit_time"].tolist() == [1.0, 1.25, 2.25, 2.5, 3.5, 3.75]
    assert trace.frame["outcome"].tolist() == ["buffered", "applied"] * 3
