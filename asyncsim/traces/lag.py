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
``start_time``          optional: the start of the sample (s)
``end_time``            optional: the end of the sample (s)
``take_time``           optional: the begin of its update (s)
``train_time``          optional: the end of its update (s)
======================  ===========================================================================
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_count, require_path
from asyncsim.traces.samples import SAMPLE_OUTCOMES, limit_text

REQUIRED = ("read_version", "version")
TIMES = ("start_time", "end_time", "take_time", "train_time")
OPTIONAL = ("outcome", "group", "slot", *TIMES)
_MEANINGS = {
    "read_version": "log the version on the slot at the start of the sample",
    "version": "log the learner's version when it took the sample, before the update that uses it",
}


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
        Samples open and not in the batch, the mean over updates, over the mean batch: with few
        samples left open it equals the mean staleness.
    slots_busy, learner_busy : float
        Shares of the time between the first start and the last update; NaN without times.
    beyond : int or None
        The first row whose staleness exceeds the bound.
    violation : str
        The number of such rows, and the versions of the first, in words; empty if there are none.
    bound : int or None
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
            f"open samples per batch: {self.open:.3f}",
            self.limit,
        ]
        if self.bound is not None:
            lines.append(
                f"bound {self.bound}: holds for every sample"
                if self.beyond is None
                else f"bound {self.bound}: violated by {self.violation}"
            )
        return "\n".join(lines)


def read_log(path: str | Path) -> pd.DataFrame:
    """Read a log of rollouts, parquet or CSV, and check every row.

    Raises
    ------
    InputError
        No such file; a column is missing; a value is no number, a version is negative, a row ends
        before it starts, or two rows overlap in a slot. The error names column, row (from 0) and,
        of CSV, the line.

    Returns
    -------
    pandas.DataFrame
        The log; ``version`` is empty for samples without training, and ``closed_version`` is the
        learner's version at the end of a sample, if the log has it.
    """
    file = require_path("path", path)
    log = log_table(file, REQUIRED, OPTIONAL, "sample")

    def require(holds: pd.Series, column: str, rule: str) -> None:
        if not holds.all():
            row = int(np.argmin(holds.to_numpy()))
            value = log[column].iloc[row]
            text = f"{value:g}" if isinstance(value, float) else str(value)
            raise InputError(f"{row_text(file, row)}: {column} = {text}: {rule}")

    for name in (*REQUIRED, *TIMES):
        if name in log:
            numbers = pd.to_numeric(log[name], errors="coerce")
            rule = _MEANINGS.get(name, "log seconds, or leave it empty")
            valid = np.isfinite(numbers) | log[name].isna()
            require(valid, name, f"must be a finite number; {rule}")
            log[name] = numbers
    empty = log["read_version"].isna()
    if empty.any():
        row = row_text(file, int(np.argmax(empty)))
        raise InputError(f"{row}: read_version is empty; {_MEANINGS['read_version']}")
    for name, meaning in _MEANINGS.items():
        is_whole = log[name].isna() | ((log[name] >= 0) & (log[name] % 1 == 0))
        require(is_whole, name, f"must be a whole number of at least 0; {meaning}")
    after = log["version"].isna() | (log["version"] >= log["read_version"])
    require(after, "version", f"must not be below read_version; {_MEANINGS['version']}")
    present = [name for name in TIMES if name in log]
    for first, second in itertools.pairwise(present):
        ordered = log[first].isna() | log[second].isna() | (log[second] >= log[first])
        require(ordered, second, f"must not be before {first}; log seconds of a single clock")
    if {"slot", "start_time", "end_time"} <= set(log):
        _require_separate(log, file)
    log["closed_version"] = log["version"]
    if "outcome" in log:
        outcomes = f"must be {', '.join(SAMPLE_OUTCOMES[:-1])} or {SAMPLE_OUTCOMES[-1]}"
        rule = f"{outcomes}; or leave the column out, and version empty without training"
        require(log["outcome"].isin(SAMPLE_OUTCOMES), "outcome", rule)
        log["version"] = log["version"].where(log["outcome"] == "trained")
    return log


