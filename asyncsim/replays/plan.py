"""The plan of a replay: the arrays of a trace's pieces, and the keys of its draws."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.streams import stream_key
from asyncsim.methods.method import Array, Method, Visit
from asyncsim.problems.partition import partition
from asyncsim.problems.problem import Problem
from asyncsim.replays.state import GossipOfPiece, Layout, Pieces, ReadsOfPiece
from asyncsim.replays.suitable import require_formed, require_replies
from asyncsim.replays.tuning import Form, tuning
from asyncsim.replays.waves import (
    Change,
    Gossip,
    Reads,
    cut,
    find_waves,
    most_at_one_position,
    separate_reads,
)
from asyncsim.traces.trace import Trace


class Counted(NamedTuple):
    """The workers that the server counts, in a trace with absences.

    Attributes
    ----------
    row : int array, shape ``[changes]``
        The first commits of the rows below, ascending.
    counted : bool array, shape ``[changes, workers]``
    """

    row: np.ndarray
    counted: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> "Counted | None":
        """Return the counted workers of a trace; None without absences."""
        away = trace.spells[trace.spells["from_row"].notna()].fillna({"to_row": len(trace)})
        if away.empty:
            return None
        begin, end = (away[name].to_numpy(np.int64) for name in ("from_row", "to_row"))
        row = np.unique(np.r_[0, begin, end])
        counted = np.ones((len(row), trace.workers), bool)
        for worker, first, last in zip(away["worker"], begin, end, strict=True):
            counted[(row >= first) & (row < last), worker] = False
        return cls(row, counted)

    def at(self, commit: np.ndarray) -> Any:
        """Return the counted workers at commits, ``[*commits, workers]``."""
        return self.counted[np.searchsorted(self.row, commit, side="right") - 1]


class Plan:
    """The trace cut into pieces, and their arrays chunk by chunk.

    Parameters
    ----------
    trace, problem
    seeds : sequence of int
        Of the minibatches: one, or one for each member of an ensemble.
    stops : int array
        Positions at which a piece has to end.
    look_every : sequence of int
        Worker steps between two looks of each recorder that looks at whole vectors.
    dtype, device
    form : {"batch", "single"}
        See `asyncsim.replays.tuning`. A CPU computes batches of one commit in the form "single".
    same_reply : bool
        See `asyncsim.methods.Method`.
    examples : function, optional
        From commits and which of them are valid to `Pieces.rows`, in the place of minibatches.
    used_at : int array, optional
        Where rows of the trace beyond the last stop only read: for each row the last commit before
        which its read is used.

    Attributes
    ----------
    columns : dict of arrays
        The fields of each commit's visit.
    cuts : int array
        The positions at which pieces start, and the end of the last.
    """

    def __init__(
        self,
        trace: Trace,
        problem: Problem,
        seeds: Sequence[int],
        stops: np.ndarray,
        look_every: Sequence[int],
        dtype: Any,
        device: Any,
        form: Form,
        same_reply: bool = False,
        examples: Callable[[np.ndarray, np.ndarray], Any] | None = None,
        used_at: np.ndarray | None = None,
    ):
        self.waves = waves = find_waves(trace, same_reply, used_at)
        commits = len(trace)
        #: The commits that each of the recorders looks at.
        self.looks = np.zeros((len(look_every), commits), bool)
        for looks, interval in zip(self.looks, look_every, strict=True):
            # One commit further each time: workers that are nearly in step take turns, and every
            # n-th commit would always be of the same worker.
            looks[:: interval * trace.workers + (trace.workers > 1)] = True
        self.looked_at: np.ndarray = np.logical_or.reduce(self.looks, 0)
        starts = np.concatenate([np.flatnonzero(self.looked_at), stops[stops < commits]])
        empty = Reads(np.empty(0, int), np.empty(0, int))
        read = waves.read if waves.groups is None else waves.groups
        is_separate = np.full(commits, waves.reads == "separate")
        is_separate_push = np.full(commits, waves.separate_pushes)
        if waves.separate_commits is not None:
            is_separate = waves.separate_commits
        #: For each restore its position, the position of its checkpoint, and the slots and push
        #: slots that read the restored variable.
        self.restores: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        if waves.restores is not None:
            restores = waves.restores
            for position, checkpoint in zip(
                restores.position.tolist(), restores.checkpoint.tolist(), strict=True
            ):
                slots = np.unique(waves.slot[restores.read & (waves.read == position)])
                is_push = restores.push & (waves.push == position)
                push_slots = np.unique(waves.push_slot[is_push])
                self.restores.append((position, checkpoint, slots, push_slots))
            # Pieces begin at checkpoints and restores: there the host copies the server's states.
            checkpoints = restores.checkpoint[restores.checkpoint < commits]
            starts = np.concatenate([starts, restores.position, checkpoints])
            # Restored reads are written by the restore, not by a piece.
            is_separate = is_separate & ~restores.read
            is_separate_push = is_separate_push & ~restores.push
        #: Lost messages, ends and begins of lives without a server, by the position of the next
        #: commit.
        self.changes: dict[int, list[Change]] = {}
        for change in () if waves.gossip is None else waves.gossip.changes:
            self.changes.setdefault(change.position, []).append(change)
        changed_at = [position for position in self.changes if position < commits]
        starts = np.concatenate([starts, changed_at]).astype(int)
        shared = waves.separate_commits is None
        self._reads = self._push_reads = empty
        if is_separate.any():
            self._reads = separate_reads(read[is_separate], waves.slot[is_separate], shared)
        self._bounds, self._owners = runs_of(trace, problem)
        if is_separate_push.any():
            push, push_slot = waves.push[is_separate_push], waves.push_slot[is_separate_push]
            self._push_reads = separate_reads(push, push_slot)
        self._counted = Counted.of(trace)
        kinds = tuple(kind for kind in (self._reads, self._push_reads) if len(kind.position))
        self._most = max((most_at_one_position(kind) for kind in kinds), default=0)
        platform = device.platform
        self._tuning = tuning(platform, problem.parameter_count)
        # Where workers meet, a commit writes the rows of two workers: pieces of one commit.
        meets = waves.gossip is not None and bool((waves.gossip.partner >= 0).any())
        sizes = self._tuning.piece_sizes if form == "batch" and not meets else (1,)
        self.piece_size, self.cuts = self._best_cut(kinds, starts, sizes)
        self._form: Form = "single" if self.piece_size == 1 and platform == "cpu" else form
        self.stops = stops
        self._chunk = chunk_size(self.cuts, stops, self._tuning.chunk)
        minibatches = Minibatches(problem, seeds, trace.workers, trace.window, trace.frame)
        self._examples = examples or minibatches.rows
        names = ("staleness", "worker", "commit", "local_steps")
        self.columns = {name: trace.frame[name].to_numpy() for name in names}
        self.columns["time"] = trace.frame["commit_time"].to_numpy()
        self.columns["worker_step"] = trace.worker_step
        self.columns["workers"] = np.full(commits, trace.workers)
        if waves.gossip is not None:
            self.columns["kept"] = waves.gossip.kept_share
        self._job = trace.frame["job"].to_numpy()
        before = trace.frame["read_version"].to_numpy() + self.columns["staleness"]
        completes = trace.frame["version"].to_numpy() > before
        # A restore drops the messages of an incomplete version: the next one begins there.
        restored_at = [position for position, *_ in self.restores]
        self.columns["completes"] = completes
        if trace.shards > 1:
            self.columns["delays"] = before[:, None] - trace.group_versions()
        self.columns |= places(completes, [*restored_at, stops[-1]])
        self._workers = trace.workers
        self._dtype = dtype
        self._window = trace.window
        self._windows_differ = trace.windows_differ

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the replay's state."""
        waves = self.waves
        sizes = {"slots": waves.slots, "push_slots": waves.push_slots, "workers": self._workers}
        return sizes if waves.gossip is None else {**sizes, "message_slots": waves.gossip.slots + 1}

    def layout(self, method: Method) -> Layout:
        """Return the program's layout; raise InputError if the method's reply cannot be exact."""
        require_replies(method, self.waves.reads)
        require_formed(method, self.waves)
        return Layout(
            form=self._form,
            piece_size=self.piece_size,
            workers=self._workers,
            reads="none" if method.mix is not None else self.waves.reads,
            reads_size=self._room(self._reads),
            push_reads_size=self._room(self._push_reads),
            separate_pushes=self.waves.separate_pushes,
            bounds=self._bounds,
            owners=self._owners,
            window=self._window,
            windows_differ=self._windows_differ,
            gossip=self.waves.gossip is not None,
            unrolled=self._tuning.unrolled,
            restarts=self.waves.fresh is not None or bool(self.changes),
            version_messages=1 if method.combine is None else self.columns["messages"].max(),
        )

    def chunks(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, Pieces]]:
        """Yield the starts of a chunk's pieces, with the end of the last, and their arrays.

        A chunk begins at each commit that a recorder looks at, and where the server's state is
        copied or restored or a worker's life changes.
        """
        first, last = np.searchsorted(self.cuts, (start, stop))
        cuts = self.cuts[first + 1 : last]
        host_work = [*self.changes, *(at for restore in self.restores for at in restore[:2])]
        begins_chunk = np.isin(cuts, host_work)
        begins = first + 1 + np.flatnonzero(self.looked_at[cuts] | begins_chunk)
        for begin, end in itertools.pairwise([first, *begins.tolist(), last]):
            for index in range(begin, end, self._chunk):
                bounds = np.array([index, min(index + self._chunk, end)])
                starts = self.cuts[bounds[0] : bounds[1] + 1]
                yield starts, self.pieces(*members(bounds, 0, True, self._chunk))

    def _best_cut(
        self, kinds: tuple[Reads, ...], starts: np.ndarray, sizes: Sequence[int]
    ) -> tuple[int, np.ndarray]:
        """Choose the size of pieces, by the trace alone, and cut."""
        # Recorders add starts of pieces, but do not change the size: they change no result.
        nowhere = np.empty(0, int)

        def cost(size: int) -> float:
            pieces = len(cut(self.waves, size, kinds, self._reads_of(size), nowhere)) - 1
            return pieces * (size + self._tuning.piece_overhead)

        size = min(sizes, key=cost) if len(sizes) > 1 else sizes[0]
        return size, cut(self.waves, size, kinds, self._reads_of(size), starts)

    def _reads_of(self, size: int) -> int:
        # Reads of one position cannot be divided between pieces: a piece needs room for all.
        return max(size, self._most)

    def _room(self, reads: Reads) -> int:
        return self._reads_of(self.piece_size) if len(reads.position) else 0

    def pieces(self, piece: np.ndarray, is_valid: np.ndarray) -> Pieces:
        """Fill in the arrays of pieces; only the valid ones have commits."""
        # Padding is the trace's first commit: valid values, whose results are dropped.
        member, valid = members(self.cuts, piece, is_valid, self.piece_size)
        begin, sizes = self.cuts[piece], valid.sum(-1)
        waves: Any = self.waves
        visit = visits_at(self.columns, member, self._dtype)
        if self._counted is not None:
            visit = visit._replace(counted=self._counted.at(member))
        return Pieces(
            size=sizes.astype(np.int32),
            slot=waves.slot[member].astype(np.int32),
            push_slot=waves.push_slot[member].astype(np.int32),
            push_offset=self._push_offset(member, begin).astype(np.int32),
            fresh=() if waves.fresh is None else waves.fresh[member],
            visit=visit,
            job=self._job[member].astype(np.int32),
            rows=self._examples(member, valid),
            reads=_reads_of_pieces(self._reads, begin, sizes, self._room(self._reads)),
            push_reads=_reads_of_pieces(
                self._push_reads, begin, sizes, self._room(self._push_reads)
            ),
            gossip=() if waves.gossip is None else self._gossip(waves.gossip, member),
        )

    def _push_offset(self, member: np.ndarray, begin: np.ndarray) -> Any:
        """Return the number of the piece's commits before each message's read; -1: before it."""
        offset = self.waves.push[member] - begin[..., None]
        if self.waves.restores is not None:
            # At a restore the piece begins with the restored variable: an older read of the same
            # position is in its slot.
            restored = np.isin(begin, self.waves.restores.position)[..., None]
            offset = np.where(
                restored & (offset == 0) & ~self.waves.restores.push[member], -1, offset
            )
        return np.maximum(offset, -1)

    def _gossip(self, gossip: Gossip, member: np.ndarray) -> Any:
        kinds = {"weights": self._dtype}
        tables = {name: getattr(gossip, name)[member] for name in GossipOfPiece._fields}
        return GossipOfPiece(
            *(table.astype(kinds.get(name, np.int32)) for name, table in tables.items())
        )


