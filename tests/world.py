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
from hypothesis import assume
from hypothesis import strategies as st

from asyncsim import Cluster, Trace, failures, simulate, topologies
from asyncsim.base.files import field_values
from asyncsim.clusters import policy
from asyncsim.clusters.laws import Constant, Empirical, Exponential, Gamma, Mixture, Pareto, Uniform
from asyncsim.clusters.network import per_worker
from asyncsim.clusters.topologies import is_symmetric
from asyncsim.traces.columns import ACCEPTED, Source
from asyncsim.traces.phases import IN_WORDS
from asyncsim.traces.trace_summary import push_weights

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
            times = st.sampled_from([0.8, 1.0, 2.5, 10.0])
            numbers = st.integers(1, 3)
            possible += [
                st.builds(policy.first_of, counts, graces),
                st.builds(policy.trials, times, numbers),
                st.builds(
                    policy.trials,
                    st.lists(times, min_size=workers - 1, max_size=workers - 1).map(
                        lambda times: [*times, 50.0]  # the last worker is spared by the weather
                    ),
                    st.lists(numbers, min_size=workers, max_size=workers),
                ),
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
    compute = draw(st.lists(law, min_size=workers, max_size=workers))
    if len(set(compute)) == 1 or draw(st.booleans()):
        compute = compute[0]
    protocol, exclusive = draw(st.sampled_from(routes))
    network = draw(st.sampled_from(NETWORKS))
    windows = st.lists(st.integers(1, 3), min_size=workers, max_size=workers)
    gate = draw(gates(workers, protocol, between)) if governed else policy.asynchronous()
    if isinstance(gate.time, float):  # some computations end in time
        assume(max(law.cdf(gate.time / 3) for law in np.atleast_1d(compute)) > 0.01)
    return Cluster(
        workers=workers,
        compute=compute,
        service=draw(brief),
        latency=draw(st.one_of(brief, st.tuples(brief, brief))),
        shared_bandwidth=bool(network) and draw(st.booleans()),
        window=draw(st.integers(1, 3) | windows),
        protocol=protocol,
        exclusive=exclusive,
        discipline=draw(
            st.sampled_from(["fifo", "lowest_rank", "random"] + ["lock_free"] * (not locked))
        ),
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
    # The last worker is spared, so that some computations end.
    hit = draw(
        st.sampled_from(
            [{"workers": (0,)}, {"workers": (1, 2)}, {"workers": (0, 1, 2), "together": True}]
        )
    )
    rare = st.sampled_from([Exponential(8.0), Uniform(2.0, 30.0), 11.0])
    detect = draw(st.sampled_from([0.0, 0.5, 4.0]))
    kinds = {
        "crash": st.builds(
            lambda every, lasts: failures.crash(every, lasts, detect, **hit), rare, spells
        ),
        "pause": st.builds(
            lambda every, lasts: failures.pause(every, lasts, **hit), spells, spells
        ),
        "slow": st.builds(
            lambda every, lasts: failures.slow(every, lasts, 0.3, **hit), spells, spells
        ),
        "outage": st.builds(
            failures.outage, rare, spells, st.integers(1, 4), st.sampled_from([0.0, 0.3])
        ),
        "loss": st.builds(
            failures.loss, st.sampled_from([0.1, 0.6]), st.sampled_from([0.7, 3.0]), st.booleans()
        ),
        "leave": st.builds(failures.leave, st.sampled_from([0.0, 2.5, 9.0]), workers=st.just((1,))),
        "join": st.builds(failures.join, st.sampled_from([1.0, 6.0]), workers=st.just((2, 3))),
    }
    if without_outages:
        del kinds["outage"]
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4, unique=True))
    return tuple(draw(kinds[kind]) for kind in chosen)


@st.composite
def gossips(draw, policies=(*MESSAGES, "handshake()"), sizes=(1, 6), failing=False):
    """A cluster without a server, on a random, strongly connected graph."""
    workers = draw(st.integers(*sizes))
    messages = draw(st.sampled_from(policies))
    edges = np.array(draw(st.lists(st.integers(0, 1), min_size=workers**2, max_size=workers**2)))
    edges = edges.reshape(workers, workers) | np.eye(workers, k=1, dtype=int)
    edges[-1, 0] = 1
    if messages == "handshake()" or draw(st.booleans()):
        edges = edges | edges.T
    latency = draw(st.sampled_from(["0", "0.7", "exponential(1.5)", "uniform(0, 2)"]))
    law = draw(st.sampled_from(["1", "gamma(1, 0.3)", "exponential(1)", "empirical([0, 1, 2])"]))
    return Cluster(
        *(workers, law),
        latency=latency,
        window=draw(st.integers(1, 2)),
        policy=messages,
        topology=topologies.adjacency(edges),
        failures=draw(weather(without_outages=True)) if failing else (),
    )


