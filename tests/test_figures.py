"""Figures from ten-row frames made by hand: which closed form is named, what is marked, how axes
and legends are laid out, and the bytes.
"""

import dataclasses
import json
import math
import shlex
import shutil
import warnings

import numpy as np
import pandas as pd
import pytest
from gem_results import make_run, make_trace, write_traced
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from asyncsim import Cluster, InputError, plots, prescribed, simulate, study
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import curve_of, curve_over_seeds, evaluation_curve, loss_axis
from asyncsim.methods import METHODS
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read
from asyncsim.theory import queue_theory, repairman, staleness_theory, think_time

figures = figures_of("staleness")
FIGURES = ("staleness", "energy", "queue")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two seeds; a run that diverges, a user's method, and one on a single worker."""
    shared, alone = (
        [make_trace(Cluster(n, "gamma(1, 0.2)", service=0.1), n, seed) for seed in range(2)]
        for n in (2, 1)
    )
    traces = {"gem": shared, "downpour": shared, "mine": shared, "sgd": alone}
    return write_traced(tmp_path_factory.mktemp("results"), traces, diverged="downpour")


def panel():
    """Return a single panel."""
    _, (axes,) = look.new_figure(look.SINGLE, 2)
    return axes


def texts(artists) -> list[str]:
    return [text.get_text() for text in artists]


def legend(axes) -> str:
    return "\n".join(texts(axes.get_legend().get_texts())).replace("\n", " ")


# Curves


@pytest.mark.parametrize("low", [0.04, 0.0, -1.0])
def test_a_band_down_to_zero_does_not_flatten_a_logarithmic_axis(low):
    """Of two seeds, whose mean is far above it."""
    values = pd.DataFrame([[2.0, 2.0], [2.0, low]])
    curve = curve_over_seeds([0.0, 1.0], [0.0, 1.0], values, [])
    scale, bottom, _ = loss_axis([curve])
    assert scale == "log" and 0 < bottom < (low if low > 0 else curve.mean[1])


def losses(commits: pd.DataFrame) -> np.ndarray:
    return commits["loss"].to_numpy(np.float64)


@pytest.mark.parametrize("loss", [0.0, -1.0, 1.7e308])
def test_losses_are_in_view_whatever_they_are(loss, recwarn):
    run = make_run()
    run.commits["loss"] = loss
    _, low, high = loss_axis([curve_of([run] * 2, losses, "mean", 2)])
    assert low < high and low <= max(loss, 1e-200) and high >= min(loss, 1.0) and not recwarn.list


def test_a_curve_averages_seeds_and_stops_with_the_last_run():
    runs = [make_run(), make_run(diverged_at=6)]
    runs[0].commits["loss"] = 2.0 ** -np.arange(10)
    runs[1].commits["loss"] = np.r_[10.0 ** np.arange(6), np.inf]
    curve = curve_of(runs, losses, "mean", workers=2)
    assert curve.step == pytest.approx((np.arange(10) + 0.5) / 2)
    expected = [(2.0**-k + 10.0**k) / 2 if k < 6 else 2.0**-k for k in range(10)]
    assert curve.mean == pytest.approx(expected)
    assert curve.low == pytest.approx(2.0 ** -np.arange(10)) and curve.high[5] == 10.0**5
    assert curve.ends == [(3.5, 3.5, 10.0**5)]


def test_training_losses_go_as_far_as_each_seed_and_never_back_in_time():
    """Evaluated every two commits, of one and of nine seconds; the means of the times are 0, 10 and
    4 s.
    """
    runs = [make_run(), make_run(diverged_at=4)]
    columns = ["commit", "commit_time", "train_loss"]
    for run, rows in zip(
        runs, ([(0, 0, 4.0), (2, 2, 2.0), (4, 4, 1.0)], [(0, 0, 4.0), (2, 18, 6.0)]), strict=True
    ):
        run.evaluations = pd.DataFrame(rows, columns=columns)
    curve = evaluation_curve(runs)
    assert curve.mean == pytest.approx([4, 4, 1]) and curve.high == pytest.approx([4, 6, 1])
    assert curve.time == pytest.approx([0, 10, 10]) and curve.step == pytest.approx([0, 2, 4])
    assert curve.ends == [(18.0, 2.0, 6.0)]
    computed = evaluation_curve(runs, [[0, 3, 5], [0, 4]])
    assert computed.step == pytest.approx([0, 3.5, 5]) and computed.ends == [(18.0, 4.0, 6.0)]


# Traces


