"""Traces of several servers: the rules of the parts of messages, and their form in a file."""

from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.traces.columns import PART_COLUMNS


def check(parts: pd.DataFrame, frame: pd.DataFrame, workers: int, servers: int) -> None:
    """Raise InputError for parts that break a rule; a trace of one server has none."""
    if servers == 1 and parts.empty:
        return
    missing = [name for name in PART_COLUMNS if name not in parts]
    if missing:
        raise InputError(f"parts: misses {', '.join(missing)}; a trace has all of {', '.join(PART_COLUMNS)}")
    count = np.bincount(parts["commit"].clip(-1) + 1, minlength=len(frame) + 1)[1:]
    expected = servers if servers > 1 else 0
    if len(count) > len(frame) or (count != expected).any():
        row = min(int(np.argmax(count != expected)), len(frame))
        raise InputError(
            f"parts: {count[row]} are of row {row} of frame; with servers = {servers} each row has {expected}"
        )
    for column, holds, rule in _rules(parts, frame, workers, servers):
        if not np.all(holds):
            row = int(np.argmin(holds))
            raise InputError(f"parts: {column} of row {row} is {parts[column].iloc[row]}; it {rule}")


def _rules(parts: pd.DataFrame, frame: pd.DataFrame, workers: int, servers: int) -> list[tuple[str, Any, str]]:
    """Return the rules of all parts: the column, the rows where the rule holds, and the rule in words."""
    column = {name: parts[name].to_numpy() for name in PART_COLUMNS if name != "outcome"}
    before = column["version"] - (parts["outcome"] == "applied").to_numpy()
    last = parts.groupby("shard")["version"].shift(fill_value=0).to_numpy()
    commit, is_complete = column["commit"], column["commit"] >= 0
    is_last = parts.groupby("commit")["part"].transform("max").to_numpy() == column["part"]
    is_repeated = parts.duplicated(["worker", "job", "shard"]).to_numpy()
    of_row = {
        name: ~is_complete | (column[name] == frame[name].to_numpy()[commit])
        for name in ("worker", "job", "commit_time")
    }
    return [
        ("part", column["part"] == np.arange(len(parts)), "must count the rows from 0"),
        ("worker", (column["worker"] >= 0) & (column["worker"] < workers), f"must be from 0 to {workers - 1}"),
        ("shard", (column["shard"] >= 0) & (column["shard"] < servers), f"must be from 0 to {servers - 1}"),
        *((name, of_row[name], "must be that of its row in frame") for name in ("worker", "job")),
        ("shard", ~is_repeated, "must be another one for each part of a job"),
        ("version", before == last, "must be the shard's version before, and one more where a part was applied"),
        *(
            (name, (column[name] >= 0) & (column[name] <= before), "must be a version that there was before the commit")
            for name in ("read_version", "push_version")
        ),
        ("staleness", column["staleness"] == before - column["read_version"], "must count the versions since the read"),
        ("commit_time", np.diff(column["commit_time"], prepend=0.0) >= 0, "must not be before the row before's"),
        ("commit_time", ~is_last | of_row["commit_time"], "must be that of the message's row in its last part"),
        ("arrive_time", column["arrive_time"] >= 0, "must not be before 0"),
        ("serve_time", column["serve_time"] >= column["arrive_time"], "must not be before arrive_time"),
        ("serve_time", column["serve_time"] <= column["commit_time"], "must not be after its commit_time"),
    ]


def renumbered(parts: pd.DataFrame, is_in: np.ndarray) -> pd.DataFrame:
    """Return the parts after some rows of the frame were dropped; ``is_in``, ``[rows]``: whether each stays."""
    row = np.append(np.where(is_in, np.cumsum(is_in) - 1, -1), -1)
    return parts.assign(commit=row[parts["commit"]])
