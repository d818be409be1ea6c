"""The figure of the study of checkpoints, from the folder of results that it wrote.

The data come from ``asyncsim study checkpoint``, which draws this itself. To draw it again::

    python -m figures results/checkpoint      # in a clone
    asyncsim figures results/checkpoint       # installed

``checkpoint``: the goodput against the interval between checkpoints, measured and by Daly's law.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.units import SECONDS, positive
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished
from asyncsim.theory import checkpoint_efficiency


def checkpoint(finished: Finished) -> Figure:
    """Draw the goodput against the interval between checkpoints, and its law."""
    table = finished.table("intervals.csv", ("interval", "goodput", "goodput_sd", "law"))
    figure, (axes,) = look.new_figure(look.SINGLE, 2.6)
    spread = table["goodput_sd"]
    axes.errorbar(
        table["interval"],
        table["goodput"],
        spread.fillna(0.0) if spread.notna().any() else None,
        fmt="o",
        color=look.BLUE,
        markersize=4,
        capsize=2,
        label="simulated, " + ("\u00b1 1 std over seeds" if spread.notna().any() else "one seed"),
    )
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
    top = table.loc[table["goodput"].idxmax()]
    usual = table.iloc[(table["multiple"] - 1).abs().argmin()]
    best, also = f"{number_text(top['interval'])} s", ""
    if top["multiple"] == 1:
        best = f"Daly's, {best},"
    elif usual["multiple"] == 1:
        also = f"; Daly's, {number_text(daly)} s, {usual['goodput']:.1%}"
    excess = _excess(table["law"] - table["goodput"])
    figure.set_label(
        f"Of {counted(len(table), 'interval')}, {best} keeps the largest share "
        f"({top['goodput']:.1%}{also}); the law predicts {excess}."
    )
    return figure


def _excess(shares: pd.Series) -> str:
    """State by how many percentage points a law exceeds the simulation, from the least on."""
    low, high = sorted(100 * shares.abs().agg(["min", "max"]))
    if shares.min() < 0 < shares.max():
        return f"up to {high:.1f} percentage points more or less"
    points = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{high:.1f}"
    return f"{points} percentage points {'less' if shares.max() < 0 else 'more'}"


draw = drawer("checkpoint", ("interval", "goodput"), checkpoint=checkpoint)