def test_prescribed_and_recorded_traces_are_drawn_without_a_cluster(tmp_path):
    for name, trace in {"prescribed": prescribed(3, 10, 2), "recorded": make_trace(None)}.items():
        folder = write_traced(tmp_path / name, {"gem": [trace]}, diverged="gem")
        for name_of_figure in FIGURES:
            getattr(figures, name_of_figure)(read(folder, "staleness")).draw_without_rendering()
        axes = panel()
        plots.staleness_histogram(axes, trace)
        assert legend(axes).startswith(f"{name}: mean")
    plots.queue_length(panel(), trace)


def test_methods_with_timings_of_their_own_get_a_histogram_each(tmp_path):
    cluster = Cluster(2, "gamma(1, 0.2)")
    other = simulate(dataclasses.replace(cluster, protocol="read_then_write"), 10)
    folder = write_traced(tmp_path, {"downpour": [make_trace(cluster)], "gem": [other]})
    figure = figures.staleness(read(folder, "staleness"))
    assert [axes.get_title().partition(":")[0] for axes in figure.axes] == ["DOWNPOUR", "GEM"]
    rows = figures.queue(read(folder, "staleness")).subfigs
    assert [row.get_suptitle().partition(":")[0] for row in rows] == ["DOWNPOUR", "GEM"]


def test_a_timeline_shows_the_workers_asked_for():
    unlike = simulate(Cluster(50, ["constant(1)"] * 45 + ["constant(3)"] * 5), 200)
    for workers, labels, name in (
        (3, ["0", "24", "49"], "worker (3 of 50)"),  # also the slow ones
        ([49, 0], ["49", "0"], "worker (2 of 50)"),
        ([0, 1], ["0", "1"], "worker (first 2 of 50)"),
    ):
        axes = panel()
        plots.timeline(axes, unlike, workers)
        assert (texts(axes.get_yticklabels()), axes.get_ylabel()) == (labels, name)
    axes = panel()
    plots.timeline(axes, unlike, [49, 0], visits=4)
    (strokes,) = [artist for artist in axes.collections if isinstance(artist, LineCollection)]
    places = [round(float(stroke[:, 1].mean())) for stroke in strokes.get_segments()]
    # The slow one is above: 200 commits take 5 s.
    assert (places.count(0), places.count(1)) == (1, 5)


@pytest.mark.parametrize("workers", [[], [0, 0], [5]])
def test_a_timeline_of_workers_that_are_not_there(workers):
    with pytest.raises(InputError, match="workers"):
        plots.timeline(panel(), simulate(Cluster(5, 1.0), 10), workers)


def drawn(axes, label: str) -> list[tuple[float, float, float]]:
    """Worker, begin and end of each bar."""
    artists = [artist for artist in axes.collections if artist.get_label() == label]
    bars = [path.get_extents() for artist in artists for path in artist.get_paths()]
    return [(round((bar.y0 + bar.y1) / 2, 6), round(bar.x0, 6), round(bar.x1, 6)) for bar in bars]


def test_a_worker_that_is_never_served_waits_to_the_end():
    """Two workers keep the server busy; the third, of the lowest rank, gets no turn."""
    trace, axes = simulate(Cluster(3, 1.0, service=1.0, discipline="lowest_rank"), 30), panel()
    assert not (trace.frame["worker"] == 2).any()
    plots.timeline(axes, trace)
    assert (2, 1.0, 31.0) in drawn(axes, "waits") and (2, 0.0, 1.0) in drawn(axes, "computes")


def test_a_reply_that_travels_is_drawn_and_named():
    trace, axes = simulate(Cluster(1, 1.0, service=0.5, latency=(0.1, 0.25)), 3), panel()
    plots.timeline(axes, trace)
    assert "reply travels" in legend(axes)
    assert drawn(axes, "reply travels") == [(0, 1.6, 1.85), (0, 3.45, 3.7)]
    assert drawn(axes, "computes") == [(0, 0, 1), (0, 1.85, 2.85), (0, 3.7, 4.7)]
    assert drawn(axes, "sends") == [(0, 1, 1.1), (0, 2.85, 2.95), (0, 4.7, 4.8)]


# Folders


def test_a_figure_that_cannot_be_written(tmp_path):
    figure, _ = look.new_figure(1, 1)
    (tmp_path / "figure.pdf").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        look.save(figure, tmp_path / "figure")
    assert not list(tmp_path.glob(".*"))


def test_a_panel_that_is_in_no_figure(results, command):
    code, _, err = command("figures", str(results), "--panel", "los")
    assert code == 2 and "panel = 'los': in no figure; choose from" in err


