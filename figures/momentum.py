"""The figures of "Asynchrony begets momentum" (Mitliagkas et al. 2016, arXiv 1605.09774) from our
own runs.

The best explicit momentum against the number of workers, and the speed of learning against the
momentum; the measured implicit momentum beside the theory. The studies ``best_momentum`` and
``momentum`` draw them themselves. To draw them again::

    python -m figures momentum                                    # in a clone
    asyncsim figures momentum --results results         # installed
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, over_seeds, summary_of
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import Drawing, Paper, Study
from asyncsim.study.finished import Finished

#: Columns of the study of implicit momentum, and those that distinguish its rows.
_MEASURED = ["workers", "momentum_measured", "standard_error", "momentum_theory"]
_GROUPS = ("method", "compute", "window")
#: Error bars, in standard errors.
_SIGMAS = 2
_BEST = ["workers", "server_momentum", "lowest", "highest"]


def momentum(finished: Finished) -> Figure:
    """Draw the best momentum against the number of workers, and the speed of learning against the
    momentum.

    Each momentum is shown at the learning rate with the lowest geometric mean loss over the seeds.
    Without noise the loss of a quadratic falls geometrically: the gradients per factor of ten
    measure the speed.
    """
    config, summary = finished.config, finished.summary
    best = finished.table("best.csv", _BEST)
    figure, (momentum_axes, speed_axes) = look.new_figure(look.DOUBLE, 2.9, 2)
    counts = best["workers"].to_numpy()
    beyond = [
        (best["server_momentum"] - best["lowest"]).clip(0),
        (best["highest"] - best["server_momentum"]).clip(0),
    ]
    momentum_axes.errorbar(
        counts,
        best["server_momentum"],
        beyond,
        fmt="o-",
        color=look.BLUE,
        markersize=3.5,
        capsize=2,
        label="best explicit",
    )
    n = np.geomspace(counts.min(), counts.max(), 100)
    momentum_axes.plot(
        n, 1 - 1 / n, color=look.GREY, linestyle="--", label="implicit: 1 \u2212 1/n"
    )
    momentum_axes.axhline(0, color=look.BLACK, linewidth=0.6)
    momentum_axes.set_xscale("log")
    layout.ticks_at(momentum_axes.xaxis, counts)
    momentum_axes.set_xlabel("workers n")
    momentum_axes.set_ylabel("momentum")
    momentum_axes.legend()
    shades = look.shades(counts.tolist())
    with np.errstate(divide="ignore"):
        decades = np.log10(summary["first_loss"] / summary["train_loss"])
    mean = decades.groupby(
        [summary[name] for name in ("workers", "server_momentum", "learning_rate")]
    ).mean()
    fastest = mean.groupby(level=[0, 1]).max()
    for count, shade in shades.items():
        curve = fastest.loc[count]
        curve = curve[np.isfinite(curve) & (curve > 0)]
        speed_axes.plot(
            curve.index,
            config["gradients"] / curve,
            color=shade.color,
            marker=shade.marker,
            markersize=3,
            label=f"n = {count}",
        )
    speed_axes.set_yscale("log")
    speed_axes.set_xlabel("explicit momentum on the server")
    speed_axes.set_ylabel("gradients until a tenth of the loss")
    speed_axes.legend(ncols=2)
    seeds = over_seeds(summary["seed"].nunique(), "means and ranges of")
    gradients = counted(config["gradients"], "gradient")
    if len(best) > 1:
        ends = " to ".join(
            f"{row.server_momentum:g} with {counted(row.workers, 'worker')}"
            for row in best.iloc[[0, -1]].itertuples()
        )
        figure.set_label(f"The best explicit momentum goes from {ends}.")
    layout.title(figure, f"{config['problem']}, {gradients} at the best learning rate; {seeds}")
    return figure


def implicit(finished: Finished) -> Figure:
    """Draw the measured momentum less the theoretical one against the number of workers, by law of
    the compute times, window and method.
    """
    table = finished.table("momentum.csv", _MEASURED).sort_values("workers")
    table["off"] = table["momentum_measured"] - table["momentum_theory"]
    figure, (axes,) = look.new_figure(look.SINGLE, 2.8)
    names = [name for name in _GROUPS if name in table]
    groups = dict(list(table.groupby(names, sort=False))) if names else {(): table}
    labels = {group: ", ".join(map(str, group)) or "measured" for group in groups}
    looks = look.category_looks(labels.values())
    for turn, ((group, rows), marker) in enumerate(zip(groups.items(), look.MARKERS, strict=False)):
        # Side by side, as all have the same numbers of workers.
        x = rows["workers"] * 1.06 ** (turn - (len(groups) - 1) / 2)
        color, _, label = looks[labels[group]]
        bars: dict[str, Any] = {"fmt": marker, "color": color, "markersize": 3, "capsize": 2}
        axes.errorbar(x, rows["off"], _SIGMAS * rows["standard_error"], label=label, **bars)
    axes.axhline(0, color=look.BLACK, linewidth=0.8)
    axes.set_ylabel("measured minus theoretical momentum")
    axes.set_xscale("log")
    layout.ticks_at(axes.xaxis, sorted(table["workers"].unique()))
    axes.set_xlabel("workers n")
    if table["off"].notna().any():
        row = table.loc[table["off"].abs().idxmax()]
        off = abs(row["off"])
        figure.set_label(
            f"Measured momentum is within {number_text(off, 2)} of the theory; the largest "
            f"difference is with {counted(int(row['workers']), 'worker')}, "
            f"{number_text(off / row['standard_error'], 2)} standard errors."
        )
    layout.legend_below(figure, *axes.get_legend_handles_labels(), columns=1)
    problem = finished.config.get("problem", "")
    text = f"implicit momentum of asynchrony; {problem}; bars: \u00b1{_SIGMAS} standard errors"
    layout.title(figure, text)
    return figure


PAPER = Paper(
    "momentum",
    summary_of(__doc__),
    {
        "best_momentum": Study(
            "best_momentum", "on two cores about 3 min with small, half an hour with paper"
        ),
        "momentum": Study("momentum", "on two cores about 1 min with small, 5 min with paper"),
    },
    {
        "momentum": Drawing("best_momentum", "the best explicit momentum with n workers", momentum),
        "implicit": Drawing("momentum", "measured beside theoretical implicit momentum", implicit),
    },
)
draw, draw_study, main = PAPER.draw, PAPER.draw_study, PAPER.main
