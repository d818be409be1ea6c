"""The frames of an animation: where each worker's read is, what the worker does, and how large the loss is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.replays.recorders import POSITION
from asyncsim.replays.run import Run
from asyncsim.traces.columns import GOSSIP
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import phases

#: Most workers that are drawn; of more workers these are spread evenly from the first to the last.
MOST_WORKERS = 128
#: The measures of offsets: with recorded positions, and without.
DISTANCE, STALENESS = "distance of the read from the central variable", "present staleness of the read (versions)"
#: Most reads from which the plane of their largest spread is computed.
_SAMPLE = 4000
#: The radius at which the axis of distances changes from linear to logarithmic.
_BEND = 0.6
#: Most messages between workers that are drawn.
_MOST_MESSAGES = 20_000


class Film(NamedTuple):
    """One run along the frames; ``F`` frames, ``W`` workers.

    Attributes
    ----------
    title : str
    workers : Int[ndarray, "W"]
        Which workers are drawn.
    phase : UInt8[ndarray, "F W"]
        The worker's phase, an index into ``names``; ``len(names)`` for none.
    progress : UInt8[ndarray, "F W"]
        How much of the phase is over; 255 for all of it.
    offset : Float[ndarray, "F W 2"]
        The worker's read minus the central variable, projected to a plane and stretched to the length of the whole
        difference; or, without recorded positions, with the staleness as its length. NaN where nothing is known.
    measure : str
        What the length of ``offset`` means.
    names : tuple of str
        The phases.
    commits : Int[ndarray, "F"]
        Commits so far.
    loss : list of [time, loss]
        The training loss at the run's evaluations.
    ended : float or None
        When the run diverged (s).
    messages : Float[ndarray, "messages 4"] or None
        Without a server: sender and receiver (indices into ``workers``), time of sending and of mixing (s).
    """

    title: str
    workers: np.ndarray
    phase: np.ndarray
    progress: np.ndarray
    offset: np.ndarray
    measure: str
    names: tuple[str, ...]
    commits: np.ndarray
    loss: list[list[float]]
    ended: float | None
    messages: np.ndarray | None


def frame_times(traces: Sequence[Trace], frames: int) -> np.ndarray:
    """Return the simulated times (s) of the frames, spread evenly from 0 to the end of the longest trace."""
    return np.linspace(0.0, max(float(trace.frame["commit_time"].iloc[-1]) for trace in traces), frames)


def film(run: Run, trace: Trace, times: np.ndarray, title: str) -> Film:
    """Return the frames of a run at some times (s).

    Raises
    ------
    InputError
        The run is not of this trace.
    """
    if run.config.get("commits", len(trace.accepted)) != len(trace.accepted):
        raise InputError(f"{title}: its run has {run.config['commits']} commits, the trace {len(trace.accepted)}")
    count = min(trace.workers, MOST_WORKERS)
    workers = np.unique(np.linspace(0, trace.workers - 1, count).round().astype(int))
    phase, progress, names = _doing(trace, workers, times)
    accepted = trace.accepted.frame
    commits = np.searchsorted(accepted["commit_time"].to_numpy(), times, side="right")
    columns = [name for name in run.commits if name.startswith(POSITION)]
    ended = None if run.diverged_at is None else float(run.commits["commit_time"].iloc[-1])
    read = _reads(trace, workers, times)
    versions = np.r_[0, accepted["version"].to_numpy()]
    if columns and trace.protocol != GOSSIP:
        positions = np.full((len(accepted) + 1, len(columns)), np.nan)
        positions[0] = 0.0
        positions[1 : len(run.commits) + 1] = run.commits[columns]
        # The central variable of a version is as its last commit has left it.
        made = np.searchsorted(accepted["version"].to_numpy(), np.maximum(read, 0), side="right")
        away = positions[made] - positions[commits][:, None]
        away[read < 0] = np.nan
        offset, measure = _in_a_plane(away), DISTANCE
    else:
        stale = np.where(read < 0, np.nan, versions[commits][:, None] - read)
        angle = 2 * np.pi * np.arange(len(workers)) / len(workers)
        offset = stale[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
        measure = STALENESS
    if ended is not None:
        offset[times > ended] = np.nan
    known = run.evaluations[["commit_time", "train_loss"]].replace([np.inf, -np.inf], np.nan).dropna()
    loss = known.to_numpy().tolist()
    messages = _messages(trace, workers) if trace.protocol == GOSSIP else None
    return Film(title, workers, phase, progress, offset, measure, names, commits, loss, ended, messages)


def scale(films: Sequence[Film]) -> tuple[float, float]:
    """Return two lengths: nearly the largest of the film with the shortest offsets, and nearly the largest of all.

    Up to the first the axis of distances is linear, beyond it logarithmic, so that a run that flies apart and one that
    does not can be seen side by side.
    """
    lengths = [np.linalg.norm(one.offset, axis=-1) for one in films]
    largest = [float(np.nanquantile(values, 0.98)) for values in lengths if np.isfinite(values).any()]
    bend = min((value for value in largest if value > 0), default=1.0)
    return bend, max([bend, *largest])


def on_screen(offset: np.ndarray, bend: float, largest: float) -> np.ndarray:
    """Return offsets with the lengths at which they are drawn: 1 for ``largest``, at most 1.1."""
    length = np.linalg.norm(offset, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(length > 0, offset / length * _radius(length, bend, largest), 0.0 * offset)


def _radius(length: Any, bend: float, largest: float) -> Any:
    """Return the radius at which a length is drawn: up to `_BEND` below ``bend``, if ``largest`` is clearly longer."""
    if largest < 1.5 * bend:
        return np.minimum(length / largest, 1.1)
    beyond = _BEND + (1 - _BEND) * np.log(np.maximum(length, bend) / bend) / np.log(largest / bend)
    return np.minimum(np.where(length <= bend, _BEND * length / bend, beyond), 1.1)


def rings(bend: float, largest: float) -> list[tuple[float, float]]:
    """Return a few round distances and their radii: one below the bend, and powers of ten beyond it."""
    power = 10.0 ** np.floor(np.log10(bend))
    inside = power * max(step for step in (1, 2, 5) if step * power <= bend)
    powers = 10.0 ** np.arange(np.floor(np.log10(bend)) + 1, np.floor(np.log10(largest)) + 1)
    steps = [inside, *powers[:: max(1, -(-len(powers) // 3))]]
    return [(float(step), float(_radius(np.float64(step), bend, largest))) for step in steps]


def _doing(trace: Trace, workers: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the phase of each worker in each frame, its progress, and the names of the phases; see `Film`."""
    found = phases(trace, workers.tolist())
    place = {int(worker): column for column, worker in enumerate(workers)}
    phase = np.full((len(times), len(workers)), len(found._fields), np.uint8)
    progress = np.zeros_like(phase)
    for code, table in enumerate(found):
        begin, end = table["begin"].to_numpy(), table["end"].to_numpy()
        first, last = np.searchsorted(times, begin, side="left"), np.searchsorted(times, end, side="left")
        lengths = np.maximum(last - first, 0)
        of = np.repeat(np.arange(len(table)), lengths)
        frame = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        column = np.array([place[int(worker)] for worker in table["worker"]], int)[of]
        phase[frame, column] = code
        progress[frame, column] = 255 * (times[frame] - begin[of]) / np.maximum(end - begin, 1e-300)[of]
    return phase, progress, found._fields


