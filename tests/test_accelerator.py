"""On whatever accelerator is there: the loop over events in float32, a study, an ensemble;
elsewhere skipped.
"""

import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import EVERY, make_method, make_problem, make_trace
from event_loop import EventLoop, deviation

from asyncsim import methods, recorders, replay_ensemble
from asyncsim.replays.replay import Replay

ACCELERATORS = [device for device in jax.devices() if device.platform != "cpu"]
pytestmark = pytest.mark.skipif(not ACCELERATORS, reason="JAX has no accelerator here")
#: Relative, between two orders of sums in float32 over `EVERY` commits.
ROUND_OFF = 1e-4


@pytest.fixture(autouse=True)
def accelerated():
    with jax.default_device(ACCELERATORS[0]):
        yield


@pytest.mark.parametrize("problem", ["quadratic", "digits", "mnist"])
@pytest.mark.parametrize("method", ["gem", "downpour", "aeasgd"])
def test_replays_are_the_loop_teacher_forced(method, problem):
    trace, stops = make_trace(commits=300), np.arange(EVERY, 301, EVERY)
    running = Replay(
        trace, make_method(method), make_problem(problem), stops=stops, record=[recorders.energy()]
    )
    loop = EventLoop(trace, running.method, running.problem, dtype=np.float32)
    for stop in stops:
        loop.take_over(running)
        begin = running.position
        running.advance(stop)
        loop.run(begin, stop)
        assert deviation(running.state.central, loop.central) < ROUND_OFF


def test_an_ensemble_is_its_runs():
    options = {"seeds": [0, 1], "learning_rate": [0.01, 0.05], "progress": False}
    given = make_trace(commits=120), methods.downpour, make_problem("digits")
    together, apart = (
        replay_ensemble(*given, batched=batched, **options) for batched in (True, False)
    )
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(
            one.commits["loss"], other.commits["loss"], rtol=ROUND_OFF, atol=ROUND_OFF
        )


def test_a_study_on_it(tmp_path):
    command = [
        sys.executable,
        "-m",
        "asyncsim.study",
        "staleness",
        "--workers",
        "4",
        "--steps",
        "5",
        "--seeds",
        "1",
    ]
    command += ["--device", ACCELERATORS[0].platform, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "summary.csv").exists()
