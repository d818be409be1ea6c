"""The studies of energies, of pi by tensor and of implicit momentum: what they write is what the
runs say.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncsim import Run, methods, problems, simulate, study
from asyncsim.study import finished, sweep

energy, tensors, momentum = (study.load(name) for name in ("energy", "tensors", "momentum"))
QUICK = {"steps": 6, "seeds": 1, "diagnose_every": 2}


pytestmark = pytest.mark.usefixtures("quick_figures")


def tables(folder: Path, names) -> list[pd.DataFrame]:
    return [pd.read_csv(folder / name, keep_default_na=True) for name in names]


# Energy


@pytest.fixture(scope="module")
def energies(tmp_path_factory):
    options = {
        "workers": (2, 3),
        "problem": "quadratic",
        "learning_rate": 0.1,
        "x64": True,
        **QUICK,
    }
    return energy.run(energy.Config(**options, out=tmp_path_factory.mktemp("energy")))


@pytest.mark.full
def test_compliance_is_that_of_the_diagnosed_commits(energies):
    (compliance,) = tables(energies.folder, ["compliance.csv"])
    found = finished.read(energies.folder, "energy")
    assert len(compliance) == 2 * 2 * 3
    for row in compliance.itertuples():
        (run,) = found.runs(workers=row.workers, method=row.method, seed=row.seed)
        commit = run.commits.iloc[row.commit]
        assert (
            row.worker_step == row.commit / row.workers and row.commit % (2 * row.workers + 1) == 0
        )
        assert row.energy_ratio == pytest.approx(
            commit["central_energy"] / commit["proxy_energy"], rel=1e-12
        )
        own = run.diagnostics[run.diagnostics["commit"] == row.commit]
        quantiles = (
            own[own["quantity"] == "weight_energy_ratio"]
            .drop_duplicates("quantile")["value"]
            .tolist()
        )
        assert [
            getattr(row, f"weight_ratio_{q}") for q in ("05", "25", "50", "75", "95")
        ] == quantiles
        share = own[own["quantity"] == "clipped_low"]["value"].tolist()
        assert share == ([row.clipped_low] if row.method == "gem" else [])
        assert 0 <= row.opposite_sign <= 1
    assert compliance[compliance["method"] == "downpour"]["clipped_high"].isna().all()


# Tensors


@pytest.mark.full
def test_tensors_are_those_of_the_network(tmp_path, capsys):
    problem = problems.digits(batch_size=8, hidden=(4,))
    result = tensors.run(
        tensors.Config(workers=(2, 3), problem=problem, **QUICK, out=tmp_path / "out")
    )
    (found,) = tables(result.folder, ["tensors.csv"])
    names = ["[0]['bias']", "[0]['weight']", "[1]['bias']", "[1]['weight']"]
    assert found["tensor"].tolist() == names * 6
    assert found["commit"].unique().tolist() == [0, 5, 10, 7, 14]
    run = Run.load(result.folder / result.summary["run_folder"][1])
    last = run.diagnostics[
        (run.diagnostics["quantity"] == "pi") & (run.diagnostics["tensor"] == names[1])
    ]
    assert (
        found.query("workers == 3 and tensor == @names[1]")["pi_median"].tolist()
        == last["value"].tolist()
    )
    # Before anything has moved, an update is scaled by one, but for weights without a gradient.
    assert set(found[found["commit"] == 0]["pi_median"].round(3)) <= {0.0, 0.5, 1.0}
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in ["0.bias", "0.weight", "1.bias", "1.weight", "tensors.csv"]
    )


# Momentum


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


# Options
