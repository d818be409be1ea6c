"""On whatever accelerator is there: a study and an ensemble; elsewhere skipped."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import make_problem, make_trace

from asyncsim import methods, replay_ensemble

ACCELERATORS = [device for device in jax.devices() if device.platform != "cpu"]
pytestmark = pytest.mark.skipif(not ACCELERATORS, reason="JAX has no accelerator here")
#: Relative, between two orders of sums in float32.
ROUND_OFF = 1e-4


@pytest.fixture(autouse=True)
def accelerated():
    with jax.default_device(ACCELERATORS[0]):
        yield


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
