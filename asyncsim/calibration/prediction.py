"""Predict a recorded system by its calibrated cluster: other workers, or the rest of the recording.

A prediction consists of many simulated runs, each of the cluster fitted to resampled durations of
the recording. Their spread includes the chance of one run, with serial dependence, and the
uncertainty of the laws, without their families. Beside a measurement it is a test.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import ks_2samp

from asyncsim.base.console import counted, in_texts, number_text, table_text
from asyncsim.base.errors import InputError, require_count
from asyncsim.base.streams import Streams
from asyncsim.calibration import Calibration, dependence, examine, panels
from asyncsim.calibration.fitting import Part
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.network import PerWorker, per_worker
from asyncsim.drawing import layout, look
from asyncsim.simulation.simulate import simulate
from asyncsim.study.planning import settled
from asyncsim.traces.columns import ACCEPTED
from asyncsim.traces.durations import Durations, attended, durations, require_asynchronous
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

__all__ = ["Prediction", "extrapolate", "forecast", "predict"]

#: Simulated runs of a prediction: another run of the cluster lies outside all of them once in a
#: hundred.
RUNS = 199
#: Fewest commits per worker of a forecast.
_FEWEST_STEPS = 20
#: Runs of the fitted cluster beside its recording.
_REPETITIONS = 10
#: Tolerance for the predicted throughput, relative.
BAR = 0.1
#: Waits below this share of the mean service time count as zero.
_SHORTEST_WAIT = 0.05
#: Entries of `Trace.summary`, and their titles.
_MEANS = {
    "throughput": "throughput (commits/s)",
    "staleness_mean": "staleness, mean",
    "staleness_std": "staleness, std",
    "wait_mean": "wait, mean (s)",
    "utilisation": "server utilisation",
}
LOST = "computations lost, share"
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
    """A prediction, alone or beside the measurement."""

    title: str  #: what is predicted, and the data of the calibration
    #: One row per quantity: ``quantity``, ``predicted`` (the mean of the runs), ``low`` and
    #: ``high`` (between them lie 95 % of the runs); beside a measurement ``measured``, and
    #: ``within``, whether it lies between them. A ``distance`` is the largest difference of two
    #: distribution functions, of the commits in question and of all simulated runs together
    #: (Kolmogorov and Smirnov's; its band is simulated, so that ties and dependence do no harm).
    table: pd.DataFrame
    calibration: Calibration  #: the laws, and the durations to which they were fitted
    cluster: Cluster  #: the simulated cluster
    runs: tuple[Measurements, ...]  #: of each simulated run
    measured: Measurements | None = None  #: of the recording
    durations: Durations | None = None  #: of the predicted recording
    #: Times of the predicted recording that are longer or shorter than in the calibrated one, and
    #: properties that a cluster does not have.
    reasons: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the throughput is within 10 % of the measured one, and the distance of the
        staleness at most the largest of a run.
        """
        rows = self.table.set_index("quantity")
        throughput = rows.loc[_MEANS["throughput"]]
        is_near = abs(throughput["predicted"] / throughput["measured"] - 1) <= BAR
        return bool(is_near and rows.loc[STALENESS, "within"])

    @property
    def text(self) -> str:
        """The table and its explanations, for printing."""
        lines = [
            f"simulated: {describe(self.cluster)}",
            f"low to high: 95 % of {len(self.runs)} runs with laws fitted to resampled times; "
            "distances: all runs",
            table_text(in_texts(self.table.round(12), digits=4)),
        ]
        if self.measured is not None:
            verdict = "holds" if self.holds else "fails"
            judged = f"judged by the throughput ({BAR:.0%}) and by the distance of the staleness"
            lines = [f"{self.title}: {verdict}", *lines, judged]
            return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])
        return "\n".join(
            [
                *(f"not explained: {reason}" for reason in self.reasons),
                "assumed: the workers share nothing but the server; processors or links that they "
                "contend for make it slower",
                *self.calibration.statements,
                table_text(in_texts(self.calibration.table, digits=4)),
                f"\n{self.title}",
                *lines,
            ]
        )

    def draw(self, path: str | os.PathLike) -> list[Path]:
        """Write the distributions of staleness and waits, and the recorded times with their laws: a
        PNG and a PDF.
        """
        is_step = self.calibration.parts[0].steps == 1
        label = "compute time" if is_step else "compute time of a window"
        labels = {"compute": label, "service": "service time"}
        fitted: dict[str, list[Part]] = {}
        for part in self.calibration.parts:
            if part.durations.any():
                fitted.setdefault(labels.get(part.quantity, part.quantity), []).append(part)
        later = {}
        if self.durations is not None:
            later = {label: self.durations.compute, "service time": self.durations.service}
        with look.style():
            figure, axes = look.new_grid(len(fitted) + 2, 2.3, 0.4)
            layout.title(figure, f"recorded times and their laws; {self.title}")
            for panel, (name, parts) in zip(axes, fitted.items(), strict=False):
                panels.times(panel, name, parts, later.get(name))
            for panel, draw, name in zip(
                axes[-2:], (panels.staleness, panels.waits), ("staleness", "waits"), strict=True
            ):
                measured = None if self.measured is None else getattr(self.measured, name)
                draw(panel, [getattr(run, name) for run in self.runs], measured)
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
        Simulated runs. With 199 of them another run of the same cluster lies outside all of a
        quantity's runs once in a hundred.
    **options
        For `asyncsim.calibrate`: ``law``, ``latency_up``, ...
    """
    require_asynchronous("recorded", recorded)
    half = len(recorded.accepted) // 2
    accepted = np.cumsum(recorded.frame["outcome"].isin(ACCEPTED).to_numpy())
    calibration = examine(recorded.head(int((accepted <= half).sum())), **options)
    title = (
        f"the later half of {counted(len(recorded), 'commit')} by "
        f"{counted(recorded.workers, 'worker')}, from the earlier half"
    )
    return _beside(calibration, recorded, half, title, "in the later half", seed, runs)


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
        expected, value = getattr(recorded, name), getattr(target, name)
        if expected != value:
            raise InputError(
                f"target: {name} is {value!r}, and in the first recording {expected!r}; record "
                "both alike"
            )
    title = f"{counted(len(target), 'commit')} by {counted(target.workers, 'worker')}"
    title = f"{title}, from a recording of {recorded.workers}"
    period, first = f"with {target.workers} workers", warm_up_of(target, None)
    return _beside(examine(recorded, **options), target, first, title, period, seed, runs)


def forecast(
    recorded: Trace, workers: int, seed: int = 0, *, runs: int = RUNS, **options: Any
) -> Prediction:
    """Predict a recorded system with another number of workers; laws of single workers repeat.

    Each run has the recording's number of commits per worker, at least 20; the first third is left
    out.

    Parameters
    ----------
    recorded : Trace
        Of an asynchronous server.
    workers : int
    seed, runs, **options
        As for `predict`.

    Raises
    ------
    InputError
        As of `asyncsim.calibrate`.
    """
    require_asynchronous("recorded", recorded)
    calibration = examine(recorded, **options)
    steps = max(_FEWEST_STEPS, len(recorded.accepted) // recorded.workers)
    commits = steps * require_count("workers", workers)
    title = (
        f"predicted for {counted(workers, 'worker')}, from {counted(len(recorded), 'commit')} by "
        f"{recorded.workers}"
    )
    prediction = _prediction(calibration, workers, commits, commits // 3, title, seed, runs)
    return replace(prediction, reasons=(*_misfit(calibration, recorded), *calibration.notes))


def _misfit(calibration: Calibration, recorded: Trace) -> list[str]:
    """Say so if the fitted cluster does not repeat the recorded throughput."""
    commits, measured = len(recorded.accepted), recorded.summary()["throughput"]
    rates = [
        simulate(calibration.cluster, commits, seed, progress=False).summary()["throughput"]
        for seed in range(_REPETITIONS)
    ]
    if abs(float(np.mean(rates)) / measured - 1) <= BAR:
        return []
    return [
        f"the recorded {number_text(measured)} commits/s; the fitted cluster makes "
        f"{number_text(min(rates))} to {number_text(max(rates))}"
    ]


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """Return a cluster with another number of workers; laws of single workers repeat in turn."""
    laws, latency = cluster.compute_laws, cluster.latency
    compute = tuple(laws[i % len(laws)] for i in range(workers))
    if isinstance(latency, PerWorker):
        latency = per_worker([latency.values[i % len(laws)] for i in range(workers)])
    hits = {
        failure: failure.workers and [i for i in range(workers) if i % len(laws) in failure.workers]
        for failure in cluster.failures
    }
    return replace(
        cluster,
        workers=workers,
        compute=compute[0] if len(set(compute)) == 1 else compute,
        latency=latency,
        failures=[replace(failure, workers=hit) for failure, hit in hits.items() if hit != []],
    )


def _prediction(
    calibration: Calibration,
    workers: int,
    commits: int,
    first: int,
    title: str,
    seed: int,
    runs: int,
    measured: Measurements | None = None,
) -> Prediction:
    """Simulate clusters fitted to resampled durations, and measure them from a commit on."""
    streams = Streams(require_count("seed", seed, minimum=0), "prediction")
    simulated = []
    for run in range(require_count("runs", runs, minimum=2)):
        generator = streams.generator(run)
        drawn = int(generator.integers(2**31))
        cluster = with_workers(calibration.resampled(generator), workers)
        if measured is None:  # of the long run; a recording begins with all workers present
            cluster = settled(cluster, drawn)
        simulated.append(_measure(simulate(cluster, commits, drawn, progress=False), first))
    return Prediction(
        title,
        pd.DataFrame(_table(simulated, measured)),
        calibration,
        with_workers(calibration.cluster, workers),
        tuple(simulated),
        measured,
    )


def _table(runs: Sequence[Measurements], measured: Measurements | None) -> list[dict[str, Any]]:
    rows = []

    def add(quantity: str, values: Sequence[float], band: Sequence[float], value: Any) -> None:
        low, high = (float(np.quantile(values, share)) for share in band)
        row = {"quantity": quantity, "predicted": float(np.mean(values)), "low": low, "high": high}
        if value is not None:
            # Sums of the same terms in another order can differ in the last digits.
            slack = 1e-9 * max(abs(low), abs(high))
            row = {**row, "measured": value, "within": low - slack <= value <= high + slack}
        rows.append(row)

    known = runs if measured is None else (*runs, measured)
    has_lost = any(run.values["cancelled_share"] for run in known)
    for name, title in (_MEANS | ({"cancelled_share": LOST} if has_lost else {})).items():
        value = None if measured is None else measured.values[name]
        add(title, [run.values[name] for run in runs], (0.025, 0.975), value)
    if measured is not None:
        for title, name in ((STALENESS, "staleness"), ("wait, distance", "waits")):
            everything = np.concatenate([getattr(run, name) for run in runs])
            distances = [_distance(getattr(run, name), everything) for run in runs]
            value = _distance(getattr(measured, name), everything)
            add(title, distances, (0.0, 1.0), value)
            rows[-1] |= {"low": 0.0, "within": value <= max(distances)}
    return rows


def _beside(
    calibration: Calibration,
    trace: Trace,
    first: int,
    title: str,
    period: str,
    seed: int,
    runs: int,
) -> Prediction:
    """Predict a trace from a commit on, and say which of its times differ."""
    later, measured = durations(trace, first), _measure(attended(trace), first)
    commits = len(trace.accepted)
    prediction = _prediction(
        calibration, trace.workers, commits, first, title, seed, runs, measured
    )
    fitted, workers = calibration.durations, calibration.cluster.workers
    medians = {
        worker: median for worker, median in dependence.medians(fitted).items() if median > 0
    }
    ids = np.unique(later.worker).tolist()
    scale = {worker: medians[worker % workers] for worker in ids if worker % workers in medians}
    relative = (
        dependence.relative_to(later, scale),
        dependence.relative_to(fitted, medians),
    )
    reasons = []
    for quantity, samples in {
        "compute times": relative,
        "service times": (later.service, fitted.service),
        "ways down": (later.down, fitted.down),
    }.items():
        ratio = dependence.ratio(*samples)
        if ratio is None or not ratio.matters:
            continue
        text = f"{quantity} {period} are {ratio.value:.2f} \u00b1 {ratio.error:.2f} times as long"
        if quantity == "compute times" and ratio.value > 1 and trace.workers > workers:
            text += ": the workers contend for their processors"
        reasons.append(text)
    return replace(prediction, durations=later, reasons=(*reasons, *calibration.notes))


def _distance(sample: np.ndarray, everything: np.ndarray) -> float:
    """Return the largest difference between two samples' distribution functions."""
    return float(ks_2samp(sample, everything, method="asymp").statistic)
