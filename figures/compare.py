"""The figure of a comparison of methods, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study compare``, which draws this itself. To draw it again::

    python -m figures.compare results/compare              # in a clone
    python -m asyncsim.figures.compare results/compare     # installed

``loss``: training loss of every method, at its best learning rate, against simulated time and against gradients
computed.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim import look
from asyncsim.drawing import draw_folder
from asyncsim.errors import InputError
from asyncsim.sweep import Finished, read
from asyncsim.wording import counted, over_seeds


def draw(folder: str | os.PathLike) -> list[Path]:
    """Draw the figure of a folder of results, into the folder.

    Raises
    ------
    InputError
        There are no results, or a file cannot be written.
    """
    folder = Path(folder)
    finished = read(folder, "compare")
    try:
        table = pd.read_csv(folder / "comparison.csv")
    except (OSError, ValueError) as error:
        raise InputError(f"folder = {str(folder)!r}: no table of the comparison ({error}); run it again") from error
    with look.style():
        return look.save(loss(finished, table), folder / "loss")


def loss(finished: Finished, table: pd.DataFrame) -> Figure:
    """Draw the training loss of every method at its best rate: mean and range of the seeds.

    The axis of time ends with the traces of the study's own number of workers.
    """
    figure, panels = look.new_figure(look.DOUBLE, 3.0, 2, sharey=True)
    looks = look.looks(table["method"])
    for row in table.itertuples():
        rows = finished.rows(method=row.method)
        # Without a rate of that name there is only one.
        same = rows if pd.isna(row.learning_rate) else rows[rows["method.learning_rate"] == row.learning_rate]
        curves = [_curve(finished, run_folder, file) for run_folder, file in same[["run_folder", "trace_file"]].values]
        length = min(len(curve) for curve in curves)
        values = np.array([curve["train_loss"][:length] for curve in curves])
        for axes, against in zip(panels, ("commit_time", "computed"), strict=True):
            x = np.mean([curve[against][:length] for curve in curves], axis=0)
            one = looks[row.method]
            axes.fill_between(x, values.min(0), values.max(0), color=one.color, alpha=0.2, linewidth=0)
            axes.plot(x, values.mean(0), color=one.color, linestyle=one.line, label=one.label)
    for axes, label in zip(panels, ("simulated time (s)", "gradients computed, also those thrown away"), strict=True):
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_xlim(0, None)
    # A lone worker needs many times longer; what it needs until the target is in the table.
    summary = finished.summary
    panels[0].set_xlim(0, summary["simulated_seconds"][summary["own_workers"] == summary["workers"]].max())
    panels[0].set_ylabel("loss on the training data")
    handles, labels = panels[0].get_legend_handles_labels()
    look.legend_below(figure, handles, labels, 4)
    seeds = over_seeds(int(table["seeds"].max()))
    config = finished.config
    title = f"{config['problem']}, {counted(config['workers'], 'worker')}; {seeds}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=8)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figure of a folder; return the exit code (2 for bad input)."""
    return draw_folder("compare", draw, arguments)


def _curve(finished: Finished, run_folder: str, trace_file: str) -> pd.DataFrame:
    """Return a run's evaluations with the gradients computed by then."""
    evaluations = finished.run(run_folder).evaluations
    trace = finished.trace(trace_file)
    done = np.searchsorted(trace.frame["commit_time"].to_numpy(), evaluations["commit_time"].to_numpy(), side="right")
    computed = np.r_[0, trace.frame["local_steps"].cumsum()]
    return evaluations.assign(computed=computed[done])


if __name__ == "__main__":
    sys.exit(main())
