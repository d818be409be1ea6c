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

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import layout, look
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
    tables: dict[str, list[pd.DataFrame]] = {}
    for method, name in zip(summary["method"], summary["folder"], strict=True):
        tables.setdefault(method, []).append(finished.table(f"{name}/agreement.csv"))
    columns = len(tables)
    width = max(look.SINGLE, min(look.DOUBLE, 1.2 + 1.6 * columns))
    figure, axes = look.new_figure(width, 3.9, columns, 2, sharex=True, sharey=True)
    for column, (method, runs) in enumerate(tables.items()):
        label = look.looks([method])[method].label
        for row, quantity in enumerate(("loss", "params")):
            panel = axes[row * columns + column]
            _panel(
                panel, runs, quantity, float(summary["bar"].iloc[0]), _EQUAL[_precision(summary)]
            )
            panel.set_title(label if row == 0 else "")
    for row, text in enumerate(("losses differ by", "parameters differ by")):
        axes[row * columns].set_ylabel(text)
    equal, top = _EQUAL[_precision(summary)], axes[0].get_ylim()[1]
    decades = np.arange(np.log10(equal) + 2, np.log10(top))
    decades = decades[:: max(1, round(len(decades) / 5))]
    # Shared by all panels. Equality has a separate tick below the scale.
    axes[0].set_yticks(
        [equal, *10**decades], ["equal", *(f"$10^{{{decade:.0f}}}$" for decade in decades)]
    )
    axes[0].set_ylim(equal / 4, top)
    for panel in axes:
        panel.minorticks_off()
        panel.axhline(10 * equal, color=look.GREY, lw=0.4)
    for panel in axes[columns:]:
        panel.set_xlabel("commits")
        layout.whole_ticks(panel.xaxis, "auto")
    recordings = (
        f"{len(summary)} recordings of real processes"
        if len(summary) > 1
        else "a recording of real processes"
    )
    largest = max(table["loss_free"].max() for runs in tables.values() for table in runs)
    figure.set_label(
        f"Replays agree with {summary['holds'].sum()} of {counted(len(summary), 'recording')} "
        f"within the bar of {summary['bar'].iloc[0]:g}, up to where round-off may exceed it; "
        f"losses of free replays differ by at most {largest:.1g}."
    )
    about = f"Differences between {recordings} and the replays of their order"
    layout.finish(figure, f"{about}, {_precision(summary)}", 2 if columns > 2 else 1)
    return figure


def _precision(summary: pd.DataFrame) -> str:
    return str(summary["precision"].iloc[0])


def _panel(axes: Axes, runs: list[pd.DataFrame], quantity: str, bar: float, equal: float) -> None:
    """Draw the differences of each recording."""
    for name, (color, label) in _REPLAYS.items():
        column = f"{quantity}_{name}"
        curves = [table.dropna(subset=column) for table in runs]
        for number, table in enumerate(curves):
            drawn = np.clip(table[column], equal, None)
            legend_label = label if number == 0 else None
            line = "none" if quantity == "loss" else "-"
            axes.plot(
                table["commit"],
                drawn,
                color=color,
                label=legend_label,
                marker=".",
                mew=0,
                ms=3,
                ls=line,
                lw=0.6,
            )
    axes.axhline(bar, color=look.BLACK, ls="--", lw=0.8, label="bar")
    axes.set_yscale("log")


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
    middle = table["simulated_share"].to_numpy()
    spread = np.abs(np.array([table["simulated_low"], table["simulated_high"]]) - middle)
    points: dict[str, Any] = {"color": look.BLACK, "fmt": "o", "ms": 3, "elinewidth": 0.8}
    axes.errorbar(worker, middle, yerr=spread, label="simulated: mean and range", **points)
    layout.whole_ticks(axes.xaxis)


draw = drawer("real", _COLUMNS, agreement=agreement, fairness=fairness)
