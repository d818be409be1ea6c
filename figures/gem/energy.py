"""The central variable's energy relative to the proxy's: by number of workers, and over time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text, tensor_label
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import DIVERGED, curve_of, diagnostic_curve, draw_band, trace_length
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import FINAL_SHARE, late_energy_ratio

from .panels import (
    STEPS,
    at_rate,
    bin_steps,
    chosen,
    finish,
    log_axis,
    methods_of,
    rates,
    setting,
    values_of,
    with_all_workers,
)

#: Ratios below this are drawn here: many weights do not move at all, which a logarithm cannot show.
_LOWEST_RATIO = 1e-4
#: Range of a map's colours on both sides of a ratio of one (powers of ten).
_DECADES = 2.0
_SHARES = {
    "clipped_low": ("clip binds at 0", look.PURPLE, "o", "-"),
    "clipped_high": ("clip binds at {pi_max}", look.ORANGE, "s", "--"),
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
        style: dict[str, Any] = {"linestyle": appearance.line, "marker": "o", "ms": 3}
        draw_band(vector, late, appearance.color, label=appearance.label, **style)
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
        vector.plot(counts, top, color=looks[name].color, clip_on=False, **DIVERGED)
    figure.set_label(_finding(results, looks, values_of(results, "workers")[-1]))
    text = "central against proxy energy, medians over the last tenth of the runs"
    handles = list(layout.labelled(figure).values())
    title = setting(results, text, statistic="median and range of")
    finish(figure, vector, title, handles, columns=3)
    return figure


def over_time(results: Finished) -> Figure:
    """Draw energies over worker steps, and their ratio by tensor, at the number of workers nearest
    to ten.
    """
    results = with_all_workers(at_rate(results))
    counts = values_of(results, "workers")
    n = min(counts, key=lambda count: abs(np.log(count / 10)))
    results = chosen(results, workers=n)
    looks = look.looks(methods_of(results))
    columns = len(looks)
    figure, panels = look.new_figure(look.DOUBLE, 4.6, columns, 2, sharex=True, sharey="row")
    for (name, appearance), over, tensors in zip(
        looks.items(), panels[:columns], panels[columns:], strict=True
    ):
        rows = chosen(results, method=name)
        runs = rows.runs()
        over.set_title(appearance.label)
        _energies(over, runs, n, rates(rows))
        image = _map(tensors, _by_tensor(runs, n))
        tensors.set_xlabel(STEPS if columns < 3 else "worker steps")
        layout.whole_ticks(tensors.xaxis, "auto")
        for axes, label in ((over, "energy"), (tensors, "tensor")):
            axes.set_ylabel(label)
            axes.label_outer()
    lines = [line.get_ydata() for axes in panels[:columns] for line in axes.lines]
    log_axis(panels[0], lines, "energy (half squared step)")
    label = "log10 of central / proxy energy"
    figure.colorbar(image, ax=panels[columns:], label=label, extend="both", shrink=0.7)
    figure.set_label(_finding(results, looks, n))
    text = setting(results, f"energies over time, {counted(n, 'worker')}")
    finish(figure, panels[0], text, list(layout.labelled(figure).values()), columns=4)
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
    axes.plot(
        clipped[0.5].index,
        clipped[0.5],
        color=appearance.color,
        linestyle=appearance.line,
        marker="o",
        ms=3,
        label="median",
    )


def _draw_shares(axes: Axes, results: Finished) -> None:
    """Draw the shares of GEM's weights where it cannot match the energies, if recorded."""
    clipped_to = results.config.get("hyperparameters", {}).get("gem", {}).get("pi_max")
    pi_max = "its upper end" if clipped_to is None else f"{clipped_to:g}"
    axes.set_title("where GEM cannot match")
    rows = results._replace(summary=results.rows(method="gem"))
    for quantity, (label, color, marker, line) in _SHARES.items():
        late = _late(rows, _diagnosed(quantity, None))
        if late["median"].notna().any():
            text = label.format(pi_max=pi_max)
            draw_band(axes, late, color, linestyle=line, marker=marker, ms=3, label=text)
    if not axes.lines:
        layout.say_inside(axes, "no run of GEM")
        return
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the weights")


def _energies(axes: Axes, runs: Sequence[Run], n: int, learning_rates: Sequence[float]) -> None:
    """Draw both kinetic energies, with one learning rate also the potential energy, and shade
    stability.
    """
    width = bin_steps(runs, n)
    named = {
        "central_energy": ("central, kinetic", look.BLUE, "-"),
        "proxy_energy": ("proxy, kinetic", look.VERMILLION, "--"),
    }
    for quantity, (label, color, line) in named.items():
        curve = curve_of(runs, _column(quantity), "median", n, width)
        if quantity == "proxy_energy":
            area: dict[str, Any] = {
                "color": look.GREY,
                "alpha": 0.18,
                "linewidth": 0,
                "label": "stable: central \u2264 proxy",
            }
            axes.fill_between(curve.step, 1e-30, curve.mean, **area)
        axes.fill_between(curve.step, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(curve.step, curve.mean, color=color, linestyle=line, label=label)
    if len(learning_rates) != 1:  # one that changes, or a method that has none
        return
    (rate,) = learning_rates
    potential = curve_of(
        runs, lambda commits: rate * commits["loss"].to_numpy(np.float64), "mean", n, width
    )
    axes.plot(
        potential.step,
        potential.mean,
        color=look.BLACK,
        linestyle=":",
        label="\u2212potential (\u03b7 \u00d7 loss)",
    )


def _column(name: str) -> Callable[[pd.DataFrame], np.ndarray]:
    return lambda commits: commits[name].to_numpy(np.float64)


def _by_tensor(runs: Sequence[Run], n: int) -> pd.DataFrame:
    """Compute the logarithm of the ratio, tensors by worker step."""
    table = runs[0].diagnostics
    names = list(dict.fromkeys(table.loc[table["quantity"] == "central_energy", "tensor"]))
    if not names:
        raise InputError("no energies of tensors; record them with --diagnose-energy")
    # Every column needs a recording and the last may be short: half as many columns as recordings.
    recorded = table.loc[table["quantity"] == "central_energy", "commit"].nunique()
    width = max(bin_steps(runs, n), 2 * trace_length(runs) / n / max(recorded, 2))
    ratios = {}
    for name in names:
        pair = [
            diagnostic_curve(runs, f"{kind}_energy", n, width, name, None)
            for kind in ("central", "proxy")
        ]
        ratios[name] = _log_ratio(pair[0].mean, pair[1].mean)
        steps = pair[0].step
    return pd.DataFrame(ratios, index=steps).T


def _log_ratio(central: np.ndarray, proxy: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(central / proxy)


def _map(axes: Axes, table: pd.DataFrame) -> Any:
    rows = np.arange(len(table) + 1) - 0.5
    style: dict[str, Any] = {
        "cmap": "PuOr_r",
        "vmin": -_DECADES,
        "vmax": _DECADES,
        "rasterized": True,
    }
    image = axes.pcolormesh(
        _edges(table.columns.to_numpy(float)), rows, table.to_numpy(float), **style
    )
    axes.set_yticks(rows[:-1] + 0.5, [tensor_label(name) for name in table.index])
    axes.set_ylim(len(table) - 0.5, -0.5)
    return image


def _edges(centers: np.ndarray) -> np.ndarray:
    """Return the edges of intervals with these centers; a single interval begins at zero."""
    if len(centers) == 1:
        return np.array([0.0, 2 * centers[0]])
    middles = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([2 * centers[:1] - middles[:1], middles, 2 * centers[-1:] - middles[-1:]])
