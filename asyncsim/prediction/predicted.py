"""How well a cluster calibrated on one recording predicts another: the later half of the same, or other workers.

A prediction is many simulated runs, each of the cluster fitted to durations drawn anew from the recording: so their
spread has in it both the chance of one run, serial dependence included, and how well the recording determines the laws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.calibration import Calibration, dependence, examine
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.errors import InputError, require_count
from asyncsim.prediction.measured import BAR, STALENESS, THROUGHPUT, Measured, distance, measure, rows
from asyncsim.simulation.simulate import simulate
from asyncsim.streams import Streams
from asyncsim.traces.durations import Durations, attended, durations, require_asynchronous
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of
from asyncsim.wording import counted

if TYPE_CHECKING:
    import os

    import pandas as pd

#: Simulated runs of a prediction: a run of the same cluster is outside of all of them once in a hundred.
RUNS = 199
#: Runs with the laws of what was to be predicted.
_OWN_RUNS = 10


@dataclass(frozen=True)
class Prediction:
    """What was predicted, and what was measured.

    Attributes
    ----------
    title : str
        What was predicted from what.
    table : pandas.DataFrame
        One row per quantity: ``quantity``, ``measured``, ``predicted`` (the mean of the runs), ``low`` and ``high``,
        and ``within``, whether what was measured lies between them. For the throughput these are what the prediction
        misses by 10 %; for all others the least and the most of the simulated runs. A ``distance`` is the largest
        difference of two distribution functions, that of the commits in question and that of all simulated runs
        together (Kolmogorov and Smirnov's; its band is simulated, so that ties and dependence do no harm).
    reasons : tuple of str
        What of the recorded durations differs or depends on what a cluster does not know; if the prediction fails,
        also whether the simulator does better with the laws of what it should predict.
    calibration : Calibration
        The laws, and the durations that they were fitted to.
    cluster : Cluster
        What was simulated.
    measured, runs
        What was compared, of the recording and of each simulated run.
    durations : Durations
        Those of what was predicted.
    """

    title: str
    table: "pd.DataFrame"
    reasons: tuple[str, ...]
    calibration: Calibration
    cluster: Cluster
    measured: Measured
    runs: tuple[Measured, ...]
    durations: Durations

    @property
    def holds(self) -> bool:
        """Whether the throughput is within its bar and the distribution of the staleness within its band."""
        return bool(self.table.set_index("quantity")["within"][[THROUGHPUT, STALENESS]].all())

    @property
    def text(self) -> str:
        """The table and the reasons, for printing."""
        import pandas as pd

        with pd.option_context("display.width", 200):
            table = self.table.round(12).to_string(index=False, float_format="{:.4g}".format, na_rep="-")
        verdict = "holds" if self.holds else "fails"
        band = f"throughput within {BAR:.0%}, the rest within {len(self.runs)} simulated runs"
        judged = "judged by the throughput and by the distance of the staleness"
        said = [f"  {reason}" for reason in self.reasons]
        return "\n".join(
            [f"{self.title}: {verdict}", f"simulated: {describe(self.cluster)}", f"{band}; {judged}", table, *said]
        )

    def draw(self, path: "str | os.PathLike") -> list[Path]:
        """Write the distributions, measured and predicted, and the durations with their laws: a PNG and a PDF."""
        from asyncsim.prediction.figure import draw

        return draw(self, path)


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

    Raises
    ------
    InputError
        As `asyncsim.calibrate` does.
    """
    require_asynchronous("recorded", recorded)
    half = len(recorded) // 2
    calibration = examine(_head(recorded, half), **options)
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

    Raises
    ------
    InputError
        As `asyncsim.calibrate` does; or the two have different protocols or windows.
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
    """What is to be predicted: a trace from a commit on; what that is called, and what the laws come from."""

    title: str
    which: str
    origin: str
    trace: Trace
    first: int


def _prediction(calibration: Calibration, target: _Target, seed: int, runs: int, options: dict[str, Any]) -> Prediction:
    """Simulate, compare, and look for reasons."""
    import pandas as pd

    trace, first = target.trace, target.first
    found = durations(trace, first)
    streams = Streams(require_count("seed", seed, minimum=0), "prediction")
    made = []
    for run in range(require_count("runs", runs, minimum=2)):
        generator = streams.generator(run)
        drawn = int(generator.integers(2**31))
        like = with_workers(calibration.resampled(generator), trace.workers)
        made.append(measure(simulate(like, len(trace), drawn, progress=False), first))
    measured = measure(attended(trace), first)
    ratios = _ratios(calibration, found)
    prediction = Prediction(
        target.title,
        pd.DataFrame(rows(measured, made)),
        tuple(_reasons(calibration, ratios, target)),
        calibration,
        with_workers(calibration.cluster, trace.workers),
        measured,
        tuple(made),
        found,
    )
    if prediction.holds:
        return prediction
    itself = examine(trace, **{**options, "warm_up": first})
    notes = [f"{_told(what, ratio, target)}, which may be chance" for what, ratio in ratios.items() if not ratio.told]
    notes += [f"{target.which}: {note}" for note in itself.notes]
    seeds = range(seed, seed + _OWN_RUNS)
    again = [measure(simulate(itself.cluster, len(trace), drawn, progress=False), first) for drawn in seeds]
    return replace(prediction, reasons=(*prediction.reasons, *notes, _own_laws(prediction, again)))


def _own_laws(prediction: Prediction, again: Sequence[Measured]) -> str:
    """Return how well the simulator does with the laws of what was to be predicted."""
    measured = prediction.measured
    rates = [float(np.mean([run.values["throughput"] for run in runs])) for runs in (again, [measured])]
    off = distance(measured.staleness, np.sort(np.concatenate([run.staleness for run in again])))
    band = float(prediction.table.set_index("quantity")["high"][STALENESS])
    met = abs(rates[0] / rates[1] - 1) <= BAR and off <= band
    verdict = "only the times are others" if met else "what was recorded is no cluster of independent times"
    return (
        f"with laws fitted to its own times the simulator makes {rates[0]:.4g} commits/s, measured {rates[1]:.4g}, and "
        f"misses the staleness by a distance of {off:.2g}: {verdict}"
    )


def _ratios(calibration: Calibration, found: Durations) -> dict[str, dependence.Ratio]:
    """Return how many times longer durations are than those that the cluster was calibrated on, by what they are of."""
    given, workers = calibration.durations, calibration.cluster.workers
    own = {worker: median for worker, median in dependence.medians(given).items() if median > 0}
    scale = {int(worker): own[worker % workers] for worker in np.unique(found.worker) if worker % workers in own}
    compared = {
        "compute times": (dependence.relative_to(found, scale), dependence.relative_to(given, own)),
        "service times": (found.service, given.service),
        "ways down": (found.down, given.down),
    }
    ratios = {what: dependence.ratio(here, there) for what, (here, there) in compared.items()}
    return {what: ratio for what, ratio in ratios.items() if ratio is not None}


def _reasons(calibration: Calibration, ratios: dict[str, dependence.Ratio], target: _Target) -> list[str]:
    """Return which durations are others, and on what they depend."""
    said = []
    for what, ratio in ratios.items():
        if ratio.told:
            more = target.trace.workers > calibration.cluster.workers
            contended = what == "compute times" and ratio.value > 1 and more
            why = ": the workers contend for what they compute with" if contended else ""
            said.append(f"{_told(what, ratio, target)}{why}")
    return [*said, *(f"{target.origin}: {note}" for note in calibration.notes)]


def _told(what: str, ratio: dependence.Ratio, target: _Target) -> str:
    return f"{what} {target.which} are {ratio.value:.2f} \u00b1 {ratio.error:.2f} times as long"


def _head(trace: Trace, commits: int) -> Trace:
    """Return the first commits of a trace, without what was open after them."""
    return Trace(trace.frame.iloc[:commits], trace.source)
