"""Figures 9 and 10: the median factor of each tensor over the server's updates, of GEM and its like, as heat maps."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, tensor_label
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished

from .panels import chosen, finish, methods_of, setting, values_of

#: Columns of a map.
_COLUMNS = 120


def heat_map(results: Finished, place: int) -> Figure:
    """Draw a map for each method with a pi, with the ``place``-th number of workers; colours mean the same in all."""
    counts = values_of(results, "workers")
    if place >= len(counts):
        raise InputError(
            f"folder = {str(results.folder)!r}: results of workers {', '.join(map(str, counts))} only; "
            "run the study with two numbers of workers"
        )
    maps = {n: _maps(chosen(results, workers=n)) for n in counts}
    most = max(float(np.nanquantile(one, 0.98)) for of_methods in maps.values() for one in of_methods.values())
    shown = maps[counts[place]]
    looks = look.looks(shown)
    heights = [0.17 * len(one) for one in shown.values()]
    size = (look.DOUBLE, 1.3 + sum(heights) + 0.4 * (len(shown) - 1))
    figure, panels = look.new_figure(*size, 1, len(shown), sharex=True, gridspec_kw={"height_ratios": heights})
    images = [_draw_map(axes, one, most) for axes, one in zip(panels, shown.values(), strict=True)]
    if len(shown) > 1:
        for axes, name in zip(panels, shown, strict=True):
            axes.set_title(looks[name].label)
    panels[-1].set_xlabel("server updates (commits)")
    layout.whole_ticks(panels[-1].xaxis, "auto")
    figure.colorbar(images[0], ax=panels, label="median \u03c0 of the tensor", extend="max")
    network = results.config.get("problem_config", {}).get("network", "")
    whose = f"{looks[next(iter(shown))].label}'s median" if len(shown) == 1 else "median"
    text = setting(
        results, f"{whose} \u03c0 of each tensor, {counted(counts[place], 'worker')}", network, what="mean of"
    )
    finish(figure, panels[-1], text)
    return figure


def _draw_map(axes: Axes, medians: pd.DataFrame, most: float) -> Any:
    edges = np.append(medians.columns.to_numpy(), medians.attrs["commits"])
    rows = np.arange(len(medians) + 1)
    axes.set_yticks(rows[:-1] + 0.5, [tensor_label(tensor) for tensor in medians.index])
    axes.set_ylabel("tensor")
    image = axes.pcolormesh(edges, rows, medians, cmap="viridis", vmin=0, vmax=most, rasterized=True)
    axes.invert_yaxis()
    return image


def _maps(results: Finished) -> dict[str, pd.DataFrame]:
    """Return the medians of each method that has a pi; raise InputError if none has."""
    maps = {name: _medians(chosen(results, method=name)) for name in methods_of(results)}
    found = {name: one for name, one in maps.items() if one is not None}
    if not found:
        raise InputError(
            f"folder = {str(results.folder)!r}: no medians of tensors were recorded; run the study with a method that "
            "has a pi, and --diagnose-every 2"
        )
    return found


def _medians(results: Finished) -> pd.DataFrame | None:
    """Return the median factor, tensors in the order of the network by intervals of commits, mean of the seeds.

    None where it was not recorded.
    """
    runs = results.runs()
    table = pd.concat([run.diagnostics for run in runs])
    table = table[(table["quantity"] == "pi") & (table["tensor"] != "")]
    if table.empty:
        return None
    commits = max(int(run.config["commits"]) for run in runs)
    # Not more columns than recordings: an empty column would be a gap.
    edges = np.linspace(0, commits, min(_COLUMNS, table["commit"].nunique()) + 1)
    place = np.clip(np.searchsorted(edges, table["commit"], side="right") - 1, 0, len(edges) - 2)
    order = list(dict.fromkeys(table["tensor"]))
    means = table.groupby(["tensor", edges[place]])["value"].mean().unstack().loc[order]
    means.attrs["commits"] = commits
    return means
