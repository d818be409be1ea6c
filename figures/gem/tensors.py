"""Figures 9 and 10: heat maps of each tensor's median factor over the server's updates, for GEM and
its variants.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, tensor_label
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import setting
from asyncsim.study.finished import Finished

from .panels import finish

#: Columns of a map.
_COLUMNS = 120


def heat_map(results: Finished, place: int) -> Figure:
    """Draw a map for each method with a pi, at the ``place``-th number of workers; all share one
    colour scale.
    """
    table = results.table("tensors.csv")
    counts = sorted(table["workers"].unique())
    if place >= len(counts):
        raise InputError(
            f"folder = {str(results.folder)!r}: results of workers {', '.join(map(str, counts))} "
            "only; run the study with two numbers of workers"
        )
    maps = {key: _medians(rows) for key, rows in table.groupby(["workers", "method"], sort=False)}
    highest = max(float(np.nanquantile(medians, 0.98)) for medians in maps.values())
    by_method = {method: maps[n, method] for n, method in maps if n == counts[place]}
    looks = look.looks(by_method)
    heights = [0.17 * len(medians) for medians in by_method.values()]
    size = (look.DOUBLE, 1.3 + sum(heights) + 0.4 * (len(by_method) - 1))
    figure, panels = look.new_figure(
        *size, 1, len(by_method), sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for axes, (name, medians) in zip(panels, by_method.items(), strict=True):
        image = _draw_map(axes, medians, highest)
        axes.set_title(looks[name].label)
    panels[-1].set_xlabel("server updates (commits)")
    layout.whole_ticks(panels[-1].xaxis, "auto")
    figure.colorbar(image, ax=panels, label="median \u03c0 of the tensor", extend="max")
    network, workers = results.config.get("problem_config", {}), counted(counts[place], "worker")
    about = f"median \u03c0 of each tensor, {workers}", network.get("network", "")
    finish(figure, setting(results, *about, statistic="mean of"))
    name, medians = next(iter(by_method.items()))
    scales = medians.mean(axis=1)
    low, high = (
        f"{number_text(scales[tensor])} for {tensor_label(tensor)}"
        for tensor in (scales.idxmin(), scales.idxmax())
    )
    figure.set_label(
        f"With {workers}, the mean over the run of {looks[name].label}'s median \u03c0 is {low}, "
        f"the lowest, and {high}, the highest."
    )
    return figure


def _draw_map(axes: Axes, medians: pd.DataFrame, highest: float) -> Any:
    edges = np.append(medians.columns.to_numpy(), medians.attrs["commits"])
    rows = np.arange(len(medians) + 1)
    axes.set_yticks(rows[:-1] + 0.5, [tensor_label(tensor) for tensor in medians.index])
    axes.set_ylabel("tensor")
    image = axes.pcolormesh(
        edges, rows, medians, cmap="viridis", vmin=0, vmax=highest, rasterized=True
    )
    axes.invert_yaxis()
    return image


def _medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the median factor over the seeds, tensors by intervals of commits."""
    commits = rows["commit"].max() + 1
    # At most one column per recording: an empty column would be a gap.
    edges = np.linspace(0, commits, min(_COLUMNS, rows["commit"].nunique()) + 1)
    place = np.clip(np.searchsorted(edges, rows["commit"], side="right") - 1, 0, len(edges) - 2)
    order = list(dict.fromkeys(rows["tensor"]))
    means = rows.groupby(["tensor", edges[place]])["pi_median"].mean().unstack().loc[order]
    means.attrs["commits"] = commits
    return means
