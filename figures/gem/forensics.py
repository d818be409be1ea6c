"""The cluster behind the published curves: deviations over service times and spreads, and fitted
curves.
"""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import Curve
from asyncsim.study import load
from asyncsim.study.finished import Finished

from .losses import METHODS
from .panels import (
    LOSS,
    MOST_LOSS,
    STEPS,
    chosen,
    diverged_of,
    draw_family,
    finish,
    is_paper,
    log_axis,
    loss,
    published_curves,
    published_handles,
    setting,
    values_of,
    workers_label,
)
from .published import Deviation

_COLUMNS = ["method", "service", "cv", "learning_rate", "workers", "deviation", "fitted"]
_CLUSTER = ["service", "cv"]


def fitted(results: Finished) -> Figure:
    """Draw for each method the map of deviations, and the curves of the best common cluster."""
    table = _table(results)
    best, all_rates = _best(table)
    # Methods without a comparable curve at any cluster have no row.
    looks = look.looks(dict.fromkeys(table["method"]))
    names = {name: appearance for name, appearance in looks.items() if name in all_rates}
    maps = _maps(table, all_rates)
    hidden = _hidden(results, next(iter(maps.values())))
    figure = look.LiteralFigure(figsize=(look.DOUBLE, 2.5 * len(names) + 0.8), layout="constrained")
    widths: dict[str, Any] = {"width_ratios": [1, 1.25]}
    panels = figure.subplots(len(names), 2, squeeze=False, gridspec_kw=widths)
    largest = max(float(np.nanmax(values)) for values in maps.values())
    image: Any = None
    for (map_axes, curve_axes), (name, appearance) in zip(panels, names.items(), strict=True):
        image = _map(map_axes, maps[name], largest)
        _mark(map_axes, maps[name], best, "o", 17)
        if hidden is not None:
            _mark(map_axes, maps[name], hidden, "s", 23)
        map_axes.set_title(f"{appearance.label}, \u03b7 = {all_rates[name]:g}, fitted n")
        curves = _curves(results, name, all_rates[name], best)
        theirs = _targets(results, name, curves)
        _draw_curves(
            curve_axes, curves, theirs, appearance, set(table.loc[table["fitted"], "workers"])
        )
    panels[-1][0].set_xlabel("CV of the compute time")
    panels[-1][1].set_xlabel(STEPS)
    figure.colorbar(
        image,
        ax=panels[:, 0],
        label="log10 RMS deviation over the fitted n",
        location="left",
        shrink=0.8,
    )
    square = "" if hidden is None else "; square: the hidden cluster"
    missing = any(values.isna().any(axis=None) for values in maps.values())
    blank = "; blank: some fitted n has no curve to compare" if missing else ""
    cluster_text = (
        f"service {best[0]:g}\u00a0s, CV\u00a0{best[1]:g} (circle: the best of all{square}{blank})"
    )
    first = panels[0][1]
    handles, _ = first.get_legend_handles_labels()
    text = setting(results, f"cluster fitted to {_fitted_to(results)}: {cluster_text}")
    rows = table[(table[_CLUSTER] == list(best)).all(axis=1)]
    rows = rows[rows["learning_rate"] == rows["method"].map(all_rates)]
    reached = [
        f"{deviations.max():.2g} over {'the fitted n' if is_fitted else 'the others'}"
        for is_fitted, deviations in rows.groupby(rows["fitted"])["deviation"]
    ]
    figure.set_label(
        f"A service time of {best[0]:g} s and a CV of {best[1]:g} fit best, with deviations of at "
        f"most {' and '.join(reached)} (log10 RMS)."
    )
    name = "published" if is_paper(results) else "hidden cluster"
    finish(figure, first, text, [*handles, *published_handles(figure, first, name)], columns=5)
    return figure


def measure(results: Finished) -> list[Deviation]:
    """Return the deviations at the best common cluster; held-out numbers of workers have a bar."""
    table = _table(results)
    best, all_rates = _best(table)
    service, cv = best
    rows = table[(table["service"] == service) & (table["cv"] == cv)]
    deviations, nan = [], float("nan")
    for row in rows[rows["learning_rate"] == rows["method"].map(all_rates)].itertuples():
        values = {"method": row.method, "workers": row.workers, "service": best[0], "cv": best[1]}
        runs = results.rows(**values, learning_rate=row.learning_rate)
        setting_text = f"learning_rate={row.learning_rate:g} service={service:g} cv={cv:g}"
        bar = nan if row.fitted else _study().HELD_OUT_BAR
        name = f"{row.method} n={row.workers}"
        log = ("log10 RMS", nan, nan, row.deviation, nan, bar, diverged_of(runs))
        deviations.append(Deviation("forensics", name, setting_text, *log))
    return deviations


