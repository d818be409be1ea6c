"""Traces from a stated staleness, for papers that state a delay instead of a cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncsim.base.errors import InputError, require_choice, require_count, require_memory
from asyncsim.base.streams import Streams
from asyncsim.clusters.laws import Constant, Law, as_law
from asyncsim.clusters.workers import as_workers
from asyncsim.traces.columns import TABLES, Source, table_of
from asyncsim.traces.trace import Trace

#: Draws made at once, so that a longer trace starts like a shorter one under every law.
_BLOCK = 1024

#: Memory (bytes) that a commit takes at the least: the columns; of several groups, for each.
_COMMIT_BYTES = 100

#: The versions at which the stages of a pipeline compute.
PIPELINES = ("stashed", "2bw")
#: Pipelines whose gradients no read determines.
_UNSTASHED = ("pipemare", "unstashed", "none")

Staleness = float | str | Law | Sequence[int] | np.ndarray


def prescribed(
    staleness: Staleness | Mapping[str, Staleness],
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
    staleness : number, text, Law, or sequence of int; or a mapping to these
        A whole number: the same for all. A law (or its text), with its mean in versions:
        independent draws, rounded to whole numbers. A sequence, an array or a column: one per
        commit.

        A mapping gives each group of tensors its own: ``{"0": 24, "1,2": 0}`` computes every
        gradient from the first layer of 24 versions ago and from the newest other two. All groups
        are committed at one instant. A group names parts of the problem's tree, see
        `asyncsim.problems.partition`; together the groups have all its tensors. Groups draw
        independently.
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
        With ``protocol`` ``"prescribed"``, without a cluster and without open reads. With groups,
        ``reads`` also has a row for each ``shard`` of a read, and the ``read_version`` and
        ``staleness`` of a row of ``frame`` belong to its oldest group.

    Raises
    ------
    InputError
        For arguments outside their range. Whether the groups are a partition of the problem's
        tensors is checked in a replay.
    """
    commits = require_count("commits", commits)
    workers = as_workers("workers", workers)
    window = require_count("window", window)
    seed = require_count("seed", seed, minimum=0)
    groups: tuple[str, ...] | int = 1
    stated: list[tuple[str, str, Staleness]]
    if isinstance(staleness, Mapping):
        groups = _require_groups("staleness", staleness)
        stated = [(f"staleness[{name!r}]", f" {name}", value) for name, value in staleness.items()]
    else:
        stated = [("staleness", "", staleness)]
    require_memory(
        f"commits = {commits}", "a trace of so many", commits * len(stated) * _COMMIT_BYTES
    )
    delays = [
        _stated(argument, value, commits, Streams(seed, f"prescribed staleness{stream}"))
        for argument, stream, value in stated
    ]
    source = Source(workers=workers, protocol="prescribed", window=window, seed=seed, groups=groups)
    return _trace_of(source, np.stack(delays, axis=1))


def pipeline(
    stages: int | Sequence[str],
    commits: int,
    versions: str = "stashed",
    window: int = 1,
    seed: int = 0,
) -> Trace:
    """Build the trace of a pipeline of stages, each with some of the problem's layers.

    Commit ``m`` is the gradient of microbatch ``m``, by one worker. Stage ``p`` of ``P`` computes
    both its passes from one version of its parameters (from version 0 while there is no older one).

    Parameters
    ----------
    stages : int or sequence of str
        The number of stages, which get runs of layers of about equally many parameters; at most as
        many as the problem has layers. Or the groups of tensors of each stage, in order, see
        `asyncsim.problems.partition`: needed where the problem's tree is a table, whose entries
        have no order.
    commits : int
        Microbatches.
    versions : {"stashed", "2bw"}
        ``"stashed"``: PipeDream with weight stashing, version ``m - (P - 1 - p)``: the first stage
        is the stalest, and the last one has no delay. ``"2bw"``: PipeDream-2BW, ``m - 1`` at every
        stage; there a microbatch stands for the several whose gradients it accumulates.
    window : int
        Local steps per commit.
    seed : int
        Of the trace; nothing is drawn.

    Returns
    -------
    Trace
        As of `prescribed` with the staleness of each stage.

    Raises
    ------
    InputError
        For arguments outside their range; for pipelines that keep no earlier weights, PipeMare for
        example, whose backward pass uses newer weights than the forward pass: their gradients
        are of no single point, and no read describes them.

    References
    ----------
    Narayanan et al. 2019, "PipeDream", SOSP, section 3.3. Narayanan et al. 2021,
    "Memory-efficient pipeline-parallel DNN training", arXiv 2006.09503: PipeDream-2BW. Yang et al.
    2021, "PipeMare", arXiv 1910.05124.
    """
    groups: tuple[str, ...] | int
    groups = (
        require_count("stages", stages) if _is_number(stages) else _require_groups("stages", stages)
    )
    commits = require_count("commits", commits)
    if isinstance(versions, str) and versions.lower() in _UNSTASHED:
        raise InputError(
            f"versions = {versions!r}: without stashed weights the backward pass uses other "
            "versions than the forward pass, so that the gradient is of no single point; choose "
            f"one of {', '.join(PIPELINES)}"
        )
    require_choice("versions", versions, PIPELINES)
    source = Source(
        workers=1,
        protocol="prescribed",
        window=require_count("window", window),
        seed=require_count("seed", seed, minimum=0),
        groups=groups,
    )
    require_memory(
        f"commits = {commits}", "a trace of so many", commits * source.shards * _COMMIT_BYTES
    )
    of_stages = (
        np.arange(source.shards)[::-1] if versions == "stashed" else np.ones(source.shards, int)
    )
    return _trace_of(source, np.broadcast_to(of_stages, (commits, source.shards)))


