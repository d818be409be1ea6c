"""Quantities of the runs against workers, with the published points: DOWNPOUR's collapse, and
training times.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_lines
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

from . import published
from .tables import is_thesis, published_grid, setting

#: Accuracy of a guess among ten classes, and the problems that have ten.
_CHANCE, _OF_TEN_CLASSES = 0.1, ("digits", "mnist", "cifar10")
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
    runs = results.summary
    if "train_accuracy" not in runs or "downpour" not in set(runs["method"]):
        raise InputError(f"folder = {str(results.folder)!r}: no accuracies of downpour")
    looks = look.looks(dict.fromkeys(runs["method"]))
    windows = sorted(runs["window"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.7, len(windows), sharey=True, sharex=True)
    theirs = {
        name: _by_window(published_grid(results, "collapse_accuracy", name)) for name in looks
    }
    for axes, window in zip(panels, windows, strict=True):
        points = {name: lines[window] for name, lines in theirs.items() if window in lines}
        of_window = runs[runs["window"] == window]
        draw_lines(axes, of_window, "workers", "train_accuracy", looks, published=points)
        if results.config.get("problem") in _OF_TEN_CLASSES:
            axes.axhline(_CHANCE, color=look.GREY, linewidth=0.7, linestyle=":", label="chance")
        axes.set_title(f"\u03bb = {window}")
        axes.set_xlabel("workers n")
    layout.ticks_at(panels[0].xaxis, sorted(runs["workers"].unique()))
    panels[0].set_ylim(0, 1.03)
    panels[0].set_ylabel(axis_of("train_accuracy"))
    n = runs["workers"].max()
    most = runs[(runs["workers"] == n) & (runs["window"] == windows[0])]
    reached = [
        f"{accuracy:.1%} with {looks[name].label}"
        for name, accuracy in most.groupby("method", sort=False)["train_accuracy"].mean().items()
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
    if not _matches_thesis(results):
        raise InputError(
            f"folder = {str(results.folder)!r}: its problem, its cluster or its gradients differ "
            "from the thesis"
        )
    runs, theirs = results.summary, published.grid("seconds", "agn")
    seconds = runs.groupby(["workers", "window"])["simulated_seconds"].mean()
    looks = {
        window: look.Look(shade.color, "-", f"\u03bb = {window}")
        for window, shade in look.shades(sorted(runs["window"].unique())).items()
    }
    figure, (axes,) = look.new_figure(look.SINGLE, 2.9)
    off = (seconds / theirs - 1).abs().max()
    figure.set_label(f"Simulated times differ from the published ones by at most {off:.0%}.")
    lines = _by_window(theirs)
    draw_lines(axes, runs, "workers", "simulated_seconds", looks, "window", published=lines)
    layout.whole_ticks(axes.xaxis)
    axes.set_xlabel("workers n")
    axes.set_ylabel("training time (s)")
    axes.set_ylim(0, None)
    layout.finish(figure, f"time of {_GRADIENTS:,} minibatches of MNIST", 3)
    return figure


def _by_window(points: pd.Series) -> dict[Any, pd.Series]:
    """Return published values by workers, for each window."""
    return {window: rows.droplevel("window") for window, rows in points.groupby("window")}


def _matches_thesis(results: Finished) -> bool:
    config = results.config
    batch = config.get("problem_config", {}).get("batch_size", np.inf)
    gradients = (config.get("epochs") or 0) * _EXAMPLES / batch
    is_cluster = all(config.get(name) == value for name, value in _CLUSTER.items())
    return is_thesis(results) and is_cluster and abs(gradients / _GRADIENTS - 1) < 0.01
