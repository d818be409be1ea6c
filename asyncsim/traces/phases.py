"""The phases of the workers of a trace: intervals of computing, travelling, waiting and absence."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.traces.columns import GOSSIP, arrays_of

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace


class Phases(NamedTuple):
    """Tables of intervals, one row each: ``worker``, ``begin`` and ``end`` (s)."""

    #: Until the message departs, or arrives where its departure is not recorded.
    computing: pd.DataFrame
    #: A message travels to the server, or waits for a link; with separate read_then_write visits
    #: the request to read, and after that visit both ways in between.
    sending: pd.DataFrame
    #: At the server, before the service.
    waiting: pd.DataFrame
    served: pd.DataFrame
    #: After the service: a policy delays the reply.
    held: pd.DataFrame
    #: The reply travels to the worker.
    returning: pd.DataFrame
    #: Crashed, or left, and no message of it travels or is at the server.
    away: pd.DataFrame


#: The phases in words.
IN_WORDS = {
    "computing": "computing",
    "sending": "sending",
    "waiting": "waiting at the server",
    "served": "being served",
    "held": "held by the policy",
    "returning": "reply on its way",
    "away": "away",
}


def phases(trace: "Trace", workers: Collection[int]) -> Phases:
    """Return the phases of some workers up to the last commit of the trace.

    Computations without a commit count, too: a worker that the server never serves waits to the
    end. A trace does not record their begins; the reply is assumed to travel as long as the median
    one. Nor does it record their ends; they are assumed to last to the end of the trace, or to the
    arrival of the message, which also ends the reply. With several servers the times are those of a
    message's last part. Raises InputError for several servers with separate reads.
    """
    if trace.servers > 1 and trace.source.separate_reads:
        raise InputError(
            f"servers = {trace.servers}: with reads in visits of their own a worker is at several "
            "servers at once, and does not do one thing at a time; see Trace.parts, or simulate "
            "the protocol 'exchange'"
        )
    last = float(trace.frame["commit_time"].iloc[-1])
    frame, open_reads, present, reads = (
        table[table["worker"].isin(workers)]
        for table in (computations(trace), trace.open_reads, trace.present, trace.read_visits)
    )
    present = present.groupby("worker", as_index=False)["arrive_time"].max()
    worker, empty = frame["worker"], _table()
    # Without a server, a worker waits for others whenever it does not compute.
    if trace.protocol == GOSSIP:
        reader, arrived, begun = arrays_of(open_reads, "worker", "read_arrive_time", "read_time")
        computing = _table(
            (worker, frame["start_time"], frame["send_time"]),
            (reader[begun <= last], begun[begun <= last], last),
        )
        waits = _table(
            (worker, frame["read_arrive_time"], frame["start_time"]),
            (worker, frame["send_time"], frame["commit_time"]),
            (reader, arrived, np.where(np.isnan(begun), last, begun)),
        )
        absences = trace.spells[trace.spells["worker"].isin(workers)]
        away = _table((absences["worker"], absences["begin"], absences["end"].fillna(last)))
        return Phases(computing, empty, empty, empty, waits, empty, away)
    # The departure of the reply before each computation.
    ready = np.fmax(frame["read_time"], frame.groupby("worker")["commit_time"].shift(1)).to_numpy()
    travel_times = (frame["start_time"] - ready)[frame["job"] > 0]
    travel_time = float(np.median(travel_times)) if len(travel_times) else 0.0
    unfinished = _unfinished(frame, open_reads, present, travel_time, last)
    unserved = (present["worker"], present["arrive_time"], last)
    waits, services = ([], [unserved]) if trace.discipline == "lock_free" else ([unserved], [])
    gaps, away = _table(*_gaps(trace, frame, open_reads, present, last)), empty
    if trace.has_failures:
        gaps, away = _without_absences(trace, gaps[gaps["worker"].isin(workers)], last)
    return Phases(
        computing=_table(
            (worker, frame["start_time"], frame["compute_end"]), unfinished["computing"]
        ),
        sending=_table(
            (worker, frame["compute_end"], frame["request_time"]),
            (worker, np.maximum(frame["pull_time"], frame["compute_end"]), frame["arrive_time"]),
            unfinished["sending"],
        ),
        waiting=_table(
            (worker, frame["arrive_time"], frame["serve_time"]),
            (reads["worker"], reads["arrive_time"], reads["serve_time"]),
            *waits,
        ),
        served=_table(
            (worker, frame["serve_time"], frame["commit_time"]),
            (reads["worker"], reads["serve_time"], reads["time"]),
            *services,
        ),
        held=gaps,
        returning=_table((worker, ready, frame["start_time"]), unfinished["returning"]),
        away=away,
    )


def computations(trace: "Trace") -> pd.DataFrame:
    """Return the frame with the end of each computation, ``compute_end``, and its next visits (s).

    ``request_time``: the arrival of its first message; also the end of the computation if that is
    not recorded. ``pull_time``: the end of the read before its message was formed, if that is a
    separate visit.
    """
    frame, push_read = trace.frame, trace.steps["push_read"].to_numpy()
    if (push_read < 0).all():
        pull_time, request_time = np.full(len(frame), np.nan), frame["arrive_time"]
    else:
        arrive, pull_time = arrays_of(trace.reads.iloc[push_read], "arrive_time", "time")
        # The next read of a stopped computation comes after it.
        unread = (push_read < 0) | (pull_time > frame["commit_time"].to_numpy())
        pull_time = np.where(unread, np.nan, pull_time)
        request_time = frame["arrive_time"].where(unread, arrive)
    return frame.assign(
        pull_time=pull_time,
        request_time=request_time,
        compute_end=frame["send_time"].fillna(request_time),
    )


def _gaps(
    trace: "Trace",
    frame: pd.DataFrame,
    open_reads: pd.DataFrame,
    present: pd.DataFrame,
    last: float,
) -> list[tuple]:
    """Return the intervals from a commit to the worker's next read, if they may last: the policy
    delays the read, or the worker is away.
    """
    if not trace.policy.chooses_when_to_reply and not trace.has_failures:
        return []
    reads = trace.reads[trace.reads["shard"] < 0]
    reads = reads.assign(answered=reads["arrive_time" if trace.source.separate_reads else "time"])
    served = frame.loc[
        (trace.steps["failed_by"] != "resent")[frame.index], ["worker", "job", "commit_time"]
    ]
    follows = served.assign(job=served["job"] + 1).merge(reads, on=["worker", "job"])
    # A worker without a next read waits to the end, or to the arrival of the visit that asks for
    # it.
    arrived = present.set_index("worker")["arrive_time"]
    unanswered = served.groupby("worker")["commit_time"].last()
    unanswered = unanswered[~unanswered.index.isin(open_reads["worker"])]
    waits = [
        (follows["worker"], follows["commit_time"], follows["answered"]),
        (unanswered.index, unanswered, arrived.reindex(unanswered.index).fillna(last)),
    ]
    if trace.has_failures:  # until a worker joins; its first read may still wait at the server
        first = (
            reads[reads["job"] == 0].set_index("worker")["answered"].reindex(range(trace.workers))
        )
        first = first.fillna(arrived).fillna(last)
        waits.append((first.index, 0.0, first))
    return waits


def _without_absences(
    trace: "Trace", gaps: pd.DataFrame, last: float
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split the gaps between a worker's visits into waits for the policy and absences."""
    absences = trace.spells[trace.spells["worker"] >= 0].sort_values("begin").fillna({"end": last})
    spells_of_worker = {
        worker: table[["begin", "end"]].to_numpy() for worker, table in absences.groupby("worker")
    }
    held, away = [], []
    for worker, begin, end in gaps.itertuples(index=False):
        # Spells of a worker do not overlap, so that their ends ascend, too.
        spells = spells_of_worker.get(worker, np.zeros((0, 2)))
        for spell_begin, spell_end in spells[np.searchsorted(spells[:, 1], begin, side="right") :]:
            if spell_begin >= end:
                break
            if spell_end > begin:
                held.append((worker, begin, spell_begin))
                away.append((worker, max(begin, spell_begin), min(end, spell_end)))
                begin = min(end, spell_end)
        held.append((worker, begin, end))
    # As columns: each list may have very many rows.
    held_gaps, spells_away = (np.array(rows).reshape(-1, 3).T for rows in (held, away))
    return _table(tuple(held_gaps)), _table(tuple(spells_away))


