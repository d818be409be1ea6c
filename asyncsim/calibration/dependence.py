"""Test recorded durations for dependence, which a cluster's independent draws do not have.

They may drift, be correlated with one another, or depend on the number of workers that compute at
once.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import linregress, spearmanr

from asyncsim.calibration.fitting import ERRORS, NO_SPREAD
from asyncsim.traces.durations import Durations

#: Smaller effects, relative to the mean, are not mentioned.
_SMALLEST_EFFECT = 0.05
#: Smaller correlations are not mentioned.
_CORRELATION = 0.1
#: Means over this many stretches of time give standard errors that include serial dependence.
_STRETCHES = 10


class Ratio(NamedTuple):
    """The ratio of two mean durations, and its standard error."""

    value: float
    error: float

    @property
    def matters(self) -> bool:
        """Whether the ratio differs from 1 by a relevant amount and by more than chance."""
        return abs(self.value - 1) > max(_SMALLEST_EFFECT, ERRORS * self.error)


def ratio(durations: np.ndarray, reference: np.ndarray) -> Ratio | None:
    """Return the ratio of two means of durations in the order of time; None for too few."""
    if min(len(durations), len(reference)) < 2 * _STRETCHES or not reference.mean() > 0:
        return None
    value = float(durations.mean() / reference.mean())
    return Ratio(value, value * math.hypot(_error(durations), _error(reference)))


def medians(recorded: Durations) -> dict[int, float]:
    """Return each worker's median compute duration, seconds."""
    return pd.Series(recorded.compute).groupby(recorded.worker).median().to_dict()


def relative_to(recorded: Durations, scale: dict[int, float]) -> np.ndarray:
    """Return the compute durations divided by each worker's scale; omit workers without one."""
    scales = pd.Series(recorded.worker).map(scale).to_numpy(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (recorded.compute / scales)[~np.isnan(scales)]


def notes(recorded: Durations) -> list[str]:
    """Describe each dependence between durations in a sentence."""
    sentences: list[str] = []
    relative = relative_to(recorded, medians(recorded))
    relative = relative[np.isfinite(relative)]
    constant = len(relative) > 0 and relative.std() <= NO_SPREAD * relative.mean()
    if len(relative) != len(recorded.compute) or len(relative) < 4 * _STRETCHES or constant:
        return sentences
    half = len(relative) // 2
    drift = ratio(relative[half:], relative[:half])
    if drift is not None and drift.matters:
        sentences.append(
            f"compute times drift: in the later half they are {drift.value:.2f} \u00b1 "
            f"{drift.error:.2f} times as long "
            "as in the earlier; leave out a longer warm_up, or record a steadier run"
        )
    order = np.argsort(recorded.worker, kind="stable")
    ordered, is_same_worker = relative[order], np.diff(recorded.worker[order]) == 0
    serial = _correlation(ordered[:-1][is_same_worker], ordered[1:][is_same_worker])
    if serial > max(_CORRELATION, ERRORS / math.sqrt(len(relative))):
        sentences.append(
            f"a worker's successive compute times are correlated, by {serial:.2f}; a cluster draws "
            "them independently"
        )
    load = _correlation(relative, recorded.concurrent)
    if abs(load) > ERRORS / math.sqrt(len(relative)):
        slope = linregress(recorded.concurrent, relative).slope / relative.mean()
        why = "; workers share their processors, or contend for the network" if slope > 0 else ""
        if abs(slope) * recorded.concurrent.std() > _SMALLEST_EFFECT / 2:
            sentences.append(
                f"compute times depend on how many compute at once: {slope:+.0%} for each other at "
                f"the start (correlation {load:.2f}){why}"
            )
    return sentences


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation; 0 if one sample is constant."""
    if len(x) < 3 or min(np.ptp(x), np.ptp(y)) == 0:
        return 0.0
    return float(spearmanr(x, y).statistic)


def _error(values: np.ndarray) -> float:
    """Return the relative standard error of a mean, including serial dependence."""
    means = np.array([part.mean() for part in np.array_split(values, _STRETCHES)])
    return float(means.std(ddof=1) / math.sqrt(_STRETCHES) / max(means.mean(), 1e-300))
