"""Figures of the throughput study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study throughput``, which draws them itself. To draw them again::

    python -m figures results/throughput              # in a clone
    python -m asyncsim.figures results/throughput     # installed

``throughput``: how many commits (or visits, or gradients) each contender makes per second, by task, workers and method;
but for the commits alone, which are far off. The marks of a number of workers stand side by side: a colour for each
contender, a shape for each method, the median of the turns and a bar from the slowest to the quickest. Lines across are
the gradients alone.

``methods``, if there are many of them: what share of the gradients' rate the replay of each reaches.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished, read

_COLUMNS = ["task", "workers", "method", "contender", "per_second", "per_second_min", "per_second_max"]
#: Most panels in a row.
_PANELS = 4


class Mark(NamedTuple):
    """How a contender is drawn: a limit as a line across, the others as points, filled or not."""

    color: str
    line: Any = None
    filled: bool = True

    @property
    def point(self) -> dict[str, Any]:
        """How its points are drawn."""
        face = self.color if self.filled else "white"
        return {"color": self.color, "markersize": 3.5, "markerfacecolor": face, "markeredgewidth": 0.8}


#: Contenders in the order of the legend; one that is not here is grey.
_MARKS = {
    "gradients alone": Mark(look.BLACK, "-"),
    "gradients alone, PyTorch": Mark(look.GREY, "--"),
    "ensemble of 32": Mark(look.PURPLE),
    "replay": Mark(look.BLUE),
    "replay and simulation": Mark(look.SKY),
    "concurrent replays": Mark(look.BLUE, filled=False),
    "usual loop": Mark(look.ORANGE),
    "usual loop, same records": Mark(look.GREY),
    "usual loop, XLA's convolutions": Mark(look.GREEN),
    "usual loop, PyTorch": Mark(look.VERMILLION),
    "simulate": Mark(look.SKY, filled=False),
    "usual SimPy model": Mark(look.ORANGE, filled=False),
}
#: More methods than this have a figure of their own.
_MANY = 4
_SHARE = "replay / gradients alone"
#: Markers of the methods; tasks without a method have the first one, that of the legend.
_MARKERS = {"": "s", "downpour": "o", "gem": "D"}
_TITLES = {"trace": "simulation", "growth": "simulation, growth", "cnn": "CNN on MNIST", "mlp": "MLP on MNIST"}


def draw(folder: str | os.PathLike) -> list[Path]:
    """Draw the figure of a folder of results, into the folder.

    Returns
    -------
    list of Path
        A PNG and a PDF each.

    Raises
    ------
    InputError
        There are no results, or they are incomplete, or a file cannot be written.
    """
    folder = Path(folder)
    finished = read(folder, "throughput", _COLUMNS)
    summary = _of_methods(finished.summary)
    summary = summary[summary["contender"] != "commits alone"]
    many = summary.loc[summary["method"] != "", "method"].nunique() > _MANY
    # The points of so many methods side by side could not be told apart.
    shown = summary[summary["method"].isin(_MARKERS)] if many else summary
    with look.style():
        paths = [] if shown.empty else look.save(throughput(shown), folder / "throughput")
        return paths + (look.save(methods(_ratios(finished)), folder / "methods") if many else [])


def _ratios(finished: Finished) -> pd.DataFrame:
    return _of_methods(finished.table("ratios.csv", ("task", "workers", "method", "ratio", "median", "min", "max")))


def _of_methods(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table in which tasks without a method have one without a name, which the file cannot tell from none."""
    # A column in which all are missing is one of numbers.
    return table.assign(method=table["method"].astype(object).fillna(""))


def methods(ratios: pd.DataFrame) -> Figure:
    """Draw each method's share of the gradients' rate, medians with the range from turn to turn, the best on top."""
    ratios = ratios[ratios["ratio"] == _SHARE]
    cases = list(ratios.groupby(["task", "workers"], sort=False))
    names = ratios.groupby("method")["median"].mean().sort_values().index
    figure, panels = look.new_figure(look.DOUBLE, 0.17 * len(names) + 0.8, len(cases), 1)
    shown = look.looks(names)
    for index, (axes, ((task, workers), rows)) in enumerate(zip(panels, cases, strict=True)):
        rows = rows.set_index("method").reindex(names)
        axes.hlines(range(len(names)), rows["min"], rows["max"], color=look.BLUE, linewidth=1)
        axes.plot(rows["median"], range(len(names)), "o", color=look.BLUE, markersize=3.5, markeredgewidth=0)
        axes.axvline(1, color=look.BLACK, linewidth=1)
        axes.set_xlim(0, 1.05 * max(1.0, ratios["max"].max()))
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.set_yticks(range(len(names)), [shown[name].label for name in names] if index == 0 else [])
        axes.grid(axis="x", color=look.GREY, alpha=0.25, linewidth=0.4)
        axes.set_xlabel(_SHARE)
        axes.set_title(f"{_TITLES.get(task, task)}, {workers} worker{'s' if workers > 1 else ''}")
    return figure


