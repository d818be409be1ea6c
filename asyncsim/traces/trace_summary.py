"""A trace in a few numbers, and what its workers do when: staleness, shares, throughput, and how busy the server was.

Commits are the messages that the server took up; what it discarded and what was cancelled is counted apart.

The beginning of a run is unlike the rest: all workers read version 0 at once, and a queue has yet to
form. So the first commits are left out, by default as many as there are workers (every gradient
after them comes from a later read, if all are equally fast) but never more than half of the trace.
With queues that fill slowly, or very unequal workers, leave out more: ``warm_up``.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_count
from asyncsim.traces import gossip
from asyncsim.traces.columns import ACCEPTED, GOSSIP

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace


def warm_up_of(trace: "Trace", warm_up: int | None) -> int:
    """Return how many commits are left out at the start: one per worker, at most half of all, if none are given."""
    commits = len(trace.accepted)
    if warm_up is None:
        return min(trace.workers, commits // 2)
    warm_up = require_count("warm_up", warm_up, minimum=0)
    if warm_up >= commits:
        raise InputError(f"warm_up = {warm_up}: leaves none of the {commits} commits; must be below that")
    return warm_up


def counted_messages(trace: "Trace", warm_up: int) -> pd.DataFrame:
    """Return the accepted messages after the warm-up; with several servers, their accepted parts."""
    if trace.servers == 1:
        return trace.accepted.frame.iloc[warm_up:]
    parts = trace.accepted.parts
    return parts[(parts["commit"] >= warm_up) & parts["outcome"].isin(ACCEPTED)]


def summary(trace: "Trace", warm_up: int | None = None) -> dict[str, float]:
    """Return a trace in some twenty numbers.

    Parameters
    ----------
    trace : Trace
        What to summarize.
    warm_up : int, optional
        Commits left out at the start; by default one per worker, at most half of all. Rates and time
        averages begin when the last of them is applied.

    Returns
    -------
    dict
        - ``workers``, ``commits``, ``warm_up``: counts; ``commits`` are those measured.
        - ``duration`` (s), ``throughput`` (commits/s; not of those at the very instant at which it begins).
        - ``staleness_mean``, ``_std``, ``_min``, ``_median``, ``_q90``, ``_q99``, ``_max``: over commits.
        - ``staleness_mean_over_workers``: the mean over workers of each one's own mean. It exceeds
          ``staleness_mean`` when some are slow.
        - ``share_min``, ``share_max``: the smallest and largest part of the commits by one worker.
        - ``computing_share``, ``sending_share``, ``waiting_share``, ``served_share``, ``held_share``,
          ``returning_share``, ``away_share``: parts of the workers' time, as `Phases` tells them apart; together the
          whole of a simulated trace. Sending counts as computing where the trace does not tell when messages set off.
        - ``lost_time_share``: part of the workers' time in which they computed and nothing came of it.
        - ``counted_share``: the goodput, part of the workers' time that went into gradients that counted, or may still
          count. What the rest was lost to: ``lost_to_waiting`` (at the server, being served, or held by the policy),
          ``lost_to_sending`` (there and back), ``lost_to_discarded`` (computed, then discarded or stopped by the
          policy), ``lost_to_failed`` (computed in vain because of a crash, a departure or a lost message, or away) and
          ``lost_to_restoring`` (computed, then undone as the server went back to a checkpoint). Together one.
        - ``versions``: how many were made; ``discarded_share``, ``cancelled_share``: part of all computations that
          came to nothing, at the server and before.
        - ``utilisation``: part of the time that the server was busy; without locks the mean number of visits in
          service.
        - ``wait_mean`` (s): from a visit's arrival to the begin of its service.
        - ``queue_mean``, ``queue_max``: visits waiting, without the one in service; over time.

        The shares of time and the last four are nan for a prescribed trace: it has no server.

        With several servers the staleness is over the parts of messages, and the last four are means over servers, and
        the largest queue; see `per_shard` for each. Shares of time follow the last part of each message; they are nan
        where reads are visits of their own, as `phases` does not know them.
    """
    warm_up = warm_up_of(trace, warm_up)
    if trace.protocol == GOSSIP:
        return gossip.summary(trace, phases(trace, range(trace.workers)), warm_up)
    staleness = counted_messages(trace, warm_up)["staleness"].to_numpy(np.float64)
    times = trace.accepted.frame["commit_time"].to_numpy()[warm_up:]
    rows = _measured(trace, warm_up)
    outcomes = rows["outcome"].value_counts()
    workers = per_worker(trace, warm_up)
    begin, end = _interval(trace, warm_up)
    return {
        "workers": trace.workers,
        "commits": len(times),
        "warm_up": warm_up,
        "duration": end - begin,
        "throughput": _ratio(int((times > begin).sum()), end - begin),
        "staleness_mean": float(staleness.mean()),
        "staleness_std": float(staleness.std()),
        "staleness_min": int(staleness.min()),
        "staleness_median": float(np.median(staleness)),
        "staleness_q90": float(np.quantile(staleness, 0.9)),
        "staleness_q99": float(np.quantile(staleness, 0.99)),
        "staleness_max": int(staleness.max()),
        "staleness_mean_over_workers": float(workers["mean_staleness"].mean()),
        "share_min": float(workers["share"].min()),
        "share_max": float(workers["share"].max()),
        **(shares := _time_shares(trace, begin, end)),
        "lost_time_share": _lost_time_share(trace, begin, end),
        **_goodput(trace, shares, begin, end),
        "versions": _versions(trace, warm_up),
        **{f"{what}_share": float(outcomes.get(what, 0) / len(rows)) for what in ("discarded", "cancelled")},
        **_server(trace, begin, end),
    }


def per_worker(trace: "Trace", warm_up: int | None = None) -> pd.DataFrame:
    """Return one row per worker, also for those without a commit.

    Parameters
    ----------
    trace : Trace
        What to summarize.
    warm_up : int, optional
        As in `summary`.

    Returns
    -------
    pandas.DataFrame
        ``worker``, ``commits``, ``share`` (of all commits), ``mean_staleness``, and ``mean_wait`` (s) of the commits at
        the server, or without one of the worker for others; means are nan without a commit. ``discarded`` and
        ``cancelled``: how many of its computations came to nothing.
    """
    warm_up = warm_up_of(trace, warm_up)
    rows = _measured(trace, warm_up)
    lost = {
        what: np.bincount(rows.loc[rows["outcome"] == what, "worker"], minlength=trace.workers)
        for what in ("discarded", "cancelled")
    }
    commits = np.bincount(trace.accepted.frame["worker"].iloc[warm_up:], minlength=trace.workers)
    messages = counted_messages(trace, warm_up)
    worker = messages["worker"].to_numpy()
    count = np.bincount(worker, minlength=trace.workers)

    waited = gossip.waited(messages) if trace.protocol == GOSSIP else messages["serve_time"] - messages["arrive_time"]

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(worker, weights=values, minlength=trace.workers)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    return pd.DataFrame(
        {
            "worker": np.arange(trace.workers),
            "commits": commits,
            "share": commits / commits.sum(),
            "mean_staleness": mean(messages["staleness"].to_numpy()),
            "mean_wait": mean(waited.to_numpy()),
            **lost,
        }
    )


def per_shard(trace: "Trace", warm_up: int | None = None) -> pd.DataFrame:
    """Summarize each server's shard: one row per server.

    Parameters
    ----------
    trace : Trace
        What to summarize.
    warm_up : int, optional
        As in `summary`.

    Returns
    -------
    pandas.DataFrame
        ``shard``, ``commits`` (parts of counted messages that the server accepted), ``mean_staleness`` of these, and
        as in `summary` ``utilisation``, ``wait_mean`` (s), ``queue_mean`` and ``queue_max`` of this server.
    """
    if trace.protocol in ("prescribed", GOSSIP):
        raise InputError(f"protocol = {trace.protocol!r}: has no server; see summary()")
    warm_up = warm_up_of(trace, warm_up)
    parts = counted_messages(trace, warm_up)
    of_shard = parts.groupby(parts["shard"] if trace.servers > 1 else np.zeros(len(parts), np.int64))["staleness"]
    table = pd.DataFrame({"commits": of_shard.size(), "mean_staleness": of_shard.mean()})
    table = table.reindex(pd.RangeIndex(trace.servers, name="shard")).fillna({"commits": 0}).astype({"commits": int})
    begin, end = _interval(trace, warm_up)
    stations = [_station(trace, visits, present, begin, end) for visits, present in _visits_of_servers(trace)]
    return table.join(pd.DataFrame(stations, table.index)).reset_index()


def queue(trace: "Trace") -> pd.DataFrame:
    """Return how many visits are at the server, waiting or in service, as a step function of time.

    With several servers, the visits of parts of messages at all of them.

    Without a server: how many messages were sent and not yet taken up.

    Returns
    -------
    pandas.DataFrame
        ``time`` (s, ascending, from 0) and ``in_system`` from that time on.
    """
    if trace.protocol == GOSSIP:
        sent, taken = gossip.flights(trace)
        time, in_flight = _steps(sent, taken)
        return pd.DataFrame({"time": time, "in_system": in_flight})
    visits = trace.visits
    arrived = np.concatenate([visits["arrive"], trace.present["arrive_time"]])
    time, in_system = _steps(arrived, visits["end"].to_numpy())
    return pd.DataFrame({"time": time, "in_system": in_system})


def _visits_of_servers(trace: "Trace") -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return the finished visits, and those present at the end, at each server."""
    visits, present = trace.visits, trace.present
    if trace.servers == 1:
        return [(visits, present)]
    return [(visits[visits["shard"] == k], present[present["shard"] == k]) for k in range(trace.servers)]