def test_the_folder_of_another_study_is_refused(results, tmp_path):
    folder = shutil.copytree(results, tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps({"study": "compare"}))
    before = sorted(folder.iterdir())
    message = "holds the study compare, not real; make some with: asyncsim study"
    with pytest.raises(InputError, match=message):
        figures_of("real").draw(folder)
    assert sorted(folder.iterdir()) == before


def test_the_command_of_ringmaster_lmo_makes_its_runs():
    paper = figures_of("ringmaster_lmo")
    _, config = study.configure("compare", shlex.split(paper.PAPER.studies["lmo"].options))
    assert len(config.at().make_methods()) == 10 and config.tune == paper.RATES


# Looks


@pytest.mark.parametrize(
    "names",
    [
        [*METHODS, "my_own_method", "another", "third", "fourth"],
        ["gem", "gem(pi_max=2)", "gem(kappa=2)"],
        ["my_own_method", "dana_zero", "lsgd", "easgd"],
        ["qsgd", "downpour", "mem_sgd", "gem", "hogwild"],
        ["gem", "my_own_method", "downpour"],
    ],
)
def test_looks_are_stable_and_distinct(names):
    looks = look.looks(names)
    assert list(looks) == names and looks == look.looks(names)
    every = looks.values()
    assert len({(line.color, str(line.line), line.width) for line in every}) == len(names)
    # The colours of a few differ, and those of known methods are theirs.
    assert len({line.color for line in every}) == len(names) or len(names) > 5
    assert len({line.label for line in every}) == len(names)
    if "my_own_method" in names:  # the most prominent, and called as in tables
        mine = looks["my_own_method"]
        assert (mine.label, mine.width) == ("my_own_method", max(line.width for line in every))
    else:
        assert looks["gem"] == look.METHOD_LOOKS["gem"]


@pytest.mark.parametrize("color", [*look._PALETTE, look.PHASES["returning"]])
def test_words_in_colour_are_readable_on_white(color):
    rgb = look.ink(color)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)  # of sRGB
    assert 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) >= 4.49


def test_a_panel_of_a_paper_has_no_title_and_the_figure_with_crosses_an_entry():
    with look.style(), plots.appearance(3.3):
        figure, panels = look.new_figure(look.DOUBLE, 2.7, 2, sharey=True)
        for axes, name in zip(panels, ("4 workers", "8 workers"), strict=True):
            axes.plot([0, 1, 2], [3, 1, 1.5], label=name)
            axes.plot(1, 2, **layout.DIVERGED)
            axes.set_ylabel("training loss")
            layout.panel_title(axes, name)
        layout.finish(figure, "curves by workers")
        (below,) = figure.legends
        assert texts(below.get_texts()) == ["4 workers", "8 workers", "diverged"]
        assert layout.alone(figure, "accuracy") and len(figure.axes) == 2
        assert layout.alone(figure, "8 WORKERS") == []
    assert figure.axes == panels[1:] and figure.get_suptitle() == "" == panels[1].get_title()
    assert figure.get_figheight() <= 2.6 and figure.get_figwidth() == 3.3
    # The curve is labelled at its end.
    assert texts(figure.legends[0].get_texts()) == ["diverged"]
    assert texts(panels[1].texts) == ["8 workers"]


# Theory


CASES = {
    "geometric law: mean 4, std": Cluster(5, "exponential(1)"),
    "geometric law: mean 5, std": Cluster(5, "exponential(1)", protocol="read_then_write"),
    "geometric law of each worker: mean 1": Cluster(2, ["exponential(1)", "exponential(3)"]),
    "round robin: mean 4, std 0": Cluster(5, 1.0, service=0.1),
    "renewal theory: std": Cluster(5, "gamma(1, 0.5)"),
    "renewal theory, no queue: std": Cluster(5, "exponential(1)", service=0.01),
    "long-run conserved mean: n \u2212 1 = 4": Cluster(5, "gamma(1, 0.5)", latency=0.2),
    "conserved mean: n = 5": Cluster(5, "gamma(1, 0.5)", latency=0.2, protocol="read_then_write"),
    "bounds of the mean: 0 to 4": Cluster(
        5, "exponential(1)", latency=0.2, protocol="write_then_read"
    ),
    "bounds of the mean: 5 to 9": Cluster(
        5, "exponential(1)", protocol="read_then_write", exclusive=False
    ),
}