def _is_number(value: Any) -> bool:
    return not isinstance(value, Sequence) or isinstance(value, str)


def _require_groups(argument: str, groups: Any) -> tuple[str, ...]:
    """Return the names of groups of tensors; raise InputError unless they are texts, and differ."""
    example = '{"0": 4, "1,2": 0}' if isinstance(groups, Mapping) else '["0", "1,2"]'
    for group in groups:
        if not isinstance(group, str) or not group.strip():
            raise InputError(
                f"{argument}: {group!r} names no group of tensors; give texts, such as {example}"
            )
        if sum(group == name for name in groups) > 1:
            raise InputError(f"{argument}: the group {group!r} comes twice; give each once")
    if not groups:
        raise InputError(
            f"{argument} = {groups!r}: names no group of tensors; give one or several, such as "
            f"{example}"
        )
    return tuple(groups)


def _trace_of(source: Source, staleness: np.ndarray) -> Trace:
    """Build the trace of commits with a staleness of each shard, ``[commits, shards]``."""
    commits, shards = staleness.shape
    commit = np.arange(commits)
    version = commit[:, None] - np.minimum(staleness, commit[:, None])
    oldest = version.min(1)
    read_time, commit_time = oldest / source.workers, (commit + 1) / source.workers
    worker, job = commit % source.workers, commit // source.workers
    reads = {"worker": worker, "job": job, "version": oldest}
    if shards > 1:  # their rows follow, one for each shard of each read
        reads = {name: np.r_[values, np.repeat(values, shards)] for name, values in reads.items()}
        reads["version"][commits:] = version.ravel()
        reads["shard"] = np.r_[np.full(commits, -1), np.tile(np.arange(shards), commits)]
    reads |= dict.fromkeys(("arrive_time", "serve_time", "time"), reads["version"] / source.workers)
    steps = {"worker": worker, "job": job, "local_steps": np.full(commits, source.window)}
    steps |= {"read": commit, "version": commit + 1, "start_time": read_time}
    steps |= dict.fromkeys(("send_time", "arrive_time", "serve_time", "commit_time"), commit_time)
    messages = {"worker": worker, "step": commit, "by": commit, "arrive_time": commit_time}
    tables = {"steps": steps, "reads": reads, "messages": messages}
    return Trace(
        **vars(source),
        **{
            name: table_of(name, tables.get(name, {}), None if name in tables else 0)
            for name in TABLES
        },
    )


def _stated(argument: str, staleness: Any, commits: int, streams: Streams) -> np.ndarray:
    """Return the staleness asked for, shape ``[commits]``, not yet clipped below by the start."""
    if hasattr(staleness, "to_numpy"):  # a column of a table
        staleness = staleness.to_numpy()
    if (
        isinstance(staleness, Sequence | np.ndarray)
        and not isinstance(staleness, str)
        and np.ndim(staleness)
    ):
        return _listed(argument, staleness, commits)
    try:
        law = as_law(argument, staleness)
    except InputError as error:
        # Laws speak of durations; here they are of versions.
        raise InputError(
            str(error).replace("(seconds)", "(versions)").replace("of seconds", "of versions")
        ) from None
    if isinstance(law, Constant):
        if law.value != round(law.value):
            raise InputError(
                f"{argument} = {staleness!r}: must be a whole number of versions; for a mean of "
                "that, give a law"
            )
        return np.full(commits, min(int(law.value), commits))
    blocks = [
        law.sample(streams.generator(0, block), _BLOCK) for block in range(-(-commits // _BLOCK))
    ]
    draws = np.concatenate(blocks)[:commits]
    return np.rint(np.minimum(draws, commits)).astype(np.int64)


def _listed(argument: str, staleness: Any, commits: int) -> np.ndarray:
    if len(staleness) != commits:
        raise InputError(
            f"{argument} = a list of {len(staleness)}: must hold one per commit, and there are "
            f"{commits}"
        )
    return np.array(
        [
            min(require_count(f"{argument}[{k}]", value, minimum=0), commits)
            for k, value in enumerate(staleness)
        ]
    )
