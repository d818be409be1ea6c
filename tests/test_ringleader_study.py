"""The study of the Ringleader set-up, and its figure."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import simulate, study
from asyncsim.clusters.laws import HalfNormal

OPTIONS = ["--workers", "5", "--horizon", "60", "--seeds", "1", "--tune", "0.05", "0.2"]
OPTIONS += ["--problem", "digits(hidden=[4], batch_size=2, split=0.1)"]


def test_client_times_are_those_of_the_paper():
    laws = study.load("ringleader").client_times(100)
    assert sorted(law.low for law in laws) == list(range(1, 101))
    assert [law.scale for law in laws] == pytest.approx(np.sqrt(np.arange(1, 101)))
    assert all(isinstance(law, HalfNormal) for law in laws)


@pytest.mark.full
def test_all_methods_share_a_horizon(tmp_path):
    module, config = study.configure("ringleader", [*OPTIONS, "--out", str(tmp_path / "results")])
    result = module.run(config)
    names = ["ringleader", "ringleader(restart=newest)", "malenia", "ia2sgd"]
    table = pd.read_csv(result.folder / "ringleader.csv")
    assert sorted(table["method"]) == sorted(names)
    assert len(pd.read_csv(result.folder / "tuning.csv")) == 8
    assert (result.folder / "ringleader.png").exists()
    # The whole horizon, of all clients.
    assert result.summary["simulated_seconds"].between(50, 60).all()
    trace = simulate(config.make_cluster(), 20)
    assert trace.cluster.compute_laws == tuple(module.client_times(5))
    assert result.summary["trace_file"].nunique() == 1
