"""The study of explicit momentum: what it says is best is so, and known beforehand for one
worker.
"""

import numpy as np
import pandas as pd
import pytest

from asyncsim import Exponential, methods, problems, replay, simulate, study
from asyncsim.clusters.cluster import Cluster
from asyncsim.study.finished import figures as finished_figures
from asyncsim.study.finished import read
from figures import __main__ as figures

explicit = study.load("best_momentum")


@pytest.mark.full
def test_one_worker_finds_the_momentum_of_theory(tmp_path, capsys):
    """Heavy ball with condition number 100: 0.669, with a learning rate of 3.3 (times 1 / largest
    curvature).
    """
    config = explicit.Config(
        workers=(1, 8),
        seeds=1,
        gradients=200,
        server_momentum=(-0.4, 0.0, 0.4, 0.67, 0.9),
        learning_rate=(0.5, 1.0, 3.3),
        steps=5,
        out=tmp_path / "best_momentum",
    )
    result = explicit.run(config)
    best = pd.read_csv(result.folder / explicit.TABLE).set_index("workers")
    assert tuple(best.loc[1, ["server_momentum", "learning_rate"]]) == (0.67, 3.3)
    assert best.loc[8, "server_momentum"] <= 0.4 and best.loc[8, "implicit"] == 7 / 8
    assert len(result.summary) == 2 * 15 and set(result.summary["status"]) <= {
        "finished",
        "diverged",
    }
    out, err = capsys.readouterr()
    assert out.startswith("quadratic, lowest training loss after 200 gradients; 1 seed\n")
    assert "0.670" in out and err.count("--") == 1 and "--steps changes nothing here" in err
    assert read(result.folder, "best_momentum").config["server_momentum"] == [
        -0.4,
        0.0,
        0.4,
        0.67,
        0.9,
    ]
    axes = finished_figures("best_momentum").momentum(read(result.folder, "best_momentum")).axes[0]
    (theory,) = (line for line in axes.get_lines() if "implicit" in line.get_label())
    assert np.interp(4, *theory.get_data()) == pytest.approx(0.75, abs=1e-3)
    before = (result.folder / "momentum.png").read_bytes()
    assert figures.main(["momentum", "--results", str(tmp_path), "--out", str(result.folder)]) == 0
    assert (result.folder / "momentum.png").read_bytes() == before


def test_momentum_is_on_the_server():
    curvature, n, momentum = np.array([1.0, 0.1]), 3, -0.5
    trace = simulate(Cluster(n, Exponential(1.0)), 60)
    run = replay(
        trace,
        explicit.heavy_ball(0.2, momentum),
        problems.quadratic(curvature),
        precision="float64",
        progress=False,
    )
    path, m = [np.ones(2)], 0.0
    for version in trace.frame["read_version"]:
        m = momentum * m - 0.2 * curvature * path[version]
        path.append(path[-1] + m)
    np.testing.assert_allclose(run.params, path[-1], rtol=1e-10)
    assert methods.METHODS.get("heavy_ball") is None
