"""Failures in clusters without a server: times and shares by hand, what is conserved, and replays
as plain loops.
"""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import asyncsim
from asyncsim import (
    Cluster,
    InputError,
    failures,
    methods,
    problems,
    replay,
    replay_ensemble,
    simulate,
    topologies,
)
from asyncsim.clusters.topologies import is_symmetric
from asyncsim.pages.film import film, frame_times
from asyncsim.replays.replay import Replay
from asyncsim.traces.columns import COLUMNS, GOSSIP_COLUMNS
from asyncsim.traces.phases import phases
from asyncsim.traces.trace_summary import push_weights

THIRD = pytest.approx(1 / 3)
CURVATURE, START, RATE = np.linspace(0.2, 1, 6), np.linspace(-1, 2, 6), 0.05


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


def test_two_seconds_pass_before_the_next_gradient_of_a_mixed_replica():
    """The same with `neighbours()`: nobody computes between the death at 2 and its detection at
    4.
    """
    crash = failures.crash(2, 100, detect=2, workers=2)
    trace = simulate(Cluster(3, 1.0, topology="ring()", policy="neighbours()", failures=[crash]), 9)
    assert columns(trace, "worker", "start_time", "commit_time", "sources", first=4) == [
        [0, 1.0, 2.0, [1, 2]],
        [1, 1.0, 2.0, [0, 2]],
        [0, 4.0, 5.0, [4, 5]],
        [1, 4.0, 5.0, [4, 5]],
        [0, 5.0, 6.0, [6, 7]],
        [1, 5.0, 6.0, [6, 7]],
    ]
    summary = trace.summary(0)
    assert summary["away_share"] == pytest.approx(4 / 18) and summary[
        "lost_to_waiting"
    ] == pytest.approx(4 / 18)
    assert summary["lost_to_failed"] == pytest.approx(5 / 18) and summary[
        "counted_share"
    ] == pytest.approx(9 / 18)


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


def test_both_halves_of_an_exchange_with_a_lost_message_come_back():
    trace = simulate(
        Cluster(
            2,
            1.0,
            topology="ring()",
            policy="neighbours()",
            failures=["loss(0.4, 0.5, resend=False, workers=0)"],
        ),
        40,
    )
    frame = trace.frame
    senders = [[frame["worker"].iloc[source] for source in sources] for sources in frame["sources"]]
    own = [peers == [worker] for peers, worker in zip(senders, frame["worker"], strict=True)]
    late = (frame["start_time"] - frame["read_arrive_time"]).to_numpy()
    assert 5 < sum(own) < 30 and (late[own] == 0.5).all() and (late[np.logical_not(own)] == 0).all()
    assert (frame["kept"] + frame["weights"].map(sum)).to_numpy() == pytest.approx(1.0)


