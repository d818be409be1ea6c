"""The figure of the study of checkpoints, from the folder of results that it wrote.

The data come from ``asyncsim study checkpoint``, which draws this itself. To draw it again::

    python -m figures results/checkpoint      # in a clone
    asyncsim figures results/checkpoint       # installed

``checkpoint``: the goodput against the interval between checkpoints, measured and by Daly's law.
"""

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.units import SECONDS, positive
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished
from asyncsim.theory import checkpoint_efficiency


def checkpoint(finished: Finished) -> Figure:
    """Draw the goodput against the interval between checkpoints, and its law."""
    table = finished.table("intervals.csv", ("interval", "goodput", "goodput_sd", "law"))
    figure, (axes,) = look.new_figure(look.SINGLE, 2.6)
    goodput, spread = table["goodput"], table["goodput_sd"]
    points = table["interval"], goodput, goodput - spread, goodput + spread
    draw_points(axes, *points, color=look.BLUE, label="simulated, \u00b1 1 std over seeds")
    config = finished.config
    every, lasts, saving = (
        positive(name, config[name], SECONDS) for name in ("every", "lasts", "saving")
    )
    grid = np.geomspace(table["interval"].min(), table["interval"].max(), 200)
    law = [checkpoint_efficiency(interval, saving, every, lasts) for interval in grid]
    axes.plot(grid, law, "--", color=look.BLACK, label="law (Daly, eq. 20)")
    daly = (table["interval"] / table["multiple"]).iloc[0]
    axes.axvline(daly, color=look.VERMILLION, linestyle=":", label="Daly's interval")
    axes.set_xscale("log")
    axes.set_xlabel("interval between checkpoints (s)")
    axes.set_ylabel("goodput (share of time)")
    seeds = over_seeds(int(finished.summary["seed"].nunique()), "means over")
    crashes = f"crashes every {config['every']}, back after {config['lasts']}"
    setting = f"{config['workers']} workers; {crashes}; saving {config['saving']}"
    layout.finish(figure, f"goodput by interval; {setting}; {seeds}", 2)
    best = table.iloc[0]
    figure.set_label(
        f"Of {counted(len(table), 'interval')}, {number_text(best['interval'])} s keeps the "
        f"largest share of the time, {best['goodput']:.1%}; the law predicts {best['law']:.1%}."
    )
    return figure


draw = drawer("checkpoint", ("interval", "goodput"), checkpoint=checkpoint)