def _server(trace: "Trace", begin: float, end: float) -> dict[str, float]:
    if trace.protocol == "prescribed":
        return dict.fromkeys(("utilisation", "wait_mean", "queue_mean", "queue_max"), np.nan)
    stations = [_station(trace, visits, present, begin, end) for visits, present in _visits_of_servers(trace)]
    if len(stations) == 1:
        return stations[0]
    longest = max(station["queue_max"] for station in stations)
    return {name: float(np.mean([station[name] for station in stations])) for name in stations[0]} | {
        "queue_max": longest
    }


def _station(trace: "Trace", visits: pd.DataFrame, present: pd.DataFrame, begin: float, end: float) -> dict[str, float]:
    """Return how busy a server was in an interval, and how long visits waited."""
    arrived, begun, ended = visits[["arrive", "serve", "end"]].to_numpy().T
    late = present["arrive_time"].to_numpy()
    arrive = np.concatenate([arrived, late])
    lock_free = trace.discipline == "lock_free"
    serve = np.concatenate([begun, late if lock_free else np.full(len(late), end)])
    served = _overlap(begun, ended, begin, end)
    if lock_free:  # all that are present are in service; elsewhere it is not recorded which of them is
        served += _overlap(late, np.full(len(late), end), begin, end)
    measured = ended > begin
    time, waiting = _steps(arrive, serve)
    last_before = max(int(np.searchsorted(time, begin, side="right")) - 1, 0)
    return {
        "utilisation": _ratio(served, end - begin),
        "wait_mean": float((begun - arrived)[measured].mean()) if measured.any() else np.nan,
        "queue_mean": _ratio(_overlap(arrive, serve, begin, end), end - begin),
        "queue_max": int(waiting[last_before:].max()),
    }


