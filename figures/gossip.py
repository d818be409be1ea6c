"""The figure of a study of gossip, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study gossip``, which draws this itself. To draw it again::

    python -m figures results/gossip              # in a clone
    asyncsim figures results/gossip     # installed

``gossip``: test accuracy, or whatever the target is of, against simulated time and gradients, a column for each
topology, and the replicas' distance from their mean beside the spectral gap; each method at its best learning rate.
Two rows for each split of the data.
"""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import Curve, coincidences, draw_curve, evaluation_curve
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

_COLUMNS = (
    "topology",
    "method",
    "learning_rate",
    "time_to_target",
    "consensus_distance",
    "spectral_gap",
    "gradients_to_target",
    "seeds",
)
_OF_SUMMARY = ("topology", "method", "learning_rate", "run_folder")


def gossip(finished: Finished) -> Figure:
    """Draw the curves of each topology beside those with a server, and the distances beside the spectral gaps."""
    config, quantity = finished.config, finished.config["target_of"]
    table = finished.table("gossip.csv", _COLUMNS)
    table = table.assign(name=table["topology"].str.removesuffix("()").str.replace("_", " "))
    splits = list(table["dirichlet"].unique()) if "dirichlet" in table else [None]
    keys = ["topology", "method", "learning_rate", *(["dirichlet"] if "dirichlet" in table else [])]
    names = list(table.loc[table["topology"] != "server", "name"].unique())
    looks = look.looks(table["method"].unique())
    curves: dict[tuple[float | None, str, str], Curve] = {}
    for record in table.to_dict("records"):
        own = {name: record[name] for name in keys}
        if len(finished.rows(**own)):
            curves[record.get("dirichlet"), record["name"], record["method"]] = _curve(finished, quantity, own)
    if not curves:
        what = "its summary.csv has no run of gossip.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {what}; {finished.remedy}")
    columns = len(names) + 1
    figure, panels = look.new_figure(
        max(look.DOUBLE, 1.75 * columns), 0.4 + 4.0 * len(splits), columns, 2 * len(splits)
    )
    accuracy = quantity.endswith("accuracy")
    # Around the target, and no curve is left out.
    best = min(float(np.nan_to_num(curve.mean).max()) for curve in curves.values())
    low = max(0.0, min(1 - 6 * (1 - config["target"]), best - 0.1)) if accuracy else None
    rows = itertools.product(splits, (("time", "simulated time (s)"), ("step", "gradients")))
    for row, (split, (against, said)) in enumerate(rows):
        # As far as the slowest needs, if it gets there: what comes after is flat.
        until = _until(_of(table, split), {key: curve for key, curve in curves.items() if key[0] == split}, against)
        for column, name in enumerate(names):
            axes = panels[row * columns + column]
            if accuracy:
                axes.set_ylim(low, 1.0)
            else:
                axes.set_yscale("log")
            for (of, place, method), curve in curves.items():
                if of == split and place in (name, "server"):
                    draw_curve(axes, curve, looks[method], against, until)
            if not accuracy:
                layout.plain_logs(axes.yaxis)
            axes.axhline(config["target"], color=look.BLACK, linewidth=0.6, zorder=0)
            axes.set_xlim(0, until)
            axes.set_xlabel(said)
            if row % 2 == 0:
                axes.set_title(name if split is None else f"{name}\n{_said(split)}")
            if column == 0:
                axes.set_ylabel(axis_of(quantity))
            elif accuracy:
                axes.tick_params(labelleft=False)
    markers = dict(zip(names, look.MARKERS * len(names), strict=False))
    alone = table[table["topology"] != "server"]
    for number, split in enumerate(splits):
        apart, empty = (panels[(2 * number + below + 1) * columns - 1] for below in (0, 1))
        for one in _of(alone, split).itertuples():
            color = looks[one.method].color
            apart.plot(
                one.spectral_gap, one.consensus_distance, markers[one.name], color=color, markersize=4, alpha=0.8
            )
        distances = alone["consensus_distance"]
        if (distances > 0).any():
            apart.set_yscale("log")
            if len(splits) > 1:  # the same for all, with room for the markers
                apart.set_ylim(distances[distances > 0].min() / 1.5, distances.max() * 1.5)
            layout.plain_logs(apart.yaxis)
        apart.set_xlim(-0.05, 1.1)
        apart.set_xlabel(axis_of("spectral_gap"))
        apart.set_title("mean squared distance\nfrom the mean replica")
        empty.axis("off")
    handles = [empty.plot([], [], markers[name], color=look.GREY, markersize=4)[0] for name in names]
    empty.legend(handles, names, loc="center", title="topology", title_fontsize=7)
    lines = [empty.plot([], [], color=one.color, linestyle=one.line)[0] for one in looks.values()]
    layout.legend_below(figure, lines, [one.label for one in looks.values()], 6)
    slow = f", one {config['slow']:g} times as slow" if config["slow"] != 1 else ""
    link = config.get("slow_link", 1)
    slow += f", one link {link:g} times as slow" if link != 1 else ""
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    workers = counted(config["workers"], "worker")
    said = [f"{config['problem']}, {workers}{slow}", seeds, "each at the best of its learning rates"]
    labels = {method: one.label for method, one in looks.items()}
    for split, name in itertools.product(splits, names):
        own = {method: one for (of, at, method), one in curves.items() if of == split and at in (name, "server")}
        said += [
            f"{text} on {name}{'' if split is None else f', {_said(split)}'}" for text in coincidences(own, labels)
        ]
    layout.title(figure, "; ".join(said))
    return figure


def _of(table: pd.DataFrame, split: float | None) -> pd.DataFrame:
    """Return the rows of a split of the data."""
    return table if split is None else table[table["dirichlet"] == split]


def _said(split: float) -> str:
    return "data alike (none)" if np.isinf(split) else f"Dirichlet {split:g}"


def _curve(finished: Finished, quantity: str, own: dict[str, Any]) -> Curve:
    """Return what the target is of at the evaluations of some runs; its steps are gradients."""
    runs = finished.runs(**own)
    return evaluation_curve(runs, [run.evaluations["gradients"] for run in runs], quantity)._replace(ends=[])


def _until(table: pd.DataFrame, curves: dict[Any, Curve], against: str) -> float:
    """Return where the horizontal axis ends: a bit after all that get to the target have got there."""
    whole = max(float(np.nanmax(curve.time if against == "time" else curve.step)) for curve in curves.values())
    needed = table["time_to_target" if against == "time" else "gradients_to_target"]
    known = needed[np.isfinite(needed)]
    return min(whole, 1.25 * float(known.max())) if len(known) else whole


draw = drawer("gossip", _OF_SUMMARY, gossip=gossip)
