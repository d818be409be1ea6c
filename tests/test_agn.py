"""The thesis' grid of workers and windows: the study, the workers' named optimizers, and the
figures.
"""

import dataclasses
import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from gem_results import make_run
from matplotlib.text import Text

from asyncsim import InputError, methods, problems, study
from asyncsim.study import comparison
from asyncsim.study.config import StudyConfig
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read
from asyncsim.study.sweep import sweep

windows = study.load("windows")
agn = figures_of("agn")


def evaluations(times, accuracies):
    return pd.DataFrame({"commit_time": times, "train_accuracy": accuracies})


# The study


def test_temporal_efficiency_is_the_ratio_of_areas_until_the_first_ends():
    steady = evaluations([0.0, 10.0], [0.6, 0.6])
    # Rises to 0.9 at 2 s and stays until 4 s: areas of 0.9 and 1.8.
    rising = evaluations([0.0, 2.0, 4.0], [0.0, 0.9, 0.9])
    assert windows.temporal_efficiency(rising, steady) == pytest.approx(
        (0.9 + 1.8) / (0.6 * 4), rel=1e-12
    )
    assert windows.temporal_efficiency(steady, rising) == pytest.approx(
        (0.6 * 4) / (0.9 + 1.8), rel=1e-12
    )
    # The end of the shorter lies between two evaluations of the longer, 0.45 at 1 s.
    short = evaluations([0.0, 1.0], [1.0, 1.0])
    assert windows.temporal_efficiency(rising, short) == pytest.approx(0.45 / 2, rel=1e-12)
    assert np.isnan(
        windows.temporal_efficiency(rising, rising.iloc[:1])
    )  # diverged before its first evaluation


@pytest.mark.full
def test_directions_of_averaged_updates_and_adags_factor(lenient):
    options = {"seeds": 1, "steps": 8, "epochs": None, "optimizer": None, "learning_rate": 0.05}
    options |= {"directions_every": 2, "diagnose_every": 4, "out": Path("mine")}
    config = windows.Config(
        workers=(2,),
        window=(1, 8),
        methods=("agn", "adag"),
        problem=problems.digits(batch_size=32, hidden=()),
        **options,
    )
    result = windows.run(config)
    grid = result.summary.set_index(["method", "window"])
    agn_grid = grid.loc["agn", list(windows.COSINES)]
    assert (agn_grid.loc[8] > agn_grid.loc[1]).all()
    run = read("mine", "windows").run(result.summary["run_folder"].iloc[0])
    # The last step goes to the end itself.
    assert run.commits["target_cosine"].iloc[-4:].max() > 0.9


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        # 1,437 examples in minibatches of 32: 44.9 in a pass, so 22 visits of both workers, 2 %
        # short of one.
        ({"epochs": 1.0}, []),
        # One visit of both is 800 minibatches.
        (
            {"window": (1, 400), "epochs": 1.0},
            ["workers-2_window-400: whole visits of all workers are 17.8 epochs"],
        ),
        # Two visits of 30 minibatches each in the place of 2.2; that of 22 in the place of 67.4 is
        # right to 2 %.
        (
            {"window": (15, 1), "epochs": 1.5},
            ["workers-2_window-15: whole visits of all workers are 1.34 epochs"],
        ),
        ({"steps": 3}, ["--steps changes nothing beside --epochs"]),
        ({"steps": 3, "epochs": None}, []),
        # The study's own optimizer, which nobody has asked for.
        ({"methods": ("downpour", "gem")}, []),
    ],
)
def test_epochs_that_are_no_whole_visits_and_options_without_effect_are_noted(
    options, notes, monkeypatch, capsys
):
    monkeypatch.setattr(comparison, "run_cells", lambda *of_study, **also: None)
    problem = problems.digits(batch_size=32, hidden=())
    usual = {"workers": (2,), "window": (1,), "methods": ("agn",), "problem": problem}
    windows.run(windows.Config(**usual | options))
    assert capsys.readouterr().err.splitlines() == [f"note: {note}" for note in notes]


def test_a_method_of_ones_own_keeps_its_defaults_where_the_study_has_others():
    Path("mine.py").write_text(
        "from asyncsim import methods\n\n\ndef mine(learning_rate=0.3):\n"
        "    return methods.downpour(learning_rate)._replace(name='mine')\n"
    )
    for given, rate in (({}, 0.3), ({"learning_rate": 0.2}, 0.2)):
        config = windows.Config(
            methods=("mine.py:mine",), workers=(2,), problem="quadratic", **given
        )
        (cell,) = sweep(config, [{"workers": 2}])
        assert cell.methods[0].hyperparameters["learning_rate"] == rate


# A local optimizer by its name


def steps_of(optimizer):
    """Return three steps with the same gradients."""
    params, gradients, steps = jnp.array([1.0, -2.0]), jnp.array([0.3, -0.1]), []
    state = optimizer.init(params)
    for _ in range(3):
        step, state = optimizer.update(gradients, state, params)
        steps.append(np.asarray(step))
    return np.array(steps)


@pytest.mark.parametrize("name", ["adam", "nadam", "nadamw"])  # of others, too
def test_a_named_optimizer_is_that_of_optax(name, lenient):
    method = methods.agn(optimizer=methods.named_optimizer(name, 0.02))
    assert method.hyperparameters == {"learning_rate": 0.02, "optimizer": name}
    np.testing.assert_array_equal(
        steps_of(method.optimizer), steps_of(getattr(optax, name)(learning_rate=0.02))
    )


