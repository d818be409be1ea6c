"""Checks of a real system's log of rollouts: its staleness, the bound, and the limit that binds.

One log, one statement of its columns, for `check_lag` and for calibration:

======================  ===========================================================================
``read_version``        the version on the slot at the start of the sample
``version``             the learner's version when it took the sample, before the update that uses
                        it; empty if it was never trained. Staleness = version - read_version
``outcome``             optional: `SAMPLE_OUTCOMES`; samples with an outcome other than
                        ``"trained"`` were never trained, and ``version`` is the learner's at
                        their end
``group``               optional: the prompt's group
``slot``                optional: the slot that generated it, with a single sample at a time
``start_time``          optional: the start of the sample (s, or a date)
``end_time``            optional: the end of the sample
``take_time``           optional: the begin of its update
``train_time``          optional: the end of its update
======================  ===========================================================================
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_count
from asyncsim.traces.logs import Log
from asyncsim.traces.samples import SAMPLE_OUTCOMES, limit_text

TIMES = ("start_time", "end_time", "take_time", "train_time")
_MEANINGS = {
    "read_version": "log the version on the slot at the start of the sample",
    "version": "log the learner's version when it took the sample, before the update that uses it",
}
#: Versions by which a mean staleness and the count of updates may differ unmentioned.
_DOUBT = 0.1


class LagReport(NamedTuple):
    """The staleness of a log.

    Attributes
    ----------
    samples, untrained, updates : int
        Rows; rows without an update; and the updates of the others.
    law : pandas.Series
        The share of each staleness among trained samples.
    oldest : float
        The mean over updates of their oldest sample's staleness.
    open : float
        Samples open and not in the batch, the mean over updates, over the mean batch; counted from
        ``start_time`` and ``train_time``, NaN without them. If all samples are trained on, it is
        the mean number of versions that were made while a sample was open.
    slots_busy, learner_busy : float
        Shares of the time between the first start and the last update; NaN without times.
    beyond : int or None
        The first row whose staleness exceeds the bound.
    violation : str
        The number of such rows, and the versions of the first, in words; empty if there are none.
    bound : int or None
    doubts : tuple of str
        What the numbers contradict.
    """

    samples: int
    untrained: int
    updates: int
    law: pd.Series
    oldest: float
    open: float
    slots_busy: float
    learner_busy: float
    beyond: int | None
    violation: str
    bound: int | None
    doubts: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The mean staleness of trained samples."""
        return float((self.law.index.to_numpy() * self.law.to_numpy()).sum())

    @property
    def limit(self) -> str:
        """The limit that binds, in a sentence."""
        if np.isnan(self.slots_busy) and np.isnan(self.learner_busy):
            return "which limit binds is unknown: the log has no times"
        if np.isnan(self.slots_busy) or np.isnan(self.learner_busy):
            sides = {"slots are": self.slots_busy, "the learner is": self.learner_busy}
            (busy,) = (f"{name} busy {share:.0%}" for name, share in sides.items() if share >= 0)
            missing = TIMES[2:] if np.isnan(self.learner_busy) else ("slot", *TIMES[:2])
            return f"{busy} of the time; the limit is unknown without {', '.join(missing)}"
        return limit_text(self.slots_busy, self.learner_busy)

    def __str__(self) -> str:
        trained = self.samples - self.untrained
        lines = [
            f"{trained:,} samples in {self.updates:,} updates, {self.untrained:,} never trained",
            f"staleness: mean {self.mean:.3f}, largest {self.law.index.max()}; of the oldest "
            f"sample of an update {self.oldest:.3f}",
            "open samples per batch: "
            + (
                "unknown without start_time, train_time"
                if np.isnan(self.open)
                else f"{self.open:.3f}"
            ),
            self.limit,
            *self.doubts,
        ]
        if self.bound is not None:
            lines.append(
                f"bound {self.bound}: holds for every sample"
                if self.beyond is None
                else f"bound {self.bound}: violated by {self.violation}"
            )
        return "\n".join(lines)


