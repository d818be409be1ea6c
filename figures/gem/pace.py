"""Figures 4 and 5: losses with a fixed effective batch, and over many data epochs."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import Curve, draw_ranges
from asyncsim.drawing.paper import setting
from asyncsim.study.finished import Finished

from . import published
from .panels import (
    PANEL,
    chosen,
    curve_row,
    draw_family,
    family,
    finding,
    finish,
    is_paper,
    log_axis,
    methods_of,
    values_of,
    workers_label,
)
from .published import Deviation

#: Examples of the training sets, for data epochs; for other problems the axis counts gradients.
_EXAMPLES = {"digits": 1_437, "mnist": 60_000}
#: The mean loss of the last minibatches before an evaluation, which includes dropout as figure 5
#: does, and their number: a whole epoch deviates more from the published first point.
_MINIBATCH, _RECENT = "minibatch_loss", 200
_PARTS = {_MINIBATCH: ("minibatches", "-"), "test_loss": ("test", (0, (3, 1)))}
#: The published names of figure 5's curves.
_PUBLISHED_PARTS = {_MINIBATCH: "training", "test_loss": "validation"}
_EPOCHS = {"gem": "gem", "sgd": "momentum_sgd"}
#: Examples of the workers' batches in figure 4, and factors on our times to try.
_EFFECTIVE = 256
_STRETCHES = np.geomspace(0.05, 20, 600)


def speedup(results: Finished) -> Figure:
    """Draw GEM's loss against simulated seconds, the batch divided among n workers: figure 4."""
    results = chosen(results, method="gem")
    curves, theirs = family(results, "workers"), _published_speedup(results)
    if theirs:
        stretch = _stretch(curves, theirs)
        curves = {n: curve._replace(time=curve.time * stretch) for n, curve in curves.items()}
    figure, (axes,) = look.new_figure(*PANEL)
    log_axis(axes, [*curves.values(), *theirs.values()])
    draw_family(axes, curves, against="time", theirs=theirs)
    figure.set_label(finding(curves))
    if theirs:
        axes.set_xlabel(f"time (s); ours \u00d7 {stretch:.3g}, which fits best")
    text = setting(
        results,
        f"GEM: a batch{_whole_batch(results)} divided among n workers",
        "means over at most 20 worker steps",
    )
    finish(figure, text)
    return figure


def measure_speedup(results: Finished) -> list[Deviation]:
    """Compute the deviations from figure 4: with one stretch of our time, and with one for each n.

    The paper's time of a gradient is unknown, so one stretch must be fitted. A stretch for each
    number of workers shows whether that time is proportional to the share of the batch.
    """
    results = chosen(results, method="gem")
    curves, theirs = family(results, "workers"), _published_speedup(results)
    common, deviations = _stretch(curves, theirs), []
    for n in theirs:
        best = _stretch({n: curves[n]}, {n: theirs[n]})
        rows = chosen(results, workers=n).summary
        for name, stretch in (("common", common), ("best", best)):
            off = float(np.sqrt(np.mean(_off_at(curves[n], theirs[n], stretch) ** 2)))
            deviations.append(
                curve_row("4", f"gem n={n}", f"{name} stretch={stretch:.3g}", off, np.nan, rows)
            )
    return deviations


def _published_speedup(results: Finished) -> dict[int, pd.Series]:
    """Return the published losses by seconds for our numbers of workers; none for other tasks."""
    if not is_paper(results):
        return {}
    tables = {
        n: published.series("4", f"gem n={n} b={_EFFECTIVE // n}")
        for n in values_of(results, "workers")
    }
    return {n: table.set_index("x")["y"] for n, table in tables.items() if len(table)}


def _stretch(curves: Mapping[int, Curve], theirs: Mapping[int, pd.Series]) -> float:
    """Return the factor on our times with the least mean square of log10(ours / published)."""

    def off(stretch: float) -> float:
        parts = [_off_at(curves[n], points, stretch) for n, points in theirs.items()]
        return float(np.mean(np.concatenate(parts) ** 2))

    return float(min(_STRETCHES, key=off))


def _off_at(curve: Curve, theirs: pd.Series, stretch: float) -> np.ndarray:
    """Compute log10(ours / published) at the published times, up to the end of our stretched
    curve.
    """
    known = np.isfinite(curve.mean)
    time, loss = stretch * curve.time[known], np.log10(curve.mean[known])
    theirs = theirs[theirs.index <= time[-1]]
    # The first published points come before ours, which are means.
    return np.interp(theirs.index, time, loss) - np.log10(theirs.to_numpy(np.float64))


