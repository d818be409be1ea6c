"""The study of replicas: equal gradients, best rates, and what each method needs to the target."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import study
from asyncsim.study.finished import read

pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.mark.full
def test_all_compute_as_many_gradients_and_communicate_as_often_as_they_say(tmp_path, capsys):
    options = [
        "--workers=2",
        "--window=5",
        "--steps=6",
        "--seeds=1",
        "--tune",
        "0.01",
        "0.1",
        "--problem=quadratic",
    ]
    options += ["--methods", "parle", "entropy_sgd", "easgd(alpha=[0.2, 0.3])", "averaging"]
    assert study.main(["replicas", *options, "--target=7.0", f"--out={tmp_path / 'mine'}"]) == 0
    finished = read(tmp_path / "mine", "replicas")
    assert [run.evaluations["gradients"].iloc[-1] for run in finished.runs()] == [60] * (6 * 2)
    momentum = finished.summary.set_index("method")["method.local_momentum"]
    assert (
        momentum.loc[["easgd(alpha=0.2)", "easgd(alpha=0.3)", "averaging", "data_parallel"]] == 0.9
    ).all()
    table = pd.read_csv(tmp_path / "mine" / "replicas.csv").set_index("method")
    assert list(table.index) == [
        "parle",
        "entropy_sgd",
        "easgd(alpha=0.2)",
        "easgd(alpha=0.3)",
        "averaging",
        "data_parallel",
    ]
    assert table["rounds"].to_dict() == {
        **dict.fromkeys(table.index, 6),
        "entropy_sgd": 0,
        "data_parallel": 30,
    }
    assert (table["rounds_to_target"] <= table["rounds"]).all() and (
        table["gradients_to_target"] <= 60
    ).all()
    best = (
        finished.summary.groupby(["method", "learning_rate"])["train_loss"]
        .mean()
        .unstack()
        .idxmin(axis=1)
    )
    np.testing.assert_array_equal(table["learning_rate"], best[table.index])
    said = capsys.readouterr()
    assert (
        tmp_path / "mine" / "replicas.png"
    ).exists() and "until a training loss of 7" in said.out
    assert "note: best at the l" in said.err and "; a rate beyond it may be better" in said.err
