"""The central variable's energy relative to the proxy's, by number of workers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_band
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import FINAL_SHARE, late_energy_ratio

from .panels import (
    at_rate,
    chosen,
    finish,
    methods_of,
    setting,
    values_of,
    with_all_workers,
)

#: Ratios below this are drawn here: many weights do not move at all, which a logarithm cannot show.
_LOWEST_RATIO = 1e-4
_SHARES = {
    "clipped_low": ("clip binds at 0", look.PURPLE, "o", "-"),
    "clipped_high": ("clip binds at its upper end", look.ORANGE, "s", "--"),
    "opposite_sign": ("opposite signs of drift and update", look.GREEN, "^", "-."),
}


def by_workers(results: Finished) -> Figure:
    """Draw central over proxy energy against n, for the whole vector and by weight of GEM, and
    shares of weights.
    """
    results = with_all_workers(at_rate(results))
    looks = look.looks(methods_of(results))
    figure, (vector, weights, shares) = look.new_figure(look.DOUBLE, 2.9, 3, sharex=True)
    for name, appearance in looks.items():
        late = _late(chosen(results, method=name), _vector_ratio)
        draw_band(vector, late, marker="o", ms=3, **appearance.style)
    vector.set_title("whole vector")
    weights.set_title("each weight, GEM")
    if "gem" in looks:
        _weights(weights, chosen(results, method="gem"), look.METHOD_LOOKS["gem"])
    else:
        layout.say_inside(weights, "no run of GEM")
    for axes in (vector, weights):
        axes.set_yscale("log")
        axes.axhline(1, color=look.BLACK, linewidth=0.6, zorder=0)
    vector.set_ylabel("central / proxy energy")
    _draw_shares(shares, results)
    for axes in (vector, weights, shares):
        axes.set_xscale("log")
        layout.ticks_at(axes.xaxis, values_of(results, "workers"))
        axes.set_xlabel("workers n")
    for name in results.rows(status="diverged")["method"].unique():
        counts = results.rows(method=name, status="diverged")["workers"].unique()
        top = [vector.get_ylim()[1]] * len(counts)
        vector.plot(counts, top, color=looks[name].color, clip_on=False, **layout.DIVERGED)
    figure.set_label(_finding(results, looks, values_of(results, "workers")[-1]))
    text = "central against proxy energy, medians over the last tenth of the runs"
    finish(figure, setting(results, text, statistic="median and range of"), 3)
    return figure


def _finding(results: Finished, looks: Mapping[str, look.Look], n: int) -> str:
    """State the late ratio of the energies of each method with ``n`` workers."""
    ratios = [
        f"{number_text(median)} for {appearance.label}"
        for name, appearance in looks.items()
        if n in (late := _late(chosen(results, method=name), _vector_ratio)["median"])
        and np.isfinite(median := late[n])
    ]
    where = f"With {counted(n, 'worker')} central over proxy energy ends at"
    return f"{where} {', '.join(ratios)}." if ratios else ""


def _vector_ratio(run: Run) -> float:
    """Return the median energy ratio of the whole vector late in the run, or before it diverged."""
    commits = run.commits[np.isfinite(run.commits[["central_energy", "proxy_energy"]]).all(axis=1)]
    return late_energy_ratio(commits, len(run.commits))


def _late(results: Finished, measure: Callable[[Run], float]) -> pd.DataFrame:
    """Compute median, minimum and maximum over the seeds of a number per run, by workers."""
    values = [
        (int(row.workers), measure(results.run(row.run_folder)))
        for row in results.summary.itertuples()
    ]
    return (
        pd.DataFrame(values, columns=["workers", "value"])
        .groupby("workers")["value"]
        .agg(["median", "min", "max"])
    )


def _diagnosed(quantity: str, quantile: float | None) -> Callable[[Run], float]:
    """Return a function to a run's late median of a diagnostic over all weights; nan if not
    recorded.
    """

    def late_median(run: Run) -> float:
        table = run.diagnostics
        matches = (table["quantity"] == quantity) & (table["tensor"] == "")
        matches &= table["quantile"].isna() if quantile is None else table["quantile"] == quantile
        recorded = table[matches & np.isfinite(table["value"])]
        # At least the last recording, if the run is short.
        from_commit = min((1 - FINAL_SHARE) * len(run.commits), recorded["commit"].max())
        values = recorded.loc[recorded["commit"] >= from_commit, "value"]
        return float(values.median()) if len(values) else float("nan")

    return late_median


def _weights(axes: Axes, results: Finished, appearance: look.Look) -> None:
    """Draw the distribution of the ratio over the weights: median, middle half and middle nine
    tenths.
    """
    quantiles = {
        quantile: _late(results, _diagnosed("weight_energy_ratio", quantile))["median"]
        for quantile in (0.05, 0.25, 0.5, 0.75, 0.95)
    }
    if not any(values.notna().any() for values in quantiles.values()):
        raise InputError(
            f"folder = {str(results.folder)!r}: no energies of weights; record them "
            "(--diagnose-energy)"
        )
    clipped = {quantile: values.clip(lower=_LOWEST_RATIO) for quantile, values in quantiles.items()}
    for low, high, alpha, label in (
        (0.05, 0.95, 0.15, "5 to 95 %"),
        (0.25, 0.75, 0.35, "25 to 75 %"),
    ):
        band: dict[str, Any] = {
            "color": appearance.color,
            "alpha": alpha,
            "linewidth": 0,
            "label": f"{label} of the weights",
        }
        axes.fill_between(clipped[low].index, clipped[low], clipped[high], **band)
    style = appearance._replace(label="median").style
    axes.plot(clipped[0.5].index, clipped[0.5], marker="o", ms=3, **style)


def _draw_shares(axes: Axes, results: Finished) -> None:
    """Draw the shares of GEM's weights where it cannot match the energies, if recorded."""
    axes.set_title("where GEM cannot match")
    rows = results._replace(summary=results.rows(method="gem"))
    for quantity, (label, color, marker, line) in _SHARES.items():
        late = _late(rows, _diagnosed(quantity, None))
        if late["median"].notna().any():
            draw_band(axes, late, color, linestyle=line, marker=marker, ms=3, label=label)
    if not axes.lines:
        layout.say_inside(axes, "no run of GEM")
        return
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the weights")
