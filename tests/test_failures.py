"""Failures: exact invariants under every policy, runs by hand, and closed forms of rates."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_policy import all_of_them, governed
from test_simulation import policies

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    InputError,
    Trace,
    Uniform,
    asynchronous,
    barrier,
    bounded_staleness,
    failures,
    first_of,
    rounds,
    simulate,
)
from asyncsim.failures import Failure
from asyncsim.simulation.failing import Counted, FailingSimulation
from asyncsim.traces.columns import ACCEPTED, COLUMNS

N = 4
laws = st.sampled_from([Exponential(1.0), Exponential(5.0), Gamma(3.0, 0.5), Uniform(0.5, 20.0), 7.0])
hit = st.sampled_from([{}, {"workers": (0,)}, {"workers": (1, 2)}, {"workers": (0, 1, 2), "together": True}])
some = st.one_of(
    st.builds(
        lambda detect, every, lasts, hit: failures.crash(every, lasts, detect, **hit),
        st.sampled_from([0.0, 0.5, 4.0]),
        st.sampled_from([Exponential(8.0), Uniform(2.0, 30.0), 11.0]),  # so that some computations end
        laws,
        hit,
    ),
    st.builds(lambda every, lasts, hit: failures.pause(every, lasts, **hit), laws, laws, hit),
    st.builds(lambda every, lasts, hit: failures.slow(every, lasts, 0.3, **hit), laws, laws, hit),
    st.builds(failures.outage, laws, laws, st.integers(1, 4), st.sampled_from([0.0, 0.3])),
    st.builds(failures.loss, st.sampled_from([0.1, 0.6]), st.sampled_from([0.7, 3.0]), st.booleans()),
    st.builds(failures.leave, st.sampled_from([0.0, 2.5, 9.0]), st.just((1,))),
    st.builds(failures.join, st.sampled_from([1.0, 6.0]), st.just((2, 3))),
)


@st.composite
def failing(draw):
    cluster = draw(governed(all_of_them))
    chosen, kinds = [], set()
    for one in draw(st.lists(some, min_size=1, max_size=4)):
        if one.name not in kinds or one.name in ("slow", "loss"):
            chosen.append(one)
            kinds.add(one.name)
    return Cluster.from_dict({**cluster.to_dict(), "failures": list(map(str, chosen))})


def audited(cluster, commits, seed):
    """Simulate; return the trace and how many other reads were open when each version was made."""
    others = []

    class Audited(Counted):
        simulation = None

        def __setattr__(self, name, value):
            if name == "version" and value:
                run = self.simulation
                # That of the message that makes it is not consumed yet.
                others.append(sum(run._reads_made) - sum(run.jobs) - self.__dict__.get("taking", False))
            super().__setattr__(name, value)

        def take(self, *given):
            self.taking = True
            outcome = super().take(*given)
            self.taking = False
            return outcome

    begin = FailingSimulation.__init__

    def init(self, *given):
        begin(self, *given)
        self.admission.simulation = self

    with mock.patch("asyncsim.simulation.failing.Counted", Audited), mock.patch.object(FailingSimulation, "__init__", init):
        return simulate(cluster, commits, seed), others


def check(cluster, commits, seed):
    trace, others = audited(cluster, commits, seed)
    frame = trace.frame
    consumes = frame["failed_by"] != "resent"
    end = len(others)
    ages = end - trace.open_reads["read_version"]
    # The identity of staleness: reads age with each version, whoever is away.
    assert frame.loc[consumes, "staleness"].sum() + ages.sum() == sum(others)
    taken = frame["outcome"].isin(ACCEPTED)
    assert taken.sum() == commits == len(trace.accepted)
    makes = (frame["outcome"] == "applied").to_numpy()
    before = frame["version"].to_numpy() - makes
    assert (before >= np.r_[0, frame["version"].to_numpy()[:-1]]).all()
    assert (frame["staleness"] >= 0).all() and (np.diff(frame["commit_time"]) >= 0).all()
    order = ["read_arrive_time", "read_serve_time", "read_time", "start_time", "arrive_time", "serve_time", "commit_time"]
    if cluster.protocol == "read_then_write" and not cluster.exclusive:
        order.remove("start_time")
    assert (np.diff(frame[order].to_numpy(), axis=1) >= 0).all()
    for _, own in frame.groupby("worker"):
        assert own["job"].tolist() == list(np.r_[0, np.cumsum(own["failed_by"] != "resent")[:-1]])
        assert (own["start_time"].to_numpy()[1:] >= own["commit_time"].to_numpy()[:-1]).all()
        assert (np.diff(own["read_version"]) >= 0).all() and (np.diff(own["incarnation"]) >= 0).all()
    assert trace.open_reads["worker"].is_unique or cluster.protocol == "read_then_write"
    visits = trace.visits.sort_values(["serve", "end"]).to_numpy()
    assert (visits[1:, 2] >= visits[:-1, 3] - 1e-9).all()  # a service that an outage interrupted ends by a difference
    lost = frame[frame["restores"] > 0]
    assert (lost["restored"] >= 0).all() and (lost["restored"] < before[lost.index]).all()
    # A longer trace starts like a shorter one.
    assert simulate(cluster, commits + 10, seed).frame.iloc[: len(frame)].equals(frame)
    shares = trace.summary()
    parts = [value for name, value in shares.items() if name == "counted_share" or name.startswith("lost_to_")]
    assert (sum(parts) == pytest.approx(1.0, abs=1e-9) and min(parts) > -1e-9) or np.isnan(parts[0])
    return trace


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cluster=failing(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_invariants(cluster, commits, seed):
    check(cluster, commits, seed)


@pytest.mark.full
@settings(max_examples=300, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cluster=failing(), commits=st.integers(1, 150), seed=st.integers(0, 2**32))
def test_invariants_of_many(cluster, commits, seed):
    check(cluster, commits, seed)