def test_a_message_that_is_sent_again_comes_later():
    lossy = failures.loss(0.3, 2.0, workers=0)
    alone, both = (
        simulate(Cluster(4, 1.0, topology="ring()", policy="neighbours()", failures=chosen), 80)
        for chosen in ([], [lossy])
    )
    late = (
        (both.frame["start_time"] - both.frame["read_arrive_time"])
        .groupby(both.frame["worker"])
        .max()
    )
    assert alone.waits().max() == 0 and late[1] >= 2 and late[3] >= 2
    for name in ("sources", "weights"):  # of each worker's gradients
        rows = [trace.frame.sort_values(["worker", "job"])[name] for trace in (alone, both)]
        assert [len(row) for row in rows[0].iloc[:15]] == [len(row) for row in rows[1].iloc[:15]]


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
        spent = sum(
            (table["end"].clip(upper=last) - table["begin"]).sum()
            for table in phases(trace, [worker])
        )
        assert spent == pytest.approx(last)
    return trace


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cluster=failing(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_invariants(cluster, commits, seed):
    check(cluster, commits, seed)


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
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


@pytest.mark.parametrize("policy", ["asynchronous()", "handshake()"])
def test_another_failure_changes_nobody_elses_times(policy):
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


def test_a_trace_is_saved_and_loaded(tmp_path):
    everything = [
        "crash(3, exponential(1), detect=1)",
        "loss(0.2, 1, resend=False)",
        "join(4, workers=2)",
    ]
    trace = simulate(
        Cluster(5, "exponential(1)", topology="ring()", policy="neighbours()", failures=everything),
        60,
    )
    loaded = asyncsim.Trace.load(trace.save(tmp_path / "trace.parquet"))
    for name in ("frame", "spells", "in_flight", "open_reads"):
        pd.testing.assert_frame_equal(
            getattr(loaded, name), getattr(trace, name), check_dtype=False
        )
    assert loaded.summary() == trace.summary() and (trace.in_flight["taker"] < 0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.assign(incarnation=0), "read_version of row"),
        (
            lambda frame: frame.assign(outcome=frame["outcome"].replace("cancelled", "lost")),
            "must be 'applied'",
        ),
        (lambda frame: frame.assign(kept=1.0), "of which more, or less, than all"),
    ],
)
def test_contradictory_traces_are_refused(change, message):
    trace = simulate(
        Cluster(
            3, 1.0, topology="ring()", policy="neighbours()", failures=["crash(2, 3, workers=2)"]
        ),
        20,
    )
    with pytest.raises(InputError, match=message):
        asyncsim.Trace.of(
            change(trace.frame), trace.source, trace.open_reads, in_flight=trace.in_flight
        )


def test_without_a_server_none_goes_down():
    with pytest.raises(InputError, match=r"failures = outage.*there is no server; leave it out"):
        Cluster(3, 1.0, topology="ring()", failures=[failures.outage(3, 1)])


def test_what_is_nothing_but_crashes_ends_with_an_error():
    with pytest.raises(InputError, match="so often that no gradient was applied"):
        simulate(Cluster(2, 1.0, topology="ring()", failures=["crash(0.1, 0.1)"]), 5)


# Replays.

FAILURES = [
    failures.crash("exponential(6)", "exponential(2)", detect=1.0),
    failures.loss(0.1, timeout=0.7, resend=False),
    failures.join(5.0, workers=6),
]
CASES = {
    "dpsgd": (methods.dpsgd, {"topology": "ring()", "policy": "neighbours(mix=beside)"}),
    "sgp": (methods.sgp, {"topology": "one_peer_exponential()", "policy": "neighbours()"}),
    "overlap": (methods.osgp, {"topology": "exponential()", "policy": "overlap(1)"}),
    "adpsgd": (methods.adpsgd, {"topology": "complete()", "policy": "handshake()"}),
}
FLIP, ZERO, ALIE = "sign_flip(workers=2, scale=0.5)", "zero(workers=2)", "alie(workers=2, z=1.5)"
#: By attack: the change of a message, and the message formed from the known honest ones.
ATTACKS = {
    None: (lambda vector: vector, None),
    FLIP: (lambda vector: -0.5 * vector, None),
    ZERO: (lambda vector: 0 * vector, None),
    ALIE: (lambda vector: vector, lambda known: known.mean(0) - 1.5 * known.std(0)),
}
ATTACKED = [("dpsgd", FLIP), ("sgp", ZERO), ("overlap", ALIE), ("adpsgd", FLIP), ("adpsgd", ALIE)]


def case_of(name, commits=150):
    make, options = CASES[name]
    trace = simulate(
        Cluster(7, "exponential(1)", latency=0.2, failures=FAILURES, **options), commits
    )
    assert len(trace.spells) > 20 and (trace.spells["to_row"] > 0).sum() > 15
    return make, trace


