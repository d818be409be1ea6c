"""The rules of a trace: for the rows of its frame, its messages, and its tables' references."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_choice
from asyncsim.traces.columns import (
    COLUMNS,
    GOSSIP,
    GOSSIP_COLUMNS,
    PART_COLUMNS,
    TAKES_UP,
    Source,
    arrays_of,
    previous_rows,
)

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

#: By how much shares that sum to one may miss it.
_ROUND_OFF = 1e-9
_Rules = list[tuple[str, np.ndarray, str]]


def require_rows(
    frame: pd.DataFrame, taken_up: pd.DataFrame, in_flight: pd.DataFrame, source: Source
) -> None:
    """Raise InputError if a frame lacks a column, or for the first row that breaks a rule.

    ``taken_up`` and ``in_flight`` are as of a `Trace`.
    """
    is_served = source.protocol != GOSSIP
    columns = (*COLUMNS, *(() if is_served else GOSSIP_COLUMNS))
    missing = [name for name in columns if name not in frame]
    if missing:
        raise InputError(
            f"frame: misses {', '.join(missing)}; such a trace has all of {', '.join(columns)}"
        )
    require_choice("takes_up", source.takes_up, ("",) if is_served else TAKES_UP)
    if is_served and len(in_flight):
        raise InputError(
            f"protocol = {source.protocol!r}: has a server, and no messages between workers"
        )
    rules = _of_rows(frame, source)
    if not is_served:
        rules += _of_messages(frame, taken_up, in_flight, source)
    _require("frame", frame, rules)


def require_parts(parts: pd.DataFrame, frame: pd.DataFrame, source: Source) -> None:
    """Raise InputError for parts of messages that break a rule; a trace of one server has none."""
    if source.servers == 1 and parts.empty:
        return
    missing = [name for name in PART_COLUMNS if name not in parts]
    if missing:
        raise InputError(
            f"parts: misses {', '.join(missing)}; a trace has all of {', '.join(PART_COLUMNS)}"
        )
    count = np.bincount(parts["commit"].astype(int).clip(-1) + 1, minlength=len(frame) + 1)[1:]
    expected = source.servers if source.servers > 1 else 0
    if len(count) > len(frame) or (count != expected).any():
        row = min(int(np.argmax(count != expected)), len(frame))
        raise InputError(
            f"parts: {count[row]} are of row {row} of frame; with servers = {source.servers} each "
            f"row has {expected}"
        )
    _require("parts", parts, _of_parts(parts, frame, source))


def _require(argument: str, table: pd.DataFrame, rules: _Rules) -> None:
    for rule in rules:
        require_column(argument, table, *rule)


def require_column(argument: str, table: pd.DataFrame, column: str, holds: Any, rule: str) -> None:
    """Raise InputError for the first row with a value that breaks a rule.

    Rows are counted from 0, or as the column ``row`` counts them.
    """
    if not np.all(holds):
        first = int(np.argmin(holds))
        row = table["row"].iloc[first] if "row" in table else first
        value = table[column].iloc[first]
        raise InputError(f"{argument}: {column} of row {row} is {value}; it {rule}")


def require_spells(spells: pd.DataFrame, workers: int, rows: int) -> None:
    """Raise InputError for a spell of an unknown worker, or between rows outside the trace."""
    for column, lowest, highest in (
        ("worker", -1, workers - 1),
        ("from_row", 0, rows),
        ("to_row", 0, rows),
    ):
        numbers = spells[column].dropna()
        wrong = numbers[~numbers.between(lowest, highest) | (numbers % 1 != 0)]
        if len(wrong):
            raise InputError(
                f"spells: {column} = {wrong.iloc[0]}: must be a whole number from {lowest} to "
                f"{highest}"
            )


def require_references(trace: "Trace") -> None:
    """Raise InputError unless all workers, rows and reads that the tables name exist."""
    sizes = {
        "reads": len(trace.reads),
        "rows": len(trace.steps),
        "workers": trace.workers,
        "servers": max(trace.servers, trace.source.shards),
    }
    for table, column, of, lowest in (
        ("steps", "read", "reads", 0),
        ("steps", "push_read", "reads", -1),
        ("reads", "worker", "workers", 0),
        ("reads", "shard", "servers", -1),
        ("messages", "worker", "workers", 0),
        ("messages", "step", "rows", -1),
        ("messages", "by", "rows", -1),
        ("messages", "read", "reads", -1),
        ("messages", "push_read", "reads", -1),
        ("messages", "shard", "servers", -1),
    ):
        numbers = getattr(trace, table)[column]
        if not numbers.between(lowest, sizes[of] - 1).all():
            raise InputError(f"{table}: {column} must be from {lowest} to {sizes[of] - 1}")
    require_spells(trace.absences, trace.workers, len(trace))


def require_shards(trace: "Trace") -> None:
    """Raise InputError unless each read of groups of tensors has a row for every shard.

    These follow in the order of the full reads, whose version is that of their oldest shard.
    """
    shards, reads = trace.source.shards, trace.reads
    if shards == 1:
        return
    if trace.protocol != "prescribed":
        raise InputError(f"groups: are of a prescribed trace, this one is {trace.protocol!r}")
    full, parts = (reads[rows] for rows in (reads["shard"] < 0, reads["shard"] >= 0))
    expected = full[["worker", "job"]].to_numpy().repeat(shards, 0)
    if (
        len(parts) != len(expected)
        or (parts[["worker", "job"]].to_numpy() != expected).any()
        or (parts["shard"].to_numpy().reshape(-1, shards) != np.arange(shards)).any()
        or (parts["version"].to_numpy().reshape(-1, shards).min(1) != full["version"]).any()
    ):
        raise InputError(f"reads: each must have one row for each of {shards} shards, in order")
    newest = parts["version"].to_numpy().reshape(-1, shards).max(1)[trace.steps["read"]]
    if (newest >= trace.steps["version"]).any():
        raise InputError("reads: version must be one that there was before the commit")


def require_order(frame: pd.DataFrame) -> None:
    """Raise InputError unless each worker's jobs come in order; resent messages repeat a job."""
    of_worker = frame.groupby("worker", sort=False)
    is_resent = "failed_by" in frame and of_worker["failed_by"].shift().eq("resent")
    if not ((frame["job"] >= 0) & (~(of_worker["job"].diff() <= 0) | is_resent)).all():
        raise InputError("the jobs of a worker do not come one after the other")


