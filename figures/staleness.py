"""Figures of the staleness study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study staleness``, which draws these figures itself. To draw
them again::

    python -m figures results/staleness              # in a clone
    asyncsim figures results/staleness     # installed

``staleness``: histogram of the staleness, with theory. ``loss``: minibatch loss against simulated
time and worker steps. ``energy``: central over proxy energy. ``queue``: the first visits, and the
visits at the server over time, a row for each cluster.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim import plots
from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.clusters.cluster_text import attack_text, parts
from asyncsim.clusters.policy import asynchronous
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    bins,
    curve_of,
    draw_along,
    draw_curves,
    log_limits,
    loss_axis,
    steady_time,
    trace_length,
)
from asyncsim.replays.run import Run
from asyncsim.study import finished
from asyncsim.study.outcome import energy_ratios, late_loss
from asyncsim.traces.trace import Trace

_COLUMNS = ["method", "trace_file", "run_folder"]
#: Width of the losses in one panel (inches).
_LOSS_WIDTH = 4.8


class SharedTraces(NamedTuple):
    """Traces that several methods share, one per seed."""

    methods: tuple[str, ...]
    traces: tuple[Trace, ...]

    @property
    def workers(self) -> int:
        """Number of workers of the traces."""
        return self.traces[0].workers


class Results(NamedTuple):
    """Configuration, traces and runs of the study."""

    config: dict[str, Any]
    timings: list[SharedTraces]  #: by decreasing number of workers, then of methods
    runs: dict[str, list[Run]]  #: by method, one per seed

    @property
    def workers(self) -> int:
        """Number of workers of the study; a method may have fewer."""
        return self.timings[0].workers

    def over_seeds(self, statistic: str) -> str:
        """Format the number of seeds for titles; an interrupted study may have fewer of some
        methods.
        """
        counts = [len(runs) for runs in self.runs.values()]
        return over_seeds(max(counts), statistic, min(counts))

    @property
    def labels(self) -> dict[str, str]:
        """The methods' labels, with the number of workers if it differs from the study's."""
        labels = {name: appearance.label for name, appearance in look.looks(self.runs).items()}
        for timing in self.timings:
            if timing.workers != self.workers:
                workers_text = counted(timing.workers, "worker")
                labels |= {name: f"{labels[name]}, {workers_text}" for name in timing.methods}
        return labels

    @property
    def asynchronous(self) -> list[SharedTraces]:
        """The timings of several workers; the first one if there are none."""
        return [timing for timing in self.timings if timing.workers > 1] or self.timings[:1]


def draw(folder: str | os.PathLike) -> list[Path]:
    """Draw all figures of a folder of results into the folder; return the PNG and the PDF of
    each.
    """
    folder = Path(folder)
    results = read(folder)
    paths = []
    with look.style():
        for name, figure in FIGURES.items():
            paths += look.save(figure(results), folder / name, figure)
    return paths


def read(folder: Path) -> Results:
    """Read the results of the study.

    Raises
    ------
    InputError
        The folder has no results, or incomplete ones.
    """
    stored = finished.read(folder, "staleness", _COLUMNS)
    (first, *_) = stored.config.get("cells", [{}])  # a figure is of one cluster
    rows = stored.rows(**first)[_COLUMNS]
    traces = {name: stored.trace(name) for name in rows["trace_file"].unique()}
    runs: dict[str, list[Run]] = {}
    for row in rows.itertuples():
        runs.setdefault(str(row.method), []).append(stored.run(str(row.run_folder)))
    return Results(stored.config, _timings(rows, traces), runs)


def staleness(results: Results) -> Figure:
    """Draw the histogram of the staleness with theory, a panel for each group of traces."""
    timings = results.asynchronous
    figure, panels = look.new_grid(len(timings), 2.5)
    for axes, timing in zip(panels, timings, strict=True):
        plots.staleness_histogram(axes, timing.traces)
        if len(timings) > 1:
            layout.panel_title(axes, f"{_labels(timing.methods)}: {_cluster(timing.traces[0])}")
    setting = f"{_cluster(timings[0].traces[0])}; " if len(timings) == 1 else ""
    layout.title(figure, f"staleness and its theory; {setting}{results.over_seeds('')}")
    mean, std = np.mean([_staleness(trace) for trace in timings[0].traces], axis=0)
    figure.set_label(
        f"Commits of {counted(timings[0].workers, 'worker')} are {number_text(mean)} versions "
        f"stale on average, with a standard deviation of {number_text(std)}."
    )
    return figure


def loss(results: Results) -> Figure:
    """Draw the minibatch losses against simulated time and against worker steps, cut off far above
    the first.

    One panel with both axes if worker steps take equal times for all methods, otherwise two panels.
    """
    curves = {
        name: curve_of(runs, _losses, "mean", results.workers)
        for name, runs in results.runs.items()
    }
    sizes = (look.DOUBLE, 2.7), (_LOSS_WIDTH, 3.0)
    until, scale = _longest_time(results), loss_axis(curves.values())
    figure, panels = draw_along(curves, results.labels, sizes, scale, until, steady_time(curves))
    panels[0].set_ylabel("minibatch loss")
    ends = {  # as in the study's table
        results.labels[name]: pd.Series([late_loss(run.commits, len(run.commits)) for run in runs])
        for name, runs in results.runs.items()
        if not curves[name].ends
    }
    with np.errstate(over="ignore"):  # of losses near the largest number
        table = pd.DataFrame(ends).agg(["mean", "min", "max"]).T
    failed = [results.labels[name] for name, curve in curves.items() if curve.ends]
    figure.set_label(findings.best(table, "minibatch loss at the end", failed=failed))
    _finish(figure, results, panels[0], "mean", curves)
    return figure


def energy(results: Results) -> Figure:
    """Draw the ratio of the central variable's energy to the proxy's, and the line of equality.

    Only commits before which the central variable has moved since the worker's read count (see
    `asyncsim.study.outcome.energy_ratios`).
    """
    figure, (axes,) = look.new_figure(look.SINGLE, 2.9)
    curves = {
        name: curve_of(runs, _energy_ratios, "median", results.workers)
        for name, runs in results.runs.items()
    }
    axes.set_yscale("log")
    axes.set_ylim(log_limits(curves.values(), among=(0.3, 3.0), room=2))
    draw_curves(axes, curves, results.labels, "step")
    axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0, label="energies equal")
    axes.set_ylabel("central / proxy energy")
    ends = {name: curve.mean[np.isfinite(curve.mean)][-1:] for name, curve in curves.items()}
    ratios = [
        f"{number_text(*ratio)} for {results.labels[name]}" for name, ratio in ends.items() if ratio
    ]
    figure.set_label(f"Central over proxy energy ends at {', '.join(ratios)}." if ratios else "")
    _finish(figure, results, axes, "median", curves)
    return figure


def queue(results: Results) -> Figure:
    """Draw the first seed's timeline and visits at the server over time, a row for each group of
    traces.
    """
    timings = results.asynchronous
    rows = 2 if look.is_narrow(2) else 1
    size = (look.DOUBLE, 2.7 * rows * len(timings))
    figure = look.LiteralFigure(figsize=size, layout="constrained")
    for row, timing in zip(
        figure.subfigures(len(timings), 1, squeeze=False).flat, timings, strict=True
    ):
        trace = timing.traces[0]
        timeline_axes, queue_axes = row.subplots(rows, 2 // rows)
        plots.timeline(timeline_axes, trace)
        plots.queue_length(queue_axes, trace)
        prefix = f"{_labels(timing.methods)}: " if len(timings) > 1 else ""
        layout.title(row, f"{prefix}{_cluster(trace)}; seed\u00a0{trace.seed}", look.DOUBLE)
    shares = timings[0].traces[0].summary()
    figure.set_label(
        f"Workers compute for {shares['computing_share']:.1%} of the time and wait at the server "
        f"for {shares['waiting_share']:.1%}."
    )
    return figure


#: The figures by the names of their files.
FIGURES = {"staleness": staleness, "loss": loss, "energy": energy, "queue": queue}


def _timings(rows: pd.DataFrame, traces: dict[str, Trace]) -> list[SharedTraces]:
    """Group methods by the clusters of their traces; every group has one trace per seed."""
    groups: dict[Any, dict[str, list[str]]] = {}
    for row in rows.itertuples():
        cluster = traces[str(row.trace_file)].cluster
        group = groups.setdefault(cluster, {})
        group.setdefault(str(row.trace_file), []).append(str(row.method))
    timings = [
        SharedTraces(
            tuple(dict.fromkeys(chain(*files.values()))), tuple(traces[name] for name in files)
        )
        for files in groups.values()
    ]
    return sorted(timings, key=lambda timing: (timing.workers, len(timing.methods)), reverse=True)


def _staleness(trace: Trace) -> tuple[float, float]:
    summary = trace.summary()
    return summary["staleness_mean"], summary["staleness_std"]


def _losses(commits: pd.DataFrame) -> np.ndarray:
    return commits["loss"].to_numpy(np.float64)


def _energy_ratios(commits: pd.DataFrame) -> np.ndarray:
    return energy_ratios(commits[["central_energy", "proxy_energy"]].astype(np.float64)).to_numpy()


def _longest_time(results: Results) -> float:
    """Return the longest simulated time among traces with all workers; a lone worker would take far
    longer.
    """
    timings = [timing for timing in results.timings if timing.workers == results.workers]
    return max(
        float(trace.frame["commit_time"].iloc[-1]) for timing in timings for trace in timing.traces
    )


def _finish(
    figure: Figure, results: Results, axes: Axes, average: str, curves: Mapping[str, Curve]
) -> None:
    """Add the title and the legend."""
    handles, labels = axes.get_legend_handles_labels()
    if any(run.diverged_at is not None for runs in results.runs.values() for run in runs):
        handles += axes.plot([], [], color=look.BLACK, **DIVERGED)
        labels.append("diverged")
    columns = max(2, int(5 * figure.get_figwidth() / look.DOUBLE))
    layout.legend_below(figure, handles, labels, columns)
    commits = trace_length(results.runs[results.timings[0].methods[0]])
    steps = commits / bins(commits, results.workers) / results.workers
    point_text = f"each point the {average} of {steps:.2g} worker step{'' if steps == 1 else 's'}"
    seeds = results.over_seeds("mean and range of")
    policies = {timing.traces[0].policy for timing in results.asynchronous}
    # Several policies are named in the panels of the staleness histograms.
    named = [
        str(policy) for policy in policies if policies != {asynchronous()} and len(policies) == 1
    ]
    attack = attack_text(results.config.get("attack"))
    parts = [results.config.get("problem", ""), counted(results.workers, "worker")]
    setting = ", ".join([*parts, *named, *attack])
    subject = "losses of methods" if average == "mean" else "energies of methods"
    layout.title(
        figure,
        "; ".join([subject, setting, seeds, point_text]),
    )


def _labels(methods: Sequence[str]) -> str:
    return ", ".join(appearance.label for appearance in look.looks(methods).values())


def _cluster(trace: Trace) -> str:
    """Describe the cluster, with line breaks allowed only between its parts and between listed
    laws.
    """
    if trace.cluster is None:
        return f"{counted(trace.workers, 'worker')}, {trace.protocol}"
    glued = (part.replace(" ", "\u00a0") for part in parts(trace.cluster))
    return ", ".join(part.replace("\u00a0+", " +").replace("\u00a0and", " and") for part in glued)
