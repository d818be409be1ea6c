"""Replays of traces with crashes and outages against the loop over their events, and what recorders
see of them.
"""

import jax
import numpy as np
import pytest

from asyncsim import Cluster, failures, methods, problems, replay, simulate
from asyncsim.replays.replay import Replay

CRASH = failures.crash("exponential(12)", "exponential(4)", detect=1.0)
OUTAGE = failures.outage("exponential(15)", 2.0, checkpoint_every=7, checkpoint_time=0.2)
LOSS = failures.loss(0.1, timeout=2.0, resend=False)
TIMES = {"compute": "gamma(mean=1, cv=0.5)", "service": 0.02, "latency": 0.05}


def trace_of(commits=300, seed=1, workers=5, **options):
    return simulate(Cluster(workers, **{**TIMES, **options}), commits, seed)


EVERYTHING = [CRASH, OUTAGE, LOSS]


@pytest.mark.parametrize("failing", [[CRASH], EVERYTHING], ids=["crash", "everything"])
@pytest.mark.parametrize("policy", ["barrier()", "first_of(count=3)"])
def test_update_norm_is_at_the_commit_that_moves_the_central_variable(policy, failing):
    """A version that a death makes moves it at the last message that went into it, as in
    `Trace.accepted`.
    """
    trace = trace_of(failures=failing, policy=policy, commits=150)
    accepted = trace.accepted.frame
    raw = trace.frame[trace.frame["outcome"].isin(["applied", "buffered"])]
    of_death = (accepted["outcome"] == "applied").to_numpy() & (
        raw["outcome"] == "buffered"
    ).to_numpy()
    if policy == "barrier()":
        assert of_death.any() == (CRASH in failing)
    method, problem = (
        methods.batch_sgd(policy=policy),
        problems.quadratic(curvature=[0.1, 0.4, 1.0]),
    )
    stops = np.arange(len(accepted) + 1)
    with jax.enable_x64(True):
        run = Replay(trace, method, problem, precision="float64", stops=stops)
        centrals = [np.array(run.state.central)]
        for stop in stops[1:]:
            run.advance(stop)
            centrals.append(np.array(run.state.central))
    norms = run.result().commits["update_norm"].to_numpy()
    np.testing.assert_array_equal(norms > 0, accepted["outcome"] == "applied")
    # A restore moves it, too, and is no step of the commit that follows.
    steps = accepted["restores"].to_numpy() == 0
    moved = np.linalg.norm(np.diff(centrals, axis=0), axis=1)
    np.testing.assert_allclose(norms[steps], moved[steps], atol=1e-12)
    pieces = replay(trace, method, problem, precision="float64").commits["update_norm"]
    np.testing.assert_allclose(pieces, norms, atol=1e-12)