def _of_versions(table: pd.DataFrame, before: pd.Series) -> _Rules:
    """List the rules of the versions that a message read; ``before`` is the version it meets."""
    rule = "must be a version that there was before the commit"
    staleness = before - table["read_version"]
    return [
        *(
            (name, table[name].between(0, before), rule)
            for name in ("read_version", "push_version")
        ),
        ("staleness", table["staleness"] == staleness, "must count the versions since the read"),
    ]


def _of_rows(frame: pd.DataFrame, source: Source) -> _Rules:
    """List the rules of every row: the column, the mask of correct rows, and the rule in words."""
    between = "failed_by" in frame or source.policy.completes_between_messages
    version, last = frame["version"], frame["version"].shift(fill_value=0)
    is_applied = frame["outcome"] == "applied"
    before = version - is_applied if between else last
    time, serve_time, last_worker = frame["commit_time"], frame["serve_time"], source.workers - 1
    return [
        ("commit", frame["commit"] == np.arange(len(frame)), "must count the rows from 0"),
        ("worker", frame["worker"].between(0, last_worker), f"must be from 0 to {last_worker}"),
        (
            "version",
            (version >= before) & (before >= last),
            "must not be less than the row before's",
        ),
        ("outcome", (version == before) | is_applied, "must be 'applied' where a version was made"),
        *_of_versions(frame, before),
        (
            "commit_time",
            np.diff(time, prepend=0.0) >= 0,
            "must not be before the row before's, nor before 0",
        ),
        ("commit_time", np.isfinite(time), "must be finite"),
        # By the server's clock; those of workers may differ a little where a trace was recorded.
        (
            "arrive_time",
            frame["arrive_time"].between(0, serve_time),
            "must not be before 0, nor after its serve_time",
        ),
        ("serve_time", serve_time <= time, "must not be after its commit_time"),
        # Or not recorded.
        ("start_time", ~(frame["start_time"] > time.max()), "must not be after the last commit"),
    ]


def _of_parts(parts: pd.DataFrame, frame: pd.DataFrame, source: Source) -> _Rules:
    """List the rules of all parts of messages."""
    before, commit = parts["version"] - (parts["outcome"] == "applied"), parts["commit"]
    time, serve_time = parts["commit_time"], parts["serve_time"]
    of_row = {
        name: (commit < 0) | (parts[name] == frame[name].to_numpy()[commit])
        for name in ("worker", "job", "commit_time")
    }
    is_last = parts.groupby("commit")["part"].transform("max") == parts["part"]
    of_rows = "must be that of its row in frame"
    last_worker, last_shard = source.workers - 1, source.servers - 1
    return [
        ("part", parts["part"] == np.arange(len(parts)), "must count the rows from 0"),
        ("worker", parts["worker"].between(0, last_worker), f"must be from 0 to {last_worker}"),
        ("shard", parts["shard"].between(0, last_shard), f"must be from 0 to {last_shard}"),
        *((name, of_row[name], of_rows) for name in ("worker", "job")),
        (
            "shard",
            ~parts.duplicated(["worker", "job", "shard"]),
            "must be another one for each part of a job",
        ),
        (
            "version",
            before == parts.groupby("shard")["version"].shift(fill_value=0),
            "must be the shard's version before, and one more where a part was applied",
        ),
        *_of_versions(parts, before),
        ("commit_time", np.diff(time, prepend=0.0) >= 0, "must not be before the row before's"),
        (
            "commit_time",
            ~is_last | of_row["commit_time"],
            "must be that of the message's row in its last part",
        ),
        ("arrive_time", parts["arrive_time"] >= 0, "must not be before 0"),
        ("serve_time", serve_time >= parts["arrive_time"], "must not be before arrive_time"),
        ("serve_time", serve_time <= time, "must not be after its commit_time"),
    ]


