"""FIFO against lowest rank first: shares of commits, staleness and losses."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import Curve, draw_band, draw_curves
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

from .panels import (
    LOSS,
    MOST_LOSS,
    at_rate,
    chosen,
    finish,
    log_axis,
    loss,
    one_cluster,
    setting,
    values_of,
)

#: Label, colour, marker and line of each discipline; the first is the authors' program's.
_LOOKS = {
    "fifo": ("first come, first served", look.BLACK, "o", "-"),
    "lowest_rank": ("lowest rank first", look.PURPLE, "s", "--"),
    "random": ("random order", look.ORANGE, "^", ":"),
}
#: Above this multiple of the median, a mean staleness would flatten all others on a linear axis.
_FAR = 10


def discipline(results: Finished) -> Figure:
    """Draw shares and staleness by rank, and the losses by discipline, for the most workers."""
    results = one_cluster(at_rate(results))
    n = int(results.summary["workers"].iloc[0])
    ranks = results.table(
        "ranks.csv", ["discipline", "workers", "seed", "worker", "share", "staleness_mean"]
    )
    ranks = ranks[ranks["workers"] == n]
    names = [name for name in _LOOKS if name in values_of(results, "discipline")]
    rows = max(2, len(names)) if look.is_narrow(2) else 1
    figure = look.LiteralFigure(figsize=(look.DOUBLE, 4.9 * rows), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    top, below = halves
    share, staleness = top.subplots(min(2, rows), 2 // min(2, rows), sharex=True)
    _by_rank(share, ranks.assign(share=ranks["share"] * n), "share", "commits of a worker / mean")
    share.axhline(1, color=look.GREY, linewidth=0.5, zorder=0)
    _by_rank(staleness, ranks, "staleness_mean", axis_of("staleness_mean"))
    means = ranks["staleness_mean"].dropna()
    if means.max() > _FAR * means.median() > 0:  # a worker that was served once, after a long wait
        staleness.set_yscale("log")
        staleness.set_ylim(max(0.5, means.min() / 1.3), 1.3 * means.max())
    never = ranks[ranks["share"] == 0].groupby(["discipline", "seed"]).size()
    if len(never):
        staleness.set_title(
            f"without workers that never commit: up to {never.max()} of {n}", fontsize=7
        )
    share.legend(loc="best")
    grid = (1, len(names)) if rows == 1 else (len(names), 1)
    panels = np.atleast_1d(below.subplots(*grid, sharex=True, sharey=True))
    curves = {name: _losses(chosen(results, discipline=name)) for name in names}
    log_axis(
        panels[0],
        [curve for by_method in curves.values() for curve in by_method.values()],
        limit=MOST_LOSS,
    )
    for axes, name in zip(panels, names, strict=True):
        labels = {
            method: appearance.label for method, appearance in look.looks(curves[name]).items()
        }
        draw_curves(axes, curves[name], labels, "time")
        axes.set_title(f"losses, {_LOOKS[name][0]}")
        axes.set_ylabel(LOSS)
        axes.label_outer()
    shares = n * ranks.groupby(["discipline", "worker"])["share"].mean().unstack()
    texts = [
        f"{number_text(shares.loc[name].max())} and {number_text(shares.loc[name].min())} times "
        f"the mean number of commits with {_LOOKS[name][0]}"
        for name in names
    ]
    figure.set_label(f"The busiest and the idlest worker make {'; '.join(texts)}.")
    finish(
        figure,
        panels[0],
        setting(results, f"order of the queue, {counted(n, 'worker')}"),
        columns=4,
    )
    return figure


def _by_rank(axes: Axes, ranks: pd.DataFrame, column: str, label: str) -> None:
    """Draw a column by worker, mean and range of the seeds; workers that never commit are left
    out.
    """
    for name in (name for name in _LOOKS if name in set(ranks["discipline"])):
        legend, color, marker, line = _LOOKS[name]
        of_rank = (
            ranks[ranks["discipline"] == name].groupby("worker")[column].agg(["mean", "min", "max"])
        )
        draw_band(axes, of_rank, color, marker=marker, ms=2.5, linestyle=line, label=legend)
    axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)  # room for the whole of the highest marker
    axes.set_xlabel("rank (worker index)")
    layout.whole_ticks(axes.xaxis)
    axes.set_ylabel(label)


def _losses(results: Finished) -> dict[str, Curve]:
    n = int(results.summary["workers"].iloc[0])
    return {
        name: loss(chosen(results, method=name).runs(), n)
        for name in dict.fromkeys(results.summary["method"])
    }
