"""The figures of papers from tiny results made by hand: published curves and deviations."""

import dataclasses
import importlib
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from gem_results import make_run, write_all, write_study, write_windows
from matplotlib.text import Text

from asyncsim import InputError, Run
from asyncsim.drawing.curves import Curve
from asyncsim.pages import command
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read

gem, agn = figures_of("gem"), figures_of("agn")
published = gem.published

PAPER = ["1a", "1b", "1c", "1d", "2", "3", "4", "5", "6a", "6b", "7", "8a", "8b", "9", "10"]
OWN = ["energy", "queue"]


def rewrite(path, table) -> None:
    """Save the run of a table's file again with another table."""
    run = dataclasses.replace(Run.load(path.parent), **{path.stem: table})
    shutil.rmtree(path.parent)
    run.save(path.parent)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Ten and twenty commits a run, two seeds, the bundled digits: nothing to compare with."""
    return write_all(tmp_path_factory.mktemp("results"))


def test_the_table_has_all_figures_and_what_makes_them():
    assert list(gem.FIGURES) == PAPER + OWN
    assert {drawing.folder for drawing in gem.FIGURES.values()} == set(gem.STUDIES)
    assert gem.PAPER.remedy("2").startswith(
        "make them with: asyncsim study staleness --problem mnist"
    )


def published_in(figure) -> tuple[list[str], int]:
    """Return what a figure says of published curves, and how many grey ones with points are in
    it.
    """
    told = [text.get_text() for text in figure.findobj(Text) if "published" in text.get_text()]
    grey = [line for axes in figure.axes for line in axes.lines if line.get_color() == "#999999"]
    return told, sum(len(line.get_xdata()) > 0 for line in grey)


@pytest.mark.parametrize(
    ("name", "problem", "config", "known"),
    [
        ("1d", "mnist", {"network": "cnn"}, True),
        ("1a", "mnist", {}, True),  # as far as is known
        ("2", "mnist", {"network": "mlp"}, False),
        ("3", "cifar10", {"network": "small"}, False),
    ],
)
def test_published_curves_are_beside_the_papers_task_alone(tmp_path, name, problem, config, known):
    drawing = gem.FIGURES[name]
    study = gem.STUDIES[drawing.folder].name
    write_study(
        tmp_path, study, [({"workers": 5, "learning_rate": 0.05}, "gem", {})], problem, **config
    )
    figure = drawing.draw(read(tmp_path, study))
    told, grey = published_in(figure)
    assert bool(told) == bool(grey) == known


@pytest.mark.parametrize("rates", [None, "halving"])
def test_methods_without_a_number_for_a_rate_are_drawn(tmp_path, rates):
    for study in ("energy", "generalization"):
        write_study(tmp_path / study, study, [({"workers": n}, "mine", {}) for n in (1, 2)])
        table = pd.read_csv(tmp_path / study / "summary.csv").drop(columns="method.learning_rate")
        if rates is not None:
            table["method.learning_rate"] = rates
        table.to_csv(tmp_path / study / "summary.csv", index=False)
    for name in ("5", "energy"):
        folder = gem.FIGURES[name].folder
        figure = gem.FIGURES[name].draw(read(tmp_path / folder, folder))
        assert any(axes.lines for axes in figure.axes) and "\u03b7" not in figure.get_suptitle()


def test_missing_results_are_named_with_their_study_and_cost_and_the_others_drawn(
    results, tmp_path, capsys
):
    shutil.copytree(results / "policies", tmp_path / "policies")
    assert command.main(["gem", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert told.out.split() == [str(tmp_path / "out" / f"queue.{kind}") for kind in ("png", "pdf")]
    (line,) = [
        line for line in told.err.splitlines() if line.startswith("missing: 1a, 1b, 1c, 1d, 3: ")
    ]
    assert (
        "asyncsim study stability --scale small|paper --out RESULTS/stability" in line
        and "min" in line
    )
    assert all(any(name in line.split(":")[1] for line in told.err.splitlines()) for name in PAPER)


def test_a_study_that_was_interrupted_draws_what_it_can(tmp_path, capsys):
    folder = write_study(
        tmp_path, "stability", [({"workers": 2, "learning_rate": 0.05}, "gem", {})]
    )
    drawn = {path.stem for path in gem.draw_study("stability", folder)}
    assert drawn == {"1a", "1d", "3"}
    assert "1b: folder = " in (told := capsys.readouterr().err) and "method = downpour" in told


@pytest.mark.parametrize("name", ["1a", "8a", "9"])
def test_results_that_lack_a_column_or_a_diagnostic_are_an_input_error(tmp_path, name):
    drawing = gem.FIGURES[name]
    write_study(tmp_path, drawing.folder, [({"workers": 2}, "downpour", {})])
    with pytest.raises(InputError):
        drawing.draw(read(tmp_path, drawing.folder))


def test_a_summary_that_was_damaged_is_told_and_the_others_drawn(results, tmp_path, capsys):
    shutil.copytree(results / "policies", tmp_path / "policies")
    write_study(tmp_path / "generalization", "generalization", [({"workers": 2}, "gem", {})])
    (tmp_path / "generalization" / "summary.csv").write_text("junk\n")
    asked = ["--only", "5,queue", "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command.main(["gem", *asked]) == 0
    assert "5: folder = " in (told := capsys.readouterr().err) and "summary.csv lacks seed" in told


# Deviations


def test_published_means_are_over_the_steps_of_a_bin_with_straight_parts_put_back():
    points = published.series("1a", "gem n=20")
    steps = points["x"].round()
    assert published.binned("1a", "gem n=20")[1] == pytest.approx(
        points["y"][(steps > 20) & (steps <= 40)].mean()
    )
    # 20 workers of DOWNPOUR: no points at 20, 25, 30 and 40, so a line from (15, 2.306) to (35,
    # 2.301).
    found = published.binned("1b", "downpour n=20")[0]
    assert found == pytest.approx((2.302 + 2.181 + 2.306 + (2.306 + (2.301 - 2.306) / 4)) / 4)
    assert published.binned("1a", "gem n=7").empty


def test_the_deviation_is_the_root_mean_square_of_the_logarithms():
    nan = np.full(4, np.nan)
    curve = Curve(nan, nan, np.array([1.0, 10.0, 5.0, np.nan]), nan, nan, [])
    theirs = pd.Series([10.0, 1.0, 5.0, 5.0, 7.0])
    assert published.log_deviation(curve, theirs) == pytest.approx(np.sqrt((1 + 1 + 0) / 3))
    assert np.isnan(published.log_deviation(curve, pd.Series(dtype=float)))


def beside(folder, study, cells, table, change, **config):
    """Write results of MNIST in name, whose tables were changed."""
    write_study(folder, study, cells, "mnist", **config)
    for path in (folder / "runs").glob(f"*/*/{table}.parquet"):
        rewrite(path, change(pd.read_parquet(path)))
    return read(folder, study)


def losses_of(figure, series, workers):
    """Set the losses to the published means times 1.1, for as many steps as they go."""
    theirs = published.binned(figure, series)

    def change(commits):
        loss = theirs.reindex(commits["commit"] // (20 * workers)).to_numpy()
        return commits.assign(loss=1.1 * loss)

    return change


@pytest.mark.full
def test_deviations_of_the_papers_task_are_written(tmp_path, capsys):
    """They are printed, and stay in the table where a figure is not drawn again."""
    rates = (0.01, 0.05)
    cells = [({"workers": 5, "learning_rate": rate}, "gem", {"steps": 60}) for rate in rates]
    beside(tmp_path / "stability", "stability", cells, "commits", losses_of("1a", "gem n=5", 5))
    (file,) = [path for path in gem.draw(tmp_path, only=["1a", "3"]) if path.suffix == ".csv"]
    table = pd.read_csv(file, dtype={"figure": str}).set_index(["figure", "setting"])
    losses = table.loc["1a"]
    assert losses["deviation"].tolist() == pytest.approx([np.log10(1.1)] * 2, rel=1e-6)
    assert tuple(losses.loc["learning_rate=0.05", ["bar", "within"]]) == (0.08, "yes")
    assert np.isnan(losses.loc["learning_rate=0.01", "bar"])
    factor = table.loc[("3", "learning_rate=0.05")]
    # Recorded at every worker step: those of the last tenth are the steps from 54 on.
    ours = np.mean([1.8 / 2 * (1 - np.exp(-(step + 0.2) / 30)) for step in range(54, 60)])
    theirs = published.series("3", "gem n=5").query("x > 844.2")["y"].mean()
    gap = abs(ours - theirs)
    assert factor[["ours", "published", "deviation", "relative", "bar"]].tolist() == pytest.approx(
        [ours, theirs, gap, gap / theirs, max(0.03, 0.25 * theirs)]
    )
    whole, _ = file.read_bytes(), capsys.readouterr()
    gem.draw(tmp_path, only=["1a"])
    assert file.read_bytes() == whole
    printed = capsys.readouterr().out
    assert "log10 RMS" in printed and "gem n=5" in printed and "median pi" not in printed


def test_digits_have_no_deviations(results, tmp_path):
    gem.draw(results, tmp_path, ["1a"])
    assert not (tmp_path / "deviations.csv").exists()


def test_published_points_stand_in_the_middle_of_their_bins(monkeypatch):
    panels = importlib.import_module(f"{gem.__name__}.panels")
    monkeypatch.setattr(panels, "is_paper", lambda results: True)
    curves = {20: Curve(*np.full((5, 1), 50.0), [])}
    points = panels.published_curves(None, "1a", "gem n={:g}", curves)[20]
    assert points.index.tolist() == [10, 30, 50, 70]


@pytest.mark.parametrize(
    ("figure", "series", "values"),
    [
        ("1a", "gem n=5", {"workers": 5, "learning_rate": 0.05}),
        ("8a", "gem kappa=3", {"workers": 5, "method.kappa": 3.0}),
        ("6b", "downpour n=5", {"workers": 5, "learning_rate": 0.1}),
    ],
)
def test_losses_are_beside_the_published_ones(tmp_path, figure, series, values):
    drawing, cells = gem.FIGURES[figure], [(values, series.split()[0], {"steps": 60})]
    change = losses_of(figure, series, values["workers"])
    results = beside(tmp_path, drawing.folder, cells, "commits", change)
    (row,) = drawing.measure(results)
    assert row.series == series and row.deviation == pytest.approx(np.log10(1.1))
    words, grey = published_in(drawing.draw(results))
    assert words and grey


def test_figure_4_has_our_times_stretched_to_the_published_ones(tmp_path):
    theirs = published.series("4", "gem n=2 b=128")

    def change(commits):
        loss = np.interp(2.5 * commits["commit_time"], theirs["x"], theirs["y"])
        return commits.assign(loss=loss)

    cells = [({"workers": 2, "batch_size": 128}, "gem", {"steps": 200, "seconds": 0.1})]
    found = beside(tmp_path, "speedup", cells, "commits", change)
    for row in gem.FIGURES["4"].measure(found):
        assert float(row.setting.partition("=")[2]) == pytest.approx(2.5, rel=0.06)
        assert row.deviation < 0.08  # bins of 8 worker steps smooth the published noise
    figure = gem.FIGURES["4"].draw(found)
    assert published_in(figure)[1] and "ours \u00d7 2." in figure.axes[0].get_xlabel()


def test_figure_5_compares_minibatch_and_test_losses_by_epoch(tmp_path, epochs=20):
    theirs = published.series("5", "momentum_sgd validation")

    def change(evaluations):
        at = evaluations["gradients"]
        return evaluations.assign(test_loss=1.1 * np.interp(at, theirs["x"], theirs["y"]))

    cells = [({"workers": 1}, "sgd", {"steps": epochs})]
    found = beside(tmp_path, "generalization", cells, "evaluations", change, batch_size=60_000)
    rows = {row.series: row for row in gem.FIGURES["5"].measure(found)}
    # At ten evaluations ours is the published value times 1.1, and straight between them.
    evaluated = np.linspace(0, epochs, 11)
    compared = theirs[theirs["x"] <= epochs]
    between = np.interp(compared["x"], evaluated, np.interp(evaluated, *theirs.to_numpy().T))
    expected = np.sqrt(np.mean(np.log10(1.1 * between / compared["y"]) ** 2))
    assert rows["momentum_sgd validation"].deviation == pytest.approx(expected)
    assert rows["momentum_sgd training"].deviation > 0


# The thesis


def test_paths_are_measured_against_straight_lines(tmp_path):
    rows = []
    for window, corners in ((15, [(0, 1), (1, 1)]), (500, [(1, 1), (2, 2)])):
        run = make_run("gem", 2, steps=1)
        run.commits[["position_0", "position_1"]] = corners
        run.save(tmp_path / str(window))
        row = {"method": "agn", "workers": 2, "window": window, "seed": 0, "status": "finished"}
        rows.append({**row, "run_folder": str(window)})
    pd.DataFrame(rows).to_csv(tmp_path / "summary.csv", index=False)
    (tmp_path / "config.json").write_text('{"study": "leaders", "problem": "quadratic"}')
    lines = agn.FIGURES["path"].draw(read(tmp_path, "leaders")).axes[0].lines
    assert [line.get_label().split(": ")[1] for line in lines] == [
        "distance 0.707 of length",
        "distance 1.000 of length",
    ]
    # The directions are orthonormal: they keep lengths.
    assert np.hypot(*np.diff(lines[0].get_xydata(), axis=0).T) == pytest.approx([1, 1])


def test_published_numbers_are_beside_the_thesis_task_alone(tmp_path):
    folder = write_windows(tmp_path / "windows")
    config = json.loads((folder / "config.json").read_text())
    config["problem_config"]["network"] = "cnn"
    (folder / "config.json").write_text(json.dumps(config))
    results = read(folder, "windows")
    figures = {
        name: drawing.draw(results)
        for name, drawing in agn.FIGURES.items()
        if name not in ("times", "path")
    }
    assert all(published_in(figure)[0] == [] for figure in figures.values())
    panels = [*figures["agn"].axes[:-1], figures["efficiency"].axes[0]]
    assert [len(axes.texts) for axes in panels] == [4, 4, 4]
    lines = {
        name: [line for axes in figure.axes for line in axes.lines]
        for name, figure in figures.items()
    }
    assert "white" not in {line.get_markerfacecolor() for line in lines["collapse"]}
    assert "^" not in {line.get_marker() for line in lines["staleness"]}
    message = "its problem, its cluster or its gradients differ from the thesis"
    with pytest.raises(InputError, match=message):
        agn.FIGURES["times"].draw(results)
