"""Outcomes of runs: a row for each run."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.replays.run import Run
from asyncsim.traces.trace import Trace

#: Share of the commits, at the end, over which "final" minibatch losses and energy ratios are
#: taken.
FINAL_SHARE = 0.1
#: The measures that every table shows.
_FIRST = ("final_loss", "train_loss", "test_loss", "test_accuracy")


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return the outcome of a run as columns.

    ``final_loss`` is the mean minibatch loss of the last tenth of the commits, ``energy_ratio`` the
    `late_energy_ratio` if energies are recorded, and ``median_...`` the mean of the recorded
    medians of a method's diagnostic in that tenth, or the last median if none is that late.
    ``train_...`` and ``test_...`` are of the last evaluation. NaN if the run diverged.
    """
    total = len(trace.accepted)
    last = _last(run.commits, total)
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    median_rows = run.diagnostics[
        (run.diagnostics["quantile"] == 0.5) & (run.diagnostics["tensor"] == "")
    ]
    late = median_rows[
        median_rows["commit"] >= min(last["commit"].iloc[0], median_rows["commit"].max())
    ]
    medians = late.groupby("quantity", sort=False)["value"].mean().add_prefix("median_").to_dict()
    energies = (
        {"energy_ratio": late_energy_ratio(run.commits, total)}
        if "central_energy" in run.commits
        else {}
    )
    ended = {"final_loss": late_loss(run.commits, total), **evaluated, **energies, **medians}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def ends(run: Run, last: int = 1) -> dict[str, Any]:
    """Return status, first and final training loss of a run as columns; infinite if it diverged.

    ``last``: evaluations at the end whose mean is the final loss.
    """
    losses = run.evaluations["train_loss"]
    return {
        "status": run.status,
        "first_loss": float(losses.iloc[0]),
        "train_loss": float(losses.iloc[-last:].mean()) if run.diverged_at is None else np.inf,
    }


def energy_ratios(commits: pd.DataFrame) -> pd.Series:
    """Return the ratio of central to proxy energy of each commit.

    NaN if the central variable had not moved since the worker's read, as at most commits of a
    server that waits for several messages: such commits say nothing about the energy of its steps.
    """
    central = commits["central_energy"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (central / commits["proxy_energy"]).where(central > 0)


def late_energy_ratio(commits: pd.DataFrame, total: int) -> float:
    """Return the median of `energy_ratios` over the last tenth of ``total`` commits.

    The last ratio if none is that late; NaN without any ratio.
    """
    ratios = energy_ratios(commits).dropna()
    if ratios.empty:
        return float("nan")
    late = ratios[ratios.index >= _last(commits, total).index[0]]
    return float((late if len(late) else ratios.tail(1)).median())


def late_loss(commits: pd.DataFrame, total: int) -> float:
    """Return the mean minibatch loss over the last tenth of ``total`` commits."""
    with np.errstate(over="ignore"):  # of losses near the largest number; most such runs diverge
        return float(_last(commits, total)["loss"].mean())


def _last(commits: pd.DataFrame, total: int) -> pd.DataFrame:
    return commits.tail(max(1, round(FINAL_SHARE * total)))


def own_measures(columns: Iterable[str]) -> list[str]:
    """Return the columns of a problem's measures that tables show beside losses and the test
    accuracy.

    Measures of the test data, or else of the training data.
    """
    of_test = [name for name in columns if name.startswith("test_")]
    measured = of_test or [name for name in columns if name.startswith("train_")]
    return [name for name in measured if name not in _FIRST]
