"""Figures of the study of real processes, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study real``, which draws these figures itself. To draw them
again::

    python -m figures results/real              # in a clone
    asyncsim figures results/real     # installed

``agreement``: differences between each recording's losses and parameters and its replays, commit by
commit, and the bar.

``fairness``: each worker's share of the commits, of real processes and in the simulator, by
discipline.
"""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_SHARED = ("discipline", "worker", "share", "simulated_share", "simulated_low", "simulated_high")
_COLUMNS = ("method", "discipline", "precision", "folder")
#: The replays in the order of drawing: colour and label.
_REPLAYS = {
    "perturbed": (look.GREY, "perturbed by round-off, to the free one"),
    "free": (look.VERMILLION, "free, to the recording"),
}
#: Position of exact equality on the axis, below one unit of round-off.
_EQUAL = {"float32": 1e-10, "float64": 1e-18}
_TITLES = {
    "fifo": "first come, first served",
    "lowest_rank": "lowest rank first",
    "random": "random order",
}


def agreement(finished: Finished) -> Figure | None:
    """Draw the differences of every commit: losses above, parameters below, a column for each
    method.
    """
    summary = finished.summary
    if "holds" not in summary:
        return None
    precision, bar = summary["precision"].iloc[0], summary["bar"].iloc[0]
    looks, equal = look.looks(dict.fromkeys(summary["method"])), _EQUAL[precision]
    width = max(look.SINGLE, min(look.DOUBLE, 1.2 + 1.6 * len(looks)))
    figure, axes = look.new_figure(width, 3.9, len(looks), 2, sharex=True, sharey=True)
    panels = itertools.product({"loss": "losses", "params": "parameters"}.items(), looks)
    for panel, ((quantity, words), method) in zip(axes, panels, strict=True):
        for name in summary.loc[summary["method"] == method, "folder"]:
            _draw_differences(panel, finished.table(f"{name}/agreement.csv"), quantity, equal)
        panel.axhline(bar, color=look.BLACK, ls="--", lw=0.8, label="bar")
        panel.axhline(10 * equal, color=look.GREY, lw=0.4)
        panel.set_yscale("log")
        panel.set_title(looks[method].label)
        panel.set_ylabel(f"{words} differ by")
        panel.set_xlabel("commits")
        layout.whole_ticks(panel.xaxis, "auto")
    # Shared by all panels. Equality has a separate tick below the scale.
    top = axes[0].get_ylim()[1]
    decades = 10.0 ** np.arange(np.log10(equal) + 2, np.log10(top), 2)
    axes[0].set_yticks([equal, *decades], ["equal", *map("{:.0e}".format, decades)])
    axes[0].set_ylim(equal / 4, top)
    recordings = counted(len(summary), "recording")
    figure.set_label(
        f"Replays agree with {summary['holds'].sum()} of {recordings} within the bar of {bar:g}, "
        "up to where round-off may exceed it."
    )
    about = f"differences between {recordings} of real processes and the replays of their order"
    layout.finish(figure, f"{about}, {precision}", 2)
    return figure


def _draw_differences(axes: Axes, table: pd.DataFrame, quantity: str, equal: float) -> None:
    """Draw the differences of a recording."""
    for name, (color, label) in _REPLAYS.items():
        rows = table.dropna(subset=f"{quantity}_{name}")
        style: dict[str, Any] = {"color": color, "label": label, "marker": ".", "mew": 0, "ms": 3}
        line = "none" if quantity == "loss" else "-"
        drawn = rows[f"{quantity}_{name}"].clip(lower=equal)
        axes.plot(rows["commit"], drawn, linestyle=line, linewidth=0.6, **style)


def fairness(finished: Finished) -> Figure | None:
    """Draw each worker's share of the commits, a panel for each discipline."""
    if not (finished.folder / "shares.csv").exists():
        return None
    shares = finished.table("shares.csv", _SHARED)
    disciplines = list(dict.fromkeys(shares["discipline"]))
    figure, axes = look.new_figure(
        max(look.SINGLE, 2.4 * len(disciplines)), 2.4, len(disciplines), sharey=True
    )
    for panel, discipline in zip(axes, disciplines, strict=True):
        _shares_panel(panel, shares[shares["discipline"] == discipline])
        panel.set_title(_TITLES.get(discipline, discipline))
        panel.set_xlabel("worker")
    axes[0].set_ylabel("share of the commits")
    ranges = [
        f"{rows['share'].min():.0%} to {rows['share'].max():.0%} of the commits with "
        f"{_TITLES.get(discipline, discipline)}"
        for discipline, rows in shares.groupby("discipline", sort=False)
    ]
    figure.set_label(f"Each worker makes {'; '.join(ranges)}.")
    about = "Share of the commits by the order in which the server serves waiting workers"
    layout.finish(figure, about, 2)
    return figure


def _shares_panel(axes: Axes, table: pd.DataFrame) -> None:
    worker = table["worker"].to_numpy()
    axes.bar(worker, table["share"], width=0.7, color=look.SKY, label="real processes")
    simulated = table[["simulated_share", "simulated_low", "simulated_high"]].T.to_numpy()
    label = "simulated: mean and range"
    draw_points(axes, worker, *simulated, color=look.BLACK, label=label)
    layout.whole_ticks(axes.xaxis)


draw = drawer("real", _COLUMNS, agreement=agreement, fairness=fairness)
