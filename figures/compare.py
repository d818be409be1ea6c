"""The figures of a comparison of methods, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study compare``, which draws them itself. To draw them
again::

    python -m figures results/compare              # in a clone
    asyncsim figures results/compare     # installed

``curves``: the measure of each method at its best learning rate, against simulated time and
computed gradients. ``tuning``: the measure of every method at every learning rate.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster_text import attack_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    draw_along,
    draw_target,
    evaluation_curve,
    loss_axis,
    steady_time,
)
from asyncsim.drawing.paper import drawer
from asyncsim.replays.run import Run
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished
from asyncsim.traces.trace import Trace

_COLUMNS = ("method", "workers", "own_workers", "simulated_seconds", "trace_file", "run_folder")
_OF_TABLE = ("method", "learning_rate", "seeds")
#: End of the time axis, as a multiple of the last run's time to the target.
_ROOM = 1.25
_GRADIENTS = "gradients computed, including discarded ones"


def curves(finished: Finished) -> Figure:
    """Draw the course of the measure for every method at its best rate: mean and range of the
    seeds.

    For times and gradients to a target the target's measure is drawn. A diverged seed counts until
    its end; values far above the first are cut off. If the study compares by a target, the time
    axis ends shortly after the last run reaches it; otherwise with the traces of the study's number
    of workers, but not before that. One panel with both axes, if time and gradients are
    proportional.
    """
    config, table, drawn = finished.config, finished.table("comparison.csv", _OF_TABLE), {}
    quantity = (
        config["target_of"] if config["measure"].endswith("_to_target") else config["measure"]
    )
    all_workers = finished.summary[finished.summary["own_workers"] == finished.summary["workers"]]
    until = float(
        (all_workers if len(all_workers) else finished.summary)["simulated_seconds"].max()
    )
    target_times = []
    for row in table.itertuples():
        # A method without a learning rate has one group of runs.
        rate = {} if pd.isna(row.learning_rate) else {"method.learning_rate": row.learning_rate}
        rows = finished.rows(method=row.method, **rate).drop_duplicates("seed")
        if len(rows):
            drawn[str(row.method)] = _curve(finished, rows, quantity)
            target_times += list(rows.loc[np.isfinite(rows["time_to_target"]), "time_to_target"])
    if not drawn:
        reason = "its summary.csv has no run of comparison.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {reason}; {finished.remedy}")
    if target_times:
        reached = min(_ROOM * max(target_times), float(finished.summary["simulated_seconds"].max()))
        until = reached if config["measure"].endswith("_to_target") else max(until, reached)
    labels = {name: appearance.label for name, appearance in look.looks(drawn).items()}
    steady = steady_time(drawn, config["workers"])
    sizes = (look.DOUBLE, 3.0), (0.75 * look.DOUBLE, 3.2)
    rising = quantity.endswith("accuracy")
    scale = ("linear", *_accuracies(drawn, config)) if rising else loss_axis(drawn.values())
    figure, panels = draw_along(drawn, labels, sizes, scale, until, steady, _GRADIENTS, rising)
    if config["measure"].endswith("_to_target"):
        runs = finished.summary.merge(table[["method", "learning_rate"]])
        named = runs["method"].map(labels)
        missed = findings.missed(runs, named, config)
        reached = runs.groupby(named)[config["measure"]].agg(["mean", "min", "max"])
        figure.set_label(findings.best(reached, axis_of(config["measure"]), failure=missed))
    else:
        figure.set_label(findings.end(drawn, labels, axis_of(quantity), rising=rising))
    for axes in panels:
        draw_target(axes, config, quantity)
    panels[0].set_ylabel(axis_of(quantity))
    handles, named = panels[0].get_legend_handles_labels()
    if any(curve.ends for curve in drawn.values()):
        handles += panels[0].plot([], [], color=look.BLACK, **DIVERGED)
        named.append("diverged")
    layout.legend_below(figure, handles, named, 5)
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    subject = "methods" + (" at their best learning rates" if config.get("tune") else "")
    layout.title(figure, "; ".join([subject, _cluster(config), seeds]))
    return figure


def tuning(finished: Finished) -> Figure | None:
    """Draw the measure of every method at every learning rate: mean and standard deviation, the
    best filled.

    A rate at which a seed diverged or missed the target is a cross above the curves (below them if
    larger is better). Returns None if no method has several rates.
    """
    config, name = finished.config, finished.config["measure"]
    tried = finished.table("tuning.csv", (*_OF_TABLE, "best", name))
    if tried["learning_rate"].nunique() < 2 or not tried["method"].duplicated().any():
        return None
    figure, (axes,) = look.new_figure(0.75 * look.DOUBLE, 3.2)
    tried = tried.dropna(subset="learning_rate")
    valid = np.isfinite(tried[name]) & (tried["diverged"] == 0)
    measured = tried.loc[valid, name]
    if len(measured) and measured.min() > 0 and measured.max() > 3 * measured.min():
        axes.set_yscale("log")
    axes.set_xscale("log")
    looks = look.looks(tried["method"].unique())
    # Methods side by side at each rate.
    logs = np.log10(np.sort(tried["learning_rate"].unique()))
    step = min(0.025 * np.ptp(logs), 0.7 * np.diff(logs).min() / len(looks))
    turns = 10 ** (step * (np.arange(len(looks)) - (len(looks) - 1) / 2))
    for (method, appearance), turn in zip(looks.items(), turns, strict=True):
        rows = tried[valid & (tried["method"] == method)].sort_values("learning_rate")
        best, bars = rows["best"].astype(bool), rows[f"{name}_sd"].fillna(0)
        x, y = turn * rows["learning_rate"], rows[name]
        axes.errorbar(
            x,
            y,
            bars,
            color=appearance.color,
            linestyle=appearance.line,
            capsize=2,
            elinewidth=0.6,
            label=appearance.label,
        )
        axes.plot(
            x, y, "o", color=appearance.color, markersize=4, markerfacecolor="white", zorder=3
        )
        axes.plot(x[best], y[best], "o", color=appearance.color, markersize=5, zorder=3)
    edge = 0.04 if config.get("best") == "most" or name.endswith("accuracy") else 0.96
    if not valid.all():
        # Crosses in a separate row that no curve enters.
        for (method, appearance), turn in zip(looks.items(), turns, strict=True):
            x = tried.loc[~valid & (tried["method"] == method), "learning_rate"] * turn
            axes.plot(
                x,
                [edge] * len(x),
                color=appearance.color,
                transform=axes.get_xaxis_transform(),
                **DIVERGED,
            )
        scale = axes.yaxis.get_transform()
        low, high = scale.transform(np.array(axes.get_ylim()))
        room = 0.12 * (high - low)
        wider = [low - room, high] if edge < 0.5 else [low, high + room]
        axes.set_ylim(*scale.inverted().transform(np.array(wider)))
    layout.ticks_at(axes.xaxis, sorted(tried["learning_rate"].unique()))
    axes.set_xlabel("learning rate")
    axes.set_ylabel(axis_of(name))
    handles, named = axes.get_legend_handles_labels()
    if not valid.all():
        handles += axes.plot([], [], color=look.BLACK, **DIVERGED)
        named.append("not reached by all seeds" if name.endswith("_to_target") else "diverged")
    layout.legend_below(figure, handles, named, 3)
    rates = tried[valid & tried["best"].astype(bool)].itertuples()
    best = [f"{row.learning_rate:g} for {looks[row.method].label}" for row in rates]
    figure.set_label(f"The best learning rates are {', '.join(best)}." if len(best) > 1 else "")
    seeds = over_seeds(
        int(tried["seeds"].max()), "mean and standard deviation of", int(tried["seeds"].min())
    )
    layout.title(
        figure, f"methods by learning rate (filled: the best); {_cluster(config)}; {seeds}"
    )
    return figure


def _cluster(config: dict[str, Any]) -> str:
    attack = attack_text(config.get("attack"))
    return ", ".join([config["problem"], counted(config["workers"], "worker"), *attack])


def _accuracies(drawn: dict[str, Curve], config: dict[str, Any]) -> tuple[float, float]:
    """Choose the limits of an axis of accuracies: the lowest final accuracy, or six times the
    target's error.
    """
    ends = min(float(np.nan_to_num(curve.mean).max()) for curve in drawn.values())
    return max(0.0, min(1 - 6 * (1 - config["target"]), ends - 0.1)) if config[
        "target"
    ] < 1 else 0.0, 1.0


def _curve(finished: Finished, rows: pd.DataFrame, quantity: str) -> Curve:
    """Return the curve of a quantity at the evaluations of runs; its steps are computed
    gradients.
    """
    runs, traces = map(finished.run, rows["run_folder"]), map(finished.trace, rows["trace_file"])
    pairs = list(zip(runs, traces, strict=True))
    return evaluation_curve(
        [run for run, _ in pairs], [_computed(*pair) for pair in pairs], quantity
    )


def _computed(run: Run, trace: Trace) -> np.ndarray:
    """Count the gradients computed by each evaluation of a run."""
    times = trace.frame["commit_time"].to_numpy(), run.evaluations["commit_time"].to_numpy()
    return np.r_[0, trace.frame["local_steps"].cumsum()][np.searchsorted(*times, side="right")]


draw = drawer("compare", _COLUMNS, curves=curves, tuning=tuning)
