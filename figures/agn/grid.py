"""Accuracies and temporal efficiency over workers and windows, ours and published."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished

from . import published
from .tables import is_thesis, published_grid, setting

_PARTS = {"train_accuracy": "training", "test_accuracy": "test"}
#: Minimal half width of the colour scale of temporal efficiencies around one.
_NEAREST = 0.01


def accuracy(results: Finished, method: str) -> Figure:
    """Draw a method's final training and test accuracies by workers and window, ours and
    published.
    """
    table = results.table("grid.csv")
    maps = _accuracies(results, table, method)
    values = _values(maps.values())
    norm = Normalize(np.nanmin(values), np.nanmax(values))
    name = look.looks([method])[method].label
    source = [f"published: {published.SOURCE}"] if is_thesis(results) else []
    text = setting(results, f"{name}: accuracy at the end", *source)
    figure = _maps(maps, norm, "viridis", "{:.2f}".format, text, "accuracy (%)")
    part, accuracies = next(iter(maps.items()))
    figure.set_label(
        f"{name}'s {part.partition(',')[0]} accuracy is {_cell(accuracies, accuracies.idxmax())}, "
        f"the highest, and {_cell(accuracies, accuracies.idxmin())}, the lowest (%)."
    )
    return figure


def efficiency(results: Finished) -> Figure:
    """Draw the temporal efficiency of AGN over AEASGD by workers and window, ours and published."""
    table = results.table("efficiency.csv")
    pair = table[(table["method"] == "agn") & (table["against"] == "aeasgd")]
    if pair.empty:
        raise InputError(f"folder = {str(results.folder)!r}: no runs of both agn and aeasgd")
    theirs = published_grid(results, "efficiency", "agn over aeasgd")
    maps = _with_published("", pair.set_index(["workers", "window"])["efficiency"], theirs)
    norm = CenteredNorm(1.0, max(_NEAREST, np.nanmax(np.abs(_values(maps.values()) - 1))))
    source = [f"published: {published.SOURCE}"] if is_thesis(results) else []
    text = setting(results, "temporal efficiency of AGN over AEASGD", *source)
    figure = _maps(maps, norm, "PuOr", "{:.3f}".format, text, "temporal efficiency")
    ours = next(iter(maps.values()))
    figure.set_label(
        f"AGN is more efficient than AEASGD in {(ours > 1).sum()} of {len(ours)} cells: its "
        f"temporal efficiency is {_cell(ours, ours.idxmin())}, and {_cell(ours, ours.idxmax())}."
    )
    return figure


def _cell(values: pd.Series, key: Any) -> str:
    """Describe a cell of a map and its value."""
    workers = counted(int(key[0]), "worker")
    return f"{number_text(values[key])} with {workers} and a window of {key[1]}"


def _accuracies(results: Finished, table: pd.DataFrame, method: str) -> dict[str, pd.Series]:
    """Return maps of a method's training and test accuracies (%), by title."""
    rows = _method_rows(table, method)
    maps: dict[str, pd.Series] = {}
    for column, part in _PARTS.items():
        if column not in rows:
            raise InputError(
                f"folder = {str(results.folder)!r}: its problem has no {part} accuracy"
            )
        maps |= _with_published(
            part, 100 * rows[column], 100 * published_grid(results, column, method)
        )
    return maps


def _values(maps: Iterable[pd.Series]) -> np.ndarray:
    return np.concatenate([values.to_numpy(np.float64) for values in maps])


def _method_rows(table: pd.DataFrame, method: str) -> pd.DataFrame:
    rows = table[table["method"] == method]
    if rows.empty:
        raise InputError(f"no finished run has method = {method}")
    return rows.set_index(["workers", "window"])


def _with_published(part: str, ours: pd.Series, theirs: pd.Series) -> dict[str, pd.Series]:
    """Return maps of our values and, if there are any, of the published ones, by title."""
    if theirs.empty:
        return {part: ours}
    return {
        ", ".join(filter(None, (part, source))): values
        for source, values in (("ours", ours), ("published", theirs))
    }


def _maps(
    maps: Mapping[str, pd.Series],
    norm: Normalize,
    colors: str,
    form: Callable[..., str],
    text: str,
    label: str,
) -> Figure:
    columns, rows = min(2, len(maps)), max(1, len(maps) // 2)
    width = look.DOUBLE if columns == 2 else look.SINGLE
    figure, panels = look.new_figure(width, 0.5 + 2.2 * rows, columns, rows)
    for axes, (title, values) in zip(panels, maps.items(), strict=True):
        table = values.unstack().sort_index(axis=0).sort_index(axis=1)
        layout.number_map(axes, table, form, norm=norm, cmap=colors, origin="lower")
        axes.set_xlabel("window \u03bb")
        axes.set_ylabel("workers n")
        axes.set_title(title)
    figure.colorbar(panels[0].images[0], ax=panels, label=label)
    layout.title(figure, text)
    return figure
