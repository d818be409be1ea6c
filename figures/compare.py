"""The figures of a comparison of methods, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study compare``, which draws them itself. To draw them again::

    python -m figures results/compare              # in a clone
    asyncsim figures results/compare     # installed

``curves``: what the methods are compared by, each at its best learning rate, against simulated time and gradients
computed. ``tuning``: the measure of every method at every learning rate that was tried.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    coincidences,
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
#: Where the axis of time ends, relative to when the last run reaches the target.
_ROOM = 1.25
_GRADIENTS = "gradients computed, also those thrown away"


def curves(finished: Finished) -> Figure:
    """Draw the measure of every method at its best rate as it goes: mean and range of the seeds.

    Of times and gradients to a target that is what the target is of. A seed that diverged counts as far as it went, and
    values far above the first are cut off. Compared by a target, the axis of time ends a bit after the last run reaches
    it; else with the traces of the study's own number of workers, if there are some, but not before that. One panel,
    with both axes, where time and gradients say the same.
    """
    config, table, drawn = finished.config, finished.table("comparison.csv", _OF_TABLE), {}
    quantity = config["target_of"] if config["measure"].endswith("_to_target") else config["measure"]
    beside = finished.summary[finished.summary["own_workers"] == finished.summary["workers"]]
    until = float((beside if len(beside) else finished.summary)["simulated_seconds"].max())
    needed = []
    for row in table.itertuples():
        # Without a rate of that name there is only one.
        rate = {} if pd.isna(row.learning_rate) else {"method.learning_rate": row.learning_rate}
        rows = finished.rows(method=row.method, **rate).drop_duplicates("seed")
        if len(rows):
            drawn[str(row.method)] = _curve(finished, rows, quantity)
            needed += list(rows.loc[np.isfinite(rows["time_to_target"]), "time_to_target"])
    if not drawn:
        what = "its summary.csv has no run of comparison.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {what}; {finished.remedy}")
    if needed:
        reached = min(_ROOM * max(needed), float(finished.summary["simulated_seconds"].max()))
        until = reached if config["measure"].endswith("_to_target") else max(until, reached)
    labels = {name: one.label for name, one in look.looks(drawn).items()}
    steady = steady_time(drawn, config["workers"])
    sizes = (look.DOUBLE, 3.0), (0.75 * look.DOUBLE, 3.2)
    rising = quantity.endswith("accuracy")
    scale = ("linear", *_accuracies(drawn, config)) if rising else loss_axis(drawn.values())
    figure, panels = draw_along(drawn, labels, sizes, scale, until, steady, _GRADIENTS, rising)
    for axes in panels:
        draw_target(axes, config, quantity)
    panels[0].set_ylabel(axis_of(quantity))
    handles, named = panels[0].get_legend_handles_labels()
    if any(curve.ends for curve in drawn.values()):
        handles += panels[0].plot([], [], color=look.BLACK, **DIVERGED)
        named.append("diverged")
    layout.legend_below(figure, handles, named, 5)
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    tuned = ["each at the best of its learning rates"] if config.get("tune") else []
    layout.title(figure, "; ".join([_cluster(config), seeds, *tuned, *coincidences(drawn, labels)]))
    return figure


def tuning(finished: Finished) -> Figure | None:
    """Draw the measure of every method at every learning rate: mean and standard deviation, the best filled.

    A rate at which a seed diverged, or did not reach the target, is a cross above the others, or below where the most
    is best. None if no method has several rates.
    """
    config, name = finished.config, finished.config["measure"]
    every = finished.table("tuning.csv", (*_OF_TABLE, "best", name))
    if every["learning_rate"].nunique() < 2 or not every["method"].duplicated().any():
        return None
    figure, (axes,) = look.new_figure(0.75 * look.DOUBLE, 3.2)
    every = every.dropna(subset="learning_rate")
    there = np.isfinite(every[name]) & (every["diverged"] == 0)
    known = every.loc[there, name]
    if len(known) and known.min() > 0 and known.max() > 3 * known.min():
        axes.set_yscale("log")
    axes.set_xscale("log")
    looks = look.looks(every["method"].unique())
    # Methods of one rate beside each other.
    logs = np.log10(np.sort(every["learning_rate"].unique()))
    step = min(0.025 * np.ptp(logs), 0.7 * np.diff(logs).min() / len(looks))
    turns = 10 ** (step * (np.arange(len(looks)) - (len(looks) - 1) / 2))
    for (method, one), turn in zip(looks.items(), turns, strict=True):
        rows = every[there & (every["method"] == method)].sort_values("learning_rate")
        best, bars = rows["best"].astype(bool), rows[f"{name}_sd"].fillna(0)
        x, y = turn * rows["learning_rate"], rows[name]
        axes.errorbar(x, y, bars, color=one.color, linestyle=one.line, capsize=2, elinewidth=0.6, label=one.label)
        axes.plot(x, y, "o", color=one.color, markersize=4, markerfacecolor="white", zorder=3)
        axes.plot(x[best], y[best], "o", color=one.color, markersize=5, zorder=3)
    edge = 0.04 if config.get("best") == "most" or name.endswith("accuracy") else 0.96
    if not there.all():
        # In a row of their own that no curve enters.
        for (method, one), turn in zip(looks.items(), turns, strict=True):
            x = every.loc[~there & (every["method"] == method), "learning_rate"] * turn
            axes.plot(x, [edge] * len(x), color=one.color, transform=axes.get_xaxis_transform(), **DIVERGED)
        scale = axes.yaxis.get_transform()
        low, high = scale.transform(np.array(axes.get_ylim()))
        room = 0.12 * (high - low)
        wider = [low - room, high] if edge < 0.5 else [low, high + room]
        axes.set_ylim(*scale.inverted().transform(np.array(wider)))
    layout.ticks_at(axes.xaxis, sorted(every["learning_rate"].unique()))
    if axes.get_yscale() == "log":
        layout.plain_logs(axes.yaxis)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(axis_of(name))
    handles, named = axes.get_legend_handles_labels()
    if not there.all():
        handles += axes.plot([], [], color=look.BLACK, **DIVERGED)
        named.append("not reached by all seeds" if name.endswith("_to_target") else "diverged")
    layout.legend_below(figure, handles, named, 3)
    seeds = over_seeds(int(every["seeds"].max()), "mean and standard deviation of", int(every["seeds"].min()))
    layout.title(figure, f"{_cluster(config)}; {seeds}; filled: the best rate")
    return figure


def _cluster(config: dict[str, Any]) -> str:
    return f"{config['problem']}, {counted(config['workers'], 'worker')}"


def _accuracies(drawn: dict[str, Curve], config: dict[str, Any]) -> tuple[float, float]:
    """Return the limits of an axis of accuracies: from where the last is at the end, or six errors of the target."""
    ends = min(float(np.nan_to_num(curve.mean).max()) for curve in drawn.values())
    return max(0.0, min(1 - 6 * (1 - config["target"]), ends - 0.1)) if config["target"] < 1 else 0.0, 1.0


def _curve(finished: Finished, rows: pd.DataFrame, quantity: str) -> Curve:
    """Return a quantity of some runs at their evaluations; the steps are gradients computed by then."""
    runs, traces = map(finished.run, rows["run_folder"]), map(finished.trace, rows["trace_file"])
    pairs = list(zip(runs, traces, strict=True))
    return evaluation_curve([run for run, _ in pairs], [_computed(*pair) for pair in pairs], quantity)


def _computed(run: Run, trace: Trace) -> np.ndarray:
    """Return how many gradients were computed by each evaluation of a run."""
    times = trace.frame["commit_time"].to_numpy(), run.evaluations["commit_time"].to_numpy()
    return np.r_[0, trace.frame["local_steps"].cumsum()][np.searchsorted(*times, side="right")]


draw = drawer("compare", _COLUMNS, curves=curves, tuning=tuning)