def read_log(path: str | Path) -> Log:
    """Read a log of rollouts, parquet or CSV, and check every row.

    In its table ``version`` is empty for samples without training, and ``closed_version`` is the
    learner's version at the end of a sample, if the log has it. With ``start_time`` and
    ``train_time``, ``first_update`` is the first update that ended after a sample's start.

    Raises
    ------
    InputError
        No such file; a column is missing; a value is no number, no time or no version; a row ends
        before it starts, two rows overlap in a slot, or versions and times contradict each other.
        The error names column, row (from 0) and, of CSV, the line.
    """
    log = Log.read(path, tuple(_MEANINGS), "sample")
    for name, meaning in _MEANINGS.items():
        log.take_counts(name, f"a whole number of at least 0; {meaning}", name == "version")
    log.take_times([name for name in TIMES if name in log.table], may_be_empty=True)
    table = log.table
    after = ~(table["version"] < table["read_version"])
    log.require("version", after, f"must not be below read_version; {_MEANINGS['version']}")
    table["closed_version"] = table["version"]
    if "outcome" in table:
        outcomes = f"must be {', '.join(SAMPLE_OUTCOMES[:-1])} or {SAMPLE_OUTCOMES[-1]}"
        rule = f"{outcomes}; or leave the column out, and version empty without training"
        log.require("outcome", table["outcome"].isin(SAMPLE_OUTCOMES), rule)
        is_complete = table["version"].notna() | (table["outcome"] != "trained")
        log.require("version", is_complete, f"is of a trained sample; {_MEANINGS['version']}")
        table["version"] = table["version"].where(table["outcome"] == "trained")
    is_trained = table["version"].notna()
    if not is_trained.any():
        raise InputError(f"{log.name}: has no trained sample; {_MEANINGS['version']}")
    for name in (name for name in TIMES if name in table):
        is_known = table[name].notna() | (~is_trained & (name != "start_time"))
        log.require(name, is_known, "must be known for every sample, or leave the column out")
    if "slot" in table and table["slot"].isna().all():
        del table["slot"]
    for name in (name for name in ("slot", "group") if name in table):
        log.require(name, table[name].notna(), f"must name the {name}, or leave the column out")
    if {"slot", "start_time", "end_time"} <= set(table):
        _require_separate(log)
    _require_updates(log, is_trained)
    return log


def _require_updates(log: Log, is_trained: pd.Series) -> None:
    """Raise InputError unless updates follow one another, and reads follow the updates."""
    table, version = log.table, log.table["version"]
    before = version.isin(version + 1) | (version == version.min()) | ~is_trained
    rule = "must be 0, or that of another sample and one more: log every update, under one number"
    log.require("version", before, rule)
    if "group" in table:
        first = version.groupby(table["group"]).transform("first")
        rule = "must be that of its group's other samples: a group is trained in one update"
        log.require("version", (version == first) | ~is_trained, rule)
    updates = table[is_trained].groupby("version")
    for name in (name for name in TIMES[2:] if name in table):
        is_single = (table[name] == version.map(updates[name].first())) | ~is_trained
        rule = "must be that of the other samples of its version: one number for each update"
        log.require(name, is_single, rule)
    if "train_time" not in table:
        return
    ends = updates["train_time"].first()
    is_later = ~(table["train_time"] < version.map(ends.shift()))
    log.require("train_time", is_later, "must not be before the end of the update before")
    if "start_time" not in table:
        return
    table["first_update"] = ends.index[0] + np.searchsorted(ends, table["start_time"], "right")
    late = table["read_version"] > table["first_update"]
    if late.any():
        passed = (version - table["first_update"]).mean()
        staleness = (version - table["read_version"]).mean()
        log.require(
            "read_version",
            ~late,
            f"was made after the sample's start, as in {counted(int(late.sum()), 'row')}: the mean "
            f"staleness is {staleness:.3f}, and by the times {passed:.3f}; log the version at the "
            "start of a sample, not at its end",
        )


