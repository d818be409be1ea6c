"""The replay: repeating, what is recorded, divergence and bad input; `test_replay_numbers` has its
numbers.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
import test_real
from cases import make_problem, make_trace, stateful_problem
from edits import with_columns
from event_loop import RECORDED, Loop

from asyncsim import (
    Cluster,
    InputError,
    asynchronous,
    buffered,
    cancel_stale,
    methods,
    prescribed,
    problems,
    recorders,
    replay_ensemble,
    simulate,
)
from asyncsim.methods import Applied, Method, declared
from asyncsim.replays import tuning
from asyncsim.replays.local import flatten
from asyncsim.replays.replay import Replay, replay

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.full
def test_evaluation_takes_the_mean_state_of_the_workers():
    problem, trace = stateful_problem(), make_trace(commits=300)
    run = replay(trace, methods.downpour(), problem, precision="float64", progress=False)
    loop = Loop(trace, methods.downpour(), problem)
    loop.run()
    means = [state["mean"].sum() for state in loop.states]
    assert run.evaluations["train_loss"].iloc[-1] == pytest.approx(np.mean(means), rel=1e-12)


@pytest.mark.full
def test_evaluations_see_the_central_variable_after_that_many_commits():
    trace, method, problem = (
        make_trace(commits=300),
        methods.downpour(),
        make_problem("digits"),
    )
    run = replay(trace, method, problem, precision="float64", evaluate_every=11, progress=False)
    loop = Loop(trace, method, problem)
    loop.run()
    assert run.evaluations["commit"].tolist() == [0, 77, 154, 231, 300]
    for row in run.evaluations.itertuples():
        params = loop.unravel(loop.sides[0].versions[row.commit][0])
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


def test_commits_carry_what_was_taken_up_of_the_trace():
    trace = make_trace(window=3, commits=200, policy=cancel_stale(2))
    assert len(trace) > 200
    problem = make_problem("quadratic")
    run = replay(trace, methods.downpour(), problem, evaluate_every=5, progress=False)
    taken = trace.frame[trace.frame["outcome"] == "applied"].reset_index(drop=True)
    for name in ("worker", "commit_time", "staleness"):
        pd.testing.assert_series_equal(run.commits[name], taken[name])
    assert run.commits["commit"].tolist() == list(range(200))
    for _, own in run.commits.groupby("worker"):
        assert own["worker_step"].tolist() == list(range(len(own)))
    assert run.evaluations["commit"].tolist() == [*range(0, 200, 35), 200]
    assert run.evaluations["gradients"].iloc[-1] == 600
    assert run.evaluations["commit_time"].iloc[1] == taken["commit_time"].iloc[34]
    assert run.config["method"] == "downpour" and run.config["commits"] == 200


@pytest.mark.parametrize(
    ("precision", "protocol"), [("float32", "exchange"), ("float64", "write_then_read")]
)
def test_a_run_ends_with_the_commit_that_diverges(precision, protocol):
    trace, problem = make_trace(protocol, commits=400), problems.quadratic(np.ones(4))
    method = methods.downpour(learning_rate=200.0)
    with jax.enable_x64(precision == "float64"), np.errstate(over="ignore", invalid="ignore"):
        expected = Loop(trace, method, problem, dtype=jnp.dtype(precision)).run()
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
        run = replay(trace, methods.downpour(), make_problem("quadratic"), record=record)
        assert run.commits["place"].tolist() == places and run.commits["messages"].tolist() == sizes


def test_an_interrupted_replay_says_that_it_cannot_go_on(monkeypatch):
    with jax.enable_x64(True):
        running = Replay(
            make_trace(commits=50), methods.gem(), make_problem("quadratic"), precision="float64"
        )

        def interrupt(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(running, "_take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.advance(50)
        for use in (lambda: running.advance(50), lambda: running.state, running.evaluate):
            with pytest.raises(
                InputError, match="interrupted amid its commits, and cannot go on; make a new one"
            ):
                use()


def test_the_form_by_parameters_and_device(monkeypatch):
    problem, devices = make_problem("digits"), [SimpleNamespace(platform=p) for p in ("cpu", "gpu")]
    assert tuning.form_of(problem, devices[0]) == "batch"  # of 1,210 parameters
    monkeypatch.setattr(tuning, "_FEW_PARAMETERS", 100)
    assert [tuning.form_of(problem, device) for device in devices] == ["single", "batch"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on a CPU")
def test_the_memory_that_parts_are_written_into_is_not_made_of_the_first_of_them():
    tree = {"bias": jnp.ones(1000), "weight": jnp.ones((999, 1001))}
    written = jax.jit(flatten(tree, in_parts=True).ravel).lower(tree).compile().as_text()
    assert " dynamic-update-slice(" in written
    assert " pad(" not in written and " copy(" not in written


# Initial parameters per worker, and real processes

CURVATURE = np.linspace(0.1, 1, 5)
#: The starts of the workers, which lie in both halves of each axis.
STARTS = np.random.default_rng(0).normal(0, 2, (7, 5))


def apart(starts=STARTS, **options):
    """A quadratic whose workers start at the rows of ``starts``."""
    return dataclasses.replace(
        problems.quadratic(CURVATURE, **options), init_replica=lambda key, worker: starts[worker]
    )


def test_a_worker_that_joins_before_any_commit_has_its_own_start(float64):
    cluster = Cluster(
        3,
        "constant(5)",
        topology="ring()",
        policy="asynchronous()",
        failures=["join(1, workers=1)"],
    )
    run = replay(
        simulate(cluster, 6), methods.dpsgd(policy=None), apart(STARTS[:3]), precision="float64"
    )
    first = run.commits.groupby("worker")["loss"].first()
    np.testing.assert_allclose(first, (CURVATURE * STARTS[:3] ** 2).sum(1) / 2)


def test_starts_of_another_shape_are_refused():
    trace = make_trace(commits=10)
    problem = apart([*STARTS[:2], np.zeros(4), *STARTS[3:]])
    with pytest.raises(InputError) as refusal:
        replay(trace, methods.lsgd(), problem)
    assert str(refusal.value) == (
        "init_replica(key, 2): returned float32[4]: must return initial parameters like those of "
        "init, float32[5], for every worker"
    )
    with pytest.raises(InputError, match=r"init_replica\(key, 3\): failed: IndexError"):
        replay(trace, methods.lsgd(), apart(STARTS[:3]))
    with pytest.raises(InputError, match=r"init_replica: takes .* it is called as"):
        replay(trace, methods.lsgd(), dataclasses.replace(problem, init_replica=len))


@declared
def scaled(learning_rate=0.05, trust=0.02):
    """LARS at the server: each tensor's step has a length in proportion to the tensor's."""

    def apply(server, central, message, memory, visit):
        def step(x, g):
            return x - learning_rate * trust * jnp.linalg.norm(x) / (jnp.linalg.norm(g) + 1e-9) * g

        return Applied(jax.tree.map(step, central, message), server, memory)

    return Method(optax.identity(), apply=apply, space="tensors")


@pytest.mark.parametrize("name", ["LSGD", "AD-PSGD", "tensors"])
def test_recordings_of_real_processes_are_their_replays(name, optimized):
    """Of replicas that start apart, with a server and without, and of a method of tensors."""
    method, topology, policy = {**test_real.GOSSIP, "LSGD": (methods.lsgd(0.05), None, None)}.get(
        name, (scaled(), None, None)
    )
    options = {"topology": topology, "policy": policy} if topology else {}
    task = None if name == "tensors" else apart(noise=0.1)
    recorded = test_real.recorded_here(test_real.task_of(method, 24, 4, task, **options))
    assert test_real.difference(recorded) < 1e-12
