"""The world of the tests: clusters drawn axis by axis, and the list of what holds of every trace.

The axes of a cluster are its route (what a visit is), its gate (the policy), the discipline, the
network, the weather (what fails) and, without a server, the topology. Each is drawn by itself, so
that all of them meet.
"""

import dataclasses
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from asyncsim import Cluster, Trace, failures, simulate, topologies
from asyncsim.base.files import field_values
from asyncsim.clusters import policy
from asyncsim.clusters.laws import Constant, Empirical, Exponential, Gamma, Mixture, Pareto, Uniform
from asyncsim.clusters.network import per_worker
from asyncsim.traces.columns import ACCEPTED, COLUMNS, Source
from asyncsim.traces.phases import IN_WORDS

LAWS = [
    Constant(1.0),
    Constant(2.0),
    Exponential(1.0),
    Gamma(1.0, 0.2),
    Pareto(1.0, 1.5),
    Empirical([0.0, 1.0, 2.0]),
    Mixture([Uniform(0.5, 1.0), Constant(8.0)], [0.8, 0.2]),
]
SHORT = [Constant(0.0), Constant(1.0), Exponential(0.1), Uniform(0.0, 0.5), Empirical([0.0, 1.0])]
#: Whole numbers of seconds only: several events in almost every instant.
CROWDED = [Constant(1.0), Constant(2.0), Empirical([0.0, 1.0]), Empirical([0.0, 1.0, 2.0, 3.0])]
#: No two events in one instant.
CONTINUOUS = [Exponential(1.0), Gamma(1.0, 0.2), Uniform(0.5, 2.0)]
ROUTES = [
    ("exchange", True),
    ("read_then_write", True),
    ("read_then_write", False),
    ("write_then_read", True),
]
NETWORKS = [
    {},
    *({"bandwidth": b, "message_bytes": size} for b, size in ((4.0, 2.0), (1, 1), (2, (1, 4)))),
]
MESSAGES = ["asynchronous()", "neighbours()", "neighbours(beside)", "overlap(1)", "overlap(3)"]
SEEDS = st.integers(0, 2**32)


# The axes


def lists_of(values, workers):
    return st.lists(values, min_size=workers, max_size=workers)


def gates(workers: int, protocol: str = "exchange", between: bool = False):
    """Return the policies of a server with that many workers.

    ``between``: also policies that complete versions between messages, which the usual model lacks.
    """
    counts, limits = st.integers(1, workers), st.integers(1, 4)
    possible = [
        st.just(policy.asynchronous()),
        st.just(policy.rounds()),
        st.builds(policy.buckets, counts),
        st.builds(policy.buffered, st.integers(1, 2 * workers)),
        st.builds(policy.discard_stale, limits, counts),
    ]
    if protocol != "read_then_write":
        possible += [
            st.builds(policy.bounded_staleness, st.integers(0, 3)),
            st.builds(policy.first_of, counts),
            st.builds(policy.barrier, st.none() | counts),
            st.builds(policy.cancel_stale, limits, counts),
        ]
    if between:
        graces = st.sampled_from([0.3, 1.0, 5.0])
        possible.append(st.builds(policy.buffered, st.integers(1, 2 * workers), graces))
        if protocol != "read_then_write":
            times, numbers = st.sampled_from([0.8, 1.0, 2.5, 10.0]), st.integers(1, 3)
            # The last worker is spared by the weather, so that some computations end.
            several = lists_of(times, workers - 1).map(lambda times: [*times, 50.0])
            possible += [
                st.builds(policy.first_of, counts, graces),
                st.builds(policy.trials, several, lists_of(numbers, workers)),
            ]
    return st.one_of(possible)