def check_lag(path: str | Path, bound: int | None = None) -> LagReport:
    """Return the staleness of a log of rollouts, and the first row beyond a bound.

    Raises
    ------
    InputError
        See `read_log`.
    """
    if bound is not None:
        bound = require_count("bound", bound, 0)
    log = read_log(path)
    table = log.table
    trained = table[table["version"].notna()]
    staleness = (trained["version"] - trained["read_version"]).astype(int)
    late = trained[staleness > bound] if bound is not None else trained.iloc[:0]
    violation = ""
    if len(late):
        first = late.iloc[0]
        violation = (
            f"{len(late):,} of {counted(len(trained), 'sample')}, first by "
            f"{log.row_text(late.index[0])}, which read {first['read_version']:.0f} "
            f"and was trained at {first['version']:.0f}; rows count from 0"
        )
    slots_busy, learner_busy = _busy_shares(table, trained)
    updates = trained["version"].nunique()
    return LagReport(
        samples=len(table),
        untrained=len(table) - len(trained),
        updates=updates,
        law=staleness.value_counts(normalize=True).sort_index(),
        oldest=float(staleness.groupby(trained["version"]).max().mean()),
        open=_open(table, trained) / len(trained),
        slots_busy=slots_busy,
        learner_busy=learner_busy,
        beyond=int(late.index[0]) if len(late) else None,
        violation=violation,
        bound=bound,
        doubts=tuple(_doubts(trained)),
    )


def _open(table: pd.DataFrame, trained: pd.DataFrame) -> float:
    """Return the samples open and not in the batch, summed over updates; NaN without times.

    An untrained sample is open until its ``closed_version``, or else its ``end_time``, or else the
    last update.
    """
    if "first_update" not in table:
        return float("nan")
    ends = trained.groupby("version")["train_time"].first()
    first, last = ends.index[0], ends.index[-1] + 1
    end_time = table.get("end_time", pd.Series(np.nan, table.index)).fillna(np.inf)
    ended = pd.Series(first + np.searchsorted(ends, end_time), table.index)
    closed = table["closed_version"].clip(upper=last).fillna(ended)
    return float((closed - table["first_update"]).clip(lower=0).sum())


def _doubts(trained: pd.DataFrame) -> list[str]:
    """Say where versions are probably not those that the columns ask for."""
    doubts = []
    if trained["version"].min() == 1:
        doubts.append(
            "no sample has version 0: if the log numbers versions after the update, subtract 1"
        )
    if "first_update" in trained:
        # Before the first update of the log others may have ended.
        begin = trained["version"].min()
        seen = trained[trained["first_update"] >= begin + (begin > 0)]
        passed = (seen["version"] - seen["first_update"]).mean()
        staleness = (seen["version"] - seen["read_version"]).mean()
        if staleness - passed > _DOUBT:
            doubts.append(
                f"the mean staleness is {staleness:.3f}, and {passed:.3f} updates ended during a "
                "sample: slots read old versions, or version counts the update itself"
            )
    return doubts


def _busy_shares(log: pd.DataFrame, trained: pd.DataFrame) -> tuple[float, float]:
    """Return the shares of the time that slots and learner are busy; NaN without their columns."""
    slots = learner = float("nan")
    if {"slot", "start_time", "end_time"} <= set(log):
        begin, end = log["start_time"].min(), log["end_time"].max()
        busy = (log["end_time"] - log["start_time"]).sum()
        slots = _ratio(busy, (end - begin) * log["slot"].nunique())
    if {"take_time", "train_time"} <= set(log):
        updates = trained.groupby("version")[["take_time", "train_time"]].max()
        updates = updates.sort_values("take_time")
        span = updates["train_time"].max() - updates["take_time"].min()
        # The time of overlapping updates counts once.
        begin = updates["take_time"].clip(lower=updates["train_time"].cummax().shift())
        learner = _ratio((updates["train_time"] - begin).clip(lower=0).sum(), span)
    return slots, learner


def _ratio(part: float, total: float) -> float:
    return float(part / total) if total > 0 else float("nan")


def _require_separate(log: Log) -> None:
    """Raise InputError if a slot generates two samples at a time."""
    spans = log.table.dropna(subset=["start_time", "end_time"])
    spans = spans.sort_values(["slot", "start_time", "end_time"], kind="stable")
    slots = spans["slot"]
    earlier_end = spans.groupby(slots)["end_time"].cummax().groupby(slots).shift()
    overlaps = spans[earlier_end > spans["start_time"]]
    if len(overlaps):
        row = overlaps.index.min()
        slot, start = slots[row], spans["start_time"][row]
        running = (slots == slot) & (spans["start_time"] <= start) & (spans["end_time"] > start)
        earlier = running.index[running & (running.index != row)].min()
        raise InputError(
            f"{log.name}: {log.row_text(row)} overlaps {log.row_text(earlier)} in slot {slot}; "
            "give each concurrent sample of an engine a slot, or leave out the column slot"
        )