def members(
    ends: np.ndarray, group: Any, is_valid: Any, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the members of groups, and which places have one; all others have member 0.

    Parameters
    ----------
    ends : int array, shape ``[all groups + 1]``
        The first member of each group, and the end of the last.
    group, is_valid : int and bool array, shape ``[*groups]``
        Others than valid groups have no members.
    width : int
        The most members of a group.

    Returns
    -------
    int and bool array, shape ``[*groups, width]``
    """
    member = ends[group][..., None] + np.arange(width)
    has_member = member < ends[group + is_valid][..., None]
    return np.where(has_member, member, 0), has_member


def places(completes: np.ndarray, dropped_at: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Return the place of each message in its version, and the number of its messages.

    ``completes`` marks the last message of a version; at ``dropped_at`` an incomplete one ends.
    """
    count = len(completes)
    ends = np.unique(np.r_[0, 1 + np.flatnonzero(completes), dropped_at, count].astype(int))
    size = np.diff(ends)
    place = np.arange(count) - np.repeat(ends[:-1], size)
    return {"place": place, "messages": np.repeat(size, size)}


def chunk_size(cuts: np.ndarray, stops: np.ndarray, limit: int) -> int:
    """Return the number of pieces in a chunk: as between two stops, at most ``limit``."""
    between = np.diff(np.searchsorted(cuts, np.r_[0, np.unique(stops)]))
    # A power of two, so that short traces that differ by a few pieces share a program.
    return min(limit, 1 << (int(between.max()) - 1).bit_length())


def visits_at(columns: Mapping[str, np.ndarray], index: np.ndarray, dtype: Any) -> Visit:
    """Return the visits at an index from the columns of their fields."""
    kinds = {"time": dtype, "kept": dtype, "completes": np.bool_}
    fields: Any = {
        name: column[index].astype(kinds.get(name, np.int32)) for name, column in columns.items()
    }
    return Visit(**fields)


def runs_of(trace: Trace, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the `Layout.bounds` and `Layout.owners` of a trace's reads.

    Raises
    ------
    InputError
        The trace's groups are no partition of the problem's tensors.
    """
    groups = trace.groups
    if groups == 1:
        return (), ()
    argument = "stages" if isinstance(groups, int) else "groups of tensors"
    _, bounds, owners = partition(problem.shapes, groups, argument, by_layer=True)
    return (bounds, owners) if trace.shards > 1 else ((), ())


def _reads_of_pieces(reads: Reads, begin: np.ndarray, sizes: np.ndarray, room: int) -> Any:
    """Return the separate reads of each piece, ``[*pieces, room]``."""
    first = np.searchsorted(reads.position, begin, side="right")
    last = np.searchsorted(reads.position, begin + sizes, side="right")
    index = np.minimum(first[..., None] + np.arange(room), max(len(reads.position) - 1, 0))
    slot = reads.slot[index] if room else index
    offset = reads.position[index] - begin[..., None] if room else index
    count = (last - first).astype(np.int32)
    return ReadsOfPiece(count, slot.astype(np.int32), np.maximum(offset, 0).astype(np.int32))


class Minibatches:
    """The examples of jobs, of one run or of the members of an ensemble.

    ``seeds``: one, or one for each member. ``jobs``: a table with their ``worker``, ``job`` and
    ``local_steps``.
    """

    def __init__(
        self, problem: Problem, seeds: Sequence[int], workers: int, window: int, jobs: pd.DataFrame
    ):
        self._window = window
        self._batches = [problem.batch_indices(seed, workers) for seed in seeds]
        self._jobs = [jobs[name].to_numpy() for name in ("worker", "job", "local_steps")]

    def rows(self, index: np.ndarray, valid: np.ndarray) -> Any:
        """Return the examples of the ``valid`` jobs of an index, ``[*index.shape, window, batch]``;
        of several members with an axis of members in front.
        """
        worker, job, steps = (values[index[valid]] for values in self._jobs)
        of_members = []
        for batches in self._batches:
            rows = np.zeros((len(worker), self._window, 0), np.int32)
            if batches is not None:
                rows = batches.rows(worker, job, self._window, steps)
            padded = np.zeros((*valid.shape, *rows.shape[1:]), np.int32)
            padded[valid] = rows
            of_members.append(padded)
        return of_members[0] if len(of_members) == 1 else np.stack(of_members)


def purpose_key(seed: int, purpose: str) -> Array:
    """Return the key of a purpose's random numbers, see `asyncsim.base.streams`."""
    return jax.random.wrap_key_data(
        jnp.asarray(stream_key(seed, purpose).view(np.uint32)[:2]), impl="threefry2x32"
    )


def method_key(seed: int) -> Array:
    """Return the key of a run's visits, see `visit_key`."""
    return purpose_key(seed, "method")


def visit_key(key: Array, worker: Any, worker_step: Any) -> Array:
    """Derive the key of a visit from a run's `method_key`."""
    return jax.random.fold_in(jax.random.fold_in(key, worker), worker_step)
