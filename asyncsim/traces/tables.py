"""The four tables of a trace: the messages that follow from its steps, the frame that joins them, and the way back."""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.traces.columns import (
    APPLIED,
    BUFFERED,
    CANCELLED,
    COLUMNS,
    FAILED_BY,
    GOSSIP,
    LOST,
    OUTAGE,
    OUTCOMES,
    READ_COLUMNS,
    SPELLS,
    Source,
    previous_rows,
    table_of,
)
from asyncsim.traces.rules import require_columns, require_rows, require_spells

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

Columns = dict[str, Any]

#: The tables beside the frame, which are views of the four, and their columns.
SIDE_TABLES = {
    "open_reads": ["worker", "job", *READ_COLUMNS.values()],
    "present": ["worker", "arrive_time"],
    "in_flight": ["row", "taker", "weight", "arrive_time"],
    "spells": ["worker", "kind", "begin", "end", "detected", "from_row", "to_row"],
}

def messages_to_server(steps: pd.DataFrame, present: Columns, absences: pd.DataFrame) -> pd.DataFrame:
    """Return the messages that a server took up, and the visits that wait for it, which have no step yet.

    ``present`` has ``worker`` and ``arrive_time`` of these.
    """
    outcome, version = steps["outcome"].cat.codes.to_numpy(), steps["version"].to_numpy()
    step, applied = np.flatnonzero(outcome <= BUFFERED), np.flatnonzero(outcome == APPLIED)
    completed_by = np.full(version.max(initial=0) + 2, -1)
    completed_by[version[applied]] = applied
    # The last message before the detection of a death that completed a version has completed it.
    by_death = absences[(absences["worker"] >= 0) & (absences["version"] >= 0)]
    completed_by[by_death["version"]] = step[np.searchsorted(step, by_death["from_row"]) - 1]
    by = completed_by[version[step] + (outcome[step] == BUFFERED)]
    nowhere = np.full(len(present["worker"]), -1)
    return table_of(
        "messages",
        {
            "worker": np.concatenate([steps["worker"].to_numpy()[step], present["worker"]]),
            "step": np.concatenate([step, nowhere]),
            "by": np.concatenate([by, nowhere]),
            "arrive_time": np.concatenate([steps["arrive_time"].to_numpy()[step], present["arrive_time"]]),
        },
    )


def messages_of_peers(worker: np.ndarray, kept: np.ndarray, taken_up: Columns, in_flight: Columns) -> pd.DataFrame:
    """Return the messages between workers; the share of its last state that a worker keeps is one to itself.

    Parameters
    ----------
    worker, kept : array, shape ``[steps]``
        Whose each step is, and the share that it kept.
    taken_up : columns
        ``step``, ``by``, ``weight`` and, if known, ``arrive_time``.
    in_flight : columns
        ``step``, ``taker``, ``weight`` and ``arrive_time``.
    """
    keeps = np.flatnonzero(kept != 1)
    taken_up, in_flight = ({name: np.asarray(of[name]) for name in of} for of in (taken_up, in_flight))
    order = np.lexsort((taken_up["step"], taken_up["by"]))
    taken = table_of("messages", {name: values[order] for name, values in taken_up.items()}, len(order))
    own = table_of("messages", {"step": previous_rows(worker)[keeps], "by": keeps, "weight": kept[keeps]}, len(keeps))
    keys = [in_flight[name] for name in ("arrive_time", "weight", "taker", "step")]
    order = np.lexsort(keys)
    flying = table_of("messages", {name: values[order] for name, values in in_flight.items()}, len(order))
    messages = pd.concat([taken, own, flying], ignore_index=True)
    step, by, taker = (messages[name].to_numpy() for name in ("step", "by", "taker"))
    return messages.assign(worker=worker[step], taker=np.where(by < 0, taker, worker[by]))


