"""Accuracy over time, and the size, the direction and the damping of updates."""

import itertools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.replays.recorders import POSITION
from asyncsim.study.finished import Finished

from .tables import setting

#: Columns of grid.csv and their labels; the cosines are there if the study recorded directions.
_COLUMNS = {
    "update_norm": "mean length of a step",
    "straightness": "distance / length of the path",
    "gradient_cosine": "cosine, full gradient",
    "target_cosine": "cosine, way to the end",
    "previous_cosine": "cosine, previous step",
}


def time(results: Finished) -> Figure:
    """Draw AGN's training accuracy against the time: above a panel for each number of workers,
    below for each window.
    """
    rows = _rows_of(results, "agn")
    counts, windows = (sorted(rows[name].unique()) for name in ("workers", "window"))
    columns = max(len(counts), len(windows))
    figure, panels = look.new_figure(look.DOUBLE, 4.6, columns, 2, sharey=True)
    halves = ("workers", counts, "window", windows), ("window", windows, "workers", counts)
    for place, (fixed, values, varied, shaded) in enumerate(halves):
        shades = look.shades(shaded)
        line = panels[place * columns : (place + 1) * columns]
        for axes in line[len(values) :]:
            axes.set_visible(False)
        for axes, value in zip(line, values, strict=False):
            for key, runs in rows[rows[fixed] == value].groupby(varied):
                evaluations = results.run(runs["run_folder"].iloc[0]).evaluations
                axes.plot(
                    evaluations["commit_time"],
                    100 * evaluations["train_accuracy"],
                    color=shades[key].color,
                    label=f"{_SYMBOLS[varied]} = {key}",
                )
            axes.set_title(f"{_SYMBOLS[fixed]} = {value}", fontsize=8)
            axes.set_xlabel("simulated time (s)")
        line[0].set_ylabel("training accuracy (%)")
        line[0].legend(fontsize=6)
    summary = results.rows(method="agn", workers=counts[-1])
    ends = 100 * summary.groupby(summary["window"].map("\u03bb = {}".format))["train_accuracy"].agg(
        ["mean", "min", "max"]
    )
    where = f"with {counted(int(counts[-1]), 'worker')}"
    figure.set_label(findings.best(ends, "training accuracy (%)", where, rising=True))
    layout.title(figure, setting(results, "AGN: accuracy over time, first seed"))
    return figure


_SYMBOLS = {"workers": "n", "window": "\u03bb"}


def updates(results: Finished) -> Figure:
    """Draw the size and the direction of updates, and the straightness of the path, by window."""
    table = results.table("grid.csv")
    present = {name: label for name, label in _COLUMNS.items() if name in table}
    if not present:
        raise InputError(
            f"folder = {str(results.folder)!r}: is of an earlier version; run it again"
        )
    looks, counts = look.looks(dict.fromkeys(table["method"])), sorted(table["workers"].unique())
    rows = 1 + (len(present) > 2)
    figure, panels = look.new_figure(look.DOUBLE, 0.9 + 2.0 * rows, -(-len(present) // rows), rows)
    for axes in panels[len(present) :]:
        axes.set_visible(False)
    for axes, (name, label) in zip(panels, present.items(), strict=False):
        for (method, appearance), (n, marker) in itertools.product(
            looks.items(), zip(counts, look.MARKERS, strict=False)
        ):
            points = table[(table["method"] == method) & (table["workers"] == n)]
            points = points.sort_values("window")
            axes.plot(
                points["window"],
                points[name],
                color=appearance.color,
                linestyle=appearance.line,
                marker=marker,
                markersize=3.5,
                label=f"{appearance.label}, n = {n}",
            )
        axes.set_xlabel("window \u03bb")
        axes.set_ylabel(label)
    panels[0].set_yscale("log")
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=6)
    rows = table[(table["workers"] == counts[-1]) & (table["method"] == next(iter(looks)))]
    name = next(iter(present))
    values = rows.sort_values("window").set_index("window")[name]
    if len(values) > 1:
        figure.set_label(
            f"With {counted(int(counts[-1]), 'worker')}, the {present[name]} of "
            f"{next(iter(looks.values())).label} goes from {number_text(values.iloc[0])} at a "
            f"window of {values.index[0]} to {number_text(values.iloc[-1])} at {values.index[-1]}."
        )
    layout.title(figure, setting(results, "updates by window"))
    return figure


def factor(results: Finished) -> Figure:
    """Draw the median of ADAG's factor over the weights against the time."""
    rows = _rows_of(results, "adag")
    counts = sorted(rows["workers"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.7, len(counts), sharey=True)
    shades = look.shades(sorted(rows["window"].unique()))
    for axes, n in zip(panels, counts, strict=True):
        for window, runs in rows[rows["workers"] == n].groupby("window"):
            table = results.run(runs["run_folder"].iloc[0]).diagnostics
            medians = table.query("quantity == 'factor' and quantile == 0.5 and tensor == ''")
            if medians.empty:
                raise InputError(
                    f"folder = {str(results.folder)!r}: has no diagnostics; run the study with "
                    "--diagnose-every 5"
                )
            axes.plot(
                medians["commit_time"],
                medians["value"],
                color=shades[window].color,
                label=f"\u03bb = {window}",
            )
        axes.set_title(f"n = {n}", fontsize=8)
        axes.set_xlabel("simulated time (s)")
    panels[0].set_ylabel("median factor")
    panels[0].legend(fontsize=6)
    figure.set_label(
        f"With {n} workers and a window of {window}, the median factor ends at "
        f"{number_text(medians['value'].iloc[-1])}."
    )
    layout.title(figure, setting(results, "ADAG's factor over time, first seed"))
    return figure


def path(results: Finished) -> Figure:
    """Draw the path of AGN's central variable by window, in the two main directions of all
    paths.
    """
    paths = {}
    for row in _rows_of(results, "agn").sort_values(["window", "workers"]).itertuples():
        positions = results.run(row.run_folder).commits.filter(like=POSITION).to_numpy()
        if not positions.size:
            raise InputError(
                f"folder = {str(results.folder)!r}: has no positions; run the study with --animate"
            )
        paths[row.window] = np.vstack([np.zeros(positions.shape[1]), positions])
    _, _, directions = np.linalg.svd(np.vstack([*paths.values()]), full_matrices=False)
    figure, (axes,) = look.new_figure(look.SINGLE, 2.4)
    shares = {}
    for window, shade in look.shades(paths).items():
        points = paths[window]
        length = np.linalg.norm(np.diff(points, axis=0), axis=1).sum()
        shares[window] = share = np.linalg.norm(points[-1]) / length
        axes.plot(
            *directions[:2] @ points.T,
            color=shade.color,
            label=f"\u03bb = {window}: distance {share:.3f} of length",
        )
    straightest = max(shares, key=shares.__getitem__)
    figure.set_label(
        f"The path is straightest with \u03bb = {straightest}: its end is at "
        f"{shares[straightest]:.3f} of its length from the start."
    )
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("first main direction, from the start")
    axes.set_ylabel("second main direction")
    figure.legend(loc="outside lower center")
    layout.title(figure, setting(results, "path of AGN's central variable"))
    return figure


def _rows_of(results: Finished, method: str) -> pd.DataFrame:
    summary = results.summary
    rows = summary[(summary["method"] == method) & (summary["seed"] == summary["seed"].min())]
    if rows.empty:
        raise InputError(f"folder = {str(results.folder)!r}: no runs of {method}")
    return rows
