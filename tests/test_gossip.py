"""Methods without a server: the replay against plain NumPy loops, what is conserved, and what they reduce to."""

import jax
import numpy as np
import pandas as pd
import pytest

from asyncsim import InputError, Trace, methods, problems, recorders, replay
from asyncsim.replays.replay import Replay
from asyncsim.traces.columns import COLUMNS, Source

CURVATURE, START, RATE = np.linspace(0.2, 1, 6), np.linspace(-1, 2, 6), 0.05


def trace_of(rows, workers):
    """A trace of rows (worker, sources, weights, kept, partner)."""
    frame = pd.DataFrame({name: np.zeros(len(rows)) for name in COLUMNS if name != "outcome"})
    for name in ("commit", "worker", "job", "local_steps", "read_version", "push_version", "staleness", "version"):
        frame[name] = frame[name].astype(np.int64)
    frame["commit"], frame["version"], frame["local_steps"] = np.arange(len(rows)), 1 + np.arange(len(rows)), 1
    frame["outcome"] = "applied"
    frame["worker"] = [row[0] for row in rows]
    frame["job"] = frame.groupby("worker").cumcount()
    previous = frame.groupby("worker")["version"].shift(1).fillna(0).astype(np.int64)
    frame["read_version"], frame["push_version"] = previous, np.arange(len(rows))
    frame["staleness"] = np.arange(len(rows)) - previous
    for name in ("start_time", "send_time", "arrive_time", "serve_time", "commit_time", "push_time"):
        frame[name] = 1.0 + np.arange(len(rows))
    frame["start_time"] = frame["read_time"]
    for place, name in enumerate(("sources", "weights", "kept", "partner"), 1):
        frame[name] = [row[place] for row in rows]
    return Trace(frame, Source(workers, "gossip"))


def ring_in_rounds(n, rounds, share=1 / 3):
    """A barrier each round: everybody takes up the last messages of both neighbours."""
    rows = []
    for k in range(rounds):
        for i in range(n):
            before = [n * (k - 1) + (i - 1) % n, n * (k - 1) + (i + 1) % n] if k else []
            rows.append((i, before, [share] * len(before), 1 - 2 * share if k else 1.0, -1))
    return trace_of(rows, n)


def at_random(n, commits, seed=0):
    """Nobody waits: half of each message goes to a random neighbour, which takes it up at some later commit."""
    rng, rows, waiting, begun = np.random.default_rng(seed), [], [[] for _ in range(n)], set()
    for k in range(commits):
        i = int(rng.integers(n))
        late = [row for row in waiting[i] if rng.random() < 0.8]
        waiting[i] = [row for row in waiting[i] if row not in late]
        rows.append((i, late, [0.5] * len(late), 0.5 if i in begun else 1.0, -1))
        begun.add(i)
        waiting[int((i + rng.integers(1, n)) % n)].append(k)
    return trace_of(rows, n)


def in_pairs(n, commits, seed=0):
    rng = np.random.default_rng(seed)
    workers = rng.integers(n, size=commits)
    return trace_of([(int(i), [], [], 1.0, int((i + rng.integers(1, n)) % n)) for i in workers], n)


def loop(trace, method):
    """The replicas and weights, row by row, written from the papers."""
    n = trace.workers
    x, w, snapshot = np.tile(START, (n, 1)), np.ones(n), np.tile(START, (n, 1))
    sent = {}
    for k, row in enumerate(trace.frame.itertuples()):
        i = row.worker
        if method == "adpsgd":
            step = -RATE * CURVATURE * snapshot[i]
            x[i] = x[row.partner] = (x[i] + x[row.partner]) / 2
            x[i] = snapshot[i] = x[i] + step
            continue
        mixed = row.kept * x[i] + sum(
            (p * sent[j][0] for j, p in zip(row.sources, row.weights, strict=True)), 0 * START
        )
        weight = row.kept * w[i] + sum(p * sent[j][1] for j, p in zip(row.sources, row.weights, strict=True))
        at = x[i] if method == "dpsgd" else mixed / weight
        x[i], w[i] = mixed - RATE * CURVATURE * at, weight
        sent[k] = x[i].copy(), w[i]
    return x, w


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def replayed(trace, name, form=None, **options):
    problem = problems.quadratic(CURVATURE, start=START)
    running = Replay(
        trace,
        getattr(methods, name)(RATE),
        problem,
        precision="float64",
        form=form,
        record=[recorders.energy()],
        **options,
    )
    running.advance(len(trace))
    return running


@pytest.mark.parametrize("form", ["single", "batch"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("dpsgd", lambda: ring_in_rounds(7, 60)),
        ("sgp", lambda: ring_in_rounds(7, 60)),
        ("sgp", lambda: at_random(9, 500)),
        ("dpsgd", lambda: at_random(9, 500)),
        ("adpsgd", lambda: in_pairs(9, 500)),
    ],
)
def test_replays_are_plain_loops(name, make, form):
    trace = make()
    x, w = loop(trace, name)
    state = replayed(trace, name, form).state
    own = state.workers.method
    found = own if name == "adpsgd" else own[0] if name == "sgp" else own.own
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-12)
    if name == "sgp":
        np.testing.assert_allclose(own.weight, w, rtol=0, atol=1e-12)


def test_the_central_variable_is_the_mean_of_the_replicas():
    trace = in_pairs(9, 500)
    running = replayed(trace, "adpsgd")
    np.testing.assert_allclose(running.state.central, running.state.workers.method.mean(0), atol=1e-13)
    # In rounds everything has been taken up but the last messages, of which everybody keeps what it keeps.
    running = replayed(ring_in_rounds(7, 60), "dpsgd")
    np.testing.assert_allclose(running.state.central, running.state.workers.method.own.mean(0), atol=1e-13)


def test_the_consensus_distance_is_evaluated():
    trace, problem = in_pairs(9, 500), problems.quadratic(CURVATURE, start=START)
    run = replay(trace, methods.adpsgd(RATE), problem, precision="float64", evaluate_every=20, progress=False)
    x, _ = loop(trace, "adpsgd")
    expected = np.mean(np.sum((x - x.mean(0)) ** 2, 1))
    assert run.evaluations["consensus_distance"].iloc[-1] == pytest.approx(expected, rel=1e-10)
    assert run.evaluations["consensus_distance"].iloc[0] == 0


def test_in_batches_a_round_is_a_piece():
    running = replayed(ring_in_rounds(7, 60), "dpsgd", "batch")
    assert np.diff(running.running._plan._cuts).tolist() == [7] * 60


def test_one_worker_is_sgd():
    trace = trace_of([(0, [], [], 1.0, -1)] * 50, 1)
    expected = START * (1 - RATE * CURVATURE) ** 50
    for name in ("dpsgd", "sgp", "adpsgd"):
        np.testing.assert_allclose(replayed(trace, name).state.central, expected, rtol=1e-13)


def test_a_method_of_a_server_is_refused_and_the_other_way_round():
    problem = problems.quadratic(CURVATURE)
    with pytest.raises(InputError, match="'downpour': needs a trace of a cluster with a server"):
        replay(in_pairs(3, 9), methods.downpour(), problem)