def throughput(summary: pd.DataFrame) -> Figure:
    """Draw the rates: a panel for each task, medians with the range from turn to turn."""
    tasks = list(dict.fromkeys(summary["task"]))
    columns = min(_PANELS, len(tasks))
    rows = -(-len(tasks) // columns)
    width = look.SINGLE if columns == 1 else look.DOUBLE
    figure, panels = look.new_figure(width, 2.1 * rows + 1.0, columns, rows)
    for axes in panels[len(tasks) :]:
        axes.remove()
    for index, (axes, task) in enumerate(zip(panels, tasks, strict=False)):
        _panel(axes, summary[summary["task"] == task])
        axes.set_title(_TITLES.get(task, task))
        if index % columns == 0:
            axes.set_ylabel("visits or commits / s")
    _legend(figure, summary, 2 if columns == 1 else 4)
    layout.title(figure, _explanation(summary))
    return figure


def _explanation(summary: pd.DataFrame) -> str:
    """Return what the marks are, which nothing else in the figure says."""
    shapes = ", shapes are methods" if _several(summary) else ""
    return f"side by side at each number of workers: colours are what ran{shapes}; bars: slowest to quickest turn"


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw one task: groups of points by workers, in them the contenders side by side."""
    groups, contenders = sorted(rows["workers"].unique()), _in_order(rows["contender"])
    points = [name for name in contenders if _mark(name).line is None]
    places = [(name, method) for name in points for method in _methods(rows, name)]
    offsets = dict(zip(places, _spread(len(places)), strict=True))
    limits = rows[~rows["contender"].isin(points)].groupby(["contender", "workers"])["per_second"].median()
    for (name, workers), rate in limits.items():
        mark, at = _mark(name), groups.index(workers)
        axes.hlines(rate, at - 0.42, at + 0.42, color=mark.color, linestyle=mark.line, linewidth=1)
    for row in rows[rows["contender"].isin(points)].itertuples():
        mark = _mark(str(row.contender))
        x = groups.index(row.workers) + offsets[row.contender, row.method]
        axes.vlines(x, row.per_second_min, row.per_second_max, color=mark.color, linewidth=1)
        marker = _MARKERS.get(str(row.method), "s")
        axes.plot(x, row.per_second, marker, **mark.point)
    axes.set_yscale("log")
    axes.set_ylim(rows["per_second_min"].min() / 1.6, rows["per_second_max"].max() * 1.6)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,)))
    if np.log10(rows["per_second_max"].max() / rows["per_second_min"].min()) < 1.5:
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=look.GREY, alpha=0.25, linewidth=0.4)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_xticks(range(len(groups)), [_count(workers) for workers in groups])
    axes.set_xlabel("workers")


def _count(workers: int) -> str:
    """Return a number of workers as a tick has it: short, as several stand side by side."""
    return f"{workers // 1_000}k" if workers >= 1_000 and workers % 1_000 == 0 else str(workers)


def _legend(figure: Figure, summary: pd.DataFrame, columns: int) -> None:
    """Add the legend of contenders, and of the methods if there are several."""
    handles = []
    methods = [name for name in dict.fromkeys(summary["method"]) if name]
    for name in _in_order(summary["contender"]):
        mark, own = _mark(name), [method for method in _methods(summary, name) if method]
        # Of several methods no one's: what they share is the colour.
        marker = "s" if _several(summary) else _MARKERS.get("".join(own), "s")
        style: dict[str, Any] = (
            {"marker": marker, "linestyle": "none"} if mark.line is None else {"linestyle": mark.line}
        )
        handles.append(Line2D([], [], label=name, **mark.point, **style))
    if _several(summary):
        for name, one in look.looks(methods).items():
            style = {"marker": _MARKERS.get(name, "s"), "linestyle": "none", "markersize": 3.5}
            handles.append(Line2D([], [], color=look.BLACK, label=one.label, **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _several(summary: pd.DataFrame) -> bool:
    """Return whether there is more than one method."""
    return summary.loc[summary["method"] != "", "method"].nunique() > 1


def _mark(contender: str) -> Mark:
    if contender.endswith(" 1 at a time"):
        return Mark(look.BLACK, ":")
    if contender.endswith(" at a time"):
        return Mark(look.BLACK, "-.")
    return _MARKS.get(contender, Mark(look.GREY))


def _in_order(contenders: pd.Series) -> list[str]:
    """Return the contenders as the table of marks has them, then the others."""
    found = list(dict.fromkeys(contenders))
    known = list(_MARKS)
    return sorted(found, key=lambda name: known.index(name) if name in known else len(known))


def _methods(rows: pd.DataFrame, contender: str) -> list[str]:
    return list(dict.fromkeys(rows.loc[rows["contender"] == contender, "method"]))


def _spread(count: int) -> list[float]:
    """Return so many places around zero, within a group's width."""
    return [0.0] if count == 1 else np.linspace(-0.36, 0.36, count).tolist()
