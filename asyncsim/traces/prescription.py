"""Traces from a stated staleness, for papers that state a delay instead of a cluster."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncsim.base.errors import InputError, require_count, require_memory
from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import as_workers
from asyncsim.clusters.laws import Constant, Law, as_law
from asyncsim.traces.columns import TABLES, Source, table_of
from asyncsim.traces.trace import Trace

#: Draws made at once, so that a longer trace starts like a shorter one under every law.
_BLOCK = 1024

#: Memory (bytes) that a commit takes at the least: the columns.
_COMMIT_BYTES = 100


def prescribed(
    staleness: float | str | Law | Sequence[int] | np.ndarray,
    commits: int,
    workers: int,
    window: int = 1,
    seed: int = 0,
) -> Trace:
    """Build a trace with a stated staleness.

    Commit ``k`` (from 0) is made by worker ``k % workers`` as its job ``k // workers``, and its
    gradient is computed from version ``k - staleness``. Workers commit in turn, each once a second:
    commit ``k`` happens at ``(k + 1) / workers`` seconds, and a version is read when it is made. No
    commit can be staler than there are versions: the staleness of commit ``k`` is at most ``k``.

    The staleness alone decides from which version a gradient is computed. So a worker may start a
    job before its earlier one is committed (several computations in flight), or hold a read idle; a
    worker's index only selects the data and the local state of a job.

    A fixed delay is no substitute for workers that differ from step to step: with the same mean, it
    diverges at learning rates at which gradients of random staleness still converge.

    Parameters
    ----------
    staleness : number, text, Law, or sequence of int
        A whole number: the same for all. A law (or its text), with its mean in versions:
        independent draws, rounded to whole numbers. A sequence, an array or a column: one per
        commit.
    commits : int
        Length of the trace. A longer one starts like a shorter one.
    workers : int
        The number of workers, which take turns.
    window : int
        Local steps per commit.
    seed : int
        Names the random numbers.

    Returns
    -------
    Trace
        With ``protocol`` ``"prescribed"``, without a cluster and without open reads.
    """
    commits = require_count("commits", commits)
    workers = as_workers(workers)
    window = require_count("window", window)
    seed = require_count("seed", seed, minimum=0)
    require_memory(f"commits = {commits}", "a trace of so many", commits * _COMMIT_BYTES)
    source = Source(workers=workers, protocol="prescribed", window=window, seed=seed)
    commit = np.arange(commits)
    read_version = commit - np.minimum(_stated(staleness, commits, seed), commit)
    read_time, commit_time = read_version / workers, (commit + 1) / workers
    worker, job = commit % workers, commit // workers
    reads = {"worker": worker, "job": job, "version": read_version}
    reads |= dict.fromkeys(("arrive_time", "serve_time", "time"), read_time)
    steps = {"worker": worker, "job": job, "local_steps": np.full(commits, window), "read": commit}
    steps |= {"version": commit + 1, "start_time": read_time}
    steps |= dict.fromkeys(("send_time", "arrive_time", "serve_time", "commit_time"), commit_time)
    messages = {"worker": worker, "step": commit, "by": commit, "arrive_time": commit_time}
    tables = {"steps": steps, "reads": reads, "messages": messages}
    return Trace(
        source,
        **{
            name: table_of(name, tables.get(name, {}), commits * (name in tables))
            for name in TABLES
        },
    )


def _stated(staleness: Any, commits: int, seed: int) -> np.ndarray:
    """Return the staleness asked for, shape ``[commits]``, not yet clipped below by the start."""
    if hasattr(staleness, "to_numpy"):  # a column of a table
        staleness = staleness.to_numpy()
    if (
        isinstance(staleness, Sequence | np.ndarray)
        and not isinstance(staleness, str)
        and np.ndim(staleness)
    ):
        return _listed(staleness, commits)
    try:
        law = as_law("staleness", staleness)
    except InputError as error:
        # Laws speak of durations; here they are of versions.
        raise InputError(
            str(error).replace("(seconds)", "(versions)").replace("of seconds", "of versions")
        ) from None
    if isinstance(law, Constant):
        if law.value != round(law.value):
            raise InputError(
                f"staleness = {staleness!r}: must be a whole number of versions; for a mean of "
                "that, give a law"
            )
        return np.full(commits, min(int(law.value), commits))
    streams = Streams(seed, "prescribed staleness")
    blocks = [
        law.sample(streams.generator(0, block), _BLOCK) for block in range(-(-commits // _BLOCK))
    ]
    draws = np.concatenate(blocks)[:commits]
    return np.rint(np.minimum(draws, commits)).astype(np.int64)


def _listed(staleness: Any, commits: int) -> np.ndarray:
    if len(staleness) != commits:
        raise InputError(
            f"staleness = a list of {len(staleness)}: must hold one per commit, and there are "
            f"{commits}"
        )
    return np.array(
        [
            min(require_count(f"staleness[{k}]", value, minimum=0), commits)
            for k, value in enumerate(staleness)
        ]
    )
