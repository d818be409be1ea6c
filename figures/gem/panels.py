"""Shared parts of the GEM paper's figures: rows of results, families of curves, published curves,
legends.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    Curve,
    axis_along,
    curve_of,
    diagnostic_curve,
    draw_curve,
    log_limits,
    trace_length,
)
from asyncsim.drawing.paper import rate_of
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished

from . import published

#: Size of a panel as wide as a paper's column (inches).
PANEL = (look.SINGLE, 2.9)
#: The words along the axis of losses.
LOSS = "minibatch loss"
#: Losses above this are cut off: they belong to diverging runs.
MOST_LOSS = 6.0
#: The paper's learning rate, unless it says otherwise.
STATED_RATE = 0.05
#: Minimal number of points of a curve; shorter runs have narrower bins than the paper's.
_POINTS = 25
#: Points of a curve between two of its markers.
_MARKED_EVERY = 6
#: Maps runs of one cell and method, and the number of workers of their traces, to a curve.
Quantity = Callable[[Sequence[Run], int], Curve]


def is_paper(results: Finished) -> bool:
    """Return whether the results belong to the paper's task, so that its curves may be drawn beside
    them.
    """
    return published.TASK.is_that_of(results)


def chosen(results: Finished, **values: Any) -> Finished:
    """Select the rows with these values; raise InputError if there are none."""
    missing = [name for name in values if name not in results.summary]
    rows = results.summary.head(0) if missing else results.rows(**values)
    if rows.empty:
        conditions = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise InputError(
            f"folder = {str(results.folder)!r}: no finished run has {conditions or 'anything'}"
        )
    return results._replace(summary=rows)


def methods_of(results: Finished) -> list[str]:
    """Return the methods of the results, in the order of their looks."""
    present = list(dict.fromkeys(results.summary["method"]))
    return [name for name in dict.fromkeys([*look.METHOD_LOOKS, *present]) if name in present]


def with_all_workers(results: Finished) -> Finished:
    """Select the methods that use all workers of their cell, unlike SGD."""
    rows = results.summary[results.summary["own_workers"] == results.summary["workers"]]
    if rows.empty:
        raise InputError(
            f"folder = {str(results.folder)!r}: no finished run has the workers of its cell"
        )
    return results._replace(summary=rows)


def rates(results: Finished) -> list[float]:
    """Return the learning rates of the results, ascending."""
    return sorted(rate_of(results.summary).dropna().unique())


def at_rate(results: Finished, rate: float | None = None) -> Finished:
    """Select the results of one learning rate; by default the paper's, or the largest if that was
    not run.

    If the learning rate is no option of the study's cells, the default selects all results.
    """
    if rate is None and "learning_rate" not in results.summary:
        return results
    all_rates = rates(results)
    selected = rate
    if selected is None:
        selected = STATED_RATE if STATED_RATE in all_rates else max(all_rates, default=STATED_RATE)
    return results._replace(summary=results.summary[rate_of(results.summary) == selected])


def one_cluster(results: Finished) -> Finished:
    """Select the cluster with the most workers: several clusters would not form one curve."""
    return chosen(results, workers=values_of(results, "workers")[-1])


def values_of(results: Finished, column: str) -> list[Any]:
    """Return the values of a column, ascending."""
    if column not in results.summary:
        raise InputError(
            f"folder = {str(results.folder)!r}: its summary.csv has no column {column}"
        )
    return sorted(results.summary[column].unique())


def bin_steps(runs: Sequence[Run], workers: int) -> int:
    """Return the worker steps per point of a curve: the paper's, or fewer in a short run."""
    steps = trace_length(runs) / workers
    if steps >= published.BIN_STEPS * _POINTS:
        return published.BIN_STEPS
    return max(1, round(steps / _POINTS))


def loss(runs: Sequence[Run], workers: int, width: int | None = None) -> Curve:
    """Return the minibatch losses, as means over ``width`` worker steps."""
    return curve_of(
        runs,
        lambda commits: commits["loss"].to_numpy(np.float64),
        "mean",
        workers,
        width or bin_steps(runs, workers),
    )


def median_pi(runs: Sequence[Run], workers: int) -> Curve:
    """Return the median of GEM's factor over all weights, as means over worker steps."""
    curve = diagnostic_curve(runs, "pi", workers, bin_steps(runs, workers))
    if not np.isfinite(curve.mean).any():
        raise InputError("no medians of pi were recorded; run the study with --diagnose-every 5")
    return curve


def family(results: Finished, column: str, quantity: Quantity = loss) -> dict[Any, Curve]:
    """Return a curve for each value of a column."""
    curves = {}
    for value in values_of(results, column):
        rows = chosen(results, **{column: value})
        curves[value] = quantity(rows.runs(), int(rows.summary["own_workers"].iloc[0]))
    return curves


def workers_label(n: int) -> str:
    """Format a number of workers for a legend."""
    return f"n = {n}"


