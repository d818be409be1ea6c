"""Figures 1, 2 and 3: losses for several numbers of workers, method by method, and GEM's median
factor.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import Curve, draw_band, trace_length
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import FINAL_SHARE

from . import published
from .panels import (
    MOST_LOSS,
    PANEL,
    at_rate,
    chosen,
    diverged_of,
    draw_family,
    family,
    finding,
    finish,
    is_paper,
    log_axis,
    loss,
    median_pi,
    methods_of,
    point_text,
    published_curves,
    published_handles,
    rate_of,
    rates,
    setting,
    values_of,
    with_all_workers,
)
from .published import Deviation

#: The panels of figure 1 by their methods.
METHODS = {"1a": "gem", "1b": "downpour", "1c": "adaptive_staleness"}
#: Largest accepted deviation of a curve of figure 1a, and of a final median factor (absolute,
#: relative).
BAR, PI_BAR, PI_RELATIVE = 0.08, 0.03, 0.25
#: The paper's test accuracy in figure 2, and the lowest accepted one.
ACCURACY, LEAST_ACCURACY = 0.9938, 0.992


def of_workers(results: Finished, panel: str) -> Figure:
    """Draw the losses of one method for each number of workers: figure 1a, b or c."""
    method = METHODS[panel]
    results = at_rate(chosen(results, method=method))
    figure, (axes,) = look.new_figure(*PANEL)
    appearance = look.METHOD_LOOKS[method]
    curves = _loss_panel(axes, results, method, appearance)
    figure.set_label(finding(curves))
    text = setting(results, f"{appearance.label} with n workers", _points(results))
    finish(figure, axes, text, published_handles(figure, axes))
    return figure


def of_workers_at_all_rates(results: Finished) -> Figure:
    """Draw figures 1a to c for all methods and learning rates: a row for each rate, a column for
    each method.
    """
    results = with_all_workers(results)
    looks = look.looks(methods_of(results))
    all_rates = rates(results)
    if not all_rates:
        raise InputError(f"folder = {str(results.folder)!r}: no learning rates")
    size = (look.DOUBLE, 2.2 * len(all_rates) + 0.7)
    figure, all_axes = look.new_figure(*size, len(looks), len(all_rates), sharex=True, sharey=True)
    for row, rate in enumerate(all_rates):
        for column, (method, appearance) in enumerate(looks.items()):
            axes = all_axes[row * len(looks) + column]
            selection = at_rate(results._replace(summary=results.rows(method=method)), rate)
            if len(selection.summary):
                _loss_panel(axes, selection, method, appearance)
            else:  # a study that was interrupted
                layout.say_inside(axes, "not run")
            axes.set_title(f"{appearance.label}, \u03b7 = {rate:g}")
            axes.label_outer()
    # Shared limits that show all curves.
    limits = [line.get_ydata() for axes in all_axes for line in axes.lines]
    drawn = next(axes for axes in all_axes if axes.lines)
    log_axis(drawn, limits, limit=MOST_LOSS)
    most = results.rows(workers=values_of(results, "workers")[-1])
    names = most["method"].map(lambda name: looks[name].label) + " at \u03b7 = "
    groups = most.groupby(names + rate_of(most).map("{:g}".format))
    figure.set_label(best_loss(groups, f"with {most['workers'].iloc[0]} workers"))
    text = setting(results, "losses with n workers", _points(results))
    finish(figure, drawn, text, published_handles(figure, drawn))
    return figure


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
            axes.plot(
                x, y, marker, color="#999999", markersize=5, markerfacecolor="white", zorder=1
            )
        rows = chosen(results, method=name).summary
        losses = rows.groupby("workers")["final_loss"].agg(["mean", "min", "max"])
        draw_band(
            axes,
            losses,
            appearance.color,
            linestyle=appearance.line,
            marker=marker,
            markersize=3.5,
            label=appearance.label,
        )
        for n in sorted(rows.loc[rows["status"] == "diverged", "workers"].unique()):
            axes.plot(
                n, axes.get_ylim()[1], "x", color=appearance.color, markersize=5, clip_on=False
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
    handles = [_hollow_handle(axes)] if published_counts else []
    finish(
        figure, axes, setting(results, "methods by n: loss over the last tenth"), handles, columns=2
    )
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
    handles = []
    if len(theirs):
        seconds = (theirs.index + 0.5) * published.BIN_STEPS / published.STEPS * published.SECONDS
        style: dict[str, Any] = {"color": "#999999", "linewidth": 0.7, "zorder": 1}
        handles = axes.plot(seconds, theirs, label="published, n = 100", **style)
        axes.set_xlim(0, published.SECONDS)
        axes.set_xlabel(f"time (s); ours \u00d7 {stretch:.3g}, so that both runs end together")
        reached += f" (published {100 * ACCURACY:.2f}\u00a0%)"
    finish(
        figure,
        axes,
        setting(results, f"GEM, {counted(n, 'worker')}", _points(results), reached),
        handles,
    )
    return figure


def factors(results: Finished) -> Figure:
    """Draw GEM's median factor for each number of workers: figure 3."""
    results = at_rate(chosen(results, method="gem"))
    figure, (axes,) = look.new_figure(*PANEL)
    curves = family(results, "workers", median_pi)
    axes.set_ylim(0, 1.1 * max(1.0, *(_highest(curve) for curve in curves.values())))
    draw_family(axes, curves, theirs=published_curves(results, "3", "gem n={:g}", curves))
    axes.set_ylabel("median \u03c0 over the weights")
    figure.set_label(finding(curves, quantity="median \u03c0"))
    text = setting(results, "GEM's factor \u03c0 with n workers", _points(results))
    finish(figure, axes, text, published_handles(figure, axes))
    return figure