def frame_of(trace: "Trace") -> pd.DataFrame:
    """Join the tables of a trace into one with a row per step; see `Trace.frame`."""
    steps, reads = trace.steps, trace.reads
    commit, read, push_read = np.arange(len(steps)), steps["read"].to_numpy(), steps["push_read"].to_numpy()
    version, outcome = steps["version"].to_numpy(), steps["outcome"].cat.codes.to_numpy()
    made_at = trace.absences["from_row"].where(trace.absences["worker"] >= 0, trace.absences["to_row"])
    made_at = made_at[trace.absences["version"] >= 0].to_numpy(np.int64)
    before = np.concatenate([[0], version[:-1]]) + np.bincount(made_at, minlength=len(steps))[: len(steps)]
    of_read = {name: reads[column].to_numpy()[read] for column, name in READ_COLUMNS.items()}
    push_version, push_time = before, steps["commit_time"]
    formed = np.flatnonzero((push_read >= 0) & (outcome < CANCELLED))
    if len(formed):
        push_version, push_time = before.copy(), push_time.to_numpy(copy=True)
        push_version[formed], push_time[formed] = (
            reads[name].to_numpy()[push_read[formed]] for name in ("version", "time")
        )
    counted = {
        "commit": commit,
        **of_read,
        "push_version": push_version,
        "push_time": push_time,
        "staleness": before - of_read["read_version"],
    }
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
        own = trace.messages[trace.messages["taker"] == trace.messages["worker"]]
        columns["kept"], columns["partner"] = np.ones(len(steps)), steps["partner"]
        columns["kept"][own["by"]] = own["weight"]
    if trace.has_failures:
        outages = trace.absences[(trace.absences["worker"] < 0) & (trace.absences["to_row"] < len(steps))]
        at, restored = outages["to_row"].to_numpy(np.int64), np.full(len(steps), -1)
        restored[at] = outages["version"]
        columns |= {name: steps[name] for name in ("failed_by", "incarnation")}
        columns |= {"restored": restored, "restores": np.bincount(at, minlength=len(steps))}
    return pd.DataFrame(columns, copy=False)


def tables_of(
    frame: pd.DataFrame,
    source: Source,
    open_reads: pd.DataFrame | None = None,
    present: pd.DataFrame | None = None,
    in_flight: pd.DataFrame | None = None,
    spells: pd.DataFrame | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the four tables of a trace that is given as a frame; see `Trace.of`."""
    require_columns(frame, source)
    given = {"open_reads": open_reads, "present": present, "in_flight": in_flight, "spells": spells}
    open_reads, present, in_flight, spells = (
        pd.DataFrame(np.zeros((0, len(names))), columns=names) if given[table] is None else given[table]
        for table, names in SIDE_TABLES.items()
    )
    frame = frame.reset_index(drop=True)
    messages = _listed(frame) if source.protocol == GOSSIP else None
    require_rows(frame, pd.DataFrame() if messages is None else messages, in_flight, source)
    require_spells(spells, source.workers, len(frame))
    columns: Columns = {name: frame[name].to_numpy() for name in frame if name in _TAKEN_OVER}
    columns["outcome"] = pd.Categorical(frame["outcome"], OUTCOMES).codes
    if "failed_by" in frame:
        columns["failed_by"] = pd.Categorical(frame["failed_by"], FAILED_BY).codes
    reads, columns["read"], columns["push_read"] = _reads(frame, source, open_reads)
    steps, absences = table_of("steps", columns), _absences(frame, spells)
    if messages is None:
        table = messages_to_server(steps, {name: present[name].to_numpy() for name in present}, absences)
    else:
        taken_up = messages.rename(columns={"row": "by", "source": "step"})
        flying = in_flight.rename(columns={"row": "step"})
        table = messages_of_peers(columns["worker"], frame["kept"].to_numpy(), dict(taken_up), dict(flying))
    return {"steps": steps, "reads": reads, "messages": table, "absences": absences}


_TAKEN_OVER = (
    *("worker", "job", "local_steps", "start_time", "send_time", "arrive_time", "serve_time", "commit_time"),
    *("version", "incarnation", "partner"),
)


def _listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the messages that the lists of a frame name: ``row``, ``source`` and ``weight``.

    Raises
    ------
    InputError
        The lists of a row are no lists of numbers, or of different lengths.
    """
    lengths = {}
    for name in ("sources", "weights"):
        wrong = [row for row, value in enumerate(frame[name]) if not isinstance(value, list | tuple | np.ndarray)]
        if wrong:
            raise InputError(f"frame: {name} of row {wrong[0]} is {frame[name].iloc[wrong[0]]!r}; it must be a list")
        lengths[name] = np.fromiter(map(len, frame[name]), np.int64, len(frame))
    differ = np.flatnonzero(lengths["sources"] != lengths["weights"])
    if len(differ):
        row = differ[0]
        raise InputError(
            f"frame: row {row} has {lengths['sources'][row]} sources and {lengths['weights'][row]} weights; it must "
            "have as many"
        )
    try:
        source = np.array(list(itertools.chain.from_iterable(frame["sources"])))
        weight = np.array(list(itertools.chain.from_iterable(frame["weights"])), np.float64)
        if source.size and (source.ndim != 1 or source.dtype.kind not in "iu"):
            raise ValueError(f"of type {source.dtype}")
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"frame: sources and weights must be lists of rows and of numbers ({error})") from None
    row = np.repeat(np.arange(len(frame)), lengths["sources"])
    return pd.DataFrame({"row": row, "source": source.astype(np.int64), "weight": weight})


