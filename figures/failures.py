"""The figure of a study of failures, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study failures``, which draws it itself. To draw it again::

    python -m figures results/failures              # in a clone
    asyncsim figures results/failures     # installed

``goodput``: the division of the workers' time, a panel for each policy, a bar for each rate of
deaths.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds, percent_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study import load
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

#: Colours of the parts of the workers' time, in the order of the study's ``PARTS``.
_COLORS = (look.SKY, look.ORANGE, look.BLUE, look.PURPLE, look.VERMILLION, look.GREY)


def goodput(finished: Finished) -> Figure:
    """Draw the division of the workers' time under each policy, at each rate of deaths."""
    parts = load("failures").PARTS
    columns = ("workers", "policy", "deaths", "throughput", *(part.name for part in parts))
    table = finished.table("goodput.csv", columns)
    groups = list(table.groupby(["workers", "policy"], sort=False))
    # At least the room for the vertical label.
    height = max(2.0, 0.8 + (0.45 + 0.22 * table["deaths"].nunique()) * len(groups))
    figure, panels = look.new_figure(look.DOUBLE, height, 1, len(groups), sharex=True)
    for axes, ((workers, policy), rows) in zip(panels, groups, strict=True):
        bars = [
            (axis_of(part), color, rows[part.name])
            for part, color in zip(parts, _COLORS, strict=True)
        ]
        layout.stacked_bars(
            axes, bars, [f"{deaths:g}" for deaths in rows["deaths"]], rows["throughput"]
        )
        axes.set_title(f"{policy}, {counted(int(workers), 'worker')}")
    figure.supylabel("deaths of a worker per hour", fontsize=8)
    panels[-1].set_xlabel("part of the workers' time")
    handles = layout.labelled(figure)
    layout.legend_below(figure, list(handles.values()), list(handles), 3)
    seeds = finished.summary["seed"].nunique()
    worst = table[table["deaths"] == table["deaths"].max()].sort_values(parts[0].name)
    least, most = (percent_text(worst[parts[0].name].iloc[place]) for place in (0, -1))
    places = [f"under {worst['policy'].iloc[-1]}", f"{least} under {worst['policy'].iloc[0]}"]
    if least == most and len(worst) > 1:
        places = ["under every policy"]
    deaths = f"With {table['deaths'].max():g} deaths of a worker per hour"
    share = f"{most} of the workers' time counts {', '.join(places[: len(worst)])}"
    figure.set_label(f"{deaths}, {share}.")
    layout.title(figure, f"cost of workers' deaths; {over_seeds(seeds, 'means over')}", look.DOUBLE)
    return figure


draw = drawer(
    "failures", ("workers", "method", "policy", "deaths", "status", "run_folder"), goodput=goodput
)
