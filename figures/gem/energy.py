"""The central variable's energy relative to the proxy's, by number of workers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_lines, draw_ranges
from asyncsim.drawing.paper import setting
from asyncsim.study.finished import Finished

from .panels import (
    at_rate,
    chosen,
    finish,
    methods_of,
    values_of,
    with_all_workers,
)

#: Ratios below this are drawn here: many weights do not move at all, which a logarithm cannot show.
_LOWEST_RATIO = 1e-4
_SHARES = {
    "clipped_low": ("clip binds at 0", look.PURPLE, "o", "-"),
    "clipped_high": ("clip binds at its upper end", look.ORANGE, "s", "--"),
    "opposite_sign": ("opposite signs of drift and update", look.GREEN, "^", "-."),
}


def by_workers(results: Finished) -> Figure:
    """Draw central over proxy energy against n, for the whole vector and by weight of GEM, and
    shares of weights.
    """
    results = with_all_workers(at_rate(results))
    looks = look.looks(methods_of(results))
    figure, (vector, weights, shares) = look.new_figure(look.DOUBLE, 2.9, 3, sharex=True)
    draw_lines(vector, results.summary, "workers", "energy_ratio", looks, average="median")
    vector.set_title("whole vector")
    weights.set_title("each weight, GEM")
    shares.set_title("where GEM cannot match")
    if "gem" in looks:
        runs = chosen(results, method="gem").summary
        _draw_weights(weights, runs, look.METHOD_LOOKS["gem"])
        for quantity, (label, color, marker, line) in _SHARES.items():
            style = {"color": color, "linestyle": line, "marker": marker, "ms": 3, "label": label}
            draw_ranges(shares, runs, "workers", quantity, "median", **style)
        shares.set_ylim(0, 1)
        shares.set_ylabel("share of the weights")
    else:
        for axes in (weights, shares):
            layout.say_inside(axes, "no run of GEM")
    for axes in (vector, weights):
        axes.set_yscale("log")
        axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0)
    vector.set_ylabel("central / proxy energy")
    for axes in (vector, weights, shares):
        axes.set_xscale("log")
        layout.ticks_at(axes.xaxis, values_of(results, "workers"))
        axes.set_xlabel("workers n")
    figure.set_label(_finding(results, looks, values_of(results, "workers")[-1]))
    text = "central against proxy energy, medians over the last tenth of the runs"
    finish(figure, setting(results, text, statistic="median and range of"), 3)
    return figure


def _finding(results: Finished, looks: Mapping[str, look.Look], n: int) -> str:
    """State the late ratio of the energies of each method with ``n`` workers."""
    medians = results.rows(workers=n).groupby("method")["energy_ratio"].median()
    ratios = [
        f"{number_text(medians[name])} for {appearance.label}"
        for name, appearance in looks.items()
        if np.isfinite(medians.get(name, np.nan))
    ]
    where = f"With {counted(n, 'worker')} central over proxy energy ends at"
    return f"{where} {', '.join(ratios)}." if ratios else ""


def _draw_weights(axes: Axes, runs: pd.DataFrame, appearance: look.Look) -> None:
    """Draw the distribution of the ratio over the weights: median, middle half and middle nine
    tenths.
    """
    ratios = runs.filter(regex="^(workers|weight_ratio_)")
    medians = ratios.groupby("workers").median().clip(lower=_LOWEST_RATIO)
    for low, high, alpha in (("05", "95", 0.15), ("25", "75", 0.35)):
        band: dict[str, Any] = {"color": appearance.color, "alpha": alpha, "linewidth": 0}
        ends = (medians[f"weight_ratio_{end}"] for end in (low, high))
        label = f"{int(low)} to {high} % of the weights"
        axes.fill_between(medians.index, *ends, label=label, **band)
    style = appearance._replace(label="median").style
    axes.plot(medians.index, medians["weight_ratio_50"], marker="o", ms=3, **style)