def _has_no_phases(trace: "Trace") -> bool:
    """Return whether it is undefined what workers do when: nothing is known, or several visits overlap."""
    return trace.protocol == "prescribed" or (trace.servers > 1 and trace.source.separate_reads)


def _time_shares(trace: "Trace", begin: float, end: float) -> dict[str, float]:
    if _has_no_phases(trace):
        return {f"{phase}_share": np.nan for phase in Phases._fields}
    doing = phases(trace, range(trace.workers))._asdict()
    spent = {
        phase: _overlap(table["begin"].to_numpy(), table["end"].to_numpy(), begin, end)
        for phase, table in doing.items()
    }
    return {f"{phase}_share": _ratio(time, trace.workers * (end - begin)) for phase, time in spent.items()}


def _lost_time_share(trace: "Trace", begin: float, end: float) -> float:
    if _has_no_phases(trace):
        return np.nan
    lost = trace.frame[~trace.frame["outcome"].isin(ACCEPTED)]
    until = computed_until(trace, lost, trace.read_visits)
    return _ratio(_overlap(lost["start_time"].to_numpy(), until, begin, end), trace.workers * (end - begin))


def _goodput(trace: "Trace", shares: dict[str, float], begin: float, end: float) -> dict[str, float]:
    causes = ("waiting", "sending", "discarded", "failed", "restoring")
    names = ("counted_share", *(f"lost_to_{cause}" for cause in causes))
    if _has_no_phases(trace):
        return dict.fromkeys(names, np.nan)
    frame = trace.frame
    fate = np.select([frame["outcome"].isin(ACCEPTED)], ["counted"], "discarded").astype(object)
    if trace.has_failures:
        fate[frame["failed_by"].isin(["crash", "leave", "loss"])] = "failed"
        into = frame["version"] + (frame["outcome"] == "buffered")
        # The checkpoint of the next restore is the oldest of all that come.
        restored = frame["restored"].where(frame["restores"] > 0).shift(-1).bfill()
        fate[(fate == "counted") & (into > restored)] = "restoring"
        # What was sent again came to what its last message came to.
        fate = pd.Series(fate).groupby([frame["worker"], frame["job"]]).transform("last").to_numpy()
    start, until = frame["start_time"].to_numpy(), computed_until(trace, frame, trace.read_visits)
    computed = {
        what: _ratio(_overlap(start[fate == what], until[fate == what], begin, end), trace.workers * (end - begin))
        for what in ("discarded", "failed", "restoring")
    }
    values = (
        shares["computing_share"] - sum(computed.values()),
        shares["waiting_share"] + shares["served_share"] + shares["held_share"],
        shares["sending_share"] + shares["returning_share"],
        computed["discarded"],
        computed["failed"] + shares["away_share"],
        computed["restoring"],
    )
    return dict(zip(names, values, strict=True))


