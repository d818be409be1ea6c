"""Figures 1d and 2: final losses by the number of workers, and GEM with 100 workers over time."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_ranges
from asyncsim.study.finished import Finished

from . import published
from .panels import (
    MOST_LOSS,
    PANEL,
    PUBLISHED,
    at_rate,
    chosen,
    curve_row,
    diverged_of,
    draw_family,
    finish,
    is_paper,
    log_axis,
    loss,
    methods_of,
    point_text,
    rate_text,
    setting,
    values_of,
    with_all_workers,
)
from .published import Deviation

#: The methods of figure 1.
_METHODS = ("gem", "downpour", "adaptive_staleness")
#: The paper's test accuracy in figure 2, and the lowest accepted one.
ACCURACY, LEAST_ACCURACY = 0.9938, 0.992


def final(results: Finished) -> Figure:
    """Draw the final losses against the number of workers, method by method: figure 1d."""
    results = with_all_workers(at_rate(results))
    figure, (axes,) = look.new_figure(*PANEL)
    names = methods_of(results)
    theirs = {name: published.series("1d", name) for name in names} if is_paper(results) else {}
    values = [results.summary["final_loss"], *(points["y"] for points in theirs.values())]
    log_axis(axes, values, "final minibatch loss", MOST_LOSS)
    published_counts = set[int]()
    for (name, appearance), marker in zip(
        look.looks(names).items(), itertools.cycle(look.MARKERS), strict=False
    ):
        if name in theirs:
            x, y = theirs[name]["x"], theirs[name]["y"]
            published_counts |= set(x.astype(int))
            style = {**PUBLISHED, "linestyle": "none", "marker": marker}
            axes.plot(x, y, markersize=5, markerfacecolor="white", **style)
        rows = chosen(results, method=name).summary
        style = {"marker": marker, "markersize": 3.5, **appearance.style}
        draw_ranges(axes, rows, "workers", "final_loss", **style)
        for n in sorted(rows.loc[rows["status"] == "diverged", "workers"].unique()):
            axes.plot(
                n, axes.get_ylim()[1], color=appearance.color, clip_on=False, **layout.DIVERGED
            )
    counts = sorted({*values_of(results, "workers"), *published_counts})
    if counts[-1] > 10 * counts[0]:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xlabel("workers n")
    most = results.rows(workers=values_of(results, "workers")[-1])
    labels = most["method"].map(lambda name: look.looks(names)[name].label)
    figure.set_label(best_loss(most.groupby(labels), f"with {most['workers'].iloc[0]} workers"))
    finish(figure, setting(results, "methods by n: loss over the last tenth"), 2)
    return figure


def hundred(results: Finished) -> Figure:
    """Draw the loss of GEM with 100 workers against time, scaled to the published duration: figure
    2.
    """
    results = chosen(results, method="gem")
    runs, n = results.runs(), int(results.summary["workers"].iloc[0])
    curve = loss(runs, n)
    theirs = published.binned("2", "gem n=100") if is_paper(results) else pd.Series(dtype=float)
    stretch = (
        published.SECONDS / max(float(run.commits["commit_time"].iloc[-1]) for run in runs)
        if len(theirs)
        else 1
    )
    times = curve._replace(
        time=curve.time * stretch, ends=[(t * stretch, s, y) for t, s, y in curve.ends]
    )
    figure, (axes,) = look.new_figure(look.DOUBLE, 2.6)
    log_axis(axes, [curve, theirs])
    draw_family(axes, {n: times}, "GEM, n = {}".format, against="time")
    figure.set_label(
        f"GEM with {n} workers ends at a minibatch loss of "
        f"{number_text(results.summary['final_loss'].mean())} and a test accuracy of "
        f"{results.summary['test_accuracy'].mean():.2%}."
    )
    reached = f"test accuracy {results.summary['test_accuracy'].mean():.2%}".replace("%", "\u00a0%")
    if len(theirs):
        seconds = (theirs.index + 0.5) * published.BIN_STEPS / published.STEPS * published.SECONDS
        axes.plot(seconds, theirs, label="published, n = 100", **PUBLISHED)
        axes.set_xlim(0, published.SECONDS)
        axes.set_xlabel(f"time (s); ours \u00d7 {stretch:.3g}, so that both runs end together")
        reached += f" (published {100 * ACCURACY:.2f}\u00a0%)"
    finish(figure, setting(results, f"GEM, {counted(n, 'worker')}", point_text(results), reached))
    return figure


def measure_final(results: Finished) -> list[Deviation]:
    """Compute the deviations of the final losses from figure 1d, at the paper's learning rate."""
    results = at_rate(results)
    deviations = []
    for method in _METHODS:
        rows = results.rows(method=method)
        ours = rows.groupby("workers")["final_loss"].mean()
        points = published.series("1d", method)
        theirs = points["y"].set_axis(points["x"].round().astype(int))
        off = np.log10(ours / theirs.reindex(ours.index)).dropna()
        deviation = float(np.sqrt((off**2).mean()))
        deviations.append(curve_row("1d", method, rate_text(results), deviation, np.nan, rows))
    return deviations


def measure_hundred(results: Finished) -> list[Deviation]:
    """Compute the deviations of the loss with 100 workers from figure 2, and of the test
    accuracy.
    """
    results = results._replace(summary=results.rows(method="gem", workers=100))
    if results.summary.empty:
        return []
    rows, name, rate = results.summary, "gem n=100", rate_text(results)
    curve = loss(results.runs(), int(rows["workers"].iloc[0]), published.BIN_STEPS)
    deviation = published.log_deviation(curve, published.binned("2", name))
    reached = float(rows["test_accuracy"].mean())
    short = ACCURACY - reached
    accuracy = (
        "test accuracy, short of",
        reached,
        ACCURACY,
        short,
        short / ACCURACY,
        ACCURACY - LEAST_ACCURACY,
    )
    return [
        curve_row("2", name, rate, deviation, np.nan, rows),
        Deviation("2", name, rate, *accuracy, diverged_of(rows)),
    ]


def best_loss(groups: Any, where: str) -> str:
    """State which group of runs ends with the lowest minibatch loss."""
    losses = groups["final_loss"].agg(["mean", "min", "max"])
    failed = [name for name, runs in groups if (runs["status"] == "diverged").any()]
    return findings.best(losses, "final minibatch loss", where, failed=failed)
