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

from pathlib import Path
from typing import Any

from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_choice, require_path
from asyncsim.traces.logs import Log, header_of
from asyncsim.traces.trace import Trace
from asyncsim.traces.visits import COMMIT_TIMES, trace_of_log

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
        Unit of the times in the log, if they are numbers. By default seconds, with a note if half
        of the computations are longer than 1,000 of them, or than 10 where all times are whole
        numbers.

    Raises
    ------
    InputError
        As of `asyncsim.recorded`; or the median computation is shorter than a microsecond or longer
        than a day, as in another unit. The error names column, row (from 0) and line.
    """
    stated_unit = None if unit is None else require_choice("unit", unit, UNITS)
    file = require_path("path", path)
    if file.suffix == ".parquet" and file.is_file() and "steps.worker" in header_of(file)[0]:
        return Trace.load(file)
    log = Log.read(
        file, ("worker", *(name for name in COMMIT_TIMES if name != "send_time")), "commit"
    )
    names = [name for name in COMMIT_TIMES if name in log.table]
    log.take_times(names)
    unit = stated_unit or "s"
    if log.form == "seconds":
        log.table[names] *= UNITS[unit]
    computed = log.table[names[1]] - log.table["start_time"]
    seconds = float(computed.median())
    if not _SHORTEST <= seconds <= _LONGEST:
        row = log.row_text(int((computed - seconds).abs().argmin()))
        raise InputError(
            f"{log.name}: {names[1]} of {row} is {seconds:.3g} s after start_time, as in half of "
            f"the rows, with unit = {unit!r}; give the unit of the times: {', '.join(UNITS)}"
        )
    longest = _LONG_WHOLE if (log.table[names] % 1 == 0).all(axis=None) else _LONG
    if stated_unit is None and log.form == "seconds" and seconds > longest:
        note(
            f"times taken as seconds: half of the computations take {seconds:.3g} s or more; give "
            "--unit ms if they are milliseconds, --unit s if they are seconds"
        )
    log.table = log.table[["worker", *names, "row"]]
    return trace_of_log(log)


def sites_of(path: str | Path, column: str) -> list[Any]:
    """Return the site of each worker, from a column of a log.

    Raises
    ------
    InputError
        As of `read_visits`; a worker is at two sites.
    """
    log = Log.read(path, ("worker",), "commit")
    require_choice("sites", column, list(log.table.drop(columns="row")))
    log.take_counts("worker", "a whole number from 0")
    first = log.table.groupby("worker")[column].transform("first")
    log.require(column, log.table[column] == first, "must be the same in all rows of its worker")
    return log.table.groupby("worker")[column].first().tolist()
