"""The plan of a replay: a trace cut into pieces, as the arrays that programs run over; and the keys of its draws."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.streams import stream_key
from asyncsim.methods.method import Array, Method, Visit
from asyncsim.problems.problem import Problem
from asyncsim.replays.state import GossipOfPiece, Layout, Pieces, ReadsOfPiece
from asyncsim.replays.suitable import require_replies
from asyncsim.replays.tuning import Form, tuning
from asyncsim.replays.waves import Change, Gossip, Reads, cut, find_waves, most_at_one_position, separate_reads
from asyncsim.traces.trace import Trace


class Counted(NamedTuple):
    """Which workers the server counts, of a trace from which some are away.

    Attributes
    ----------
    row : int array, shape ``[changes]``
        The commits from which on it is as below, ascending.
    counted : bool array, shape ``[changes, workers]``
    """

    row: np.ndarray
    counted: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> "Counted | None":
        """Return those of a trace; None where nobody is ever away."""
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
        """Return who is counted at commits, ``[*commits, workers]``."""
        return self.counted[np.searchsorted(self.row, commit, side="right") - 1]


class Plan:
    """The whole trace cut into pieces, and their arrays chunk by chunk.

    Parameters
    ----------
    trace, problem
    seed : int or sequence of int
        Of the minibatches and of methods that draw; the members of an ensemble have one each.
    stops : int array
        Positions at which a piece has to end.
    look_every : sequence of int
        Worker steps between two looks of each recorder that looks at whole vectors.
    dtype, devices
    form : {"batch", "single"}
        See `asyncsim.replays.tuning`. Of a batch of one a CPU makes "single" commits.
    needs_key : bool
        Whether visits have keys.
    """

    def __init__(
        self,
        trace: Trace,
        problem: Problem,
        seed: int | Sequence[int],
        stops: np.ndarray,
        look_every: Sequence[int],
        dtype: Any,
        devices: Sequence[Any],
        form: Form,
        needs_key: bool = False,
    ):
        self.waves = waves = find_waves(trace)
        commits = len(trace)
        #: Which commits each of the recorders looks at.
        self.looks = np.zeros((len(look_every), commits), bool)
        for looks, every in zip(self.looks, look_every, strict=True):
            # One commit further each time: workers that are nearly in step take turns, and every n-th commit would
            # always be of the same one.
            looks[:: every * trace.workers + (trace.workers > 1)] = True
        self.looked_at: np.ndarray = np.logical_or.reduce(self.looks, 0)
        starts = np.concatenate([np.flatnonzero(self.looked_at), stops[stops < commits]])
        empty = Reads(np.empty(0, int), np.empty(0, int))
        read = waves.read if waves.blocks is None else waves.blocks
        made, pushed = np.full(commits, waves.reads == "separate"), np.full(commits, waves.separate_pushes)
        if waves.apart is not None:
            made = waves.apart
        #: Of each restore the position, the commits that stay, and the slots and push slots that are read then.
        self.restores: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        if waves.restores is not None:
            back = waves.restores
            for at, stays in zip(back.position.tolist(), back.checkpoint.tolist(), strict=True):
                slots = waves.slot[back.read & (waves.read == at)], waves.push_slot[back.push & (waves.push == at)]
                self.restores.append((at, stays, np.unique(slots[0]), np.unique(slots[1])))
            starts = np.concatenate([starts, back.position, back.checkpoint[back.checkpoint < commits]])
            made, pushed = made & ~back.read, pushed & ~back.push
        #: What changes before a commit without a server, by its position.
        self.changes: dict[int, list[Change]] = {}
        for change in () if waves.gossip is None else waves.gossip.changes:
            self.changes.setdefault(change.position, []).append(change)
        starts = np.concatenate([starts, [at for at in self.changes if at < commits]]).astype(int)
        shared = waves.apart is None
        self._reads = separate_reads(read[made], waves.slot[made], shared) if made.any() else empty
        self._blocks = trace.read_blocks
        self._push_reads = separate_reads(waves.push[pushed], waves.push_slot[pushed]) if pushed.any() else empty
        self._counted = Counted.of(trace)
        kinds = tuple(kind for kind in (self._reads, self._push_reads) if len(kind.position))
        self._most = max((most_at_one_position(kind) for kind in kinds), default=0)
        platform = devices[0].platform
        self._tuning = tuning(platform, problem.parameter_count)
        # Where workers meet, a commit touches the rows of two: one at a time.
        meets = waves.gossip is not None and bool((waves.gossip.partner >= 0).any())
        sizes = self._tuning.piece_sizes if form == "batch" and not meets else (1,)
        self.piece_size, self._cuts = self._best_cut(kinds, starts, [size * len(devices) for size in sizes])
        self._form: Form = "single" if form == "batch" and self.piece_size == 1 and platform == "cpu" else form
        self.stops = stops
        between = np.diff(np.searchsorted(self._cuts, np.r_[0, np.unique(stops)]))
        # A power of two, so that short traces that differ by a few pieces share what is compiled.
        self._chunk = min(self._tuning.chunk, 1 << (int(between.max()) - 1).bit_length())
        seeds = [seed] if isinstance(seed, int) else seed
        self.members = None if isinstance(seed, int) else len(seed)
        self._batches = [problem.batch_indices(one, trace.workers) for one in seeds]
        self._keys: Array | None = None
        if needs_key:
            self._keys = method_key(seed) if isinstance(seed, int) else jnp.stack([method_key(one) for one in seeds])
        self._columns = {
            name: trace.frame[name].to_numpy()
            for name in ("staleness", "worker", "job", "commit", "commit_time", "local_steps")
        }
        self._columns["worker_step"] = trace.worker_step
        before = trace.frame["read_version"].to_numpy() + self._columns["staleness"]
        completes = trace.frame["version"].to_numpy() > before
        # A restore begins the next version anew.
        ends = np.unique(np.r_[0, 1 + np.flatnonzero(completes), [at for at, *_ in self.restores], commits].astype(int))
        self._columns["completes"] = completes
        self._columns["place"] = np.arange(commits) - np.repeat(ends[:-1], np.diff(ends))
        self._columns["messages"] = np.repeat(np.diff(ends), np.diff(ends))
        self._version_messages = int(np.diff(ends).max())
        self._workers = trace.workers
        self._dtype = dtype
        self._window = trace.window
        self._windows_differ = trace.windows_differ

    def layout(self, method: Method) -> Layout:
        """Return what the compiled program has to know; raise InputError if the method's reply cannot be exact."""
        require_replies(method, self.waves.reads)
        return Layout(
            form=self._form,
            piece_size=self.piece_size,
            workers=self._workers,
            reads="none" if method.mix is not None else self.waves.reads,
            reads_size=self._room(self._reads),
            push_reads_size=self._room(self._push_reads),
            separate_pushes=self.waves.separate_pushes,
            read_blocks=self._blocks,
            window=self._window,
            windows_differ=self._windows_differ,
            members=self.members,
            gossip=self.waves.gossip is not None,
            unrolled=self._tuning.unrolled,
            restarts=self.waves.fresh is not None or bool(self.changes),
            version_messages=1 if method.combine is None else self._version_messages,
        )

    def chunks(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, Pieces]]:
        """Yield the starts of up to a chunk of pieces, with the end of the last, and their arrays.

        Commits that a recorder looks at are the first of a chunk, and those before which the server's state is kept, or
        restored.
        """
        first, last = np.searchsorted(self._cuts, (start, stop))
        cuts = self._cuts[first + 1 : last]
        alone = np.isin(cuts, [*self.changes, *(at for restore in self.restores for at in restore[:2])])
        begins = first + 1 + np.flatnonzero(self.looked_at[cuts] | alone)
        for begin, end in itertools.pairwise([first, *begins.tolist(), last]):
            for at in range(begin, end, self._chunk):
                starts = self._cuts[at : min(at + self._chunk, end) + 1]
                yield starts, self._pieces(starts)

    def _best_cut(self, kinds: tuple[Reads, ...], starts: np.ndarray, sizes: Sequence[int]) -> tuple[int, np.ndarray]:
        """Choose the size of pieces by the trace alone, so that what is recorded changes no result; then cut."""
        nowhere = np.empty(0, int)

        def cost(size: int) -> float:
            pieces = len(cut(self.waves, size, kinds, self._reads_of(size), nowhere)) - 1
            return pieces * (size + self._tuning.piece_overhead)

        size = min(sizes, key=cost) if len(sizes) > 1 else sizes[0]
        return size, cut(self.waves, size, kinds, self._reads_of(size), starts)

    def _reads_of(self, size: int) -> int:
        """Return the room for separate reads in a piece of this size."""
        return max(size * self._blocks, self._most)

    def _room(self, reads: Reads) -> int:
        return self._reads_of(self.piece_size) if len(reads.position) else 0

    def _pieces(self, starts: np.ndarray) -> Pieces:
        """Fill in the arrays of consecutive pieces, padded to a whole chunk."""
        sizes: Any = np.zeros(self._chunk, np.int32)
        sizes[: len(starts) - 1] = np.diff(starts)
        begin = np.full(self._chunk, starts[-1])
        begin[: len(starts) - 1] = starts[:-1]
        valid = np.arange(self.piece_size) < sizes[:, None]
        member = np.where(valid, begin[:, None] + np.arange(self.piece_size), 0)

        def column(name: str, dtype: Any = np.int32) -> Any:
            return self._columns[name][member].astype(dtype)

        workers: Any = np.full(member.shape, self._workers, np.int32)
        waves: Any = self.waves
        visit = Visit(
            staleness=column("staleness"),
            worker=column("worker"),
            worker_step=column("worker_step"),
            commit=column("commit"),
            time=column("commit_time", self._dtype),
            local_steps=column("local_steps"),
            kept=() if waves.gossip is None else waves.gossip.kept[member].astype(self._dtype),
            completes=column("completes", np.bool_),
            place=column("place"),
            messages=column("messages"),
            workers=workers,
            counted=() if self._counted is None else self._counted.at(member),
        )
        if self._keys is not None:
            visit = visit._replace(key=visit_keys(self._keys, visit.worker, visit.worker_step))
        return Pieces(
            size=sizes,
            slot=waves.slot[member].astype(np.int32),
            push_slot=waves.push_slot[member].astype(np.int32),
            push_offset=self._push_offset(member, begin).astype(np.int32),
            fresh=() if waves.fresh is None else waves.fresh[member],
            visit=visit,
            job=column("job"),
            rows=self._rows(member, valid),
            reads=_reads_of_pieces(self._reads, begin, sizes, self._room(self._reads)),
            push_reads=_reads_of_pieces(self._push_reads, begin, sizes, self._room(self._push_reads)),
            gossip=() if waves.gossip is None else self._gossip(waves.gossip, member),
        )

    def _push_offset(self, member: np.ndarray, begin: np.ndarray) -> Any:
        """Return how many commits of its piece the read saw that a message is formed with; -1: it was before."""
        offset = self.waves.push[member] - begin[:, None]
        if self.waves.restores is not None:  # at a restore the piece begins with what was restored
            restored = np.isin(begin, self.waves.restores.position)[:, None]
            offset = np.where(restored & (offset == 0) & ~self.waves.restores.push[member], -1, offset)
        return np.maximum(offset, -1)

    def _gossip(self, gossip: Gossip, member: np.ndarray) -> Any:
        """Return what the commits of pieces take up of other workers."""
        numbers = gossip.sources, gossip.taken, gossip.message_slot, gossip.partner
        sources, taken, message_slot, partner = (own[member].astype(np.int32) for own in numbers)
        weights: Any = gossip.weights[member].astype(self._dtype)
        return GossipOfPiece(sources, weights, taken, message_slot, partner)

    def _rows(self, member: np.ndarray, valid: np.ndarray) -> Any:
        """Return the examples of each commit's minibatches, see `Pieces`."""
        commits = member[valid]
        worker, job, steps = (self._columns[name][commits] for name in ("worker", "job", "local_steps"))
        none = np.zeros((len(commits), self._window, 0), np.int32)
        rows = np.stack(
            [none if one is None else one.rows(worker, job, self._window, steps) for one in self._batches], 1
        )
        if self.members is None:
            rows = rows[:, 0]
        padded = np.zeros((*member.shape, *rows.shape[1:]), np.int32)
        padded[valid] = rows
        return padded


