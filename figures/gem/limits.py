"""Limits of stability of each method: the largest stable number of workers and learning rate."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import findings, layout, look
from asyncsim.study.finished import Finished

from .panels import finish, problem

_COLUMNS = ["method", "question", "at", "largest_stable", "smallest_unstable"]
_PANELS = {
    "workers": ("largest stable n", "learning rate \u03b7"),
    "learning_rate": ("largest stable \u03b7", "workers n"),
}
_TICKED = 4  #: Different limits that each get a tick.
_AROUND = 2.5  #: Factor by which the axis extends below and above a single limit.


def limits(results: Finished) -> Figure:
    """Draw the limits of each method: a bar from the largest stable to the smallest unstable
    value.
    """
    table = results.table("limits.csv", _COLUMNS)
    questions = [name for name in _PANELS if name in set(table["question"])]
    width = look.DOUBLE if len(questions) > 1 else look.SINGLE
    figure, panels = look.new_figure(width, 2.8, len(questions))
    for axes, question in zip(panels, questions, strict=True):
        rows, (label, at) = table[table["question"] == question], _PANELS[question]
        if rows["at"].nunique() == 1:
            _one_place(axes, rows)
            axes.set_xlabel(f"{label}, at {at} = {rows['at'].iloc[0]:g}")
            continue
        _panel(axes, rows)
        axes.set_ylabel(label)
        axes.set_xlabel(at)
    # Failed searches have no seeds.
    counts = table["seeds"].dropna().unique() if "seeds" in table else []
    seeds = f", {counted(int(counts[0]), 'seed')}" if len(counts) == 1 else ""
    text = (
        f"limits of stability, {problem(results)}{seeds}; bars end at the smallest unstable value"
    )
    nothing = (
        "; no mark: nothing stable found, or the search failed"
        if table["largest_stable"].isna().any()
        else ""
    )
    rows = table[table["question"] == questions[0]].dropna(subset="largest_stable")
    rows = rows[rows["at"] == rows["at"].max()]
    label, at = _PANELS[questions[0]]
    stable = [
        f"{row.largest_stable:.3g} for {look.looks(rows['method'])[row.method].label}"
        for row in rows.itertuples()
    ]
    if stable:
        where = f"at {at.rpartition(' ')[2]} = {rows['at'].iloc[0]:g} the {label} is"
        figure.set_label(findings.sentence(f"{where} {', '.join(stable)}"))
    finish(figure, panels[0], f"{text}; arrows: none found{nothing}")
    return figure


def _one_place(axes: Axes, table: pd.DataFrame) -> None:
    """Draw the limits at a single learning rate or number of workers: a row for each method."""
    axes.set_xscale("log")
    names = list(dict.fromkeys(table["method"]))
    looks = look.looks(names)
    for row, (name, appearance) in enumerate(looks.items()):
        stable, unstable = table.loc[
            table["method"] == name, ["largest_stable", "smallest_unstable"]
        ].iloc[0]
        marker = look.MARKERS[row % len(look.MARKERS)]
        axes.plot(
            [stable],
            [row],
            marker=marker,
            color=appearance.color,
            markersize=5,
            linestyle="none",
            label=appearance.label,
        )
        text, ends = f"{stable:.3g}", unstable
        if not np.isfinite(stable):
            axes.annotate(
                "nothing stable found",
                (0.02, row),
                xycoords=axes.get_yaxis_transform(),
                va="center",
            )
            continue
        if np.isfinite(unstable):
            axes.plot([stable, unstable], [row, row], color=appearance.color, linewidth=0.8)
            axes.plot([unstable], [row], "|", color=appearance.color, markersize=6)
            text += f" to {unstable:.3g}"
        else:
            axes.plot(
                [1.12 * stable],
                [row],
                marker=r"$\rightarrow$",
                color=appearance.color,
                markersize=8,
            )
            ends = 1.2 * stable
        axes.annotate(
            text, (ends, row), (6, 0), textcoords="offset points", va="center", fontsize=7
        )
    finite = table[["largest_stable", "smallest_unstable"]].to_numpy(float)
    finite = finite[np.isfinite(finite)]
    if len(finite):
        axes.set_xlim(finite.min() / 2, finite.max() * 4)
    axes.set_yticks(range(len(names)), [appearance.label for appearance in looks.values()])
    axes.set_ylim(len(names) - 0.5, -0.5)


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    names = list(dict.fromkeys(table["method"]))
    shift = 1.05 ** ((len(names) - 1) / 2)
    for turn, (name, appearance) in enumerate(look.looks(names).items()):
        rows = table[table["method"] == name].sort_values("at")
        # Side by side, as methods often have the same limits.
        x = rows["at"] * 1.05**turn / shift
        stable, unstable = rows["largest_stable"], rows["smallest_unstable"]
        style: dict[str, Any] = {"color": appearance.color, "markersize": 4}
        axes.plot(
            x,
            stable,
            marker=look.MARKERS[turn % len(look.MARKERS)],
            linestyle=appearance.line,
            label=appearance.label,
            **style,
        )
        bounded = unstable.notna() & stable.notna()
        axes.vlines(
            x[bounded], stable[bounded], unstable[bounded], color=appearance.color, linewidth=0.8
        )
        axes.plot(x[bounded], unstable[bounded], "_", **style)
        open_ended = unstable.isna() & stable.notna()
        axes.plot(
            x[open_ended],
            stable[open_ended] * 1.12,
            marker=r"$\uparrow$",
            linestyle="none",
            **(style | {"markersize": 8}),
        )
    places = sorted(table["at"].unique())
    # Room beside the outermost ticks, so that a shifted mark does not look like another value.
    axes.set_xlim(places[0] / shift / 1.4, places[-1] * shift * 1.4)
    layout.ticks_at(axes.xaxis, places)
    values = np.unique(table[["largest_stable", "smallest_unstable"]].to_numpy(float))
    values = values[np.isfinite(values)]
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.1, high * 1.25)
    if len(values) == 1:  # a single tick would not show the scale of the axis
        axes.set_ylim(values[0] / _AROUND, values[0] * _AROUND)
    if 1 < len(values) <= _TICKED:
        axes.set_yticks(values, [f"{value:.3g}" for value in values])
        axes.minorticks_off()
    else:
        look.plain_logs(axes.yaxis)
