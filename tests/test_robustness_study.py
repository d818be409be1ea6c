"""The study of robustness: worst cases at the best rates, and how much Byzantine messages
counted.
"""

import numpy as np
import pandas as pd
import pytest

from asyncsim import study

pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.mark.full
def test_worst_cases_at_best_rates(tmp_path, capsys):
    options = [
        "--workers=8",
        "--steps=12",
        "--seeds=1",
        "--byzantine",
        "2",
        "--tune",
        "0.1",
        "0.4",
        "--batch-size=8",
    ]
    options += ["--problem=digits(hidden=[])", "--rules", "trimmed_mean(f=f)"]
    options += ["--attacks", "sign_flip(scale=10)", "alie"]
    assert study.main(["robustness", *options, f"--out={tmp_path / 'mine'}"]) == 0
    accuracy, worst = (
        pd.read_csv(tmp_path / "mine" / f"{name}.csv") for name in ("accuracy", "worst")
    )
    assert len(accuracy) == 2 * 2 * 3 and len(worst) == 4
    # Of eight workers with two Byzantine ones ALIE is no attack: it is in the table of all, and in
    # no worst case.
    accuracy = accuracy[accuracy["attack"] != "alie"]
    assert len(accuracy) == 2 * 2 * 2 and "alie" not in set(worst["attack"])
    for row in worst.itertuples():
        own = accuracy[
            (accuracy["method"] == row.method) & (accuracy["byzantine"] == row.byzantine)
        ]
        assert row.test_accuracy == own.groupby("learning_rate")["test_accuracy"].min().max()
    at = worst.set_index(["method", "byzantine"])
    assert (
        at.loc[("batch_sgd", 2), "test_accuracy"]
        < 0.3
        < at.loc[("trimmed_mean(f=f)", 2), "test_accuracy"]
    )
    summary = pd.read_csv(tmp_path / "mine" / "summary.csv")
    assert set(summary["method.rule"].dropna()) == {"trimmed_mean(f=0)", "trimmed_mean(f=2)"}
    printed = capsys.readouterr()
    assert (tmp_path / "mine" / "robustness.png").exists() and "in the worst case" in printed.out
    told = (
        "note: attack = 'alie(workers=2)': with 2 of 8 workers z is 0, so that they send the mean, "
        "which is no attack"
    )
    assert (
        "note: best at the l" in printed.err and "; a rate beyond it may be better" in printed.err
    )
    assert (
        printed.err.count(told) == printed.out.count(told) == 1
        and "WeakAttackWarning" not in printed.err
    )


def test_a_worst_case_counts_a_diverged_run_as_accuracy_0():
    """At 0.1 a seed diverges under the worst attack, and yet its mean accuracy is above the worst
    of 0.2.
    """
    rows = [
        {
            "method": "median()",
            "byzantine": 2,
            "attack": attack,
            "learning_rate": rate,
            "seed": seed,
            "status": "diverged" if np.isnan(accuracy) else "finished",
            "test_accuracy": accuracy,
            "train_loss": 1.0,
        }
        for rate, attack, accuracies in (
            (0.1, "alie", [0.9, 0.9, 0.9]),
            (0.2, "alie", [0.3, 0.3, 0.3]),
            (0.1, "zero", [0.9, 0.9, np.nan]),
            (0.2, "zero", [0.8, 0.8, 0.8]),
        )
        for seed, accuracy in enumerate(accuracies)
    ]
    robustness = study.load("robustness")
    (worst,) = robustness.accuracy_table(
        robustness.worst_runs(robustness.scored(pd.DataFrame(rows)))
    ).to_dict("records")
    assert (worst["learning_rate"], worst["attack"], worst["seeds"], worst["diverged"]) == (
        0.1,
        "zero",
        3,
        1,
    )
    assert worst["test_accuracy"] == pytest.approx(0.6)
