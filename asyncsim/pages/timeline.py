"""The timeline of a trace: each worker's phases, its commits, and the run's losses, for a page."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.drawing.look import PHASES, SKY
from asyncsim.pages.packing import pack
from asyncsim.replays.run import Run
from asyncsim.traces.columns import GOSSIP
from asyncsim.traces.phases import IN_WORDS, phases
from asyncsim.traces.trace import Trace

#: Largest numbers of commits and workers of a timeline; it shows the first ones of a longer trace.
MOST_COMMITS, MOST_LANES = 20_000, 2_000
#: Times are integers from 0 to this, the end.
_TICKS = 2**24 - 1
#: The phases of a sample, with their colours; in the queue it is in no lane.
_OF_SAMPLES = {"generating": SKY, "in the queue": None}


def timeline(title: str, trace: Trace, run: Run | None = None) -> dict[str, Any]:
    """Return a timeline's data for the page's script: packed integers, the rest as JSON.

    Times are in ticks of ``end / ticks`` seconds. ``columns`` has, for each phase (sorted by worker
    and begin), lane, begin and length; for commits worker, time, the read's age, the version and
    the versions since the read, and staleness. With rollouts a lane is a slot, and a commit a
    trained sample.

    Without a server there are also messages (sender, receiver, time of sending and journey) and, if
    the run has the recorder `energy`, the distance between the replica that a commit was computed
    at and the replicas' mean, in units of ``largest_distance / ticks``.
    """
    if trace.rollouts is not None:
        commits, intervals = _samples(trace)
        colors, noun = _OF_SAMPLES, "slot"
        lanes = int(trace.samples["slot"].max()) + 1
    else:
        commits, lanes, noun = _commits(trace), trace.workers, "worker"
        by_phase = phases(trace, range(min(lanes, MOST_LANES)))
        intervals = [by_phase[by_phase["phase"] == name] for name in IN_WORDS]
        words = IN_WORDS | ({"held": "waiting for others"} if trace.protocol == GOSSIP else {})
        colors = {words[name]: PHASES[name] for name in IN_WORDS}
    total = len(commits)
    largest = None
    if trace.protocol == GOSSIP and run is not None and "central_energy" in run.commits:
        # The energy is half the square of this distance; a diverged run has fewer commits.
        distance = np.sqrt(2 * run.commits["central_energy"].replace(np.inf, np.nan))
        largest = float(distance.max()) or 1.0
        commits = commits.reset_index(drop=True).assign(distance=distance)
    commits = commits.iloc[:MOST_COMMITS]
    commits = commits[commits["worker"] < MOST_LANES]
    end = float(commits["time"].max()) if len(commits) else 1.0
    marks = [
        [int(absence.worker), absence.kind, absence.begin, absence.end, int(absence.version)]
        for absence in trace.absences.itertuples()
        if absence.begin <= end
    ]
    return {
        "title": title,
        "noun": noun,
        "lanes": min(lanes, MOST_LANES),
        "workers": lanes,
        "commits": len(commits),
        "total": total,
        "end": end,
        "ticks": _TICKS,
        "time": "time (s)" if trace.cluster is None else "simulated time (s)",
        "phases": list(colors.items()),
        "rounds": bool(trace.rollouts is None and trace.policy.chooses_when_to_reply),
        "gossip": trace.protocol == GOSSIP,
        "largest_distance": largest,
        "marks": marks[:MOST_COMMITS],
        "curves": _curves(run, end),
        "columns": pack(_columns(trace, commits, intervals, end, largest)),
    }


def _columns(
    trace: Trace,
    commits: pd.DataFrame,
    intervals: Sequence[pd.DataFrame],
    end: float,
    largest: float | None,
) -> dict[str, np.ndarray]:
    """Return the columns of integers of `timeline`; times are in ticks.

    ``intervals``: by phase, a table of worker, begin and end (s).
    """
    ticks = _TICKS / end if end > 0 else 1.0

    def in_ticks(times: Any) -> np.ndarray:
        return np.round(np.clip(np.asarray(times, float), 0, end) * ticks).astype(np.int64)

    columns: dict[str, np.ndarray] = {
        "worker": commits["worker"],
        "time": np.diff(in_ticks(commits["time"]), prepend=0),
        "age": in_ticks(commits["time"]) - in_ticks(commits["read_time"]),
        "version": np.diff(commits["version"], prepend=0),
        "read": commits["version"] - commits["read_version"],
        "staleness": commits["staleness"],
    }
    if largest is not None:
        columns["distance"] = (commits["distance"].fillna(0) / largest * _TICKS).round()
    for number, table in enumerate(intervals):
        table = table[(table["begin"] < end) & (table["worker"] < MOST_LANES)]
        table = table.sort_values(["worker", "begin"], kind="stable")
        begin, until = in_ticks(table["begin"]), in_ticks(table["end"])
        columns |= {
            f"lane{number}": np.diff(table["worker"], prepend=0),
            f"begin{number}": np.diff(begin, prepend=0),
            f"length{number}": until - begin,
        }
    if trace.protocol == GOSSIP:
        sender, receiver, sent, mixed = _messages(trace, end)
        columns |= {
            "sender": sender,
            "receiver": receiver,
            "sent": np.diff(in_ticks(sent), prepend=0),
            "journey": in_ticks(mixed) - in_ticks(sent),
        }
    return columns


def _commits(trace: Trace) -> pd.DataFrame:
    """Return the accepted messages: worker, time, time of their read, versions, staleness."""
    frame = trace.accepted.frame
    return frame[["worker", "read_version", "version", "staleness"]].assign(
        time=frame["commit_time"], read_time=frame["read_time"].fillna(0.0)
    )


def _samples(trace: Trace) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Return the trained samples as commits of their slots, and the phases of all samples."""
    samples = trace.samples
    trained = samples[samples["outcome"] == "trained"].sort_values("take_time", kind="stable")
    commits = pd.DataFrame(
        {
            "worker": trained["slot"],
            "time": trained["take_time"],
            "read_time": trained["start_time"],
            "read_version": trained["read_version"],
            "version": trained["version"],
            "staleness": trained["staleness"],
        }
    )
    last = samples[["end_time", "take_time"]].max().max()
    intervals = [
        pd.DataFrame(
            {"worker": samples["slot"], "begin": samples[begin], "end": samples[end].fillna(last)}
        ).dropna()
        for begin, end in (("start_time", "end_time"), ("ready_time", "take_time"))
    ]
    return commits, intervals


