"""The figure of the study of optimizers under delay, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study optimizers_under_delay``, which draws this itself. To
draw it again::

    asyncsim figures results/optimizers_under_delay

The gap of each optimizer at its best rate against the delay, fixed and from queues; how the best
rate shifts; the gap against beta1.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = (
    "optimizer",
    "adaptive",
    "source",
    "delay",
    "beta1",
    "learning_rate",
    "shift",
    "gap",
    "low",
    "high",
)
_NAMES = {
    "sgd": "SGD",
    "momentum": "momentum SGD",
    "adamw_90": "AdamW 0.9",
    "adamw_95": "AdamW 0.95",
    "lion": "Lion",
    "muon": "Muon",
}


def gaps(finished: Finished) -> Figure:
    """Draw gaps and shifts against the delay, and gaps against beta1."""
    table = finished.table("gaps.csv", _COLUMNS)
    looks = look.category_looks(dict.fromkeys(table["optimizer"]))
    figure, panels = look.new_figure(look.DOUBLE, 4.6, 2, 2)
    fixed, queue, shift, beta = panels
    plain, pipeline = table[~table["adaptive"]], table[table["source"] == "pipeline"]
    delayed = plain[(plain["source"] == "fixed") & (plain["delay"] > 0)]
    delays = sorted(set(table.loc[table["source"] == "fixed", "delay"]))
    largest = max(1.0, table["delay"].max())
    markers = dict(zip(looks, look.MARKERS, strict=False))
    for name, style in looks.items():
        label = _NAMES.get(name, name)
        _curve(fixed, plain, "fixed", name, style, "gap", label=label, marker=markers[name])
        _curve(queue, plain, "queue", name, style, "gap", label=label, marker=markers[name])
        adaptive = table[table["adaptive"]]
        _curve(queue, adaptive, "queue", name, style, "gap", marker=markers[name], faint=True)
        _curve(shift, plain, "fixed", name, style, "shift", label=label, marker=markers[name])
        for axes, column in ((fixed, "gap"), (shift, "shift")):
            rows = pipeline[pipeline["optimizer"] == name]
            axes.plot(rows["delay"], rows[column], "*", color=style.color, markersize=6)
        rows = delayed[delayed["optimizer"] == name]
        if len(rows):
            mean = rows[["beta1", "gap", "low", "high"]].mean()
            beta.plot(mean["beta1"], mean["gap"], markers[name], color=style.color, markersize=5)
    texts = {
        fixed: "fixed delay; stars: the pipeline",
        queue: "queues; pale: delay-adaptive",
        shift: "fixed delay; stars: the pipeline",
        beta: "mean over the fixed delays",
    }
    for axes, text in texts.items():
        layout.panel_title(axes, text)
        axes.set_ylabel("gap of the loss (nats)")
        axes.set_xlabel("delay (versions)")
        if axes is not beta:
            axes.set_xlim(-0.04 * largest, 1.04 * largest)
            layout.ticks_at(axes.xaxis, delays)
    queue.set_xlabel("mean staleness (versions)")
    shift.set_ylabel("best rate, over that at delay 0")
    shift.set_yscale("log")
    beta.set_xlim(-0.05, 1)
    beta.set_xlabel("beta1, weight of the past in a step")
    layout.legend_below(figure, *fixed.get_legend_handles_labels(), 6)
    if len(delayed):
        most = delayed[delayed["delay"] == delayed["delay"].max()].set_index("optimizer")
        most = most[["gap", "low", "high"]].set_axis(["mean", "min", "max"], axis=1)
        where = f"at a fixed delay of {delayed['delay'].max():g} versions"
        figure.set_label(findings.best(most.rename(_NAMES), "gap of the loss (nats)", where))
    seeds = over_seeds(finished.summary["seed"].nunique(), "means of")
    layout.title(
        figure,
        f"optimizers under delay, each at its best rate; {finished.config['problem']}, {seeds}",
        look.DOUBLE,
    )
    return figure


def _curve(
    axes: Axes,
    table: pd.DataFrame,
    source: str,
    optimizer: str,
    style: look.Look,
    column: str,
    label: str = "",
    marker: str = "o",
    faint: bool = False,
) -> None:
    rows = table[(table["source"] == source) & (table["optimizer"] == optimizer)]
    rows = rows.sort_values("delay")
    axes.plot(
        rows["delay"],
        rows[column],
        color=style.color,
        linestyle=style.line,
        marker=marker,
        markersize=3,
        alpha=0.35 if faint else 1,
        label=label or None,
    )
    if column == "gap" and not faint and np.isfinite(rows["low"]).all():
        axes.fill_between(
            rows["delay"], rows["low"], rows["high"], color=style.color, alpha=0.12, linewidth=0
        )


draw = drawer(
    "optimizers_under_delay",
    ("source", "delay", "optimizer", "learning_rate", "train_loss", "seed"),
    gaps=gaps,
)
