"""The frames of an animation: the position of each worker, and the loss; see `Film`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.replays.run import POSITION, Run, leaders
from asyncsim.traces.columns import GOSSIP
from asyncsim.traces.trace import Trace

#: Largest number of drawn workers; of more workers an evenly spread selection is drawn.
MOST_WORKERS = 128
#: Largest sample of reads for the plane of their largest spread.
_SAMPLE = 4000
#: The radius at which the axis of distances changes from linear to logarithmic.
_BEND = 0.6
#: Forces on the replicas of methods.
_FORCES = dict.fromkeys(("aeasgd", "eamsgd", "easgd", "parle"), "spring") | {"lsgd": "leader"}


class Film(NamedTuple):
    """The frames of one run; ``F`` frames, ``W`` workers.

    Attributes
    ----------
    title : str
    workers : Int[ndarray, "W"]
        The drawn workers.
    offset : Float[ndarray, "F W 2"]
        The worker's read minus the central variable, projected to a plane and stretched to the
        length of the whole difference; NaN if unknown. None without a server.
    loss : list of [time, loss]
        The training loss at the run's evaluations.
    ended : float or None
        Time at which the run diverged (s).
    force : {"spring", "leader", ""}
        The force on replicas: springs to the central variable, or a pull to a leader.
    leader : Int[ndarray, "F"]
        The leader, an index into ``workers``; -1 for none.
    """

    title: str
    workers: np.ndarray
    offset: np.ndarray | None
    loss: list[list[float]]
    ended: float | None
    force: str
    leader: np.ndarray


def frame_times(traces: Sequence[Trace], frames: int) -> np.ndarray:
    """Space the frames' simulated times (s) evenly from 0 to the end of the longest trace."""
    return np.linspace(
        0.0, max(float(trace.frame["commit_time"].iloc[-1]) for trace in traces), frames
    )


def film(run: Run, trace: Trace, times: np.ndarray, title: str) -> Film:
    """Compute the frames of a run at the given times (s).

    Raises
    ------
    InputError
        If the run belongs to another trace, or has no recorded positions.
    """
    if run.config.get("commits", len(trace.accepted)) != len(trace.accepted):
        raise InputError(
            f"{title}: its run has {run.config['commits']} commits, the trace {len(trace.accepted)}"
        )
    count = min(trace.workers, MOST_WORKERS)
    workers = np.unique(np.linspace(0, trace.workers - 1, count).round().astype(int))
    accepted = trace.accepted.frame
    commits = np.searchsorted(accepted["commit_time"].to_numpy(), times, side="right")
    ended = None if run.diverged_at is None else float(run.commits["commit_time"].iloc[-1])
    offset = None
    if trace.protocol != GOSSIP:
        offset = _in_a_plane(_away(run, trace, workers, times, commits, title))
        if ended is not None:
            offset[times > ended] = np.nan
    evaluations = (
        run.evaluations[["commit_time", "train_loss"]].replace([np.inf, -np.inf], np.nan).dropna()
    )
    loss = evaluations.to_numpy().tolist()
    force = _FORCES.get(run.config.get("method", ""), "")
    leader = np.full(len(times), -1)
    if force == "leader":
        place = np.full(trace.workers, -1)
        place[workers] = np.arange(len(workers))
        elected = np.r_[-1, place[leaders(run.commits, trace.workers)]]
        leader = elected[np.minimum(commits, len(run.commits))]
    return Film(title, workers, offset, loss, ended, force, leader)


def _away(
    run: Run, trace: Trace, workers: np.ndarray, times: np.ndarray, commits: np.ndarray, title: str
) -> np.ndarray:
    """Return the recorded positions of each worker's read, relative to the central variable's."""
    columns = [name for name in run.commits if name.startswith(POSITION)]
    if not columns:
        raise InputError(f"{title}: has no positions; run the study with --animate")
    accepted = trace.accepted.frame
    positions = np.full((len(accepted) + 1, len(columns)), np.nan)
    positions[0] = 0.0
    positions[1 : len(run.commits) + 1] = run.commits[columns]
    read = _reads(trace, workers, times)
    # The central variable of a version is as its last commit left it.
    versions = accepted["version"].to_numpy()
    commit_of_read = np.searchsorted(versions, np.maximum(read, 0), side="right")
    away = positions[commit_of_read] - positions[commits][:, None]
    away[read < 0] = np.nan
    return away