@pytest.mark.parametrize("law", CASES)
def test_the_histogram_names_the_law_that_holds(law):
    axes = panel()
    plots.staleness_histogram(axes, simulate(CASES[law], 50))
    assert law in legend(axes)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(5, "gamma(1, 0.5)", service=0.5),  # saturated: the queue decides the spread
        Cluster(5, "gamma(1, 0.01)"),  # fifty commits do not bring the workers out of step
        Cluster(5, "empirical([1, 2])"),  # nor does a law on a lattice
        Cluster(5, "uniform(0, 1)", window=2),  # sums without a closed form
        Cluster(5, 1.0, service=0.5, discipline="random"),
        Cluster(2, ["gamma(1, 0.5)", "gamma(2, 0.5)"]),
    ],
)
def test_no_spread_is_stated_where_none_is_known(cluster):
    theory = staleness_theory(cluster, computations=10)
    assert theory.law == "" and theory.std is None and theory.mean == cluster.workers - 1


@pytest.mark.parametrize(
    "cluster", [CASES[name] for name in CASES if "law" in name or "renewal theory:" in name]
)
def test_stated_mean_and_spread_are_those_of_a_long_trace(cluster):
    """Within 4 sigma / sqrt(N), ``N`` less 20 to allow for correlation (measured: below 5 for these
    clusters).
    """
    trace = simulate(cluster, 10_000)
    theory = staleness_theory(cluster, len(trace) / cluster.workers)
    measured = trace.frame["staleness"].to_numpy()[1000:]
    tolerance = 4 * math.sqrt(20 / len(measured))
    assert abs(measured.mean() - theory.mean) < tolerance * theory.std
    assert measured.std() == pytest.approx(theory.std, rel=tolerance)
    if theory.probability is not None:
        k = np.arange(10_000)
        moments = [theory.probability(k) @ k**power for power in (0, 1, 2)]
        mean, variance = theory.mean, theory.std**2
        assert moments == pytest.approx([1, mean, variance + mean**2])
        assert theory.probability(np.array([-1])) == 0


def test_the_queue_names_its_theory():
    memoryless = Cluster(5, "gamma(1, 0.5)", service="exponential(0.3)", latency=0.1)
    assert think_time(memoryless) == pytest.approx(1.2)
    assert queue_theory(memoryless) == ("machine repairman", *repairman(5, 1.2, 0.3)[1::2], True)
    constant = queue_theory(Cluster(5, 1.0, service=0.5))
    assert constant == ("saturation bound", pytest.approx(3), 1, False)
    assert queue_theory(Cluster(5, 1.0)) is None


def test_the_queue_of_a_long_trace_is_drawn_as_means():
    trace = simulate(Cluster(20, "exponential(1)", service="exponential(0.05)"), 1000)
    steps, axes = trace.queue(), panel()
    plots.queue_length(axes, trace)
    (curve, _) = axes.lines
    assert f"most {steps['in_system'].max()}" in curve.get_label()
    area = steps["in_system"].to_numpy()[:-1] @ np.diff(steps["time"])
    assert curve.get_ydata().mean() * steps["time"].iloc[-1] == pytest.approx(area)


# Words


@pytest.mark.parametrize(
    ("ends", "at_ends"),
    [((10, 10), ["first", "second"]), ((10, 5), []), ((10, 10, 10, 10), [])],
)
def test_curves_are_labelled_at_their_ends_if_there_is_room(ends, at_ends):
    """Not if a curve ends early, nor if four end at one height, which would move the labels far."""
    figure, (axes,) = look.new_figure(look.SINGLE, 2)
    for end, name in zip(ends, ("first", "second", "third", "fourth"), strict=False):
        axes.plot([0, end], [0, 1], label=name)
    axes.axhline(0.5, label="target")
    axes.set(xlim=(0, 10), ylim=(0, 1.1))
    layout.legend_below(figure, *axes.get_legend_handles_labels(), 3)
    assert texts(axes.texts) == at_ends
    labels = [line.get_label() for line in axes.lines]
    assert texts(figure.legends[0].get_texts()) == [
        label for label in labels if label not in at_ends
    ]
    heights = [text.xy[1] for text in axes.texts]
    assert not at_ends or 0.05 < heights[1] - heights[0] < 0.2


GEM, SGD = (0.1, 0.09, 0.11), (0.23, 0.2, 0.26)


