"""The figure of a comparison of methods, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study compare``, which draws this itself. To draw it again::

    python -m figures results/compare              # in a clone
    asyncsim figures results/compare     # installed

``loss``: training loss of every method, at its best learning rate, against simulated time and against gradients
computed.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    draw_curves,
    draw_target,
    evaluation_curve,
    loss_axis,
    mark_after,
    mark_below,
    mark_beyond,
)
from asyncsim.errors import InputError
from asyncsim.runs.run import Run
from asyncsim.study.finished import Finished, read
from asyncsim.traces.trace import Trace
from asyncsim.wording import counted, over_seeds

_COLUMNS = ("method", "workers", "own_workers", "simulated_seconds", "trace_file", "run_folder")
_OF_TABLE = ("method", "learning_rate", "seeds")


def draw(folder: str | os.PathLike) -> list[Path]:
    """Draw the figure of a folder of results, into the folder."""
    folder = Path(folder)
    finished = read(folder, "compare", _COLUMNS)
    with look.style():
        return look.save(loss(finished, finished.table("comparison.csv", _OF_TABLE)), folder / "loss")


def loss(finished: Finished, table: pd.DataFrame) -> Figure:
    """Draw the training loss of every method at its best rate: mean and range of the seeds.

    A seed that diverged counts as far as it went, and losses far above the first are cut off. The axis of time ends
    with the traces of the study's own number of workers, if there are some.
    """
    figure, panels = look.new_figure(look.DOUBLE, 3.0, 2, sharey=True)
    labels = {name: one.label for name, one in look.looks(table["method"]).items()}
    curves: dict[str, Curve] = {}
    for row in table.itertuples():
        # Without a rate of that name there is only one.
        rate = {} if pd.isna(row.learning_rate) else {"method.learning_rate": row.learning_rate}
        rows = finished.rows(method=row.method, **rate)
        if len(rows):
            curves[str(row.method)] = _curve(finished, rows)
    if not curves:
        what = "its summary.csv has no run of comparison.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {what}; {finished.remedy}")
    scale, *limits = loss_axis(curves.values())
    for axes, against in zip(panels, ("time", "step"), strict=True):
        axes.set_yscale(scale)
        axes.set_ylim(*limits)
        if scale == "log":
            layout.plain_logs(axes.yaxis)
        draw_curves(axes, curves, labels, against, _longest_time(finished.summary) if against == "time" else None)
        draw_target(axes, finished.config)
    panels[1].set_xlabel("gradients computed, also those thrown away")
    panels[0].set_ylabel("loss on the training data")
    mark_beyond(panels[0], curves, labels, "time")
    mark_below(panels[0], curves, labels, "time")
    mark_after(panels[0], curves, labels)
    handles, named = panels[0].get_legend_handles_labels()
    if any(curve.ends for curve in curves.values()):
        handles += panels[0].plot([], [], color=look.BLACK, **DIVERGED)
        named.append("diverged")
    layout.legend_below(figure, handles, named, 5)
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    config = finished.config
    tuned = "; each at the best of its learning rates" if config.get("tune") else ""
    layout.title(figure, f"{config['problem']}, {counted(config['workers'], 'worker')}; {seeds}{tuned}")
    return figure


def _longest_time(summary: pd.DataFrame) -> float:
    """Return the simulated time of the runs of all workers.

    A lone worker needs many times longer: what it needs until the target is in the table.
    """
    beside = summary[summary["own_workers"] == summary["workers"]]
    return float((beside if len(beside) else summary)["simulated_seconds"].max())


def _curve(finished: Finished, rows: pd.DataFrame) -> Curve:
    """Return the training loss of some runs at their evaluations; the steps are gradients computed by then."""
    runs, traces = map(finished.run, rows["run_folder"]), map(finished.trace, rows["trace_file"])
    pairs = list(zip(runs, traces, strict=True))
    return evaluation_curve([run for run, _ in pairs], [_computed(*pair) for pair in pairs])


def _computed(run: Run, trace: Trace) -> np.ndarray:
    """Return how many gradients were computed by each evaluation of a run."""
    times = trace.frame["commit_time"].to_numpy(), run.evaluations["commit_time"].to_numpy()
    return np.r_[0, trace.frame["local_steps"].cumsum()][np.searchsorted(*times, side="right")]
