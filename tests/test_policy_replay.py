"""Replays under timing policies: the loop over events, a loop over the policy itself, and what runs
and studies say.
"""

import pandas as pd
import pytest
from cases import make_method, make_problem, make_trace

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    asynchronous,
    barrier,
    buffered,
    cancel_stale,
    methods,
    problems,
    recorders,
    replay,
    replay_ensemble,
    simulate,
)
from asyncsim.methods import Timing
from asyncsim.study.cell import meet

pytestmark = pytest.mark.usefixtures("float64")


def test_runs_line_up_with_what_was_taken_up():
    trace = make_trace(commits=200, policy=cancel_stale(2))
    assert len(trace) > 200
    run = replay(
        trace, make_method("downpour"), make_problem("quadratic"), evaluate_every=5, progress=False
    )
    taken = trace.frame[trace.frame["outcome"] == "applied"].reset_index(drop=True)
    for name in ("worker", "commit_time", "staleness"):
        pd.testing.assert_series_equal(run.commits[name], taken[name])
    assert run.commits["commit"].tolist() == list(range(200))
    for _, own in run.commits.groupby("worker"):
        assert own["worker_step"].tolist() == list(range(len(own)))
    assert run.evaluations["commit"].tolist() == [*range(0, 200, 35), 200]
    assert run.evaluations["gradients"].iloc[-1] == 200 == run.config["commits"]
    assert run.evaluations["commit_time"].iloc[1] == taken["commit_time"].iloc[34]
    assert set(run.diagnostics["commit"]) <= set(range(200))


def test_the_cluster_that_meets_a_policy():
    cluster = Cluster(5, Gamma(1.0, 0.5), 0.1)
    assert meet(cluster, Timing(policy=barrier(3))) == Cluster(
        5, Gamma(1.0, 0.5), 0.1, policy=barrier(3)
    )
    assert meet(cluster, Timing()) == cluster
    # A lone worker has nobody to wait for.
    alone = meet(Cluster(5, Gamma(1.0, 0.5), policy=barrier(3)), methods.sgd().timing)
    assert alone == Cluster(1, Gamma(1.0, 0.5))
    with pytest.raises(InputError, match="reads before the server"):
        meet(Cluster(5, 1.0, protocol="read_then_write"), Timing(policy=barrier(3)))


def test_evaluations_are_of_complete_versions():
    """Downpour adds messages at once, also to a version that nobody can read yet."""
    trace = simulate(Cluster(4, "gamma(1, 0.3)", policy=buffered(10)), 48, seed=1)
    run = replay(
        trace,
        methods.downpour(0.02),
        problems.quadratic([1.0, 0.3]),
        evaluate_every=3,
        progress=False,
    )
    assert run.evaluations["commit"].tolist() == [0, 10, 20, 30, 40]
    none = simulate(Cluster(4, "gamma(1, 0.3)", policy=buffered(100)), 48, seed=1)
    run = replay(none, methods.downpour(0.02), problems.quadratic([1.0, 0.3]), progress=False)
    assert run.evaluations["commit"].tolist() == [0] and len(run.commits) == 48
    (batched,) = replay_ensemble(
        trace, methods.downpour, problems.quadratic([1.0, 0.3]), batched=True, progress=False
    )
    assert (
        batched.evaluations["commit"].tolist() == [0, 10, 20, 30, 40] and len(batched.commits) == 48
    )


def test_a_visit_knows_its_place_in_its_version():
    def observe(state, commit):
        return state, [commit.visit.place, commit.visit.messages]

    record = [recorders.Recorder(("place", "messages"), observe)]
    for policy, places, sizes in (
        (buffered(3), [0, 1, 2, 0, 1, 2, 0, 1], [3] * 6 + [2] * 2),
        (asynchronous(), [0] * 8, [1] * 8),
    ):
        trace = make_trace(commits=8, policy=policy)
        run = replay(trace, make_method("downpour"), make_problem("quadratic"), record=record)
        assert run.commits["place"].tolist() == places and run.commits["messages"].tolist() == sizes