class Loop:
    """A loop over the events of a trace, written from `docs/clusters.md`; ``central`` after each
    gradient.
    """

    def __init__(self, trace, method, attack=None):
        self.trace, self.frame, self.method = trace, trace.frame, method
        n = trace.workers
        self.change, self.form = ATTACKS[attack]
        self.honest = np.arange(n) >= (2 if attack else 0)
        self.x, self.w, self.snapshot = np.tile(START, (n, 1)), np.ones(n), np.tile(START, (n, 1))
        self.living, self.copied = (
            np.ones(n, bool),
            np.ones(n),
        )  # the share of an initial replica, or of a copy
        self.last = np.full(n, -1)
        self.sent, self.left = (
            {},
            {},
        )  # of each row: its message, and the share that nobody has taken up
        self.central = []
        events = [(spell.begin, self.end, spell.worker) for spell in trace.spells.itertuples()]
        events += [
            (spell.end, self.begin, spell)
            for spell in trace.spells.dropna(subset=["end"]).itertuples()
        ]
        lost = trace.in_flight[trace.in_flight["taker"] < 0]
        events += [(flight.arrive_time, self.lose, flight) for flight in lost.itertuples()]
        events.sort(key=lambda event: event[0])
        for row in self.frame[self.frame["outcome"] == "applied"].itertuples():
            # What is lost at the instant of its own sending comes after it.
            while (
                events
                and events[0][0] <= row.commit_time
                and getattr(events[0][2], "row", -1) < row.commit
            ):
                _, change, what = events.pop(0)
                change(what)
            self.apply(row)
            self.central.append(self.mean())

    def lose(self, flight):
        self.left[flight.row] -= flight.weight

    def end(self, worker):
        self.living[worker], self.copied[worker] = False, 0
        if self.last[worker] >= 0:
            self.left[self.last[worker]] -= self.trace.kept_after[self.last[worker]]
        self.last[worker] = -1

    def begin(self, spell):
        worker = spell.worker
        reads = pd.concat([self.frame, self.trace.open_reads])
        own = reads[(reads["worker"] == worker) & (reads["read_arrive_time"] == spell.end)]
        version, replica = own["read_version"].iloc[0], START
        if version:
            source = self.frame["worker"][self.frame["outcome"] == "applied"].iloc[version - 1]
            assert self.living[source]
            replica = self.x[source] / self.w[source]
            if not self.honest[source] and self.method != "adpsgd":  # as it was sent
                x, w = self.sent[self.last[source]]
                replica = x / (w or 1)
        self.x[worker] = self.snapshot[worker] = replica
        self.living[worker], self.copied[worker], self.w[worker] = True, 1, 1

    def apply(self, row):
        i = row.worker
        if self.method == "adpsgd":
            step = -RATE * CURVATURE * self.snapshot[i]
            if row.partner >= 0:
                assert self.living[row.partner]
                shown = [self.shown(worker, row.commit) for worker in (row.partner, i)]
                both = [i, row.partner]
                self.x[both] = (self.x[both] + shown) / 2
            self.x[i] = self.snapshot[i] = self.x[i] + step
            return
        came = self.received(row)
        for source, share in zip(row.sources, row.weights, strict=True):
            self.left[source] -= share
        if self.last[i] >= 0:
            self.left[self.last[i]] -= row.kept
        sums = np.sum([share * sent for share, sent in zip(row.weights, came, strict=True)], 0)
        mixed, weight = row.kept * self.x[i], row.kept * self.w[i]
        if len(came):
            mixed, weight = mixed + sums[:-1], weight + sums[-1]
        self.x[i] = mixed - RATE * CURVATURE * (
            self.x[i] if self.method == "dpsgd" else mixed / weight
        )
        self.w[i] = 1 if self.method == "dpsgd" else weight
        self.copied[i], self.last[i] = 0, row.commit
        x, w = self.x[i].copy(), self.w[i]
        if not self.honest[i]:
            x, w = self.change(x), w if self.method == "dpsgd" else self.change(w)
        self.sent[row.commit], self.left[row.commit] = (x, w), 1.0

    def received(self, row):
        """Return the messages, each with its weight; those of Byzantine senders as formed for the
        receiver.
        """
        senders = [self.frame["worker"][source] for source in row.sources]
        messages = [np.array([*x, w]) for x, w in map(self.sent.get, row.sources)]
        known = {
            sender: sent
            for sender, sent in zip(senders, messages, strict=True)
            if self.honest[sender]
        }
        if self.honest[row.worker]:
            known[row.worker] = np.array([*self.x[row.worker], self.w[row.worker]])
        if self.form is None or not known:
            return messages
        formed = self.form(np.array(list(known.values())))
        return [
            sent if self.honest[sender] else formed
            for sender, sent in zip(senders, messages, strict=True)
        ]

    def shown(self, worker, commit):
        """Return the replica that a worker shows the one that it meets."""
        if self.honest[worker]:
            return self.x[worker]
        if self.form is None:
            return self.change(self.x[worker])
        spells = self.trace.spells.fillna({"from_row": np.inf, "to_row": np.inf})
        away = spells["worker"][(spells["from_row"] <= commit) & (commit < spells["to_row"])]
        return self.form(self.x[self.honest & ~np.isin(np.arange(self.trace.workers), away)])

    def mean(self):
        if self.method == "adpsgd":
            counted = self.living & self.honest
            return self.x[counted].mean(0) if counted.any() else self.central[-1]
        shares = [
            (share, *self.sent[row])
            for row, share in self.left.items()
            if self.honest[self.frame["worker"][row]]
        ]
        shares += [
            (share, x, 1.0)
            for share, x in zip(self.copied * self.honest, self.x, strict=True)
            if share
        ]
        weight = sum(share * w for share, _, w in shares)
        return sum(share * x for share, x, _ in shares) / weight


