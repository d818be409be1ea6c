"""What each worker of a trace is doing when, as intervals: for timelines, and to see where the time goes."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace


class Phases(NamedTuple):
    """Tables of intervals, one row each: ``worker``, ``begin`` and ``end`` (s).

    Attributes
    ----------
    computing : pandas.DataFrame
        Until the message sets off; where the trace does not tell when it did, to its arrival.
    sending : pandas.DataFrame
        A message is on its way to the server, or waits for a link; with separate read_then_write visits the request to
        read, and after that visit both ways between the two.
    waiting, served : pandas.DataFrame
        At the server.
    held : pandas.DataFrame
        After the service: a policy lets the worker wait for its reply.
    returning : pandas.DataFrame
        The server's reply is on its way to the worker.
    """

    computing: pd.DataFrame
    sending: pd.DataFrame
    waiting: pd.DataFrame
    served: pd.DataFrame
    held: pd.DataFrame
    returning: pd.DataFrame


#: The same in words.
IN_WORDS = {
    "computing": "computing",
    "sending": "sending",
    "waiting": "waiting at the server",
    "served": "being served",
    "held": "held by the policy",
    "returning": "reply on its way",
}


def phases(trace: "Trace", workers: Collection[int]) -> Phases:
    """Return what some workers do, to the last commit of the trace.

    Also what no commit came of: a worker that the server never serves waits to the end. A trace does not say when a
    computation without a commit began; its reply is taken to travel as long as the others did (the median). Nor does it
    say whether it had ended; it is taken to last to the end of the trace, or to the arrival of its message, which ends
    the reply, too.
    """
    frame, open_reads, present, reads = (
        table[table["worker"].isin(workers)]
        for table in (trace.frame, trace.open_reads, trace.present, trace.read_visits)
    )
    last = float(trace.frame["commit_time"].iloc[-1])
    ready = _ready(trace, frame)
    travelled = frame["start_time"].to_numpy() - ready
    way = float(np.median(travelled[frame["job"] > 0])) if (frame["job"] > 0).any() else 0.0
    unfinished = _unfinished(trace, frame, open_reads, present, way, last)
    # Where nobody waits, they are being served.
    nobody_waits = trace.discipline == "lock_free"
    there = (present["worker"], present["arrive_time"], np.full(len(present), last))
    pulled, sent = _pulled(trace, frame, reads), computed_until(trace, frame, reads)
    return Phases(
        computing=_table([(frame["worker"], frame["start_time"], sent), unfinished["computing"]]),
        sending=_table(
            [
                (frame["worker"], sent, _asked(frame, pulled)),
                (frame["worker"], pulled["time"], frame["arrive_time"]),
                unfinished["sending"],
            ]
        ),
        waiting=_table(
            [
                (frame["worker"], frame["arrive_time"], frame["serve_time"]),
                (reads["worker"], reads["read_arrive_time"], reads["read_serve_time"]),
                *([] if nobody_waits else [there]),
            ]
        ),
        served=_table(
            [
                (frame["worker"], frame["serve_time"], frame["commit_time"]),
                (reads["worker"], reads["read_serve_time"], reads["read_time"]),
                *([there] if nobody_waits else []),
            ]
        ),
        held=_table(_let_wait(trace, frame, open_reads, present, last)),
        returning=_table([(frame["worker"], ready, frame["start_time"]), unfinished["returning"]]),
    )


def _ready(trace: "Trace", frame: pd.DataFrame) -> np.ndarray:
    """Return when the server let go of the worker before each computation."""
    if trace.protocol == "prescribed":  # several computations at once, and no network
        return frame["start_time"].to_numpy()
    own_last = frame.groupby("worker")["commit_time"].shift(1)
    return np.fmax(frame["read_time"].to_numpy(), own_last.to_numpy())


def computed_until(trace: "Trace", frame: pd.DataFrame, reads: pd.DataFrame) -> np.ndarray:
    """Return when the computation of each row was done; when its first message arrived, if the trace does not tell."""
    asked = _asked(frame, _pulled(trace, frame, reads))
    return np.where(frame["send_time"].isna(), asked, frame["send_time"])


def _asked(frame: pd.DataFrame, pulled: pd.DataFrame) -> np.ndarray:
    """Return when the first message after each computation arrived."""
    return np.where(np.isnan(pulled["arrive"]), frame["arrive_time"], pulled["arrive"])


def _pulled(trace: "Trace", frame: pd.DataFrame, reads: pd.DataFrame) -> pd.DataFrame:
    """Return ``arrive`` and ``time`` of the visit, if there is one, in which each message's worker read before it."""
    names = {"read_arrive_time": "arrive", "read_time": "time"}
    if trace.protocol != "read_then_write" or reads.empty:
        return pd.DataFrame(np.nan, range(len(frame)), list(names.values()))
    found = reads.assign(job=reads["job"] - 1)[["worker", "job", *names]].rename(columns=names)
    return frame[["worker", "job"]].merge(found, how="left", on=["worker", "job"])[list(names.values())]


