"""The comparison of methods: its table, its measures and its figure."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import Trace, methods, study
from asyncsim.errors import InputError
from asyncsim.run import Run

compare = study.load("compare")
SMALL = {"workers": 3, "steps": 20, "seeds": 2, "evaluate_every": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.full
def test_methods_of_their_own_timing_and_tuned_rates_are_sorted(capsys):
    config = compare.Config(**SMALL, methods=("downpour", "sgd"), tune=(0.02, 0.2), target=1.5)
    folder, summary = compare.run(config)
    assert len(summary) == 2 * 2 * 2
    assert capsys.readouterr().err.count("it gets its own traces") == 1
    table = pd.read_csv(folder / compare.TABLE)
    assert sorted(table["method"]) == ["downpour", "sgd"]
    assert table["time_to_target"].is_monotonic_increasing
    for row in table.itertuples():
        rivals = summary[summary["method"] == row.method]["method.learning_rate"].unique()
        assert set(rivals) == {0.02, 0.2} and row.learning_rate in rivals
    assert (folder / "loss.png").exists() and (folder / "loss.pdf").exists()


@pytest.mark.full
def test_target_and_costs_are_those_of_runs_and_traces():
    config = compare.Config(**SMALL, methods=("downpour",), learning_rate=0.1, target=1.7)
    folder, summary = compare.run(config)
    row = pd.read_csv(folder / compare.TABLE).iloc[0]
    times, gradients = [], []
    for run_folder, trace_file in summary[["run_folder", "trace_file"]].to_numpy():
        evaluations = Run.load(folder / run_folder).evaluations
        met = next(entry for entry in evaluations.itertuples() if entry.train_loss <= 1.7)
        times.append(met.commit_time)
        gradients.append(met.commit)
        frame = Trace.load(folder / trace_file).frame
    assert row["time_to_target"] == pytest.approx(np.mean(times))
    assert row["gradients_to_target"] == np.mean(gradients)
    assert row["reached"] == 2 and row["discarded"] == 0
    assert row["messages"] == 2 * len(frame) and row["gigabytes"] == pytest.approx(2 * 60 * 17_226 * 4 / 1e9)


@pytest.mark.full
def test_a_target_that_is_never_met_takes_forever():
    folder, _ = compare.run(compare.Config(**SMALL, methods=("downpour",), target=1e-6))
    row = pd.read_csv(folder / compare.TABLE).iloc[0]
    assert row["reached"] == 0 and np.isinf(row["time_to_target"]) and np.isinf(row["gradients_to_target"])


def test_each_method_has_its_own_rate_unless_one_is_given():
    own = compare.Config(methods=("downpour",)).make_methods()[0]
    given = compare.Config(methods=("downpour",), learning_rate=0.4).make_methods()[0]
    assert own.hyperparameters["learning_rate"] == 0.05 and given.hyperparameters["learning_rate"] == 0.4


@pytest.mark.parametrize(
    "options",
    [
        {"target": 0.0},
        {"tune": (0.1, -1.0)},
        {"tune": (0.1, 0.1)},
        {"measure": "test_loss", "problem": "quadratic"},
        {"seeds": 0},
    ],
)
def test_bad_input(options):
    with pytest.raises(InputError, match="^" + next(iter(options)) + " = "):
        compare.run(compare.Config(**options))


def test_methods_without_a_learning_rate(tmp_path):
    own = methods.downpour()._replace(name="own", hyperparameters={"eta": 0.05})
    compare.run(compare.Config(methods=(own,), workers=2, steps=4, seeds=1, out=tmp_path / "out"))
    assert pd.read_csv(tmp_path / "out" / compare.TABLE)["learning_rate"].isna().all()
