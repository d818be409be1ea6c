"""The study of robustness: worst cases at the best rates, and how much Byzantine messages counted."""

import pandas as pd
import pytest

from asyncsim import study


@pytest.mark.full
def test_worst_cases_at_best_rates(tmp_path, capsys):
    options = ["--workers=8", "--steps=12", "--seeds=1", "--byzantine", "2", "--tune", "0.1", "0.4", "--batch-size=8"]
    rules = ["--rules", "median()", "krum(f=f)", "--attacks", "sign_flip(scale=10)", "zero", "alie"]
    assert study.main(["robustness", *options, *rules, f"--out={tmp_path / 'mine'}"]) == 0
    accuracy, worst = (pd.read_csv(tmp_path / "mine" / f"{name}.csv") for name in ("accuracy", "worst"))
    assert len(accuracy) == 3 * 2 * 4 and len(worst) == 6
    # Of eight workers with two Byzantine ones ALIE is no attack: it is in the table of all, and in no worst case.
    accuracy = accuracy[accuracy["attack"] != "alie"]
    assert len(accuracy) == 3 * 2 * 3 and "alie" not in set(worst["attack"])
    for row in worst.itertuples():
        own = accuracy[(accuracy["method"] == row.method) & (accuracy["byzantine"] == row.byzantine)]
        assert row.test_accuracy == own.groupby("learning_rate")["test_accuracy"].min().max()
    at = worst.set_index(["method", "byzantine"])
    assert at.loc[("batch_sgd", 2), "test_accuracy"] < 0.3 < at.loc[("median()", 2), "test_accuracy"]
    summary = pd.read_csv(tmp_path / "mine" / "summary.csv")
    assert set(summary["method.rule"].dropna()) == {"median()", "krum(f=0)", "krum(f=2)"}
    printed = capsys.readouterr()
    assert (tmp_path / "mine" / "robustness.png").exists() and "in the worst case" in printed.out
    told = (
        "note: attack = 'alie(workers=2)': with 2 of 8 workers z is 0, so that they send the mean, which is no attack"
    )
    assert printed.err.count(told) == 1 and "WeakAttackWarning" not in printed.err


def test_an_attack_that_is_none_cannot_be_the_only_one(tmp_path, capsys):
    options = ["robustness", "--workers=10", "--byzantine", "2", "--attacks", "alie", f"--out={tmp_path / 'mine'}"]
    assert study.main(options) == 2
    assert "attacks = alie: with 2 of 10 workers z is 0" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
