"""Curves of runs: a quantity of every commit, binned and averaged over the seeds, with its range."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from asyncsim.replays.run import Run

#: Points of a curve, each a mean over at least one worker step in all but the shortest runs.
_BINS = 100


class Curve(NamedTuple):
    """A quantity of one method over its runs, binned: shape ``[bins]``; nan where no run has a value.

    ``low`` and ``high`` are the least and the most of the seeds; ``mean`` is over those that have not diverged by then.
    ``ends`` are time, step and last value of the runs that diverged.
    """

    time: np.ndarray
    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ends: list[tuple[float, float, float]]


def bins(commits: int, workers: int) -> int:
    """Return how many points the curve of a trace has."""
    return min(_BINS, max(10, commits // workers), commits)


def trace_length(runs: Sequence[Run]) -> int:
    """Return how many commits the traces of some runs have; a run that diverged has fewer."""
    return max(int(run.config.get("commits", len(run.commits))) for run in runs)


def curve_of(
    runs: Sequence[Run],
    quantity: Callable[[pd.DataFrame], np.ndarray],
    average: str,
    workers: int,
    bin_steps: float | None = None,
) -> Curve:
    """Bin a quantity by commits, and average the bins over the runs of one method.

    Parameters
    ----------
    runs : sequence of Run
        One per seed.
    quantity : function
        From `Run.commits` to one value per commit; values that are not finite are left out.
    average : {"mean", "median"}
        Of the commits of a bin.
    workers : int
        Commits that count as one worker step.
    bin_steps : float, optional
        Worker steps of a bin, the last of which may be shorter; by default as many as make `bins` of them.
    """
    tables = [run.commits[["commit", "commit_time"]].assign(value=quantity(run.commits)) for run in runs]
    return _curve(runs, tables, average, workers, bin_steps)


def diagnostic_curve(
    runs: Sequence[Run],
    quantity: str,
    workers: int,
    bin_steps: float | None = None,
    tensor: str = "",
    quantile: float | None = 0.5,
) -> Curve:
    """Bin a recorded diagnostic by commits, and average the bins over the runs of one method.

    Parameters
    ----------
    runs, workers, bin_steps
        As `curve_of` has them.
    quantity, tensor : str
        As `Run.diagnostics` has them; no tensor for all parameters.
    quantile : float, optional
        None for a share or a sum.
    """
    tables = []
    for run in runs:
        table = run.diagnostics
        chosen = (table["quantity"] == quantity) & (table["tensor"] == tensor)
        chosen &= table["quantile"].isna() if quantile is None else table["quantile"] == quantile
        tables.append(table.loc[chosen, ["commit", "commit_time", "value"]])
    return _curve(runs, tables, "mean", workers, bin_steps)


def evaluation_curve(runs: Sequence[Run], steps: Sequence[ArrayLike] | None = None) -> Curve:
    """Return the training losses of one method's runs at their evaluations; one that is not finite is none.

    Parameters
    ----------
    runs : sequence of Run
        One per seed.
    steps : sequence of array-like, optional
        What counts as the step of each evaluation, run by run; by default the commits by then.
    """
    named = [run.evaluations["commit"] for run in runs] if steps is None else steps
    found = []
    for run, step in zip(runs, named, strict=True):
        losses = run.evaluations["train_loss"]
        found.append(run.evaluations[["commit_time"]].assign(step=step, loss=losses.where(np.isfinite(losses))))
    ends = [
        (float(one["commit_time"].iloc[-1]), float(one["step"].iloc[-1]), float(one["loss"].dropna().iloc[-1]))
        for run, one in zip(runs, found, strict=True)
        if run.diverged_at is not None
    ]
    time, step, losses = (pd.concat([one[name] for one in found], axis=1) for name in ("commit_time", "step", "loss"))
    # Once a seed has diverged the means are of the others, which may be earlier: a line does not go back.
    time, step = (np.maximum.accumulate(values.mean(axis=1)) for values in (time, step))
    return curve_over_seeds(time, step, losses, ends)


def curve_over_seeds(
    time: ArrayLike, step: ArrayLike, values: pd.DataFrame, ends: list[tuple[float, float, float]]
) -> Curve:
    """Return the curve of some points: their values have a column for each seed, NaN where that has none."""
    with np.errstate(over="ignore"):  # a mean of losses near the largest number is infinite
        mean = values.mean(axis=1).to_numpy()
    low, high = values.min(axis=1).to_numpy(), values.max(axis=1).to_numpy()
    return Curve(np.asarray(time), np.asarray(step), mean, low, high, ends)


def steady_time(curves: Mapping[str, Curve]) -> tuple[float, float] | None:
    """Return seconds per worker step, and the time of step zero, if they are the same all along for all methods.

    The two horizontal axes then say the same: no point is further from its place than a hundredth of the axis, and step
    zero, where nothing is drawn, no further from time zero than a step.
    """
    known = [curve.time[np.isfinite(curve.time)] for curve in curves.values()]
    steps = [curve.step[np.isfinite(curve.time)] for curve in curves.values()]
    time, step = np.concatenate(known), np.concatenate(steps)
    if np.ptp(time) == 0 or np.ptp(step) == 0:
        return None
    each, zero = (float(value) for value in np.polyfit(step, time, 1))
    steady = np.abs(zero + each * step - time).max() < 0.01 * time.max() and abs(zero) <= each
    return (each, zero) if steady else None


def _curve(
    runs: Sequence[Run], tables: Sequence[pd.DataFrame], average: str, workers: int, bin_steps: float | None
) -> Curve:
    commits = trace_length(runs)
    if bin_steps is None:
        edges = np.linspace(0, commits, bins(commits, workers) + 1)
    else:
        edges = np.append(np.arange(0, commits, bin_steps * workers), commits)
    binned = [_binned(table, average, edges) for table in tables]
    times, values = (pd.concat([table[name] for table in binned], axis=1) for name in ("time", "value"))
    ends = [_end(run, table, workers) for run, table in zip(runs, binned, strict=True) if run.diverged_at is not None]
    return curve_over_seeds(times.mean(axis=1), (edges[1:] + edges[:-1]) / 2 / workers, values, ends)


def _binned(table: pd.DataFrame, average: str, edges: np.ndarray) -> pd.DataFrame:
    """Return ``time`` and ``value`` of each bin; nan for those after the end of a run that diverged."""
    values = table["value"].to_numpy(np.float64)
    finite = pd.DataFrame(
        {"time": table["commit_time"].to_numpy(), "value": np.where(np.isfinite(values), values, np.nan)}
    )
    place = np.searchsorted(edges, table["commit"].to_numpy(), side="right") - 1
    with np.errstate(over="ignore"):  # a mean of losses near the largest number is infinite
        return finite.groupby(place).agg({"time": "mean", "value": average}).reindex(range(len(edges) - 1))


def _end(run: Run, binned: pd.DataFrame, workers: int) -> tuple[float, float, float]:
    """Return time, step and value at which a run diverged; an infinite value if there was no other."""
    known = binned["value"].dropna()
    time = float(run.commits["commit_time"].iloc[-1])
    return time, len(run.commits) / workers, float(known.iloc[-1]) if len(known) else np.inf