# What holds of every trace


def before(frame: pd.DataFrame) -> np.ndarray:
    """Return the version that each row meets."""
    return frame["version"].to_numpy() - (frame["outcome"] == "applied").to_numpy()


def times_are_in_order(trace: Trace) -> None:
    frame, cluster = trace.frame, trace.cluster
    assert frame["commit"].tolist() == list(range(len(frame)))
    order = [
        "read_arrive_time",
        "read_serve_time",
        "read_time",
        "start_time",
        "arrive_time",
        "serve_time",
    ]
    if cluster.protocol == "read_then_write" and not cluster.exclusive:
        order.remove(
            "start_time"
        )  # the read visit of this job comes between its start and its write
        ended = frame[frame["outcome"] != "cancelled"]
        visits = np.diff(ended[["start_time", "push_time", "arrive_time"]], axis=1)
        assert (
            trace.has_failures or (visits >= 0).all()
        )  # a message that is sent again has one read
    # After a cut trial no visit reads.
    assert not (np.diff(frame[[*order, "commit_time"]], axis=1) < 0).any()
    assert (np.diff(frame["commit_time"]) >= 0).all()
    again = frame["failed_by"] == "resent" if trace.has_failures else np.zeros(len(frame), bool)
    for _, own in frame.assign(again=again).groupby("worker"):
        assert own["job"].tolist() == list(np.r_[0, np.cumsum(~own["again"])[:-1]])
        assert (own["start_time"].to_numpy()[1:] >= own["commit_time"].to_numpy()[:-1]).all()
        copies = trace.has_failures and trace.protocol == "gossip"  # an older replica, when back
        assert copies or (np.diff(own["read_version"]) >= 0).all()
        assert not trace.has_failures or (np.diff(own["incarnation"]) >= 0).all()
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
    gossip, waits = trace.protocol == "gossip", may_wait(trace)
    if (gossip and not trace.has_failures) or (trace.protocol == "exchange" and not waits):
        assert (
            frame["read_version"] == frame.groupby("worker")["version"].shift(fill_value=0)
        ).all()
    if gossip:
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


def may_wait(trace: Trace) -> bool:
    """Return whether workers may read later than in their own visit."""
    return trace.has_failures or trace.policy.chooses_when_to_reply


def staleness_is_conserved(trace: Trace) -> None:
    """algorithms.md, L1: with each version every read ages that is open and not the one just
    consumed.
    """
    cluster, gate, n = trace.cluster, trace.policy, trace.workers
    # How many reads are open changes where workers wait for clocks, read apart, or are away.
    apart = trace.protocol == "write_then_read" or not cluster.exclusive
    if trace.has_failures and trace.protocol == "gossip":
        return away_and_back(trace)
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