@pytest.mark.parametrize(
    ("ranges", "rising", "finding"),
    [
        (
            dict(gem=GEM, sgd=SGD, dana=(1, 0.9, 1.1)),
            False,
            "With 20 workers the loss is lowest for gem (0.100 nats), then sgd (0.230 nats, 2.3 "
            "times as high), and highest for dana (1.00 nats).",
        ),
        (
            dict(gem=(0.1, 0.09, 0.21), sgd=SGD),
            True,
            "With 20 workers the loss is highest for sgd (0.230 nats), then gem (0.100 nats; their "
            "ranges overlap).",
        ),
        (
            dict(gem=GEM, sgd=(np.inf, 0.2, np.inf)),
            False,
            "With 20 workers the loss is lowest for gem (0.100 nats); sgd diverged in some seed.",
        ),
        (dict(gem=(0.1, 0.1, 0.1), sgd=(0.2, 0.2, 0.2)), False, ""),  # one seed
        (dict(gem=GEM), False, ""),
        ({}, False, ""),
    ],
)
def test_a_finding_names_the_best_and_how_far_the_next_one_is(ranges, rising, finding):
    columns = ["mean", "min", "max"]
    table = pd.DataFrame.from_dict(ranges, "index", columns=columns, dtype=float)
    assert findings.best(table, "loss (nats)", "with 20 workers", rising) == finding


def test_captions_state_findings_or_describe(tmp_path):
    runs = {name: [make_run(noise=0), make_run(noise=0)] for name in "ab"}
    runs["b"][1].commits["loss"] *= 2
    curves = {name: curve_of(runs[name], losses, "mean", 2) for name in runs}
    figure, _ = look.new_figure(3, 2)
    figure.set_label(findings.end(curves, {"a": "A", "b": "B"}, "loss"))
    with look.collecting(files=False) as collected:
        look.save(figure, tmp_path / "loss")
        figure.set_label("")
        look.save(figure, tmp_path / "loss", figures.energy)
    finding, description = (caption for _, _, caption in collected)
    assert finding.startswith("The loss at the end is lowest for A (")
    assert finding.endswith("; their ranges overlap).") and "energy to the proxy" in description


# Layout


@pytest.mark.parametrize("width, columns", [(None, 2), (6.0, 2), (3.3, 1)])
def test_panels_of_a_narrow_figure_are_below_each_other(width, columns):
    with plots.appearance(width=width):
        figure, axes = look.new_figure(7, 2, 2, width_ratios=(1, 2))
        places = [panel.get_subplotspec().get_position(figure) for panel in axes]
        grid_figure, grid = look.new_grid(3, 2)
    assert len(axes) == 2 and len({place.x0 for place in places}) == columns
    assert figure.get_figheight() == 2 * (3 - columns)
    assert len(grid) == len(grid_figure.axes) == 3


def test_logarithms_have_no_exponents(tmp_path):
    figure, (axes,) = look.new_figure(look.SINGLE, 2)
    axes.plot(range(6), [1.0, 1e37, 1e37, 10.0, 0.0, np.inf])
    axes.set(yscale="log", ylim=(1e-4, 1e4))
    look.save(figure, tmp_path / "figure")
    assert {"0.01", "100"} <= {*texts(axes.get_yticklabels())}


def test_all_files_of_a_figure_have_one_layout(tmp_path, monkeypatch):
    figure, (axes,) = look.new_figure(look.SINGLE, 2)
    axes.set(xlabel="staleness (versions); 2 of 2,360 commits beyond", ylabel="share of commits")
    places, render = [], look._rendered

    def record(figure, kind):
        content = render(figure, kind)
        places.append(axes.get_position().bounds)
        return content

    monkeypatch.setattr(look, "_rendered", record)
    with look.collecting():
        look.save(figure, tmp_path / "figure")
    assert len(places) == 3 and len(set(places)) == 1


@pytest.mark.parametrize("values", [[np.nan, np.nan], [-1.0, -2.0]])
def test_logarithmic_axes_without_a_value_above_zero_are_drawn(tmp_path, values):
    figure, (axes,) = look.new_figure(look.SINGLE, 2.0, 1)
    axes.loglog(values, values)
    assert all(path.stat().st_size for path in look.save(figure, tmp_path / "empty"))
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")


def test_names_that_are_no_mathematics_are_drawn_as_they_are(tmp_path):
    def image(kind, name):
        figure = kind(figsize=(2, 1))
        axes = figure.subplots()
        axes.bar(["gem", name], [1, 1e4], label=name)
        axes.set(title=name, yscale="log")
        axes.legend()
        figure.savefig(tmp_path / "figure.png")
        return (tmp_path / "figure.png").read_bytes()

    with pytest.raises(ValueError, match="Parse"):
        image(Figure, "x$_$y")
    assert image(look.LiteralFigure, "x$_$y") != image(look.LiteralFigure, "gem2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        image(look.LiteralFigure, "gem\x1b[31m")
    assert [str(w.message) for w in caught if not str(w.message).isprintable()] == []
    # All else is drawn as before.
    assert image(look.LiteralFigure, "$\\alpha$") == image(Figure, "$\\alpha$")
