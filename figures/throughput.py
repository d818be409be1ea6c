"""Figure of the throughput study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study throughput``, which draws this figure itself. To draw
it again::

    python -m figures results/throughput              # in a clone
    asyncsim figures results/throughput     # installed

``throughput``: commits, gradients or visits per second of each contender, by task, workers and
method; the median of the turns and a line from the slowest to the fastest.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import number_text
from asyncsim.drawing import findings, layout, look
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
#: Colour and marker of each contender, in the order of the legend.
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
    summary = finished.summary.assign(method=finished.summary["method"].fillna(""))
    looks = look.looks(name for name in summary["method"].unique() if name)
    labels = {name: f"{appearance.label}, " for name, appearance in looks.items()}
    cases = summary["method"].map(labels).fillna("") + summary["workers"].map("{:,}".format)
    panels_of = dict(list(summary.assign(case=cases).groupby("task", sort=False)))
    most = max(rows["case"].nunique() for rows in panels_of.values())
    height = max(1.3, 0.18 * most + 0.7)  # at least the room for the vertical label
    figure, panels = look.new_grid(len(panels_of), height, extra_height=0.5)
    for axes, (task, rows) in zip(panels, panels_of.items(), strict=True):
        names = list(dict.fromkeys(rows["case"]))
        for contender, (color, marker) in _MARKS.items():
            part = rows[rows["contender"] == contender]
            ends = part[["per_second_min", "per_second_max"]].sub(part["per_second"], axis=0).abs()
            axes.errorbar(
                part["per_second"],
                part["case"].map(names.index),
                xerr=ends.T,
                fmt=marker,
                color=color,
                markersize=4,
                elinewidth=1,
                label=contender,
            )
        axes.set_xscale("log")
        look.plain_logs(axes.xaxis)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylabel("method, workers" if rows["method"].any() else "workers")
        axes.set_title(_TITLES.get(str(task), str(task)))
        axes.set_xlabel("visits / s" if task == "trace" else "commits or gradients / s")
    ratios = summary.loc[summary["contender"] == "usual loop", "ratio"]
    ends = " to ".join(dict.fromkeys(map(number_text, ratios.agg(["min", "max"]).dropna())))
    text = f"replay is {ends} times as fast as the usual loop" if ends else ""
    figure.set_label(findings.sentence(text))
    layout.finish(figure, "Median of the turns; lines from the slowest to the fastest", 3)
    return figure


draw = drawer("throughput", _COLUMNS, throughput=throughput)