def measure_of_workers(results: Finished, panel: str) -> list[Deviation]:
    """Compute the deviations of one method's losses from figure 1a, b or c, at every learning
    rate.
    """
    deviations: list[Deviation] = []
    method = METHODS[panel]
    results = chosen(results, method=method)
    for rate in rates(results):
        bar = BAR if panel == "1a" and rate == rates(at_rate(results))[0] else np.nan
        deviations += curve_deviations(
            at_rate(results, rate), panel, f"{method} n={{:g}}", "workers", bar
        )
    return deviations


def curve_deviations(
    results: Finished, figure: str, series: str, column: str, bar: float = np.nan
) -> list[Deviation]:
    """Compute the deviations of the losses from a figure's curves, for each value of a column.

    ``series``: as in `published_curves`.
    """
    deviations = []
    for value, curve in family(results, column, _paper_loss).items():
        theirs = published.binned(figure, series.format(value))
        if len(theirs):
            rows = chosen(results, **{column: value}).summary
            deviation = published.log_deviation(curve, theirs)
            deviations.append(
                curve_row(figure, series.format(value), _rate_text(results), deviation, bar, rows)
            )
    return deviations


def measure_final(results: Finished) -> list[Deviation]:
    """Compute the deviations of the final losses from figure 1d, at the paper's learning rate."""
    results = at_rate(results)
    deviations = []
    for method in METHODS.values():
        rows = results.rows(method=method)
        ours = rows.groupby("workers")["final_loss"].mean()
        points = published.series("1d", method)
        theirs = points["y"].set_axis(points["x"].round().astype(int))
        off = np.log10(ours / theirs.reindex(ours.index)).dropna()
        deviation = float(np.sqrt((off**2).mean()))
        deviations.append(curve_row("1d", method, _rate_text(results), deviation, np.nan, rows))
    return deviations


def measure_hundred(results: Finished) -> list[Deviation]:
    """Compute the deviations of the loss with 100 workers from figure 2, and of the test
    accuracy.
    """
    results = results._replace(summary=results.rows(method="gem", workers=100))
    if results.summary.empty:
        return []
    rows, name, rate = results.summary, "gem n=100", _rate_text(results)
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


