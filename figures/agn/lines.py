"""Columns of the study's table against workers or windows, with the published points: DOWNPOUR's
collapse, and training times.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished

from . import published
from .tables import is_thesis, published_grid, setting

#: Accuracy of a guess among ten classes (%), and the problems that have ten.
_CHANCE, _OF_TEN_CLASSES = 10.0, ("digits", "mnist", "cifar10")
#: Published points.
_HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markersize": 5}
#: Minibatches of a run in the thesis, the cluster that fits its times (the study's with --scale
#: paper), and examples of MNIST.
_GRADIENTS = 18_750
_CLUSTER = {
    "compute": "gamma(mean=0.44, cv=0.2)",
    "service": "constant(0.2)",
    "protocol": "write_then_read",
}
_EXAMPLES = 60_000


def collapse(results: Finished) -> Figure:
    """Draw the final training accuracy against the workers, a panel for each window."""
    table = results.table("grid.csv")
    if "train_accuracy" not in table or "downpour" not in set(table["method"]):
        raise InputError(f"folder = {str(results.folder)!r}: no accuracies of downpour")
    table = table.assign(percent=100 * table["train_accuracy"])
    looks = look.looks(dict.fromkeys(table["method"]))
    theirs = {name: 100 * published_grid(results, "collapse_accuracy", name) for name in looks}
    windows = sorted(table["window"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.7, len(windows), sharey=True, sharex=True)
    for axes, window in zip(panels, windows, strict=True):
        of_window = {
            name: points[points.index.get_level_values("window") == window].droplevel("window")
            for name, points in theirs.items()
        }
        _draw(axes, table[table["window"] == window], ("method", "percent"), looks, of_window)
        if results.config.get("problem") in _OF_TEN_CLASSES:
            axes.axhline(_CHANCE, color=look.GREY, linewidth=0.7, linestyle=":", label="chance")
        axes.set_title(f"\u03bb = {window}")
    layout.ticks_at(panels[0].xaxis, sorted(table["workers"].unique()))
    panels[0].set_ylim(0, 103)
    panels[0].set_ylabel("training accuracy (%)")
    n = table["workers"].max()
    most = table[(table["workers"] == n) & (table["window"] == windows[0])]
    reached = [
        f"{row.train_accuracy:.1%} with {looks[row.method].label}" for row in most.itertuples()
    ]
    figure.set_label(
        f"With {n} workers and a window of {windows[0]}, the training accuracy ends "
        f"at {', '.join(reached)}."
    )
    text = "accuracy at the end with more workers and windows of \u03bb local steps"
    layout.finish(figure, setting(results, text), 6)
    return figure


def times(results: Finished) -> Figure:
    """Draw the training time against the workers, a curve for each window."""
    table = results.table("grid.csv")
    if not _matches_thesis(results):
        raise InputError(
            f"folder = {str(results.folder)!r}: its problem, its cluster or its gradients differ "
            "from the thesis"
        )
    table = table.drop_duplicates(["workers", "window"])
    theirs = published.grid("seconds", "agn")
    off = (table.set_index(["workers", "window"])["seconds"] / theirs - 1).abs().max()
    looks = {
        window: look.Look(shade.color, "-", f"\u03bb = {window}")
        for window, shade in look.shades(sorted(table["window"].unique())).items()
    }
    figure, (axes,) = look.new_figure(look.SINGLE, 2.9)
    figure.set_label(f"Simulated times differ from the published ones by at most {off:.0%}.")
    by_window = {window: points.droplevel("window") for window, points in theirs.groupby("window")}
    _draw(axes, table, ("window", "seconds"), looks, by_window)
    layout.whole_ticks(axes.xaxis)
    axes.set_ylabel("training time (s)")
    axes.set_ylim(0, None)
    layout.finish(figure, f"time of {_GRADIENTS:,} minibatches of MNIST", 3)
    return figure


def _draw(
    axes: Axes,
    table: pd.DataFrame,
    columns: tuple[str, str],
    looks: Mapping[Any, look.Look],
    theirs: Mapping[Any, pd.Series],
) -> None:
    """Draw a column against the workers, and the published points of each line, hollow.

    ``columns``: of the lines, and of the vertical axis.
    """
    by, y = columns
    label: str | None = f"published ({published.SOURCE})"
    for (value, appearance), marker in zip(
        looks.items(), itertools.cycle(look.MARKERS), strict=False
    ):
        rows = table[table[by] == value].sort_values("workers")
        axes.plot(rows["workers"], rows[y], marker=marker, markersize=3.5, **appearance.style)
        points = theirs.get(value)
        if points is not None and len(points):
            hollow = {"color": appearance.color, "marker": marker, **_HOLLOW}
            axes.plot(points.index, points, label=label, zorder=1, **hollow)
            label = None
    axes.set_xlabel("workers n")


def _matches_thesis(results: Finished) -> bool:
    config = results.config
    batch = config.get("problem_config", {}).get("batch_size", np.inf)
    gradients = (config.get("epochs") or 0) * _EXAMPLES / batch
    full_run = config.get("steps") == 0 and abs(gradients / _GRADIENTS - 1) < 0.01
    is_cluster = all(config.get(name) == value for name, value in _CLUSTER.items())
    return is_thesis(results) and full_run and is_cluster
