"""Traces without a server: the rules of their columns, and what they come to in a few numbers."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_choice
from asyncsim.traces.columns import GOSSIP_COLUMNS, TAKES_UP, Source

#: By how much shares that sum to one may miss it.
_ROUND_OFF = 1e-9
NOTHING_TAKEN_UP = pd.DataFrame({"row": np.zeros(0, np.int64), "source": np.zeros(0, np.int64), "weight": np.zeros(0)})


def previous_rows(worker: np.ndarray) -> np.ndarray:
    """Return the worker's own row before each row, ``[rows]``; -1 for none."""
    order = np.argsort(worker, kind="stable")
    previous = np.full(len(worker), -1)
    same = worker[order[1:]] == worker[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def previous_of_life(frame: pd.DataFrame, workers: int) -> np.ndarray:
    """Return the row before each row in the same life of its worker, ``[rows]``; -1 for none."""
    worker = frame["worker"].to_numpy()
    return previous_rows(worker + workers * frame["incarnation"].to_numpy() if "incarnation" in frame else worker)


def arriving(trace: Any) -> pd.DataFrame:
    """Return the messages in flight at the end, without those that were lost with their takers."""
    return trace.in_flight[trace.in_flight["taker"] >= 0]


def taken_up(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the messages that rows took up, one each: ``row``, ``source`` and ``weight``.

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


def rules(frame: pd.DataFrame, source: Source, in_flight: pd.DataFrame) -> list[tuple[str, np.ndarray, str]]:
    """Return the rules of every row: the column, the rows where the rule holds, and the rule in words.

    Raises
    ------
    InputError
        Columns are missing, or hold something else; or the messages in flight cannot be.
    """
    missing = [name for name in GOSSIP_COLUMNS if name not in frame]
    if missing:
        raise InputError(f"frame: misses {', '.join(missing)}; without a server it has {', '.join(GOSSIP_COLUMNS)}")
    require_choice("takes_up", source.takes_up, TAKES_UP)
    rows, workers = len(frame), source.workers
    version, read_version = frame["version"].to_numpy(), frame["read_version"].to_numpy()
    has_failures, is_applied = "failed_by" in frame, (frame["outcome"] == "applied").to_numpy()
    made = np.cumsum(is_applied)
    messages = taken_up(frame)
    row, sent, weight = (messages[name].to_numpy() for name in messages)
    worker, kept, time = (frame[name].to_numpy() for name in ("worker", "kept", "commit_time"))
    partner = frame["partner"].to_numpy()
    previous = previous_of_life(frame, workers)
    life = frame["incarnation"].to_numpy() if has_failures else np.zeros(rows, np.int64)

    def everywhere(holds: np.ndarray) -> np.ndarray:
        """Return which rows have messages of which all hold."""
        found = np.ones(rows, bool)
        found[row[~holds]] = False
        return found

    is_earlier = (sent >= 0) & (sent < row)
    at = np.where(is_earlier, sent, 0)
    began = frame["start_time" if source.takes_up == "read" else "commit_time"].to_numpy()
    # In recorded traces by the clocks of two machines.
    in_time = time[at] <= began[row] if source.cluster is not None else np.ones(len(row), bool)
    once = ~pd.MultiIndex.from_arrays([worker[row], sent]).duplicated()
    # A share that nobody takes up comes back to the life that sent it.
    comes_back = has_failures & (worker[at] == worker[row]) & (life[at] == life[row])
    share = (weight > 0) & (weight <= 1 + _ROUND_OFF)
    fly = {name: in_flight[name].to_numpy() for name in in_flight}
    flying_holds = (
        (fly["row"] >= 0) & (fly["row"] < rows) & (fly["taker"] >= -has_failures) & (fly["taker"] < workers)
        & (fly["weight"] > 0) & (fly["weight"] <= 1 + _ROUND_OFF) & np.isfinite(fly["arrive_time"])
    )  # fmt: skip
    if not flying_holds.all():
        found = in_flight.iloc[int(np.argmin(flying_holds))].to_dict()
        raise InputError(f"in_flight: {found}: must be of a row, to a worker, a share and the time of its arrival")
    total = 0.0 + np.bincount(at, np.where(is_earlier & share, weight, 0.0), rows)  # of none NumPy counts in integers
    total += np.bincount(fly["row"], fly["weight"], rows)
    is_last = np.ones(rows, bool)
    goes_on = (previous >= 0) & is_applied
    is_last[previous[goes_on]] = False
    np.add.at(total, previous[goes_on], kept[goes_on])
    whole = np.where(is_last, total <= 1 + _ROUND_OFF, abs(total - 1) <= _ROUND_OFF)
    return [
        ("outcome", is_applied | (has_failures & (frame["outcome"] == "cancelled").to_numpy()), "must be 'applied'"),
        ("version", version == made, "must be one more than that of the row before, where the row is applied"),
        (
            "read_version",
            np.where(previous < 0, (life > 0) | (read_version == 0), read_version == made[previous]),
            "must be the version of the worker's own last row",
        ),
        ("sources", everywhere(is_earlier & is_applied[at]), "must be earlier rows"),
        ("sources", everywhere((worker[at] != worker[row]) | comes_back), "must be rows of other workers"),
        ("sources", everywhere(once | comes_back), "must be taken up only once by a worker"),
        ("sources", is_applied | (np.bincount(row, minlength=rows) == 0), "must be empty where nothing was applied"),
        ("sources", everywhere(in_time), "must be rows that were applied before they are taken up"),
        ("weights", everywhere(share), "must be above 0 and at most 1"),
        ("kept", (kept >= 0) & (kept <= 1 + _ROUND_OFF), "must be from 0 to 1"),
        ("kept", (kept == 1) | (previous >= 0), "must be 1 in the first row of a worker"),
        ("weights", whole, "are of rows of which more, or less, than all is taken up, kept or in flight"),
        ("partner", (partner >= -1) & (partner < workers), f"must be a worker from 0 to {workers - 1}, or -1 for none"),
        ("partner", partner != worker, "must be another worker"),
    ]  # fmt: skip


def flights(trace: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return when each message was sent, and when each was taken up that was: those that were not are at the end."""
    messages, times = trace.taken_up, trace.frame["commit_time"].to_numpy()
    taken = trace.frame["start_time" if trace.takes_up == "read" else "commit_time"].to_numpy()[messages["row"]]
    return times[np.r_[messages["source"], arriving(trace)["row"]].astype(np.int64)], taken


def push_weights(trace: Any) -> np.ndarray:
    """Return the weight of each row in push-sum, ``[rows]``: its shares of the weights of all that it mixes.

    What workers keep of their last rows' weights and what is in flight of all rows' weights sum to the workers; a crash
    takes what its worker keeps and what the worker was sent, and each new life begins with 1.
    """
    frame, weights = trace.frame, np.ones(len(trace.frame))
    kept, before = frame["kept"].to_numpy(), previous_of_life(frame, trace.workers)
    for row, (sources, shares) in enumerate(zip(frame["sources"], frame["weights"], strict=True)):
        last = weights[before[row]] if before[row] >= 0 else 1.0
        weights[row] = kept[row] * last + sum(share * weights[i] for i, share in zip(sources, shares, strict=True))
    return weights


def waited(frame: pd.DataFrame) -> pd.Series:
    """Return for how long each row's worker waited for others, before its computation and after it (s)."""
    done = frame["send_time"].fillna(frame["commit_time"])
    waited_first = (frame["start_time"] - frame["read_arrive_time"]).clip(lower=0)  # by clocks that may differ
    return waited_first + frame["commit_time"] - done


def waits(trace: Any) -> np.ndarray:
    """Return for how long (s) each worker waited for each other, ``[workers, workers]``; the first index waits.

    A wait is put down to the partner of an exchange, or else to the sender of the latest of the messages that ended it.
    """
    frame, messages = trace.frame, trace.taken_up
    blamed = frame["partner"].to_numpy().copy()
    last = messages.groupby("row")["source"].max()  # rows are in the order of time
    blamed[last.index] = frame["worker"].to_numpy()[last]
    there = (blamed >= 0) & (blamed != frame["worker"])  # what came back is nobody's
    found = np.zeros((trace.workers, trace.workers))
    np.add.at(found, (frame["worker"].to_numpy()[there], blamed[there]), waited(frame).to_numpy()[there])
    return found


def summary(trace: Any, phases: Any, warm_up: int) -> dict[str, float]:
    """Return a trace without a server in a few numbers.

    Parameters
    ----------
    trace : Trace
        What to summarize.
    phases : Phases
        Of all workers, also of computations that are not done.
    warm_up : int
        Rows left out at the start. Rates and time averages begin when the last of them is applied.

    Returns
    -------
    dict
        - ``workers``, ``commits``, ``warm_up``: counts; ``commits`` are the gradients measured.
        - ``duration`` (s), ``throughput`` (gradients/s; not of those at the very instant at which it begins).
        - ``staleness_mean``, ``_std``, ``_min``, ``_median``, ``_q90``, ``_q99``, ``_max``: rows of others since the
          worker's own last one.
        - ``share_min``, ``share_max``: the smallest and largest part of the gradients by one worker.
        - ``computing_share``, ``waiting_share``: parts of the workers' time; waiting is for messages of others, for a
          partner, and for the exchange with it.
        - ``messages_mean``: messages taken up, or exchanges, per gradient. ``message_age_mean``: rows between the one
          that a message is of and the one that took it up. ``in_flight_mean``: messages sent and not yet taken up, over
          time. ``in_flight_end``, ``in_flight_mass``: those at the end of the trace, and the sum of their shares of
          their rows' weights in push-sum (`push_weights`).
        - With failures besides ``away_share``, of which no part is waiting; ``cancelled_share``: part of all
          computations that ended with their workers; and ``counted_share``, ``lost_to_waiting`` and ``lost_to_failed``,
          which sum to one.
    """
    cancelled = trace.frame[trace.frame["outcome"] == "cancelled"]
    has_failures, trace = trace.has_failures, trace.accepted
    measured = trace.frame.iloc[warm_up:]
    staleness, times = measured["staleness"].to_numpy(), trace.frame["commit_time"].to_numpy()
    begin, end = (float(times[warm_up - 1]) if warm_up else 0.0), float(times[-1])
    commits = np.bincount(measured["worker"], minlength=trace.workers)
    capacity = trace.workers * (end - begin)

    def share_of(intervals: tuple[Any, Any]) -> float:
        spent = np.maximum(np.minimum(intervals[1], end) - np.maximum(intervals[0], begin), 0.0).sum()
        return min(1.0, float(spent / capacity)) if capacity > 0 else np.nan

    messages, flying_at_end = trace.taken_up, arriving(trace)
    row, sent = messages["row"].to_numpy(), messages["source"].to_numpy()
    departed, taken = flights(trace)
    departed, taken = np.maximum(departed, begin), np.r_[taken, np.full(len(flying_at_end), end)]
    flying = np.maximum(np.minimum(taken, end) - departed, 0).sum()
    late = row >= warm_up
    exchanges = int((measured["partner"] >= 0).sum())
    quantiles = {"min": 0.0, "median": 0.5, "q90": 0.9, "q99": 0.99, "max": 1.0}
    per_second = 1 / (end - begin) if end > begin else np.nan
    share, away = (share_of((table["begin"], table["end"])) for table in (phases.computing, phases.away))
    of_failures = {}
    if has_failures:
        late_ones = cancelled[cancelled["commit_time"] > begin]
        in_vain = share_of((cancelled["start_time"], cancelled["send_time"]))
        of_failures = {
            "away_share": away,
            "cancelled_share": len(late_ones) / (len(late_ones) + len(measured)),
            "counted_share": share - in_vain,
            "lost_to_waiting": 1 - share - away,
            "lost_to_failed": in_vain + away,
        }
    return {
        "workers": trace.workers,
        "commits": len(measured),
        "warm_up": warm_up,
        "duration": end - begin,
        "throughput": int((times[warm_up:] > begin).sum()) * per_second,
        "staleness_mean": float(staleness.mean()),
        "staleness_std": float(staleness.std()),
        **{f"staleness_{name}": float(np.quantile(staleness, part)) for name, part in quantiles.items()},
        "share_min": float(commits.min() / len(measured)),
        "share_max": float(commits.max() / len(measured)),
        "computing_share": share,
        "waiting_share": 1 - share - away,
        "messages_mean": (int(late.sum()) + exchanges) / len(measured),
        "message_age_mean": float((row - sent)[late].mean()) if late.any() else np.nan,
        "in_flight_mean": float(flying * per_second),
        "in_flight_end": len(flying_at_end),
        "in_flight_mass": float(push_weights(trace)[flying_at_end["row"]] @ flying_at_end["weight"]),
        **of_failures,
    }
