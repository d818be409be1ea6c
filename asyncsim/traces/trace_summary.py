"""A trace in a few numbers: staleness, shares, throughput, and how busy the server was.

Commits are the messages that the server took up; what it discarded and what was cancelled is counted apart.

The beginning of a run is unlike the rest: all workers read version 0 at once, and a queue has yet to
form. So the first commits are left out, by default as many as there are workers (every gradient
after them comes from a later read, if all are equally fast) but never more than half of the trace.
With queues that fill slowly, or very unequal workers, leave out more: ``warm_up``.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from asyncsim.errors import InputError, require_count
from asyncsim.traces.phases import Phases, computed_until, phases
from asyncsim.traces.trace import TAKEN_UP

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace


def warm_up_of(trace: "Trace", warm_up: int | None) -> int:
    """Return how many commits are left out at the start: one per worker, at most half of all, if none are given.

    Raises
    ------
    InputError
        A number that leaves nothing.
    """
    commits = len(trace.taken_up)
    if warm_up is None:
        return min(trace.workers, commits // 2)
    warm_up = require_count("warm_up", warm_up, minimum=0)
    if warm_up >= commits:
        raise InputError(f"warm_up = {warm_up}: leaves none of the {commits} commits; must be below that")
    return warm_up


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
          ``returning_share``: parts of the workers' time, as `asyncsim.traces.phases.Phases` tells them apart; together
          the whole of a simulated trace. Sending counts as computing where the trace does not tell when messages set
          off.
        - ``lost_time_share``: part of the workers' time in which they computed and nothing came of it.
        - ``versions``: how many were made; ``discarded_share``, ``cancelled_share``: part of all computations that
          came to nothing, at the server and before.
        - ``utilisation``: part of the time that the server was busy; without locks the mean number of visits in
          service.
        - ``wait_mean`` (s): from a visit's arrival to the begin of its service.
        - ``queue_mean``, ``queue_max``: visits waiting, without the one in service; over time.

        The shares of time and the last four are nan for a prescribed trace: it has no server.

    Raises
    ------
    InputError
        A warm-up that leaves nothing.
    """
    warm_up = warm_up_of(trace, warm_up)
    staleness, times = trace.taken_up.frame[["staleness", "commit_time"]].to_numpy()[warm_up:].T
    rows = _measured(trace, warm_up)
    outcomes = rows["outcome"].value_counts()
    workers = per_worker(trace, warm_up)
    begin, end = _interval(trace, warm_up)
    return {
        "workers": trace.workers,
        "commits": len(staleness),
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
        **_time_shares(trace, begin, end),
        "lost_time_share": _lost_time_share(trace, begin, end),
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
        ``worker``, ``commits``, ``share`` (of all commits), ``mean_staleness``, and ``mean_wait`` (s) of
        the commits at the server; means are nan without a commit. ``discarded`` and ``cancelled``: how many of its
        computations came to nothing.
    """
    warm_up = warm_up_of(trace, warm_up)
    rows = _measured(trace, warm_up)
    lost = {
        what: np.bincount(rows.loc[rows["outcome"] == what, "worker"], minlength=trace.workers)
        for what in ("discarded", "cancelled")
    }
    frame = trace.taken_up.frame.iloc[warm_up:]
    worker = frame["worker"].to_numpy()
    commits = np.bincount(worker, minlength=trace.workers)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(worker, weights=values, minlength=trace.workers)
        return np.where(commits > 0, total / np.maximum(commits, 1), np.nan)

    return pd.DataFrame(
        {
            "worker": np.arange(trace.workers),
            "commits": commits,
            "share": commits / len(frame),
            "mean_staleness": mean(frame["staleness"].to_numpy()),
            "mean_wait": mean((frame["serve_time"] - frame["arrive_time"]).to_numpy()),
            **lost,
        }
    )


def queue(trace: "Trace") -> pd.DataFrame:
    """Return how many visits are at the server, waiting or in service, as a step function of time.

    Returns
    -------
    pandas.DataFrame
        ``time`` (s, ascending, from 0) and ``in_system`` from that time on.
    """
    visits = trace.visits
    arrived = np.concatenate([visits["arrive"], trace.present["arrive_time"]])
    time, in_system = _steps(arrived, visits["end"].to_numpy())
    return pd.DataFrame({"time": time, "in_system": in_system})


def _server(trace: "Trace", begin: float, end: float) -> dict[str, float]:
    names = ("utilisation", "wait_mean", "queue_mean", "queue_max")
    if trace.protocol == "prescribed":
        return dict.fromkeys(names, np.nan)
    arrived, begun, ended = trace.visits[["arrive", "serve", "end"]].to_numpy().T
    late = trace.present["arrive_time"].to_numpy()
    arrive = np.concatenate([arrived, late])
    lock_free = trace.discipline == "lock_free"
    serve = np.concatenate([begun, late if lock_free else np.full(len(late), end)])
    served = _overlap(begun, ended, begin, end)
    if lock_free:  # all that are present are in service; elsewhere it is not recorded which of them is
        served += _overlap(late, np.full(len(late), end), begin, end)
    measured = ended > begin
    time, waiting = _steps(arrive, serve)
    last_before = max(int(np.searchsorted(time, begin, side="right")) - 1, 0)
    values = (
        _ratio(served, end - begin),
        float((begun - arrived)[measured].mean()) if measured.any() else np.nan,
        _ratio(_overlap(arrive, serve, begin, end), end - begin),
        int(waiting[last_before:].max()),
    )
    return dict(zip(names, values, strict=True))


def _time_shares(trace: "Trace", begin: float, end: float) -> dict[str, float]:
    if trace.protocol == "prescribed":
        return {f"{phase}_share": np.nan for phase in Phases._fields}
    doing = phases(trace, range(trace.workers))._asdict()
    spent = {
        phase: _overlap(table["begin"].to_numpy(), table["end"].to_numpy(), begin, end)
        for phase, table in doing.items()
    }
    return {f"{phase}_share": _ratio(time, trace.workers * (end - begin)) for phase, time in spent.items()}


def _lost_time_share(trace: "Trace", begin: float, end: float) -> float:
    if trace.protocol == "prescribed":
        return np.nan
    lost = trace.frame[~trace.frame["outcome"].isin(TAKEN_UP)]
    until = computed_until(trace, lost, trace.read_visits)
    return _ratio(_overlap(lost["start_time"].to_numpy(), until, begin, end), trace.workers * (end - begin))


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
    """Return the rows after those of the warm-up, with what was discarded and cancelled."""
    if not warm_up:
        return trace.frame
    taken_up = trace.frame["outcome"].isin(TAKEN_UP).to_numpy()
    return trace.frame.iloc[int(np.flatnonzero(taken_up)[warm_up - 1]) + 1 :]


def _versions(trace: "Trace", warm_up: int) -> int:
    version = trace.taken_up.frame["version"].to_numpy()
    return int(version[-1] - (version[warm_up - 1] if warm_up else 0))


def _interval(trace: "Trace", warm_up: int) -> tuple[float, float]:
    times = trace.taken_up.frame["commit_time"].to_numpy()
    return float(times[warm_up - 1]) if warm_up else 0.0, float(times[-1])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else np.nan
