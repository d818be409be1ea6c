"""The study of implicit momentum: what it estimates, and what it writes."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import methods, simulate, study
from asyncsim.study import finished, sweep

momentum = study.load("momentum")
pytestmark = pytest.mark.usefixtures("quick_figures")


def synthetic(seeds, generator, noise=0.05):
    """Paths whose mean has momentum 0.8 and step 0.05, each with its own noise."""
    mean = [1.0, 0.9]
    for _ in range(38):
        mean.append(mean[-1] + 0.8 * (mean[-1] - mean[-2]) - 0.05 * mean[-1])
    return np.array(mean) + noise * generator.normal(size=(seeds, len(mean)))


def test_estimate_has_no_bias_and_a_true_error():
    """Of few and noisy paths, where least squares on the mean path finds far less momentum."""
    generator, repeats = np.random.default_rng(0), 400
    estimates = [momentum.estimate_momentum(synthetic(30, generator)) for _ in range(repeats)]
    found = np.array(estimates)
    mean, spread = found.mean(0), found.std(0)
    # Four standard errors of the mean of the repetitions; a ratio of estimators has a bias of its
    # own of lower order.
    assert abs(mean[0] - 0.8) < 4 * spread[0] / repeats**0.5 + 0.1 * spread[0]
    assert abs(mean[2] - 0.05) < 4 * spread[2] / repeats**0.5 + 0.1 * spread[2]
    # The jackknife counts the square of the noise twice, so that its error is the spread or
    # somewhat more.
    assert 0.95 < mean[1] / spread[0] < 1.7 and 0.95 < mean[3] / spread[2] < 1.7

    def naive(paths):
        path = paths.mean(0)
        move = np.diff(path)
        return np.linalg.lstsq(np.stack([move[:-1], -path[1:-1]], -1), move[1:], rcond=None)[0][0]

    biased = np.mean([naive(synthetic(30, generator)) for _ in range(repeats)])
    assert abs(biased - 0.8) > 3 * abs(mean[0] - 0.8)


@pytest.mark.parametrize("window", [1, 3])
def test_paths_are_those_of_the_formula(window):
    """Each commit moves by what the worker's plain local steps make of what it read."""
    config = momentum.Config(
        workers=(3,), seeds=3, steps=4, window=window, problem=momentum.revealing_quadratic()
    )
    (cell,) = sweep.sweep(config, [{"workers": 3, "learning_rate": 0.2}])
    paths, _ = momentum.central_paths(cell, methods.downpour(0.2), steps=4)
    assert paths.shape == (3, 13)
    for seed, path in enumerate(paths):
        trace = simulate(cell.cluster, 4 * 3 + 20 * 3, seed)
        expected = [1.0]
        for read in trace.frame["read_version"][:12]:
            expected.append(expected[-1] - (1 - 0.8**window) * expected[read])
        np.testing.assert_allclose(path, expected, rtol=1e-12)


@pytest.mark.full
def test_momentum_is_theorys_where_its_assumptions_hold(tmp_path, capsys):
    options = {"workers": (3,), "seeds": 40, "steps": 5}
    result = momentum.run(
        momentum.Config(**options, compute=("exponential(1)", "constant(1)"), out=tmp_path / "out")
    )
    measured = pd.read_csv(result.folder / momentum.TABLE)
    memoryless, constant = measured.itertuples()
    assert (memoryless.assumptions_hold, constant.assumptions_hold) == (True, False)
    # Five standard errors; each seed's numbers are fixed, so this fails once and for ever or never.
    assert abs(memoryless.momentum_measured - 2 / 3) < 5 * memoryless.standard_error < 0.5
    assert abs(memoryless.step_measured - 1 / 9) < 5 * memoryless.step_error < 0.5
    assert constant.staleness_std == 0
    assert len(result.summary) == 80 and (result.summary["status"] == "finished").all()
    assert finished.read(result.folder, "momentum").config["compute"] == [
        "exponential(1)",
        "constant(1)",
    ]
    assert "exponential(1)" in capsys.readouterr().out
