"""The replay: repeating, what is recorded, divergence and bad input; `test_slow_replay` has its
numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from cases import make_method, make_problem, make_trace, stateful_problem
from edits import with_columns
from event_loop import RECORDED, EventLoop

from asyncsim import (
    InputError,
    methods,
    prescribed,
    problems,
    replay_ensemble,
)
from asyncsim.replays.replay import replay

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.full
def test_evaluation_takes_the_mean_state_of_the_workers():
    problem, trace = stateful_problem(), make_trace(commits=300)
    run = replay(trace, make_method("downpour"), problem, precision="float64", progress=False)
    loop = EventLoop(trace, make_method("downpour"), problem)
    loop.run(0, 300)
    means = [worker.problem["mean"].sum() for worker in loop.workers.values()]
    assert run.evaluations["train_loss"].iloc[-1] == pytest.approx(np.mean(means), rel=1e-12)


@pytest.mark.full
def test_evaluations_see_the_central_variable_after_that_many_commits():
    trace, method, problem = (
        make_trace(commits=300),
        make_method("downpour"),
        make_problem("digits"),
    )
    run = replay(trace, method, problem, precision="float64", evaluate_every=11, progress=False)
    loop = EventLoop(trace, method, problem)
    loop.run(0, 300)
    assert run.evaluations["commit"].tolist() == [0, 77, 154, 231, 300]
    for row in run.evaluations.itertuples():
        params = loop.unravel(loop.versions[row.commit])
        test = problem.evaluate(params, None, jax.tree.map(jnp.asarray, float64_of(problem.test)))
        assert row.test_loss == pytest.approx(float(test["loss"]), rel=1e-12)
        assert row.test_accuracy == float(test["accuracy"])
        assert row.commit_time == (
            trace.frame["commit_time"].iloc[row.commit - 1] if row.commit else 0
        )
        assert row.gradients == row.commit and row.worker_step == row.commit / 7


def float64_of(tree):
    return jax.tree.map(
        lambda leaf: leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf, tree
    )


def test_commits_carry_the_trace():
    trace = make_trace(window=3, commits=200)
    run = replay(trace, make_method("downpour"), make_problem("quadratic"), progress=False)
    names = {
        "commit": "commit",
        "commit_time": "commit_time",
        "worker": "worker",
        "staleness": "staleness",
    }
    for ours, theirs in {**names, "worker_step": "job"}.items():
        pd.testing.assert_series_equal(run.commits[ours], trace.frame[theirs], check_names=False)
    assert run.evaluations["gradients"].iloc[-1] == 600
    assert run.config["method"] == "downpour" and run.config["commits"] == 200


@pytest.mark.parametrize(
    ("precision", "protocol"), [("float32", "exchange"), ("float64", "write_then_read")]
)
def test_a_run_ends_with_the_commit_that_diverges(precision, protocol):
    trace, problem, method = (
        make_trace(protocol),
        problems.quadratic(np.ones(4)),
        methods.downpour(learning_rate=30.0),
    )
    with jax.enable_x64(precision == "float64"), np.errstate(over="ignore", invalid="ignore"):
        loop = EventLoop(trace, method, problem, dtype=jnp.dtype(precision))
        expected = loop.run(0, len(trace))
    finite = np.logical_and.reduce([np.isfinite(expected[name]) for name in RECORDED[:2]])
    first = int(np.argmin(finite))
    assert 10 < first < len(trace) - 1
    run = replay(trace, method, problem, precision=precision, evaluate_every=2, progress=False)
    assert (run.status, run.diverged_at, len(run.commits)) == ("diverged", first, first + 1)
    last = run.commits.iloc[-1]
    assert not np.isfinite(last[[*RECORDED[:2]]].astype(float)).all()
    assert np.isfinite(run.commits.iloc[:-1][[*RECORDED[:2]]].to_numpy()).all()
    assert (
        run.evaluations["commit"].max() <= first
        and np.isfinite(run.evaluations["train_loss"]).all()
    )
    assert run.evaluations["commit"].tolist() == list(range(0, first + 1, 14))


def test_the_users_own_initial_arrays_stay_whole():
    start = jnp.ones(3)
    problem = problems.custom(lambda key: start, lambda x, batch, key: jnp.sum(x * x) / 2)
    for _ in range(2):
        replay(make_trace(commits=100), methods.downpour(), problem, precision="float64")
    assert jnp.all(start == 1)


def test_an_evaluation_that_is_not_finite_ends_the_run():
    """Each step takes the parameter a hundred times as far out: the loss after the last is too
    large for a float32.
    """
    run = replay(
        prescribed(0, 3, 1),
        methods.downpour(1e-28),
        problems.quadratic([1e30], start=1.0),
        evaluate_every=1,
    )
    assert np.isfinite(run.commits["loss"]).all()
    assert (run.status, np.isfinite(run.evaluations["train_loss"].iloc[-1])) == ("diverged", False)


@pytest.mark.parametrize("batched", [None, True])
def test_test_data_that_are_not_finite_are_no_divergence(batched, value=np.inf):
    problem = problems.custom(
        lambda key: jnp.ones(()),
        lambda p, b, k: jnp.mean(p * b),
        np.ones(3),
        np.array([1.0, value]),
        batch_size=1,
    )
    trace = prescribed(0, 3, 1)
    with pytest.raises(
        InputError, match=f"problem: its test loss is {value} at the initial parameters, before any"
    ):
        if batched is None:
            replay(trace, methods.downpour(0.1), problem, progress=False)
        else:
            replay_ensemble(
                trace, methods.downpour, problem, seeds=[0, 1], batched=batched, progress=False
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "outcome": "discarded",
                "read_version": 0,
                "push_version": 0,
                "version": 0,
                "staleness": 0,
            },
            "took up none of its messages",
        ),
        ({"local_steps": 3}, "local_steps"),
        (
            {"local_steps": [2] * 49 + [1], "worker": 1, "job": range(50)},
            "trace: worker 1 has jobs of 1 to 2 local_steps, .* give all jobs of a worker the same "
            "local_steps",
        ),
    ],
)
def test_traces_that_a_replay_does_not_know(change, message):
    trace = make_trace(window=2, commits=50)
    changed = with_columns(trace, **change)
    with pytest.raises(InputError, match=message):
        replay(changed, methods.downpour(), make_problem("quadratic"))


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (0, "leaky: a commit: computes something else when it is traced again"),
        (4, "leaky: a function of the method or the problem keeps a value from one call"),
    ],
)
def test_functions_that_keep_values_are_told(calls, told):
    """When they are checked, or later if they use what they have kept after so many calls only."""
    kept = []

    def leaky(server, central, message, memory, visit):
        kept.append(message)
        return methods.Applied(
            central + sum(kept if len(kept) > calls else [message]), server, memory
        )

    method = methods.downpour()._replace(name="leaky", apply=leaky)
    with pytest.raises(InputError, match=told):
        replay(prescribed(2, 20, 3), method, problems.quadratic([1.0]))
