"""Figures of "Leader Stochastic Gradient Descent" (Teng et al. 2019, arXiv 1905.10395) from our own
runs.

Drawn from the results of the study ``leaders``, which draws them itself. To draw them again::

    python -m figures lsgd                                   # in a clone
    asyncsim figures lsgd --results results                  # installed

The paper's curves are not available as numbers, so the figures show only ours.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import summary_of
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import Drawing, Paper, Study, setting
from asyncsim.replays.run import leaders
from asyncsim.study.finished import Finished, figures
from asyncsim.study.results import RANKING, cell_options


def leaderships(finished: Finished) -> Figure:
    """Draw each worker's share of LSGD's elections, at each period; means over the seeds."""
    rows = _elections(finished)
    workers = sorted(rows["workers"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.6, len(workers))
    shades = look.shades(sorted(rows["window"].unique()))
    for axes, n in zip(panels, workers, strict=True):
        for window, group in rows[rows["workers"] == n].groupby("window"):
            runs = [finished.run(name) for name in group["run_folder"]]
            won = [
                np.bincount(leaders(run.commits, n), minlength=n) / len(run.commits) for run in runs
            ]
            # Sorted within each seed, because its workers are interchangeable.
            shares = np.mean([np.sort(wins)[::-1] for wins in won], axis=0)
            shade, kept = shades[window], group["kept"].mean()
            retention = "one election" if np.isnan(kept) else f"kept in {kept:.0%}"
            label = f"period {window}: {retention}"
            axes.plot(
                range(1, n + 1),
                shares,
                color=shade.color,
                marker=shade.marker,
                markersize=3.2,
                label=label,
            )
        layout.whole_ticks(axes.xaxis)
        axes.axhline(1 / n, color=look.BLACK, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, None)
        axes.set_xlabel("workers, by how often they led")
        axes.set_title(f"n = {n}", fontsize=8)
        axes.legend()
    panels[0].set_ylabel("share of elections")
    figure.set_label(
        f"With {n} workers and period {window} the most frequent leader wins {shares[0]:.0%} "
        f"of the elections; equal workers would win {1 / n:.0%} each."
    )
    about = "LSGD's one leader; dotted: 1/n; kept: the leader stays"
    finished = finished._replace(summary=rows)
    layout.title(figure, setting(finished, about, statistic="means over"))
    return figure


def identities(finished: Finished) -> Figure:
    """Draw LSGD's single leader over time, of the first seed, by workers and period."""
    rows = _elections(finished)
    counts, windows = (sorted(rows[name].unique()) for name in ("workers", "window"))
    size = (look.DOUBLE, 0.7 + 1.5 * len(counts))
    figure, panels = look.new_figure(*size, len(windows), len(counts))
    clusters = rows.groupby(["workers", "window"])
    for axes, ((n, window), group) in zip(panels, clusters, strict=True):
        run = finished.run(group["run_folder"].iloc[0])
        axes.step(
            run.commits["commit_time"],
            leaders(run.commits, n),
            where="post",
            color=look.METHOD_LOOKS["lsgd"].color,
            linewidth=0.6,
        )
        axes.set_ylim(-0.5, n - 0.5)
        layout.whole_ticks(axes.yaxis)
        axes.set_title(f"n = {n}, period {window}", fontsize=8)
    for axes in panels[-len(windows) :]:
        axes.set_xlabel("simulated time (s)")
    for axes in panels[:: len(windows)]:
        axes.set_ylabel("leader")
    changed = np.mean(np.diff(leaders(run.commits, n)) != 0)
    figure.set_label(
        f"With {n} workers and period {window} the leader changes at "
        f"{changed:.0%} of the elections."
    )
    layout.title(figure, f"LSGD's one leader over time; {finished.config['problem']}, first seed")
    return figure


def _elections(finished: Finished) -> pd.DataFrame:
    """Return the runs of LSGD with a single leader, at the best rate of each cluster; raise
    InputError if there are none.
    """
    best = finished.table(RANKING)
    keys = [name for name in (*cell_options(finished.config), "method") if name in best]
    runs = finished.summary.merge(best[keys])
    runs = runs[runs["method"] == "lsgd"]
    if runs.empty:
        raise InputError(f"folder = {str(finished.folder)!r}: has no runs of lsgd")
    return runs if "window" in runs else runs.assign(window=finished.config["window"])


comparison = figures("comparison")
#: The figures by their names.
FIGURES = {
    "curves": Drawing(
        "leaders", "error against simulated time, by workers and period", comparison.curves
    ),
    "rows": Drawing("leaders", "accuracy at the end by communication period", comparison.rows),
    "leaders": Drawing("leaders", "how often each worker led", leaderships),
    "identity": Drawing("leaders", "which worker led, over time", identities),
    "completion": Drawing("completion", "loss of completing a matrix over time", comparison.curves),
}

PAPER = Paper(
    "lsgd",
    summary_of(__doc__),
    {
        "leaders": Study(
            "leaders", "on two cores about 5 min with small; paper is an accelerator's work"
        ),
        "completion": Study(
            "leaders",
            "less than 1 min",
            '--problem "matrix_completion" --workers 8 --window 1 --tune 0.3 '
            '--methods "lgd(pull=0.1)" "easgd(beta=0.9)" --gradients 200 --target 0.01 --seeds 3 '
            "--evaluate-every 2 --x64",
        ),
    },
    FIGURES,
)
draw, draw_study = PAPER.draw, PAPER.draw_study
