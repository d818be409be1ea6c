"""Figure 1d: final losses by the number of workers; and the test accuracy of figure 2."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_lines
from asyncsim.drawing.paper import setting
from asyncsim.study.finished import Finished

from . import families, published
from .panels import (
    MOST_LOSS,
    PANEL,
    at_rate,
    curve_row,
    diverged_of,
    finish,
    is_paper,
    log_axis,
    methods_of,
    rate_text,
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
    points = {name: rows.set_index("x")["y"] for name, rows in theirs.items()}
    draw_lines(axes, results.summary, "workers", "final_loss", look.looks(names), published=points)
    counts = sorted(
        {*values_of(results, "workers"), *(n for of in points.values() for n in of.index)}
    )
    if max(counts) > 10 * min(counts):
        axes.set_xscale("log")
    layout.ticks_at(axes.xaxis, sorted(counts))
    axes.set_xlabel("workers n")
    most = results.rows(workers=values_of(results, "workers")[-1])
    labels = most["method"].map(lambda name: look.looks(names)[name].label)
    figure.set_label(best_loss(most.groupby(labels), f"with {most['workers'].iloc[0]} workers"))
    finish(figure, setting(results, "methods by n: loss over the last tenth"), 2)
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
    rows = results.rows(method="gem", workers=100)
    if rows.empty:
        return []
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
    results = results._replace(summary=rows)
    return [
        *families.measure(results, "2"),
        Deviation("2", "gem n=100", rate_text(results), *accuracy, diverged_of(rows)),
    ]


def best_loss(groups: Any, where: str) -> str:
    """State which group of runs ends with the lowest minibatch loss."""
    losses = groups["final_loss"].agg(["mean", "min", "max"])
    failed = [name for name, runs in groups if (runs["status"] == "diverged").any()]
    return findings.best(losses, "final minibatch loss", where, failed=failed)
