"""Crashes of whole jobs: rounds, checkpoints and restarts against a loop over rounds."""

import numpy as np
import pytest

from asyncsim import Cluster, failures, methods, problems, replay, simulate, study
from asyncsim.traces.trace_summary import kept_versions

checkpoint = study.load("checkpoint")


def loop(commits: int, every: float, lasts: float, interval: float, saving: float) -> tuple:
    """Simulate rounds of one second: the times of versions, and the restored versions."""
    now, crash, version = 0.0, every, 0
    saved, saved_at, times, restored = 0, 0.0, [], []
    while len(times) < commits:
        end = now + 1.0
        if crash < end:
            now = crash + lasts
            restored.append(saved)
            version += 1
            saved_at, crash = now, now + every
            continue
        now, version = end, version + 1
        times.append(now)
        if now - saved_at >= interval:
            if now + saving <= crash:
                saved = version
            saved_at = now + saving
            now = min(saved_at, crash)
    return np.array(times), restored


@pytest.mark.parametrize(("interval", "saving"), [(10.0, 1.5), (3.0, 0.0)])
def test_rounds_and_checkpoints_are_those_of_a_loop(interval, saving):
    crash = failures.job_crash(50.3, 5.0, checkpoint=interval, saving=saving)
    cluster = Cluster(16, 1.0, policy="barrier()", failures=[crash])
    trace = simulate(cluster, commits=16 * 300)
    versions = trace.frame[trace.frame["outcome"] == "applied"]
    times, restored = loop(300, 50.3, 5.0, interval, saving)
    np.testing.assert_allclose(versions["commit_time"], times)
    restores = trace.absences[trace.absences["worker"] < 0]
    assert restores["version"].to_list() == restored[: len(restores)]
    assert (trace.accepted.frame["staleness"] == 0).all()


def test_a_replay_goes_on_from_the_checkpoint():
    """Gradient descent with unit noise-free steps: the error grows back by the lost rounds."""
    crash = failures.job_crash(20.5, 2.0, checkpoint="5 versions")
    cluster = Cluster(4, 1.0, policy="barrier()", failures=[crash])
    trace = simulate(cluster, commits=4 * 60)
    run = replay(
        trace,
        methods.batch_sgd(0.1),
        problems.quadratic([1.0], start=1.0),
        precision="float64",
        evaluate_every=1,
    )
    kept = kept_versions(trace)
    expected = 0.5 * (0.9**kept) ** 2
    assert run.evaluations["train_loss"].iloc[-1] == pytest.approx(expected, rel=1e-9)
