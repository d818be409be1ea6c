"""How well a cluster calibrated on one recording predicts another: the later half of the same, or other workers.

A prediction is many simulated runs, each of the cluster fitted to durations drawn anew from the recording: so their
spread has in it both the chance of one run, serial dependence included, and how well the recording determines the laws.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError, require_count
from asyncsim.base.streams import Streams
from asyncsim.calibration import Calibration, dependence, examine
from asyncsim.calibration.fitting import uncensored
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.laws import Constant, Law
from asyncsim.drawing import layout, look
from asyncsim.drawing.plots import beyond
from asyncsim.simulation.simulate import simulate
from asyncsim.traces.columns import ACCEPTED
from asyncsim.traces.durations import Durations, attended, durations, require_asynchronous
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

__all__ = ["Prediction", "extrapolate", "predict"]

#: Simulated runs of a prediction: a run of the same cluster is outside of all of them once in a hundred.
RUNS = 199
#: Runs with the laws of what was to be predicted.
_OWN_RUNS = 10
#: How far off the throughput may be predicted.
BAR = 0.1
#: Waits below this part of the mean service time are none.
_LEAST_WAIT = 0.05
#: What is compared besides the distributions: the entry of `Trace.summary`, and what it is called.
_MEANS = {
    "staleness_mean": "staleness, mean",
    "staleness_std": "staleness, std",
    "wait_mean": "wait, mean (s)",
    "utilisation": "server utilisation",
}
LOST = "computations lost, share"
THROUGHPUT = "throughput (commits/s)"
STALENESS = "staleness, distance"
#: Points of a drawn curve.
_CURVE_POINTS = 200
#: A panel shows all but this share of what is measured, at its far end.
_TAIL = 0.003
#: Bars of a histogram: as many as the eye can use at paper size.
_BARS = 40


class Measured(NamedTuple):
    """The quantities of a trace that are compared: the entries of `Trace.summary`, and of each commit two.

    A wait is from the arrival of a message to the begin of its service (s); less than a twentieth of a mean service is
    none, as no real server accepts a visit in no time.
    """

    values: dict[str, float]
    staleness: np.ndarray
    waits: np.ndarray


def _measure(trace: Trace, first: int) -> Measured:
    """Return what is compared of a trace from a commit on."""
    frame = trace.accepted.frame.iloc[first:]
    waits = (frame["serve_time"] - frame["arrive_time"]).to_numpy()
    least = _LEAST_WAIT * float((frame["commit_time"] - frame["serve_time"]).mean())
    return Measured(trace.summary(first), frame["staleness"].to_numpy(), np.where(waits < least, 0.0, waits))


@dataclass(frozen=True)
class Prediction:
    """What was predicted, and what was measured."""

    title: str  #: what was predicted from what
    #: One row per quantity: ``quantity``, ``measured``, ``predicted`` (the mean of the runs), ``low`` and ``high``, and
    #: ``within``, whether what was measured lies between them. For the throughput these are what the prediction misses
    #: by 10 %; for all others the least and the most of the simulated runs. A ``distance`` is the largest difference of
    #: two distribution functions, that of the commits in question and that of all simulated runs together (Kolmogorov
    #: and Smirnov's; its band is simulated, so that ties and dependence do no harm).
    table: pd.DataFrame
    #: What of the recorded durations differs or depends on what a cluster does not know; if the prediction fails, also
    #: whether the simulator does better with the laws of what it should predict.
    reasons: tuple[str, ...]
    calibration: Calibration  #: the laws, and the durations that they were fitted to
    cluster: Cluster  #: what was simulated
    measured: Measured  #: what was compared: of the recording, and of each simulated run
    runs: tuple[Measured, ...]
    durations: Durations  #: those of what was predicted

    @property
    def holds(self) -> bool:
        """Whether the throughput is within its bar and the distribution of the staleness within its band."""
        return bool(self.table.set_index("quantity")["within"][[THROUGHPUT, STALENESS]].all())

    @property
    def text(self) -> str:
        """The table and the reasons, for printing."""
        with pd.option_context("display.width", 200):
            table = self.table.round(12).to_string(index=False, float_format="{:.4g}".format, na_rep="-")
        verdict = "holds" if self.holds else "fails"
        band = f"throughput within {BAR:.0%}, the rest within {len(self.runs)} simulated runs"
        judged = "judged by the throughput and by the distance of the staleness"
        said = [f"  {reason}" for reason in self.reasons]
        return "\n".join(
            [f"{self.title}: {verdict}", f"simulated: {describe(self.cluster)}", f"{band}; {judged}", table, *said]
        )

    def draw(self, path: str | os.PathLike) -> list[Path]:
        """Write the distributions, measured and predicted, and the durations with their laws: a PNG and a PDF."""
        return _draw(self, path)


def predict(recorded: Trace, seed: int = 0, *, runs: int = RUNS, **options: Any) -> Prediction:
    """Predict the later half of a recording from its earlier half.

    Parameters
    ----------
    recorded : Trace
        Of an asynchronous server.
    seed : int
        Names the random numbers.
    runs : int
        Simulated runs. With 199 of them what is the same cluster is outside the band of a quantity once in a hundred.
    **options
        For `asyncsim.calibrate`: ``law``, ``latency_up``, ...
    """
    require_asynchronous("recorded", recorded)
    half = len(recorded.accepted) // 2
    taken = np.cumsum(recorded.frame["outcome"].isin(ACCEPTED).to_numpy())
    earlier = recorded.frame[taken <= half]
    spells = recorded.spells[recorded.spells["begin"] <= earlier["commit_time"].max()]
    rows = spells[["from_row", "to_row"]]
    spells = spells.assign(**rows.where(rows <= len(earlier)))
    calibration = examine(Trace.of(earlier, recorded.source, spells=spells), **options)
    title = f"the later half of {counted(len(recorded), 'commit')} by {counted(recorded.workers, 'worker')}"
    target = _Target(f"{title}, from the earlier half", "in the later half", "in the earlier half", recorded, half)
    return _prediction(calibration, target, seed, runs, options)


def extrapolate(recorded: Trace, again: Trace, seed: int = 0, *, runs: int = RUNS, **options: Any) -> Prediction:
    """Predict a recording with another number of workers; laws of each worker's own are repeated for the others.

    Parameters
    ----------
    recorded : Trace
        What the cluster is calibrated on.
    again : Trace
        What is predicted, except for the first commits that a summary leaves out.
    seed, runs, **options
        As for `predict`.
    """
    for name, trace in (("recorded", recorded), ("again", again)):
        require_asynchronous(name, trace)
    for name in ("protocol", "window", "separate_reads"):
        given, other = getattr(recorded.source, name), getattr(again.source, name)
        if given != other:
            raise InputError(f"again: {name} is {other!r}, and in the first recording {given!r}; record both alike")
    title = f"{counted(len(again), 'commit')} by {counted(again.workers, 'worker')}"
    title = f"{title}, from a recording of {recorded.workers}"
    which, origin = (f"with {trace.workers} workers" for trace in (again, recorded))
    target = _Target(title, which, origin, again, warm_up_of(again, None))
    return _prediction(examine(recorded, **options), target, seed, runs, options)


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """Return a cluster with another number of workers; the laws of each one's own are repeated."""
    own = cluster.compute_laws
    compute = tuple(own[i % len(own)] for i in range(workers))
    return replace(cluster, workers=workers, compute=compute[0] if len(set(compute)) == 1 else compute)


