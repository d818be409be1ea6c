"""Figures 4 to 6: losses with a fixed effective batch, over many data epochs, and at too high a
learning rate.

And two summaries: the time to a target, and the final loss against the learning rate.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import Curve, draw_band
from asyncsim.study.finished import Finished

from . import published
from .losses import best_loss, curve_deviations, curve_row
from .panels import (
    MOST_LOSS,
    PANEL,
    PUBLISHED,
    chosen,
    draw_family,
    family,
    finding,
    finish,
    is_paper,
    log_axis,
    methods_of,
    published_curves,
    published_handles,
    setting,
    values_of,
    workers_label,
)
from .published import Deviation

#: Examples of the training sets, for data epochs; for other problems the axis counts gradients.
_EXAMPLES = {"digits": 1_437, "mnist": 60_000}
#: Mark of a number of workers that misses the target, and its height as a part of the axis.
_NEVER: dict[str, Any] = {"marker": r"$\uparrow$", "markersize": 8, "linestyle": "none"}
_TOP = 0.95
#: The mean loss of the last minibatches before an evaluation, which includes dropout as figure 5
#: does, and their number: a whole epoch deviates more from the published first point.
_MINIBATCH, _RECENT = "minibatch_loss", 200
#: Most panels of figure 5 side by side.
_COLUMNS = 3
_PARTS = {_MINIBATCH: ("minibatches", "-"), "test_loss": ("test", (0, (3, 1)))}
#: The published names of figure 5's curves.
_PUBLISHED_PARTS = {_MINIBATCH: "training", "test_loss": "validation"}
_EPOCHS = {"gem": "gem", "sgd": "momentum_sgd"}
#: The panels of figure 6 by their methods.
_MISSPECIFIED = {"6a": "gem", "6b": "downpour"}
#: The published series of one worker in figure 6a; it has no number of workers.
_SEQUENTIAL = "momentum_sgd"
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
    finish(figure, axes, text, published_handles(figure, axes))
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


def times_to_target(results: Finished) -> Figure:
    """Draw each method's simulated time to the target against the number of workers that share the
    batch.

    Dotted, from the smallest number of workers that reaches it: the time under perfect speedup.
    """
    table = results.table(
        "speedup.csv", ("method", "workers", "target", "time_to_target", "least_time", "most_time")
    )
    target = table["target"].iloc[0]
    figure, (axes,) = look.new_figure(*PANEL)
    axes.set_xscale("log")
    present = set(table["method"])
    names = {
        name: appearance
        for name, appearance in look.looks(methods_of(results)).items()
        if name in present
    }
    reached = table[np.isfinite(table["time_to_target"])]
    first = reached.groupby("method")[["workers", "time_to_target"]].transform("first").prod(axis=1)
    log_axis(
        axes,
        [reached["time_to_target"], first / reached["workers"]],
        f"time to a training loss of {target:g} (s)",
    )
    if reached.empty:
        axes.set_yscale("linear")
        axes.set_yticks([])
        layout.say_inside(axes, "no run reached the target")
    for turn, (name, appearance) in enumerate(names.items()):
        never = table.loc[
            (table["method"] == name) & ~np.isfinite(table["time_to_target"]), "workers"
        ]
        rows = reached[reached["method"] == name]
        if len(never):  # side by side, as they often are the same
            label = appearance.label if rows.empty else None
            style: dict[str, Any] = {
                "color": appearance.color,
                "label": label,
                "transform": axes.get_xaxis_transform(),
            }
            axes.plot(never * 1.08**turn, [_TOP] * len(never), **style, **_NEVER)
        if rows.empty:
            continue
        n, time = rows["workers"].to_numpy(), rows["time_to_target"].to_numpy()
        axes.fill_between(
            n, rows["least_time"], rows["most_time"], color=appearance.color, alpha=0.2, linewidth=0
        )
        axes.plot(
            n,
            time,
            color=appearance.color,
            linestyle=appearance.line,
            marker="o",
            markersize=3.2,
            label=appearance.label,
        )
        axes.plot(
            n, time[0] * n[0] / n, color=appearance.color, linestyle=":", linewidth=0.8, zorder=1
        )
    layout.ticks_at(axes.xaxis, sorted(table["workers"].unique()))
    axes.set_xlabel("workers n")
    speedups = []
    for name, rows in reached.groupby("method", sort=False):
        few, many = rows.iloc[0], rows.iloc[-1]
        if many["workers"] > few["workers"]:
            ratio = number_text(few["time_to_target"] / many["time_to_target"])
            counts = f"{many['workers']} workers as with {few['workers']}"
            speedups.append(f"{names[name].label} is {ratio} times as fast with {counts}")
    figure.set_label(findings.sentence("; ".join(speedups)))
    handles = []
    if len(reached):
        handles += axes.plot(
            [], [], color=look.GREY, linestyle=":", linewidth=0.8, label="n times as fast"
        )
    if len(reached) < len(table):
        handles += axes.plot([], [], color=look.GREY, label="not reached", **_NEVER)
    finish(
        figure,
        axes,
        setting(results, f"a batch{_whole_batch(results)} divided among n workers"),
        handles,
        columns=2,
    )
    return figure


def generalization(results: Finished) -> Figure:
    """Draw training and test loss over the data epochs: figure 5. A row for each n, a column for
    each method.
    """
    looks, counts = look.looks(methods_of(results)), values_of(results, "workers")
    columns = min(len(looks), _COLUMNS)
    rows_of_panels = -(-len(looks) * len(counts) // columns)
    size = (look.DOUBLE, 2.1 * rows_of_panels + 0.5)
    figure, panels = look.new_figure(*size, columns, rows_of_panels, sharey=True)
    for axes in panels[len(looks) * len(counts) :]:
        axes.remove()
    panels = panels[: len(looks) * len(counts)]
    ends: dict[str, pd.Series] = {}
    unit, per_gradient = _epochs(results)
    for axes, (n, name) in zip(panels, itertools.product(counts, looks), strict=True):
        axes.set_xlabel(unit)
        rows = results._replace(summary=results.rows(method=name, workers=n))
        if rows.summary.empty:  # a study that was interrupted
            layout.panel_title(axes, f"{looks[name].label}, {workers_label(n)}")
            layout.say_inside(axes, "not run")
            continue
        evaluated = _evaluated(rows)
        # SGD has one worker, with as many gradients as the row's other methods.
        layout.panel_title(
            axes, f"{looks[name].label}, {workers_label(int(rows.summary['own_workers'].iloc[0]))}"
        )
        for column, (label, line) in _PARTS.items():
            of_seeds = evaluated.groupby("gradients")[column].agg(["mean", "min", "max"]).dropna()
            of_seeds.index = of_seeds.index * per_gradient
            color = look.BLUE if column == _MINIBATCH else look.VERMILLION
            draw_band(axes, of_seeds, color, linestyle=line, label=label)
            if column == "test_loss" and n == counts[-1] and len(of_seeds):
                ends[looks[name].label] = of_seeds.iloc[-1]
            theirs = _published_epochs(results, name, column)
            axes.plot(theirs.index, theirs, linestyle=line, **PUBLISHED)
    for axes in panels:
        axes.set_xlim(0, None)
        if unit == "gradients":
            layout.whole_ticks(axes.xaxis, "auto")
    drawn = next(axes for axes in panels if axes.lines)
    log_axis(drawn, [line.get_ydata() for axes in panels for line in axes.lines], "")
    for axes in panels[::columns]:
        axes.set_ylabel("loss")
    where = f"with the gradients of {counted(counts[-1], 'worker')}"
    figure.set_label(findings.best(pd.DataFrame(ends).T, "test loss at the end", where))
    text = setting(results, "minibatch and test loss")
    finish(figure, drawn, text, published_handles(figure, drawn))
    return figure


def measure_generalization(results: Finished) -> list[Deviation]:
    """Compute the deviations of minibatch and test losses from figure 5, at the published
    epochs.
    """
    deviations = []
    _, per_gradient = _epochs(results)
    for name, n in itertools.product(methods_of(results), values_of(results, "workers")):
        rows = results._replace(summary=results.rows(method=name, workers=n))
        if rows.summary.empty:  # a study that was interrupted
            continue
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


def misspecified(results: Finished, panel: str) -> Figure:
    """Draw the losses at too high a learning rate: GEM and momentum SGD (figure 6a), or DOWNPOUR
    (6b).
    """
    method = _MISSPECIFIED[panel]
    results = _at_misspecified(results)
    curves = family(chosen(results, method=method), "workers")
    theirs = published_curves(results, panel, f"{method} n={{:g}}", curves)
    sequential = _sequential(results) if panel == "6a" else {}
    figure, (axes,) = look.new_figure(*PANEL)
    appearance, sgd = look.METHOD_LOOKS[method], look.METHOD_LOOKS["sgd"].label
    shown = [*curves.values(), *theirs.values(), *sequential.values()]
    log_axis(axes, shown, limit=MOST_LOSS)
    if sequential:
        black = {n: look.Shade(look.BLACK, "") for n in sequential}
        published_sgd = published_curves(results, panel, _SEQUENTIAL, sequential)
        draw_family(axes, sequential, lambda _: sgd, ":", looks=black, theirs=published_sgd)
    label = f"{appearance.label}, n = {{}}".format
    draw_family(axes, curves, label, appearance.line, theirs=theirs)
    axes.set_xlim(0, max(curve.step[-1] for curve in curves.values()))
    named = {label(n): curve for n, curve in curves.items()}
    for curve in sequential.values():
        named[sgd] = curve
    figure.set_label(finding(named, str))
    text = setting(results, "methods at too high a learning rate")
    finish(figure, axes, text, published_handles(figure, axes), columns=2)
    return figure


def measure_misspecified(results: Finished, panel: str) -> list[Deviation]:
    """Compute the deviations of the losses at too high a learning rate from figure 6a or 6b."""
    method = _MISSPECIFIED[panel]
    results = _at_misspecified(results)
    of_method = chosen(results, method=method)
    deviations = curve_deviations(of_method, panel, f"{method} n={{:g}}", "workers")
    if panel == "6a" and "sgd" in set(results.summary["method"]):
        sequential = chosen(results, method="sgd", own_workers=1)
        deviations += curve_deviations(sequential, panel, _SEQUENTIAL, "own_workers")
    return deviations


def rates(results: Finished) -> Figure:
    """Draw the final loss against the learning rate, a panel for each method, a curve for each
    number of workers.
    """
    names = look.looks(methods_of(results))
    figure, panels = look.new_figure(look.DOUBLE, 2.6, len(names), sharex=True, sharey=True)
    log_axis(panels[0], [results.summary["final_loss"]], "final minibatch loss", limit=MOST_LOSS)
    panels[0].set_xscale("log")
    looks = look.shades(values_of(results, "own_workers"))
    for axes, (name, appearance) in zip(panels, names.items(), strict=True):
        rows = chosen(results, method=name)
        for n in values_of(rows, "own_workers"):
            of_rate = rows.rows(own_workers=n).groupby("learning_rate")
            losses = of_rate["final_loss"].agg(["mean", "min", "max"])
            style = _marked(looks[n])
            draw_band(axes, losses, linestyle=appearance.line, **style)
            diverged = of_rate["status"].agg(lambda status: (status == "diverged").any())
            for rate in diverged.index[diverged]:
                axes.plot(
                    rate, axes.get_ylim()[1], "x", color=style["color"], markersize=5, clip_on=False
                )
        axes.set_title(appearance.label)
        axes.set_xlabel("learning rate \u03b7")
        layout.ticks_at(axes.xaxis, values_of(results, "learning_rate"))
    handles = []
    for n, shade in looks.items():
        handles += panels[0].plot([], [], label=workers_label(n), **_marked(shade))
    most = results.rows(learning_rate=values_of(results, "learning_rate")[-1])
    labels = most["method"].map(lambda name: names[name].label)
    groups = most.groupby(labels + ", " + most["own_workers"].map(workers_label))
    figure.set_label(best_loss(groups, f"at \u03b7 = {most['learning_rate'].iloc[0]:g}"))
    finish(figure, panels[0], setting(results, "final loss by learning rate"), handles)
    return figure


def _whole_batch(results: Finished) -> str:
    """Describe the total size of all workers' batches; empty if it varies."""
    batches = (results.summary["workers"] * results.summary["batch_size"]).unique()
    return f" of {batches[0]:g} in all" if len(batches) == 1 else ""


def _marked(shade: look.Shade) -> dict[str, Any]:
    return {"color": shade.color, "marker": shade.marker, "markersize": 3.2}


def _at_misspecified(results: Finished) -> Finished:
    """Select the results at the paper's misspecified rate, or else at the largest."""
    learning_rates = sorted(results.summary["learning_rate"].unique())
    return chosen(results, learning_rate=0.1 if 0.1 in learning_rates else learning_rates[-1])


def _sequential(results: Finished) -> dict:
    """Return the curve of momentum SGD by its number of workers, 1; empty without SGD."""
    if "sgd" not in set(results.summary["method"]):
        return {}
    rows = chosen(results, method="sgd")
    # Its longest run belongs to the most workers, because it computes as many gradients as all of
    # them.
    return family(chosen(rows, workers=values_of(rows, "workers")[-1]), "own_workers")


def _epochs(results: Finished) -> tuple[str, float]:
    """Return the unit of the horizontal axis and the size of a gradient in it."""
    problem, options = results.config.get("problem"), results.config.get("problem_config", {})
    if problem not in _EXAMPLES or "batch_size" not in options:
        return "gradients", 1.0
    return "data epochs", np.divide(options["batch_size"], _EXAMPLES[problem])
