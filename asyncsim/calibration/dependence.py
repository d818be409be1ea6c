"""Test recorded durations for what a cluster, which draws them independently, does not have, and say what matters.

They may drift, be correlated with one another, or depend on how many workers compute at once.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from asyncsim.calibration.fitting import ERRORS, NO_SPREAD
from asyncsim.traces.durations import Durations

#: Smaller effects, relative to the mean, are not mentioned.
_LEAST = 0.05
#: A worker that is silent so many times longer than any before has stopped.
_SILENCE = 3.0
#: Shorter waits are the clock's, seconds.
_CLOCK = 1e-5
#: Correlations below this are not mentioned.
_CORRELATION = 0.1
#: Means over so many stretches of time give the standard errors, with the serial dependence in them.
_STRETCHES = 10


class Ratio(NamedTuple):
    """How many times longer durations are than others, and the standard error of that."""

    value: float
    error: float

    @property
    def matters(self) -> bool:
        """Whether it matters, and is not chance."""
        return abs(self.value - 1) > max(_LEAST, ERRORS * self.error)


def ratio(durations: np.ndarray, others: np.ndarray) -> Ratio | None:
    """Return the ratio of two means, each of durations in the order of time; None without enough of them."""
    if min(len(durations), len(others)) < 2 * _STRETCHES or not others.mean() > 0:
        return None
    value = float(durations.mean() / others.mean())
    return Ratio(value, value * math.hypot(_error(durations), _error(others)))


def medians(found: Durations) -> dict[int, float]:
    """Return each worker's median compute duration, seconds."""
    return {int(worker): float(np.median(found.compute[found.worker == worker])) for worker in np.unique(found.worker)}


def relative_to(found: Durations, scale: dict[int, float]) -> np.ndarray:
    """Return the compute durations relative to a scale for each worker; of workers without one they are left out."""
    known = np.isin(found.worker, list(scale))
    scales = np.array([scale.get(worker, np.nan) for worker in range(int(found.worker.max(initial=0)) + 1)])
    with np.errstate(divide="ignore", invalid="ignore"):
        return found.compute[known] / scales[found.worker[known]]


def notes(found: Durations) -> list[str]:
    """Return in what durations are no independent draws, a sentence each."""
    said = []
    idle, busy = float(found.idle.mean()), float(found.service.mean())
    if idle > _LEAST * busy and idle > _CLOCK:
        said.append(
            f"messages wait {idle:.2g} s on average although the server is free; that is part of the {busy:.2g} s of "
            "a service here"
        )
    stopped = _stopped(found)
    if stopped:
        said.append(
            f"worker {stopped[0]} seems to have stopped by the end, as {len(stopped)} of {len(medians(found))} do: "
            "fewer compute there than the cluster has; end the trace when the first one stops"
        )
    relative = relative_to(found, medians(found))
    relative = relative[np.isfinite(relative)]
    constant = len(relative) > 0 and relative.std() <= NO_SPREAD * relative.mean()  # but for round-off
    if len(relative) != len(found.compute) or len(relative) < 4 * _STRETCHES or constant:
        return said
    half = len(relative) // 2
    drift = ratio(relative[half:], relative[:half])
    if drift is not None and drift.matters:
        said.append(
            f"compute times drift: in the later half they are {drift.value:.2f} \u00b1 {drift.error:.2f} times as long "
            "as in the earlier; leave out a longer warm_up, or record a steadier run"
        )
    order = np.argsort(found.worker, kind="stable")
    serial = _successive(relative, order, np.diff(found.worker[order]) == 0)  # of one worker's
    if serial > max(_CORRELATION, ERRORS / math.sqrt(len(relative))):
        said.append(
            f"a worker's successive compute times are correlated, by {serial:.2f}; a cluster draws them independently"
        )
    order = np.argsort(found.begin, kind="stable")
    common = _successive(relative, order, np.diff(found.worker[order]) != 0)  # of two workers'
    if common > max(_CORRELATION, ERRORS / math.sqrt(len(relative))):
        said.append(
            f"compute times of different workers at one time are correlated, by {common:.2f}: what slows one slows "
            "all, and the order of commits, hence the staleness, is more regular than independent draws make it"
        )
    load = _correlation(relative, found.others)
    spread = float(found.others.var())
    product = float(np.mean((found.others - found.others.mean()) * (relative - relative.mean())))
    slope = product / spread / float(relative.mean()) if spread else 0.0
    effect = abs(slope) * spread**0.5
    if abs(load) > ERRORS / math.sqrt(len(relative)) and effect > _LEAST / 2:
        why = "; workers share what they compute with, or contend for the network" if slope > 0 else ""
        said.append(
            f"compute times depend on how many compute at once: {slope:+.0%} for each other at the start (correlation "
            f"{load:.2f}){why}"
        )
    return said


def _stopped(found: Durations) -> list[int]:
    """Return the workers that are silent at the end for much longer than any has been, relative to its usual pace."""
    ends = found.begin + found.compute
    gaps, silence = [0.0], {}
    for worker in medians(found):
        own = ends[found.worker == worker]
        if len(own) > 1 and (usual := float(np.median(np.diff(own)))) > 0:
            gaps.append(float(np.diff(own).max()) / usual)
            silence[worker] = float(ends.max() - own[-1]) / usual
    return [worker for worker, silent in silence.items() if silent > _SILENCE * max(gaps)]


def _successive(values: np.ndarray, order: np.ndarray, pairs: np.ndarray) -> float:
    """Return the rank correlation of values with the next ones in an order, of the pairs that count."""
    return _correlation(values[order][:-1][pairs], values[order][1:][pairs])


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation; 0 where one is constant."""
    ranks = rankdata(x), rankdata(y)
    if len(x) < 3 or min(rank.std() for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _error(values: np.ndarray) -> float:
    """Return the standard error of a mean relative to it, with the serial dependence in it."""
    means = np.array([part.mean() for part in np.array_split(values, _STRETCHES)])
    return float(means.std(ddof=1) / math.sqrt(_STRETCHES) / max(means.mean(), 1e-300))
