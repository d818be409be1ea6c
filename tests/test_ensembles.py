"""The study of ensembles: predictions averaged over independent models."""

import dataclasses
import json

import jax
import numpy as np
import pandas as pd
import pytest

from asyncsim import InputError, problems, study
from asyncsim.study.finished import figures, read

ensembles = study.load("ensembles")


@pytest.mark.full
def test_predictions_are_averaged_as_probabilities():
    problem = problems.digits(hidden=(4,))
    models = [jax.tree.map(np.asarray, problem.init(jax.random.key(seed))) for seed in (0, 1)]
    found = ensembles.averaged_predictions(problem, models, problem.test)
    scores = [np.asarray(problem.predict(params, problem.test), float) for params in models]
    mean = sum(np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in scores) / 2
    label = problem.test["label"]
    assert found["loss"] == pytest.approx(
        -np.log(mean[np.arange(len(label)), label]).mean(), rel=1e-5
    )
    assert found["accuracy"] == pytest.approx((mean.argmax(1) == label).mean())
    alone = ensembles.averaged_predictions(problem, models[:1], problem.test)
    evaluated = problem.evaluate(models[0], None, problem.test)
    assert alone["loss"] == pytest.approx(float(evaluated["loss"]), rel=1e-5)
    assert alone["accuracy"] == pytest.approx(float(evaluated["accuracy"]))


@pytest.mark.full
def test_an_ensemble_beats_its_models(tmp_path, capsys):
    result = ensembles.run(ensembles.Config(workers=2, steps=40, seeds=1, out=tmp_path / "out"))
    table = result.summary.set_index("models")
    assert list(table.index) == [1, 2]
    assert table.loc[1, "test_loss"] == table.loc[1, "single_loss"]
    # The mean of probabilities is never worse, in log loss, than its members are on average.
    assert table.loc[2, "test_loss"] < table.loc[2, "single_loss"]
    assert "single accuracy" in capsys.readouterr().out
    assert (tmp_path / "out" / "ensembles.png").exists()


def test_ensembles_are_ranked_by_their_loss():
    """All models of a seed may diverge; such an ensemble comes last."""
    losses = {("sgd", 1): [0.5, 0.6], ("sgd", 2): [0.4, 0.45], ("gem", 1): [0.1, np.nan]}
    rows = [
        {"method": method, "models": models, "seed": seed, "test_loss": loss}
        for (method, models), seeds in losses.items()
        for seed, loss in enumerate(seeds)
    ]
    table = ensembles.ranked_ensembles(pd.DataFrame(rows))
    ranks = table[["method", "models"]].itertuples(index=False, name=None)
    assert list(ranks) == [("sgd", 2), ("sgd", 1), ("gem", 1)]
    assert table["diverged"].tolist() == [0, 0, 1]


def test_a_problem_without_test_data_is_refused(tmp_path):
    untested = dataclasses.replace(problems.digits(), test=None)
    with pytest.raises(InputError, match="no test data"):
        ensembles.run(ensembles.Config(problem=untested, out=tmp_path / "out"))


def test_a_model_that_is_sure_and_wrong_has_a_finite_loss():
    problem = problems.digits()
    sure = jax.tree.map(lambda leaf: 1e3 * leaf, problem.init(jax.random.key(0)))
    assert np.isfinite(ensembles.averaged_predictions(problem, [sure], problem.test)["loss"])


def written(folder, losses):
    """A folder of results of two seeds, by method the test losses of one and of two models."""
    rows = [
        {"method": method, "seed": seed, "models": models, "diverged": 0}
        | {f"{who}_{what}": value for who in ("test", "single") for what in ("loss", "accuracy")}
        for method, values in losses.items()
        for seed in (0, 1)
        for models, value in enumerate(values, 1)
    ]
    folder.mkdir()
    pd.DataFrame(rows).to_csv(folder / "summary.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"study": "ensembles"}))
    return folder


@pytest.mark.parametrize(
    "losses", [{"sgd": [0.2, 0.1]}, {"gem": [np.nan, 0.1], "downpour": [np.nan, np.nan]}]
)
def test_its_figure(losses, tmp_path):
    """Also of models that have diverged, and of a job that failed."""
    folder = written(tmp_path / "out", losses)
    with (folder / "summary.csv").open("a") as file:
        file.write("sgd,2,,,,,,\n")
    drawn = figures("ensembles").draw(folder)
    assert [path.name for path in drawn] == ["ensembles.png", "ensembles.pdf"]
    (own, _) = figure_of(folder).axes
    curves = [line.get_ydata().tolist() for line in own.lines]
    assert curves == [
        [value for value in values if value == value]
        for values in losses.values()
        for _ in range(2)
    ]


def figure_of(folder):
    """The figure of a folder of results."""
    return figures("ensembles").ensembles(read(folder, "ensembles"))
