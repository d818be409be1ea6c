"""Test a calibrated cluster on other data: the later half of the recording, or other workers.

A prediction consists of many simulated runs, each of the cluster fitted to resampled durations of
the recording. Their spread includes the chance of one run, with serial dependence, and the
uncertainty of the laws.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, table_text
from asyncsim.base.errors import InputError, require_count
from asyncsim.base.streams import Streams
from asyncsim.calibration import Calibration, dependence, examine, panels
from asyncsim.calibration.fitting import uncensored
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.drawing import layout, look
from asyncsim.simulation.simulate import simulate
from asyncsim.traces.columns import ACCEPTED
from asyncsim.traces.durations import Durations, attended, durations, require_asynchronous
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

__all__ = ["Forecast", "Prediction", "extrapolate", "forecast", "predict"]

#: Simulated runs of a prediction: another run of the cluster lies outside all of them once in a
#: hundred.
RUNS = 199
#: Fewest commits per worker of a forecast.
_FEWEST_STEPS = 20
#: Runs with the laws of the predicted recording.
_OWN_RUNS = 10
#: Tolerance for the predicted throughput, relative.
BAR = 0.1
#: Waits below this share of the mean service time count as zero.
_SHORTEST_WAIT = 0.05
#: Compared besides the distributions: entries of `Trace.summary`, and their titles.
_MEANS = {
    "staleness_mean": "staleness, mean",
    "staleness_std": "staleness, std",
    "wait_mean": "wait, mean (s)",
    "utilisation": "server utilisation",
}
LOST = "computations lost, share"
THROUGHPUT = "throughput (commits/s)"
STALENESS = "staleness, distance"


class Measurements(NamedTuple):
    """The compared quantities of a trace: entries of `Trace.summary`, and two for each commit.

    A wait is from the arrival of a message to the start of its service (s). A wait below a
    twentieth of a mean service counts as zero, because no real server accepts a visit in no time.
    """

    values: dict[str, float]
    staleness: np.ndarray
    waits: np.ndarray


def _measure(trace: Trace, first: int) -> Measurements:
    """Measure a trace from a commit on."""
    frame = trace.accepted.frame.iloc[first:]
    waits = (frame["serve_time"] - frame["arrive_time"]).to_numpy()
    shortest = _SHORTEST_WAIT * float((frame["commit_time"] - frame["serve_time"]).mean())
    return Measurements(
        trace.summary(first), frame["staleness"].to_numpy(), np.where(waits < shortest, 0.0, waits)
    )


@dataclass(frozen=True)
class Prediction:
    """A prediction beside the measurement."""

    title: str  #: the predicted recording, and the data of the calibration
    #: One row per quantity: ``quantity``, ``measured``, ``predicted`` (the mean of the runs),
    #: ``low`` and ``high``, and ``within``, whether the measured value lies between them. For the
    #: throughput these are the values that the prediction misses by 10 %; for all others the least
    #: and the largest of the simulated runs. A ``distance`` is the largest difference of two
    #: distribution functions, of the commits in question and of all simulated runs together
    #: (Kolmogorov and Smirnov's; its band is simulated, so that ties and dependence do no harm).
    table: pd.DataFrame
    #: Differences and dependences of the recorded durations that a cluster does not have; if the
    #: prediction fails, also the error of the simulator with the laws of the predicted recording.
    reasons: tuple[str, ...]
    calibration: Calibration  #: the laws, and the durations to which they were fitted
    cluster: Cluster  #: the simulated cluster
    measured: Measurements  #: of the recording
    runs: tuple[Measurements, ...]  #: of each simulated run
    durations: Durations  #: of the predicted recording

    @property
    def holds(self) -> bool:
        """Whether the throughput is within its tolerance and the staleness within its band."""
        return bool(self.table.set_index("quantity")["within"][[THROUGHPUT, STALENESS]].all())

    @property
    def text(self) -> str:
        """The table and the reasons, for printing."""
        verdict = "holds" if self.holds else "fails"
        band = f"throughput within {BAR:.0%}, the rest within {len(self.runs)} simulated runs"
        judged = "judged by the throughput and by the distance of the staleness"
        reasons = [f"  {reason}" for reason in self.reasons]
        return "\n".join(
            [
                f"{self.title}: {verdict}",
                f"simulated: {describe(self.cluster)}",
                f"{band}; {judged}",
                table_text(self.table.round(12), digits=4),
                *reasons,
            ]
        )

    def draw(self, path: str | os.PathLike) -> list[Path]:
        """Write the distributions, measured and predicted, and the durations with their laws: a PNG
        and a PDF.
        """
        with look.style():
            figure, axes = look.new_figure(look.DOUBLE, 4.6, columns=2, rows=2)
            layout.title(figure, f"{self.title}: {'holds' if self.holds else 'fails'}")
            measured, runs = self.measured, self.runs
            panels.staleness(axes[0], measured.staleness, [run.staleness for run in runs])
            panels.waits(axes[1], measured.waits, [run.waits for run in runs])
            parts = {part.name: part for part in self.calibration.parts}
            compute = [part for name, part in parts.items() if name.startswith("compute")]
            steps, (seconds, _, cancelled) = compute[0].steps, self.durations.attempts
            label = "compute time" if steps == 1 else f"compute time of {steps} local steps"
            panels.times(axes[2], label, compute, uncensored(seconds, cancelled))
            panels.times(axes[3], "service time", [parts["service"]], self.durations.service)
            return look.save(figure, path)


def predict(recorded: Trace, seed: int = 0, *, runs: int = RUNS, **options: Any) -> Prediction:
    """Predict the later half of a recording from its earlier half.

    Parameters
    ----------
    recorded : Trace
        Of an asynchronous server.
    seed : int
        Seed of the simulated runs.
    runs : int
        Simulated runs. With 199 of them another run of the same cluster lies outside a quantity's
        band once in a hundred.
    **options
        For `asyncsim.calibrate`: ``law``, ``latency_up``, ...
    """
    require_asynchronous("recorded", recorded)
    half = len(recorded.accepted) // 2
    accepted = np.cumsum(recorded.frame["outcome"].isin(ACCEPTED).to_numpy())
    calibration = examine(recorded.head(int((accepted <= half).sum())), **options)
    title = (
        f"the later half of {counted(len(recorded), 'commit')} by "
        f"{counted(recorded.workers, 'worker')}"
    )
    target = _Target(
        f"{title}, from the earlier half",
        "in the later half",
        "in the earlier half",
        recorded,
        half,
    )
    return _prediction(calibration, target, seed, runs, options)


def extrapolate(
    recorded: Trace, target: Trace, seed: int = 0, *, runs: int = RUNS, **options: Any
) -> Prediction:
    """Predict a recording with another number of workers; laws of single workers repeat in turn.

    Parameters
    ----------
    recorded : Trace
        The recording for the calibration.
    target : Trace
        The predicted recording, except for the first commits that a summary leaves out.
    seed, runs, **options
        As for `predict`.
    """
    for name, trace in (("recorded", recorded), ("target", target)):
        require_asynchronous(name, trace)
    for name in ("protocol", "window", "separate_reads"):
        expected, value = getattr(recorded.source, name), getattr(target.source, name)
        if expected != value:
            raise InputError(
                f"target: {name} is {value!r}, and in the first recording {expected!r}; record "
                "both alike"
            )
    title = f"{counted(len(target), 'commit')} by {counted(target.workers, 'worker')}"
    title = f"{title}, from a recording of {recorded.workers}"
    period, origin = (f"with {trace.workers} workers" for trace in (target, recorded))
    task = _Target(title, period, origin, target, warm_up_of(target, None))
    return _prediction(examine(recorded, **options), task, seed, runs, options)


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """Return a cluster with another number of workers; laws of single workers repeat in turn."""
    laws = cluster.compute_laws
    compute = tuple(laws[i % len(laws)] for i in range(workers))
    return replace(
        cluster, workers=workers, compute=compute[0] if len(set(compute)) == 1 else compute
    )


class _Target(NamedTuple):
    """A trace to predict from a commit on; ``period`` and ``origin`` name it and its source."""

    title: str
    period: str
    origin: str
    trace: Trace
    first: int


@dataclass(frozen=True)
class Forecast:
    """A prediction without a measurement."""

    title: str
    #: One row per quantity: ``quantity``, ``predicted`` (the mean of the runs), ``low`` and
    #: ``high`` (between them lie 95 % of the runs).
    table: pd.DataFrame
    calibration: Calibration
    cluster: Cluster  #: the simulated cluster
    runs: tuple[Measurements, ...]  #: of each simulated run

    @property
    def text(self) -> str:
        """The fit, the table and the notes, for printing."""
        return "\n".join(
            [
                table_text(self.calibration.table, digits=4),
                *(f"  note: {note}" for note in self.calibration.notes),
                f"\n{self.title}; low to high: 95 % of {len(self.runs)} runs with laws fitted to "
                "resampled times",
                f"simulated: {describe(self.cluster)}",
                table_text(self.table, digits=4),
                "the workers are taken to share nothing but the server: processors or links that "
                "they contend for make it slower",
            ]
        )

    def draw(self, path: str | os.PathLike) -> list[Path]:
        """Write the recorded times with their laws, and the predicted staleness: a PNG and a
        PDF.
        """
        calibration = self.calibration
        compute = [part for part in calibration.parts if part.name.startswith("compute")]
        fitted = {
            "compute time" if compute[0].steps == 1 else "compute time of a window": compute,
            **{
                f"{part.name} time" if part.name == "service" else part.name: [part]
                for part in calibration.parts
                if part not in compute and len(part.durations) and part.durations.any()
            },
        }
        with look.style():
            figure, axes = look.new_grid(len(fitted) + 1, 2.3, 0.4)
            layout.title(figure, f"recorded times and their laws; {self.title}")
            for panel, (label, parts) in zip(axes, fitted.items(), strict=False):
                panels.times(panel, label, parts)
            panels.staleness_forecast(axes[-1], [run.staleness for run in self.runs])
            return look.save(figure, path)


def forecast(
    recorded: Trace, workers: int, seed: int = 0, *, runs: int = RUNS, **options: Any
) -> Forecast:
    """Predict a recorded system with another number of workers; laws of single workers repeat.

    Each run has the recording's number of commits per worker, at least 20; the first third is left
    out.

    Parameters
    ----------
    recorded : Trace
        Of an asynchronous server.
    workers : int
    seed : int
        Seed of the simulated runs.
    runs : int
        Simulated runs, each with laws fitted to resampled durations.
    **options
        For `asyncsim.calibrate`.

    Raises
    ------
    InputError
        As of `asyncsim.calibrate`.
    """
    require_asynchronous("recorded", recorded)
    calibration = examine(recorded, **options)
    steps = max(_FEWEST_STEPS, len(recorded.accepted) // recorded.workers)
    commits = steps * require_count("workers", workers)
    simulated = _simulated(calibration, workers, commits, commits // 3, seed, runs)
    rows = []
    for name, quantity in {"throughput": THROUGHPUT, **_MEANS}.items():
        values = [run.values[name] for run in simulated]
        low, high = np.quantile(values, [0.025, 0.975])
        rows.append({"quantity": quantity, "predicted": np.mean(values), "low": low, "high": high})
    return Forecast(
        f"predicted for {counted(workers, 'worker')}, from {counted(len(recorded), 'commit')} by "
        f"{recorded.workers}",
        pd.DataFrame(rows),
        calibration,
        with_workers(calibration.cluster, workers),
        tuple(simulated),
    )


def _simulated(
    calibration: Calibration, workers: int, commits: int, first: int, seed: int, runs: int
) -> list[Measurements]:
    """Simulate clusters that were fitted to resampled durations; measure them from a commit on."""
    streams = Streams(require_count("seed", seed, minimum=0), "prediction")
    measurements = []
    for run in range(require_count("runs", runs, minimum=2)):
        generator = streams.generator(run)
        drawn = int(generator.integers(2**31))
        cluster = with_workers(calibration.resampled(generator), workers)
        measurements.append(_measure(simulate(cluster, commits, drawn, progress=False), first))
    return measurements


def _prediction(
    calibration: Calibration, target: _Target, seed: int, runs: int, options: dict[str, Any]
) -> Prediction:
    """Simulate, compare, and explain differences."""
    trace, first = target.trace, target.first
    predicted = durations(trace, first)
    simulated = _simulated(calibration, trace.workers, len(trace.accepted), first, seed, runs)
    measured = _measure(attended(trace), first)

    # Durations that are longer or shorter than in the calibrated recording.
    fitted, workers = calibration.durations, calibration.cluster.workers
    medians = {
        worker: median for worker, median in dependence.medians(fitted).items() if median > 0
    }
    ids = np.unique(predicted.worker).tolist()
    scale = {worker: medians[worker % workers] for worker in ids if worker % workers in medians}
    compared = {
        "compute times": (
            dependence.relative_to(predicted, scale),
            dependence.relative_to(fitted, medians),
        ),
        "service times": (predicted.service, fitted.service),
        "ways down": (predicted.down, fitted.down),
    }
    reasons: list[str] = []
    small: list[str] = []
    for quantity, samples in compared.items():
        ratio = dependence.ratio(*samples)
        if ratio is not None:
            text = (
                f"{quantity} {target.period} are {ratio.value:.2f} \u00b1 {ratio.error:.2f} times "
                "as long"
            )
            if (
                quantity == "compute times"
                and ratio.value > 1
                and trace.workers > workers
                and ratio.matters
            ):
                text += ": the workers contend for their processors"
            (reasons if ratio.matters else small).append(text)
    reasons += [f"{target.origin}: {note}" for note in calibration.notes]
    prediction = Prediction(
        target.title,
        pd.DataFrame(_table(measured, simulated)),
        tuple(reasons),
        calibration,
        with_workers(calibration.cluster, trace.workers),
        measured,
        tuple(simulated),
        predicted,
    )
    if prediction.holds:
        return prediction

    # The error of the simulator with the laws of the predicted recording.
    itself = examine(trace, **{**options, "warm_up": first})
    seeds = range(seed, seed + _OWN_RUNS)
    refits = [
        _measure(simulate(itself.cluster, len(trace.accepted), drawn, progress=False), first)
        for drawn in seeds
    ]
    rate, true_rate = (
        float(np.mean([run.values["throughput"] for run in refits])),
        measured.values["throughput"],
    )
    off = _distance(measured.staleness, np.sort(np.concatenate([run.staleness for run in refits])))
    agrees = (
        abs(rate / true_rate - 1) <= BAR
        and off <= prediction.table.set_index("quantity")["high"][STALENESS]
    )
    verdict = (
        "only the times are others"
        if agrees
        else "the recording is no cluster of independent times"
    )
    reasons += [f"{text}, which may be chance" for text in small]
    reasons += [f"{target.period}: {note}" for note in itself.notes]
    reasons.append(
        f"with laws fitted to its own times the simulator makes {rate:.4g} commits/s, measured "
        f"{true_rate:.4g}, and "
        f"misses the staleness by a distance of {off:.2g}: {verdict}"
    )
    return replace(prediction, reasons=tuple(reasons))


def _table(measured: Measurements, runs: Sequence[Measurements]) -> list[dict[str, Any]]:
    table = []

    def add(quantity: str, value: float, predicted: float, low: float, high: float) -> None:
        # Sums of the same terms in another order can differ in the last digits.
        slack = 1e-9 * max(abs(low), abs(high))
        within = low - slack <= value <= high + slack
        table.append(
            dict(
                quantity=quantity,
                measured=value,
                predicted=predicted,
                low=low,
                high=high,
                within=within,
            )
        )

    rate = float(np.mean([run.values["throughput"] for run in runs]))
    add(THROUGHPUT, measured.values["throughput"], rate, rate / (1 + BAR), rate / (1 - BAR))
    lost = (
        {"cancelled_share": LOST}
        if any(run.values["cancelled_share"] for run in (measured, *runs))
        else {}
    )
    for name, title in (_MEANS | lost).items():
        values = [run.values[name] for run in runs]
        add(title, measured.values[name], float(np.mean(values)), min(values), max(values))
    for title, name in ((STALENESS, "staleness"), ("wait, distance", "waits")):
        everything = np.sort(np.concatenate([getattr(run, name) for run in runs]))
        distances = [_distance(getattr(run, name), everything) for run in runs]
        add(
            title,
            _distance(getattr(measured, name), everything),
            float(np.mean(distances)),
            0.0,
            max(distances),
        )
    return table


def _distance(sample: np.ndarray, everything: np.ndarray) -> float:
    """Return the largest difference between two samples' distribution functions; the second is
    sorted.
    """
    points = np.union1d(sample, everything)
    shares = [
        np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (sample, everything)
    ]
    return float(np.abs(shares[0] - shares[1]).max())
