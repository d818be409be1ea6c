"""The central variable's energy relative to the proxy's, by number of workers."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_ranges
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import FINAL_SHARE

from .panels import (
    at_rate,
    finish,
    methods_of,
    setting,
    values_of,
    with_all_workers,
)

#: Ratios below this are drawn here: many weights do not move at all, which a logarithm cannot show.
_LOWEST_RATIO = 1e-4
_QUANTILES = [f"weight_ratio_{quantile}" for quantile in ("05", "25", "50", "75", "95")]
_SHARES = {
    "clipped_low": ("clip binds at 0", look.PURPLE, "o", "-"),
    "clipped_high": ("clip binds at {pi_max}", look.ORANGE, "s", "--"),
    "opposite_sign": ("opposite signs of drift and update", look.GREEN, "^", "-."),
}


def by_workers(results: Finished) -> Figure:
    """Draw central over proxy energy against n, for the whole vector and by weight of GEM, and
    shares of weights.
    """
    results = with_all_workers(at_rate(results))
    looks = look.looks(methods_of(results))
    figure, (vector, weights, shares) = look.new_figure(look.DOUBLE, 2.9, 3, sharex=True)
    for name, appearance in looks.items():
        style = {"marker": "o", "ms": 3, **appearance.style}
        rows = results.rows(method=name)
        draw_ranges(vector, rows, "workers", "energy_ratio", "median", **style)
    vector.set_title("whole vector")
    weights.set_title("each weight, GEM")
    shares.set_title("where GEM cannot match")
    of_gem = _late(results._replace(summary=results.rows(method="gem")))
    if len(of_gem):
        _draw_weights(weights, of_gem)
        _draw_shares(shares, of_gem, results)
    else:
        layout.say_inside(weights, "no run of GEM")
        layout.say_inside(shares, "no run of GEM")
    for axes in (vector, weights):
        axes.set_yscale("log")
        axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0)
    vector.set_ylabel("central / proxy energy")
    for axes in (vector, weights, shares):
        axes.set_xscale("log")
        layout.ticks_at(axes.xaxis, values_of(results, "workers"))
        axes.set_xlabel("workers n")
    for name in results.rows(status="diverged")["method"].unique():
        counts = results.rows(method=name, status="diverged")["workers"].unique()
        top = [vector.get_ylim()[1]] * len(counts)
        vector.plot(counts, top, color=looks[name].color, clip_on=False, **layout.DIVERGED)
    figure.set_label(_finding(results, looks, values_of(results, "workers")[-1]))
    text = "central against proxy energy, medians over the last tenth of the runs"
    finish(figure, setting(results, text, statistic="median and range of"), 3)
    return figure


def _finding(results: Finished, looks: Mapping[str, look.Look], n: int) -> str:
    """State the late ratio of the energies of each method with ``n`` workers."""
    rows = results.rows(workers=n).dropna(subset="energy_ratio")
    late = rows.groupby("method", sort=False)["energy_ratio"].median()
    ratios = [
        f"{number_text(late[name])} for {appearance.label}"
        for name, appearance in looks.items()
        if name in late
    ]
    where = f"With {counted(n, 'worker')} central over proxy energy ends at"
    return f"{where} {', '.join(ratios)}." if ratios else ""


def _late(results: Finished) -> pd.DataFrame:
    """Return the medians of each run over the last tenth of its diagnosed commits."""
    keys = ["workers", "method", "seed"]
    table = results.table("compliance.csv", (*_QUANTILES, *_SHARES)).merge(results.summary[keys])
    ends = table.groupby(keys)["worker_step"].transform("max")
    late = table[table["worker_step"] >= (1 - FINAL_SHARE) * ends]
    return late.groupby(keys, as_index=False).median(numeric_only=True)


def _draw_weights(axes: Axes, late: pd.DataFrame) -> None:
    """Draw the distribution of the ratio over the weights: median, middle half and middle nine
    tenths.
    """
    appearance = look.METHOD_LOOKS["gem"]
    ratios = late.groupby("workers")[_QUANTILES].median().clip(lower=_LOWEST_RATIO)
    for place, (alpha, label) in enumerate(((0.15, "5 to 95 %"), (0.35, "25 to 75 %"))):
        low, high = ratios.iloc[:, place], ratios.iloc[:, -1 - place]
        text = f"{label} of the weights"
        axes.fill_between(
            ratios.index, low, high, label=text, color=appearance.color, alpha=alpha, linewidth=0
        )
    style = appearance._replace(label="median").style
    axes.plot(ratios["weight_ratio_50"], marker="o", ms=3, **style)


def _draw_shares(axes: Axes, late: pd.DataFrame, results: Finished) -> None:
    """Draw the shares of GEM's weights where it cannot match the energies."""
    clipped_to = results.config.get("hyperparameters", {}).get("gem", {}).get("pi_max")
    pi_max = "its upper end" if clipped_to is None else f"{clipped_to:g}"
    for quantity, (label, color, marker, line) in _SHARES.items():
        style = {"color": color, "linestyle": line, "marker": marker, "ms": 3}
        text = label.format(pi_max=pi_max)
        draw_ranges(axes, late, "workers", quantity, "median", label=text, **style)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the weights")
