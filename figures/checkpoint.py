"""The figure of the study of checkpoints, from the folder of results that it wrote.

The data come from ``asyncsim study checkpoint``, which draws this itself. To draw it again::

    python -m figures results/checkpoint      # in a clone
    asyncsim figures results/checkpoint       # installed

``checkpoint``: the goodput against the interval between checkpoints, measured and by Daly's law.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished


def checkpoint(finished: Finished) -> Figure:
    """Draw the goodput against the interval between checkpoints, and its law."""
    table = finished.table("intervals.csv", ("interval", "goodput", "goodput_sd", "law"))
    figure, (axes,) = look.new_figure(look.SINGLE, 2.6)
    axes.errorbar(
        table["interval"],
        table["goodput"],
        table["goodput_sd"].fillna(0.0),
        fmt="o",
        color=look.BLUE,
        markersize=4,
        capsize=2,
        label="simulated, \u00b1 1 std over seeds",
    )
    axes.plot(table["interval"], table["law"], "--", color=look.BLACK, label="law (Daly, eq. 20)")
    daly = (table["interval"] / table["multiple"]).iloc[0]
    axes.axvline(daly, color=look.VERMILLION, linestyle=":", label="Daly's interval")
    axes.set_xscale("log")
    axes.set_xlabel("interval between checkpoints (s)")
    axes.set_ylabel("goodput (share of time)")
    layout.legend_below(figure, *axes.get_legend_handles_labels(), 2)
    config = finished.config
    seeds = over_seeds(int(finished.summary["seed"].nunique()), "means over")
    crashes = f"crashes every {config['every']}, back after {config['lasts']}"
    setting = f"{config['workers']} workers; {crashes}; saving {config['saving']}"
    layout.title(figure, f"goodput by interval; {setting}; {seeds}")
    top = table.loc[table["goodput"].idxmax()]
    figure.set_label(
        f"The work of {top['goodput']:.1%} of the time is kept with {number_text(top['interval'])} "
        f"s between checkpoints, the best interval tried; Daly's is {number_text(daly)} s, and the "
        f"law is off by at most {(table['goodput'] - table['law']).abs().max():.1%} of the time."
    )
    return figure


draw = drawer("checkpoint", ("interval", "goodput"), checkpoint=checkpoint)
