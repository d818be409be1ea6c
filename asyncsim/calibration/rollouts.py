"""From a log of rollouts to the cluster with slots and a learner that could have made it."""

from pathlib import Path

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.calibration.fitting import fitted
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.failures import Failure, crash
from asyncsim.clusters.laws import Empirical, Exponential
from asyncsim.clusters.rollouts import Rollouts
from asyncsim.traces.lag import read_log

_NEEDED = ("slot", "start_time", "end_time", "take_time", "train_time")


def calibrate_rollouts(path: str | Path, law: str = "best") -> Cluster:
    """Return a cluster with the slots, lengths, groups, batches and update times of a log.

    The columns are as in `asyncsim.traces.lag`. A log does not contain the queue and its rule: the
    result has the default ones, to be replaced.

    Samples with the outcome ``"cancelled"`` were cut short by a crash of their slot. They are
    censored observations of the length, unless the sample was generated again in its group: then
    the whole length is known. The crashes of the result have the same rate, and last from a cut to
    the next start on the slot, if that did not wait for an update.

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
    samples = log.table
    if missing := [name for name in _NEEDED if name not in samples]:
        raise InputError(f"{log.name}: has no column {' and '.join(missing)}; log these as well")
    trained = samples[samples["version"].notna()]
    updates = trained.groupby("version").agg(take=("take_time", "max"), train=("train_time", "max"))
    group = _usual(trained, "group") if "group" in samples else 1
    batch = _usual(trained, "version")
    samples = samples.assign(
        is_cut=samples["outcome"] == "cancelled" if "outcome" in samples else False
    )
    observed = _observed(samples, group)
    seconds, cut = observed["seconds"].to_numpy(), observed["is_cut"].to_numpy()
    return Cluster(
        workers=1,
        compute=fitted("updates", (updates["train"] - updates["take"]).to_numpy(), law).fit.law,
        rollouts=Rollouts(
            slots=samples["slot"].nunique(),
            length=fitted("samples", seconds, law, censored=cut if cut.any() else None).fit.law,
            group=group,
            batch=max(group, batch - batch % group),
        ),
        failures=_crashes(samples),
    )


def _observed(samples: pd.DataFrame, group: int) -> pd.DataFrame:
    """Return the samples whose lengths are known or censored, in the order of their ends.

    Samples without an end are cut by the log's end. The longest cuts of an unfinished group are
    of samples that wait for a slot; the others, of samples that were generated again.
    """
    ends = samples["end_time"].fillna(samples[list(_NEEDED[1:])].max(axis=None))
    samples = samples.assign(
        is_cut=samples["is_cut"] | samples["end_time"].isna(),
        seconds=ends - samples["start_time"],
    )
    if "group" in samples:
        by_group = samples.groupby("group")["is_cut"]
        waiting = group - (by_group.transform("size") - by_group.transform("sum"))
        cuts = samples["seconds"].where(samples["is_cut"]).groupby(samples["group"])
        longest = cuts.rank(method="first", ascending=False)
        samples = samples[~samples["is_cut"] | (longest <= waiting)]
    return samples.loc[ends[samples.index].sort_values(kind="stable").index]


def _crashes(samples: pd.DataFrame) -> tuple[Failure, ...]:
    """Return the crashes of slots: their rate while slots generate, and the recorded absences."""
    samples = samples.sort_values(["slot", "start_time"], kind="stable")
    back = samples.groupby("slot")["start_time"].shift(-1)
    # A slot that starts with an update's end has waited for the queue.
    is_seen = samples["is_cut"] & ~back.isin(samples["train_time"])
    away = (back - samples["end_time"])[is_seen].dropna()
    if away.empty:
        return ()
    busy = float((samples["end_time"] - samples["start_time"]).sum())
    every = Exponential(busy / np.count_nonzero(samples["is_cut"]))
    return (crash(every, Empirical(tuple(away)), on="slots"),)


def _usual(log: pd.DataFrame, by: str) -> int:
    """Return the most frequent number of rows with one value of a column."""
    return int(log.groupby(by).size().mode().iloc[0])
