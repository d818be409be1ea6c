"""Several servers, each with a shard: by hand, against the usual model of each server, and what is
conserved.
"""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from usual_model import COLUMNS, UsualModel

import asyncsim
from asyncsim import Cluster, InputError, Trace, simulate
from asyncsim.base.files import field_values
from asyncsim.clusters import policy
from asyncsim.theory import queue_theory, staleness_theory, throughput_theory
from asyncsim.traces.columns import TABLES, Source

#: Arguments of `Cluster` for each protocol.
PROTOCOLS = [
    {"protocol": "exchange"},
    {"protocol": "read_then_write"},
    {"protocol": "read_then_write", "exclusive": False},
    {"protocol": "write_then_read"},
]
#: Policies that every protocol has, and those of a server that chooses when to reply.
POLICIES = [
    policy.asynchronous(),
    policy.buffered(3),
    policy.discard_stale(2),
    policy.discard_stale(3, 2),
    policy.rounds(),
    policy.buckets(2),
]
HOLDING = [policy.bounded_staleness(0), policy.bounded_staleness(2), policy.barrier()]


@st.composite
def sharded(draw):
    """A cluster of several servers whose events never coincide."""
    protocol = draw(st.sampled_from(PROTOCOLS))
    policies = POLICIES if protocol["protocol"] == "read_then_write" else POLICIES + HOLDING
    governed = draw(st.sampled_from(policies))
    disciplines = ["fifo", "lowest_rank", "random"]
    if protocol["protocol"] == "write_then_read" and governed != policy.asynchronous():
        disciplines = [
            "fifo"
        ]  # the usual model asks for the read one event later, when another visit has begun
    latency = st.sampled_from([0.0, "exponential(0.1)", ("exponential(0.5)", "exponential(0.02)")])
    network = st.sampled_from(
        [
            {},
            {"bandwidth": 40.0, "message_bytes": 7.0},
            {"bandwidth": (90.0, 30.0), "message_bytes": (7.0, 3.0), "shared_bandwidth": True},
        ]
    )
    return Cluster(
        workers=draw(st.integers(2, 5)),
        compute=draw(st.sampled_from(["exponential(1)", "gamma(1, 0.3)"])),
        service=draw(st.sampled_from(["exponential(0.05)", "exponential(0.5)"])),
        latency=draw(latency),
        window=draw(st.integers(1, 2)),
        discipline=draw(st.sampled_from(disciplines)),
        policy=governed,
        servers=draw(st.integers(2, 4)),
        **protocol,
        **draw(network),
    )


class ServerModel(UsualModel):
    """The usual model of one of several servers.

    A worker has a process for each server. The processes of a worker draw the same times of
    computing, and wait for each other before each computation.
    """

    def __init__(self, cluster, seed, env, number, meet):
        size = cluster.message_bytes
        if size is not None:
            size = (
                tuple(each / cluster.servers for each in size)
                if isinstance(size, tuple)
                else size / cluster.servers
            )
        whole = dataclasses.replace(cluster, servers=1, message_bytes=size)
        super().__init__(whole, 0, seed, env, f" shard {number}" if number else "")
        travel = self.down

        def down(worker, loaded=True):
            yield from travel(worker, loaded)
            if loaded != (cluster.protocol == "read_then_write" and cluster.separate_reads):
                yield meet(worker)

        self.down = down


class ShardedModel:
    """The usual models of all servers, on one clock, until a time."""

    def __init__(self, cluster, seed, until):
        env = simpy.Environment()
        arrived = [[] for _ in range(cluster.workers)]

        def meet(worker):
            waiting = arrived[worker]
            waiting.append(env.event())
            last = waiting[-1]
            if len(waiting) == cluster.servers:
                for event in waiting:
                    event.succeed()
                waiting.clear()
            return last

        self.servers = [
            ServerModel(cluster, seed, env, number, meet) for number in range(cluster.servers)
        ]
        while env.peek() <= until:
            env.step()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cluster=sharded(), commits=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_each_server_has_the_rows_of_the_usual_model(cluster, commits, seed):
    trace = simulate(cluster, commits, seed)
    model = ShardedModel(cluster, seed, trace.frame["commit_time"].iloc[-1])
    for shard, server in enumerate(model.servers):
        parts = trace.parts[trace.parts["shard"] == shard]
        expected = pd.DataFrame(server.rows, columns=COLUMNS)
        parts = parts.merge(
            trace.frame[["worker", "job", "start_time", "send_time"]],
            how="left",
            on=["worker", "job"],
        )
        for name in COLUMNS[:-1]:
            found = parts[name].to_numpy()
            known = (
                pd.notna(found)
                if name in ("start_time", "send_time")
                else np.ones(len(found), bool)
            )  # of whole messages
            np.testing.assert_array_equal(
                found[known], expected[name].to_numpy()[known], err_msg=name
            )
        open_reads = trace.reads[trace.reads["is_open"] & (trace.reads["shard"] == shard)]
        held = open_reads[["worker", "version", "time"]]
        reads = [(i, *read) for i, reads in enumerate(server.reads) for read in sorted(reads)]
        assert sorted(held.itertuples(index=False, name=None)) == reads
        # The staleness identity of each shard; the right-hand side is counted one increment at a
        # time.
        if cluster.policy == policy.asynchronous():
            aged = parts["staleness"].sum() + (len(parts) - held["version"]).sum()
            assert aged == expected["others"].sum()
            if not cluster.separate_reads:
                others = cluster.workers - (cluster.protocol == "exchange")
                assert aged == len(parts) * others


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cluster=sharded(), commits=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_messages_follow_from_their_parts(cluster, commits, seed):
    trace = simulate(cluster, commits, seed)
    frame, parts = trace.frame, trace.parts
    assert len(trace.accepted) == commits
    whole = parts[parts["commit"] >= 0].groupby("commit")
    assert (whole["shard"].nunique() == cluster.servers).all() and len(whole) == len(frame)
    pd.testing.assert_series_equal(
        whole["commit_time"].max(), frame["commit_time"], check_index=False, check_names=False
    )
    last = parts.loc[whole["part"].max()]
    for name in ("worker", "job", "arrive_time", "serve_time"):
        assert last[name].tolist() == frame[name].tolist(), name
    pd.testing.assert_series_equal(
        whole["read_time"].max(), frame["read_time"], check_index=False, check_names=False
    )
    discarded = whole["outcome"].agg(lambda outcomes: (outcomes == "discarded").all())
    assert discarded.tolist() == (frame["outcome"] == "discarded").tolist()
    if cluster.policy == policy.asynchronous():  # a version of the rows is a message
        assert frame["version"].tolist() == list(range(1, commits + 1))
        read = np.searchsorted(frame["commit_time"], frame["read_time"], side="right")
        of_exchange = read - (cluster.protocol == "read_then_write" and cluster.exclusive)
        first = (frame["job"] == 0).to_numpy()
        np.testing.assert_array_equal(frame["read_version"], np.where(first, 0, of_exchange))