def _unfinished(
    frame: pd.DataFrame,
    open_reads: pd.DataFrame,
    present: pd.DataFrame,
    travel_time: float,
    last: float,
) -> dict[str, tuple]:
    """Return the last reply, computation and journey of workers with an open read.

    ``travel_time``: the assumed time of the reply (s). ``last``: the end of the trace (s).
    """
    is_ahead = open_reads["worker"].duplicated()  # read for the message of the computation
    reads, worker = open_reads[~is_ahead], open_reads.loc[~is_ahead, "worker"]
    pulls = open_reads[is_ahead].set_index("worker").reindex(worker)
    ready = np.fmax(
        reads["read_time"].to_numpy(), frame.groupby("worker")["commit_time"].last().reindex(worker)
    )
    arrived = present.set_index("worker")["arrive_time"].reindex(worker).to_numpy()
    # An earlier arrival belongs to another visit, a read that the worker asks for meanwhile.
    end = np.where(arrived >= ready, arrived, last)
    request_time = np.fmin(end, pulls["read_arrive_time"])
    begin = np.minimum(ready + travel_time * (reads["job"].to_numpy() > 0), request_time)
    return {
        "returning": (worker, ready, begin),
        "computing": (worker, begin, request_time),
        # A message that is sent again has a row until then.
        "sending": (worker, np.maximum(pulls["read_time"], ready), end),
    }


def _table(*parts: tuple) -> pd.DataFrame:
    """Concatenate (worker, begin, end), without intervals of no duration; a number is for all."""
    empty = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    columns = zip(*(np.broadcast_arrays(*part) for part in (*parts, empty)), strict=True)
    worker, begin, end = map(np.concatenate, columns)
    lasting = end > begin
    worker = worker[lasting].astype(np.int64)
    return pd.DataFrame({"worker": worker, "begin": begin[lasting], "end": end[lasting]})
