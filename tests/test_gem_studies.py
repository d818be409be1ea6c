"""The studies of the GEM paper: each runs, keeps what it says, and finds what is known
beforehand.
"""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsim import Run, study
from asyncsim.study.finished import Finished, read

limits = study.load("stability")
#: Studies that no other file runs, and one of the default run: options for a few programs, and the
#: cells' columns.
TINY = {
    "stability": (
        "--workers 2 --learning-rate 0.1 --steps 4 --methods downpour --no-limits",
        "learning_rate workers",
    ),
    "forensics": (
        "--workers 2 3 --fitted 2 --service 0 --cv 0.2 --learning-rate 0.1 0.03 --hidden 0 0.2 0.1 "
        "--problem quadratic(noise=0) --steps 60 --methods downpour",
        "service cv learning_rate workers",
    ),
}
OWN_TABLES = {
    "forensics": {"fit.csv", "target.csv"},
}


pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.fixture
def told(told):
    """Run a study of a single seed on a quadratic, unless the options say otherwise."""
    return lambda name, options: told(
        name, "--seeds=1", "--problem=quadratic", "--out=mine", *options.split()
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "leaders" else pytest.mark.full) for name in TINY],
)
def test_study_runs_and_is_resumed(told, name, lenient):
    options, columns = TINY[name]
    code, out, err = told(name, options)
    assert code == 0, err
    said, named = re.fullmatch("wrote (.*?): (.*)", out[-2]).groups()
    assert said == "mine" and sorted(named.split(", ")) == sorted(
        path.name for path in Path("mine").iterdir()
    )
    assert OWN_TABLES.get(name, set()) <= set(named.split(", "))
    results = read("mine", name)
    assert {"method", "seed", "status", *columns.split()} <= set(results.summary)
    assert set(results.summary["status"]) == {"finished"}
    assert len(results.runs()) == len(results.summary) >= 1
    cells = [set(cell) for cell in results.config["cells"]]
    assert cells and all(cell == set(columns.split()) for cell in cells)
    CHECKS.get(name, lambda results: None)(results)
    if name != "leaders":
        return
    # A run that is lost is computed again, figures are drawn again, and all files are as they were.

    def written():
        found = Path("mine").rglob("*")
        return {
            path: path.read_bytes() for path in found if path.is_file() and path.name != "made.json"
        }

    before = written()
    shutil.rmtree(Path("mine", results.summary["run_folder"].iloc[-1]))
    for path in [*Path("mine").glob("*.png"), *Path("mine").glob("*.pdf")]:
        path.unlink()
    assert study.main([name, "--resume=mine"]) == 0
    assert written() == before


def check_forensics(results):
    # Without noise nothing but the rate sets the curves apart, and that of the hidden cluster is
    # found again.
    fit = pd.read_csv(results.folder / "fit.csv")
    assert {"method", "service", "cv", "learning_rate", "workers", "deviation", "fitted"} <= set(
        fit
    )
    best = fit[fit["fitted"]].sort_values("deviation").iloc[0]
    assert best["learning_rate"] == 0.1
    assert fit.loc[~fit["fitted"], ["workers", "learning_rate"]].to_numpy().tolist() == [[3, 0.1]]
    assert (fit["bins"] == 3).all()
    assert (
        "compute" not in results.config and results.config["cv"]
    )  # which the compute times follow from
    # Although the digits' network has an argument of that name, which is another thing.
    assert results.config["hidden"] == [0.0, 0.2, 0.1]


CHECKS = {
    "forensics": check_forensics,
}


@pytest.mark.parametrize("name", [*TINY, "energy", "tensors", "windows"])
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


ELASTIC = """from asyncsim import methods

def elastic(learning_rate=0.05, alpha=0.1):
    return methods.aeasgd(learning_rate, alpha=alpha)._replace(name="elastic", hyperparameters={})
"""


@pytest.mark.parametrize(
    ("name", "options", "notes"),
    [
        ("stability", "--most-workers 7 --rates-at 2 --fraction 0.3", []),
        (
            "stability",
            "--no-limits --most-workers 7 --rates-at 2 --fraction 0.3",
            [
                f"{option} changes nothing without --limits"
                for option in ("--most-workers", "--rates-at", "--fraction")
            ],
        ),
        (
            "stability",
            "--methods mine.py:elastic(alpha=0.2) gem --optimizer adam",
            ["--optimizer changes nothing for elastic, gem"],
        ),
        (
            "staleness",
            "--diagnose-every 0 --diagnose-energy",
            ["--diagnose-energy changes nothing with --diagnose-every 0"],
        ),
    ],
)
def test_options_that_change_nothing_are_said_aloud(told, monkeypatch, name, options, notes):
    Path("mine.py").write_text(ELASTIC)
    monkeypatch.setattr(study.load(name), "run_cells", lambda *of_study: None)
    code, _, err = told(name, options)
    assert (code, err) == (0, [f"note: {note}" for note in notes])


# Limits


@given(
    st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=40).map(sorted),
    st.integers(-1, 1001),
)
def test_bisection_finds_a_known_limit(values, limit):
    asked = []
    found = limits.bisect(values, lambda value: asked.append(value) or value <= limit)
    stable, unstable = [v for v in values if v <= limit], [v for v in values if v > limit]
    assert found == (stable[-1] if stable else None, unstable[0] if unstable else None)
    assert (
        len(asked) == len(set(asked)) <= (math.ceil(math.log2(len(values))) + 1 if unstable else 1)
    )


