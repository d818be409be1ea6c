"""The figure of a study of gossip, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study gossip``, which draws this itself. To draw it again::

    python -m figures results/gossip              # in a clone
    asyncsim figures results/gossip     # installed

``gossip``: the target's measure against simulated time and gradients, a column for each topology,
and the replicas' distance from their mean against the spectral gap; each method at its best
learning rate. Two rows for each split of the data.
"""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster_text import attack_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import Curve, draw_curve, evaluation_curve
from asyncsim.drawing.paper import drawer
from asyncsim.study import load
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished
from asyncsim.study.target import Target

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
#: The places of methods that are compared with gossip on each topology.
_RIVALS = ("server", "all-reduce")
_OF_SUMMARY = ("topology", "method", "learning_rate", "run_folder")


def gossip(finished: Finished) -> Figure:
    """Draw the curves of each topology and of the server, and the replicas' distances against the
    spectral gap.
    """
    config, quantity = finished.config, finished.config["target_of"]
    table = finished.table("gossip.csv", _COLUMNS)
    table = table.assign(name=table["topology"].str.removesuffix("()").str.replace("_", " "))
    splits = list(table["split"].unique()) if "split" in table else [None]
    keys = ["topology", "method", "learning_rate", *(["split"] if "split" in table else [])]
    names = list(table.loc[~table["topology"].isin(_RIVALS), "name"].unique())
    looks = look.looks(table["method"].unique())
    labels = {method: appearance.label for method, appearance in looks.items()}
    curves: dict[tuple[float | None, str, str], Curve] = {}
    for record in table.to_dict("records"):
        selection = {name: record[name] for name in keys}
        if len(finished.rows(**selection)):
            curves[record.get("split"), record["name"], record["method"]] = _curve(
                finished, quantity, selection
            )
    if not curves:
        reason = "its summary.csv has no run of gossip.csv"
        raise InputError(f"folder = {str(finished.folder)!r}: {reason}; {finished.remedy}")
    columns = len(names) + 1
    figure, panels = look.new_figure(
        max(look.DOUBLE, 1.75 * columns), 0.4 + 4.0 * len(splits), columns, 2 * len(splits)
    )
    accuracy = quantity.endswith("accuracy")
    # Limits around the target that include every curve.
    best = min(float(np.nan_to_num(curve.mean).max()) for curve in curves.values())
    low = max(0.0, min(1 - 6 * (1 - config["target"]), best - 0.1)) if accuracy else None
    rows = itertools.product(splits, (("time", "simulated time (s)"), ("step", "gradients")))
    for row, (split, (against, label)) in enumerate(rows):
        # Until the slowest run reaches the target; curves are flat afterwards.
        until = _until(
            _of(table, split),
            {key: curve for key, curve in curves.items() if key[0] == split},
            against,
        )
        for column, name in enumerate(names):
            axes = panels[row * columns + column]
            if accuracy:
                axes.set_ylim(low, 1.0)
            else:
                axes.set_yscale("log")
            shown = {
                method: curve
                for (of, place, method), curve in curves.items()
                if of == split and place in (name, *_RIVALS)
            }
            for method, curve in shown.items():
                draw_curve(axes, curve, looks[method], against, until)
            axes.axhline(config["target"], color=look.BLACK, linewidth=0.6, zorder=0)
            axes.set_xlim(0, until)
            axes.set_xlabel(label)
            if row % 2 == 0:
                axes.set_title(name if split is None else f"{name}\n{_split_text(split)}")
            if column == 0:
                axes.set_ylabel(axis_of(quantity))
            elif accuracy and not look.is_narrow(columns):
                axes.tick_params(labelleft=False)
    markers = dict(zip(names, look.MARKERS * len(names), strict=False))
    serverless = table[~table["topology"].isin(_RIVALS)]
    for number, split in enumerate(splits):
        distance_axes, empty = (panels[(2 * number + below + 1) * columns - 1] for below in (0, 1))
        for point in _of(serverless, split).itertuples():
            color = looks[point.method].color
            distance_axes.plot(
                point.spectral_gap,
                point.consensus_distance,
                markers[point.name],
                color=color,
                markersize=4,
                alpha=0.8,
            )
        distances = serverless["consensus_distance"]
        if (distances > 0).any():
            distance_axes.set_yscale("log")
            if len(splits) > 1:  # the same for all, with room for the markers
                distance_axes.set_ylim(distances[distances > 0].min() / 1.5, distances.max() * 1.5)
        distance_axes.set_xlim(-0.05, 1.1)
        distance_axes.set_xlabel(axis_of("spectral_gap"))
        distance_axes.set_title("mean squared distance\nfrom the mean replica")
        empty.axis("off")
    handles = [
        empty.plot([], [], markers[name], color=look.GREY, markersize=4)[0] for name in names
    ]
    empty.legend(handles, names, loc="center", title="topology", title_fontsize=7)
    lines = [
        empty.plot([], [], color=appearance.color, linestyle=appearance.line)[0]
        for appearance in looks.values()
    ]
    layout.legend_below(figure, lines, [appearance.label for appearance in looks.values()], 6)
    slow = f", one {config['slow']:g} times as slow" if config["slow"] != 1 else ""
    link = config.get("slow_link", 1)
    slow += f", one link {link:g} times as slow" if link != 1 else ""
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    workers = counted(config["workers"], "worker")
    setting = ", ".join([config["problem"], f"{workers}{slow}", *attack_text(config.get("attack"))])
    tried = config["tune"]
    rates = "at their best learning rates" if tried[1:] else f"all at learning rate {tried[0]:g}"
    title_parts = [f"methods by topology, {rates}", setting, seeds]
    layout.title(figure, "; ".join(title_parts))
    runs = finished.summary.merge(table[[*keys, "name"]])
    rows = runs["method"].map(labels) + " on " + runs["name"]
    if "split" in keys:
        rows += ", " + runs["split"].map(_split_text)
    reached = runs.groupby(rows)["time_to_target"].agg(["mean", "min", "max"])
    missed = findings.missed(runs, rows, config)
    caption = findings.best(reached, axis_of("time_to_target"), failure=missed)
    if splits == [None]:  # one seed has no ranges, but the verdict names it
        goal = Target(config["target"], quantity, config.get("hold", 0))
        caption = caption or findings.sentence(load("gossip").verdict(table, goal))
    figure.set_label(caption)
    return figure


def _of(table: pd.DataFrame, split: float | None) -> pd.DataFrame:
    """Select the rows of a split of the data; all rows if there is no split."""
    return table if split is None else table[table["split"] == split]


def _split_text(split: float) -> str:
    return "data alike (none)" if np.isinf(split) else f"Dirichlet {split:g}"


def _curve(finished: Finished, quantity: str, selection: dict[str, Any]) -> Curve:
    """Return the curve of the target's measure at the evaluations of the runs; its steps are
    gradients.
    """
    runs = finished.runs(**selection)
    return evaluation_curve(
        runs, [run.evaluations["gradients"] for run in runs], quantity
    )._replace(ends=[])


def _until(table: pd.DataFrame, curves: dict[Any, Curve], against: str) -> float:
    """Return the end of the horizontal axis: shortly after the last success in reaching the
    target.
    """
    longest = max(
        float(np.nanmax(curve.time if against == "time" else curve.step))
        for curve in curves.values()
    )
    reached = table["time_to_target" if against == "time" else "gradients_to_target"]
    finite = reached[np.isfinite(reached)]
    return min(longest, 1.25 * float(finite.max())) if len(finite) else longest


draw = drawer("gossip", _OF_SUMMARY, gossip=gossip)
