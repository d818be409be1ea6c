"""Failures in clusters without a server: times and shares by hand, and conserved quantities."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncsim import (
    Cluster,
    failures,
    simulate,
    topologies,
)
from asyncsim.clusters.topologies import is_symmetric
from asyncsim.traces.columns import COLUMNS, GOSSIP_COLUMNS
from asyncsim.traces.phases import phases
from asyncsim.traces.trace_summary import push_weights

THIRD = pytest.approx(1 / 3)


def columns(trace, *names, first=0):
    return trace.frame[list(names)].iloc[first:].to_numpy().tolist()


def test_neighbours_wait_for_the_detection_and_then_mix_with_the_living():
    """D-PSGD on a ring of three: worker 2 dies at 2, before its second gradient, and is known to be
    dead at 4.
    """
    crash = failures.crash(2, 100, detect=2, workers=2)
    trace = simulate(
        Cluster(3, 1.0, topology="ring()", policy="neighbours(mix=beside)", failures=[crash]), 11
    )
    names = ["worker", "start_time", "send_time", "commit_time", "sources", "outcome"]
    assert columns(trace, *names) == [
        [0, 0.0, 1.0, 1.0, [], "applied"],
        [1, 0.0, 1.0, 1.0, [], "applied"],
        [2, 0.0, 1.0, 1.0, [], "applied"],
        [2, 1.0, 2.0, 2.0, [], "cancelled"],
        # All three sent after their first gradients.
        [0, 1.0, 2.0, 2.0, [1, 2], "applied"],
        [1, 1.0, 2.0, 2.0, [0, 2], "applied"],
        # Worker 2 sent nothing after its second: the others know at 4, and take up their own
        # shares.
        [0, 2.0, 3.0, 4.0, [4, 5], "applied"],
        [1, 2.0, 3.0, 4.0, [4, 5], "applied"],
        [0, 4.0, 5.0, 5.0, [6, 7], "applied"],
        [1, 4.0, 5.0, 5.0, [6, 7], "applied"],
        [0, 5.0, 6.0, 6.0, [8, 9], "applied"],
        [1, 5.0, 6.0, 6.0, [8, 9], "applied"],
    ]
    mixing = trace.frame.iloc[4:]
    assert mixing["kept"].to_numpy() == THIRD and all(
        weights == [THIRD, THIRD] for weights in mixing["weights"]
    )
    assert columns(trace, "failed_by", "incarnation")[3] == ["crash", 0]
    spell = trace.spells.iloc[0]
    assert spell[["worker", "kind", "begin", "detected", "from_row"]].tolist() == [
        2,
        "crash",
        2.0,
        4.0,
        6.0,
    ]
    # What was sent to worker 2 after the first gradients went with it, as its own share came.
    lost = trace.in_flight[trace.in_flight["taker"] < 0]
    assert lost["row"].tolist() == [0, 1] and lost["weight"].tolist() == [THIRD, THIRD]


def test_whoever_is_back_copies_the_newest_replica_of_a_neighbour():
    """Worker 2 is away from 2.5 to 4.5; the copy takes the latency, 0.25; its first round is the
    neighbours' third.
    """
    crash = failures.crash(2.5, 2, workers=2)
    cluster = Cluster(
        3, 1.0, latency=0.25, topology="ring()", policy="neighbours()", failures=[crash]
    )
    trace = simulate(cluster, 13)
    names = ["worker", "start_time", "commit_time", "read_version", "sources", "incarnation"]
    assert columns(trace, *names, first=4)[:9] == [
        [1, 1.25, 2.25, 2, [0, 2], 0],
        [2, 1.25, 2.25, 3, [0, 1], 0],
        [2, 2.5, 2.5, 6, [], 0],
        [0, 2.5, 3.5, 4, [4, 5], 0],
        [1, 2.5, 3.5, 5, [3, 5], 0],
        [0, 3.75, 4.75, 7, [7, 8], 0],
        [1, 3.75, 4.75, 8, [7, 8], 0],
        [2, 4.75, 5.75, 8, [], 1],
        [2, 5.75, 6.75, 11, [9, 10], 1],
    ]
    assert trace.frame["kept"].iloc[11] == 1 and trace.spells["to_row"].iloc[0] == 9


@pytest.mark.parametrize("detect", [0.0, 1.5])
def test_a_partner_that_dies_is_replaced_when_that_is_known(detect):
    crash = failures.crash(1.5, 100, detect=detect, workers=2)
    trace = simulate(
        Cluster(3, 1.0, topology="complete()", policy="handshake()", failures=[crash]), 40, seed=3
    )
    late = trace.frame[(trace.frame["outcome"] == "applied") & (trace.frame["commit_time"] > 1.5)]
    assert set(late["worker"]) == {0, 1} and (late["partner"] == 1 - late["worker"]).all()
    waited = (late["commit_time"] - late["send_time"]).to_numpy()
    assert (
        waited.max() == (1.0 if detect else 0.0) and (waited > 0).sum() <= 2
    )  # asked at 2, known at 3


def test_members_change_when_workers_leave_and_join():
    changes = [
        failures.leave(3.5, workers=1),
        failures.join(6.5, workers=1),
        failures.join(2.5, workers=3),
    ]
    trace = simulate(
        Cluster(4, 1.0, topology="complete()", policy="neighbours()", failures=changes), 40
    )
    frame = trace.frame[trace.frame["outcome"] == "applied"]
    there = frame.groupby("commit_time")["worker"].agg(list)
    assert (
        there[2.0] == [0, 1, 2] and there[3.5] == [3] and there[5.5] == [0, 2, 3]
    )  # 3 began at 2.5
    assert trace.spells["detected"].tolist() == trace.spells["begin"].tolist()
    assert 1 in set(frame["worker"][frame["commit_time"] > 7])
    assert (frame["kept"] + frame["weights"].map(sum)).to_numpy() == pytest.approx(1.0)


KINDS = st.one_of(
    st.builds(
        failures.crash,
        st.sampled_from(["exponential(4)", 3.0, 2.5]),
        st.sampled_from(["exponential(2)", 1.0]),
        detect=st.sampled_from([0.0, 0.5, 2.0]),
        together=st.booleans(),
    ),
    st.just("pause(3, 1)"),
    st.just("slow(exponential(3), 1, 0.3, workers=0)"),
    st.builds(
        failures.loss,
        st.sampled_from([0.1, 0.3]),
        st.sampled_from([0.5, 2.0]),
        resend=st.booleans(),
    ),
)
POLICIES = [
    "neighbours()",
    "neighbours(beside)",
    "asynchronous()",
    "overlap(1)",
    "overlap(2)",
    "handshake()",
]


@st.composite
def failing(draw):
    workers, policy = draw(st.integers(3, 6)), draw(st.sampled_from(POLICIES))
    matrix = np.array(draw(st.lists(st.integers(0, 1), min_size=workers**2, max_size=workers**2)))
    matrix = matrix.reshape(workers, workers) | np.eye(workers, k=1, dtype=int)
    matrix[-1, 0] = 1
    if policy == "handshake()" or draw(st.booleans()):
        matrix = matrix | matrix.T
    options = ["leave(2, workers=0)", "join(3, workers=1)", "crash(3, 1, workers=2)"]
    chosen = draw(st.lists(KINDS, min_size=1, max_size=3)) + draw(
        st.lists(st.sampled_from(options), unique=True)
    )
    law = draw(st.sampled_from(["1", "gamma(1, 0.3)", "exponential(1)", "empirical([0, 1, 2])"]))
    latency = draw(st.sampled_from(["0", "0.7", "exponential(1.5)"]))
    topology = topologies.adjacency(matrix)
    return Cluster(workers, law, latency=latency, policy=policy, topology=topology, failures=chosen)


def check(cluster, commits, seed):
    trace = simulate(cluster, commits, seed)
    frame, applied = trace.frame, (trace.frame["outcome"] == "applied").to_numpy()
    assert applied.sum() == commits
    assert simulate(cluster, commits + 10, seed).frame.iloc[: len(frame)].equals(frame)
    if cluster.policy.name == "neighbours" and is_symmetric(cluster.topology, cluster.workers):
        assert (frame["kept"] + frame["weights"].map(sum))[applied].to_numpy() == pytest.approx(1.0)
    # Each version ages all open reads but that of its own row, and whoever is back reads an older
    # version.
    times, last = frame["commit_time"].to_numpy(), frame["commit_time"].iloc[-1]
    spells = list(trace.spells.itertuples())
    away = sum(((times >= spell.begin) & ~(times >= spell.end) & applied).sum() for spell in spells)
    reads = pd.concat([frame, trace.open_reads])[["worker", "read_arrive_time", "read_version"]]
    aged = 0
    for spell in trace.spells.dropna(subset=["end"]).itertuples():
        read = reads[(reads["worker"] == spell.worker) & (reads["read_arrive_time"] == spell.end)][
            "read_version"
        ]
        aged += (applied & (times < spell.end)).sum() - read.iloc[0]
    ages = (commits - trace.open_reads["read_version"]).sum()
    assert frame["staleness"].sum() + ages == commits * (cluster.workers - 1) - away + aged
    # Weights of push-sum stay positive, and all time is accounted for.
    assert (push_weights(trace.accepted) > 0).all()
    summary = trace.summary()
    parts = [summary[name] for name in ("counted_share", "lost_to_waiting", "lost_to_failed")]
    assert np.isnan(parts[0]) or (sum(parts) == pytest.approx(1.0, abs=1e-9) and min(parts) > -1e-9)
    for worker in range(cluster.workers):
        table = phases(trace, [worker])
        assert (table["end"] - table["begin"]).sum() == pytest.approx(last)
    return trace


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cluster=failing(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_invariants(cluster, commits, seed):
    check(cluster, commits, seed)


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cluster=failing(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_failures_that_never_come_change_no_column(cluster, commits, seed):
    never = [failures.crash(1e9, 1), failures.slow(1e9, 1, 0.5), failures.loss(1e-15, 1)]
    found, expected = (
        simulate(dataclasses.replace(cluster, failures=chosen), commits, seed)
        for chosen in (never, ())
    )
    for name in [*COLUMNS, *GOSSIP_COLUMNS]:
        assert found.frame[name].astype(object).equals(expected.frame[name].astype(object)), name
    assert found.in_flight.equals(expected.in_flight)


def test_another_failure_changes_nobody_elses_times(policy="handshake()"):
    one = failures.crash("exponential(9)", "exponential(2)", workers=0)
    others = [failures.crash("exponential(5)", 1.0, workers=2), failures.loss(0.2, 1, workers=2)]
    traces = [
        simulate(
            Cluster(4, "exponential(1)", topology="ring()", policy=policy, failures=chosen), 300
        )
        for chosen in ([one], [one, *others])
    ]
    alone, both = (trace.frame.loc[trace.frame["worker"] != 2] for trace in traces)
    for worker in (0, 1, 3):
        first, second = (
            (table["send_time"] - table["start_time"])[table["worker"] == worker].to_numpy()
            for table in (alone, both)
        )
        assert first[:30] == pytest.approx(second[:30]) if worker else True
    spells = [
        trace.spells.loc[trace.spells["worker"] == 0, "begin"].to_numpy()[:5] for trace in traces
    ]
    assert spells[0].tolist() == spells[1].tolist()