def _reads_of_pieces(reads: Reads, begin: np.ndarray, sizes: np.ndarray, room: int) -> Any:
    """Return the separate reads of each piece, ``[pieces, room]``."""
    first = np.searchsorted(reads.position, begin, side="right")
    last = np.searchsorted(reads.position, begin + sizes, side="right")
    index = np.minimum(first[:, None] + np.arange(room), max(len(reads.position) - 1, 0))
    slot = reads.slot[index] if room else index
    offset = reads.position[index] - begin[:, None] if room else index
    made = (last - first).astype(np.int32)
    block: Any = () if reads.block is None else reads.block[index].astype(np.int32)
    return ReadsOfPiece(made, slot.astype(np.int32), np.maximum(offset, 0).astype(np.int32), block)


def purpose_key(seed: int, purpose: str) -> Array:
    """Return the key of a purpose's random numbers, see `asyncsim.base.streams`."""
    return jax.random.wrap_key_data(jnp.asarray(stream_key(seed, purpose).view(np.uint32)[:2]), impl="threefry2x32")


def method_key(seed: int) -> Array:
    """Return the key of which a run's visits have theirs, see `visit_key`."""
    return purpose_key(seed, "method")


def visit_key(key: Array, worker: Any, worker_step: Any) -> Array:
    """Return the key of a visit, from that of `method_key`."""
    return jax.random.fold_in(jax.random.fold_in(key, worker), worker_step)


@jax.jit
def visit_keys(keys: Array, worker: Array, worker_step: Array) -> Array:
    """Return the keys of many visits, ``[*visits, *runs]``, from that of one run, or from those of some."""
    of_runs = visit_key if keys.ndim == 0 else jax.vmap(visit_key, (0, None, None))
    of_all = jax.vmap(lambda *visit: of_runs(keys, *visit))(worker.reshape(-1), worker_step.reshape(-1))
    return of_all.reshape(*worker.shape, *keys.shape)
