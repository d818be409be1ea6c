"""The phases of the workers of a trace: computing, travelling, waiting and absence.

Each time of a step or a read is a mark, at which the phase of its worker changes; a phase lasts
until the worker's next mark.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.traces.columns import GOSSIP, arrays_of

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

#: The phases in words.
IN_WORDS = {
    #: Until the message departs, or arrives where its departure is not recorded.
    "computing": "computing",
    #: A message travels to the server, or waits for a link; with separate read_then_write visits
    #: the request to read, and after that visit both ways in between.
    "sending": "sending",
    #: At the server, before the service.
    "waiting": "waiting at the server",
    "served": "being served",
    #: After the service: a policy delays the reply. Without a server: not computing.
    "held": "held by the policy",
    #: The reply travels to the worker.
    "returning": "reply on its way",
    #: Crashed, or left, and no message of it travels or is at the server.
    "away": "away",
}


def phases(trace: "Trace", workers: Collection[int]) -> pd.DataFrame:
    """Return the phases of some workers up to the last commit of the trace.

    Computations without a commit count, too: a worker that the server never serves waits to the
    end. A trace does not record their begins; the reply is assumed to travel as long as the median
    one. With several servers the times are those of a message's last part.

    Returns
    -------
    pandas.DataFrame
        ``worker``, ``phase`` (a name in `IN_WORDS`), ``begin`` and ``end`` (s), in the order of
        workers and times; ``step``: the row of a computation, or -1. In a prescribed trace the
        computations of a worker may overlap, and there are no other phases.

    Raises
    ------
    InputError
        For several servers with separate reads.
    """
    if trace.servers > 1 and trace.source.separate_reads:
        raise InputError(
            f"servers = {trace.servers}: with reads in visits of their own a worker is at several "
            "servers at once, and does not do one thing at a time; see Trace.parts, or simulate "
            "the protocol 'exchange'"
        )
    last = float(trace.steps["commit_time"].iloc[-1])
    steps = trace.steps.assign(step=np.arange(len(trace)))
    reads = trace.reads[trace.reads["shard"] < 0]
    if trace.protocol == "prescribed":
        begun = _begun(trace, reads).rename(columns={"time": "start_time"})
        table = pd.concat([steps, begun.assign(arrive_time=last)])
        table = table.rename(columns={"start_time": "begin", "arrive_time": "end"})
        table = table[table["worker"].isin(workers)].assign(phase="computing")
    else:
        table = _lasting(trace, _marks(trace, steps, reads), workers, last)
    table = table.loc[table["end"] > table["begin"], ["worker", "phase", "begin", "end", "step"]]
    return table.fillna({"step": -1}).astype({"worker": int, "step": int}).reset_index(drop=True)


def _marks(trace: "Trace", steps: pd.DataFrame, reads: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the instants at which a worker's phase changes, in the order of a job's cycle.

    Tables of ``worker``, ``job``, ``begin`` (s), ``phase`` and ``step``.
    """
    computed = steps[~(steps["start_time"] > steps["commit_time"])]  # not lost before its begin
    begun = _begun(trace, reads)

    def mark(table: pd.DataFrame, time: str, phase: str) -> pd.DataFrame:
        names = table.reindex(columns=["worker", "job", "step"])
        return names.assign(begin=table[time], phase=phase)

    computing = [
        mark(computed, "start_time", "computing"),
        mark(begun, "time", "computing"),
    ]
    if trace.protocol == GOSSIP:
        ends = (mark(steps, time, "held") for time in ("send_time", "commit_time"))
        return [*computing, *ends]
    push_read, commit_time = arrays_of(steps, "push_read", "commit_time")
    # The next read of a stopped computation comes after it.
    pulls = push_read >= 0
    pulls[pulls] = trace.reads["time"].to_numpy()[push_read[pulls]] <= commit_time[pulls]
    open_reads = reads[reads["is_open"]]
    ahead = open_reads.index[open_reads["worker"].duplicated()]
    is_pull = pd.Series(False, trace.reads.index)
    is_pull[push_read[pulls]] = True
    is_pull[ahead] = True  # for the message of a computation that is not done
    # A read for a message belongs to the cycle of the message's computation.
    reads = reads.assign(job=reads["job"] - is_pull[reads.index])
    visits = reads.loc[trace.read_visits.index] if trace.servers == 1 else reads.head(0)
    is_pull = is_pull[reads.index]
    ended = steps[steps["failed_by"] != "resent"]  # otherwise the message departs again
    present = trace.present.groupby("worker", as_index=False)["arrive_time"].max()
    present = present.assign(job=np.iinfo(np.int64).max)
    visit = [mark(visits, "arrive_time", "waiting"), mark(visits, "serve_time", "served")]
    is_pulled = pd.Series(pulls, steps.index)[ended.index]
    return [
        *(table[~is_pull[table.index]] for table in visit),
        mark(reads[~is_pull], "time", "returning"),
        *computing,
        mark(steps, "send_time", "sending"),
        *(table[is_pull[table.index]] for table in visit),
        mark(reads[is_pull], "time", "sending"),
        mark(ended, "arrive_time", "waiting"),
        mark(ended, "serve_time", "served"),
        mark(ended[is_pulled], "commit_time", "returning"),
        mark(ended[~is_pulled], "commit_time", "held"),
        mark(present, "arrive_time", "served" if trace.discipline == "lock_free" else "waiting"),
    ]


def _lasting(
    trace: "Trace", marks: list[pd.DataFrame], workers: Collection[int], last: float
) -> pd.DataFrame:
    """Return the phases between marks, with their ends."""
    absences = trace.absences[trace.absences["worker"] >= 0]
    spells = [
        pd.DataFrame({"worker": absences["worker"], "begin": absences[name], "away": change})
        for name, change in (("begin", 1), ("end", -1))
    ]
    start = pd.DataFrame({"worker": np.arange(trace.workers), "begin": 0.0, "job": -1})
    marks = [table.assign(order=order) for order, table in enumerate(marks)]
    table = pd.concat([start.assign(phase="held"), *marks, *spells], ignore_index=True)
    table = table[table["worker"].isin(workers) & (table["begin"] <= last)]
    table = table.sort_values(["worker", "begin", "job", "order"], ignore_index=True)
    by_worker = table.groupby("worker", sort=False)
    phase = by_worker["phase"].ffill()
    is_away = table["away"].fillna(0).groupby(table["worker"]).cumsum() > 0
    table["phase"] = phase.where(~is_away | (phase != "held"), "away")
    table["end"] = by_worker["begin"].shift(-1).fillna(last)
    return table


def _begun(trace: "Trace", reads: pd.DataFrame) -> pd.DataFrame:
    """Return the open reads, at the assumed begins of the computations not done at the end."""
    steps = trace.steps
    is_ahead = reads["is_open"] & ~reads.index.isin(steps["read"])
    begun = reads[is_ahead].drop_duplicates("worker")
    if trace.protocol == GOSSIP:
        return begun
    by_worker = steps.groupby("worker")["commit_time"]
    ready = np.fmax(trace.reads["time"].to_numpy()[steps["read"]], by_worker.shift(1))
    travel_times = (steps["start_time"] - ready)[steps["job"] > 0]
    travel_time = float(travel_times.median()) if len(travel_times) else 0.0
    ready = np.fmax(begun["time"], by_worker.last().reindex(begun["worker"]).to_numpy())
    return begun.assign(time=ready + travel_time * (begun["job"] > 0))