def _let_wait(
    trace: "Trace", frame: pd.DataFrame, open_reads: pd.DataFrame, present: pd.DataFrame, last: float
) -> list[tuple]:
    """Return the intervals between a commit and the read that the server answers, or queues, only when it is time."""
    if not trace.policy.chooses_when_to_reply:
        return []
    answered = "read_arrive_time" if trace.source.separate_reads else "read_time"
    reads = pd.concat([table.loc[table["job"] > 0, ["worker", "job", answered]] for table in (frame, open_reads)])
    served = frame[["worker", "job", "commit_time"]].assign(job=frame["job"] + 1)
    gone_on = served.merge(reads, on=["worker", "job"])
    # Who has no read yet waits to the end, or to the arrival of the visit in which it asks for one.
    still = served.groupby("worker", as_index=False).last()
    still = still[~still["worker"].isin(open_reads["worker"])].merge(present, how="left", on="worker")
    return [
        (gone_on["worker"], gone_on["commit_time"], gone_on[answered]),
        (still["worker"], still["commit_time"], still["arrive_time"].fillna(last)),
    ]


def _unfinished(
    trace: "Trace", frame: pd.DataFrame, open_reads: pd.DataFrame, present: pd.DataFrame, way: float, last: float
) -> dict[str, tuple]:
    """Return the last reply, computation and journey of the workers that have a read to compute from."""
    own = frame.groupby("worker")["commit_time"].agg(["count", "last"]).reindex(open_reads["worker"])
    current = open_reads["job"].to_numpy() == own["count"].fillna(0).to_numpy()
    reads = open_reads[current].reset_index(drop=True)
    worker, pulled = reads["worker"], _pulled(trace, reads, open_reads)
    ready = np.fmax(reads["read_time"].to_numpy(), own["last"].to_numpy()[current])
    arrived = present.set_index("worker")["arrive_time"].reindex(worker).to_numpy()
    # A visit that arrived before is another one, a read that the worker asks for meanwhile.
    end = np.where(arrived >= ready, arrived, last)
    asked = np.fmin(end, pulled["arrive"])
    begin = np.minimum(ready + way * (reads["job"].to_numpy() > 0), asked)
    return {
        "returning": (worker, ready, begin),
        "computing": (worker, begin, asked),
        "sending": (worker, pulled["time"], end),
    }


def _table(parts: list[tuple]) -> pd.DataFrame:
    """Return the intervals of some duration of (worker, begin, end)."""
    none = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    worker, begin, end = (np.concatenate([np.asarray(part[i]) for part in (*parts, none)]) for i in range(3))
    lasting = end > begin
    return pd.DataFrame({"worker": worker[lasting], "begin": begin[lasting], "end": end[lasting]})