def _of_messages(
    frame: pd.DataFrame, taken_up: pd.DataFrame, in_flight: pd.DataFrame, source: Source
) -> _Rules:
    """List the rules of rows without a server.

    Raises
    ------
    InputError
        The messages in flight cannot be.
    """
    rows, workers = len(frame), source.workers
    version, read_version, worker, shares, time, partner = arrays_of(
        frame, "version", "read_version", "worker", "kept", "commit_time", "partner"
    )
    row, sent, weight = arrays_of(taken_up, *taken_up)
    is_applied, has_failures = (frame["outcome"] == "applied").to_numpy(), "failed_by" in frame
    life = frame["incarnation"].to_numpy() if has_failures else np.zeros(rows, np.int64)
    previous, versions = previous_rows(worker, life), np.cumsum(is_applied)

    def everywhere(holds: np.ndarray) -> np.ndarray:
        """Return the mask of rows whose messages all obey a rule."""
        return np.bincount(row[~holds], minlength=rows) == 0

    is_earlier = (sent >= 0) & (sent < row)
    at = np.where(is_earlier, sent, 0)
    began = frame["start_time" if source.takes_up == "read" else "commit_time"].to_numpy()
    # In recorded traces by the clocks of two machines.
    in_time = time[at] <= began[row] if source.cluster is not None else np.ones(len(row), bool)
    is_unique = ~pd.MultiIndex.from_arrays([worker[row], sent]).duplicated()
    # A share that nobody takes up comes back to the life that sent it.
    comes_back = has_failures & (worker[at] == worker[row]) & (life[at] == life[row])
    share = (weight > 0) & (weight <= 1 + _ROUND_OFF)
    flying_holds = (
        in_flight["row"].between(0, rows - 1)
        & in_flight["taker"].between(-has_failures, workers - 1)
        & in_flight["weight"].between(0, 1 + _ROUND_OFF, inclusive="right")
        & np.isfinite(in_flight["arrive_time"])
    )
    if not flying_holds.all():
        message = in_flight.iloc[int(np.argmin(flying_holds))].to_dict()
        raise InputError(
            f"in_flight: {message}: must be of a row, to a worker, a share and the time of its "
            "arrival"
        )
    # A sum of no weights would count in integers.
    total = 0.0 + np.bincount(at, np.where(is_earlier & share, weight, 0.0), rows)
    total += np.bincount(in_flight["row"].to_numpy(), in_flight["weight"], rows)
    goes_on = (previous >= 0) & is_applied
    has_next = np.bincount(previous[goes_on], minlength=rows) > 0
    total += np.bincount(previous[goes_on], shares[goes_on], rows)
    sums_to_one = np.where(has_next, abs(total - 1) <= _ROUND_OFF, total <= 1 + _ROUND_OFF)
    return [
        (
            "outcome",
            is_applied | (has_failures & (frame["outcome"] == "cancelled").to_numpy()),
            "must be 'applied'",
        ),
        (
            "version",
            version == versions,
            "must be one more than that of the row before, where the row is applied",
        ),
        (
            "read_version",
            np.where(
                previous < 0, (life > 0) | (read_version == 0), read_version == versions[previous]
            ),
            "must be the version of the worker's own last row",
        ),
        ("sources", everywhere(is_earlier & is_applied[at]), "must be earlier rows"),
        (
            "sources",
            everywhere((worker[at] != worker[row]) | comes_back),
            "must be rows of other workers",
        ),
        ("sources", everywhere(is_unique | comes_back), "must be taken up only once by a worker"),
        (
            "sources",
            is_applied | (np.bincount(row, minlength=rows) == 0),
            "must be empty where nothing was applied",
        ),
        ("sources", everywhere(in_time), "must be rows that were applied before they are taken up"),
        ("weights", everywhere(share), "must be above 0 and at most 1"),
        ("kept", frame["kept"].between(0, 1 + _ROUND_OFF), "must be from 0 to 1"),
        ("kept", (shares == 1) | (previous >= 0), "must be 1 in the first row of a worker"),
        (
            "weights",
            sums_to_one,
            "are of rows of which more, or less, than all is taken up, kept or in flight",
        ),
        (
            "partner",
            frame["partner"].between(-1, workers - 1),
            f"must be a worker from 0 to {workers - 1}, or -1 for none",
        ),
        ("partner", partner != worker, "must be another worker"),
    ]