@pytest.mark.parametrize(
    "protocol", PROTOCOLS, ids=lambda options: "_".join(map(str, options.values()))
)
@pytest.mark.parametrize("governed", [POLICIES[3], *HOLDING[1:]], ids=str)
def test_with_constant_times_each_server_has_the_rows_of_one_server(protocol, governed):
    if governed in HOLDING and protocol["protocol"] == "read_then_write":
        with pytest.raises(InputError, match="the server chooses when to answer a read"):
            Cluster(3, 1.0, policy=governed, **protocol, servers=3)
        return
    options = {"service": 0.3, "latency": (0.07, 0.11), "policy": governed, **protocol}
    one = simulate(Cluster(3, [1.0, 1.37, 2.21], **options), 60)
    several = simulate(Cluster(3, [1.0, 1.37, 2.21], **options, servers=3), 60)
    columns = [name for name in several.parts if name in one.frame and name != "commit"]
    for shard in range(3):
        parts = several.parts[several.parts["shard"] == shard].reset_index(drop=True)
        pd.testing.assert_frame_equal(parts[columns], one.frame[columns], check_exact=True)
    kept = [name for name in one.frame if name not in ("local_steps",)]
    pd.testing.assert_frame_equal(several.frame[kept], one.frame[kept], check_exact=True)


@pytest.fixture(params=PROTOCOLS[::2], ids=lambda options: "_".join(map(str, options.values())))
def trace(request):
    options = {"policy": "discard_stale(3)"} if request.param["protocol"] != "exchange" else {}
    return simulate(
        Cluster(5, "gamma(1, 0.5)", "exponential(0.3)", 0.1, servers=4, **options, **request.param),
        120,
    )


def test_a_saved_trace_has_its_parts(trace, tmp_path):
    loaded = Trace.load(trace.save(tmp_path / "trace.parquet"))
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(trace, name), check_exact=True)
    assert field_values(loaded, Source) == field_values(trace, Source) and loaded.servers == 4
    assert (
        loaded.save(tmp_path / "again.parquet").read_bytes()
        == (tmp_path / "trace.parquet").read_bytes()
    )
    assert "at 4 servers" in repr(loaded)


def test_the_summary_is_of_parts(trace):
    summary = trace.summary()
    counted = trace.accepted.parts
    counted = counted[(counted["commit"] >= summary["warm_up"]) & (counted["outcome"] == "applied")]
    assert summary["staleness_mean"] == counted["staleness"].mean()
    busy = (
        (trace.visits["end"] - trace.visits["serve"]).sum()
        / 4
        / trace.frame["commit_time"].iloc[-1]
    )
    assert trace.summary(warm_up=0)["utilisation"] == pytest.approx(busy, rel=0.1)
    shares = [value for name, value in summary.items() if name.endswith("_share")][:7]
    axes = Figure().subplots()
    asyncsim.plots.staleness_histogram(axes, trace, warm_up=0)
    assert (
        f"mean {trace.summary(warm_up=0)['staleness_mean']:.3g}"
        in axes.get_legend().texts[0].get_text()
    )
    if trace.separate_reads:
        assert np.isnan(shares).all()
        with pytest.raises(InputError, match="servers = 4: with reads in visits of their own"):
            trace.plot()
    else:
        assert sum(shares) == pytest.approx(1.0)
    assert trace.queue()["in_system"].max() <= 4 * 5


def test_theory_of_several_servers():
    """Rates are bounds where parts differ; staleness is that of each shard."""
    alike = Cluster(4, "gamma(1, 0.5)", 0.0, 0.1, servers=3)
    assert throughput_theory(alike) == throughput_theory(dataclasses.replace(alike, servers=1))
    differing = Cluster(4, "gamma(1, 0.5)", "exponential(0.2)", "exponential(0.3)", servers=3)
    theory = throughput_theory(differing)
    measured = simulate(differing, 4000).summary()
    assert (
        theory.name == "saturation bound"
        and not theory.exact
        and measured["throughput"] < theory.commits
    )
    assert (
        measured["throughput"]
        < simulate(dataclasses.replace(differing, servers=1), 4000).summary()["throughput"]
    )
    assert queue_theory(differing) is None
    assert staleness_theory(differing).mean == 3.0