def _reads(trace: Trace, workers: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the version that each worker holds in each frame, -1 before its first."""
    tables = [trace.frame, trace.open_reads] if len(trace.open_reads) else [trace.frame]
    reads = pd.concat([table[["worker", "read_time", "read_version"]] for table in tables])
    held = np.full((len(times), len(workers)), -1, np.int64)
    for column, worker in enumerate(workers):
        own = reads[(reads["worker"] == worker) & reads["read_time"].notna()].sort_values("read_time", kind="stable")
        newest = np.searchsorted(own["read_time"].to_numpy(), times, side="right") - 1
        held[:, column] = np.where(newest < 0, -1, own["read_version"].to_numpy()[newest] if len(own) else -1)
    return held


def _in_a_plane(away: np.ndarray) -> np.ndarray:
    """Turn vectors into the plane of their two largest directions, keeping each one's whole length."""
    flat = away.reshape(-1, away.shape[-1])
    sample = flat[np.isfinite(flat).all(1)]
    sample = sample[:: max(1, len(sample) // _SAMPLE)]
    if not len(sample) or not sample.any():
        return np.zeros((*away.shape[:-1], 2))
    # All of one length: a few that fly away would else determine the plane alone.
    sample = sample / np.maximum(np.linalg.norm(sample, axis=1, keepdims=True), 1e-300)
    _, _, directions = np.linalg.svd(sample, full_matrices=False)
    plane = directions[:2]
    plane = plane * np.where(plane[:, :1] < 0, -1.0, 1.0)  # the sign is free: the same on every machine
    flat_in_plane = away @ plane.T
    inside = np.linalg.norm(flat_in_plane, axis=-1, keepdims=True)
    whole = np.linalg.norm(away, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(inside > 0, flat_in_plane / inside * whole, 0 * flat_in_plane)


def _messages(trace: Trace, workers: np.ndarray) -> np.ndarray:
    """Return the messages between drawn workers; see `Film`.

    A message begins with the commit that sent it and ends when it is mixed; an exchange in pairs is drawn for a moment.
    """
    frame = trace.frame
    of, commit_time = frame["worker"].to_numpy(), frame["commit_time"].to_numpy()
    found = trace.taken_up
    row, source = found["row"].to_numpy(), found["source"].to_numpy()
    taken = (frame["start_time"].to_numpy() if trace.source.takes_up == "read" else commit_time)[row]
    pairs = frame["partner"].to_numpy() >= 0
    moment = 0.2 * commit_time[-1] * trace.workers / max(1, len(frame))
    messages = np.concatenate(
        [
            np.stack([of[source], of[row], commit_time[source], taken], -1),
            np.stack([of, frame["partner"].to_numpy(), commit_time - moment, commit_time], -1)[pairs],
        ]
    )
    place = np.full(trace.workers, -1)
    place[workers] = np.arange(len(workers))
    messages[:, :2] = place[messages[:, :2].astype(int)]
    messages = messages[(messages[:, :2] >= 0).all(1) & (messages[:, 0] != messages[:, 1])]
    return messages[:: max(1, -(-len(messages) // _MOST_MESSAGES))]
