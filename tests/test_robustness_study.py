"""The study of robustness: worst cases at the best rates, and how much Byzantine messages counted."""

import pandas as pd
import pytest

from asyncsim import study


@pytest.mark.full
def test_worst_cases_at_best_rates(tmp_path, capsys):
    options = ["--workers=8", "--steps=12", "--seeds=1", "--byzantine", "2", "--tune", "0.1", "0.4", "--batch-size=8"]
    rules = ["--rules", "median()", "krum(f=f)", "--attacks", "sign_flip(scale=10)", "zero"]
    assert study.main(["robustness", *options, *rules, f"--out={tmp_path / 'mine'}"]) == 0
    accuracy, worst = (pd.read_csv(tmp_path / "mine" / f"{name}.csv") for name in ("accuracy", "worst"))
    assert len(accuracy) == 3 * 2 * 3 and len(worst) == 6
    for row in worst.itertuples():
        own = accuracy[(accuracy["method"] == row.method) & (accuracy["byzantine"] == row.byzantine)]
        assert row.test_accuracy == own.groupby("learning_rate")["test_accuracy"].min().max()
    at = worst.set_index(["method", "byzantine"])
    assert at.loc[("batch_sgd", 2), "test_accuracy"] < 0.3 < at.loc[("median()", 2), "test_accuracy"]
    summary = pd.read_csv(tmp_path / "mine" / "summary.csv")
    assert set(summary["method.rule"].dropna()) == {"median()", "krum(f=0)", "krum(f=2)"}
    assert (tmp_path / "mine" / "robustness.png").exists() and "in the worst case" in capsys.readouterr().out