def test_first_and_last_loss():
    # Two workers of five steps: their first steps are commits 0 and 2, and a tenth of the commits
    # is one.
    step, loss = [0, 1, 0, 1, 2, 2, 3, 3, 4, 4], [5.0, 9, 3, 9, 9, 9, 9, 9, 9, 2]
    run = SimpleNamespace(commits=pd.DataFrame({"worker_step": step, "loss": loss}))
    assert limits.first_and_last(run, 10) == (4.0, 2.0)


def test_tensors_need_pi(told):
    code, _, err = told("tensors", "--workers 2 --methods downpour --steps 4")
    assert code == 2 and not Path("mine").exists()
    assert err == [
        "error: methods = 'downpour': has no diagnostic pi, which this study measures; choose gem"
    ]


@pytest.mark.full
def test_limits_of_gradient_descent(told, monkeypatch):
    # One worker on a quadratic of curvature one: the loss shrinks with a rate below two and grows
    # above it.
    module = study.load("stability")
    monkeypatch.setattr(module, "_RATES", [1.0, 1.9, 2.1])
    options = "--workers 1 --most-workers 1 --learning-rate 1 --methods downpour --steps 40 "
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
    assert list(tried["learning_rate"]) == [1.0, 2.1, 1.0, 1.9] and list(tried["stable"]) == [
        True,
        False,
        True,
        True,
    ]
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


def table_of(deviations: dict) -> pd.DataFrame:
    """Return a table of deviations by method, service, learning rate and workers; fitted on 5 and
    20.
    """
    rows = [
        {
            "method": m,
            "service": s,
            "cv": 0.2,
            "learning_rate": rate,
            "workers": n,
            "deviation": d,
            "fitted": n != 10,
        }
        for (m, s, rate, n), d in deviations.items()
    ]
    return pd.DataFrame(rows)


def test_one_cluster_is_chosen_for_all_methods_each_at_its_best_rate():
    forensics = study.load("forensics")
    deviations = {}
    # By method and service: the deviation at rate 0.05 and 0.01.
    for (method, service), both in {
        ("gem", 0.0): (0.1, 0.5),
        ("gem", 0.2): (0.2, 0.6),
        ("downpour", 0.0): (0.6, 0.7),
        ("downpour", 0.2): (0.4, 0.3),
    }.items():
        for rate, deviation in zip((0.05, 0.01), both, strict=True):
            deviations |= {(method, service, rate, n): deviation for n in (5, 20)}
            deviations[method, service, rate, 10] = 9.0  # held out: must not count
    table = table_of(deviations)
    # Mean squares of the best rates: (0.01 + 0.36) / 2 without service, (0.04 + 0.09) / 2 with.
    assert forensics.common_cluster(forensics.scores(table)) == (0.2, 0.2)
    assert forensics.choose(table) == {
        (0.0, 0.2, 0.05): {"gem"},
        (0.2, 0.2, 0.05): {"gem"},
        (0.2, 0.2, 0.01): {"downpour"},
    }


def fitted_table(held_out: float, fast: float = 0.1) -> pd.DataFrame:
    """Return deviations of two clusters by two methods; those held out are the same, but for
    DOWNPOUR's at its best.
    """
    deviations = {}
    for method, service, n in itertools.product(("gem", "downpour"), (0.0, 0.2), (5, 10, 20)):
        deviations[method, service, 0.05, n] = 0.05 if n == 10 else {0.0: fast, 0.2: 0.2}[service]
        deviations[method, service, 0.01, n] = 9.0
    deviations["downpour", 0.0, 0.05, 10] = held_out
    return table_of(deviations)


@pytest.mark.parametrize(("held_out", "told"), [(0.12, "good"), (np.nan, "poor")])
def test_forensics_says_whether_the_fit_is_good(held_out, told):
    preferred, said = study.load("forensics").verdict(fitted_table(held_out)).splitlines()
    assert said.startswith(f"verdict: the fit is {told}: ") and "downpour with 10 workers" in said
    assert ("diverged early" in said) == np.isnan(held_out)
    assert preferred.startswith(
        "preferred of 2 clusters, over all methods: service 0 s, CV 0.2, with a deviation of 0.1"
    )


@pytest.mark.parametrize(
    ("service", "told"), [(0.0, "is recovered"), (0.2, "is not recovered"), (0.1, "is not among")]
)
def test_forensics_says_whether_the_hidden_cluster_was_found(service, told):
    assert (
        told in study.load("forensics").verdict(fitted_table(0.1), (service, 0.2)).splitlines()[-1]
    )


def test_deviation_of_known_curves():
    forensics = study.load("forensics")
    target = pd.Series([1.0, 0.5, 0.25])
    commits = pd.DataFrame({"commit": range(120), "commit_time": np.arange(120.0), "worker": 0})
    run = Run(
        commits.assign(loss=10 * np.repeat([1.0, 0.5, 0.25], 40)),
        pd.DataFrame(),
        pd.DataFrame(),
        {},
    )
    run.save("runs/one")
    point = {"service": 0.0, "cv": 0.2, "learning_rate": 0.05}
    row = {"method": "gem", **point, "workers": 2, "status": "finished", "run_folder": "runs/one"}
    finished = Finished(Path(), {}, pd.DataFrame([row]))
    found = forensics.fit(finished, {("gem", 2): target}, (2,)).iloc[0]
    assert (
        found["deviation"] == pytest.approx(1.0, rel=1e-12)
        and found["bins"] == 3
        and found["fitted"]
    )
    # Fewer than half of the bins are no curve.
    longer = pd.Series([1.0] * 7)
    assert np.isnan(forensics.fit(finished, {("gem", 2): longer}, (2,))["deviation"].iloc[0])