def _messages(trace: Trace, end: float) -> tuple[np.ndarray, ...]:
    """Return sender, receiver, time of sending and of mixing of the messages between workers."""
    frame, taken_up = trace.frame, trace.taken_up
    worker, commit_time = frame["worker"].to_numpy(), frame["commit_time"].to_numpy()
    row, source = taken_up["row"].to_numpy(), taken_up["source"].to_numpy()
    mixed = frame["start_time"].to_numpy() if trace.takes_up == "read" else commit_time
    pairs = np.flatnonzero(frame["partner"].to_numpy() >= 0)
    partner = frame["partner"].to_numpy()[pairs]
    sender = np.concatenate([worker[source], worker[pairs]])
    receiver = np.concatenate([worker[row], partner])
    sent = np.concatenate([commit_time[source], commit_time[pairs]])
    mixing = np.concatenate([mixed[row], commit_time[pairs]])
    visible = np.flatnonzero((sender != receiver) & (mixing <= end))
    visible = visible[np.argsort(sent[visible], kind="stable")][:MOST_COMMITS]
    return sender[visible], receiver[visible], sent[visible], mixing[visible]


def _curves(run: Run | None, end: float) -> list[tuple[str, list[list[float]]]]:
    """Return titles and points (s, value) of the run's training loss and, without a server, of the
    mean squared distance of the replicas from their mean.
    """
    if run is None:
        return []
    titles = {"train_loss": "training loss", "consensus_distance": "replicas' spread"}
    table = run.evaluations[run.evaluations["commit_time"] <= end]
    return [
        (title, table[["commit_time", name]].to_numpy(float).tolist())
        for name, title in titles.items()
        if name in table
    ]
