"""Figure of the fairness study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study fairness``, which draws this figure itself. To draw it
again::

    python -m figures results/fairness              # in a clone
    asyncsim figures results/fairness     # installed

``fairness``: each worker's share of the commits, of real processes and in the simulator, by
discipline.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = ("discipline", "worker", "share", "simulated_share", "simulated_low", "simulated_high")
_TITLES = {
    "fifo": "first come, first served",
    "lowest_rank": "lowest rank first",
    "random": "random order",
}


def fairness(finished: Finished) -> Figure:
    """Draw each worker's share of the commits, a panel for each discipline."""
    summary = finished.summary
    disciplines = list(dict.fromkeys(summary.loc[summary["share"] >= 0, "discipline"]))
    figure, axes = look.new_figure(
        max(look.SINGLE, 2.4 * len(disciplines)), 2.4, len(disciplines), sharey=True
    )
    for panel, discipline in zip(axes, disciplines, strict=True):
        _panel(panel, summary[summary["discipline"] == discipline])
        panel.set_title(_TITLES.get(discipline, discipline))
        panel.set_xlabel("worker")
    axes[0].set_ylabel("share of the commits")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    ranges = [
        f"{rows['share'].min():.0%} to {rows['share'].max():.0%} of the commits with "
        f"{_TITLES.get(discipline, discipline)}"
        for discipline, rows in summary[summary["share"] >= 0].groupby("discipline", sort=False)
    ]
    figure.set_label(f"Each worker makes {'; '.join(ranges)}.")
    layout.title(
        figure, "Share of the commits by the order in which the server serves waiting workers"
    )
    return figure


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    worker = table["worker"].to_numpy()
    axes.bar(worker, table["share"], width=0.7, color=look.SKY, label="real processes")
    middle = table["simulated_share"].to_numpy()
    spread = np.abs(np.array([table["simulated_low"], table["simulated_high"]]) - middle)
    points: dict[str, Any] = {"color": look.BLACK, "fmt": "o", "ms": 3, "elinewidth": 0.8}
    axes.errorbar(worker, middle, yerr=spread, label="simulated: mean and range", **points)
    layout.whole_ticks(axes.xaxis)


draw = drawer("fairness", _COLUMNS, fairness=fairness)
