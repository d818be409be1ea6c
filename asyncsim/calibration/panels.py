"""Panels of predictions: measured and predicted distributions, durations with their laws."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asyncsim.base.console import number_text
from asyncsim.calibration.fitting import Part
from asyncsim.clusters.laws import Constant
from asyncsim.drawing import look

#: Points of a drawn curve.
_CURVE_POINTS = 200
#: Share of the values beyond a panel's far end.
_TAIL = 0.003
#: Bars of a histogram, the most that are distinct at paper size.
_BARS = 40


def staleness(axes: Axes, runs: Sequence[np.ndarray], measured: np.ndarray | None = None) -> None:
    """Draw the distribution of the staleness: predicted, with its range, and measured.

    ``measured``, and each of ``runs``: versions, by commit.
    """
    pooled = np.concatenate(runs)
    shown = pooled if measured is None else measured
    last = max(np.quantile(values, 1 - _TAIL) for values in (pooled, shown))
    width = max(1, round(last / _BARS))
    edges = np.arange(-0.5, last + width + 0.5, width)
    if measured is not None:
        weights = np.full(len(measured), 1 / (len(measured) * width))
        label = f"measured: mean {number_text(measured.mean())}, std {number_text(measured.std())}"
        axes.hist(measured, edges.tolist(), weights=weights, color=look.SKY, alpha=0.6, label=label)
    shares = [np.histogram(run, edges)[0] / (len(run) * width) for run in runs]
    low, high = np.quantile(shares, [0.025, 0.975], axis=0)
    axes.stairs(high, edges, baseline=low, fill=True, color=look.BLACK, alpha=0.15)
    label = f"predicted: mean {number_text(pooled.mean())}, std {number_text(pooled.std())}"
    axes.stairs(np.mean(shares, axis=0), edges, color=look.BLACK, label=label)
    axes.set_xlabel("staleness (versions)")
    axes.set_ylabel("share of commits per version" if width > 1 else "share of commits")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylim(0, 1.3 * max(high.max(), 1e-9))
    axes.legend(loc="upper right")


def waits(axes: Axes, runs: Sequence[np.ndarray], measured: np.ndarray | None = None) -> None:
    """Draw the distribution function of the waits: predicted, with 95 % of the runs, and measured.

    ``measured``, and each of ``runs``: seconds, by commit.
    """
    known = runs if measured is None else (*runs, measured)
    end = max(np.quantile(np.concatenate(runs), 1 - _TAIL), np.quantile(known[-1], 1 - _TAIL))
    scale, unit = _unit(float(end))
    points = np.linspace(0, end if end > 0 else 1.0, _CURVE_POINTS)
    shares = [np.searchsorted(np.sort(run), points, "right") / len(run) for run in known]
    predicted = shares[: len(runs)]
    low, high = np.quantile(predicted, [0.025, 0.975], axis=0)
    axes.fill_between(points * scale, low, high, color=look.BLACK, alpha=0.15, linewidth=0)
    mean = np.mean(predicted, axis=0)
    axes.plot(points * scale, mean, "--", color=look.BLACK, linewidth=1, label="predicted")
    if measured is not None:
        axes.plot(points * scale, shares[-1], color=look.BLUE, label="measured")
    axes.set(
        xlabel=f"waiting time ({unit})",
        ylabel="share of commits that wait less",
        xlim=(0, points[-1] * scale),
    )
    axes.set_ylim(min(0.98, low.min()) - 0.02, 1.005)
    axes.legend(loc="lower right")


def times(axes: Axes, label: str, parts: Sequence[Part], later: np.ndarray | None = None) -> None:
    """Draw the distribution functions of fitted durations, of later ones, and of the laws.

    ``label``: the words along the axis. ``parts``: with a law each, pooled. ``later``: seconds.
    """
    samples = [part.uncensored for part in parts]
    recorded = np.concatenate(samples)
    low, high = np.quantile(recorded if later is None else np.r_[recorded, later], [0, 1 - _TAIL])
    room = max(0.05 * (high - low), 0.01 * high, 1e-12)
    points = np.linspace(max(0.0, low - room), high + room, _CURVE_POINTS)
    scale, unit = _unit(float(high))
    axes.ecdf(recorded * scale, color=look.BLUE, label="recorded" if later is None else "fitted")
    if later is not None:
        axes.ecdf(later * scale, color=look.VERMILLION, linestyle="-.", label="to be predicted")
    if parts[0].steps == 1:  # else the law describes one step
        laws, sizes = [part.fit.law for part in parts], list(map(len, samples))
        probability = np.average([law.cdf(points) for law in laws], axis=0, weights=sizes)
        name = type(laws[0]).__name__.lower()
        if len(laws) > 1:
            name = f"{len(laws)} laws"
        elif not isinstance(laws[0], Constant):
            name += f", mean {laws[0].mean:.3g} s, CV {laws[0].std / laws[0].mean:.2g}"
        axes.plot(points * scale, probability, "--", color=look.BLACK, linewidth=1, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set(xlabel=f"{label} ({unit})", ylabel="share that is shorter")
    axes.set(xlim=(points[0] * scale, points[-1] * scale), ylim=(-0.02, 1.5))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(loc="upper left")


def _unit(longest: float) -> tuple[float, str]:
    """Return the factor from seconds to a unit that fits the longest time (s), and the unit."""
    if longest >= 0.1 or longest <= 0:
        return 1.0, "s"
    return (1e3, "ms") if longest >= 1e-4 else (1e6, "\u00b5s")
