"""Differences in a log that one law would hide: absences of workers, and groups of workers."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import kruskal

from asyncsim.traces.trace import Trace

#: A gap exceeds the median way by this many times the third quartile of these differences: ways of
#: an exponential law do so once in a million times.
_FAR = 20.0
#: Chance below which two groups of durations differ.
CHANCE = 1e-3


def without_gaps(trace: Trace, gaps_above: float | None = None) -> tuple[Trace, pd.DataFrame]:
    """Return a log without the gaps that absences leave in it, and the absences.

    A log without lost computations shows an absence as a long way from a commit to the worker's
    next ``start_time``. The absence ends a median way down before that start, where the worker
    reads again in the returned trace. It begins half a median cycle after the commit: a crash of a
    cluster loses half a computation on average. Other traces are returned unchanged.

    Parameters
    ----------
    trace : Trace
    gaps_above : float, optional
        A way down is a gap if it exceeds its worker's median way by this time (s); by default by
        more than the median cycle, and by far more than three quarters of the ways.

    Returns
    -------
    (Trace, pandas.DataFrame)
        The absences have the columns of `asyncsim.traces.durations.deaths`.
    """
    frame = trace.frame
    knows_losses = trace.cluster is not None or (frame["outcome"] != "applied").any()
    if knows_losses or trace.separate_reads:
        return trace, pd.DataFrame({"worker": [], "begin": [], "end": []})
    worker = frame["worker"]
    ways = (frame["start_time"] - frame["read_time"]).where(frame["job"] > 0)
    ways -= ways.groupby(worker).transform("median")
    cycles = frame.groupby(worker)["commit_time"].diff()
    limit = max(cycles.median(), _FAR * ways.quantile(0.75)) if gaps_above is None else gaps_above
    is_gap = ways > limit
    gaps, reads = frame[is_gap], trace.reads.copy()
    back = gaps["read_time"] + ways[is_gap]
    reads.loc[trace.steps["read"][is_gap], "time"] = back.to_numpy()
    away = pd.DataFrame({"worker": gaps["worker"], "begin": gaps["read_time"], "end": back})
    # A worker that is silent at the end, for longer than ever between two commits, is away.
    last = frame.groupby(worker)["commit_time"].max()
    silent = last[frame["commit_time"].max() - last > limit + cycles[~is_gap].max()]
    if len(gaps):
        ended = pd.DataFrame({"worker": silent.index, "begin": silent, "end": np.inf})
        away = pd.concat([away, ended], ignore_index=True)
    away["begin"] = np.minimum(away["begin"] + cycles.median() / 2, away["end"])
    return dataclasses.replace(trace, reads=reads), away


def alike(durations: np.ndarray, worker: np.ndarray) -> list[list[int]]:
    """Return groups of workers whose durations differ by chance at most, by ascending medians."""
    samples = dict(list(pd.Series(durations).groupby(worker)))
    groups: list[list[int]] = []
    for index in sorted(samples, key=lambda index: samples[index].median()):
        if groups and not differ([durations[np.isin(worker, groups[-1])], samples[index]]):
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    return [sorted(group) for group in groups]


def differ(samples: Sequence[np.ndarray]) -> bool:
    """Return whether the ranks of samples differ by more than chance (Kruskal and Wallis)."""
    return bool(np.ptp(np.concatenate(samples)) > 0 and kruskal(*samples).pvalue < CHANCE)