def generalization(results: Finished) -> Figure:
    """Draw training and test loss over the data epochs: figure 5. A row for each n, a column for
    each method.
    """
    looks = look.looks(methods_of(results))
    panels_of = list(_methods_and_workers(results))
    figure, panels = look.new_grid(len(panels_of), 2.1, 0.5, sharey=True)
    ends: dict[str, pd.Series] = {}
    unit, per_gradient = _epochs(results)
    most = values_of(results, "workers")[-1]
    for axes, (name, n, rows) in zip(panels, panels_of, strict=True):
        axes.set_xlabel(unit)
        axes.set_ylabel("loss")
        evaluated = _evaluated(rows)
        evaluated["epochs"] = evaluated["gradients"] * per_gradient
        # SGD has one worker, with as many gradients as the row's other methods.
        layout.panel_title(
            axes, f"{looks[name].label}, {workers_label(int(rows.summary['own_workers'].iloc[0]))}"
        )
        for column, (label, line) in _PARTS.items():
            color = look.BLUE if column == _MINIBATCH else look.VERMILLION
            style = look.Look(color, line, label).style
            draw_ranges(axes, evaluated, "epochs", column, **style)
            if column == "test_loss" and n == most:
                last = evaluated[evaluated["epochs"] == evaluated["epochs"].max()]
                ends[looks[name].label] = last[column].agg(["mean", "min", "max"])
            theirs = _published_epochs(results, name, column)
            axes.plot(theirs.index, theirs, linestyle=line, **layout.PUBLISHED)
    for axes in panels:
        axes.set_xlim(0, None)
        if unit == "gradients":
            layout.whole_ticks(axes.xaxis, "auto")
    log_axis(panels[0], [line.get_ydata() for axes in panels for line in axes.lines], "loss")
    where = f"with the gradients of {counted(most, 'worker')}"
    figure.set_label(findings.best(pd.DataFrame(ends).T, "test loss at the end", where))
    finish(figure, setting(results, "minibatch and test loss"))
    return figure


def measure_generalization(results: Finished) -> list[Deviation]:
    """Compute the deviations of minibatch and test losses from figure 5, at the published
    epochs.
    """
    deviations = []
    _, per_gradient = _epochs(results)
    for name, n, rows in _methods_and_workers(results):
        for column in _PARTS:
            ours = _evaluated(rows).groupby("gradients")[column].mean().dropna()
            epochs = ours.index * per_gradient
            theirs = _published_epochs(results, name, column)
            # The last epoch is rounded to whole visits of all workers.
            theirs = theirs[theirs.index <= 1.01 * epochs[-1]]
            if theirs.empty:
                continue
            at = np.interp(theirs.index, epochs, ours)
            off = float(np.sqrt(np.mean(np.log10(at / theirs) ** 2)))
            series = f"{_EPOCHS[name]} {_PUBLISHED_PARTS[column]}"
            deviations.append(curve_row("5", series, f"workers={n}", off, np.nan, rows.summary))
    return deviations


def _methods_and_workers(results: Finished) -> Iterator[tuple[str, int, Finished]]:
    """Yield each number of workers and each method that was run with it, with their results."""
    for n, name in itertools.product(values_of(results, "workers"), methods_of(results)):
        rows = results._replace(summary=results.rows(method=name, workers=n))
        if len(rows.summary):
            yield name, n, rows


def _evaluated(results: Finished) -> pd.DataFrame:
    """Concatenate the evaluations of runs, with the mean loss of the minibatches before each."""
    tables = []
    for run in results.runs():
        losses, commits = run.commits["loss"].to_numpy(np.float64), run.evaluations["commit"]
        width = int(min(_RECENT, commits.diff().max()))
        recent = [losses[max(0, k - width) : k].mean() if k else np.nan for k in commits]
        tables.append(run.evaluations.assign(**{_MINIBATCH: recent}))
    return pd.concat(tables)


def _published_epochs(results: Finished, method: str, column: str) -> pd.Series:
    """Return a published curve of figure 5 by epoch; empty for other tasks and methods."""
    if not is_paper(results) or method not in _EPOCHS:
        return pd.Series(dtype=float)
    points = published.series("5", f"{_EPOCHS[method]} {_PUBLISHED_PARTS[column]}")
    return points.set_index("x")["y"]


def _whole_batch(results: Finished) -> str:
    """Describe the total size of all workers' batches; empty if it varies."""
    batches = (results.summary["workers"] * results.summary["batch_size"]).unique()
    return f" of {batches[0]:g} in all" if len(batches) == 1 else ""


def _epochs(results: Finished) -> tuple[str, float]:
    """Return the unit of the horizontal axis and the size of a gradient in it."""
    problem, options = results.config.get("problem"), results.config.get("problem_config", {})
    if problem not in _EXAMPLES or "batch_size" not in options:
        return "gradients", 1.0
    return "data epochs", np.divide(options["batch_size"], _EXAMPLES[problem])