@st.composite
def clusters(
    draw,
    laws=LAWS,
    short=SHORT,
    sizes=(1, 6),
    routes=ROUTES,
    governed=False,
    failing=False,
    locked=True,
    between=False,
):
    """A cluster with a server."""
    workers = draw(st.integers(*sizes))
    law, brief = st.sampled_from(laws), st.sampled_from(short)
    compute = draw(lists_of(law, workers))
    if len(set(compute)) == 1 or draw(st.booleans()):
        compute = compute[0]
    protocol, exclusive = draw(st.sampled_from(routes))
    network = draw(st.sampled_from(NETWORKS))
    gate = draw(gates(workers, protocol, between)) if governed else policy.asynchronous()
    disciplines = ["fifo", "lowest_rank", "random"] + ["lock_free"] * (not locked)
    return Cluster(
        workers=workers,
        compute=compute,
        service=draw(brief),
        latency=draw(st.one_of(brief, st.tuples(brief, brief))),
        shared_bandwidth=bool(network) and draw(st.booleans()),
        window=draw(st.integers(1, 3) | lists_of(st.integers(1, 3), workers)),
        protocol=protocol,
        exclusive=exclusive,
        discipline=draw(st.sampled_from(disciplines)),
        policy=gate,
        failures=draw(weather(gate.completes_between_messages)) if failing else (),
        **network,
    )


@st.composite
def weather(draw, without_outages=False):
    """Up to four failures among at least four workers."""
    spells = st.sampled_from(
        [Exponential(1.0), Exponential(5.0), Gamma(3.0, 0.5), Uniform(0.5, 20.0), 7.0]
    )
    rare = st.sampled_from([Exponential(8.0), Uniform(2.0, 30.0), 11.0])
    # The last worker is spared, so that some computations end.
    hit = draw(st.sampled_from([((0,), False), ((1, 2), False), ((0, 1, 2), True)]))
    hit = {"workers": st.just(hit[0]), "together": st.just(hit[1])}
    detect = st.sampled_from([0.0, 0.5, 4.0])
    times, shares = st.sampled_from([0.0, 2.5, 9.0]), st.sampled_from([0.1, 0.6])
    saving = {"checkpoint_every": st.integers(1, 4), "checkpoint_time": st.sampled_from([0.0, 0.3])}
    kinds = {
        "crash": st.builds(failures.crash, rare, spells, detect, **hit),
        "pause": st.builds(failures.pause, spells, spells, **hit),
        "slow": st.builds(failures.slow, spells, spells, st.just(0.3), **hit),
        "outage": st.builds(failures.outage, rare, spells, **saving),
        "loss": st.builds(failures.loss, shares, st.sampled_from([0.7, 3.0]), st.booleans()),
        "leave": st.builds(failures.leave, times, workers=st.just((1,))),
        "join": st.builds(failures.join, times, workers=st.just((2, 3))),
    }
    if without_outages:
        del kinds["outage"]
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4, unique=True))
    return tuple(draw(kinds[kind]) for kind in chosen)


@st.composite
def gossips(draw, policies=(*MESSAGES, "handshake()"), sizes=(1, 6)):
    """A cluster without a server, on a random, strongly connected graph."""
    workers = draw(st.integers(*sizes))
    messages = draw(st.sampled_from(policies))
    edges = np.array(draw(lists_of(st.integers(0, 1), workers**2)))
    edges = edges.reshape(workers, workers) | np.eye(workers, k=1, dtype=int)
    edges[-1, 0] = 1
    if messages == "handshake()" or draw(st.booleans()):
        edges = edges | edges.T
    latency = draw(st.sampled_from(["0", "0.7", "exponential(1.5)", "uniform(0, 2)"]))
    law = draw(st.sampled_from(["1", "gamma(1, 0.3)", "exponential(1)", "empirical([0, 1, 2])"]))
    window, graph = draw(st.integers(1, 2)), topologies.adjacency(edges)
    return Cluster(workers, law, latency=latency, window=window, policy=messages, topology=graph)


# What holds of every trace


def before(frame: pd.DataFrame) -> np.ndarray:
    """Return the version that each row meets."""
    return frame["version"].to_numpy() - (frame["outcome"] == "applied").to_numpy()


