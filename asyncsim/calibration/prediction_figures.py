"""The figures of a prediction: distributions and laws, recorded, measured and simulated."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asyncsim.base.console import number_text
from asyncsim.calibration.fitting import Part, uncensored
from asyncsim.clusters.laws import Constant
from asyncsim.drawing import layout, look
from asyncsim.drawing.plots import beyond

if TYPE_CHECKING:
    from asyncsim.calibration.prediction import Forecast, Prediction

#: Points of a drawn curve.
_CURVE_POINTS = 200
#: Share of the values beyond a panel's far end.
_TAIL = 0.003
#: Bars of a histogram, the most that are distinct at paper size.
_BARS = 40


def draw_prediction(prediction: "Prediction", path: str | os.PathLike) -> list[Path]:
    """Write the figure of a prediction as ``path.png`` and ``path.pdf``."""
    with look.style():
        figure, axes = look.new_figure(look.DOUBLE, 4.6, columns=2, rows=2)
        layout.title(figure, f"{prediction.title}: {'holds' if prediction.holds else 'fails'}")
        _staleness(axes[0], prediction)
        _waits(axes[1], prediction)
        compute, others = _by_subject(prediction.calibration.parts)
        steps, durations = compute[0].steps, prediction.durations
        label = "compute time" if steps == 1 else f"compute time of {steps} local steps"
        seconds, _, cancelled = durations.attempts
        _durations(axes[2], label, compute, uncensored(seconds, cancelled))
        service = [part for part in others if part.name == "service"]
        _durations(axes[3], "service time", service, durations.service)
        return look.save(figure, path)


def draw_forecast(forecast: "Forecast", path: str | os.PathLike) -> list[Path]:
    """Write the figure of a forecast as ``path.png`` and ``path.pdf``."""
    compute, others = _by_subject(forecast.calibration.parts)
    panels = {"compute time" if compute[0].steps == 1 else "compute time of a window": compute}
    for part in others:
        if part.durations.any():
            panels[f"{part.name} time" if part.name == "service" else part.name] = [part]
    with look.style():
        figure, axes = look.new_grid(len(panels) + 1, 2.3, 0.4)
        layout.title(figure, f"recorded times and their laws; {forecast.title}")
        for panel, (label, parts) in zip(axes, panels.items(), strict=False):
            _durations(panel, label, parts)
        everything = np.concatenate([run.staleness for run in forecast.runs])
        edges = np.arange(-0.5, np.quantile(everything, 1 - _TAIL) + 1.5)
        shares = np.array(
            [np.histogram(run.staleness, edges, density=True)[0] for run in forecast.runs]
        )
        low, high = np.quantile(shares, [0.025, 0.975], axis=0)
        axes[-1].stairs(shares.mean(axis=0), edges, color=look.BLACK, label="predicted")
        axes[-1].stairs(
            high, edges, baseline=low, fill=True, color=look.BLACK, alpha=0.15, label="95 % of runs"
        )
        axes[-1].set(xlabel="staleness (versions)", ylabel="share of commits")
        axes[-1].legend(loc="upper right")
        return look.save(figure, path)


def _by_subject(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Return the parts with durations of computations, and the others."""
    compute = [part for part in parts if part.name.startswith("compute")]
    return compute, [part for part in parts if not part.name.startswith("compute")]


def _staleness(axes: Axes, prediction: "Prediction") -> None:
    measured, runs = prediction.measured.staleness, [run.staleness for run in prediction.runs]
    everything = np.concatenate(runs)
    last = int(max(np.quantile(measured, 1 - _TAIL), np.quantile(everything, 1 - _TAIL))) + 1
    width = max(1, round(last / _BARS))
    edges = np.arange(-0.5, last + width + 0.5, width)
    shares = np.array([np.histogram(run, edges)[0] / (len(run) * width) for run in runs])
    middle = (edges[1:] + edges[:-1]) / 2
    axes.stairs(
        np.histogram(measured, edges)[0] / (len(measured) * width),
        edges,
        fill=True,
        color=look.SKY,
        alpha=0.6,
        label=f"measured: mean {number_text(measured.mean())}, std {number_text(measured.std())}",
    )
    label = f"predicted: mean {number_text(everything.mean())}, std {number_text(everything.std())}"
    low, high = shares.mean(axis=0) - shares.min(axis=0), shares.max(axis=0) - shares.mean(axis=0)
    style: dict = {
        "color": look.BLACK,
        "linewidth": 0.8,
        "marker": "o",
        "markersize": 2.5,
        "linestyle": "none",
    }
    axes.errorbar(middle, shares.mean(axis=0), yerr=(low, high), label=label, **style)
    axes.set_xlabel(f"staleness (versions){beyond(measured, edges[-1])}")
    axes.set_ylabel("share of commits per version" if width > 1 else "share of commits")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(0, 1.3 * max(shares.max(), 1e-9))
    axes.legend(loc="upper right")


