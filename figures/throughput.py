"""Figure of the throughput study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study throughput``, which draws this figure itself. To draw
it again::

    python -m figures results/throughput              # in a clone
    asyncsim figures results/throughput     # installed

``throughput``: commits, gradients or visits per second of each contender, by task, workers and
method; the median of the turns and a line from the slowest to the fastest.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from asyncsim.base.console import number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = (
    "task",
    "workers",
    "method",
    "contender",
    "per_second",
    "per_second_min",
    "per_second_max",
)
#: Colour and marker of each contender.
_MARKS = {
    "gradients alone": (look.BLACK, "|"),
    "replay": (look.BLUE, "o"),
    "usual loop": (look.ORANGE, "s"),
    "simulate": (look.SKY, "o"),
}
_TITLES = {"trace": "simulation", "cnn": "CNN on MNIST"}


def throughput(finished: Finished) -> Figure:
    """Draw the rates: a panel for each task, a line for each number of workers and method."""
    # In the file an empty method is read as missing.
    summary = finished.summary
    summary = summary.assign(method=summary["method"].astype(object).fillna(""))
    tasks = list(dict.fromkeys(summary["task"]))
    case_count = max(
        len(rows[["workers", "method"]].drop_duplicates()) for _, rows in summary.groupby("task")
    )
    height = max(1.3, 0.18 * case_count + 0.7)  # at least the room for the vertical label
    figure, panels = look.new_grid(len(tasks), height, extra_height=0.5)
    for axes, task in zip(panels, tasks, strict=True):
        _panel(axes, summary[summary["task"] == task])
        axes.set_title(_TITLES.get(task, task))
        axes.set_xlabel("visits / s" if task == "trace" else "commits or gradients / s")
    ratios = summary.loc[summary["contender"] == "usual loop", "ratio"]
    if len(ratios):
        ends = " to ".join(dict.fromkeys(map(number_text, (ratios.min(), ratios.max()))))
        figure.set_label(f"Replay is {ends} times as fast as the usual loop.")
    about = "Median of the turns; lines from the slowest to the fastest"
    layout.finish(figure, about, 3)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw one task: a row for each case, with a point for each contender."""
    names = look.looks([name for name in dict.fromkeys(rows["method"]) if name])
    cases = list(dict.fromkeys(zip(rows["method"], rows["workers"], strict=True)))
    case = rows[["method", "workers"]].apply(tuple, axis=1)
    for name, (color, marker) in _MARKS.items():
        part, style = rows[rows["contender"] == name], {"color": color, "marker": marker}
        if len(part):
            values = (part[f"per_second{end}"] for end in ("", "_min", "_max"))
            rate, low, high = values
            place = case[part.index].map(cases.index)
            draw_points(axes, rate, place, low, high, horizontal=True, label=name, **style)
    axes.set_xscale("log")
    axes.set_xlim(rows["per_second_min"].min() / 1.6, rows["per_second_max"].max() * 1.6)
    wide = rows["per_second_max"].max() > 30 * rows["per_second_min"].min()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(len(cases) - 0.4, -0.6)
    labels = [
        f"{names[method].label}, {count:,}" if method else f"{count:,}" for method, count in cases
    ]
    axes.set_yticks(range(len(cases)), labels)
    axes.set_ylabel("method, workers" if names else "workers")
    axes.grid(axis="x", color=look.GREY, alpha=0.25, linewidth=0.4)


draw = drawer("throughput", _COLUMNS, throughput=throughput)
