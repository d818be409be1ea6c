"""Logs of real systems under check: tables from memory or from files, their numbers and times.

Errors name the argument or the file, the column and the row, from 0, and of CSV also the line.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from asyncsim.base.errors import InputError, require_memory, require_number, require_path
from asyncsim.clusters.workers import as_workers

#: Larger whole numbers are not exact.
_LARGEST = 2**53
CLOCK = "record all times on one clock, such as the server's time.monotonic()"
#: What a column of times holds, by the kind of its type.
_FORMS = defaultdict(lambda: "seconds", M="dates", m="intervals")


class Log:
    """A log under check.

    Attributes
    ----------
    name : str
        The argument or the file that holds it.
    table : pandas.DataFrame
        Its rows; ``row`` is the number of each in the user's table.
    form : str
        What its times held: ``"seconds"``, ``"dates"`` or ``"intervals"``.
    origin : Timestamp, Timedelta or None
        The date or interval from which its times count; None for seconds.
    """

    def __init__(self, name: str, table: pd.DataFrame, is_csv: bool = False):
        self.name, self._is_csv = name, is_csv
        self.form, self.origin = "seconds", None
        self.table = table.reset_index(drop=True).assign(row=np.arange(len(table)))

    @classmethod
    def of(cls, argument: str, rows: Any, required: Sequence[str]) -> "Log":
        """Take a DataFrame, a dict of columns or a list of dicts, with all required columns."""
        try:
            table = pd.DataFrame(rows)
        except (TypeError, ValueError) as error:
            form = "give a DataFrame, a dict of columns or a list of dicts"
            raise InputError(f"{argument}: not a table ({error}); {form}") from None
        _require_columns(argument, table, required)
        return cls(argument, table)

    @classmethod
    def read(cls, path: str | Path, required: Sequence[str], noun: str) -> "Log":
        """Read a file, parquet or CSV, with all required columns and a row for each ``noun``."""
        file = require_path("path", path)
        if not file.is_file():
            raise InputError(f"path = {str(file)!r}: no such file; give a log, parquet or CSV")
        argument, is_csv = f"path = {str(file)!r}", file.suffix == ".csv"
        columns, size = header_of(file)
        _require_columns(argument, columns, required)
        require_memory(argument, "a table of its length", size)
        with _reading(file):
            table = pd.read_csv(file) if is_csv else pd.read_parquet(file)
        if table.empty:
            raise InputError(f"{argument}: has no rows; log each {noun}")
        log = cls.of(argument, table, required)
        log._is_csv = is_csv
        return log

    def row_text(self, index: int) -> str:
        """Name a row, from 0, and the line of a CSV file, whose first line has the columns."""
        row = self.table["row"].iloc[index]
        return f"row {row} (line {row + 2})" if self._is_csv else f"row {row}"

    def require(self, column: str, holds: Any, rule: str) -> None:
        """Raise InputError for the first row with a value that breaks a rule."""
        if not np.all(holds):
            index = int(np.argmin(holds))
            value = self.table[column].iloc[index]
            text = f"{value:.12g}" if isinstance(value, float) else value
            text = "empty" if np.ndim(value) == 0 and pd.isna(value) else text
            row = self.row_text(index)
            raise InputError(f"{self.name}: {column} of {row} is {text}; it {rule}")

    def numbers(self, column: str, may_be_empty: bool = False) -> np.ndarray:
        """Return a column as finite numbers, or not a number where it may be empty."""
        values, rule = self.table[column], "must be a finite number"
        numbers = np.full(len(values), np.nan)
        if values.dtype.kind not in "bmM":
            numbers = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        self.require(column, np.isfinite(numbers) | (may_be_empty & values.isna()), rule)
        return numbers

    def take_counts(self, column: str, rule: str, may_be_empty: bool = False) -> None:
        """Read a column as whole numbers of at least 0."""
        counts = self.numbers(column, may_be_empty)
        is_count = (counts >= 0) & (counts < _LARGEST) & (counts % 1 == 0)
        self.require(column, np.isnan(counts) | is_count, f"must be {rule}")
        self.table[column] = counts

    def take_times(
        self, names: Sequence[str], like: "Log | None" = None, may_be_empty: bool = False
    ) -> None:
        """Read columns as seconds that do not decrease in a row.

        Dates and intervals count from the first one of all columns, or from the origin of another
        log.
        """
        columns = {name: _dates(self.table[name]) for name in names}
        forms = {name: _FORMS[values.dtype.kind] for name, values in columns.items() if len(values)}
        self.form, self.origin = (
            (next(iter(forms.values()), "seconds"), None)
            if like is None
            else (like.form, like.origin)
        )
        for name, form in forms.items():
            if form != self.form:
                raise InputError(
                    f"{self.name}: {name} holds {form}, and another time {self.form}; log all alike"
                )
        if self.form != "seconds":
            if self.origin is None:
                self.origin = min(columns[name].min() for name in forms)
            for name in forms:
                is_date = self.table.index.isin(columns[name].index) | self.table[name].isna()
                self.require(name, is_date, f"must be one of the {self.form}, as the others are")
                self.table[name] = (columns[name] - self.origin).dt.total_seconds()
        for name in names:
            self.table[name] = self.numbers(name, may_be_empty)
        for earlier, later in itertools.pairwise(names):
            holds = ~(self.table[later] < self.table[earlier])
            self.require(later, holds, f"must not be before {earlier}; {CLOCK}")

    def begin(self, begin: Any) -> float:
        """Return the time of the begin, by default the first ``start_time`` (s)."""
        if begin is None:
            return float(self.table["start_time"].min())
        if self.origin is None:
            return require_number("begin", begin)
        dates = _dates(pd.Series([begin]))
        if _FORMS[dates.dtype.kind] != self.form:
            raise InputError(f"begin = {begin!r}: the times are {self.form}; give one of these")
        return float((dates - self.origin).dt.total_seconds().iloc[0])


def header_of(file: Path) -> tuple[list[str], float]:
    """Return the columns of a CSV or parquet file, and the least memory (bytes) that it needs."""
    with _reading(file):
        if file.suffix == ".csv":
            return list(pd.read_csv(file, nrows=0)), float(file.stat().st_size)
        with pq.ParquetFile(file) as parquet:
            columns = parquet.schema_arrow.names
            return columns, 8.0 * parquet.metadata.num_rows * len(columns)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of whatever wrote the file
        raise InputError(
            f"path = {str(file)!r}: cannot be read ({error}); give parquet, or CSV named .csv"
        ) from error


def _require_columns(argument: str, columns: Collection[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in columns]
    if missing:
        hint = "; without start_time, give begin" if missing == ["start_time"] else ""
        raise InputError(
            f"{argument}: misses {', '.join(missing)}; record {', '.join(required)}{hint}"
        )


def _dates(values: pd.Series) -> pd.Series:
    """Return the entries of a column that are dates (UTC), or else intervals, or else all entries.

    Without empty ones.
    """
    values = values.dropna()
    if values.dtype.kind not in "biufcmM" and pd.to_numeric(values, errors="coerce").isna().all():
        dates = pd.to_datetime(values, format="ISO8601", utc=True, errors="coerce").dropna()
        if dates.empty:
            dates = pd.to_timedelta(values.astype(str), errors="coerce").dropna()
        values = values if dates.empty else dates
    return values.dt.tz_convert(None) if isinstance(values.dtype, pd.DatetimeTZDtype) else values


def count_workers(log: Log, workers: int | None) -> int:
    """Return the number of workers of a log; unless it is stated, each must have a visit."""
    numbers = np.unique(np.floor(log.numbers("worker")))
    numbers = numbers[numbers >= 0]
    if workers is None:
        workers = max(1, len(numbers))
        gaps = np.flatnonzero(numbers != np.arange(len(numbers)))
        if len(gaps):
            raise InputError(
                f"{log.name}: worker {gaps[0]} has none, though there is a worker "
                f"{numbers[-1]:.12g}; number the workers from 0, or give workers = "
                f"{numbers[-1] + 1:.12g} if some are never served"
            )
    return as_workers("workers", workers)


def put_in_order(log: Log, times: Sequence[str], begin: float, workers: int) -> None:
    """Sort rows by the end of their service, with times counted from the begin."""
    worker = log.numbers("worker")
    is_valid = (worker >= 0) & (worker < workers) & (worker % 1 == 0)
    log.require("worker", is_valid, f"must be a whole number from 0 to {workers - 1}")
    listed = [name for name in times if name in log.table]
    rule = f"must not be before the begin, {begin:.12g}"
    log.require(listed[0], log.table[listed[0]] >= begin, rule)
    log.table = (
        log.table.assign(worker=worker.astype(np.int64))
        .assign(**{name: log.table[name] - begin for name in listed})
        .sort_values(listed[-1], kind="stable")
        .reset_index(drop=True)
    )
