"""The four tables of a trace: its messages, and their joins."""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    CANCELLED,
    COLUMNS,
    GOSSIP,
    LOST,
    OUTCOMES,
    PART_COLUMNS,
    READ_COLUMNS,
    arrays_of,
    table_of,
)

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

Columns = dict[str, Any]


def messages_to_server(
    steps: pd.DataFrame, present: Columns, absences: pd.DataFrame
) -> pd.DataFrame:
    """Return the messages that a server took up, and the waiting visits, which have no step yet.

    ``present`` has ``worker`` and ``arrive_time`` of these.
    """
    outcome, version, worker, arrive_time = arrays_of(
        steps, "outcome", "version", "worker", "arrive_time"
    )
    step, applied = np.flatnonzero(outcome <= BUFFERED), np.flatnonzero(outcome == APPLIED)
    completed_by = np.full(version.max(initial=0) + 2, -1)
    completed_by[version[applied]] = applied
    # A version may be completed between two rows, by a death, a cut trial or a grace window: its
    # last message has completed it. A restore makes a version, too, without messages.
    last = np.r_[0, version][:-1]
    new_versions = version - (outcome == APPLIED) - last
    rows = np.flatnonzero(new_versions > _restore_counts(absences, len(steps)))
    completed_by[last[rows] + 1] = step[np.searchsorted(step, rows) - 1]
    by = completed_by[version[step] + (outcome[step] == BUFFERED)]
    nowhere = np.full(len(present["worker"]), -1)
    return table_of(
        "messages",
        {
            "worker": np.concatenate([worker[step], present["worker"]]),
            "step": np.concatenate([step, nowhere]),
            "by": np.concatenate([by, nowhere]),
            "arrive_time": np.concatenate([arrive_time[step], present["arrive_time"]]),
        },
    )


def restores_of(absences: pd.DataFrame, rows: int) -> pd.DataFrame:
    """Return the outages after which a checkpoint was restored before one of the rows."""
    outages = absences[(absences["worker"] < 0) & (absences["to_row"] < rows)]
    return outages.astype({"to_row": np.int64})


def _restore_counts(absences: pd.DataFrame, rows: int) -> np.ndarray:
    """Return the number of restored checkpoints before each row, ``[rows]``."""
    return np.bincount(restores_of(absences, rows)["to_row"], minlength=rows)


def messages_of_parts(parts: Columns, present: Columns) -> pd.DataFrame:
    """Return the parts of messages in the order of commits, and the visits that wait for a server.

    ``parts`` has the columns of `Trace.messages` but ``by``; ``present`` has ``worker``, ``shard``,
    ``arrive_time``.
    """
    table = table_of("messages", parts)
    step, shard, outcome = arrays_of(table, "step", "shard", "outcome")
    version = _versions_of_shards(table)
    completed_by = np.full((shard.max(initial=0) + 1, version.max(initial=0) + 2), -1)
    is_applied = outcome == APPLIED
    completed_by[shard[is_applied], version[is_applied]] = step[is_applied]
    by = np.where(outcome <= BUFFERED, completed_by[shard, version + (outcome == BUFFERED)], -1)
    return pd.concat([table.assign(by=by), table_of("messages", present)], ignore_index=True)


def _versions_of_shards(parts: pd.DataFrame) -> np.ndarray:
    """Return the version of each part's shard after the part."""
    is_applied = (parts["outcome"].cat.codes == APPLIED).astype(int)
    return is_applied.groupby(parts["shard"]).cumsum().to_numpy()


