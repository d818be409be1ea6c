"""Checks of a real system's log of rollouts: its staleness, the bound, and the limit that binds.

One log, one statement of its columns, for `check_lag` and for calibration:

======================  ===========================================================================
``read_version``        the version that the sample started with
``version``             the version that its update started from; empty if it was never trained
``group``               optional: the prompt's group
``slot``                optional: the slot or the engine that generated it
``start_time``          optional: the start of the sample (s)
``end_time``            optional: the end of the sample (s)
``take_time``           optional: the begin of its update (s)
``train_time``          optional: the end of its update (s)
======================  ===========================================================================
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_count, require_path
from asyncsim.traces.samples import limit_text

REQUIRED = ("read_version", "version")
TIMES = ("start_time", "end_time", "take_time", "train_time")
OPTIONAL = ("group", "slot", *TIMES)


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
        return limit_text(self.slots_busy, self.learner_busy)

    def __str__(self) -> str:
        trained = self.samples - self.untrained
        lines = [
            f"{trained:,} samples in {self.updates:,} updates, {self.untrained:,} never trained",
            f"staleness: mean {self.mean:.3f}, largest {self.law.index.max()}; of the oldest sample "
            f"of an update {self.oldest:.3f}",
            f"open samples per batch: {self.open:.3f}",
            self.limit,
        ]
        if self.bound is not None:
            lines.append(
                f"bound {self.bound}: holds for every sample"
                if self.beyond is None
                else f"bound {self.bound}: violated first in row {self.beyond}"
            )
        return "\n".join(lines)


def read_log(path: str | Path) -> pd.DataFrame:
    """Read a log of rollouts, parquet or CSV, and check every row.

    Raises
    ------
    InputError
        No such file; a column is missing; a value is no number, a version is negative, or a row
        ends before it starts. The error names column and row, counted from 0.
    """
    file = require_path("path", path)
    if not file.is_file():
        raise InputError(f"path = {str(file)!r}: no such file; give a log, parquet or CSV")
    try:
        log = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
    except Exception as error:  # of whatever wrote the file
        raise InputError(f"path = {str(file)!r}: cannot be read ({error}); give parquet, or CSV named .csv") from error
    missing = [name for name in REQUIRED if name not in log]
    if missing:
        raise InputError(
            f"path = {str(file)!r}: has no column {' and '.join(missing)}; it must have "
            f"{' and '.join(REQUIRED)}, and may have {', '.join(OPTIONAL)}"
        )
    if log.empty:
        raise InputError(f"path = {str(file)!r}: has no rows; log each sample")
    for name in (*REQUIRED, *TIMES):
        if name not in log:
            continue
        numbers = pd.to_numeric(log[name], errors="coerce")
        _require(numbers.notna() | log[name].isna(), log, name, "must be a number, or empty")
        log[name] = numbers
    _require(log["read_version"].notna(), log, "read_version", "must be there")
    for name in REQUIRED:
        is_count = log[name].isna() | ((log[name] >= 0) & (log[name] % 1 == 0))
        _require(is_count, log, name, "must be a whole number of at least 0")
    after = log["version"].isna() | (log["version"] >= log["read_version"])
    _require(after, log, "version", "must not be below read_version")
    present = [name for name in TIMES if name in log]
    for first, second in itertools.pairwise(present):
        ordered = log[first].isna() | log[second].isna() | (log[second] >= log[first])
        _require(ordered, log, second, f"must not be before {first}")
    return log


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
        raise InputError(f"path = {str(path)!r}: version is empty in every row; log trained samples")
    staleness = (trained["version"] - trained["read_version"]).astype(int)
    late = staleness.index[staleness > bound] if bound is not None else []
    versions = np.sort(trained["version"].unique())
    batch = len(trained) / len(versions)
    end = trained["version"].max() + 1
    # A sample is open at the updates from the version that it read to its own, which is left out.
    updates_open = log["version"].fillna(end) - log["read_version"]
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
        beyond=int(late[0]) if len(late) else None,
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
        updates = trained.groupby("version")[["take_time", "train_time"]].agg({"take_time": "max", "train_time": "max"})
        span = updates["train_time"].max() - updates["take_time"].min()
        learner = float((updates["train_time"] - updates["take_time"]).sum() / span)
    return slots, learner


def _require(holds: pd.Series, log: pd.DataFrame, column: str, rule: str) -> None:
    """Raise InputError for the first row in which a rule does not hold."""
    if not holds.all():
        row = int(np.argmin(holds.to_numpy()))
        raise InputError(f"row {row}: {column} = {log[column].iloc[row]}: {rule}")
