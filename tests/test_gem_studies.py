"""The studies of the GEM paper: each runs, keeps what it says, and finds what is known
beforehand.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsim import Run, study

limits = study.load("stability")

pytestmark = pytest.mark.usefixtures("quick_figures")


@pytest.fixture
def told(told):
    """Run a study of a single seed on a quadratic, unless the options say otherwise."""
    return lambda name, options: told(
        name, "--seeds=1", "--problem=quadratic", "--out=mine", *options.split()
    )


@pytest.mark.parametrize("name", ["stability", "energy", "tensors", "windows"])
def test_scales_are_valid_and_chosen_by_name(name):
    module = study.load(name)
    assert {scale: config.scale for scale, config in module.SCALES.items()} == {
        "small": "small",
        "paper": "paper",
    }
    for scale, config in module.SCALES.items():
        config.check()
        assert study.configure(name, ["--scale", scale])[1] == config
    small, paper = module.SCALES["small"], module.SCALES["paper"]
    assert study.configure(name, ["--scale", "paper", "--seeds", "7"])[1] == dataclasses.replace(
        paper, seeds=7
    )
    assert small == module.Config() and small.problem == "digits" != paper.problem


# Limits


@given(
    st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=40).map(sorted),
    st.integers(-1, 1001),
)
def test_bisection_finds_a_known_limit(values, limit):
    method, config = SimpleNamespace(name="gem"), SimpleNamespace(seeds=1)
    cells = tuple(
        SimpleNamespace(values={"workers": n}, methods=[method], config=config) for n in values
    )

    def trial(cell, seed):
        return {"stable": cell.values["workers"] <= limit, **cell.values}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_run_trial", trial)
        tables = limits.limits_of(limits.Search("workers", 0.1, cells))
    ((row,), tried) = (tables[name] for name in limits.TABLES)
    stable, unstable = [v for v in values if v <= limit], [v for v in values if v > limit]
    assert row["largest_stable"] == (stable[-1] if stable else None)
    assert row["smallest_unstable"] == (unstable[0] if stable and unstable else None)
    asked = [trial["workers"] for trial in tried]
    most = math.ceil(math.log2(len(values))) + 1 if unstable else 1
    assert len(asked) == len(set(asked)) <= most


def test_first_and_last_loss():
    # Two workers of five steps: their first steps are commits 0 and 2, and a tenth of the commits
    # is one.
    step, loss = [0, 1, 0, 1, 2, 2, 3, 3, 4, 4], [5.0, 9, 3, 9, 9, 9, 9, 9, 9, 2]
    run = SimpleNamespace(commits=pd.DataFrame({"worker_step": step, "loss": loss}))
    assert limits.first_and_last(run, 10) == (4.0, 2.0)


@pytest.mark.full
def test_limits_of_gradient_descent(told, monkeypatch):
    # One worker on a quadratic of curvature one: the loss shrinks with a rate below two and grows
    # above it.
    module = study.load("stability")
    monkeypatch.setattr(module, "_RATES", [1.0, 1.9, 2.1])
    monkeypatch.setattr(module, "_COUNTS", [1])
    options = "--workers 1 --learning-rate 1 --methods downpour --steps 40 "
    options += "--problem quadratic(curvature=[1],noise=0)"
    code, out, err = told("stability", options)
    assert code == 0, err
    table = pd.read_csv("mine/limits.csv").set_index("question")
    assert table.loc["learning_rate", ["largest_stable", "smallest_unstable"]].tolist() == [
        1.9,
        2.1,
    ]
    assert table.loc["workers", "largest_stable"] == 1 and np.isnan(
        table.loc["workers", "smallest_unstable"]
    )
    assert (
        (table["at"] == 1).all()
        and (table["seeds"] == 1).all()
        and (table["method"] == "downpour").all()
    )
    tried = pd.read_csv("mine/limit_runs.csv")
    # The one number of workers; then the highest rate first.
    assert list(tried["learning_rate"]) == [1.0, 2.1, 1.9]
    assert list(tried["stable"]) == [True, False, True]
    assert "limits.csv" in out[-2] and "limit_runs.csv" in out[-2]


@pytest.mark.parametrize(
    ("unstable", "told"),
    [
        ((8, 0.1), []),
        ((2, 0.01), ["gem"]),
        ((8, 0.01), []),
        ((2, 0.1), []),
    ],
)
def test_runs_too_slow_to_learn_are_told_from_unstable_ones(unstable, told):
    """Where it is stable with 4 workers at 0.05."""
    points = [(4, 0.05, True), (*unstable, False)]
    rows = [("gem", *point) for point in points] + [
        ("downpour", 2, 0.01, True),
        ("downpour", 4, 0.05, False),
    ]
    tried = pd.DataFrame(rows, columns=["method", "workers", "learning_rate", "stable"])
    assert limits.too_slow(tried) == told


# What is left when it ends early

GO_ON = "; resume with --resume mine"


def stop_at(monkeypatch, module, number: int) -> None:
    """Let the replay of that number, from one, be interrupted."""
    replay, calls = module.replay, []

    def stopping(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return replay(*arguments, **options)

    monkeypatch.setattr(module, "replay", stopping)


@pytest.mark.full
def test_interrupted_limits_keep_the_grid(told, monkeypatch):
    stop_at(monkeypatch, study.load("stability"), 1)
    code, _, err = told("stability", "--workers 2 --learning-rate 0.1 --methods downpour --steps 2")
    assert (code, err[-1]) == (130, f"interrupted: the finished results are in mine{GO_ON}")
    absent = json.loads(Path("mine/config.json").read_text())["incomplete"]
    assert [name.partition("/")[0] for name in absent] == ["parts", "parts"]
    assert len(pd.read_csv("mine/summary.csv")) == 1 and not Path("mine/limits.csv").exists()


# Parts


def test_epochs_are_passes_through_the_data():
    module = study.load("generalization")
    problem = SimpleNamespace(name="digits", batch_size=32, examples=1437)
    cell = SimpleNamespace(
        cluster=SimpleNamespace(workers=10, windows=(1,) * 10), config=module.Config().at(steps=1)
    )
    changed = {}
    stub = SimpleNamespace(**vars(cell), problem=problem, with_options=lambda **new: changed | new)
    changed = module.Config(epochs=30).with_length(stub)
    assert changed == {"steps": 135, "evaluate_every": 4} and round(30 * 1437 / 320) == 135


PUBLISHED = SimpleNamespace(
    BIN_STEPS=20,
    TASK=SimpleNamespace(is_posed_by=lambda name, config: name == "digits"),
    binned=lambda figure, name: pd.Series([1.0, 0.5, 0.25] if "n=2" in name else [1.0] * 7),
    log_deviation=study.load("forensics")._published().log_deviation,
)


def test_deviation_of_known_curves(monkeypatch):
    forensics = study.load("forensics")
    monkeypatch.setattr(forensics, "_published", lambda: PUBLISHED)
    commits = pd.DataFrame({"commit": range(120), "commit_time": np.arange(120.0), "worker": 0})
    loss = 10 * np.repeat([1.0, 0.5, 0.25], 40)
    run = Run(commits.assign(loss=loss), pd.DataFrame(), pd.DataFrame(), {})

    def deviation(workers):
        cell = SimpleNamespace(cluster=SimpleNamespace(workers=workers))
        job = SimpleNamespace(cell=cell, method=SimpleNamespace(name="gem"))
        return forensics.deviation(job, run, None)

    assert deviation(2) == {"deviation": pytest.approx(1.0, rel=1e-12), "bins": 3}
    # Fewer than half of the bins are no curve.
    assert np.isnan(deviation(4)["deviation"])


def test_the_nearest_cluster_is_of_all_methods_each_at_its_best_rate():
    rows = [
        {"service": service, "method": method, "learning_rate": rate, "workers": n, "deviation": d}
        for (method, service), both in {
            ("gem", "0"): (0.1, 0.5),
            ("gem", "0.2"): (0.2, 0.6),
            ("downpour", "0"): (0.6, np.nan),
            ("downpour", "0.2"): (0.4, 0.3),
        }.items()
        for rate, d in zip((0.05, 0.01), both, strict=True)
        for n in (5, 20)
    ]
    table = SimpleNamespace(compared=["service"], rates=pd.DataFrame(rows))
    tables, _ = study.load("forensics").clusters(table)
    # Mean squares of the best rates: (0.01 + 0.36) / 2 without service, (0.04 + 0.09) / 2 with.
    fit = tables["fit.csv"].set_index("service")["deviation"]
    assert fit.to_dict() == pytest.approx({"0.2": 0.065**0.5, "0": 0.185**0.5})
    assert list(fit.index) == ["0.2", "0"]


def test_forensics_needs_published_curves(told, monkeypatch):
    monkeypatch.setattr(study.load("forensics"), "_published", lambda: PUBLISHED)
    code, _, err = told("forensics", "--problem digits --steps 2 --methods sgd")
    message = "methods = 'sgd': unknown; choose from gem, downpour, adaptive_staleness"
    assert code == 2 and message in err[-1] and not Path("mine").exists()
