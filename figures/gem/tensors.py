"""Figures 9 and 10: GEM's median factor of each tensor over the server's updates, as heat maps."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim import look
from asyncsim.errors import InputError
from asyncsim.sweep import Finished

from .panels import chosen, finish, setting, values_of

#: Columns of a map.
_COLUMNS = 120


def heat_map(results: Finished, place: int) -> Figure:
    """Draw the map of the ``place``-th number of workers; the colours mean the same in all of them."""
    results = chosen(results, method="gem")
    counts = values_of(results, "workers")
    if place >= len(counts):
        raise InputError(
            f"folder = {str(results.folder)!r}: results of workers {', '.join(map(str, counts))} only; "
            "run the study with two numbers of workers"
        )
    maps = {n: _medians(chosen(results, workers=n)) for n in counts}
    most = max(float(np.nanquantile(one.to_numpy(), 0.98)) for one in maps.values())
    shown = maps[counts[place]]
    tensors = [str(name) for name in shown.index]
    figure, (axes,) = look.new_figure(look.DOUBLE, 1.3 + 0.17 * len(tensors))
    edges = np.append(shown.columns.to_numpy(), shown.attrs["commits"])
    image = axes.pcolormesh(
        edges, np.arange(len(tensors) + 1), shown, cmap="viridis", vmin=0, vmax=most, rasterized=True
    )
    axes.set_yticks(np.arange(len(tensors)) + 0.5, tensors)
    axes.invert_yaxis()
    axes.set_ylabel("tensor")
    axes.set_xlabel("server updates (commits)")
    figure.colorbar(image, ax=axes, label="median \u03c0 of the tensor", extend="max")
    network = results.config.get("problem_config", {}).get("network", "")
    text = setting(results, f"GEM's median \u03c0 of each tensor, {counts[place]} workers", network)
    finish(figure, axes, text.replace("mean and range", "mean"))
    return figure


def _medians(results: Finished) -> pd.DataFrame:
    """Return the median factor, tensors in the order of the network by intervals of commits, mean of the seeds."""
    runs = results.runs()
    table = pd.concat([run.diagnostics for run in runs])
    table = table[(table["quantity"] == "pi") & (table["tensor"] != "")]
    if table.empty:
        raise InputError(f"folder = {str(results.folder)!r}: no diagnostics of tensors; record them (--diagnose-every)")
    commits = max(int(run.config["commits"]) for run in runs)
    # Not more columns than recordings: an empty column would be a gap.
    edges = np.linspace(0, commits, min(_COLUMNS, table["commit"].nunique()) + 1)
    place = np.clip(np.searchsorted(edges, table["commit"], side="right") - 1, 0, len(edges) - 2)
    order = list(dict.fromkeys(table["tensor"]))
    means = table.groupby(["tensor", edges[place]])["value"].mean().unstack().loc[order]
    means.attrs["commits"] = commits
    return means
