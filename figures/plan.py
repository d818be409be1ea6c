"""The figure of a plan, from the folder of results that the study wrote.

The data come from ``python -m asyncsim.study plan``, which draws it itself. To draw it again::

    python -m figures results/plan              # in a clone
    asyncsim figures results/plan     # installed

``plan``: the staleness of each combination against its time; the Pareto front is a line with named
members. With replays, a second panel has the times to the target, with their ranges over seeds.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds, wrapped
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished
from asyncsim.study.planning import FEWEST_ROUNDS

_COLUMNS = (
    "name",
    "policy",
    "collective",
    "cost",
    "cost_low",
    "cost_high",
    "staleness_mean",
    "front",
    "seeds",
)
#: Members of the front with a number at their point and a name in the legend.
_NAMED = 8
#: Characters of a line of a name.
_WIDTH = 26
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "s"))


def plan(finished: Finished) -> Figure:
    """Draw staleness against time, and with replays the times to the target."""
    config, table = finished.config, finished.table("plan.csv", _COLUMNS)
    replayed = (
        table[table["time_to_target"].notna()] if "time_to_target" in table else table.head(0)
    )
    figure, panels = look.new_figure(look.DOUBLE, 3.6, 2 if len(replayed) else 1)
    axes = panels[0]
    seconds, unit = next(
        scale for scale in _UNITS if table["cost"].median() >= scale[0] or scale[0] == 1
    )
    kinds = table["policy"].where(
        table["collective"] == "none", table["policy"] + ", " + table["collective"]
    )
    looks = look.category_looks(dict.fromkeys(kinds.sort_values()))
    markers = dict(zip(looks, look.MARKERS * len(looks), strict=False))
    for turn, (kind, appearance) in enumerate(looks.items()):
        rows = table[kinds == kind]
        time, low, high = (rows[name] / seconds for name in ("cost", "cost_low", "cost_high"))
        # Hollow and of several sizes, because points of two policies often coincide.
        size = {"markersize": 4 + 2 * (turn % 3), "markerfacecolor": "none"}
        style: dict[str, Any] = {"marker": markers[kind], "color": appearance.color, **size}
        points = time, rows["staleness_mean"], low, high
        draw_points(axes, *points, horizontal=True, label=kind, **style)
    front = table[table["front"]].sort_values("cost")
    axes.plot(
        front["cost"] / seconds,
        front["staleness_mean"],
        color=look.BLACK,
        linewidth=0.8,
        zorder=0,
        drawstyle="steps-post",
        label="Pareto front",
    )
    axes.set_xscale("log")
    if table["staleness_mean"].any():
        axes.set_yscale("symlog", linthresh=1.0, subs=(2, 5))
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    per = "per 1,000 gradients" if config["hours"] is not None else "until the horizon"
    axes.set_xlabel(f"time {per} ({unit})")
    axes.set_ylabel(axis_of("staleness_mean"))
    for number, row in enumerate(front.head(_NAMED).itertuples(), start=1):
        axes.annotate(
            str(number),
            (row.cost / seconds, row.staleness_mean),
            (3, 3),
            textcoords="offset points",
        )
        axes.plot([], [], linestyle="none", label=f"{number}  {row.name}")
    if len(replayed):
        right, rows = panels[1], replayed.sort_values("time_to_target", ignore_index=True)
        right.set_yticks(
            range(len(rows)), [wrapped(name, _WIDTH) for name in rows["name"]], fontsize=6
        )
        right.set_ylim(len(rows) - 0.4, -0.6)
        soon = rows.get("rounds_to_target", rows["time_to_target"] + np.inf) < FEWEST_ROUNDS
        reached = rows[np.isfinite(rows["time_to_target"]) & ~soon]
        time, low, high = (reached[f"time_{end}"] for end in ("to_target", "low", "high"))
        draw_points(right, time, reached.index, low, high, horizontal=True, color=look.BLUE)
        for place in rows.index.difference(reached.index):
            text = f"too soon, within {FEWEST_ROUNDS} rounds" if soon[place] else "not reached"
            right.annotate(
                text, (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=6
            )
        right.set_xlim(left=0)
        right.set_xlabel("simulated time to the target (s)")
        right.set_title(f"replayed on {config['problem']}")
    fast, fresh = front.iloc[0], front.iloc[-1]
    text = (
        f"{fast['name']} is the fastest, {number_text(fast['cost'] / seconds)} {unit} {per}, at a "
        f"mean staleness of {number_text(fast['staleness_mean'])}"
    )
    if len(front) > 1:
        text += (
            f"; {fresh['name']} has the least staleness, {number_text(fresh['staleness_mean'])}, "
            f"and takes {number_text(fresh['cost'] / fast['cost'])} times as long"
        )
    figure.set_label(findings.sentence(text))
    workers, seeds = f"{config['workers']} workers", over_seeds(int(table["seeds"].max()))
    about = f"staleness against time of {len(table)} combinations, {workers}; {seeds}"
    layout.finish(figure, f"{about}; the front is numbered", 2)
    return figure


draw = drawer("plan", (), plan=plan)