def _table(results: Finished) -> pd.DataFrame:
    table = results.table("fit.csv", _COLUMNS)
    return table.assign(fitted=table["fitted"].astype(bool))


def _study() -> ModuleType:
    """Load the study, which chooses the cluster and sets the bar."""
    return load("forensics")


def _best(table: pd.DataFrame) -> tuple[tuple[float, float], dict[str, float]]:
    """Return service time and CV of the best common cluster, and each method's best learning rate
    there.
    """
    all_scores = _study().scores(table)
    try:
        cluster = _study().common_cluster(all_scores)
    except KeyError as error:
        raise InputError(
            "fit.csv: no cluster at which all methods have curves to compare"
        ) from error
    return cluster, _study().rates_at(all_scores, cluster)


def _maps(table: pd.DataFrame, all_rates: Mapping[str, float]) -> dict[str, pd.DataFrame]:
    """Return each method's deviations at its learning rate, by service time and CV; NaN if
    missing.
    """
    deviations = _study().scores(table) ** 0.5
    services, spreads = (sorted(table.loc[table["fitted"], name].unique()) for name in _CLUSTER)
    return {
        name: deviations[name]
        .xs(rate, level="learning_rate")
        .unstack()
        .reindex(index=services, columns=spreads)
        for name, rate in all_rates.items()
    }


def _map(axes: Axes, square: pd.DataFrame, largest: float) -> Any:
    # Two significant digits of the largest.
    digits = max(2, 1 - math.floor(math.log10(largest))) if largest > 0 else 2
    table = square.rename(index="{:g}".format, columns="{:g}".format)
    style: dict[str, Any] = {"cmap": "cividis", "vmin": 0, "vmax": largest, "origin": "lower"}
    image = layout.number_map(axes, table, f"{{:.{digits}f}}".format, **style)
    axes.set_ylabel("service time (s)")
    return image


def _mark(
    axes: Axes, square: pd.DataFrame, cluster: tuple[float, float], marker: str, size: float
) -> None:
    service, cv = cluster
    style: dict[str, Any] = {
        "markerfacecolor": "none",
        "color": look.VERMILLION,
        "markeredgewidth": 1.3,
    }
    place = square.columns.get_loc(cv), square.index.get_loc(service)
    axes.plot(*place, marker=marker, markersize=size, **style)


def _hidden(results: Finished, square: pd.DataFrame) -> tuple[float, float] | None:
    """Return the cluster to be recovered; None if the curves are published, or if the map lacks
    it.
    """
    hidden = results.config.get("hidden")
    if (
        is_paper(results)
        or hidden is None
        or hidden[0] not in square.index
        or hidden[1] not in square.columns
    ):
        return None
    return hidden[0], hidden[1]


def _curves(
    results: Finished, method: str, rate: float, best: tuple[float, float]
) -> dict[int, Curve]:
    rows = chosen(results, method=method, learning_rate=rate, service=best[0], cv=best[1])
    return {n: loss(chosen(rows, workers=n).runs(), n) for n in values_of(rows, "workers")}


def _draw_curves(
    axes: Axes,
    curves: dict[int, Curve],
    theirs: dict[int, pd.Series],
    appearance: look.Look,
    fitted_on: set[int],
) -> None:
    log_axis(axes, [*curves.values(), *theirs.values()], LOSS, limit=MOST_LOSS)

    def label(n: int) -> str:
        return workers_label(n) + ("" if n in fitted_on else " (held out)")

    draw_family(axes, curves, label, appearance.line, theirs=theirs)
    axes.set_xlabel("")


def _targets(results: Finished, method: str, curves: dict[int, Curve]) -> dict[int, pd.Series]:
    """Return the target curves of the fit by worker step: the published ones, or ours for other
    problems.
    """
    if is_paper(results):
        (panel,) = (panel for panel, name in METHODS.items() if name == method)
        return published_curves(results, panel, method, curves)
    table = results.table("target.csv", ["method", "workers", "step", "loss"])
    of_method = table[table["method"] == method].groupby("workers")
    return {int(n): rows.set_index("step")["loss"] for n, rows in of_method if n in curves}


def _fitted_to(results: Finished) -> str:
    return "the published curves" if is_paper(results) else "curves of a hidden cluster"
