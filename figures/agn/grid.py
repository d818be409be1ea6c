"""Accuracies and temporal efficiency over workers and windows, ours and published."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.study.finished import Finished

from .tables import published_grid, setting

_PARTS = {"train_accuracy": "training", "test_accuracy": "test"}
#: Minimal half width of the colour scale of temporal efficiencies around one.
_NEAREST = 0.01


def accuracy(results: Finished, method: str) -> Figure:
    """Draw a method's final training and test accuracies by workers and window, ours and
    published.
    """
    runs = results.summary[results.summary["method"].str.partition("(")[0] == method]
    if runs.empty:
        raise InputError(f"no finished run has method = {method}")
    maps: dict[str, pd.Series] = {}
    for column, part in _PARTS.items():
        accuracies = runs.groupby(["workers", "window"])[column].mean()
        theirs = 100 * published_grid(results, column, method)
        maps |= _with_published(part, 100 * accuracies, theirs)
    name = look.looks([method])[method].label
    text = f"{name}: accuracy at the end"
    norm = Normalize(*_values(maps)[[0, -1]])
    return _maps(results, maps, text, "accuracy (%)", "{:.2f}".format, norm=norm, cmap="viridis")


def efficiency(results: Finished) -> Figure:
    """Draw the temporal efficiency of AGN over AEASGD by workers and window, ours and published."""
    table = results.table("efficiency.csv")
    pair = table[(table["method"] == "agn") & (table["against"] == "aeasgd")]
    if pair.empty:
        raise InputError(f"folder = {str(results.folder)!r}: no runs of both agn and aeasgd")
    theirs = published_grid(results, "efficiency", "agn over aeasgd")
    ours = pair.groupby(["workers", "window"])["efficiency"].mean()
    maps = _with_published("", ours, theirs)
    norm = CenteredNorm(1.0, max(_NEAREST, np.abs(_values(maps) - 1).max()))
    text = "temporal efficiency of AGN over AEASGD"
    return _maps(
        results, maps, text, "temporal efficiency", "{:.3f}".format, norm=norm, cmap="PuOr"
    )


def _values(maps: Mapping[str, pd.Series]) -> np.ndarray:
    """Return the values of all maps, ascending."""
    return np.sort(pd.concat(maps.values()).dropna().to_numpy(np.float64))


def _with_published(part: str, ours: pd.Series, theirs: pd.Series) -> dict[str, pd.Series]:
    """Return maps of our values and, if there are any, of the published ones, by title."""
    if theirs.empty:
        return {part: ours}
    return {
        ", ".join(filter(None, (part, source))): values
        for source, values in (("ours", ours), ("published", theirs))
    }


def _maps(
    results: Finished,
    maps: Mapping[str, pd.Series],
    text: str,
    label: str,
    form: Callable[..., str],
    **style: Any,
) -> Figure:
    """Draw maps by workers and window; the caption has the ends of the first one."""
    columns, rows = min(2, len(maps)), max(1, len(maps) // 2)
    width = look.DOUBLE if columns == 2 else look.SINGLE
    figure, panels = look.new_figure(width, 0.5 + 2.2 * rows, columns, rows)
    for axes, (title, values) in zip(panels, maps.items(), strict=True):
        table = values.unstack().sort_index(axis=0).sort_index(axis=1)
        layout.number_map(axes, table, form, origin="lower", **style)
        axes.set_xlabel("window \u03bb")
        axes.set_ylabel("workers n")
        axes.set_title(title)
    figure.colorbar(panels[0].images[0], ax=panels, label=label)
    layout.title(figure, setting(results, text))
    part, ours = next(iter(maps.items()))
    ends = [
        f"{number_text(ours[key])} with {counted(int(key[0]), 'worker')} and a window of {key[1]}"
        for key in (ours.idxmax(), ours.idxmin())
    ]
    subject = ", ".join(filter(None, (text, part)))
    figure.set_label(findings.sentence(f"{subject}: {ends[0]}, the highest, and {ends[1]}"))
    return figure