def times_are_in_order(trace: Trace) -> None:
    frame, cluster = trace.frame, trace.cluster
    assert frame["commit"].tolist() == list(range(len(frame)))
    reads, visit = (
        ["read_arrive_time", "read_serve_time", "read_time"],
        ["arrive_time", "serve_time"],
    )
    order = [*reads, "start_time", *visit]
    if cluster.protocol == "read_then_write" and not cluster.exclusive:
        # The read visit of this job comes between its start and its write.
        order.remove("start_time")
        ended = frame[frame["outcome"] != "cancelled"]
        visits = np.diff(ended[["start_time", "push_time", "arrive_time"]], axis=1)
        # A message that is sent again has one read.
        assert trace.has_failures or (visits >= 0).all()
    # After a cut trial no visit reads.
    assert not (np.diff(frame[[*order, "commit_time"]], axis=1) < 0).any()
    assert (np.diff(frame["commit_time"]) >= 0).all()
    again = frame["failed_by"] == "resent" if trace.has_failures else np.zeros(len(frame), bool)
    for _, rows in frame.assign(again=again).groupby("worker"):
        assert rows["job"].tolist() == list(np.r_[0, np.cumsum(~rows["again"])[:-1]])
        assert (rows["start_time"].to_numpy()[1:] >= rows["commit_time"].to_numpy()[:-1]).all()
        assert (np.diff(rows["read_version"]) >= 0).all()
        assert not trace.has_failures or (np.diff(rows["incarnation"]) >= 0).all()
    if trace.protocol != "gossip" and cluster.discipline != "lock_free":
        visits = trace.visits.dropna().sort_values(["serve", "end"])
        assert (visits["serve"].to_numpy()[1:] >= visits["end"].to_numpy()[:-1] - 1e-9).all()


def versions_are_counted(trace: Trace) -> None:
    """Also the versions that were read, by the times of the reads."""
    frame, met = trace.frame, before(trace.frame)
    earlier = np.r_[0, frame["version"].to_numpy()[:-1]]
    between = trace.has_failures or trace.policy.completes_between_messages
    assert (met >= earlier).all() and (between or (met == earlier).all())
    np.testing.assert_array_equal(frame["staleness"], met - frame["read_version"])
    assert (frame["staleness"] >= 0).all()
    # Workers that never wait read in their own visit.
    waits = trace.has_failures or trace.policy.chooses_when_to_reply
    if trace.protocol == "gossip" or (trace.protocol == "exchange" and not waits):
        own_version = frame.groupby("worker")["version"].shift(fill_value=0)
        assert (frame["read_version"] == own_version).all()
    if trace.protocol == "gossip":
        return
    ends, versions = frame["commit_time"].to_numpy(), np.r_[0, frame["version"]]
    reads = pd.concat([frame, trace.open_reads])[["read_time", "read_version", "job"]]
    reads = reads[reads["read_time"] <= ends[-1]]
    least = versions[np.searchsorted(ends, reads["read_time"], side="left")]
    most = np.r_[met, versions[-1]][np.searchsorted(ends, reads["read_time"], side="right")]
    assert (least <= reads["read_version"]).all() and (reads["read_version"] <= most).all()
    if trace.has_failures:
        lost = frame["restores"] > 0
        assert (frame["restored"][lost] >= 0).all() and (frame["restored"][lost] < met[lost]).all()


def staleness_is_conserved(trace: Trace) -> None:
    """algorithms.md, L1: with each version every read ages that is open and not the one just
    consumed.
    """
    cluster, gate, n = trace.cluster, trace.policy, trace.workers
    # How many reads are open changes where workers wait for clocks, read apart, or are away.
    apart = trace.protocol == "write_then_read" or not cluster.exclusive
    if trace.has_failures or (trace.protocol != "gossip" and (gate.bound is not None or apart)):
        return
    others = n if trace.protocol == "read_then_write" else n - 1
    if gate.name == "trials":
        others = 0  # at the end of a round no computation is under way
    elif gate.completes_between_messages:
        if gate.waits_for_version:
            return
        others = n
    elif gate.waits_for_version:
        others = n - gate.per_version(n)
    versions = int(trace.frame["version"].iloc[-1])
    ages = versions - trace.open_reads["read_version"]
    assert trace.frame["staleness"].sum() + ages.sum() == versions * others


