"""Cutting a trace into pieces whose gradients can be computed at once, exactly.

A commit can be computed at position ``a`` of the trace if the read of its gradient and its worker's
previous commit both lie before ``a``. A *wave* is the longest run of such commits; a *piece* is the
part of the wave from its start that ``piece_size`` allows, and the unit that the replay computes.
Positions count commits: a read at position ``p`` sees the central variable after the first ``p``
commits.

Reads come in three kinds. After each commit, atomic with it (the exchange); before each commit,
atomic with it (read, then write); and separate ones, anywhere between two commits. A read waits in
a *slot* until the last commit that uses it: the worker's slot for the atomic kinds, else any free
slot. A read whose groups of tensors have several versions is several reads.

Without a server a commit depends only on its worker's previous commit and on the commits whose
messages it takes up. Where methods mix nothing, a worker reads its own message
(`asyncsim.replays.plan.Plan.layout`).
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.clusters.policy import asynchronous
from asyncsim.traces.trace import Trace


class Waves(NamedTuple):
    """The dependencies of a trace's commits; arrays have shape ``[commits]`` unless noted.

    Attributes
    ----------
    read, push : int array
        Positions of the read of the gradient, and of the read that the message is formed with.
    slot, push_slot : int array
        Where these reads wait; ``slot`` has shape ``[commits, groups]`` where `groups` has.
    slots, push_slots : int
    reads : {"after", "before", "separate", "message"}
        See the module's text.
    separate_pushes : bool
        Whether messages are formed with the central variable of a visit before the commit's own.
    depends_on : int array
        Running maximum of the first position at which the commit can be computed; never decreases.
    groups : int array, shape ``[commits, groups]``, or None
        Positions of the reads of groups of tensors, where they differ; ``read`` is the newest.
    gossip : Gossip or None
        Without a server, the messages that commits take up.
    separate_commits : bool array, or None
        With failures, the commits whose reads are separate although ``reads`` is "after".
    fresh : bool array, or None
        With failures, the commits of restarted workers.
    restores : Restores or None
        With outages, the server's restores of checkpoints.
    """

    read: np.ndarray
    push: np.ndarray
    slot: np.ndarray
    push_slot: np.ndarray
    slots: int
    push_slots: int
    reads: str
    separate_pushes: bool
    depends_on: np.ndarray
    groups: np.ndarray | None = None
    gossip: "Gossip | None" = None
    separate_commits: np.ndarray | None = None
    fresh: np.ndarray | None = None
    restores: "Restores | None" = None


class Restores(NamedTuple):
    """The restores of checkpoints by the server.

    Reads between a restore and the next commit have the position of the restore, as have reads just
    before it; ``read`` and ``push`` distinguish them.

    Attributes
    ----------
    position, checkpoint : int array, shape ``[restores]``
        The number of commits before each restore, ascending; and the number of these that stay.
    read, push : bool array, shape ``[commits]``
        Whether the reads of `Waves` are of a restored state.
    """

    position: np.ndarray
    checkpoint: np.ndarray
    read: np.ndarray
    push: np.ndarray


class Gossip(NamedTuple):
    """The messages of a trace without a server; the first axis is of commits.

    Attributes
    ----------
    sources : int array, shape ``[commits, most]``
        Slots in which the messages wait that a commit takes up.
    weights : float array, shape ``[commits, most]``
        Its share of each; zero beyond ``source_count``.
    source_count : int array
        The number of messages that it takes up.
    message_slot : int array
        The slot of the commit's message; -1 if no worker takes it up.
    slots : int
    kept_share : float array
        The share of its state that the worker kept when it sent its message.
    partner : int array
        The worker that a commit meets; -1 if none.
    senders : int array, shape ``[commits, most]``
        The workers that sent the messages; the number of workers beyond ``source_count``.
    changes : tuple of Change
        With absences, the lives and messages that end, and the lives that begin, in order.
    """

    sources: np.ndarray
    weights: np.ndarray
    source_count: np.ndarray
    message_slot: np.ndarray
    slots: int
    kept_share: np.ndarray
    partner: np.ndarray
    senders: np.ndarray
    changes: "tuple[Change, ...]" = ()


class Change(NamedTuple):
    """A change between two commits of a trace without a server.

    Attributes
    ----------
    position : int
        The number of commits before it.
    kind : {"message", "end", "begin"}
        A message is lost; a worker's life ends; or one begins.
    place : int
        The slot of the message, or the worker.
    share : float
        Of the message; or the share of its last message that the worker has kept.
    source : int
        The worker whose replica a returning worker copies; -1: the initial replica.
    """

    position: int
    kind: str
    place: int
    share: float = 1.0
    source: int = -1


class Reads(NamedTuple):
    """Separate reads in the order of their positions, shape ``[reads]``.

    Reads of the same position, as after a barrier, are one.
    """

    position: np.ndarray
    slot: np.ndarray


def find_waves(trace: Trace, same_reply: bool = False, used_at: np.ndarray | None = None) -> Waves:
    """Find the dependencies of a trace's commits.

    ``same_reply``: whether the commit that makes a version also forms the reply to its reads; then
    these are not atomic with the next commit. ``used_at``: the last commit before which the read of
    each row is used; else the row itself.
    """
    if trace.protocol == "gossip":
        return _find_gossip(trace)
    frame, fails = trace.frame, trace.has_failures
    worker, version, read_version, push_version = (
        frame[name].to_numpy() for name in ("worker", "version", "read_version", "push_version")
    )
    # With server buffers several commits share a version: a read has the position right after the
    # commit that made its version.
    read, push = (_first_position(versions, version) for versions in (read_version, push_version))
    before = read_version + frame["staleness"].to_numpy()
    separate_pushes = bool(np.any(push_version != before))
    previous = previous_commit(worker)
    fresh = np.zeros(len(trace), bool)
    if fails:
        incarnation = frame["incarnation"].to_numpy()
        fresh = incarnation != np.where(previous >= 0, incarnation[previous], 0)
    restores, read_restored = None, np.zeros(len(trace), bool)
    push_restored = read_restored
    if fails and (rows := np.flatnonzero(frame["restores"])).size:

        def is_restored(position: np.ndarray, versions: np.ndarray) -> np.ndarray:
            return (versions > 0) & (versions <= before[np.maximum(position - 1, 0)])

        # A restored version lies between two rows: its position is searched as the next row's, one
        # too many.
        read_restored = is_restored(read, read_version)
        if separate_pushes:
            push_restored = is_restored(push, push_version)
        read, push = read - read_restored, push - push_restored
        checkpoint = _first_position(frame["restored"].to_numpy()[rows], version)
        restores = Restores(rows, checkpoint, read_restored, push_restored)
    groups = None
    if trace.shards > 1:
        groups = _first_position(trace.group_versions(), version)
    separate_commits = None
    if fails and trace.protocol == "exchange" and trace.policy == asynchronous():
        # Workers that return, or that gave up a message, read between commits.
        reads = "after"
        separate_commits = read_restored | (read != np.where(previous >= 0, previous + 1, 0))
    else:
        reads = "separate" if fails or groups is not None else _kind_of_reads(read, previous)
        if reads == "before" and same_reply:
            reads = "separate"
    slot, slots = worker, trace.workers
    if reads == "separate":
        shared = (read, read_restored, used_at) if groups is None else (groups,)
        slot, slots = _share_slots(*shared)
    push_slot, push_slots = np.zeros_like(read), 0
    if separate_pushes:
        push_slot, push_slots = _share_slots(push, push_restored)
    if groups is not None:
        read = groups.max(1)
    return Waves(
        read,
        push,
        slot,
        push_slot,
        slots,
        push_slots,
        reads,
        separate_pushes,
        # The running maximum: pieces are contiguous, so a commit waits for all commits before it.
        depends_on=np.maximum.accumulate(np.maximum(read, previous + 1)),
        groups=groups,
        separate_commits=separate_commits,
        fresh=fresh if fresh.any() else None,
        restores=restores,
    )


def separate_reads(position: np.ndarray, slot: np.ndarray, shared: bool = True) -> Reads:
    """Return the separate reads in order, without version zero, which all slots hold at the start.

    ``position`` and ``slot`` have shape ``[commits]`` or ``[commits, groups]``. ``shared``: reads
    of the same position share a slot, and are one read.
    """
    position, slot = position.ravel(), slot.ravel()
    _, first = np.unique(position, return_index=True)
    order = first if shared else np.argsort(position, kind="stable")
    order = order[position[order] > 0]
    return Reads(position[order], slot[order])


def cut(
    waves: Any,
    piece_size: int,
    reads: tuple[Reads, ...],
    reads_size: int,
    starts: np.ndarray,
) -> np.ndarray:
    """Cut the trace into pieces, greedily.

    Parameters
    ----------
    waves : Waves
        Or other dependencies with ``depends_on``.
    piece_size : int
        Most commits of a piece.
    reads : tuple of Reads
    reads_size : int
        Most separate reads of each tuple's entry in a piece.
    starts : int array
        Positions at which a piece has to start.

    Returns
    -------
    int array, shape ``[pieces + 1]``
        The positions at which pieces start; the last is the number of commits.
    """
    commits = len(waves.depends_on)
    position = np.arange(commits)
    end = np.minimum(
        np.searchsorted(waves.depends_on, position, side="right"), position + piece_size
    )
    forced = np.r_[np.unique(starts), commits]
    end = np.minimum(end, forced[np.searchsorted(forced, position, side="right")])
    for kind in reads:
        reads_before = np.searchsorted(kind.position, position, side="right")
        padded = np.r_[kind.position, np.full(reads_size + 1, commits + 1)]
        end = np.minimum(end, padded[reads_before + reads_size] - 1)
    # A list: the loop below reads one element at a time, slow from an array.
    following = end.tolist()
    cuts, start = [0], 0
    while start < commits:
        start = following[start]
        cuts.append(start)
    return np.array(cuts)


def most_at_one_position(reads: Reads) -> int:
    """Return the largest number of reads at one position: a piece must have room for them."""
    return int(np.bincount(reads.position).max()) if len(reads.position) else 0


def _first_position(version: np.ndarray, version_after: np.ndarray) -> np.ndarray:
    return np.where(version > 0, np.searchsorted(version_after, version, side="left") + 1, 0)


def previous_commit(worker: np.ndarray) -> np.ndarray:
    """Return the position of the same worker's previous commit, -1 for its first."""
    order = np.argsort(worker, kind="stable")
    is_same_worker = worker[order][1:] == worker[order][:-1]
    previous = np.full(len(worker), -1)
    previous[order[1:][is_same_worker]] = order[:-1][is_same_worker]
    return previous