def draw_family(
    axes: Axes,
    curves: Mapping[Any, Curve],
    label: Callable[[Any], str] = workers_label,
    line: Any = "-",
    against: str = "step",
    looks: Mapping[Any, look.Shade] | None = None,
    theirs: Mapping[Any, pd.Series] = types.MappingProxyType({}),
) -> None:
    """Draw mean and range of each curve with shade and marker of its value, and a cross where a run
    diverged; published curves, ``theirs``, are thin and grey with hollow markers.

    ``axes``: with the final limits of its vertical axis: a cross beyond them is drawn at their
    edge. ``curves``, ``theirs``: by value. ``label``: formats a value. ``line``: matplotlib's line
    style of the method. ``against``: {"step", "time"}, the horizontal axis. ``looks``: by value; by
    default shades.
    """
    looks = looks or look.shades(curves)
    for turn, (value, points) in enumerate(theirs.items()):
        places = _marked(turn + _MARKED_EVERY // 2, 2 * _MARKED_EVERY, len(points))
        style = {**layout.PUBLISHED, "marker": looks[value].marker}
        axes.plot(points.index, points, markevery=places, **style)
    for turn, (value, curve) in enumerate(curves.items()):
        shade = looks[value]
        marks = {"marker": shade.marker, "markersize": 3.2}
        marks["markevery"] = _marked(turn, _MARKED_EVERY, np.isfinite(curve.mean).sum())
        draw_curve(axes, curve, look.Look(shade.color, line, label(value)), against, marks=marks)
    drawn = [
        curve.step[-1] if against == "step" else np.nanmax(curve.time) for curve in curves.values()
    ]
    axes.set_xlim(0, 1.03 * max([*drawn, 1e-9]))
    axis_along(axes, against)


def finding(
    curves: Mapping[Any, Curve],
    label: Callable[[Any], str] = workers_label,
    quantity: str = LOSS,
) -> str:
    """State which curve of a family ends lowest."""
    return findings.end(curves, {value: label(value) for value in curves}, quantity)


def published_curves(
    results: Finished, figure: str, series: str, curves: Mapping[Any, Curve]
) -> dict[Any, pd.Series]:
    """Return the published curves of the values of ours, up to the ends of ours.

    Each is a series by worker step, averaged as ours. Values that the paper lacks are omitted;
    tasks other than the paper's have none. ``series``: the name of a published series, with the
    value in place of ``{:g}``.
    """
    if not is_paper(results):
        return {}
    by_value = {}
    for value, curve in curves.items():
        points = published.binned(figure, series.format(value))
        points.index = (points.index + 0.5) * published.BIN_STEPS
        by_value[value] = points[points.index <= curve.step[-1] + published.BIN_STEPS]
    return {value: points for value, points in by_value.items() if len(points)}


def log_axis(
    axes: Axes, curves: Iterable[Any], label: str = LOSS, limit: float | None = None
) -> None:
    """Make the vertical axis logarithmic, with room for these curves (or tables of points) up to
    ``limit``.
    """
    means = [curve.mean if isinstance(curve, Curve) else curve for curve in curves]
    values = np.concatenate([np.zeros(0), *(np.ravel(mean) for mean in means)]).astype(float)
    values = values[np.isfinite(values) & (values > 0)]
    low, high = log_limits((), values if len(values) else (1.0,), 1.25)
    if limit is not None:
        low, high = min(low, limit / 1.25), min(high, 1.25 * limit)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_ylabel(label)


def finish(figure: Figure, text: str, columns: int | None = None) -> None:
    """Add the legend of all panels and the title."""
    layout.finish(figure, text, columns or (3 if figure.get_figwidth() < look.DOUBLE else 6))


def point_text(results: Finished) -> str:
    """Describe the width of a curve's points."""
    first = results.summary.head(1)
    runs = results._replace(summary=first).runs()
    steps = bin_steps(runs, int(first["own_workers"].iloc[0]))
    return f"each point {counted(steps, 'worker step')}"


def rate_text(results: Finished) -> str:
    """Format the learning rate, for the table of deviations."""
    return f"learning_rate={rates(results)[0]:g}"


def curve_row(
    figure: str, name: str, setting: str, deviation: float, bar: float, rows: pd.DataFrame
) -> published.Deviation:
    """Return the row of a curve's deviation."""
    measure = ("log10 RMS", np.nan, np.nan, deviation, np.nan, bar)
    return published.Deviation(figure, name, setting, *measure, diverged_of(rows))


def diverged_of(rows: pd.DataFrame) -> str:
    """Count the diverged runs: ``1 of 3``."""
    return f"{(rows['status'] == 'diverged').sum()} of {len(rows)}"


def _marked(start: int, interval: int, points: int) -> tuple[int, int]:
    """Return matplotlib's ``markevery`` for a curve, with at least one marker."""
    return start % max(points, 1), interval
