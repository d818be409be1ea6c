"""Figures of the staleness study, beside every comparison's, from the folder of results.

The data come from ``asyncsim study staleness``, which draws these figures itself. To draw them
again::

    asyncsim figures results/staleness

``staleness``: histogram of the staleness, with theory. ``energy``: central over proxy energy.
``queue``: the first visits, and the visits at the server over time, a row for each cluster.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim import plots
from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.clusters.cluster_text import parts
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import curve_of, draw_curves, log_limits
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import energy_ratios
from asyncsim.traces.trace import Trace

_COLUMNS = ("method", "seed", "trace_file", "run_folder")


class SharedTraces(NamedTuple):
    """Traces that several methods share, one per seed."""

    methods: tuple[str, ...]
    traces: tuple[Trace, ...]

    @property
    def workers(self) -> int:
        """Number of workers of the traces."""
        return self.traces[0].workers


def staleness(finished: Finished) -> Figure:
    """Draw the histogram of the staleness with theory, a panel for each group of traces."""
    timings = _timings(finished)
    figure, panels = look.new_grid(len(timings), 2.5)
    for axes, timing in zip(panels, timings, strict=True):
        plots.staleness_histogram(axes, timing.traces)
        if len(timings) > 1:
            layout.panel_title(axes, f"{_labels(timing.methods)}: {_cluster(timing.traces[0])}")
    setting = f"{_cluster(timings[0].traces[0])}; " if len(timings) == 1 else ""
    layout.title(figure, f"staleness and its theory; {setting}{_seeds(finished, '')}")
    summaries = pd.DataFrame([trace.summary() for trace in timings[0].traces])
    mean, std = summaries[["staleness_mean", "staleness_std"]].mean()
    figure.set_label(
        f"Commits of {counted(timings[0].workers, 'worker')} are {number_text(mean)} versions "
        f"stale on average, with a standard deviation of {number_text(std)}."
    )
    return figure


def energy(finished: Finished) -> Figure:
    """Draw the ratio of the central variable's energy to the proxy's, and the line of equality.

    Only commits before which the central variable has moved since the worker's read count (see
    `asyncsim.study.outcome.energy_ratios`).
    """
    runs = {
        str(method): [finished.run(name) for name in of_method["run_folder"]]
        for method, of_method in _rows(finished).groupby("method", sort=False)
    }
    workers = max(run.config["workers"] for of_method in runs.values() for run in of_method)
    looks = look.looks(runs)
    figure, (axes,) = look.new_figure(look.SINGLE, 2.9)
    curves = {name: curve_of(of, _energy_ratios, "median", workers) for name, of in runs.items()}
    axes.set_yscale("log")
    axes.set_ylim(log_limits(curves.values(), among=(0.3, 3.0), room=2))
    draw_curves(axes, curves, looks, "step")
    axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0, label="energies equal")
    axes.set_ylabel("central / proxy energy")
    ends = {name: curve.mean[np.isfinite(curve.mean)][-1:] for name, curve in curves.items()}
    ratios = [
        f"{number_text(*ratio)} for {looks[name].label}" for name, ratio in ends.items() if ratio
    ]
    figure.set_label(f"Central over proxy energy ends at {', '.join(ratios)}." if ratios else "")
    setting = f"{finished.config.get('problem', '')}, {counted(workers, 'worker')}"
    title = ["energies of methods, medians", setting, _seeds(finished, "mean and range of")]
    layout.finish(figure, "; ".join(title), 2)
    return figure


def queue(finished: Finished) -> Figure:
    """Draw the first seed's timeline and visits at the server over time, a row for each group of
    traces.
    """
    timings = _timings(finished)
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
        layout.title(row, f"{prefix}{_cluster(trace)}; seed\u00a0{trace.seed}")
    shares = timings[0].traces[0].summary()
    figure.set_label(
        f"Workers compute for {shares['computing_share']:.1%} of the time and wait at the server "
        f"for {shares['waiting_share']:.1%}."
    )
    return figure


def _rows(finished: Finished) -> pd.DataFrame:
    """Return the rows of the first cluster: a figure is of one."""
    (first, *_) = finished.config.get("cells", [{}])
    return finished.rows(**first)


def _seeds(finished: Finished, statistic: str) -> str:
    """Format the number of seeds; an interrupted study may have fewer of some methods."""
    counts = _rows(finished)["method"].value_counts()
    return over_seeds(counts.max(), statistic, counts.min())


def _timings(finished: Finished) -> list[SharedTraces]:
    """Group methods by the clusters of their traces, by decreasing number of workers, then of
    methods; a lone worker counts only if no method has several.
    """
    rows = _rows(finished)
    traces = {name: finished.trace(name) for name in rows["trace_file"].unique()}
    groups: dict[Any, list[str]] = {}
    for name, trace in traces.items():
        groups.setdefault(trace.cluster, []).append(name)
    timings = []
    for names in groups.values():
        methods = rows.loc[rows["trace_file"].isin(names), "method"].unique()
        timings.append(SharedTraces(tuple(methods), tuple(traces[name] for name in names)))
    timings.sort(key=lambda timing: (timing.workers, len(timing.methods)), reverse=True)
    return [timing for timing in timings if timing.workers > 1] or timings[:1]


def _energy_ratios(commits: pd.DataFrame) -> np.ndarray:
    return energy_ratios(commits[["central_energy", "proxy_energy"]].astype(np.float64)).to_numpy()


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


draw = drawer("staleness", _COLUMNS, staleness=staleness, energy=energy, queue=queue)
