"""What each worker of a trace is doing when, as intervals: for timelines."""

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
    back : pandas.DataFrame
        The server's reply is on its way to the worker.
    away : pandas.DataFrame
        Computing, and sending what was computed: until the message arrives at the server.
    waits, served : pandas.DataFrame
        At the server; also waiting for its reply after the service, where a policy lets it wait.
    """

    back: pd.DataFrame
    away: pd.DataFrame
    waits: pd.DataFrame
    served: pd.DataFrame


def phases(trace: "Trace", workers: Collection[int]) -> Phases:
    """Return what some workers do, to the last commit of the trace.

    Also what no commit came of: a worker that the server never serves waits to the end. A trace does not say when a
    computation without a commit began; its reply is taken to travel as long as the others did (the median).
    """
    frame, open_reads, present, reads = (
        table[table["worker"].isin(workers)]
        for table in (trace.frame, trace.open_reads, trace.present, trace.read_visits)
    )
    last = float(trace.frame["commit_time"].iloc[-1])
    ready = _ready(trace, frame)
    travelled = frame["start_time"].to_numpy() - ready
    way = float(np.median(travelled[frame["job"] > 0])) if (frame["job"] > 0).any() else 0.0
    unfinished = _unfinished(frame, open_reads, present, way, last)
    return Phases(
        back=_table([(frame["worker"], ready, frame["start_time"]), unfinished["back"]]),
        away=_table([(frame["worker"], frame["start_time"], frame["arrive_time"]), unfinished["away"]]),
        waits=_table(
            [
                (frame["worker"], frame["arrive_time"], frame["serve_time"]),
                (reads["worker"], reads["read_arrive_time"], reads["read_serve_time"]),
                (present["worker"], present["arrive_time"], np.full(len(present), last)),
                *_let_wait(trace, frame, open_reads, present, last),
            ]
        ),
        served=_table(
            [
                (frame["worker"], frame["serve_time"], frame["commit_time"]),
                (reads["worker"], reads["read_serve_time"], reads["read_time"]),
            ]
        ),
    )


def _ready(trace: "Trace", frame: pd.DataFrame) -> np.ndarray:
    """Return when the server let go of the worker before each computation."""
    if trace.protocol == "prescribed":  # several computations at once, and no network
        return frame["start_time"].to_numpy()
    own_last = frame.groupby("worker")["commit_time"].shift(1)
    return np.fmax(frame["read_time"].to_numpy(), own_last.to_numpy())


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
    still = served.groupby("worker", as_index=False).last()
    still = still[~still["worker"].isin([*open_reads["worker"], *present["worker"]])]
    return [
        (gone_on["worker"], gone_on["commit_time"], gone_on[answered]),
        (still["worker"], still["commit_time"], np.full(len(still), last)),
    ]


def _unfinished(
    frame: pd.DataFrame, open_reads: pd.DataFrame, present: pd.DataFrame, way: float, last: float
) -> dict[str, tuple]:
    """Return the last reply and the last computation of the workers that have a read to compute from."""
    own = frame.groupby("worker")["commit_time"].agg(["count", "last"]).reindex(open_reads["worker"])
    computing = open_reads["job"].to_numpy() == own["count"].fillna(0).to_numpy()
    worker = open_reads["worker"].to_numpy()[computing]
    ready = np.fmax(open_reads["read_time"].to_numpy(), own["last"].to_numpy())[computing]
    begin = np.minimum(ready + way * (open_reads["job"].to_numpy()[computing] > 0), last)
    arrived = present.set_index("worker")["arrive_time"].reindex(worker).to_numpy()
    # A visit that arrived before is another one, a read that the worker asks for meanwhile.
    end = np.where(arrived >= ready, arrived, last)
    return {"back": (worker, ready, begin), "away": (worker, begin, end)}


def _table(parts: list[tuple]) -> pd.DataFrame:
    """Return the intervals of some duration of (worker, begin, end)."""
    worker, begin, end = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(3))
    lasting = end > begin
    return pd.DataFrame({"worker": worker[lasting], "begin": begin[lasting], "end": end[lasting]})
