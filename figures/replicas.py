"""The figure of a study of replicas, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study replicas``, which draws this itself. To draw it
again::

    python -m figures results/replicas              # in a clone
    asyncsim figures results/replicas     # installed

``replicas``: test error, or training loss, against gradients, simulated time and communications of
a worker; each method at its best learning rate.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import Curve, curve_over_seeds, draw_curve
from asyncsim.drawing.look import Look
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

_COLUMNS = ("method", "learning_rate", "own_workers", "trace_file", "run_folder")
_LABELS = {
    "data_parallel": "data-parallel SGD",
    "averaging": "local SGD",
    "easgd": "EASGD, synchronous",
}


def replicas(finished: Finished) -> Figure:
    """Draw the three panels: mean and range of the seeds, a curve for each method."""
    config, table = (
        finished.config,
        finished.table("replicas.csv", ("method", "learning_rate", "seeds")),
    )
    looks = look.looks(table["method"])
    figure, panels = look.new_figure(look.DOUBLE, 2.9, 3, sharey=True)
    error = config["target_of"] == "test_accuracy"
    drawn = {}
    for row in table.itertuples():
        rows = finished.rows(method=row.method, learning_rate=row.learning_rate)
        if len(rows):
            drawn[row.method] = _curves(finished, rows, error)
    if not drawn:
        reason = "its summary.csv has no run of replicas.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {reason}; {finished.remedy}")
    looks |= {
        "data_parallel": Look(look.BLACK, "-", ""),
        "averaging": Look(look.ORANGE, (0, (5, 1, 1, 1)), ""),
    }
    looks = {
        name: appearance._replace(label=_LABELS.get(name, appearance.label))
        for name, appearance in looks.items()
        if name in drawn
    }
    for axes, along in zip(
        panels, ("gradients", "simulated time (s)", "communications of a worker"), strict=True
    ):
        axes.set_yscale("log")
        for name, curves in drawn.items():
            if along in curves:
                draw_curve(axes, curves[along], looks[name], "step")
        axes.axhline(
            1 - config["target"] if error else config["target"],
            color=look.BLACK,
            linewidth=0.6,
            zorder=0,
        )
        axes.set_xlabel(along)
    # Twice the time of the fastest method, as data-parallel SGD takes many times as long as the
    # rest; but until the last success in reaching the target.
    reached = table.get("time_to_target", pd.Series(dtype=float))
    ends = [float(np.nanmax(by_axis["simulated time (s)"].step)) for by_axis in drawn.values()]
    last = 1.05 * reached[np.isfinite(reached)].max()
    panels[1].set_xlim(0, np.fmax(2 * min(ends), last))
    panels[2].set_xscale("log")
    panels[0].set_xlim(0, None)
    panels[0].set_ylabel(axis_of("test_error" if error else "train_loss"))
    lines = [
        panels[0].plot([], [], color=looks[name].color, linestyle=looks[name].line)[0]
        for name in drawn
    ]
    layout.legend_below(figure, lines, [looks[name].label for name in drawn], 6)
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    workers = f"{counted(config['workers'], 'worker')}, period {config['window']}"
    labels = {name: appearance.label for name, appearance in looks.items()}
    subject = "methods at their best learning rates"
    runs = finished.summary.merge(table[["method", "learning_rate"]])
    named = runs["method"].map(labels)
    reached = runs.groupby(named)["time_to_target"]
    failure = findings.missed(runs, named, config)
    figure.set_label(
        findings.best(
            reached.agg(["mean", "min", "max"]), axis_of("time_to_target"), failure=failure
        )
    )
    layout.title(figure, "; ".join([subject, f"{config['problem']}, {workers}", seeds]))
    return figure


def _curves(finished: Finished, rows: pd.DataFrame, error: bool) -> dict[str, Curve]:
    """Return a method's curve along each axis; along communications only if it has any."""
    tables = [finished.run(name).evaluations for name in rows["run_folder"]]
    values = pd.concat(
        [
            1 - evaluations["test_accuracy"] if error else evaluations["train_loss"]
            for evaluations in tables
        ],
        axis=1,
    )
    values = values.where(np.isfinite(values))
    along = {}
    workers = int(rows["own_workers"].iloc[0])
    for name, column in (
        ("gradients", "gradients"),
        ("simulated time (s)", "commit_time"),
        ("", "commit"),
    ):
        steps = np.maximum.accumulate(
            pd.concat([evaluations[column] for evaluations in tables], axis=1).mean(axis=1)
        )
        if name:
            along[name] = curve_over_seeds(steps, steps, values, [])
        elif workers > 1:  # a logarithmic axis has no zero
            along["communications of a worker"] = curve_over_seeds(
                steps[1:], steps[1:] / workers, values[1:], []
            )
    return along


draw = drawer("replicas", _COLUMNS, replicas=replicas)