def _kind_of_reads(read: np.ndarray, previous: np.ndarray) -> str:
    later = previous >= 0
    if not np.any(read[~later]):
        if np.array_equal(read[later], previous[later] + 1):
            return "after"
        if np.array_equal(read[later], previous[later]):
            return "before"
    return "separate"


def _share_slots(
    read: np.ndarray, restored: Any = 0, used_at: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Assign a slot to each distinct read until its last use, using as few slots as possible.

    ``read``: positions, ``[commits]`` or ``[commits, groups]``. ``restored``: 1 for reads of a
    restored version, which differ from other reads of their position. ``used_at``: the commit that
    uses each read; else the read's row.
    """
    # Even numbers are usual reads, odd ones restored reads.
    distinct, group = np.unique(2 * read + restored, return_inverse=True)
    group = group.reshape(read.shape)
    last = np.zeros(len(distinct), int)
    used_at = np.arange(len(read)) if used_at is None else used_at
    by_group = used_at.reshape(-1, *[1] * (read.ndim - 1))
    np.maximum.at(last, group, np.broadcast_to(by_group, read.shape))
    slot, slots = allocate(distinct // 2, last)
    return slot[group], slots


def allocate(begin_at: np.ndarray, end_at: np.ndarray) -> tuple[np.ndarray, int]:
    """Assign slots to intervals, using as few as possible; ``begin_at`` never decreases."""
    slot = np.empty(len(begin_at), int)
    busy: list[tuple[int, int]] = []  # (when the slot is freed, slot)
    slots = 0
    for row, (begin, end) in enumerate(zip(begin_at.tolist(), end_at.tolist(), strict=True)):
        # A read at position p follows commit p - 1: a slot whose last commit is p - 1 is free.
        if busy and busy[0][0] < begin:
            free = heapq.heappop(busy)[1]
        else:
            free, slots = slots, slots + 1
        slot[row] = free
        heapq.heappush(busy, (end, free))
    return slot, slots


def _find_gossip(trace: Trace) -> Waves:
    """Find the dependencies without a server: workers' previous commits, and messages taken up."""
    frame, commits = trace.frame, len(trace)
    worker = frame["worker"].to_numpy()
    count = frame["sources"].map(len).to_numpy()
    rows = np.repeat(np.arange(commits), count)
    flat = np.concatenate([*frame["sources"], np.empty(0)]).astype(int)
    # A message waits until it is taken up for the last time, or is lost.
    last = np.full(commits, -1)
    np.maximum.at(last, flat, rows)
    lost = trace.in_flight[trace.in_flight["taker"] < 0]
    lost_row, lost_at = lost["row"].to_numpy(), _positions(trace, lost["arrive_time"])
    lost_at = np.maximum(lost_at, lost_row + 1)
    np.maximum.at(last, lost_row, lost_at - 1)
    sent = np.flatnonzero(last >= 0)
    slot, slots = allocate(sent, last[sent])
    message_slot = np.full(commits, -1)
    message_slot[sent] = slot
    in_use = np.arange(max(int(count.max(initial=0)), 1)) < count[:, None]
    sources, weights = np.zeros(in_use.shape, int), np.zeros(in_use.shape)
    newest = np.full(commits, -1)
    sources[in_use] = message_slot[flat]
    senders = np.full(in_use.shape, trace.workers)
    senders[in_use] = worker[flat]
    weights[in_use] = np.concatenate([*frame["weights"], np.empty(0)])
    np.maximum.at(newest, rows, flat)
    previous = previous_commit(worker)
    own_read = previous + 1
    kept_share, partner = frame["kept"].to_numpy(), frame["partner"].to_numpy()
    messages = zip(lost_at.tolist(), message_slot[lost_row].tolist(), lost["weight"], strict=True)
    changes = [Change(at, "message", slot, share) for at, slot, share in messages] + _lives(trace)
    changes.sort(key=lambda change: change.position)
    gossip = Gossip(
        sources, weights, count, message_slot, slots, kept_share, partner, senders, tuple(changes)
    )
    depends_on = np.maximum.accumulate(np.maximum(own_read, newest + 1))
    nowhere = np.zeros(commits, int)
    of_reads = own_read, own_read, worker, nowhere, trace.workers, 0, "message", False
    return Waves(*of_reads, depends_on, gossip=gossip)


def _positions(trace: Trace, times: pd.Series) -> np.ndarray:
    """Return the numbers of commits before some failures."""
    # At an instant failures come before commits: the left side.
    return np.searchsorted(trace.frame["commit_time"].to_numpy(), times.to_numpy(), side="left")


def _lives(trace: Trace) -> list[Change]:
    """Return the ends and begins of lives, in the order of time."""
    if trace.spells.empty:
        return []
    spells = trace.spells.sort_values("begin", kind="stable")
    begin_position, end_position = (_positions(trace, spells[name]) for name in ("begin", "end"))
    frame, kept_after = trace.frame, trace.kept_after
    number = spells.groupby("worker").cumcount().to_numpy()
    last = {
        life: row
        for row, life in enumerate(zip(frame["worker"], frame["incarnation"], strict=True))
    }
    # A life's first computation, finished or not, has the version from which it begins.
    reads = pd.concat([frame, trace.open_reads])[["worker", "read_arrive_time", "read_version"]]
    version = {
        (worker, time): version for worker, time, version in reads[::-1].itertuples(index=False)
    }
    timed = []
    positions = zip(
        spells.itertuples(),
        number.tolist(),
        begin_position.tolist(),
        end_position.tolist(),
        strict=True,
    )
    for spell, before, begin, end in positions:
        row = last.get((spell.worker, before))
        share = 1.0 if row is None else kept_after[row]
        timed.append((spell.begin, Change(begin, "end", spell.worker, share)))
        if not np.isnan(spell.end):
            copied = version[spell.worker, spell.end]
            source = -1 if copied == 0 else int(frame["worker"].iloc[copied - 1])
            timed.append((spell.end, Change(end, "begin", spell.worker, source=source)))
    timed.sort(key=lambda change: change[0])
    return [change for _, change in timed]