def _reads(frame: pd.DataFrame, source: Source, open_reads: pd.DataFrame) -> tuple[pd.DataFrame, Any, Any]:
    """Return the reads of a frame; the read of each row, and the read with which its message was formed."""
    rows = len(frame)
    made = pd.concat([frame, open_reads], ignore_index=True)[["worker", "job", *READ_COLUMNS.values()]]
    made = made.set_axis(["worker", "job", *READ_COLUMNS], axis=1).assign(is_open=np.arange(len(made)) >= rows)
    place = np.arange(len(made))
    if "failed_by" in frame:  # a message that is sent again has several rows with one read
        keep = ~made.duplicated(["worker", "job"], keep="last").to_numpy()
        key = made.groupby(["worker", "job"], sort=False).ngroup().to_numpy()
        place[key[keep]] = np.arange(keep.sum())
        made, place = made[keep], place[key]
    push = np.full(rows, -1)
    if source.separate_reads and source.protocol == "read_then_write":
        index = pd.MultiIndex.from_frame(made[["worker", "job"]])
        push = index.get_indexer(pd.MultiIndex.from_arrays([frame["worker"], frame["job"] + 1]))
    before, time = frame["read_version"] + frame["staleness"], frame["commit_time"]
    formed = push >= 0
    version, at = before.to_numpy(copy=True), time.to_numpy(copy=True)
    version[formed], at[formed] = (made[name].to_numpy()[push[formed]] for name in ("version", "time"))
    differs = (version != frame["push_version"]) | ~((at == frame["push_time"]) | frame["push_time"].isna())
    extra = np.flatnonzero(differs & (pd.Categorical(frame["outcome"], OUTCOMES).codes < CANCELLED))
    push[extra] = len(made) + np.arange(len(extra))
    others = frame.loc[extra, ["worker", "job", "push_version", "push_time"]]
    others = others.set_axis(["worker", "job", "version", "time"], axis=1).assign(job=others["job"] + 1)
    columns = {name: np.concatenate([made[name], others.get(name, np.full(len(extra), np.nan))]) for name in made}
    columns["is_open"] = np.arange(len(made) + len(extra)) < len(made)
    columns["is_open"][: len(made)] = made["is_open"]
    return table_of("reads", columns), place[:rows], push


def _absences(frame: pd.DataFrame, spells: pd.DataFrame) -> pd.DataFrame:
    """Return the absences of a frame, with the versions that were restored, or that a death completed."""
    columns: Columns = {name: spells[name].to_numpy(copy=True) for name in spells}
    columns["kind"] = np.array([SPELLS.index(kind) for kind in spells["kind"]], np.int8)
    columns["version"] = np.full(len(spells), -1)
    if "failed_by" in frame:
        restores, last = frame["restores"].to_numpy(), np.r_[0, frame["version"].to_numpy()[:-1]]
        outages = np.flatnonzero(columns["kind"] == OUTAGE)
        rows = np.repeat(np.arange(len(frame)), restores)
        before = frame["version"].to_numpy() - (frame["outcome"] == "applied").to_numpy()
        deaths = np.flatnonzero(before - restores > last)
        of_death = [np.flatnonzero((columns["from_row"] == row) & (columns["kind"] != OUTAGE))[:1] for row in deaths]
        if len(rows) > len(outages) or not all(map(len, of_death)):
            raise InputError("spells: miss an outage or a death that made a version between rows; give all spells")
        columns["to_row"][outages] = len(frame)
        columns["to_row"][outages[: len(rows)]] = rows
        columns["version"][outages[: len(rows)]] = frame["restored"].to_numpy()[rows]
        columns["version"][np.concatenate([*of_death, np.zeros(0, int)]).astype(int)] = last[deaths] + 1
    return table_of("absences", columns, len(spells))
