"""The study of ensembles: predictions averaged over independent models."""

import jax
import numpy as np
import pytest

from asyncsim import InputError, problems, study

ensembles = study.load("ensembles")


@pytest.mark.full
def test_predictions_are_averaged_as_probabilities():
    problem = problems.digits(hidden=(4,))
    models = [jax.tree.map(np.asarray, problem.init(jax.random.key(seed))) for seed in (0, 1)]
    found = ensembles.averaged_predictions(problem, models, problem.test)
    scores = [np.asarray(problem.predict(params, problem.test), float) for params in models]
    mean = sum(np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in scores) / 2
    label = problem.test["label"]
    assert found["loss"] == pytest.approx(-np.log(mean[np.arange(len(label)), label]).mean(), rel=1e-5)
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
    assert "single_accuracy" in capsys.readouterr().out


def test_a_problem_has_to_predict(tmp_path):
    with pytest.raises(InputError, match="problem = 'quadratic': says of no examples what it predicts"):
        ensembles.run(ensembles.Config(problem="quadratic", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_models_that_diverge_are_counted_and_left_out(tmp_path):
    config = ensembles.Config(workers=2, steps=30, seeds=1, learning_rate=1e30, out=tmp_path / "out")
    summary = ensembles.run(config).summary
    assert summary["diverged"].tolist() == [1, 2] and summary["test_accuracy"].isna().all()


def test_a_model_that_is_sure_and_wrong_has_a_finite_loss():
    problem = problems.digits()
    sure = jax.tree.map(lambda leaf: 1e3 * leaf, problem.init(jax.random.key(0)))
    assert np.isfinite(ensembles.averaged_predictions(problem, [sure], problem.test)["loss"])
