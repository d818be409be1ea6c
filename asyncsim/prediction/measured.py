"""What is compared of a trace that was measured and of simulated ones that predict it, row by row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncsim.traces.trace import Trace

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
THROUGHPUT = "throughput (commits/s)"
STALENESS = "staleness, distance"
_WAITS = "wait, distance"


class Measured(NamedTuple):
    """What is compared of a trace, after a number of commits.

    Attributes
    ----------
    values : dict
        The entries of `Trace.summary`.
    staleness : Int64[ndarray, "commits"]
    waits : Float64[ndarray, "commits"]
        From the arrival of a message to the begin of its service, seconds; what is less than a twentieth of a mean
        service is none, as no real server takes up a visit in no time.
    """

    values: dict[str, float]
    staleness: np.ndarray
    waits: np.ndarray


def measure(trace: Trace, first: int) -> Measured:
    """Return what is compared of a trace from a commit on."""
    frame = trace.frame.iloc[first:]
    waits = (frame["serve_time"] - frame["arrive_time"]).to_numpy()
    least = _LEAST_WAIT * float((frame["commit_time"] - frame["serve_time"]).mean())
    return Measured(trace.summary(first), frame["staleness"].to_numpy(), np.where(waits < least, 0.0, waits))


def rows(measured: Measured, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows of the table of a prediction."""
    rate = float(np.mean([run.values["throughput"] for run in runs]))
    table = [_row(THROUGHPUT, measured.values["throughput"], rate, rate / (1 + BAR), rate / (1 - BAR))]
    for name, called in _MEANS.items():
        values = [run.values[name] for run in runs]
        table.append(_row(called, measured.values[name], float(np.mean(values)), min(values), max(values)))
    for called, name in ((STALENESS, "staleness"), (_WAITS, "waits")):
        everything = np.sort(np.concatenate([getattr(run, name) for run in runs]))
        distances = [distance(getattr(run, name), everything) for run in runs]
        here = distance(getattr(measured, name), everything)
        table.append(_row(called, here, float(np.mean(distances)), 0.0, max(distances)))
    return table


def _row(quantity: str, measured: float, predicted: float, low: float, high: float) -> dict[str, Any]:
    # Sums of the same terms in another order may differ in the last digits.
    slack = 1e-9 * max(abs(low), abs(high))
    within = low - slack <= measured <= high + slack
    return dict(quantity=quantity, measured=measured, predicted=predicted, low=low, high=high, within=within)


def distance(sample: np.ndarray, everything: np.ndarray) -> float:
    """Return the largest difference between two samples' distribution functions; the second is sorted."""
    points = np.union1d(sample, everything)
    shares = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (sample, everything)]
    return float(np.abs(shares[0] - shares[1]).max())