def log_table(
    file: Path, required: Sequence[str], optional: Sequence[str], noun: str
) -> pd.DataFrame:
    """Read a log with a row for each ``noun``, parquet or CSV; raise InputError without a column or
    row.
    """
    if not file.is_file():
        raise InputError(f"path = {str(file)!r}: no such file; give a log, parquet or CSV")
    try:
        log = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
    except Exception as error:  # of whatever wrote the file
        raise InputError(
            f"path = {str(file)!r}: cannot be read ({error}); give parquet, or CSV named .csv"
        ) from error
    missing = [name for name in required if name not in log]
    if missing:
        raise InputError(
            f"path = {str(file)!r}: has no column {' and '.join(missing)}; it must have "
            f"{' and '.join(required)}, and may have {', '.join(optional)}"
        )
    if log.empty:
        raise InputError(f"path = {str(file)!r}: has no rows; log each {noun}")
    return log.reset_index(drop=True)


def check_lag(path: str | Path, bound: int | None = None) -> LagReport:
    """Return the staleness of a log of rollouts, and the first row beyond a bound.

    Raises
    ------
    InputError
        See `read_log`; or no sample was trained.
    """
    if bound is not None:
        bound = require_count("bound", bound, 0)
    log = read_log(path)
    trained = log[log["version"].notna()]
    if trained.empty:
        raise InputError(f"path = {str(path)!r}: has no trained sample; {_MEANINGS['version']}")
    staleness = (trained["version"] - trained["read_version"]).astype(int)
    late = trained[staleness > bound] if bound is not None else trained.iloc[:0]
    violation = ""
    if len(late):
        first = late.iloc[0]
        violation = (
            f"{len(late):,} of {counted(len(trained), 'sample')}, first by "
            f"{row_text(Path(path), int(late.index[0]))}, which read {first['read_version']:.0f} "
            f"and was trained at {first['version']:.0f}; rows count from 0"
        )
    versions = np.sort(trained["version"].unique())
    batch = len(trained) / len(versions)
    end = trained["version"].max() + 1
    # A sample is open at the updates from the version that it read to its own, which is left out.
    updates_open = log["closed_version"].fillna(end) - log["read_version"]
    slots_busy, learner_busy = _busy_shares(log, trained)
    return LagReport(
        samples=len(log),
        untrained=len(log) - len(trained),
        updates=len(versions),
        law=staleness.value_counts(normalize=True).sort_index(),
        oldest=float(staleness.groupby(trained["version"]).max().mean()),
        open=float(updates_open.sum() / len(versions) / batch),
        slots_busy=slots_busy,
        learner_busy=learner_busy,
        beyond=int(late.index[0]) if len(late) else None,
        violation=violation,
        bound=bound,
    )


def _busy_shares(log: pd.DataFrame, trained: pd.DataFrame) -> tuple[float, float]:
    """Return the shares of the time that slots and learner are busy; NaN without their columns."""
    slots = learner = float("nan")
    if {"slot", "start_time", "end_time"} <= set(log):
        begin, end = log["start_time"].min(), log["end_time"].max()
        busy = (log["end_time"] - log["start_time"]).sum()
        slots = float(busy / ((end - begin) * log["slot"].nunique()))
    if {"take_time", "train_time"} <= set(log):
        updates = trained.groupby("version")[["take_time", "train_time"]].max()
        updates = updates.sort_values("take_time")
        span = updates["train_time"].max() - updates["take_time"].min()
        # The time of overlapping updates counts once.
        begin = updates["take_time"].clip(lower=updates["train_time"].cummax().shift())
        learner = float((updates["train_time"] - begin).clip(lower=0).sum() / span)
    return slots, learner


def _require_separate(log: pd.DataFrame, file: Path) -> None:
    """Raise InputError if a slot generates two samples at a time."""
    spans = log.dropna(subset=["slot", "start_time", "end_time"])
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
            f"{row_text(file, row)}: overlaps {row_text(file, earlier)} in slot {slot}; give "
            "each concurrent sample of an engine a slot, or leave out the column slot"
        )


def row_text(file: Path, row: int) -> str:
    """Name a row, counted from 0, and the line of a CSV file, whose first line has the columns."""
    return f"row {row} (line {row + 2})" if file.suffix == ".csv" else f"row {row}"
