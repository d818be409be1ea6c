"""The figures of the study of delays, from the folder of results that it wrote.

The data come from ``asyncsim study delays QUESTION``, which draws this itself. To draw it again::

    asyncsim figures results/delays

``losses``: the loss against the learning rate, a panel for each case or for each variant, whichever
are fewer. ``ratios``: the loss relative to the reference's in each case, each at its best rate.
``momentum``: the best explicit momentum against the number of workers, beside the implicit one.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_band, draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.delays import names_of
from asyncsim.study.finished import Finished

_CASE = ["source", "delay"]
#: Largest loss in view, as a multiple of the loss at the start.
_ROOM = 1.3


def _named(finished: Finished, table: pd.DataFrame) -> pd.DataFrame:
    """Add the names of cases and variants."""
    columns = finished.config["columns"]
    return table.assign(case=names_of(table, _CASE), variant=names_of(table, columns))


def _finish(finished: Finished, subject: str, figure: Figure, bars: str = "ranges") -> None:
    config = finished.config
    seeds = over_seeds(finished.summary["seed"].nunique(), f"geometric means and {bars} of")
    question = config["question"].replace("_", " ")
    layout.finish(figure, f"{question}: {subject}; {config['problem']}, {seeds}")


def losses(finished: Finished) -> Figure:
    """Draw the final loss against the learning rate."""
    runs = _named(finished, finished.summary)
    runs = runs.assign(loss=np.log(runs[["train_loss", "first_loss"]].min(axis=1)))
    panel, line = sorted(("case", "variant"), key=lambda name: runs[name].nunique())
    names = list(dict.fromkeys(runs[panel]))
    lines = list(dict.fromkeys(runs[line]))
    styles: dict[Any, look.Look] = look.category_looks(lines)
    figure, panels = look.new_grid(len(names), 1.9, 0.6, sharex=True, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for row, part in runs[runs[panel] == name].groupby(line, sort=False):
            seeds = np.exp(part.groupby("learning_rate")["loss"].agg(["mean", "min", "max"]))
            draw_band(axes, seeds, **styles[row].style)
        axes.set(xscale="log", yscale="log", xlabel=axis_of("learning_rate"))
        axes.set_ylim(top=_ROOM * float(runs["first_loss"].max()))
        axes.set_ylabel(axis_of("train_loss"))
        axes.tick_params(labelbottom=True, labelleft=True)
        layout.panel_title(axes, str(name))
    _finish(finished, "loss by rate", figure)
    return figure


def ratios(finished: Finished) -> Figure | None:
    """Draw the ratio of each variant in each case with its interval; None without a reference."""
    table = _named(finished, finished.table("best.csv", ("ratio", "low", "high", "learning_rate")))
    table = table.dropna(subset="ratio")
    if table.empty:
        return None
    cases, variants = (list(dict.fromkeys(table[name])) for name in ("case", "variant"))
    figure, (axes,) = look.new_figure(look.DOUBLE, 3.2)
    for place, (variant, style) in enumerate(look.category_looks(variants).items()):
        rows = table[table["variant"] == variant]
        offset = 0.7 * ((place + 0.5) / len(variants) - 0.5)
        marker = look.MARKERS[place % len(look.MARKERS)]
        x, values = rows["case"].map(cases.index) + offset, rows[["ratio", "low", "high"]]
        draw_points(axes, x, *values.T.to_numpy(), marker=marker, color=style.color, label=variant)
    axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
    axes.set_ylabel("loss, over the reference's")
    rows = table.set_index("case" if len(variants) == 1 else "variant")
    rows = rows[table["case"].eq(cases[-1]).to_numpy() | (len(variants) == 1)]
    rows = rows[["ratio", "low", "high"]].set_axis(["mean", "min", "max"], axis=1)
    where = "" if len(variants) == 1 else f"in the case {cases[-1]}"
    figure.set_label(findings.best(rows, "loss, over the reference's,", where))
    _finish(finished, "each at its best rate", figure, "95 % intervals")
    return figure


def momentum(finished: Finished) -> Figure | None:
    """Draw the best explicit momentum of queues against their workers, beside 1 - 1/n; None for
    other questions.
    """
    if finished.config["question"] != "best_momentum":
        return None
    best = finished.table("best.csv", ("delay", "server_momentum", "loss"))
    best = best.loc[best.groupby("delay")["loss"].idxmin()]
    runs = finished.summary
    of_seed = runs.loc[runs.groupby(["delay", "seed"])["train_loss"].idxmin()]
    ends = of_seed.groupby("delay")["server_momentum"].agg(["min", "max"])
    workers, value = best["delay"].to_numpy() + 1, best["server_momentum"].to_numpy()
    figure, (axes,) = look.new_figure(look.SINGLE, 2.6)
    of_best = workers, value, ends["min"], ends["max"]
    draw_points(axes, *of_best, color=look.BLUE, linestyle="-", label="best explicit")
    n = np.geomspace(workers.min(), workers.max(), 100)
    axes.plot(n, 1 - 1 / n, "--", color=look.GREY, label="implicit: 1 \u2212 1/n")
    axes.set_xscale("log")
    layout.ticks_at(axes.xaxis, workers)
    axes.set(xlabel="workers n", ylabel="momentum")
    if len(workers) > 1:
        figure.set_label(
            f"The best explicit momentum goes from {value[0]:g} with {workers[0]:g} to "
            f"{value[-1]:g} with {workers[-1]:g} workers."
        )
    _finish(finished, "each at its best rate", figure)
    return figure


draw = drawer(
    "delays",
    (*_CASE, "learning_rate", "train_loss", "first_loss", "seed"),
    losses=losses,
    ratios=ratios,
    momentum=momentum,
)
