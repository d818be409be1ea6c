"""The figure of a study of scaling, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study scaling``, which draws it itself. To draw it again::

    python -m figures results/scaling              # in a clone
    asyncsim figures results/scaling     # installed

``scaling``: the efficiency against the number of nodes with each overhead that would explain one
published point, beside the published points and the model without overheads; and each layer's
computation and communication on the largest cluster.
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import percent_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = ("nodes", "way", "efficiency")
#: Colour and line of each way to divide the work.
_LOOKS = {"data parallel": (look.VERMILLION, "--"), "hybrid": (look.BLUE, "-")}


def scaling(finished: Finished) -> Figure:
    """Draw efficiencies and published points on the left, the layers of the largest cluster on the
    right.
    """
    config, summary = finished.config, finished.summary
    layers = finished.table("layers.csv", ("nodes", "way", "layer", "computing", "communicating"))
    is_published = (finished.folder / "published.csv").exists()  # of VGG-A alone
    published = finished.table("published.csv", ("speed_up",)) if is_published else None
    figure, (efficiency_axes, layer_axes) = look.new_figure(
        look.DOUBLE, 3.3, 2, width_ratios=(1.5, 1)
    )
    for way, rows in summary.groupby("way"):
        color, line = _LOOKS[str(way)]
        efficiency = rows.set_index("nodes")["efficiency"].sort_index()
        label = f"{way}, without overheads"
        efficiency_axes.plot(efficiency, color=color, linestyle=line, linewidth=0.8, label=label)
    efficiency_axes.set_xscale("log", base=2)
    efficiency_axes.set_ylim(0, 1.05)
    nodes = set(summary["nodes"])
    if published is not None:
        nodes |= _draw_published(efficiency_axes, finished, published)
    layout.ticks_at(efficiency_axes.xaxis, sorted(nodes))
    efficiency_axes.set_xlabel("nodes")
    efficiency_axes.set_ylabel("speed-up / nodes")
    largest = int(summary["nodes"].max())
    layers = layers[layers["nodes"] == largest].assign(stage=layers["layer"].str.partition(".")[0])
    names = list(dict.fromkeys(layers["stage"]))
    spent = layers.groupby(["way", "stage"])[["computing", "communicating"]].sum() * 1e3
    place = np.arange(len(names))
    for way in layers["way"].unique():
        layer_axes.plot(
            spent.loc[way].loc[names, "communicating"],
            place + (-0.2 if way == "data parallel" else 0.2),
            "D",
            color=_LOOKS[way][0],
            markersize=3,
            label=f"communicating, {way}",
        )
    computing = spent.loc["data parallel"].loc[names, "computing"]
    layer_axes.barh(place, computing, color="#d9d9d9", label="computing")
    layer_axes.set_xscale("log")
    layer_axes.set_yticks(place, names, fontsize=6 if len(names) > 12 else 7)
    layer_axes.set_ylim(len(names) - 0.4, -0.6)
    layer_axes.set_xlabel(f"ms of an iteration on {largest} nodes")
    name = config["network"] if config.get("layers") is None else Path(config["layers"]).name
    assumed = f"assumed {config['flops']:g} operations/s and {config['bandwidth']:g} bytes/s a node"
    most = summary[summary["nodes"] == largest].itertuples()
    ways = " and ".join(f"{percent_text(row.efficiency)} with {row.way} division" for row in most)
    figure.set_label(f"Without overheads, {largest} nodes reach {ways} of a linear speed-up.")
    about = "" if published is None else "overheads that would explain the published point; "
    about = f"{about}{name}, {config['examples']} examples a node; {assumed}"
    layout.finish(figure, about, 3)
    return figure


def _draw_published(efficiency_axes: Axes, finished: Finished, published: pd.DataFrame) -> set[int]:
    """Draw the published points, and the fitted overheads with their names; return the overheads'
    nodes.
    """
    implied = finished.table("implied.csv", ("overhead", "nodes", "speed_up"))
    vgg = published["network"] == "VGG-A"
    for rows, marker, label in (
        (published[vgg], "o", "VGG-A, published"),
        (published[~vgg], "s", "others, published"),
    ):
        color = look.BLACK if marker == "o" else look.GREY
        efficiency_axes.plot(
            rows["nodes"], rows["efficiency"], marker, color=color, markersize=4, label=label
        )
    names = list(dict.fromkeys(implied["overhead"]))
    shades, curves = look.shades(names), []
    for name, line in zip(names, itertools.cycle(("-", "--", "-.", ":"))):
        rows = implied[implied["overhead"] == name]
        efficiency = rows["speed_up"] / rows["nodes"]
        color = shades[name].color
        curves += efficiency_axes.plot(rows["nodes"], efficiency, color=color, linestyle=line)
    efficiency_axes.set_xlim(0.9, implied["nodes"].max())
    short = [name.partition(":")[0] for name in names]
    for place in layout.label_ends(efficiency_axes, curves, short):
        curves[place].set_label(short[place])
    return set(implied["nodes"])


draw = drawer("scaling", _COLUMNS, scaling=scaling)