def messages_are_taken_up_by_the_policy(trace: Trace) -> None:
    frame, gate, n = trace.frame, trace.policy, trace.workers
    taken = frame[frame["outcome"].isin(ACCEPTED)]
    assert len(taken) == len(trace.accepted)
    if trace.protocol == "gossip" or trace.has_failures:
        return
    outcomes = set(frame["outcome"])
    stops = gate.stops_computations or gate.name == "trials"
    assert stops or "cancelled" not in outcomes
    if gate.staleness_limit is None:
        assert "discarded" not in outcomes
    else:
        lost = frame[~frame.index.isin(taken.index)]
        age = np.r_[0, frame["version"]][lost.index] - lost["read_version"]
        assert (taken["staleness"] < gate.staleness_limit).all()
        assert (age >= gate.staleness_limit).all()
    if gate.name == "buckets":
        versions = [*(taken["worker"] % gate.count).groupby(before(taken))]
        for _, part in versions[: taken["version"].iloc[-1]]:
            assert part.nunique() == gate.count and part.iloc[:-1].nunique() == gate.count - 1
    elif gate.name == "rounds":
        makers = taken.loc[taken["outcome"] == "applied", "worker"].to_numpy()
        rounds = makers[: len(makers) // n * n].reshape(-1, n)
        assert (np.sort(rounds, axis=1) == np.arange(n)).all()
        # The paper's bound on the delay; it has workers read in the visit of their gradient.
        assert trace.protocol != "exchange" or frame["staleness"].max() <= 2 * n - 2
    elif gate.name == "trials":
        cut = frame[frame["outcome"] == "cancelled"]
        times = np.array(gate.trial_times(n))
        np.testing.assert_allclose(cut["commit_time"] - cut["start_time"], times[cut["worker"]])
        assert (taken["send_time"] - taken["start_time"] <= times[taken["worker"]] + 1e-9).all()
        # A round without a message makes no version.
        made = pd.crosstab(before(frame), frame["worker"]).reindex(columns=range(n), fill_value=0)
        rounds = made.iloc[: taken["version"].iloc[-1]] / np.array(gate.trials_of(n))
        assert (rounds.eq(rounds[0], axis=0) & (rounds >= 1) & (rounds % 1 == 0)).all(axis=None)
    elif gate.grace is not None:
        versions = [part["commit_time"].to_numpy() for _, part in taken.groupby(before(taken))]
        for ends, following in itertools.pairwise(versions):
            is_full = gate.name == "first_of" and len(ends) == n
            closed_at = ends[gate.count - 1] + gate.grace
            assert ends[-1] <= closed_at and (is_full or following[0] > closed_at)
    else:
        counts = np.arange(1, len(taken) + 1)
        np.testing.assert_array_equal(taken["version"], counts // gate.per_version(n))
    if gate.waits_for_version:
        assert taken.groupby(before(taken))["worker"].apply(lambda workers: workers.is_unique).all()
    if gate.bound is not None:
        clocks = np.cumsum(frame["worker"].to_numpy()[:, None] == np.arange(n), axis=0)
        assert np.ptp(clocks, axis=1).max() <= gate.bound + 1
        # Another worker is at least at this one's clock less the bound when it reads, and at most
        # at its clock and the bound and one more when it commits.
        assert frame["staleness"].max() <= (n - 1) * (2 * gate.bound + 1)


def shares_are_conserved(trace: Trace) -> None:
    """The weights of push-sum, sent along the trace, sum to the workers with those in flight."""
    if trace.protocol != "gossip":
        return
    frame, n, flying = trace.frame, trace.workers, trace.in_flight
    beside = trace.policy.name == "handshake" or trace.policy.mix == "beside"
    assert trace.takes_up == ("commit" if beside else "read")
    weight, sent, last = np.ones(n), np.zeros(len(frame)), np.full(n, -1)
    for row in frame.itertuples():
        inbox = np.dot(row.weights, sent[row.sources])
        weight[row.worker] = sent[row.commit] = row.kept * weight[row.worker] + inbox
        last[row.worker] = row.commit
    kept = np.where(last >= 0, trace.kept_after[last], 1.0)
    assert kept @ weight + flying["weight"] @ sent[flying["row"]] == pytest.approx(n, abs=1e-12)


def shares_of_time_sum_to_one(trace: Trace) -> None:
    """Whenever one begins to look."""
    for warm_up in {0, len(trace.accepted) // 2}:
        numbers = trace.summary(warm_up)
        if trace.protocol == "gossip":
            parts = [numbers["computing_share"], numbers["waiting_share"]]
            assert all(math.isnan(part) or -1e-9 < part < 1 + 1e-9 for part in parts)
            continue
        parts = [numbers[f"{phase}_share"] for phase in IN_WORDS]
        assert not numbers["lost_time_share"] > numbers["computing_share"] + 1e-9
        if trace.has_failures:
            lost = [value for name, value in numbers.items() if name.startswith("lost_to_")]
            parts = [numbers["counted_share"], *lost]
        if not math.isnan(parts[0]):
            assert sum(parts) == pytest.approx(1, abs=1e-9) and min(parts) > -1e-9


def a_longer_trace_begins_like_it(trace: Trace) -> None:
    longer = simulate(trace.cluster, len(trace.accepted) + 20, trace.seed)
    pd.testing.assert_frame_equal(longer.frame.iloc[: len(trace)], trace.frame, check_exact=True)


def it_comes_back_from_a_file(trace: Trace, path) -> None:
    again = Trace.load(trace.save(path))
    path.unlink()
    pd.testing.assert_frame_equal(again.frame, trace.frame, check_exact=True)
    for table in ("open_reads", "present", "in_flight", "spells"):
        assert getattr(again, table).equals(getattr(trace, table)), table
    assert field_values(again, Source) == field_values(trace, Source)


def check(trace: Trace, path) -> None:
    """Assert all that holds of every trace."""
    for law in (
        times_are_in_order,
        versions_are_counted,
        staleness_is_conserved,
        messages_are_taken_up_by_the_policy,
        shares_are_conserved,
        shares_of_time_sum_to_one,
        a_longer_trace_begins_like_it,
    ):
        law(trace)
    it_comes_back_from_a_file(trace, path)


# Other ways to say the same


def said_otherwise(cluster: Cluster) -> dict[str, Cluster]:
    """Return clusters whose traces are those of this one."""
    n, pair = cluster.workers, (cluster.latency_up, cluster.latency_down)
    has_server = cluster.topology is None
    pair = pair if has_server else pair[0]
    same = {"plain values": Cluster.from_dict(cluster.to_dict())}

    def add(name, **changes):
        same[name] = dataclasses.replace(cluster, **changes)

    if not has_server and n > 1 and pair != Constant(0.0):
        add("no slow link", topology=topologies.slow_links(cluster.topology, [(0, 1, 1)]))
    if has_server and cluster.bandwidth is not None and not cluster.shared_bandwidth:
        bandwidth = per_worker([cluster.bandwidth] * n)
        add("a network of each worker", latency=per_worker([pair] * n), bandwidth=bandwidth)
    if n > 1 and not cluster.shared_bandwidth:
        often = {"far_every": 3, "far_bandwidth": cluster.bandwidth} if has_server else {}
        add("sites as near as far", sites=[1, n - 1], far_latency=pair, **often)
    if has_server and not cluster.failures:
        never = ["crash(1e9, 1)", "pause(1e9, 1)", "slow(1e9, 1, 0.5)"]
        outage = [] if cluster.policy.completes_between_messages else ["outage(1e9, 1)"]
        add("failures that never come", failures=never + outage)
    if has_server and cluster.policy == policy.asynchronous():
        gentle = ["buffered(1)", "discard_stale(1000000000)"]
        if cluster.protocol != "read_then_write":
            gentle += ["bounded_staleness(1000000000)", "first_of(1)", "cancel_stale(1000000000)"]
        for text in gentle:
            add(text, policy=text)
    return same


def assert_same_events(trace: Trace, expected: Trace) -> None:
    for name in COLUMNS:
        assert trace.frame[name].astype(object).equals(expected.frame[name].astype(object)), name
    assert trace.open_reads.equals(expected.open_reads) and trace.present.equals(expected.present)
