"""Summaries of a trace: staleness, shares, throughput, the phases of its workers, and the load of
the server.

Commits are the messages that the server took up; discarded messages and cancelled computations are
counted separately.

The beginning of a run is unlike the rest: all workers read version 0 at once, and a queue has yet
to form. So the first commits are left out, by default one per worker (every gradient after them
comes from a later read, if all are equally fast) but never more than half of the trace. With queues
that fill slowly, or very unequal workers, leave out more: ``warm_up``.
"""

import bisect
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_count
from asyncsim.traces.columns import (
    ACCEPTED,
    BUFFERED,
    CRASH,
    GOSSIP,
    LEAVE,
    LOSS,
    RESENT,
    arrays_of,
    previous_rows,
)
from asyncsim.traces.phases import COMPUTING, IN_WORDS, phases
from asyncsim.traces.samples import rollout_summary, trained_after
from asyncsim.traces.tables import Tables, restores_of

#: The share of the updates that is left out at the start of a trace with rollouts.
_ROLLOUT_WARM_UP = 0.2


def warm_up_of(trace: Tables, warm_up: int | None) -> int:
    """Return the number of commits to leave out; by default one per worker, at most half of all."""
    commits = len(trace.accepted)
    if warm_up is None and trace.rollouts is not None:
        return int(_ROLLOUT_WARM_UP * commits)
    if warm_up is None:
        return min(trace.workers, commits // 2)
    warm_up = require_count("warm_up", warm_up, minimum=0)
    if warm_up >= commits:
        raise InputError(
            f"warm_up = {warm_up}: leaves none of the {commits} commits; must be below that"
        )
    return warm_up


def counted_messages(trace: Tables, warm_up: int) -> pd.DataFrame:
    """Return the accepted messages after the warm-up; with several servers, their accepted
    parts, and with groups of tensors a row for each group.
    """
    if trace.shards > 1:
        accepted, shards = trace.accepted, trace.shards
        rows = np.repeat(np.arange(warm_up, len(accepted)), shards)
        before = accepted.steps["version"].to_numpy() - 1
        staleness = (before[:, None] - accepted.group_versions())[warm_up:].ravel()
        shard = np.tile(np.arange(shards), len(accepted) - warm_up)
        return accepted.frame.iloc[rows].assign(staleness=staleness, shard=shard)
    if trace.servers == 1:
        return trace.accepted.frame.iloc[warm_up:]
    parts = trace.accepted.parts
    return parts[(parts["commit"] >= warm_up) & parts["outcome"].isin(ACCEPTED)]


def summary(trace: Tables, warm_up: int | None = None) -> dict[str, float]:
    """Summarize a trace in some twenty numbers.

    Parameters
    ----------
    trace : Trace
        The trace.
    warm_up : int, optional
        Commits left out at the start; by default one per worker, at most half of all, and with
        rollouts a fifth. Rates and time averages begin when the last of them is applied.

    Returns
    -------
    dict
        - ``workers``, ``commits`` (the measured ones), ``warm_up``: counts.
        - ``duration`` (s), ``throughput`` (commits/s, without those at the instant at which it
          begins).
        - ``staleness_mean``, ``_std``, ``_min``, ``_median``, ``_q90``, ``_q99``, ``_max``: over
          commits.
        - ``staleness_mean_over_workers``: the mean of the workers' means. It exceeds
          ``staleness_mean`` if some workers are slow.
        - ``share_min``, ``share_max``: the smallest and largest part of the commits by one worker.
        - ``computing_share``, ``sending_share``, ``waiting_share``, ``served_share``,
          ``held_share``, ``returning_share``, ``away_share``: parts of the workers' time, by
          `phases`; they sum to one for a simulated trace. Sending counts as computing where
          departures are not recorded.
        - ``lost_time_share``: part of the workers' time spent on computations without effect.
        - ``counted_share``: the goodput, part of the workers' time spent on gradients that counted,
          or may still count. The rest: ``lost_to_waiting`` (at the server, in service, or held by
          the policy), ``lost_to_sending`` (both ways), ``lost_to_discarded`` (computations
          discarded or stopped by the policy), ``lost_to_failed`` (absences, and computations lost
          to a crash, a departure or a lost message) and ``lost_to_restoring`` (computations undone
          as the server restored a checkpoint). They sum to one.
        - ``versions``: their number; ``discarded_share``, ``cancelled_share``: parts of all
          computations, lost at the server and before it.
        - ``utilisation``: part of the time that the server was busy; without locks the mean number
          of visits in service.
        - ``wait_mean`` (s): from a visit's arrival to the begin of its service.
        - ``queue_mean``, ``queue_max``: visits waiting, without the one in service; over time.

        The shares of time and the last four are nan for a prescribed trace: it has no server.

        With groups of tensors the staleness is over the groups of all commits.

        With several servers the staleness is over the parts of messages, and the last four are
        means over servers, and the largest queue. Shares of time follow the last part of each
        message; they are nan where reads are separate visits, for which `phases` is undefined.

        Without a server ``computing_share`` is followed by ``waiting_share``, the rest of the
        workers' time: for messages, for a partner, and for the exchange with it; there is no
        ``staleness_mean_over_workers``. The staleness is the number of other workers' rows since
        the worker's last row. There follow:

        - ``messages_mean``: messages taken up, or exchanges, per gradient. ``message_age_mean``:
          rows between the sender's row and the one that took the message up. ``in_flight_mean``:
          messages sent and not yet taken up, over time. ``in_flight_end``, ``in_flight_mass``: the
          messages in flight at the end, and their total weight in push-sum (`push_weights`).
        - With failures also ``away_share``, which is no waiting; ``cancelled_share``: part of all
          computations, ended with their workers; and ``counted_share``, ``lost_to_waiting`` and
          ``lost_to_failed``, which sum to one.

        With rollouts the workers are learners, the commits updates, and ``staleness_mean`` to
        ``staleness_max`` are over trained samples. Instead of the shares of the workers' time and
        the server's numbers there follow:

        - ``update_time`` (s): from one update to the next. ``learner_busy``, ``slots_busy``: shares
          of their time.
        - ``staleness_tokens_mean``, ``staleness_tokens_max``: by the version that wrote each token.
        - ``samples_lost``: those that were finished or cancelled without an update on them;
          ``lost_share``, of these and the trained ones.
        - ``length_started``, ``length_trained`` (s): mean lengths.
    """
    warm_up = warm_up_of(trace, warm_up)
    workers, accepted = per_worker(trace, warm_up), trace.accepted.frame
    stale = (
        counted_messages(trace, warm_up)
        if trace.rollouts is None
        else trained_after(trace.rollouts, warm_up)
    )
    staleness, times = stale["staleness"].to_numpy(), accepted["commit_time"].to_numpy()
    begin, end = float(times[warm_up - 1]) if warm_up else 0.0, float(times[-1])
    numbers = {
        "workers": trace.workers,
        "commits": len(times) - warm_up,
        "warm_up": warm_up,
        "duration": end - begin,
        "throughput": _ratio(int((times[warm_up:] > begin).sum()), end - begin),
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
    }
    if trace.protocol == GOSSIP or trace.rollouts is not None:
        del numbers["staleness_mean_over_workers"]
    if trace.protocol == GOSSIP:
        return numbers | _messages(trace, warm_up, begin, end)
    rows, version = _measured(trace, warm_up)["outcome"], accepted["version"]
    outcomes = {
        "versions": int(version.iloc[-1] - (version.iloc[warm_up - 1] if warm_up else 0)),
        **{
            f"{outcome}_share": float((rows == outcome).sum() / len(rows))
            for outcome in ("discarded", "cancelled")
        },
    }
    if trace.rollouts is not None:
        assert trace.cluster is not None
        return (
            numbers
            | outcomes
            | rollout_summary(trace.rollouts, trace.frame, trace.cluster, warm_up)
        )
    return numbers | time_shares(trace, begin, end) | outcomes | _server(trace, begin, end)


def per_worker(trace: Tables, warm_up: int | None = None) -> pd.DataFrame:
    """Summarize each worker in one row, including workers without a commit.

    Parameters
    ----------
    trace : Trace
        The trace.
    warm_up : int, optional
        As in `summary`.

    Returns
    -------
    pandas.DataFrame
        ``worker``, ``commits``, ``share`` (of all commits), ``mean_staleness``, and ``mean_wait``
        (s) of the commits at the server, or without one of the worker for others; means are nan
        without a commit. ``discarded`` and ``cancelled``: its numbers of lost computations.
    """
    warm_up = warm_up_of(trace, warm_up)
    rows = _measured(trace, warm_up)
    lost = {
        outcome: np.bincount(
            rows.loc[rows["outcome"] == outcome, "worker"], minlength=trace.workers
        )
        for outcome in ("discarded", "cancelled")
    }
    commits = np.bincount(trace.accepted.steps["worker"].iloc[warm_up:], minlength=trace.workers)
    messages = counted_messages(trace, warm_up)
    worker = messages["worker"].to_numpy()
    count = np.bincount(worker, minlength=trace.workers)
    waited = (
        _waited(messages)
        if trace.protocol == GOSSIP
        else messages["serve_time"] - messages["arrive_time"]
    )

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


def kept_versions(trace: Tables) -> int:
    """Return the number of versions that no restored checkpoint has undone."""
    rows = trace.frame["version"].to_numpy()
    restores = restores_of(trace.absences, len(rows)).sort_values("end")
    # Between two restores versions grow one by one; a restore makes one, the checkpoint's copy.
    first, kept_at_first = [0], [0]

    def kept(version: int) -> int:
        place = bisect.bisect_right(first, version) - 1
        return kept_at_first[place] + version - first[place]

    for row, checkpoint in zip(restores["to_row"], restores["version"], strict=True):
        before = int(rows[row - 1]) if row else 0
        of_copy = kept(checkpoint)
        first.append(max(before, first[-1]) + 1)
        kept_at_first.append(of_copy)
    return kept(int(rows[-1]))


def queue(trace: Tables) -> pd.DataFrame:
    """Count the visits at the server, waiting or in service, as a step function of time.

    With several servers, the visits of parts of messages at all of them.

    Without a server: the messages that were sent and not yet taken up.

    Returns
    -------
    pandas.DataFrame
        ``time`` (s, ascending, from 0) and ``in_system`` from that time on.
    """
    if trace.protocol == GOSSIP:
        begins, ends = flights(trace)
    else:
        begins, ends = trace.visits["arrive"], trace.visits["end"].dropna()
    time, in_system = _steps(begins, ends)
    return pd.DataFrame({"time": time, "in_system": in_system})


def _server(trace: Tables, begin: float, end: float) -> dict[str, float]:
    """Measure the load and the waits of the server in an interval; nan without a server."""
    if trace.protocol == "prescribed":
        return dict.fromkeys(("utilisation", "wait_mean", "queue_mean", "queue_max"), np.nan)
    visits = trace.visits
    if trace.servers == 1:
        return _station(trace, visits, begin, end)
    stations = pd.DataFrame(
        _station(trace, visits[visits["shard"] == shard], begin, end)
        for shard in range(trace.servers)
    )
    return stations.mean().to_dict() | {"queue_max": int(stations["queue_max"].max())}


def _station(trace: Tables, visits: pd.DataFrame, begin: float, end: float) -> dict[str, float]:
    arrive, serve, ended = arrays_of(visits, "arrive", "serve", "end")
    waits = (serve - arrive)[ended > begin]
    # All that are present without locks are in service; elsewhere it is not recorded which of them
    # is.
    serve = np.where(np.isnan(ended), arrive if trace.discipline == "lock_free" else end, serve)
    served = _overlap(serve, np.fmin(ended, end), begin, end).sum()
    time, waiting = _steps(arrive, serve)
    last_before = max(int(np.searchsorted(time, begin, side="right")) - 1, 0)
    return {
        "utilisation": _ratio(served, end - begin),
        "wait_mean": float(waits.mean()) if len(waits) else np.nan,
        "queue_mean": _ratio(_overlap(arrive, serve, begin, end).sum(), end - begin),
        "queue_max": int(waiting[last_before:].max()),
    }


def time_shares(trace: Tables, begin: float, end: float) -> dict[str, float]:
    """Split the workers' time in an interval into phases, goodput and losses."""
    losses = ("waiting", "sending", "discarded", "failed", "restoring")
    if trace.protocol == "prescribed" or (trace.servers > 1 and trace.separate_reads):
        shares = [*IN_WORDS, "lost_time", "counted"]
        return dict.fromkeys(
            [*(f"{share}_share" for share in shares), *(f"lost_to_{loss}" for loss in losses)],
            np.nan,
        )
    part, of_steps = _shares(trace, begin, end)
    outcome, failed_by = arrays_of(trace.steps, "outcome", "failed_by")
    is_accepted = outcome <= BUFFERED
    failed = np.isin(failed_by, (CRASH, LEAVE, LOSS))
    restoring = undone(trace)
    # The positions of discarded, failed and restoring, and one more for counted.
    fate = np.select([failed, is_accepted & restoring, is_accepted], [1, 2, 3], 0)
    # A resent message has the fate of the last one; going backwards, each row sees its successor's.
    if (failed_by == RESENT).any():
        previous = previous_rows(trace.steps["worker"].to_numpy())
        for row in np.flatnonzero((previous >= 0) & (failed_by[previous] == RESENT))[::-1]:
            fate[previous[row]] = fate[row]
    computed = dict(zip(losses[2:], np.bincount(fate, of_steps, 4).tolist(), strict=False))
    return {
        **{f"{phase}_share": value for phase, value in part.items()},
        "lost_time_share": float(of_steps[~is_accepted].sum()),
        "counted_share": part["computing"] - sum(computed.values()),
        "lost_to_waiting": part["waiting"] + part["served"] + part["held"],
        "lost_to_sending": part["sending"] + part["returning"],
        "lost_to_discarded": computed["discarded"],
        "lost_to_failed": computed["failed"] + part["away"],
        "lost_to_restoring": computed["restoring"],
    }


def _shares(trace: Tables, begin: float, end: float) -> tuple[dict[str, float], np.ndarray]:
    """Return the shares of the workers' time in each phase, and in the computation of each row."""
    phase, step, begun, ended = arrays_of(
        phases(trace, range(trace.workers)), "phase", "step", "begin", "end"
    )
    seconds = _overlap(begun, ended, begin, end)
    capacity = trace.workers * (end - begin) or np.nan
    shares = np.bincount(phase, seconds, len(IN_WORDS)) / capacity
    # The last computation of a worker may have no row yet.
    of_steps = np.bincount(step + 1, seconds * (phase == COMPUTING), len(trace) + 1)[1:]
    return dict(zip(IN_WORDS, shares.tolist(), strict=True)), of_steps / capacity


def undone(trace: Tables) -> np.ndarray:
    """Return whether each row's message went into a version undone by a restore, ``[rows]``."""
    restores = restores_of(trace.absences, len(trace))
    version, outcome = arrays_of(trace.steps, "version", "outcome")
    # The checkpoint of the next restore is the oldest of all later ones.
    following = np.searchsorted(restores["to_row"], np.arange(len(trace)), side="right")
    return version + (outcome == BUFFERED) > np.append(restores["version"], np.inf)[following]


def _messages(trace: Tables, warm_up: int, begin: float, end: float) -> dict[str, float]:
    """Summarize the workers' time and messages without a server."""
    part, of_steps = _shares(trace, begin, end)
    commit_time, is_lost = trace.steps["commit_time"], trace.steps["outcome"] == "cancelled"
    has_failures, trace = trace.has_failures, trace.accepted
    row, sent = arrays_of(trace.taken_up, "row", "source")
    (departed, taken_times), in_flight = flights(trace), arriving(trace)

    flying = _overlap(
        departed, np.concatenate([taken_times, np.full(len(in_flight), end)]), begin, end
    )
    late, rows = row >= warm_up, trace.steps.iloc[warm_up:]
    numbers = {
        "computing_share": part["computing"],
        "waiting_share": part["held"],
        "messages_mean": float((late.sum() + (rows["partner"] >= 0).sum()) / len(rows)),
        "message_age_mean": float((row - sent)[late].mean()) if late.any() else np.nan,
        "in_flight_mean": _ratio(flying.sum(), end - begin),
        "in_flight_end": len(in_flight),
        "in_flight_mass": float(push_weights(trace)[in_flight["row"]] @ in_flight["weight"]),
    }
    if not has_failures:
        return numbers
    in_vain = float(of_steps[is_lost].sum())
    count = int((is_lost & (commit_time > begin)).sum())
    return numbers | {
        "away_share": part["away"],
        "cancelled_share": count / (count + len(rows)),
        "counted_share": part["computing"] - in_vain,
        "lost_to_waiting": part["held"],
        "lost_to_failed": in_vain + part["away"],
    }


def arriving(trace: Tables) -> pd.DataFrame:
    """Return the messages in flight at the end that were not lost with their takers."""
    return trace.in_flight[trace.in_flight["taker"] >= 0]


def flights(trace: Tables) -> tuple[np.ndarray, np.ndarray]:
    """Return the time each message was sent, and taken up; those in flight are last."""
    taken_up, (start, commit) = trace.taken_up, arrays_of(trace.steps, "start_time", "commit_time")
    sent = commit[np.append(taken_up["source"], arriving(trace)["row"])]
    return sent, (start if trace.takes_up == "read" else commit)[taken_up["row"]]


def push_weights(trace: Tables) -> np.ndarray:
    """Return each row's weight in push-sum, ``[rows]``: its shares of the weights that it mixes.

    The weights that workers keep after their last rows, and the weights in flight, sum to the
    number of workers. A crash removes its worker's weight and the messages to it; each new life
    begins with 1.
    """
    frame, weights = trace.frame, np.ones(len(trace.frame))
    keeps = frame["kept"].to_numpy()
    before = previous_rows(*arrays_of(trace.steps, "worker", "incarnation"))
    for row, (sources, shares) in enumerate(zip(frame["sources"], frame["weights"], strict=True)):
        last = weights[before[row]] if before[row] >= 0 else 1.0
        weights[row] = keeps[row] * last + sum(
            share * weights[i] for i, share in zip(sources, shares, strict=True)
        )
    return weights


def waits(trace: Tables) -> np.ndarray:
    """Return the waits between workers (s), ``[workers, workers]``; the first index waits.

    A wait counts for the partner of an exchange, or else for the sender of the last message
    awaited.
    """
    frame, worker = trace.frame, trace.frame["worker"].to_numpy()
    blamed = frame["partner"].to_numpy(copy=True)
    last = trace.taken_up.groupby("row")["source"].max()  # rows are in the order of time
    blamed[last.index] = worker[last]
    blames = (blamed >= 0) & (blamed != worker)  # a returned share blames no worker
    seconds = np.zeros((trace.workers, trace.workers))
    np.add.at(seconds, (worker[blames], blamed[blames]), _waited(frame).to_numpy()[blames])
    return seconds


def _waited(frame: pd.DataFrame) -> pd.Series:
    """Return each row's waiting time (s), before its computation and after it."""
    finish_time = frame["send_time"].fillna(frame["commit_time"])
    # Clocks of several machines may differ.
    waited_first = (frame["start_time"] - frame["read_arrive_time"]).clip(lower=0)
    return waited_first + frame["commit_time"] - finish_time


def _steps(up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return times and values of the function that rises by one at ``up`` and falls by one at
    ``down``.
    """
    times = np.concatenate([[0.0], up, down])
    changes = np.concatenate([[0], np.ones(len(up), np.int64), np.full(len(down), -1)])
    time, position = np.unique(times, return_inverse=True)
    return time, np.cumsum(np.bincount(position, weights=changes)).astype(np.int64)


def _overlap(begins: Any, ends: Any, begin: float, end: float) -> np.ndarray:
    """Return the lengths of intervals, each cut to the one from ``begin`` to ``end``."""
    begins, ends = np.asarray(begins), np.asarray(ends)
    return np.maximum(np.minimum(ends, end) - np.maximum(begins, begin), 0.0)


def _measured(trace: Tables, warm_up: int) -> pd.DataFrame:
    """Return the rows after the warm-up, discarded and cancelled ones included."""
    if not warm_up:
        return trace.frame
    accepted = trace.frame["outcome"].isin(ACCEPTED).to_numpy()
    return trace.frame.iloc[int(np.flatnonzero(accepted)[warm_up - 1]) + 1 :]


def _ratio(part: float, total: float) -> float:
    return float(part / total) if total > 0 else np.nan
