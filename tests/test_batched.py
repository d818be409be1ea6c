"""Pieces with all their rows at once, as accelerators have them: the same numbers as the loop over events."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import (
    EVERY,
    FORCED,
    METHODS,
    NEEDS,
    OWN,
    PROTOCOLS,
    counting,
    make_method,
    make_problem,
    make_trace,
    stateful_problem,
)
from event_loop import RECORDED, forced_deviation

import asyncsim.replays.batched as batched_pieces
import asyncsim.replays.programs
from asyncsim import Cluster, Exponential, Gamma, barrier, methods, replay, replay_ensemble, simulate
from asyncsim.replays import tuning
from asyncsim.replays.replay import Replay

STEPS = 300


@pytest.fixture(autouse=True)
def accelerated(monkeypatch):
    """Replay on the CPU as on an accelerator."""
    monkeypatch.setattr(tuning, "_LOOPING", ())
    for name in ("_CPU_FEW", "_CPU_MANY"):
        monkeypatch.setattr(tuning, name, tuning._ACCELERATOR)


def batched(trace, method, problem, **options):
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    running = Replay(trace, method, problem, precision="float64", stops=stops, diagnose_every=0, **options)
    assert running.running._plan.layout(method, problem, 0.9).way == "batched"
    return running


def deviation_of(trace, method, problem, **options):
    with jax.enable_x64(True):
        return max(forced_deviation(batched(trace, method, problem, **options), EVERY).values())


def combinations():
    default = {("gem", "read_then_write, two visits", "quadratic"), ("downpour", "exchange", "quadratic")}
    by_gem = {("gem", protocol, "quadratic") for protocol in PROTOCOLS}
    by_method = {(method, NEEDS.get(method, "exchange"), "quadratic") for method in METHODS}
    by_protocol = {("downpour", protocol, "digits") for protocol in PROTOCOLS}
    for case in sorted(by_gem | by_method | by_protocol):
        yield pytest.param(*case, marks=[] if case in default else pytest.mark.full, id="-".join(case))


@pytest.mark.parametrize(("method", "protocol", "problem"), list(combinations()))
def test_batched_pieces_are_the_loop_teacher_forced(method, protocol, problem):
    trace = make_trace(protocol, workers=1 if method == "sgd" else 7, commits=STEPS)
    assert deviation_of(trace, make_method(method), make_problem(problem)) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("case", OWN)
def test_own_methods(case, lenient):
    make, protocol, window = OWN[case]
    assert deviation_of(make_trace(protocol, window, commits=STEPS), make(), make_problem("quadratic")) < FORCED


def shared_reads():
    """Workers that all go on from the version that a barrier made."""
    return make_trace(workers=6, commits=STEPS, policy=barrier())


def differing_windows():
    return simulate(Cluster(6, Gamma(1.0, cv=0.5), Exponential(0.05), window=[1, 2, 4, 1, 2, 4]), STEPS)


def torn_reads():
    cluster = Cluster(6, Gamma(1.0, cv=0.5), Exponential(0.05), protocol="write_then_read", discipline="lock_free")
    return simulate(dataclasses.replace(cluster, read_blocks=3), STEPS)


@pytest.mark.parametrize(
    ("make_rule", "trace"),
    [
        pytest.param(methods.lgd, shared_reads, marks=pytest.mark.full),  # which sees losses
        pytest.param(methods.aeasgd, differing_windows, marks=pytest.mark.full),
        (lambda: methods.hogwild(blocks=3), torn_reads),
    ],
)
def test_shared_and_torn_reads_losses_and_differing_windows(make_rule, trace):
    assert deviation_of(trace(), make_rule(), make_problem("quadratic")) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("make_rule", [lambda: make_method("gem"), counting])
def test_a_state_of_the_problem_and_numbers_of_workers(make_rule):
    assert deviation_of(make_trace(window=3, commits=STEPS), make_rule(), stateful_problem()) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("rule", ["gem", "aeasgd", "dana_zero"])
@pytest.mark.parametrize("count", [2, 3])
def test_several_devices(rule, count):
    devices = jax.devices()[:count]
    trace = make_trace(commits=STEPS)
    assert deviation_of(trace, make_method(rule), make_problem("quadratic"), devices=devices) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ensembles_are_single_replays(protocol):
    options = {"seeds": [0, 3], "learning_rate": [0.05, 0.1], "precision": "float64", "progress": False}
    trace, problem = make_trace(protocol, commits=120), make_problem("digits")
    together, apart = (replay_ensemble(trace, methods.gem, problem, batched=way, **options) for way in (True, False))
    for one, other in zip(together, apart, strict=True):
        for name in RECORDED:
            np.testing.assert_allclose(one.commits[name], other.commits[name], rtol=1e-9, atol=1e-9)


def test_the_same_bytes_again_and_the_kernels_numbers(monkeypatch):
    def run():
        return replay(make_trace(commits=STEPS), methods.gem(), make_problem("quadratic"), progress=False)

    first, second = run(), run()
    assert first.commits.equals(second.commits) and first.diagnostics.equals(second.diagnostics)
    monkeypatch.setattr(tuning, "_LOOPING", ("cpu",))
    by_loops = run()
    early = slice(0, 50)  # before GEM has amplified round-off
    for name in RECORDED:
        np.testing.assert_allclose(first.commits[name][early], by_loops.commits[name][early], rtol=1e-3)


@pytest.mark.parametrize("method", ["gem", pytest.param("aeasgd", marks=pytest.mark.full)])
def test_rows_are_scattered_in_any_order(method, monkeypatch):
    """Which an accelerator takes: no two may go to the same place, though one piece can use a slot again."""
    in_order = batched_pieces._scatter

    def reversed_scatter(tree, rows, index, there):
        return in_order(tree, jax.tree.map(lambda leaf: leaf[::-1], rows), index[::-1], there[::-1])

    monkeypatch.setattr(batched_pieces, "_scatter", reversed_scatter)
    monkeypatch.setattr(batched_pieces, "UNROLLED", 3)
    asyncsim.replays.programs._build.cache_clear()
    trace = make_trace("read_then_write, two visits", commits=STEPS)
    assert deviation_of(trace, make_method(method), make_problem("quadratic")) < FORCED
    asyncsim.replays.programs._build.cache_clear()


def test_a_divergence_is_told():
    run = replay(make_trace(commits=STEPS), methods.downpour(learning_rate=1e9), make_problem("quadratic"))
    assert run.status == "diverged" and run.diverged_at < STEPS
