"""Panels of predictions: measured and predicted distributions, durations with their laws."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asyncsim.base.console import number_text
from asyncsim.calibration.fitting import Part
from asyncsim.clusters.laws import Constant, Law
from asyncsim.drawing import look
from asyncsim.drawing.plots import beyond

#: Points of a drawn curve.
_CURVE_POINTS = 200
#: Share of the values beyond a panel's far end.
_TAIL = 0.003
#: Bars of a histogram, the most that are distinct at paper size.
_BARS = 40


def staleness(axes: Axes, measured: np.ndarray, runs: Sequence[np.ndarray]) -> None:
    """Draw the distribution of the staleness: measured, and the range of the predicted runs.

    ``measured``, and each of ``runs``: versions, by commit.
    """
    pooled = np.concatenate(runs)
    last = int(max(np.quantile(measured, 1 - _TAIL), np.quantile(pooled, 1 - _TAIL))) + 1
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
    mean, low, high = shares.mean(axis=0), shares.min(axis=0), shares.max(axis=0)
    axes.errorbar(
        middle,
        mean,
        yerr=(mean - low, high - mean),
        label=f"predicted: mean {number_text(pooled.mean())}, std {number_text(pooled.std())}",
        color=look.BLACK,
        linewidth=0.8,
        marker="o",
        markersize=2.5,
        linestyle="none",
    )
    axes.set_xlabel(f"staleness (versions){beyond(measured, edges[-1])}")
    axes.set_ylabel("share of commits per version" if width > 1 else "share of commits")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(0, 1.3 * max(shares.max(), 1e-9))
    axes.legend(loc="upper right")


def staleness_forecast(axes: Axes, runs: Sequence[np.ndarray]) -> None:
    """Draw the predicted distribution of the staleness, with the range of 95 % of the runs."""
    edges = np.arange(-0.5, np.quantile(np.concatenate(runs), 1 - _TAIL) + 1.5)
    shares = np.array([np.histogram(run, edges, density=True)[0] for run in runs])
    low, high = np.quantile(shares, [0.025, 0.975], axis=0)
    axes.stairs(shares.mean(axis=0), edges, color=look.BLACK, label="predicted")
    axes.stairs(
        high, edges, baseline=low, fill=True, color=look.BLACK, alpha=0.15, label="95 % of runs"
    )
    axes.set(xlabel="staleness (versions)", ylabel="share of commits")
    axes.legend(loc="upper right")


def waits(axes: Axes, measured: np.ndarray, runs: Sequence[np.ndarray]) -> None:
    """Draw the distribution function of the waits: measured, and the range of the runs.

    ``measured``, and each of ``runs``: seconds, by commit.
    """
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


def times(
    axes: Axes, label: str, parts: Sequence[Part], predicted: np.ndarray | None = None
) -> None:
    """Draw the distribution functions of fitted durations, of durations to be predicted, and of the
    laws.

    ``label``: the words along the axis. ``parts``: with a law each, pooled. ``predicted``: seconds.
    """
    samples = [part.uncensored for part in parts]
    scale = _durations(axes, label, np.concatenate(samples), predicted)
    if parts[0].steps == 1:  # else the law describes one step
        _law(axes, scale, [part.fit.law for part in parts], list(map(len, samples)))
    axes.set_ylim(-0.02, 1.5)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(loc="upper left")


def _durations(
    axes: Axes, label: str, fitted: np.ndarray, predicted: np.ndarray | None = None
) -> float:
    """Draw the distribution functions of the fitted durations and of the durations to be predicted.

    Returns the factor from seconds to the unit of the axis.
    """
    pooled = fitted if predicted is None else np.concatenate([fitted, predicted])
    low, high = np.quantile(pooled, [0, 1 - _TAIL])
    room = max(0.05 * (high - low), 0.01 * high, 1e-12)
    points = np.linspace(max(0.0, low - room), high + room, _CURVE_POINTS)
    scale, unit = _unit(float(high))
    name = "recorded" if predicted is None else "fitted"
    axes.plot(points * scale, _share(fitted, points), color=look.BLUE, label=name)
    if predicted is not None:
        axes.plot(
            points * scale,
            _share(predicted, points),
            color=look.VERMILLION,
            linestyle="-.",
            label="to be predicted",
        )
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set(
        xlabel=f"{label} ({unit})",
        ylabel="share that is shorter",
        xlim=(points[0] * scale, points[-1] * scale),
    )
    return scale


def _law(axes: Axes, scale: float, laws: Sequence[Law], weights: Sequence[int]) -> None:
    """Draw the distribution function of a mixture of laws; ``scale``: as `_durations` returns."""
    points = np.linspace(*axes.get_xlim(), _CURVE_POINTS)
    probability = np.average([law.cdf(points / scale) for law in laws], axis=0, weights=weights)
    name = f"{len(laws)} laws, one per worker" if len(laws) > 1 else type(laws[0]).__name__.lower()
    if len(laws) == 1 and not isinstance(laws[0], Constant):
        name += f", mean {laws[0].mean:.3g} s, CV {laws[0].std / laws[0].mean:.2g}"
    axes.plot(points, probability, color=look.BLACK, linestyle="--", linewidth=1, label=name)


def _share(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the share of the values that are at most each point."""
    return np.searchsorted(np.sort(values), points, side="right") / len(values)


def _unit(longest: float) -> tuple[float, str]:
    """Return the factor from seconds to a unit that fits the longest time (s), and the unit."""
    if longest >= 0.1 or longest <= 0:
        return 1.0, "s"
    return (1e3, "ms") if longest >= 1e-4 else (1e6, "\u00b5s")
