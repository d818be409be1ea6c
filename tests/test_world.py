"""Traces of drawn clusters: what holds of every one, the rows of slow engines, and what may change
nobody's times.
"""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import slow_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from usual_model import COLUMNS, UsualModel
from world import (
    CONTINUOUS,
    CROWDED,
    MESSAGES,
    SEEDS,
    assert_same_events,
    check,
    clusters,
    gossips,
    said_otherwise,
)

from asyncsim import Cluster, simulate
from asyncsim.clusters.laws import Constant, Exponential

NO_LINK = {"bandwidth": None, "message_bytes": None, "shared_bandwidth": False}
#: Clusters by what they have: a server under a policy, failures too, or no server.
KINDS = {
    "server": clusters(sizes=(1, 7), governed=True, locked=False, between=True),
    "failures": clusters(sizes=(4, 7), governed=True, failing=True, between=True),
    "gossip": gossips(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("world") / "trace.parquet"


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_holds_of_traces(kind, path):
    @settings(max_examples=40 if kind == "server" else 25)
    @given(cluster=KINDS[kind], commits=st.integers(1, 60), seed=SEEDS)
    def holds(cluster, commits, seed):
        trace = simulate(cluster, commits, seed)
        assert len(trace.accepted) == commits
        check(trace, path)

    holds()


# The slow engines


def assert_usual(cluster, commits, seed):
    trace, usual = simulate(cluster, commits, seed), UsualModel(cluster, commits, seed)
    # The last event may leave more rows in the trace: computations that its version cancelled,
    # interrupted later.
    assert len(trace) - len(usual.rows) <= cluster.workers
    assert (trace.frame["outcome"][len(usual.rows) :] == "cancelled").all()
    columns = dict(zip(COLUMNS, zip(*usual.rows, strict=True), strict=True))
    for name in COLUMNS[:-1]:
        assert trace.frame[name][: len(usual.rows)].tolist() == list(columns[name]), name
    if cluster.policy.name == "asynchronous":
        held = trace.open_reads[["worker", "read_version", "read_time"]].itertuples(index=False)
        assert sorted(map(tuple, held)) == [
            (i, *read) for i, reads in enumerate(usual.reads) for read in sorted(reads)
        ]
        # The general staleness identity; the right-hand side is counted one increment at a time.
        ages = commits - trace.open_reads["read_version"]
        assert trace.frame["staleness"].sum() + ages.sum() == sum(columns["others"])


SHORT_SERVICE = [Exponential(0.02), Exponential(0.5)]
#: Under policies only the order at a new version is defined among simultaneous events, and so all
#: times are continuous.
USUAL = {
    "asynchronous": (clusters(), {}),
    "simultaneous": (clusters(CROWDED, [Constant(0.0), *CROWDED], sizes=(4, 7)), {}),
    "policies": (
        clusters(CONTINUOUS, SHORT_SERVICE, (4, 6), governed=True),
        {**NO_LINK, "discipline": "fifo"},
    ),
}


@pytest.mark.parametrize(("drawn", "changes"), USUAL.values(), ids=USUAL)
def test_the_usual_model_has_the_same_events(drawn, changes):
    @settings(max_examples=60)
    @given(cluster=drawn, commits=st.integers(1, 60), seed=SEEDS)
    def has_the_same(cluster, commits, seed):
        assert_usual(dataclasses.replace(cluster, **changes), commits, seed)

    has_the_same()


GRAPHS = [("ring()", 5), ("one_peer_exponential()", 6), ("base2()", 5), ("complete()", 1)]
PAIRED = [("ring()", 5), ("base2()", 5)]


@settings(max_examples=60)
@given(
    where=st.one_of(
        st.tuples(st.sampled_from(MESSAGES), st.sampled_from(GRAPHS)),
        st.tuples(st.just("handshake()"), st.sampled_from(PAIRED)),
    ),
    latency=st.sampled_from(["0", "0.3", "exponential(2)"]),
    unequal=st.booleans(),
    seed=SEEDS,
)
def test_a_plain_loop_has_the_same_rows_without_a_server(where, latency, unequal, seed):
    messages, (topology, workers) = where
    laws = (["gamma(1, 0.5)", "exponential(3)"] * 3)[:workers]
    # Exchanges that end in one instant may be written down in either order.
    unequal = unequal or (messages == "handshake()" and latency != "0")
    law = (laws if workers > 1 else laws[0]) if unequal else "1"
    cluster = Cluster(workers, law, latency=latency, policy=messages, topology=topology)
    expected = slow_engine.gossip(cluster, 120, seed)
    found = simulate(cluster, 120, seed).frame[slow_engine.COLUMNS]
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


# What changes nothing


@settings(max_examples=40)
@given(data=st.data(), cluster=st.one_of(*KINDS.values()), commits=st.integers(1, 60), seed=SEEDS)
def test_a_cluster_that_is_said_otherwise_has_the_same_trace(data, cluster, commits, seed):
    same = said_otherwise(cluster)
    name = data.draw(st.sampled_from(sorted(same)))
    assert_same_events(simulate(same[name], commits, seed), simulate(cluster, commits, seed))


@settings(max_examples=40)
@given(
    cluster=clusters(CONTINUOUS, [Exponential(0.1)], sizes=(2, 6)),
    kind=st.sampled_from(["another worker", "another failure"]),
    protocol=st.sampled_from(["exchange", "write_then_read"]),
    seed=SEEDS,
)
def test_nobody_elses_times_change(cluster, kind, protocol, seed):
    """At a server that takes no time: a worker more, or a failure of the last one."""
    n = cluster.workers
    cluster = dataclasses.replace(
        cluster, service=0.0, protocol=protocol, exclusive=True, discipline="fifo", **NO_LINK
    )
    if kind == "another worker":
        spared, law, window = n, (*cluster.compute_laws, Exponential(0.7)), (*cluster.windows, 2)
        other = dataclasses.replace(cluster, workers=n + 1, compute=law, window=window)
    else:
        spared, known = n - 1, "crash(exponential(9), 2, workers=0)"
        more = [f"crash(exponential(5), 1, workers={spared})", f"loss(0.2, 1, workers={spared})"]
        cluster = dataclasses.replace(cluster, failures=[known])
        other = dataclasses.replace(cluster, failures=[known, *more])
    frames = [simulate(entry, 40 * n, seed).frame for entry in (cluster, other)]
    end = min(frame["commit_time"].iloc[-1] for frame in frames)
    names = ["worker", "start_time", "arrive_time", "commit_time", "outcome"]
    first, second = (
        frame.loc[(frame["worker"] < spared) & (frame["commit_time"] < end), names]
        .sort_values(names[:2])
        .to_numpy()
        for frame in frames
    )
    assert len(first) > 10 and np.array_equal(first, second)