class _Target(NamedTuple):
    """What is to be predicted: a trace from a commit on, in words; ``origin``: what the laws come from, in words."""

    title: str
    which: str
    origin: str
    trace: Trace
    first: int


def _prediction(calibration: Calibration, target: _Target, seed: int, runs: int, options: dict[str, Any]) -> Prediction:
    """Simulate, compare, and look for reasons."""
    trace, first = target.trace, target.first
    found = durations(trace, first)
    streams = Streams(require_count("seed", seed, minimum=0), "prediction")
    made = []
    for run in range(require_count("runs", runs, minimum=2)):
        generator = streams.generator(run)
        drawn = int(generator.integers(2**31))
        like = with_workers(calibration.resampled(generator), trace.workers)
        made.append(_measure(simulate(like, len(trace.accepted), drawn, progress=False), first))
    measured = _measure(attended(trace), first)

    # Durations that are longer or shorter than those that the cluster was calibrated on.
    given, workers = calibration.durations, calibration.cluster.workers
    own = {worker: median for worker, median in dependence.medians(given).items() if median > 0}
    scale = {int(worker): own[worker % workers] for worker in np.unique(found.worker) if worker % workers in own}
    compared = {
        "compute times": (dependence.relative_to(found, scale), dependence.relative_to(given, own)),
        "service times": (found.service, given.service),
        "ways down": (found.down, given.down),
    }
    reasons: list[str] = []
    small: list[str] = []
    for what, (here, there) in compared.items():
        ratio = dependence.ratio(here, there)
        if ratio is not None:
            text = f"{what} {target.which} are {ratio.value:.2f} \u00b1 {ratio.error:.2f} times as long"
            if what == "compute times" and ratio.value > 1 and trace.workers > workers and ratio.matters:
                text += ": the workers contend for what they compute with"
            (reasons if ratio.matters else small).append(text)
    reasons += [f"{target.origin}: {note}" for note in calibration.notes]
    prediction = Prediction(
        target.title,
        pd.DataFrame(_table(measured, made)),
        tuple(reasons),
        calibration,
        with_workers(calibration.cluster, trace.workers),
        measured,
        tuple(made),
        found,
    )
    if prediction.holds:
        return prediction

    # How well the simulator does with the laws of what was to be predicted.
    itself = examine(trace, **{**options, "warm_up": first})
    seeds = range(seed, seed + _OWN_RUNS)
    again = [_measure(simulate(itself.cluster, len(trace.accepted), drawn, progress=False), first) for drawn in seeds]
    rate, true_rate = float(np.mean([run.values["throughput"] for run in again])), measured.values["throughput"]
    off = _distance(measured.staleness, np.sort(np.concatenate([run.staleness for run in again])))
    met = abs(rate / true_rate - 1) <= BAR and off <= prediction.table.set_index("quantity")["high"][STALENESS]
    verdict = "only the times are others" if met else "what was recorded is no cluster of independent times"
    reasons += [f"{text}, which may be chance" for text in small]
    reasons += [f"{target.which}: {note}" for note in itself.notes]
    reasons.append(
        f"with laws fitted to its own times the simulator makes {rate:.4g} commits/s, measured {true_rate:.4g}, and "
        f"misses the staleness by a distance of {off:.2g}: {verdict}"
    )
    return replace(prediction, reasons=tuple(reasons))


