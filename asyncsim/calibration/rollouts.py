"""From a log of rollouts to the cluster with slots and a learner that could have made it."""

from pathlib import Path

import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.calibration.fitting import fitted
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law
from asyncsim.clusters.rollouts import Rollouts
from asyncsim.traces.lag import read_log

_NEEDED = ("slot", "start_time", "end_time", "take_time", "train_time")


def calibrate_rollouts(path: str | Path, law: str = "best") -> Cluster:
    """Return a cluster with the slots, lengths, groups, batches and update times of a log.

    The columns are as in `asyncsim.traces.lag`. A log does not contain the queue and its rule: the
    result has the default ones, to be replaced.

    Parameters
    ----------
    path : str or Path
    law : str
        As of `asyncsim.calibrate`.

    Raises
    ------
    InputError
        See `read_log`; a column of times or the slot is missing; too few samples or updates.
    """
    log = read_log(path)
    if missing := [name for name in _NEEDED if name not in log]:
        raise InputError(
            f"path = {str(path)!r}: has no column {' and '.join(missing)}; log these as well"
        )
    trained = log[log["version"].notna()]
    durations = (log["end_time"] - log["start_time"]).dropna()
    updates = trained.groupby("version").agg(take=("take_time", "max"), train=("train_time", "max"))
    group = _usual(trained, "group") if "group" in log else 1
    batch = _usual(trained, "version")
    return Cluster(
        workers=1,
        compute=_law("updates", updates["train"] - updates["take"], law),
        rollouts=Rollouts(
            slots=log["slot"].nunique(),
            length=_law("samples", durations, law),
            group=group,
            batch=max(group, batch - batch % group),
        ),
    )


def _law(name: str, durations: pd.Series, law: str) -> Law:
    return fitted(name, durations.to_numpy(), law).fit.law


def _usual(log: pd.DataFrame, by: str) -> int:
    """Return the most frequent number of rows with one value of a column."""
    return int(log.groupby(by).size().mode().iloc[0])
