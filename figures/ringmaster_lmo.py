"""Figures of "Ringmaster LMO" (Sadiev et al. 2026, arXiv 2605.18174), its small experiment, from
our own runs.

Eight workers, the i-th with compute times of sqrt(i) seconds and half-normal noise of 5 %; a
gradient whose delay reaches R is cancelled; R and the learning rate from the authors' grids. Their
task is a language model (NanoChat) and their numbers are not available: the figures show only ours,
on digits by default. To draw them::

    python -m figures ringmaster_lmo                            # in a clone
    asyncsim figures ringmaster_lmo --results results           # installed
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, over_seeds, summary_of
from asyncsim.base.errors import InputError
from asyncsim.clusters.policy import as_policy
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_curve, evaluation_curve
from asyncsim.drawing.paper import Drawing, Paper, Study
from asyncsim.study.finished import Finished

#: The authors' limits of the delay and learning rates, and smaller rates for a smaller task.
LIMITS, RATES = (1, 2, 4, 8, 16), (0.0016, 0.008, 0.04, 0.2, 1, 5)
WORKERS = 8
_COLUMNS = ("method.policy", "method.learning_rate", "train_loss", "simulated_seconds")


def loss(finished: Finished) -> Figure:
    """Draw the training loss against simulated time, for each R at its best learning rate.

    Means and ranges of the seeds; a panel for Muon's steps and one for plain steps.
    """
    table = _table(finished)
    figure, panels = look.new_figure(look.DOUBLE, 2.9, table["steps"].nunique(), sharey=True)
    ends = {}
    for axes, (steps, rows) in zip(panels, table.groupby("steps", sort=False), strict=True):
        shades = look.shades(sorted(rows["limit"].unique()))
        for limit, runs_of_limit in rows.groupby("limit"):
            rate = _means(runs_of_limit).idxmin()
            best = runs_of_limit[runs_of_limit["method.learning_rate"] == rate]
            runs = [finished.run(folder) for folder in best["run_folder"]]
            ends[f"{steps} with R = {limit}"] = best["train_loss"].agg(["mean", "min", "max"])
            appearance = look.Look(shades[limit].color, "-", f"R = {limit}, \u03b3 = {rate:g}")
            draw_curve(axes, evaluation_curve(runs), appearance, "time")
        axes.set_yscale("log")
        axes.set_xlim(0, table["simulated_seconds"].max())
        axes.set_xlabel("simulated time (s)")
        axes.set_title(steps)
        axes.legend()
    panels[0].set_ylabel("training loss")
    figure.set_label(findings.best(pd.DataFrame(ends).T, "training loss at the end"))
    seeds = over_seeds(table["seed"].nunique())
    layout.title(
        figure, f"limits R of the delay, each at its best rate; {_setting(finished)}; {seeds}"
    )
    return figure


def grid(finished: Finished) -> Figure:
    """Draw the training loss at the end against the learning rate, for each R: means over seeds."""
    table = _table(finished)
    figure, panels = look.new_figure(look.DOUBLE, 2.9, table["steps"].nunique(), sharey=True)
    rates = sorted(table["method.learning_rate"].unique())
    for axes, (steps, rows) in zip(panels, table.groupby("steps", sort=False), strict=True):
        shades = look.shades(sorted(rows["limit"].unique()))
        for limit, runs_of_limit in rows.groupby("limit"):
            means, shade = _means(runs_of_limit), shades[limit]
            axes.plot(
                means.index,
                means,
                color=shade.color,
                marker=shade.marker,
                markersize=3.5,
                label=f"R = {limit}",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        layout.ticks_at(axes.xaxis, rates)
        axes.set_xlabel("learning rate \u03b3")
        axes.set_title(steps)
    panels[0].set_ylabel("training loss at the end")
    losses = {
        f"{steps} with R = {limit} at rate {_means(runs).idxmin():g}": _means(runs).min()
        for (steps, limit), runs in table.groupby(["steps", "limit"], sort=False)
    }
    lowest = min(losses, key=lambda name: losses[name])
    figure.set_label(f"The training loss ends lowest for {lowest}: {number_text(losses[lowest])}.")
    panels[0].legend()
    seeds = over_seeds(table["seed"].nunique(), "means over")
    layout.title(figure, f"limits R of the delay and learning rates; {_setting(finished)}; {seeds}")
    return figure


def _table(finished: Finished) -> pd.DataFrame:
    """Return the runs of the two methods, with their limits of the delay and kinds of steps."""
    finished.require(_COLUMNS)
    kinds = {"ringmaster_lmo": "Muon (Ringmaster LMO)", "ringmaster": "plain (Ringmaster)"}
    table = finished.summary
    steps = table["method"].str.partition("(")[0].map(kinds)
    table = table.assign(steps=steps).dropna(subset=["steps"])
    if table.empty:
        raise InputError(
            f"folder = {str(finished.folder)!r}: has no runs of ringmaster_lmo; {finished.remedy}"
        )
    limits = [as_policy(policy).limit for policy in table["method.policy"]]
    return table.assign(limit=limits)


def _means(rows: pd.DataFrame) -> Any:
    """Return the mean loss by learning rate; a diverged seed makes it infinite."""
    losses = rows["train_loss"].where(np.isfinite(rows["train_loss"]), np.inf)
    return losses.groupby(rows["method.learning_rate"]).mean()


def _setting(finished: Finished) -> str:
    config = finished.config
    return f"{config['problem']}, {counted(config['workers'], 'worker')}"


def _options() -> str:
    """Return the options of the study: the authors' cluster and grids."""
    laws = [f"halfnormal({i**0.5:.4g}, {0.05 * i**0.5:.3g})" for i in range(1, WORKERS + 1)]
    limits = f"[{', '.join(f'cancel_stale({limit})' for limit in LIMITS)}]"
    return (
        f'--workers {WORKERS} --compute "[{", ".join(laws)}]" --service 0 '
        f'--methods "ringmaster_lmo(policy={limits})" "ringmaster(policy={limits})" '
        f"--tune {' '.join(f'{rate:g}' for rate in RATES)} --time-budget 100 "
        "--measure train_loss --evaluate-every 1 --seeds 2"
    )


#: The figures by their names.
FIGURES = {
    "loss": Drawing("lmo", "training loss against simulated time, by R", loss),
    "grid": Drawing("lmo", "training loss at the end by R and learning rate", grid),
}

PAPER = Paper(
    "ringmaster_lmo",
    summary_of(__doc__),
    {"lmo": Study("compare", "on two cores about 2 min", _options())},
    FIGURES,
)
draw, draw_study, main = PAPER.draw, PAPER.draw_study, PAPER.main