def measure_factors(results: Finished) -> list[Deviation]:
    """Compute the deviations of the median factors over the last tenth of the run from figure 3."""
    results = at_rate(chosen(results, method="gem"))
    return factor_deviations(results, "3", "gem n={:g}", "workers", PI_BAR, PI_RELATIVE)


def factor_deviations(
    results: Finished,
    figure: str,
    series: str,
    column: str,
    bar: float = np.nan,
    relative_bar: float = np.nan,
) -> list[Deviation]:
    """Compute the deviations of the median factors in the last tenth, for each value of a column.

    ``bar``, ``relative_bar``: the larger of both, absolute and relative, is the accepted deviation.
    """
    deviations = []
    for value in values_of(results, column):
        rows = chosen(results, **{column: value})
        theirs = published.end_value(figure, series.format(value))
        if np.isnan(theirs):
            continue
        ours = float(np.mean([_end_factor(run) for run in rows.runs()]))
        off = abs(ours - theirs)
        values = ("median pi, last tenth", ours, theirs, off, off / theirs)
        accepted = np.maximum(bar, relative_bar * theirs)
        name, diverged = series.format(value), diverged_of(rows.summary)
        deviations.append(Deviation(figure, name, _rate_text(results), *values, accepted, diverged))
    return deviations


def _rate_text(results: Finished) -> str:
    return f"learning_rate={rates(results)[0]:g}"


def _loss_panel(
    axes: Axes, results: Finished, method: str, appearance: look.Look
) -> dict[int, Curve]:
    curves = family(results, "workers")
    panels = [panel for panel, published_method in METHODS.items() if published_method == method]
    theirs = published_curves(results, panels[0], f"{method} n={{:g}}", curves) if panels else {}
    log_axis(axes, [*curves.values(), *theirs.values()], limit=MOST_LOSS)
    draw_family(axes, curves, line=appearance.line, theirs=theirs)
    return curves


def best_loss(groups: Any, where: str) -> str:
    """State which group of runs ends with the lowest minibatch loss."""
    losses = groups["final_loss"].agg(["mean", "min", "max"])
    failed = [name for name, runs in groups if (runs["status"] == "diverged").any()]
    return findings.best(losses, "final minibatch loss", where, failed=failed)


def _points(results: Finished) -> str:
    first = results.summary.head(1)
    return point_text(results._replace(summary=first).runs(), int(first["own_workers"].iloc[0]))


def _paper_loss(runs: Sequence[Run], workers: int) -> Curve:
    return loss(runs, workers, published.BIN_STEPS)


def _end_factor(run: Run) -> float:
    table = run.diagnostics
    medians = table[
        (table["quantity"] == "pi") & (table["tensor"] == "") & (table["quantile"] == 0.5)
    ]
    return float(
        medians.loc[medians["commit"] >= (1 - FINAL_SHARE) * trace_length([run]), "value"].mean()
    )


def curve_row(
    figure: str, name: str, setting: str, deviation: float, bar: float, rows: pd.DataFrame
) -> Deviation:
    """Return the row of a curve's deviation."""
    nothing = float("nan")
    return Deviation(
        figure,
        name,
        setting,
        "log10 RMS",
        nothing,
        nothing,
        deviation,
        nothing,
        bar,
        diverged_of(rows),
    )


def _hollow_handle(axes: Axes) -> Any:
    style: dict[str, Any] = {
        "color": "#999999",
        "markersize": 5,
        "markerfacecolor": "white",
        "linestyle": "none",
    }
    return axes.plot([], [], marker="o", label="published", **style)[0]


def _highest(curve: Curve) -> float:
    finite = curve.high[np.isfinite(curve.high)]
    return float(finite.max()) if len(finite) else 0.0