def away_and_back(trace: Trace) -> None:
    """Whoever is away ages no read, and whoever is back reads an older version."""
    frame, versions = trace.frame, len(trace.accepted)
    applied, times = (frame["outcome"] == "applied").to_numpy(), frame["commit_time"].to_numpy()
    names = ["worker", "read_arrive_time", "read_version"]
    reads = pd.concat([frame, trace.open_reads])[names].drop_duplicates(names[:2])
    aged = 0
    for spell in trace.spells.itertuples():
        aged -= ((times >= spell.begin) & ~(times >= spell.end) & applied).sum()
        back = reads[(reads["worker"] == spell.worker) & (reads["read_arrive_time"] == spell.end)]
        aged += len(back) and (applied & (times < spell.end)).sum() - back["read_version"].iloc[0]
    ages = (versions - trace.open_reads["read_version"]).sum()
    assert frame["staleness"].sum() + ages == versions * (trace.workers - 1) + aged


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
        assert (taken["staleness"] < gate.staleness_limit).all()
        assert (
            np.r_[0, frame["version"]][lost.index] - lost["read_version"] >= gate.staleness_limit
        ).all()
    if gate.name == "buckets":
        for _, part in [*(taken["worker"] % gate.count).groupby(before(taken))][
            : taken["version"].iloc[-1]
        ]:
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
        assert (cut["commit_time"] - cut["start_time"]).to_numpy() == pytest.approx(
            times[cut["worker"]]
        )
        assert (taken["send_time"] - taken["start_time"] <= times[taken["worker"]] + 1e-9).all()
        # A round without a message makes no version.
        made = pd.crosstab(before(frame), frame["worker"]).reindex(columns=range(n), fill_value=0)
        rounds = made.iloc[: taken["version"].iloc[-1]] / np.array(gate.trials_of(n))
        assert (rounds.eq(rounds[0], axis=0) & (rounds >= 1) & (rounds % 1 == 0)).all(axis=None)
    elif gate.grace is not None:
        versions = [part["commit_time"].to_numpy() for _, part in taken.groupby(before(taken))]
        for own, following in itertools.pairwise(versions):
            is_full = gate.name == "first_of" and len(own) == n
            closed_at = own[gate.count - 1] + gate.grace
            assert own[-1] <= closed_at and (is_full or following[0] > closed_at)
    else:
        assert taken["version"].tolist() == [
            k // gate.per_version(n) for k in range(1, len(taken) + 1)
        ]
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
    if trace.has_failures:
        assert (push_weights(trace.accepted) > 0).all()
        if trace.policy.name == "neighbours" and is_symmetric(trace.cluster.topology, n):
            shares = frame["kept"] + frame["weights"].map(sum)
            assert shares[frame["outcome"] == "applied"].to_numpy() == pytest.approx(1.0)
        return
    weight, sent, last = np.ones(n), np.zeros(len(frame)), np.full(n, -1)
    for row in frame.itertuples():
        inbox = sum(
            share * sent[source] for source, share in zip(row.sources, row.weights, strict=True)
        )
        weight[row.worker] = sent[row.commit] = row.kept * weight[row.worker] + inbox
        last[row.worker] = row.commit
    kept = np.where(last >= 0, trace.kept_after[last], 1.0)
    assert kept @ weight + flying["weight"] @ sent[flying["row"]] == pytest.approx(n, abs=1e-12)


def shares_of_time_sum_to_one(trace: Trace) -> None:
    """Whenever one begins to look."""
    for warm_up in {None, 0, len(trace.accepted) // 2}:
        numbers = trace.summary(warm_up)
        if trace.protocol == "gossip" and not trace.has_failures:
            parts = [numbers["computing_share"], numbers["waiting_share"]]
            assert all(math.isnan(part) or -1e-9 < part < 1 + 1e-9 for part in parts)
            continue
        if not trace.has_failures:
            parts = [numbers[f"{phase}_share"] for phase in IN_WORDS]
        else:
            lost = [value for name, value in numbers.items() if name.startswith("lost_to_")]
            parts = [numbers["counted_share"], *lost]
        assert math.isnan(parts[0]) or (
            sum(parts) == pytest.approx(1, abs=1e-9) and min(parts) > -1e-9
        )


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
    plain = cluster.to_dict()
    same = {"plain values": Cluster.from_dict(plain)}
    n, pair = cluster.workers, (cluster.latency_up, cluster.latency_down)
    if cluster.topology is not None:
        pair = cluster.latency_up
    elif cluster.bandwidth is not None and not cluster.shared_bandwidth:
        each = {"latency": per_worker([pair] * n), "bandwidth": per_worker([cluster.bandwidth] * n)}
        same["a network of each worker"] = dataclasses.replace(cluster, **each)
    if n > 1 and not cluster.shared_bandwidth:
        often = (
            {}
            if cluster.topology is not None
            else {"far_every": 3, "far_bandwidth": cluster.bandwidth}
        )
        sites = {"sites": [1, n - 1], "far_latency": pair, **often}
        same["sites as near as far"] = dataclasses.replace(cluster, **sites)
    if not cluster.failures:
        never = ["crash(1e9, 1)", "pause(1e9, 1)", "slow(1e9, 1, 0.5)"]
        if cluster.topology is not None:
            never.append("loss(1e-15, 1)")
        elif not cluster.policy.completes_between_messages:
            never.append("outage(1e9, 1)")
        same["failures that never come"] = dataclasses.replace(cluster, failures=never)
    if cluster.topology is None and cluster.policy == policy.asynchronous():
        gentle = [policy.buffered(1), policy.discard_stale(10**9)]
        if cluster.protocol != "read_then_write":
            gentle += [
                policy.bounded_staleness(10**9),
                policy.first_of(1),
                policy.cancel_stale(10**9),
            ]
        same |= {str(one): dataclasses.replace(cluster, policy=one) for one in gentle}
    return same


def assert_same_events(found: Trace, expected: Trace) -> None:
    for name in expected.frame:
        assert found.frame[name].astype(object).equals(expected.frame[name].astype(object)), name
    assert found.open_reads.equals(expected.open_reads) and found.present.equals(expected.present)
