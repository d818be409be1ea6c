"""The figure of the study of mixed groups, from the folder of results that it wrote.

The data come from ``asyncsim study mixed_groups``, which draws this itself. To draw it again::

    python -m figures results/mixed_groups      # in a clone
    asyncsim figures results/mixed_groups       # installed

``mixed_groups``: the contrasts of the final reward with their intervals, against zero; and the mean
of uncorrected updates along the gradient of the reward, measured, by the law of mixed groups, and
by that law without its drift.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds, wrapped
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import CONFIDENCE

#: Characters of a line beside an axis.
_NAME_WIDTH = 24


def mixed_groups(finished: Finished) -> Figure:
    """Draw the contrasts with their intervals, and the measured ascent beside the law."""
    contrasts = finished.table(
        "contrasts.csv", ("contrast", "expected", "difference", "low", "high")
    )
    columns = ("law", "mix", "method", "seeds", "ascent", "ascent_sd", "ascent_law", "drift")
    rewards = finished.table("rewards.csv", columns)
    uncorrected = rewards[rewards["method"] == "none"].reset_index(drop=True)
    figure, (top, bottom) = look.new_figure(
        look.SINGLE, 5.6, rows=2, height_ratios=(2 * len(contrasts), len(uncorrected))
    )
    _draw_contrasts(top, contrasts)
    _draw_ascents(bottom, uncorrected)
    fresh = 1 - 1 / finished.config["group"]
    bottom.set_xlabel(f"update along the gradient\n(fresh: {fresh:.2f})")
    layout.legend_below(figure, *bottom.get_legend_handles_labels(), 1)
    config = finished.config
    staleness = f"token bandit, mean staleness {config['staleness']}, groups of {config['group']}"
    seeds = over_seeds(int(finished.summary["seed"].nunique()), "means over")
    intervals = (
        f"contrasts, with their predictions: intervals that hold together with {CONFIDENCE:.0%}"
    )
    differ = contrasts[(contrasts["low"] > 0) | (contrasts["high"] < 0)]
    rows = [f"{row.contrast} by {number_text(row.difference)}" for row in differ.itertuples()]
    off = (uncorrected["ascent"] - uncorrected["ascent_law"]).abs().max()
    figure.set_label(
        f"{len(rows)} of {len(contrasts)} contrasts of the reward differ from zero"
        f"{': ' if rows else ''}{', '.join(rows)}; measured ascents are within "
        f"{number_text(off, 2)} of the law."
    )
    title_parts = [staleness, seeds, "each at its best rate", intervals]
    layout.title(figure, "; ".join(title_parts))
    return figure


def _draw_contrasts(axes: Axes, contrasts: pd.DataFrame) -> None:
    places = np.arange(len(contrasts))
    beyond = [
        contrasts["difference"] - contrasts["low"],
        contrasts["high"] - contrasts["difference"],
    ]
    axes.errorbar(
        contrasts["difference"],
        places,
        xerr=beyond,
        fmt="o",
        color=look.BLUE,
        markersize=3.5,
        capsize=2,
    )
    axes.axvline(0, color=look.BLACK, linewidth=0.6)
    names = [
        wrapped(f"{row.contrast}: {row.expected}", _NAME_WIDTH) for row in contrasts.itertuples()
    ]
    axes.set_yticks(places, names)
    axes.set_ylim(len(contrasts) - 0.5, -0.5)
    axes.set_xlabel("difference of final rewards")


def _draw_ascents(axes: Axes, uncorrected: pd.DataFrame) -> None:
    places = np.arange(len(uncorrected))
    error = uncorrected["ascent_sd"] / np.sqrt(uncorrected["seeds"])
    style: dict[str, Any] = {"color": look.BLUE, "markersize": 3.5, "capsize": 2, "linestyle": ""}
    axes.errorbar(
        uncorrected["ascent"],
        places,
        xerr=error,
        marker="o",
        label="measured, ± 1 standard error",
        **style,
    )
    axes.plot(
        uncorrected["ascent_law"],
        places,
        "D",
        color=look.VERMILLION,
        markersize=5,
        fillstyle="none",
        label="law of mixed groups",
    )
    axes.plot(
        uncorrected["ascent_law"] - uncorrected["drift"],
        places,
        "|",
        color=look.BLACK,
        markersize=7,
        label="law without the drift of mixed groups",
    )
    axes.set_yticks(
        places, [f"{row.law.replace('_', ' ')} by {row.mix}" for row in uncorrected.itertuples()]
    )
    axes.set_ylim(len(uncorrected) - 0.5, -0.5)


draw = drawer("mixed_groups", ("law", "mix", "method"), mixed_groups=mixed_groups)
