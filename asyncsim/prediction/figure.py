"""The figure of a prediction: staleness and waits, measured and predicted; durations and the laws fitted to them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asyncsim.clusters.laws import Constant, Law
from asyncsim.drawing import layout, look
from asyncsim.plots import beyond
from asyncsim.wording import number_text

if TYPE_CHECKING:
    from asyncsim.prediction import Prediction

#: Points of a drawn curve.
_POINTS = 200
#: A panel shows all but this share of what is measured, at its far end.
_TAIL = 0.003
#: Bars of a histogram: as many as the eye can use at paper size.
_BARS = 40


def draw(prediction: "Prediction", path: str | os.PathLike) -> list[Path]:
    """Write the figure of a prediction as ``path.png`` and ``path.pdf``."""
    with look.style():
        figure, axes = look.new_figure(look.DOUBLE, 4.6, columns=2, rows=2)
        layout.title(figure, f"{prediction.title}: {'holds' if prediction.holds else 'fails'}")
        _staleness(axes[0], prediction)
        _waits(axes[1], prediction)
        parts = {part.name: part for part in prediction.calibration.parts}
        compute = [part for name, part in parts.items() if name.startswith("compute")]
        steps = compute[0].steps
        computed, laws = [part.durations for part in compute], [part.fit.law for part in compute]
        shown = "compute time" if steps == 1 else f"compute time of {steps} local steps"
        scale = _durations(axes[2], shown, np.concatenate(computed), prediction.durations.compute)
        if steps == 1:  # else the law is that of a step
            _law(axes[2], scale, laws, list(map(len, computed)))
        service = parts["service"]
        scale = _durations(axes[3], "service time", service.durations, prediction.durations.service)
        _law(axes[3], scale, [service.fit.law], [1])
        for each in axes[2:]:
            each.set_ylim(-0.02, 1.5)
            each.set_yticks([0, 0.25, 0.5, 0.75, 1])
            each.legend(loc="upper left")
        return look.save(figure, path)


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
    style: dict = {"color": look.BLACK, "linewidth": 0.8, "marker": "o", "markersize": 2.5, "linestyle": "none"}
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
    points = np.linspace(0, end if end > 0 else 1.0, _POINTS)
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
    axes.plot(points * scale, shares.mean(axis=0), color=look.BLACK, linestyle="--", linewidth=1, label="predicted")
    axes.set(xlabel=f"waiting time ({unit})", ylabel="share of commits that wait less", xlim=(0, points[-1] * scale))
    axes.set_ylim(min(0.98, shares.min()) - 0.02, 1.005)
    axes.legend(loc="lower right")


def _durations(axes: Axes, label: str, fitted: np.ndarray, others: np.ndarray) -> float:
    """Draw the distribution functions of the durations that were fitted, and of those to be predicted.

    Returns what seconds are multiplied with.
    """
    both = np.concatenate([fitted, others])
    low, high = np.quantile(both, [0, 1 - _TAIL])
    room = max(0.05 * (high - low), 0.01 * high, 1e-12)
    points = np.linspace(max(0.0, low - room), high + room, _POINTS)
    scale, unit = _unit(float(high))
    axes.plot(points * scale, _share(fitted, points), color=look.BLUE, label="fitted")
    axes.plot(points * scale, _share(others, points), color=look.VERMILLION, linestyle="-.", label="to be predicted")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set(xlabel=f"{label} ({unit})", ylabel="share that is shorter", xlim=(points[0] * scale, points[-1] * scale))
    return scale


def _law(axes: Axes, scale: float, laws: Sequence[Law], weights: Sequence[int]) -> None:
    points = np.linspace(*axes.get_xlim(), _POINTS)
    probability = np.average([law.cdf(points / scale) for law in laws], axis=0, weights=weights)
    name = f"{len(laws)} laws, one per worker" if len(laws) > 1 else _name(laws[0])
    axes.plot(points, probability, color=look.BLACK, linestyle="--", linewidth=1, label=name)


def _name(law: Law) -> str:
    kind = type(law).__name__.lower()
    return kind if isinstance(law, Constant) else f"{kind}, mean {law.mean:.3g} s, CV {law.std / law.mean:.2g}"


def _share(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(values), points, side="right") / len(values)


def _unit(longest: float) -> tuple[float, str]:
    """Return what to multiply seconds with, and the unit that gives."""
    return (1.0, "s") if longest >= 0.1 or longest <= 0 else (1e3, "ms") if longest >= 1e-4 else (1e6, "\u00b5s")
