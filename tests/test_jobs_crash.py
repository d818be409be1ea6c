"""Crashes of whole jobs: rounds, checkpoints and restarts against a loop over rounds."""

import numpy as np
import pytest

from asyncsim import Cluster, failures, methods, problems, replay, simulate, study
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read
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


@pytest.mark.parametrize(
    ("busy_server", "saves"),
    [({}, "checkpoint=255"), (dict(server=True, compute="1", service="1"), "checkpoint_every=255")],
)
def test_goodput_by_interval(busy_server, saves, tmp_path, capsys):
    """The law holds for a job, and for a server that is always busy."""
    options = checkpoint.Config(
        workers=4,
        crashes=30,
        seeds=1,
        intervals=(0.5, 1.0, 2.0),
        out=tmp_path / "out",
        **busy_server,
    )
    checkpoint.run(options)
    table = read(tmp_path / "out", "checkpoint").table(checkpoint.TABLE)
    np.testing.assert_allclose(table["goodput"], table["law"], rtol=0.08)
    # A crash loses half an interval, on average, and crashes come every 30 minutes, about 30 times.
    np.testing.assert_allclose(table["lost"], table["interval"] / 2 / 1800, rtol=0.5)
    printed = capsys.readouterr().out
    assert "verdict: one seed: no order" in printed and saves in printed
    assert table["multiple"].iloc[0] == 1  # Daly's is the best
    figure = figures_of("checkpoint").checkpoint(read(tmp_path / "out", "checkpoint"))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "interval between checkpoints (s)"
    assert axes.get_ylabel() == "goodput (share of time)"
    (law,) = [line for line in axes.lines if line.get_label().startswith("law")]
    assert len(law.get_xdata()) > 3 * len(table)