def test_the_perceptron_of_the_thesis_has_pixels_from_zero_to_one(monkeypatch):
    images = np.repeat(np.array([0, 255], np.uint8), 10 * 28 * 28).reshape(20, 28, 28)
    parts = {f"{part}-images-idx3-ubyte": images for part in ("train", "t10k")}
    parts |= {f"{part}-labels-idx1-ubyte": np.zeros(20, np.uint8) for part in ("train", "t10k")}
    monkeypatch.setattr(
        importlib.import_module("asyncsim.problems.mnist"), "load_mnist", lambda folder: parts
    )
    scaled = problems.mnist(batch_size=4, network="mlp").train["image"]
    assert (scaled[:10] == 0).all() and (scaled[10:] == 1).all()
    standardised = problems.mnist(batch_size=4).train["image"]
    assert standardised[0, 0, 0] == pytest.approx(-0.1307 / 0.3081) and standardised[19, 0, 0] > 2


def test_studies_take_an_optimizer_with_the_learning_rate(capsys):
    config = StudyConfig(methods=("agn", "gem"), optimizer="rmsprop", learning_rate=0.01)
    made, gem = config.make_methods()
    assert made.hyperparameters == {"learning_rate": 0.01, "optimizer": "rmsprop"}
    assert gem.hyperparameters["learning_rate"] == 0.01
    assert "note: --optimizer changes nothing for gem" in capsys.readouterr().err
    with pytest.raises(
        InputError, match="optimizer = 'rmsprop': has no rate of its own; give learning_rate"
    ):
        dataclasses.replace(config, learning_rate=None).make_methods()


# The figures


@pytest.fixture
def results():
    return write_windows(Path("results/windows"))


def write_windows(folder):
    """A folder as the study writes it, made by hand, on the thesis' cluster."""
    folder.mkdir(parents=True)
    grid = [
        {
            "workers": n,
            "window": w,
            "method": m,
            "seed": 0,
            "status": "finished",
            "simulated_seconds": 100.0 * n / w,
        }
        | {
            "train_accuracy": 0.99 - 0.001 * n,
            "test_accuracy": 0.98 - 0.001 * n,
        }
        for n in (10, 20)
        for w in (1, 10)
        for m in ("agn", "aeasgd", "downpour")
    ]
    efficiency = [
        {"workers": n, "window": w, "method": "agn", "against": "aeasgd"}
        for n in (10, 20)
        for w in (1, 10)
    ]
    staleness = [
        {"workers": n, "window": w, "staleness": k, "share": 1 / n}
        for n in (10, 20)
        for w in (1, 10)
        for k in range(n)
    ]
    pd.DataFrame(efficiency).assign(efficiency=1.01).to_csv(folder / "efficiency.csv", index=False)
    pd.DataFrame(staleness).to_csv(folder / "staleness.csv", index=False)
    pd.DataFrame(grid).to_csv(folder / "summary.csv", index=False)
    paper = windows.SCALES["paper"]
    config = {
        "study": "windows",
        "problem": "mnist",
        "problem_config": {"batch_size": 128},
    }
    config |= {name: getattr(paper, name) for name in ("epochs", "compute", "service", "protocol")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


#: The figures that read runs or recorders, which the hand-made folder lacks.
OF_RUNS = ("path",)


def test_paths_are_measured_against_straight_lines(tmp_path):
    rows = []
    for window, corners in ((15, [(0, 1), (1, 1)]), (500, [(1, 1), (2, 2)])):
        run = make_run("gem", 2, steps=1)
        positions = {f"position_{k}": values for k, values in enumerate(zip(*corners, strict=True))}
        dataclasses.replace(run, commits=run.commits.assign(**positions)).save(
            tmp_path / str(window)
        )
        rows.append({"method": "agn", "workers": 2, "window": window, "seed": 0})
        rows[-1] |= {"status": "finished", "run_folder": str(window)}
    pd.DataFrame(rows).to_csv(tmp_path / "summary.csv", index=False)
    (tmp_path / "config.json").write_text('{"study": "leaders", "problem": "quadratic"}')
    figure = agn.FIGURES["path"].draw(read(tmp_path, "leaders"))
    lines = figure.axes[0].lines
    assert [line.get_label().split(": ")[1] for line in lines] == [
        "distance 0.707 of length",
        "distance 1.000 of length",
    ]
    # The directions are orthonormal: they keep lengths.
    assert np.hypot(*np.diff(lines[0].get_xydata(), axis=0).T) == pytest.approx([1, 1])


def test_published_numbers_are_beside_the_thesis_task_alone(results):
    change = {"problem_config": {"batch_size": 128, "network": "cnn"}}
    config = json.loads((results / "config.json").read_text()) | change
    (results / "config.json").write_text(json.dumps(config))
    found = read(results, "windows")
    figures = {
        name: drawing.draw(found)
        for name, drawing in agn.FIGURES.items()
        if name not in ("times", *OF_RUNS)
    }
    for figure in figures.values():
        figure.draw_without_rendering()
        assert not [
            text.get_text() for text in figure.findobj(Text) if "published" in text.get_text()
        ]
    *maps, _ = figures["agn"].axes
    assert [len(axes.texts) for axes in [*maps, figures["efficiency"].axes[0]]] == [4, 4, 4]
    faces = {line.get_markerfacecolor() for axes in figures["collapse"].axes for line in axes.lines}
    assert "white" not in faces
    assert "^" not in {
        line.get_marker() for axes in figures["staleness"].axes for line in axes.lines
    }
    with pytest.raises(
        InputError, match="its problem, its cluster or its gradients differ from the thesis"
    ):
        agn.FIGURES["times"].draw(found)
