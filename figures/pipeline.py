"""The figure of the pipeline study, from the folder of results that it wrote.

The data come from ``asyncsim study pipeline``, which draws it itself. To draw it again::

    python -m figures results/pipeline              # in a clone
    asyncsim figures results/pipeline     # installed

``pipeline``: the training loss of each profile of staleness against the learning rate, and at its
best rate; a row for each method.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.look import Look
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

_COLUMNS = ("method", "profile", "learning_rate", "seed", "train_loss", "status")
#: Largest loss in view, above that of a guess (2.3 for ten classes).
_MOST = 3.0


def pipeline(finished: Finished) -> Figure:
    """Draw the loss against the rate, and each profile at its best rate with its seeds."""
    table = finished.table("profiles.csv", ("method", "profile", "learning_rate", "relative"))
    summary = finished.summary
    methods = list(dict.fromkeys(table["method"]))
    names = list(dict.fromkeys(summary["profile"]))
    looks = look.category_looks(names) | {"none": Look(look.GREY, "-", "none")}
    figure, axes = look.new_figure(look.DOUBLE, 2.6 * len(methods), 2, rows=len(methods))
    for method, rates, best in zip(methods, axes[::2], axes[1::2], strict=True):
        runs = summary[summary["method"] == method]
        _against_rate(rates, runs[runs["status"] == "finished"], looks)
        _at_best_rate(best, table[table["method"] == method], runs, names, looks)
        layout.panel_title(rates, look.looks([method])[method].label)
    layout.legend_below(figure, *axes[0].get_legend_handles_labels(), 4)
    config = finished.config
    about = f"{config['problem']}, mean staleness {config['staleness']}"
    losses = table[["method", "profile", "learning_rate"]].merge(summary)
    losses = losses[losses["method"] == methods[0]].groupby("profile")["train_loss"]
    figure.set_label(
        findings.best(
            losses.agg(["mean", "min", "max"]),
            axis_of("train_loss"),
            f"for {look.looks(methods)[methods[0]].label}, each at its best rate,",
        )
    )
    seeds = over_seeds(int(config["seeds"]))
    layout.title(figure, f"staleness by part of the network; {about}, {seeds}", look.DOUBLE)
    return figure


def _against_rate(axes: Axes, runs: pd.DataFrame, looks: dict[str, Look]) -> None:
    for profile, rows in runs.groupby("profile", sort=False):
        loss = rows.groupby("learning_rate")["train_loss"].agg(["mean", "min", "max"])
        appearance = looks[str(profile)]
        axes.plot(
            loss.index,
            loss["mean"],
            color=appearance.color,
            linestyle=appearance.line,
            label=profile,
        )
        axes.fill_between(
            loss.index, loss["min"], loss["max"], color=appearance.color, alpha=0.15, linewidth=0
        )
    axes.set(xscale="log", yscale="log", xlabel=axis_of("learning_rate"))
    axes.set_ylabel(axis_of("train_loss"))
    least = float(runs["train_loss"].min())
    axes.set_ylim(least / 2, _MOST)


def _at_best_rate(
    axes: Axes, table: pd.DataFrame, runs: pd.DataFrame, names: list[str], looks: dict[str, Look]
) -> None:
    best = table[["profile", "learning_rate"]].merge(runs)
    for place, profile in enumerate(names):
        loss = best.loc[best["profile"] == profile, "train_loss"]
        axes.plot([place] * len(loss), loss, "o", markersize=3, color=looks[profile].color)
        axes.plot(place, loss.mean(), "_", markersize=14, color=looks[profile].color)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel(f"{axis_of('train_loss')}, at the best rate")


draw = drawer("pipeline", _COLUMNS, pipeline=pipeline)