@pytest.mark.parametrize(
    ("name", "attack", "form"),
    [(name, None, form) for name in CASES for form in ("single", "batch")]
    + [
        (*case, form)
        for case, form in zip(
            ATTACKED, ["single", "batch", "single", "batch", "single"], strict=True
        )
    ],
)
def test_replays_are_plain_loops(name, attack, form, float64):
    make, trace = case_of(name)
    method = make(RATE)
    loop = Loop(trace, name, attack)
    options = {
        "stops": np.arange(0, len(trace), 7),
        "precision": "float64",
        "form": form,
        "attack": attack,
    }
    running = Replay(trace, method, problems.quadratic(CURVATURE, start=START), **options)
    for stop in range(7, len(loop.central), 7):
        running.advance(stop)
        np.testing.assert_allclose(
            running.state.central, loop.central[stop - 1], rtol=0, atol=1e-12
        )
    running.advance(len(loop.central))
    own = running.state.workers.method
    replicas = {"adpsgd": lambda: own, "dpsgd": lambda: own.replica}.get(
        name, lambda: own.biased + own.update
    )()
    np.testing.assert_allclose(
        np.asarray(replicas)[loop.living], loop.x[loop.living], rtol=0, atol=1e-12
    )


def test_several_devices_are_plain_loops(float64):
    make, trace = case_of("dpsgd")
    problem = problems.quadratic(CURVATURE, start=START)
    running = Replay(trace, make(RATE), problem, precision="float64", devices=jax.devices()[:2])
    running.advance(len(trace.accepted))
    np.testing.assert_allclose(
        running.state.central, Loop(trace, "dpsgd").central[-1], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("attack", [None, FLIP])
def test_evaluations_are_of_the_living(attack, float64):
    make, trace = case_of("dpsgd")
    loop = Loop(trace, "dpsgd", attack)
    problem = problems.quadratic(CURVATURE, start=START)
    run = replay(
        trace, make(RATE), problem, precision="float64", evaluate_replicas=True, attack=attack
    )
    last, living = run.evaluations.iloc[-1], loop.x[loop.living & loop.honest]
    assert not loop.living.all()
    distance = np.mean(np.sum((living - loop.central[-1]) ** 2, 1))
    assert last["consensus_distance"] == pytest.approx(distance, rel=1e-9)
    losses = 0.5 * (CURVATURE * living**2).sum(1)
    assert last["train_loss_worst"] == pytest.approx(losses.max(), rel=1e-9)
    rates = {"learning_rate": [0.02, RATE], "attack": attack}
    members = replay_ensemble(
        trace, make, problem, seeds=[0], batched=True, precision="float64", **rates
    )
    np.testing.assert_allclose(members[1].params, run.params, rtol=0, atol=1e-12)
    asyncsim.plots.overview(trace)
    assert len(film(run, trace, frame_times([trace], 20), "").phase) == 20
