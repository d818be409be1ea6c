"""The study of leaders and its figures: best rates, elections, groups, and what is drawn."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from gem_results import make_run

from asyncsim import study
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read

leaders = study.load("leaders")
lsgd = figures_of("lsgd")
KEYS = ["workers", "window", "method", "learning_rate"]
METHODS = ("lsgd", "lsgd_groups", "aeasgd", "downpour")


pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return write_leaders(tmp_path_factory.mktemp("results") / "leaders")


def write_leaders(folder):
    """A folder as the study writes it, of runs made by hand: the higher rate diverges with a period
    of 4.
    """
    rows = []
    for n, window, method, rate, seed in itertools.product(
        (2, 4), (1, 4), METHODS, (0.1, 0.5), (0, 1)
    ):
        bad = rate == 0.5 and window == 4
        run = make_run("gem", n, steps=10, seed=seed, diverged_at=5 if bad else None)
        run.evaluations["train_loss"] *= 1.2 - rate
        run.evaluations["commit_time"] = run.evaluations["commit"] / n
        run.evaluations["test_accuracy"] = 1 - run.evaluations["train_loss"] / 10
        name = f"runs/{n}-{window}-{method}-{rate}-{seed}"
        run.save(folder / name)
        last = run.evaluations.iloc[-1][["train_loss", "test_accuracy"]].to_dict()
        values = dict(zip(KEYS, (n, window, method, rate), strict=True))
        rows.append({**values, "seed": seed, "status": run.status, **last, "run_folder": name})
    pd.DataFrame(rows).to_csv(folder / "summary.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"study": "leaders", "problem": "digits"}))
    leaders.results_table(read(folder, "leaders"), 0.2).to_csv(folder / leaders.TABLE, index=False)
    return folder


def test_a_leader_rests_where_the_gradient_is_zero(tmp_path):
    config = leaders.Config(
        workers=(4,),
        window=(1,),
        learning_rate=(0.01,),
        gradients=1500,
        seeds=1,
        problem="wells(tilt=0.3)",
        methods=("lgd(pull=0.005)", "easgd(alpha=0.005)", "lsgd"),
        x64=True,
        out=tmp_path / "out",
    )
    result = leaders.run(config)
    table = pd.read_csv(result.folder / leaders.TABLE).set_index("method")
    assert table.loc["lgd", "gradient"] < 1e-8 and table.loc["lsgd", "gradient"] < 1e-6
    assert table.loc["easgd", "gradient"] == pytest.approx(0.486, abs=1e-3)
    assert {path.stem for path in result.folder.glob("*.png")} >= {"identity", "leaders"}


@pytest.mark.full
def test_each_method_is_shown_at_its_best_rate(results):
    table = pd.read_csv(results / leaders.TABLE)
    assert table[["workers", "window", "method"]].to_numpy().tolist() == [
        [n, window, method] for n in (2, 4) for window in (1, 4) for method in METHODS
    ]
    # Diverging counts before any error.
    assert (table["learning_rate"] == np.where(table["window"] == 4, 0.1, 0.5)).all()
    assert (table["diverged"] == 0).all() and (table["seeds"] == 2).all()
    np.testing.assert_allclose(table["test_error"], table["train_loss"] / 10)
    assert table[["largest_share", "kept"]].notna().all(axis=1).equals(table["method"] == "lsgd")


def test_the_leader_is_who_told_the_least_loss_last():
    commits = pd.DataFrame({"worker": [1, 0, 1, 2, 1], "loss": [0.5, 0.7, 0.9, 0.8, 0.1]})
    assert leaders.leaders(commits, 4).tolist() == [1, 1, 0, 0, 1]
