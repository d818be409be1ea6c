"""The figure of a study of scaling, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study scaling``, which draws it itself. To draw it again::

    python -m figures results/scaling              # in a clone
    asyncsim figures results/scaling     # installed

``scaling``: the efficiency against the number of nodes, computed and published, with overheads that are fitted to one
published point; and the layers' computing and communication on the largest cluster.
"""

import numpy as np
from matplotlib.figure import Figure

from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = ("nodes", "way", "efficiency")
#: Of ways to divide the work.
_LOOKS = {"data parallel": (look.VERMILLION, "--"), "hybrid": (look.BLUE, "-")}


def scaling(finished: Finished) -> Figure:
    """Draw efficiencies and published points on the left, the layers of the largest cluster on the right."""
    config, summary = finished.config, finished.summary
    layers = finished.table("layers.csv", ("nodes", "way", "layer", "computing", "communicating"))
    published, implied = (
        finished.table("published.csv", ("speed_up",)),
        finished.table("implied.csv", ("overhead", "nodes", "speed_up")),
    )
    figure, (left, right) = look.new_figure(look.DOUBLE, 3.3, 2)
    for way, (color, line) in _LOOKS.items():
        rows = summary[summary["way"] == way].sort_values("nodes")
        left.plot(rows["nodes"], rows["efficiency"], color=color, linestyle=line, label=f"{way}, computed")
    vgg = published["network"] == "VGG-A"
    for rows, marker, label in ((published[vgg], "o", "VGG-A, published"), (published[~vgg], "s", "others, published")):
        color = look.BLACK if marker == "o" else look.GREY
        left.plot(rows["nodes"], rows["efficiency"], marker, color=color, markersize=4, label=label)
    for name, one in look.others(dict.fromkeys(implied["overhead"])).items():
        rows = implied[implied["overhead"] == name]
        line = one.line if one.line != "-" else ":"
        left.plot(
            rows["nodes"], rows["speed_up"] / rows["nodes"], color=one.color, linestyle=line, linewidth=0.8, label=name
        )
    left.set_xscale("log", base=2)
    left.set_xticks(sorted({*summary["nodes"], *implied["nodes"]}))
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set_ylim(0, 1.05)
    left.set_xlabel("nodes")
    left.set_ylabel("speed-up / nodes")
    most = int(summary["nodes"].max())
    names = list(dict.fromkeys(layers["layer"].str.partition(".")[0]))
    place = np.arange(len(names))
    for way, (color, _) in _LOOKS.items():
        rows = layers[(layers["nodes"] == most) & (layers["way"] == way)]
        stage = rows["layer"].str.partition(".")[0]
        spent = rows.groupby(stage)[["computing", "communicating"]].sum().loc[names] * 1e3
        offset = -0.2 if way == "data parallel" else 0.2
        right.plot(
            spent["communicating"], place + offset, "D", color=color, markersize=3, label=f"communicating, {way}"
        )
    right.barh(place, spent["computing"], color="#d9d9d9", label="computing")
    right.set_xscale("log")
    layout.plain_logs(right.xaxis)
    right.set_yticks(place, names, fontsize=6 if len(names) > 12 else 7)
    right.set_ylim(len(names) - 0.4, -0.6)
    right.set_xlabel(f"milliseconds of an iteration on {most} nodes")
    handles, labels = left.get_legend_handles_labels()
    others, said = right.get_legend_handles_labels()
    layout.legend_below(figure, handles + others, labels + said, 3)
    assumed = f"assumed {config['flops']:g} operations/s and {config['bandwidth']:g} bytes/s a node"
    layout.title(figure, f"{config['network']}, {config['examples']} examples a node; {assumed}", look.DOUBLE)
    return figure


draw = drawer("scaling", _COLUMNS, scaling=scaling)
