"""What holds of every replay, whatever is replayed: a matrix of systems and contracts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from cases import make_problem, make_trace, noisy, stateful_problem
from event_loop import deviation
from test_gossip import own_targets, tracking

from asyncsim import (
    Cluster,
    InputError,
    Run,
    Trace,
    methods,
    pipeline,
    prescribed,
    problems,
    recorders,
    replay,
    replay_ensemble,
    simulate,
)

pytestmark = pytest.mark.usefixtures("float64", "lenient")
COMMITS, RATES = 60, [0.01, 0.02]


class System(NamedTuple):
    """A trace of some commits, the factory of a method by its rate, a problem, and options of the
    replay.
    """

    trace: Callable[[int], Trace]
    factory: Any = methods.gem
    problem: Callable[[], Any] = functools.partial(make_problem, "quadratic")
    options: Mapping[str, Any] = MappingProxyType({})


def cluster(topology=None, workers=5, **options):
    times = {"compute": "gamma(1, 0.5)", "latency": "exponential(0.1)"}
    times |= {"topology": topology} if topology else {"service": "exponential(0.05)"}
    return lambda commits: simulate(Cluster(workers, **times, **options), commits)


def apart():
    """Workers that start each at a place of its own."""
    return dataclasses.replace(
        make_problem("quadratic"),
        init_replica=lambda key, worker: jax.random.normal(jax.random.fold_in(key, worker), (16,)),
    )


def any_policy(make):
    """The method on the traces here, whatever policy its paper has."""
    return functools.partial(make, policy=None)


@methods.declared
def drawing(learning_rate=0.05):
    return noisy(learning_rate)


@methods.declared
def replying(learning_rate=0.05):
    return noisy(learning_rate, replies=True)


@methods.declared
def with_adam(learning_rate=0.01):
    return methods.Method(optax.adam(learning_rate))


CRASHES = "crash(exponential(12), exponential(4), detect=1)"
BROKEN = (CRASHES, "outage(exponential(15), 2, checkpoint_every=7)", "loss(0.1, 2, resend=False)")
RECORDS = {"record": [recorders.energy(tensors=5), recorders.diagnostics()]}
#: Each way that numbers take through a replay.
SYSTEMS = {
    "server": System(cluster(), options=RECORDS),
    "reads apart": System(cluster(protocol="read_then_write", exclusive=False), methods.downpour),
    "buffered": System(cluster(policy="buffered(3)"), any_policy(methods.fedbuff)),
    "barrier under attack": System(
        cluster(policy="barrier()"),
        functools.partial(methods.robust, "median()"),
        options={"attack": "alie(workers=1, z=1.0)"},
    ),
    "failures": System(cluster(failures=BROKEN)),
    "lock_free": System(
        cluster(protocol="write_then_read", discipline="lock_free"),
        methods.downpour,
    ),
    "prescribed": System(lambda commits: prescribed(4, commits, 3), methods.downpour),
    "state and window": System(cluster(window=3), with_adam, stateful_problem),
    "draws": System(cluster(), drawing),
    "draws and replies": System(cluster(protocol="read_then_write"), replying),
    "tensors": System(
        cluster(),
        any_policy(methods.ringmaster_lmo),
        functools.partial(problems.digits, batch_size=4, hidden=()),
    ),
    "groups of tensors": System(
        functools.partial(pipeline, 3),
        methods.weight_prediction,
        functools.partial(problems.digits, batch_size=4, hidden=(3, 3)),
    ),
    "replicas apart": System(cluster(), methods.lsgd, apart),
    "shards": System(cluster(servers=4), methods.downpour),
    "gossip": System(cluster("ring()", policy="neighbours()"), tracking, own_targets),
    "push": System(
        cluster("one_peer_exponential()", policy="asynchronous()"),
        any_policy(methods.sgp),
        options={"attack": "alie(workers=1, z=1.0)"},
    ),
    "meetings": System(cluster("ring()", workers=6, policy="handshake()"), methods.adpsgd),
    "failing gossip": System(
        cluster("ring()", policy="neighbours()", failures=["crash(exponential(9), 2)"]),
        any_policy(methods.dpsgd),
        options={"attack": "sign_flip(workers=1, scale=0.5)"},
    ),
}


@functools.cache
def trace_of(name):
    return SYSTEMS[name].trace(COMMITS)


@functools.cache
def problem_of(name):
    return SYSTEMS[name].problem()


def options_of(name):
    return {"precision": "float64", "progress": False, **SYSTEMS[name].options}


def alone(name, seed=0, rate=RATES[0], trace=None):
    method = SYSTEMS[name].factory(learning_rate=rate)
    return replay(trace or trace_of(name), method, problem_of(name), seed, **options_of(name))


@functools.cache
def first(name):
    return alone(name)


def assert_same(run, expected, tolerance=0.0):
    assert run.config == expected.config and run.diverged_at == expected.diverged_at
    for name in ("commits", "evaluations", "diagnostics"):
        table, other = getattr(run, name), getattr(expected, name)
        assert list(table) == list(other) and len(table) == len(other)
        numbers = other.select_dtypes("number").columns
        np.testing.assert_allclose(table[numbers], other[numbers], rtol=tolerance, atol=tolerance)
    leaves = (jax.tree.leaves((of.params, of.replicas)) for of in (run, expected))
    assert max(map(deviation, *leaves)) <= tolerance


#: In the default run; the others have their turn in a full one.
DEFAULT = {"server", "failures", "tensors", "shards", "gossip", "push"}
every_system = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in DEFAULT)) for name in SYSTEMS],
)


@every_system
def test_a_replay_repeats_and_comes_back_from_its_files(name, tmp_path):
    run = first(name)
    assert run.status == "finished" and np.isfinite(run.commits["loss"]).all()
    trace = Trace.load(trace_of(name).save(tmp_path / "trace.parquet"))
    assert_same(alone(name, trace=trace), run)
    assert_same(Run.load(run.save(tmp_path / "run")), run)


@every_system
def test_members_of_an_ensemble_are_single_replays(name):
    system = SYSTEMS[name]
    runs = replay_ensemble(
        *(trace_of(name), system.factory, problem_of(name)),
        seeds=[0, 3],
        learning_rate=RATES,
        batched=True,
        **options_of(name),
    )
    keys = [(run.config["seed"], run.config["hyperparameters"]["learning_rate"]) for run in runs]
    assert keys == [(seed, rate) for seed in (0, 3) for rate in RATES]
    assert_same(runs[0], first(name), 1e-9)
    assert_same(runs[-1], alone(name, 3, RATES[-1]), 1e-9)


@every_system
def test_a_longer_trace_begins_like_it(name):
    if name == "prescribed":
        pytest.skip("its versions are clipped to the trace")
    frame, longer = trace_of(name).frame, SYSTEMS[name].trace(COMMITS + 20).frame
    assert longer["commit_time"].iloc[: len(frame)].equals(frame["commit_time"])


@pytest.mark.full
def test_members_that_diverge_end_and_the_others_go_on():
    trace, problem = make_trace(commits=400), make_problem("quadratic")
    for batched in (True, False):
        runs = replay_ensemble(
            trace, methods.downpour, problem, batched=batched, learning_rate=[1e6, 0.01]
        )
        assert runs[0].diverged_at is not None and len(runs[0].commits) == runs[0].diverged_at + 1
        assert runs[1].status == "finished" and len(runs[1].commits) == 400
    trace = make_trace(commits=100)
    runs = replay_ensemble(trace, methods.downpour, problem, learning_rate=[1e8, 1e9], batched=True)
    assert all(run.diverged_at is not None for run in runs)


def halved(learning_rate=0.1, fast=True):
    return methods.downpour(learning_rate=learning_rate if fast else learning_rate / 2)


def test_methods_that_differ_in_numbers_alone_are_a_batch():
    trace, problem = make_trace("exchange", commits=60), make_problem("quadratic")
    for batched in (True, False):
        fast, slow = replay_ensemble(trace, halved, problem, batched=batched, fast=[True, False])
        norms = [run.commits["update_norm"].iloc[0] for run in (fast, slow)]
        np.testing.assert_allclose(norms[0], 2 * norms[1], rtol=1e-6)
    with pytest.raises(InputError, match=r"pi_max.*batched=False"):
        replay_ensemble(trace, methods.gem, problem, batched=True, pi_max=[None, 5.0])


@pytest.mark.full
def test_counts_and_choices_of_a_method_are_run_one_by_one():
    """By default they are no batch, though the problem is small; asked for, that is refused."""
    trace, problem = simulate(Cluster(3, 1.0), 9), problems.quadratic([1.0])
    for factory, differing in (
        (methods.delayed_nesterov, {"period": [2, 3]}),
        (methods.lsgd, {"step_pull": [0.0, 0.1]}),
        (methods.adag, {"form": ["scaled", "squared"]}),
    ):
        ((name, values),) = differing.items()
        runs = replay_ensemble(trace, factory, problem, progress=False, **differing)
        for run, value in zip(runs, values, strict=True):
            alone = replay(trace, factory(**{name: value}), problem, progress=False)
            assert run.config["hyperparameters"][name] == value
            assert run.commits["loss"].tolist() == alone.commits["loss"].tolist()
        with pytest.raises(InputError, match=rf"{name}.*batched=False"):
            replay_ensemble(trace, factory, problem, batched=True, **differing)
