"""The figure of the study of outer momentum, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study outer_momentum``, which draws this itself. To draw it
again::

    asyncsim figures results/outer_momentum

Above, the final training loss against the effective outer rate, a panel for each case. Below, the
largest stable effective rate on a quadratic: theory and measurements.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_RULES = {"plain": "without momentum", "nesterov": "Nesterov", "heavy_ball": "heavy ball"}
_COLORS = {"plain": look.BLACK, "nesterov": look.BLUE, "heavy_ball": look.VERMILLION}


def losses(finished: Finished) -> Figure:
    """Draw the final loss of each rule and momentum against its effective rate.

    A circle marks each curve at the rate (not the effective rate) that is best without momentum.
    """
    summary = finished.summary
    loss = np.minimum(summary["train_loss"], summary["first_loss"])
    curves = summary.assign(loss=np.log(loss))
    table = finished.table("comparison.csv", ("case", "comparison", "plain_rate"))
    cases = list(dict.fromkeys(table["case"]))
    figure, panels = look.new_grid(len(cases), 1.9, 0.6, sharex=True, sharey=True)
    momenta = sorted(set(summary["server_momentum"]) - {0.0})
    lines = dict(zip(momenta, ("--", "-", ":", "-.") * len(momenta), strict=False))
    for axes, case in zip(panels, cases, strict=True):
        rows = curves[curves["case"] == case]
        plain_rate = table.loc[table["case"] == case, "plain_rate"].iloc[0]
        for (rule, momentum), runs in rows.groupby(["rule", "server_momentum"], sort=False):
            seeds = np.exp(runs.groupby("effective_rate")["loss"].agg(["mean", "min", "max"]))
            style = {"color": _COLORS[rule], "linestyle": lines.get(momentum, "-")}
            label = f"{_RULES[rule]} {momentum:g}" if momentum else _RULES[rule]
            axes.plot(seeds.index, seeds["mean"], label=label, **style)
            axes.fill_between(
                seeds.index, seeds["min"], seeds["max"], color=style["color"], alpha=0.12, lw=0
            )
            equal = plain_rate / (1 - momentum)
            nearest = seeds.index[np.argmin(np.abs(np.log(seeds.index / equal)))]
            axes.plot(nearest, seeds["mean"][nearest], "o", color=style["color"], markersize=3.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.tick_params(labelbottom=True, labelleft=True)
        axes.set_xlabel("effective outer rate, rate / (1 \u2212 momentum)")
        axes.set_ylabel("final training loss")
        delay = case.removeprefix("fixed ")
        staleness = rows["staleness_mean"].mean()
        name = f"queue, mean staleness {staleness:.1f}" if case == delay else f"staleness {delay}"
        layout.panel_title(axes, "no staleness" if delay == "0" else name)
    layout.legend_below(figure, *panels[0].get_legend_handles_labels(), 3)
    # The last case, which is the queue, each rule at its best rate.
    groups = curves[curves["case"] == cases[-1]].groupby(["rule", "server_momentum"], sort=False)
    ends = {}
    for (rule, momentum), runs in groups:
        seeds = np.exp(runs.groupby("effective_rate")["loss"].agg(["mean", "min", "max"]))
        ends[f"{_RULES[rule]} {momentum:g}" if momentum else _RULES[rule]] = seeds.loc[
            seeds["mean"].idxmin()
        ]
    lowest = pd.DataFrame(ends).T
    case = "behind the queue" if cases[-1] == delay else f"with {cases[-1]}"
    where = f"{case}, each rule at its best rate,"
    figure.set_label(findings.best(lowest, "final training loss", where))
    seeds = over_seeds(summary["seed"].nunique(), "geometric means and ranges of")
    about = "circles: the rate that is best without momentum"
    layout.title(
        figure,
        f"loss by outer rate and rule; {finished.config['problem']}, {seeds}; {about}",
        look.DOUBLE,
    )
    return figure


def limits(finished: Finished) -> Figure:
    """Draw the largest stable effective rate against the momentum's rule, theory and measured."""
    table = finished.table("limits.csv", ("case", "rule", "server_momentum", "theory", "measured"))
    cases = list(dict.fromkeys(finished.table("comparison.csv", ("case",))["case"]))
    keys = ["rule", "server_momentum"]
    figure, (axes,) = look.new_figure(look.SINGLE, 2.6)
    pairs = list(table.groupby(keys, sort=False))
    width = 0.8 / len(pairs)
    momenta = sorted(set(table["server_momentum"]) - {0.0})
    for place, ((rule, momentum), rows) in enumerate(pairs):
        means = rows.groupby("case")[["theory", "measured"]].mean().reindex(cases)
        offset = np.arange(len(cases)) + (place - (len(pairs) - 1) / 2) * width
        label = f"{_RULES[rule]} {momentum:g}" if momentum else _RULES[rule]
        alpha = 1 if momentum in (0, momenta[-1]) else 0.5
        axes.plot(
            offset,
            means["measured"],
            "o",
            color=_COLORS[rule],
            alpha=alpha,
            label=label,
            markersize=4,
        )
        theory = axes.plot(offset, means["theory"], "_", color=look.BLACK, markersize=9)
    theory[0].set_label("theory")
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [case.replace("fixed", "staleness") for case in cases])
    axes.set_ylabel("largest stable effective rate")
    layout.legend_below(figure, *axes.get_legend_handles_labels(), 2)
    off = (table["measured"] / table["theory"] - 1).abs().max()
    plain = table[table["rule"] == "plain"].groupby("case", sort=False)["measured"].mean()
    if len(plain) > 1:
        figure.set_label(
            f"Without momentum the largest stable rate is {number_text(plain.max())} for "
            f"{plain.idxmax()} and {number_text(plain.min())} for {plain.idxmin()}; measured rates "
            f"differ from the theory by at most {off:.1%}.".replace("fixed", "staleness")
        )
    layout.title(figure, "stable rates by rule, theory and replays; a quadratic of curvature 1")
    return figure


draw = drawer(
    "outer_momentum",
    ("case", "rule", "server_momentum", "effective_rate", "train_loss", "seed"),
    losses=losses,
    limits=limits,
)