def _table(measured: Measured, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows of `Prediction.table`."""
    table = []

    def add(quantity: str, value: float, predicted: float, low: float, high: float) -> None:
        # Sums of the same terms in another order may differ in the last digits.
        slack = 1e-9 * max(abs(low), abs(high))
        within = low - slack <= value <= high + slack
        table.append(dict(quantity=quantity, measured=value, predicted=predicted, low=low, high=high, within=within))

    rate = float(np.mean([run.values["throughput"] for run in runs]))
    add(THROUGHPUT, measured.values["throughput"], rate, rate / (1 + BAR), rate / (1 - BAR))
    lost = {"cancelled_share": LOST} if any(run.values["cancelled_share"] for run in (measured, *runs)) else {}
    for name, called in (_MEANS | lost).items():
        values = [run.values[name] for run in runs]
        add(called, measured.values[name], float(np.mean(values)), min(values), max(values))
    for called, name in ((STALENESS, "staleness"), ("wait, distance", "waits")):
        everything = np.sort(np.concatenate([getattr(run, name) for run in runs]))
        distances = [_distance(getattr(run, name), everything) for run in runs]
        add(called, _distance(getattr(measured, name), everything), float(np.mean(distances)), 0.0, max(distances))
    return table


def _distance(sample: np.ndarray, everything: np.ndarray) -> float:
    """Return the largest difference between two samples' distribution functions; the second is sorted."""
    points = np.union1d(sample, everything)
    shares = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (sample, everything)]
    return float(np.abs(shares[0] - shares[1]).max())


def _draw(prediction: Prediction, path: str | os.PathLike) -> list[Path]:
    """Write the figure of a prediction as ``path.png`` and ``path.pdf``."""
    with look.style():
        figure, axes = look.new_figure(look.DOUBLE, 4.6, columns=2, rows=2)
        layout.title(figure, f"{prediction.title}: {'holds' if prediction.holds else 'fails'}")
        _staleness(axes[0], prediction)
        _waits(axes[1], prediction)
        parts = {part.name: part for part in prediction.calibration.parts}
        compute = [part for name, part in parts.items() if name.startswith("compute")]
        steps = compute[0].steps
        computed, laws = [part.uncensored for part in compute], [part.fit.law for part in compute]
        shown = "compute time" if steps == 1 else f"compute time of {steps} local steps"
        seconds, _, cancelled = prediction.durations.attempts
        scale = _durations(axes[2], shown, np.concatenate(computed), uncensored(seconds, cancelled))
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


def _staleness(axes: Axes, prediction: Prediction) -> None:
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


def _waits(axes: Axes, prediction: Prediction) -> None:
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
    points = np.linspace(max(0.0, low - room), high + room, _CURVE_POINTS)
    scale, unit = _unit(float(high))
    axes.plot(points * scale, _share(fitted, points), color=look.BLUE, label="fitted")
    axes.plot(points * scale, _share(others, points), color=look.VERMILLION, linestyle="-.", label="to be predicted")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set(xlabel=f"{label} ({unit})", ylabel="share that is shorter", xlim=(points[0] * scale, points[-1] * scale))
    return scale


def _law(axes: Axes, scale: float, laws: Sequence[Law], weights: Sequence[int]) -> None:
    points = np.linspace(*axes.get_xlim(), _CURVE_POINTS)
    probability = np.average([law.cdf(points / scale) for law in laws], axis=0, weights=weights)
    name = f"{len(laws)} laws, one per worker" if len(laws) > 1 else type(laws[0]).__name__.lower()
    if len(laws) == 1 and not isinstance(laws[0], Constant):
        name += f", mean {laws[0].mean:.3g} s, CV {laws[0].std / laws[0].mean:.2g}"
    axes.plot(points, probability, color=look.BLACK, linestyle="--", linewidth=1, label=name)


def _share(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(values), points, side="right") / len(values)


def _unit(longest: float) -> tuple[float, str]:
    """Return what to multiply seconds with, and the unit that gives."""
    return (1.0, "s") if longest >= 0.1 or longest <= 0 else (1e3, "ms") if longest >= 1e-4 else (1e6, "\u00b5s")
