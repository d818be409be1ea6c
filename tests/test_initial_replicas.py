"""Initial parameters per worker: the replay, ensembles and real processes against plain loops."""

import dataclasses

import jax
import numpy as np
import pytest
import test_real
from cases import EVERY, FORCED, make_trace, stopping
from event_loop import EventLoop, forced_deviation

from asyncsim import (
    Cluster,
    InputError,
    methods,
    problems,
    recorders,
    replay,
    simulate,
)

CURVATURE, WORKERS = np.linspace(0.1, 1, 5), 7
#: The starts of the workers, which lie in both halves of each axis.
STARTS = np.random.default_rng(0).normal(0, 2, (WORKERS, 5))


def apart(starts=STARTS, **options):
    """A quadratic whose workers start at the rows of ``starts``."""
    return dataclasses.replace(
        problems.quadratic(CURVATURE, **options), init_replica=lambda key, worker: starts[worker]
    )


METHODS = {
    "aeasgd": methods.aeasgd,
    "lsgd": lambda: methods.lsgd(groups=2, global_every=2, step_pull=0.1),
    "parle": lambda: methods.parle(policy=None, noise=0.01),
    "without replicas": methods.downpour,
    "a reply that is no replica": methods.dana_zero,
}


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, ("single", "batch")[place % 2]) for place, name in enumerate(METHODS)],
)
def test_replays_are_the_loop_over_events(name, form):
    trace, method, problem = make_trace(commits=150), METHODS[name](), apart(noise=0.1)
    with jax.enable_x64(True):
        running = stopping(trace, method, problem, form)
        loop = EventLoop(trace, method, problem)
        # The central variable starts at the mean of the replicas.
        np.testing.assert_allclose(loop.central, STARTS.mean(0), rtol=1e-14)
        found, expected = running.state, [loop.workers[k] for k in range(WORKERS)]
        for k, worker in enumerate(expected):
            rows = jax.tree.map(lambda leaf, k=k: leaf[k], found.workers)
            for ours, theirs in ((rows.method, worker.method), (rows.memory, worker.memory)):
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert max(forced_deviation(running, EVERY).values()) < FORCED


def test_equal_starts_give_the_same_bytes(optimized):
    digits = problems.digits(batch_size=8, hidden=(8,))
    same = dataclasses.replace(digits, init_replica=lambda key, worker: digits.init(key))
    method = methods.lgd(policy=None)
    runs = [
        replay(make_trace(commits=60), method, problem, 3, record=[recorders.energy()])
        for problem in (digits, same)
    ]
    assert runs[0].commits.equals(runs[1].commits)
    assert runs[0].evaluations.equals(runs[1].evaluations)
    jax.tree.map(np.testing.assert_array_equal, runs[0].params, runs[1].params)


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


@pytest.mark.parametrize("name", ["LSGD", "AD-PSGD"])
def test_real_processes_start_apart(name, optimized):
    options = {}
    method = methods.lsgd(0.05)
    if name in test_real.GOSSIP:
        method, topology, policy = test_real.GOSSIP[name]
        options = {"topology": topology, "policy": policy}
    task = test_real.task_of(method, 24, 4, apart(noise=0.1), **options)
    assert test_real.difference(test_real.recorded_here(task)) < 1e-12


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
