"""The figures of the GEM paper from tiny results made by hand: labels, published curves, deviations
and the bytes.
"""

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pytest
from gem_results import write_all, write_study
from matplotlib.text import Text

from asyncsim import InputError, Run
from asyncsim.drawing.curves import Curve
from asyncsim.pages import command
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read

gem = figures_of("gem")
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


def test_nothing_to_draw_and_figures_that_there_are_not_end_with_code_2(tmp_path, capsys):
    assert command.main(["gem", "--results", str(tmp_path), "--only", "8a"]) == 2
    assert "nothing could be drawn" in capsys.readouterr().err
    assert command.main(["gem", "--only", "1a, enrgy"]) == 2
    told = capsys.readouterr().err
    assert "did you mean 'energy'?" in told and "1a, 1b" in told and "queue" in told
    assert not list(tmp_path.iterdir())


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


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """MNIST in name: losses that are the published means of 5 workers times 1.1, for 60 steps."""
    folder = tmp_path_factory.mktemp("paper")
    cells = [({"workers": 5, "learning_rate": rate}, "gem", {"steps": 60}) for rate in (0.01, 0.05)]
    write_study(folder / "stability", "stability", cells, problem="mnist")
    theirs = published.binned("1a", "gem n=5")
    for path in (folder / "stability" / "runs").glob("*/*/commits.parquet"):
        commits = pd.read_parquet(path)
        commits["loss"] = 1.1 * theirs.reindex(commits["commit"] // 100).to_numpy()
        rewrite(path, commits)
    return folder


@pytest.fixture(scope="module")
def deviations(paper):
    """The table beside the figures."""
    (table,) = [path for path in gem.draw(paper, only=["1a", "3"]) if path.suffix == ".csv"]
    return table


@pytest.mark.full
def test_deviations_of_the_papers_task_are_written(deviations):
    assert deviations.name == "deviations.csv"
    table = pd.read_csv(deviations, dtype={"figure": str}).set_index(["figure", "setting"])
    losses = table.loc["1a"]
    assert losses["deviation"].tolist() == pytest.approx([np.log10(1.1)] * 2, rel=1e-6)
    assert (
        losses.loc["learning_rate=0.05", "bar"] == 0.08
        and losses.loc["learning_rate=0.05", "within"] == "yes"
    )
    assert np.isnan(losses.loc["learning_rate=0.01", "bar"])
    factor = table.loc[("3", "learning_rate=0.05")]
    # Recorded at every worker step: those of the last tenth are the steps from 54 on.
    ours = np.mean([1.8 / 2 * (1 - np.exp(-(step + 0.2) / 30)) for step in range(54, 60)])
    theirs = published.series("3", "gem n=5").query("x > 844.2")["y"].mean()
    assert factor["ours"] == pytest.approx(ours) and factor["published"] == pytest.approx(theirs)
    assert factor["deviation"] == pytest.approx(abs(ours - theirs))
    assert factor["relative"] == pytest.approx(abs(ours - theirs) / theirs)
    assert factor["bar"] == pytest.approx(max(0.03, 0.25 * theirs))


@pytest.mark.full
def test_the_table_is_printed_and_keeps_the_figures_that_are_not_drawn_again(
    paper, deviations, capsys
):
    whole = deviations.read_bytes()
    gem.draw(paper, only=["1a"])
    assert deviations.read_bytes() == whole
    printed = capsys.readouterr().out
    assert "log10 RMS" in printed and "gem n=5" in printed and "median pi" not in printed


def test_digits_have_no_deviations(results, tmp_path):
    gem.draw(results, tmp_path, ["1a"])
    assert not (tmp_path / "deviations.csv").exists()


def beside(folder, study, cells, table, change, **config):
    """Write results of MNIST in name, whose tables were changed."""
    write_study(folder, study, cells, "mnist", **config)
    for path in (folder / "runs").glob(f"*/*/{table}.parquet"):
        rewrite(path, change(pd.read_parquet(path)))
    return read(folder, study)


@pytest.mark.parametrize(
    ("figure", "series", "values", "method"),
    [
        ("8a", "gem kappa=3", {"workers": 5, "method.kappa": 3.0}, "gem"),
        ("6b", "downpour n=5", {"workers": 5, "learning_rate": 0.1}, "downpour"),
    ],
)
def test_losses_of_figures_6_and_8_are_beside_the_published_ones(
    tmp_path, figure, series, values, method
):
    theirs, n = published.binned(figure, series), values["workers"]

    def change(commits):
        return commits.assign(loss=1.1 * theirs.reindex(commits["commit"] // (20 * n)).to_numpy())

    drawing = gem.FIGURES[figure]
    cells = [(values, method, {"steps": 60})]
    found = beside(tmp_path, drawing.folder, cells, "commits", change)
    (row,) = drawing.measure(found)
    assert row.series == series and row.deviation == pytest.approx(np.log10(1.1))
    told, grey = published_in(drawing.draw(found))
    assert told and grey


def test_figure_4_has_our_times_stretched_to_the_published_ones(tmp_path):
    theirs = published.series("4", "gem n=2 b=128")

    def change(commits):
        return commits.assign(
            loss=np.interp(2.5 * commits["commit_time"], theirs["x"], theirs["y"])
        )

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
