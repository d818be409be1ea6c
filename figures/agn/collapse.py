"""DOWNPOUR's collapse with more workers or longer windows, and the staleness in each cluster."""

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished

from . import published
from .tables import is_thesis, published_grid, setting

#: Of ten classes.
_CHANCE, _OF_TEN_CLASSES = 10.0, ("digits", "mnist", "cifar10")
#: Marker of published values only.
_PUBLISHED = "s"


def collapse(results: Finished) -> Figure:
    """Draw the final training accuracy against the workers, ours and published, a panel for each
    window.
    """
    table = results.table("grid.csv")
    if "train_accuracy" not in table or "downpour" not in set(table["method"]):
        raise InputError(f"folder = {str(results.folder)!r}: no accuracies of downpour")
    windows = sorted(table["window"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.7, len(windows), sharey=True, sharex=True)
    looks = look.looks(dict.fromkeys(table["method"]))
    markers = [marker for marker in look.MARKERS if marker != _PUBLISHED]
    theirs: set[int] = set()
    of_ten_classes = results.config.get("problem") in _OF_TEN_CLASSES
    for axes, window in zip(panels, windows, strict=True):
        for turn, ((name, appearance), marker) in enumerate(
            zip(looks.items(), itertools.cycle(markers), strict=False)
        ):
            rows = table[(table["method"] == name) & (table["window"] == window)].sort_values(
                "workers"
            )
            style: dict[str, Any] = {
                "color": appearance.color,
                "linestyle": appearance.line,
                "marker": marker,
            }
            # Lower markers are larger, because with a window of one AGN coincides with DOWNPOUR.
            size = 4 + 1.7 * (len(looks) - 1 - turn)
            axes.plot(
                rows["workers"],
                100 * rows["train_accuracy"],
                label=appearance.label,
                markersize=size,
                **style,
            )
            published_values = published_grid(results, "collapse_accuracy", name)
            published_values = published_values[
                published_values.index.get_level_values("window") == window
            ]
            theirs |= set(published_values.index.get_level_values("workers"))
            hollow: dict[str, Any] = {"linestyle": "none", "marker": _PUBLISHED}
            hollow |= {"markerfacecolor": "white", "markersize": 5}
            axes.plot(
                published_values.index.get_level_values("workers"),
                100 * published_values,
                color=appearance.color,
                zorder=1,
                **hollow,
            )
        if of_ten_classes:
            axes.axhline(_CHANCE, color=look.GREY, linewidth=0.7, linestyle=":")
        axes.set_title(f"\u03bb = {window}")
        axes.set_xlabel("workers n")
    counts = sorted({*table["workers"], *theirs})
    panels[0].set_xticks(counts, [str(n) for n in counts])
    panels[0].set_ylim(0, 103)
    panels[0].set_ylabel("training accuracy (%)")
    handles, _ = panels[0].get_legend_handles_labels()
    if theirs:
        handles += panels[0].plot(
            [], [], color=look.BLACK, label=f"published ({published.SOURCE})", **hollow
        )
    if of_ten_classes:
        handles += panels[0].plot(
            [], [], color=look.GREY, linewidth=0.7, linestyle=":", label="chance"
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    n = table["workers"].max()
    most = table[(table["workers"] == n) & (table["window"] == windows[0])]
    reached = [
        f"{row.train_accuracy:.1%} with {looks[row.method].label}" for row in most.itertuples()
    ]
    figure.set_label(
        f"With {n} workers and a window of {windows[0]}, the training accuracy ends "
        f"at {', '.join(reached)}."
    )
    layout.title(
        figure,
        setting(results, "accuracy at the end with more workers and windows of \u03bb local steps"),
    )
    return figure


def staleness(results: Finished) -> Figure:
    """Draw the distribution of staleness, a panel for each number of workers, and the published
    modes.
    """
    table = results.table("staleness.csv")
    counts, windows = sorted(table["workers"].unique()), sorted(table["window"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.5, len(counts))
    modes = published.modes() if is_thesis(results) else published.modes().head(0)
    for axes, n in zip(panels, counts, strict=True):
        for window, shade in look.shades(windows).items():
            rows = table[(table["workers"] == n) & (table["window"] == window)]
            axes.stairs(
                rows["share"], np.append(rows["staleness"], len(rows)) - 0.5, color=shade.color
            )
        axes.axvline(n - 1, color=look.BLACK, linewidth=0.8, linestyle="--")
        if n in modes.index:
            axes.plot(
                modes[n],
                0,
                marker="^",
                color=look.VERMILLION,
                markersize=5,
                clip_on=False,
                zorder=4,
            )
        axes.set_title(f"n = {n}")
        axes.set_xlabel("staleness (versions)")
        axes.set_xlim(-0.5, None)
        axes.set_ylim(0, None)
        layout.whole_ticks(axes.xaxis, 5)
    panels[0].set_ylabel("share of commits")
    first_panel = panels[0]
    handles = [
        first_panel.plot([], [], color=s.color, label=f"\u03bb = {w}")[0]
        for w, s in look.shades(windows).items()
    ]
    handles += first_panel.plot(
        [], [], color=look.BLACK, linewidth=0.8, linestyle="--", label="n \u2212 1"
    )
    mark: dict[str, Any] = {
        "marker": "^",
        "linestyle": "none",
        "color": look.VERMILLION,
        "markersize": 5,
    }
    if modes.index.isin(counts).any():
        handles += first_panel.plot([], [], label=f"published mode ({published.SOURCE})", **mark)
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    config = results.config
    table = table.assign(mean=table["staleness"] * table["share"])
    means = table.groupby(["workers", "window"])["mean"].sum()
    off = (means - means.index.get_level_values(0) + 1).abs().max()
    figure.set_label(
        f"The mean staleness is within {number_text(off, 2)} versions of n \u2212 1, whatever the "
        "window."
    )
    cluster = (
        f"a local step {config.get('compute')} s, a visit {config.get('service')} s, "
        f"{config.get('protocol')}"
    )
    layout.title(figure, f"staleness with n workers and windows of \u03bb local steps; {cluster}")
    return figure
