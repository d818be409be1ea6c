"""The figure of a study of failures, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study failures``, which draws it itself. To draw it again::

    python -m figures results/failures              # in a clone
    asyncsim figures results/failures     # installed

``goodput``: into what the workers' time went, a panel for each policy, a bar for each rate of deaths.
"""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished, read

#: The parts of the workers' time: column, label, colour.
_PARTS = (
    ("counted_share", "gradients that counted", look.SKY),
    ("lost_to_waiting", "waiting", look.ORANGE),
    ("lost_to_sending", "sending", look.BLUE),
    ("lost_to_discarded", "discarded", look.PURPLE),
    ("lost_to_failed", "failed", look.VERMILLION),
    ("lost_to_restoring", "undone by a restore", look.GREY),
)


def draw(folder: str | os.PathLike) -> list[Path]:
    """Draw the figure of a folder of results, into the folder."""
    folder = Path(folder)
    finished = read(folder, "failures", ("workers", "method", "policy", "deaths", "status", "run_folder"))
    with look.style():
        return look.save(goodput(finished), folder / "goodput")


def goodput(finished: Finished) -> Figure:
    """Draw into what the workers' time went under each policy, at each rate of deaths."""
    table = finished.table("goodput.csv", ("workers", "policy", "deaths", "throughput", *(name for name, *_ in _PARTS)))
    found = list(table.groupby(["workers", "policy"], sort=False))
    bars = table["deaths"].nunique()
    height = 0.8 + (0.45 + 0.22 * bars) * len(found)
    figure, panels = look.new_figure(look.DOUBLE, height, 1, len(found), sharex=True)
    for axes, ((workers, policy), rows) in zip(panels, found, strict=True):
        place, left = np.arange(len(rows)), np.zeros(len(rows))
        for name, label, color in _PARTS:
            part = rows[name].clip(lower=0).to_numpy()
            axes.barh(place, part, left=left, color=color, edgecolor="white", linewidth=0.5, label=label)
            left = left + part
        axes.set_yticks(place, [f"{deaths:g}" for deaths in rows["deaths"]])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        for row, throughput in zip(place, rows["throughput"], strict=True):
            rate = f"{number_text(throughput)} commits/s"
            axes.annotate(rate, (1, row), (3, 0), textcoords="offset points", va="center")
        axes.set_title(f"{policy}, {counted(int(workers), 'worker')}")
    figure.supylabel("deaths of a worker per hour", fontsize=8)
    panels[-1].set_xlabel("part of the workers' time")
    shown = [(name, label) for name, label, _ in _PARTS if table[name].max() >= 1e-3]
    handles, labels = panels[0].get_legend_handles_labels()
    kept = [(one, label) for one, label in zip(handles, labels, strict=True) if label in dict(shown).values()]
    layout.legend_below(figure, [one for one, _ in kept], [label for _, label in kept], 3)
    seeds = finished.summary["seed"].nunique()
    layout.title(figure, f"what deaths of workers cost; {over_seeds(seeds, 'means over')}", look.DOUBLE)
    return figure
