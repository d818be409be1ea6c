"""Read the log of a parameter server, a row for each commit, as a trace.

========================  =========================================================================
``worker``                from 0
``start_time``            when the worker began to compute
``send_time``             optional: when its message left; else the way up counts as computing
``arrive_time``           when the message reached the server's queue
``serve_time``            when its service began
``commit_time``           when it was applied, and the reply left
========================  =========================================================================
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd

from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_choice, require_path
from asyncsim.traces.lag import log_table, row_text
from asyncsim.traces.trace import Trace
from asyncsim.traces.visits import recorded

TIMES = ("start_time", "send_time", "arrive_time", "serve_time", "commit_time")
#: Seconds in the units of times.
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Medians of a computation (s) outside which its unit is taken for a mistake.
_SHORTEST, _LONGEST = 1e-6, 86_400.0
#: Medians of a computation (s) above which a unit that was not given is doubted: of times in whole
#: numbers, and of others.
_LONG_WHOLE, _LONG = 10.0, 1000.0


def read_visits(path: str | Path, unit: str | None = None) -> Trace:
    """Read a log of visits, parquet or CSV, or a trace that `Trace.save` wrote.

    Parameters
    ----------
    path : str or Path
    unit : {"s", "ms", "us", "ns"}, optional
        Unit of the times in the log. By default seconds, with a note if half of the computations
        are longer than 1,000 of them, or than 10 where all times are whole numbers.

    Raises
    ------
    InputError
        There is no such file; a column is missing; a value is no number; a time goes back, in its
        row, at its worker or at the server; or the median computation is shorter than a microsecond
        or longer than a day, as in another unit. The error names column, row (from 0) and line.
    """
    is_stated = unit is not None
    unit = require_choice("unit", "s" if unit is None else unit, UNITS)
    file = require_path("path", path)
    if file.suffix == ".parquet" and file.is_file():
        columns = pd.read_parquet(file).columns
        if "worker" not in columns:
            return Trace.load(file)
    optional = ("send_time",)
    required = ("worker", *(name for name in TIMES if name not in optional))
    log = log_table(file, required, optional, "commit")
    names = [name for name in TIMES if name in log]
    for name in ("worker", *names):
        numbers = pd.to_numeric(log[name], errors="coerce").astype(float)
        rule = "a worker, from 0" if name == "worker" else f"a number, in {unit}"
        valid = np.isfinite(numbers)
        if name == "worker":
            valid &= (numbers >= 0) & (numbers % 1 == 0)
        _require(file, log, valid, name, f"must be {rule}")
        log[name] = numbers
    by_service = log.sort_values("serve_time", kind="stable")
    ends_of_worker = by_service.groupby("worker")["commit_time"].shift().reindex(log.index)
    ends = by_service["commit_time"].cummax().shift().reindex(log.index)
    clock = "log one clock and one unit"
    for column, bound, rule in (
        *((b, log[a], f"{a}; {clock}") for a, b in itertools.pairwise(names)),
        ("start_time", ends_of_worker, f"the worker's last commit_time; {clock}"),
        (
            *("serve_time", ends),
            "the commit_time of the visit before: services overlap; log it under the lock",
        ),
    ):
        _require(file, log, ~(log[column] < bound), column, f"must not be before {rule}")
    log[names] *= UNITS[unit]
    seconds = float((log[names[1]] - log["start_time"]).median())
    if not _SHORTEST <= seconds <= _LONGEST:
        row = int((log[names[1]] - log["start_time"] - seconds).abs().argmin())
        raise InputError(
            f"{row_text(file, row)}: {names[1]} is {seconds:.3g} s after start_time, as in half of "
            f"the rows, with unit = {unit!r}; give the unit of the times: {', '.join(UNITS)}"
        )
    longest = _LONG_WHOLE if (log[names] % 1 == 0).all(axis=None) else _LONG
    if not is_stated and seconds > longest:
        note(
            f"times taken as seconds: half of the computations take {seconds:.3g} s or more; give "
            "--unit ms if they are milliseconds, --unit s if they are seconds"
        )
    return recorded(log[["worker", *names]])


def _require(file: Path, log: pd.DataFrame, holds: pd.Series, column: str, rule: str) -> None:
    """Raise InputError for the first row for which a rule does not hold."""
    if not holds.all():
        row = int(np.argmin(holds.to_numpy()))
        raise InputError(f"{row_text(file, row)}: {column} = {log[column].iloc[row]}: {rule}")
