"""The further figure of a study of gossip, beside the figures of every comparison.

The data come from ``python -m asyncsim.study gossip``, which draws this itself. To draw it again::

    python -m figures results/gossip              # in a clone
    asyncsim figures results/gossip     # installed

``consensus``: the replicas' distance from their mean against the topology's spectral gap, each
method at its best learning rate.
"""

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of, setting_text
from asyncsim.study.finished import Finished
from asyncsim.study.results import RANKING

_DISTANCE = "consensus_distance"


def consensus(finished: Finished) -> Figure | None:
    """Draw the distances of the replicas against the spectral gap, a panel for each split."""
    if _DISTANCE not in finished.summary:
        return None
    table = finished.table(RANKING, ("method", "topology", "spectral_gap", _DISTANCE))
    table = table[np.isfinite(table[_DISTANCE])]
    if table.empty:
        return None
    splits = [("", table)]
    if "split" in table:
        groups = table.groupby("split", sort=False)
        splits = [(setting_text("split", split), rows) for split, rows in groups]
    looks = look.looks(table["method"].unique())
    markers = dict(zip(table["topology"].unique(), look.MARKERS * len(table), strict=False))
    figure, panels = look.new_grid(len(splits), 2.7, sharey=True)
    for axes, (title, rows) in zip(panels, splits, strict=True):
        for row in rows.to_dict("records"):
            appearance = looks[row["method"]]
            axes.plot(
                row["spectral_gap"],
                row[_DISTANCE],
                markers[row["topology"]],
                color=appearance.color,
                label=f"{appearance.label}, {row['topology'].removesuffix('()')}",
            )
        if (table[_DISTANCE] > 0).any():
            axes.set_yscale("log")
        axes.set_xlim(-0.05, 1.1)
        axes.set_xlabel(axis_of("spectral_gap"))
        axes.set_ylabel("mean squared distance\nfrom the mean replica")
        layout.panel_title(axes, title)
    seeds = over_seeds(int(table["seeds"].max()), "means over", int(table["seeds"].min()))
    layout.finish(figure, f"replicas by topology; {finished.config['problem']}; {seeds}", 3)
    far, near = table.loc[table[_DISTANCE].idxmax()], table.loc[table[_DISTANCE].idxmin()]
    figure.set_label(
        f"Replicas are farthest from their mean with {far['method']} on {far['topology']}, "
        f"{number_text(far[_DISTANCE])}, and nearest with {near['method']} on {near['topology']}, "
        f"{number_text(near[_DISTANCE])}."
    )
    return figure


draw = drawer("gossip", ("seed",), consensus=consensus)