def _steps(up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return times and values of the function that rises by one at ``up`` and falls by one at ``down``."""
    times = np.concatenate([[0.0], up, down])
    changes = np.concatenate([[0], np.ones(len(up), np.int64), np.full(len(down), -1)])
    time, position = np.unique(times, return_inverse=True)
    return time, np.cumsum(np.bincount(position, weights=changes)).astype(np.int64)


def _overlap(start: np.ndarray, stop: np.ndarray, begin: float, end: float) -> float:
    """Return the total length of the intervals within one."""
    return float(np.maximum(np.minimum(stop, end) - np.maximum(start, begin), 0.0).sum())


def _measured(trace: "Trace", warm_up: int) -> pd.DataFrame:
    """Return the rows after the warm-up, discarded and cancelled ones included."""
    if not warm_up:
        return trace.frame
    accepted = trace.frame["outcome"].isin(ACCEPTED).to_numpy()
    return trace.frame.iloc[int(np.flatnonzero(accepted)[warm_up - 1]) + 1 :]


def _versions(trace: "Trace", warm_up: int) -> int:
    version = trace.accepted.frame["version"].to_numpy()
    return int(version[-1] - (version[warm_up - 1] if warm_up else 0))


def _interval(trace: "Trace", warm_up: int) -> tuple[float, float]:
    times = trace.accepted.frame["commit_time"].to_numpy()
    return float(times[warm_up - 1]) if warm_up else 0.0, float(times[-1])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else np.nan


class Phases(NamedTuple):
    """Tables of intervals, one row each: ``worker``, ``begin`` and ``end`` (s)."""

    computing: pd.DataFrame  #: until the message sets off; where the trace does not tell when it did, to its arrival
    #: A message is on its way to the server, or waits for a link; with separate read_then_write visits the request to
    #: read, and after that visit both ways between the two.
    sending: pd.DataFrame
    waiting: pd.DataFrame  #: at the server, and then served
    served: pd.DataFrame
    held: pd.DataFrame  #: after the service: a policy lets the worker wait for its reply
    returning: pd.DataFrame  #: the server's reply is on its way to the worker
    away: pd.DataFrame  #: crashed, or left, and no message of it is on its way or at the server


#: The same in words.
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
    """Return what some workers do, to the last commit of the trace.

    Also what no commit came of: a worker that the server never serves waits to the end. A trace does not say when a
    computation without a commit began; its reply is taken to travel as long as the others did (the median). Nor does it
    say whether it had ended; it is taken to last to the end of the trace, or to the arrival of its message, which ends
    the reply, too. With several servers the times are those of a message's last part.
    """
    if trace.servers > 1 and trace.source.separate_reads:
        raise InputError(
            f"servers = {trace.servers}: with reads in visits of their own a worker is at several servers at once, and "
            "does not do one thing at a time; see Trace.parts, or simulate the protocol 'exchange'"
        )
    frame, open_reads, present, reads = (
        table[table["worker"].isin(workers)]
        for table in (trace.frame, trace.open_reads, trace.present, trace.read_visits)
    )
    present = present.groupby("worker", as_index=False)["arrive_time"].max()
    last = float(trace.frame["commit_time"].iloc[-1])
    if trace.protocol == GOSSIP:  # whoever neither computes nor was just done waits for others
        under_way = open_reads[open_reads["read_time"] <= last]
        others = _table(
            [
                (frame["worker"], frame["read_arrive_time"], frame["start_time"]),
                (frame["worker"], frame["send_time"], frame["commit_time"]),
                (open_reads["worker"], open_reads["read_arrive_time"], open_reads["read_time"].fillna(last)),
            ]
        )
        computing = [(frame["worker"], frame["start_time"], frame["send_time"])]
        computing += [(under_way["worker"], under_way["read_time"], np.full(len(under_way), last))]
        none, absences = _table([]), trace.spells[trace.spells["worker"].isin(workers)]
        away = _table([(absences["worker"], absences["begin"], absences["end"].fillna(last))])
        return Phases(_table(computing), none, none, none, others, none, away)
    ready = _ready(trace, frame)
    travelled = frame["start_time"].to_numpy() - ready
    way = float(np.median(travelled[frame["job"] > 0])) if (frame["job"] > 0).any() else 0.0
    unfinished = _unfinished(trace, frame, open_reads, present, way, last)
    # Where nobody waits, they are being served.
    nobody_waits = trace.discipline == "lock_free"
    there = (present["worker"], present["arrive_time"], np.full(len(present), last))
    pulled, sent = _pulled(trace, frame, reads), computed_until(trace, frame, reads)
    held = _table(_let_wait(trace, frame, open_reads, present, last))
    away = _table([])
    if trace.has_failures:
        held, away = _without_absences(trace, held[held["worker"].isin(workers)], last)
    return Phases(
        computing=_table([(frame["worker"], frame["start_time"], sent), unfinished["computing"]]),
        sending=_table(
            [
                (frame["worker"], sent, _asked(frame, pulled)),
                (frame["worker"], np.maximum(pulled["time"], sent), frame["arrive_time"]),
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
        held=held,
        returning=_table([(frame["worker"], ready, frame["start_time"]), unfinished["returning"]]),
        away=away,
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
    pulled = frame[["worker", "job"]].merge(found, how="left", on=["worker", "job"])[list(names.values())]
    if trace.has_failures and "commit_time" in frame:  # the next read of a cancelled row comes after it
        pulled.loc[pulled["time"].to_numpy() > frame["commit_time"].to_numpy()] = np.nan
    return pulled


def _let_wait(
    trace: "Trace", frame: pd.DataFrame, open_reads: pd.DataFrame, present: pd.DataFrame, last: float
) -> list[tuple]:
    """Return the intervals between a commit and the read that the server answers, or queues, only when it is time."""
    if not trace.policy.chooses_when_to_reply and not trace.has_failures:
        return []
    answered = "read_arrive_time" if trace.source.separate_reads else "read_time"
    reads = pd.concat([table.loc[table["job"] > 0, ["worker", "job", answered]] for table in (frame, open_reads)])
    served = frame[["worker", "job", "commit_time"]].assign(job=frame["job"] + 1)
    begin = []
    if trace.has_failures:
        served, reads = served[frame["failed_by"] != "resent"], reads.drop_duplicates(["worker", "job"])
        # Until a worker joins; its first read may still wait at the server.
        first = pd.concat([table.loc[table["job"] == 0, ["worker", answered]] for table in (frame, open_reads)])
        first = first.groupby("worker")[answered].min().reindex(range(trace.workers))
        first = first.fillna(present.set_index("worker")["arrive_time"]).fillna(last)
        begin = [(first.index, np.zeros(len(first)), first)]
    gone_on = served.merge(reads, on=["worker", "job"])
    # Who has no read yet waits to the end, or to the arrival of the visit in which it asks for one.
    still = served.groupby("worker", as_index=False).last()
    still = still[~still["worker"].isin(open_reads["worker"])].merge(present, how="left", on="worker")
    return [
        (gone_on["worker"], gone_on["commit_time"], gone_on[answered]),
        (still["worker"], still["commit_time"], still["arrive_time"].fillna(last)),
        *begin,
    ]


def _without_absences(trace: "Trace", gaps: pd.DataFrame, last: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cut intervals between a worker's visits into those in which it was let wait, and those in which it was away."""
    absences = trace.spells[trace.spells["worker"] >= 0].sort_values("begin").fillna({"end": last})
    own = {worker: table[["begin", "end"]].to_numpy() for worker, table in absences.groupby("worker")}
    held, away = [], []
    for worker, begin, end in gaps.itertuples(index=False):
        spells = own.get(worker, np.zeros((0, 2)))
        for gone, back in spells[np.searchsorted(spells[:, 1], begin, side="right") :]:
            if gone >= end:
                break
            if back > begin:
                held.append((worker, begin, gone))
                away.append((worker, max(begin, gone), min(end, back)))
                begin = min(end, back)
        held.append((worker, begin, end))
    found = [_table([tuple(zip(*rows, strict=True))] if rows else []) for rows in (held, away)]
    return found[0], found[1]


def _unfinished(
    trace: "Trace", frame: pd.DataFrame, open_reads: pd.DataFrame, present: pd.DataFrame, way: float, last: float
) -> dict[str, tuple]:
    """Return the last reply, computation and journey of the workers that have a read to compute from."""
    own = frame.groupby("worker")["commit_time"].agg(["last"]).reindex(open_reads["worker"])
    current = (open_reads["job"] == open_reads.groupby("worker")["job"].transform("min")).to_numpy()
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