def _waits(axes: Axes, prediction: "Prediction") -> None:
    measured, runs = prediction.measured.waits, [run.waits for run in prediction.runs]
    end = max(np.quantile(measured, 1 - _TAIL), np.quantile(np.concatenate(runs), 1 - _TAIL))
    scale, unit = _unit(float(end))
    points = np.linspace(0, end if end > 0 else 1.0, _CURVE_POINTS)
    shares = np.array([_share(run, points) for run in runs])
    axes.plot(points * scale, _share(measured, points), color=look.BLUE, label="measured")
    axes.fill_between(
        points * scale,
        shares.min(axis=0),
        shares.max(axis=0),
        color=look.BLACK,
        alpha=0.15,
        linewidth=0,
        label=f"least to most of {len(runs)} runs",
    )
    axes.plot(
        points * scale,
        shares.mean(axis=0),
        color=look.BLACK,
        linestyle="--",
        linewidth=1,
        label="predicted",
    )
    axes.set(
        xlabel=f"waiting time ({unit})",
        ylabel="share of commits that wait less",
        xlim=(0, points[-1] * scale),
    )
    axes.set_ylim(min(0.98, shares.min()) - 0.02, 1.005)
    axes.legend(loc="lower right")


def _durations(
    axes: Axes, label: str, parts: Sequence[Part], predicted: np.ndarray | None = None
) -> None:
    """Draw the distribution functions of the fitted durations and of those to be predicted, and
    the fitted laws.
    """
    times, laws = [part.uncensored for part in parts], [part.fit.law for part in parts]
    fitted = np.concatenate(times)
    pooled = fitted if predicted is None else np.concatenate([fitted, predicted])
    low, high = np.quantile(pooled, [0, 1 - _TAIL])
    room = max(0.05 * (high - low), 0.01 * high, 1e-12)
    points = np.linspace(max(0.0, low - room), high + room, _CURVE_POINTS)
    scale, unit = _unit(float(high))
    name = "recorded" if predicted is None else "fitted"
    axes.plot(points * scale, _share(fitted, points), color=look.BLUE, label=name)
    if predicted is not None:
        style: dict = {"color": look.VERMILLION, "linestyle": "-.", "label": "to be predicted"}
        axes.plot(points * scale, _share(predicted, points), **style)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set(
        xlabel=f"{label} ({unit})",
        ylabel="share that is shorter",
        xlim=(points[0] * scale, points[-1] * scale),
    )
    if parts[0].steps == 1:  # else the law describes one step
        points = np.linspace(*axes.get_xlim(), _CURVE_POINTS)
        probability = np.average(
            [law.cdf(points / scale) for law in laws], axis=0, weights=list(map(len, times))
        )
        name = f"{len(laws)} laws, one per worker" if laws[1:] else type(laws[0]).__name__.lower()
        if len(laws) == 1 and not isinstance(laws[0], Constant):
            name += f", mean {laws[0].mean:.3g} s, CV {laws[0].std / laws[0].mean:.2g}"
        axes.plot(points, probability, color=look.BLACK, linestyle="--", linewidth=1, label=name)
    axes.set_ylim(-0.02, 1.5)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(loc="upper left")


def _share(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(values), points, side="right") / len(values)


def _unit(longest: float) -> tuple[float, str]:
    """Return a factor for seconds, and the unit of the product."""
    return (
        (1.0, "s")
        if longest >= 0.1 or longest <= 0
        else (1e3, "ms")
        if longest >= 1e-4
        else (1e6, "\u00b5s")
    )