def scale(films: Sequence[Film]) -> tuple[float, float]:
    """Return nearly the largest length of the film with the shortest offsets, and of all films.

    The axis of distances is linear up to the first and logarithmic beyond it, so that a diverging
    run and a converging one can be seen side by side.
    """
    lengths = [np.linalg.norm(film.offset, axis=-1) for film in films if film.offset is not None]
    largest = [
        float(np.nanquantile(values, 0.98)) for values in lengths if np.isfinite(values).any()
    ]
    bend = min((value for value in largest if value > 0), default=1.0)
    return bend, max([bend, *largest])


def on_screen(offset: np.ndarray, bend: float, largest: float) -> np.ndarray:
    """Scale offsets to the length at which they are drawn: 1 for ``largest``, at most 1.1."""
    length = np.linalg.norm(offset, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(length > 0, offset / length * _radius(length, bend, largest), 0.0 * offset)


def _radius(length: Any, bend: float, largest: float) -> Any:
    """Return a length's radius: at most `_BEND` up to ``bend`` if ``largest`` is clearly longer."""
    if largest < 1.5 * bend:
        return np.minimum(length / largest, 1.1)
    beyond = _BEND + (1 - _BEND) * np.log(np.maximum(length, bend) / bend) / np.log(largest / bend)
    return np.minimum(np.where(length <= bend, _BEND * length / bend, beyond), 1.1)


def rings(bend: float, largest: float) -> list[tuple[float, float]]:
    """Return some round distances and radii: one below the bend, and powers of ten beyond."""
    power = 10.0 ** np.floor(np.log10(bend))
    inside = power * max(step for step in (1, 2, 5) if step * power <= bend)
    powers = 10.0 ** np.arange(np.floor(np.log10(bend)) + 1, np.floor(np.log10(largest)) + 1)
    steps = [inside, *powers[:: max(1, -(-len(powers) // 3))]]
    return [(float(step), float(_radius(np.float64(step), bend, largest))) for step in steps]


def _reads(trace: Trace, workers: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the version of each worker's last read in each frame, -1 before its first."""
    tables = [trace.frame, trace.open_reads] if len(trace.open_reads) else [trace.frame]
    reads = pd.concat([table[["worker", "read_time", "read_version"]] for table in tables])
    versions = np.full((len(times), len(workers)), -1, np.int64)
    for column, worker in enumerate(workers):
        rows = reads[(reads["worker"] == worker) & reads["read_time"].notna()].sort_values(
            "read_time", kind="stable"
        )
        newest = np.searchsorted(rows["read_time"].to_numpy(), times, side="right") - 1
        versions[:, column] = np.where(
            newest < 0, -1, rows["read_version"].to_numpy()[newest] if len(rows) else -1
        )
    return versions


def _in_a_plane(away: np.ndarray) -> np.ndarray:
    """Project vectors to the plane of their two largest directions, preserving their lengths."""
    flat = away.reshape(-1, away.shape[-1])
    sample = flat[np.isfinite(flat).all(1)]
    sample = sample[:: max(1, len(sample) // _SAMPLE)]
    if not len(sample) or not sample.any():
        return np.zeros((*away.shape[:-1], 2))
    # Normalised, because a few vectors that fly away would otherwise determine the plane alone.
    sample = sample / np.maximum(np.linalg.norm(sample, axis=1, keepdims=True), 1e-300)
    _, _, directions = np.linalg.svd(sample, full_matrices=False)
    plane = directions[:2]
    plane = plane * np.where(plane[:, :1] < 0, -1.0, 1.0)  # fixes the free sign on every machine
    flat_in_plane = away @ plane.T
    inside = np.linalg.norm(flat_in_plane, axis=-1, keepdims=True)
    lengths = np.linalg.norm(away, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(inside > 0, flat_in_plane / inside * lengths, 0 * flat_in_plane)