def messages_of_peers(worker: np.ndarray, taken_up: Columns, in_flight: Columns) -> pd.DataFrame:
    """Return the messages between workers.

    Parameters
    ----------
    worker : array, shape ``[steps]``
        The worker of each step.
    taken_up : columns
        ``step``, ``by``, ``weight`` and, if known, ``arrive_time``.
    in_flight : columns
        ``step``, ``taker`` (-1 of a message that was lost with its taker), ``weight`` and
        ``arrive_time``.
    """
    tables = []
    for columns, keys in (
        (taken_up, ("step", "by")),
        (in_flight, ("arrive_time", "weight", "taker", "step")),
    ):
        order = np.lexsort([columns[key] for key in keys])
        columns = {name: np.asarray(values)[order] for name, values in columns.items()}
        tables.append(table_of("messages", columns, len(order)))
    messages = pd.concat(tables, ignore_index=True)
    step, by, taker = arrays_of(messages, "step", "by", "taker")
    return messages.assign(worker=worker[step], taker=np.where(by < 0, taker, worker[by]))


def frame_of(trace: "Trace") -> pd.DataFrame:
    """Join the tables of a trace into one with a row per step; see `Trace.frame`."""
    steps = trace.steps
    version, outcome = arrays_of(steps, "version", "outcome")
    between = trace.has_failures or trace.policy.completes_between_messages
    before = version - (outcome == APPLIED) if between else np.r_[0, version][:-1]
    counted = {"commit": np.arange(len(steps)), **_read_columns(steps, trace.reads, before)}
    columns: Columns = {name: counted.get(name, steps.get(name)) for name in COLUMNS}
    if not trace.has_failures:
        columns["outcome"] = pd.Categorical.from_codes(outcome, OUTCOMES[:LOST])
    if trace.protocol == GOSSIP:
        taken_up = trace.taken_up
        ends = np.cumsum(np.bincount(taken_up["row"], minlength=len(steps))).tolist()
        bounds = list(itertools.pairwise([0, *ends]))
        for name in ("source", "weight"):
            values = taken_up[name].tolist()
            columns[f"{name}s"] = [values[begin:end] for begin, end in bounds]
        columns |= {name: steps[name] for name in ("kept", "partner")}
    if trace.has_failures:
        restores, restored = restores_of(trace.absences, len(steps)), np.full(len(steps), -1)
        restored[restores["to_row"]] = restores["version"]
        columns |= {name: steps[name] for name in ("failed_by", "incarnation")}
        columns |= {"restored": restored, "restores": _restore_counts(trace.absences, len(steps))}
    return pd.DataFrame(columns, copy=False)


def parts_of(trace: "Trace") -> pd.DataFrame:
    """Join the parts of messages with their reads; see `Trace.parts`."""
    parts = trace.messages[trace.messages["commit_time"].notna()].reset_index(drop=True)
    version, (outcome,) = _versions_of_shards(parts), arrays_of(parts, "outcome")
    counted = {
        "part": np.arange(len(parts)),
        "commit": parts["step"],
        "job": trace.reads["job"].to_numpy()[parts["read"]],
        **_read_columns(parts, trace.reads, version - (outcome == APPLIED)),
        "version": version,
        "outcome": pd.Categorical.from_codes(outcome, OUTCOMES[:LOST]),
    }
    return pd.DataFrame({name: counted.get(name, parts.get(name)) for name in PART_COLUMNS})


def _read_columns(table: pd.DataFrame, reads: pd.DataFrame, before: np.ndarray) -> Columns:
    """Compute the columns of steps or parts that follow from reads and earlier versions."""
    read, push_read, outcome = arrays_of(table, "read", "push_read", "outcome")
    columns = {name: reads[column].to_numpy()[read] for column, name in READ_COLUMNS.items()}
    push_version, push_time = before, table["commit_time"]
    formed = np.flatnonzero((push_read >= 0) & (outcome < CANCELLED))
    if len(formed):
        push_version, push_time = before.copy(), push_time.to_numpy(copy=True)
        push_version[formed], push_time[formed] = arrays_of(
            reads.iloc[push_read[formed]], "version", "time"
        )
    staleness = before - columns["read_version"]
    return columns | {"push_version": push_version, "push_time": push_time, "staleness": staleness}
