"""The plan of a replay: a trace cut into pieces, as the arrays that the kernel runs over."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncsim.kernel import Layout, Pieces
from asyncsim.methods.method import Visit
from asyncsim.problems.problem import Problem
from asyncsim.trace import Trace
from asyncsim.tuning import backend, tuning
from asyncsim.waves import Reads, cut, find_waves, most_at_one_position, separate_reads


class Plan:
    """The whole trace cut into pieces, and their arrays chunk by chunk."""

    def __init__(
        self,
        trace: Trace,
        problem: Problem,
        seed: int,
        stops: np.ndarray | None,
        diagnose_every: int,
        dtype: Any,
    ):
        self.waves = find_waves(trace)
        commits = len(trace)
        self.diagnosed = np.zeros(commits, bool)
        if diagnose_every:
            self.diagnosed[:: diagnose_every * trace.workers] = True
        stops = np.array([commits]) if stops is None else stops
        starts = np.concatenate([np.flatnonzero(self.diagnosed), stops[stops < commits]])
        empty = Reads(np.empty(0, int), np.empty(0, int))
        waves = self.waves
        self._reads = separate_reads(waves.read, waves.slot) if waves.reads == "separate" else empty
        self._form_reads = separate_reads(waves.form, waves.form_slot) if waves.separate_forms else empty
        kinds = tuple(kind for kind in (self._reads, self._form_reads) if len(kind.position))
        self._most = max((most_at_one_position(kind) for kind in kinds), default=0)
        self._tuning = tuning(backend(), problem.parameter_count)
        self.piece_size, self._cuts = self._best_cut(kinds, starts)
        self._stops = np.searchsorted(self._cuts, np.r_[0, np.unique(stops)])
        self._chunk = min(self._tuning.chunk, int(np.diff(self._stops).max()))
        self._batches = problem.batch_indices(seed, trace.workers)
        self._columns = {
            name: trace.frame[name].to_numpy()
            for name in ("staleness", "worker", "job", "commit", "commit_time", "local_steps")
        }
        self._dtype = dtype
        self._window = trace.window
        self._workers = trace.workers

    def layout(self, trace: Trace, problem: Problem, proxy_momentum: float) -> Layout:
        """Return what the compiled program has to know."""
        return Layout(
            piece_size=self.piece_size,
            reads_size=self._room(self._reads),
            form_reads_size=self._room(self._form_reads),
            reads=self.waves.reads,
            separate_forms=self.waves.separate_forms,
            window=trace.window,
            one_by_one=problem.map_on_cpu and backend() == "cpu",
            proxy_momentum=proxy_momentum,
        )

    def chunks(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, Pieces]]:
        """Yield the starts of up to a chunk of pieces, with the end of the last, and their arrays.

        Commits to be diagnosed are the first of a chunk.
        """
        first, last = np.searchsorted(self._cuts, (start, stop))
        diagnosed = first + 1 + np.flatnonzero(self.diagnosed[self._cuts[first + 1 : last]])
        for begin, end in itertools.pairwise([first, *diagnosed.tolist(), last]):
            for at in range(begin, end, self._chunk):
                starts = self._cuts[at : min(at + self._chunk, end) + 1]
                yield starts, self._pieces(starts)

    def _best_cut(self, kinds: tuple[Reads, ...], starts: np.ndarray) -> tuple[int, np.ndarray]:
        def cost(size: int, cuts: np.ndarray) -> float:
            return (len(cuts) - 1) * (size + self._tuning.piece_overhead)

        # A piece of one commit makes XLA copy the array of all slots at every commit.
        sizes = [size for size in self._tuning.piece_sizes if size > 1 or self.waves.slots == 1]
        candidates = [(size, cut(self.waves, size, kinds, max(size, self._most), starts)) for size in sizes]
        return min(candidates, key=lambda candidate: cost(*candidate))

    def _room(self, reads: Reads) -> int:
        return max(self.piece_size, self._most) if len(reads.position) else 0

    def _pieces(self, starts: np.ndarray) -> Pieces:
        """Fill in the arrays of consecutive pieces, padded to a whole chunk."""
        sizes = np.zeros(self._chunk, int)
        sizes[: len(starts) - 1] = np.diff(starts)
        begin = np.full(self._chunk, starts[-1])
        begin[: len(starts) - 1] = starts[:-1]
        valid = np.arange(self.piece_size) < sizes[:, None]
        member = np.where(valid, begin[:, None] + np.arange(self.piece_size), 0)

        def padded(values: np.ndarray, empty: int, dtype: Any = np.int32) -> Any:
            return np.where(valid, values, empty).astype(dtype)

        def column(name: str, empty: int, dtype: Any = np.int32) -> Any:
            return padded(self._columns[name][member], empty, dtype)

        visit = Visit(
            staleness=column("staleness", 0),
            worker=column("worker", self._workers),
            worker_step=column("job", 0),
            commit=column("commit", 0),
            time=column("commit_time", 0, self._dtype),
            local_steps=column("local_steps", 1),
        )
        read_slot, read_offset = _reads_of_pieces(self._reads, begin, sizes, self._room(self._reads), self.waves.slots)
        form_read_slot, form_read_offset = _reads_of_pieces(
            self._form_reads, begin, sizes, self._room(self._form_reads), self.waves.form_slots
        )
        return Pieces(
            valid=padded(valid, False, bool),
            slot=padded(self.waves.slot[member], self.waves.slots),
            form_slot=padded(self.waves.form_slot[member], self.waves.form_slots),
            form_offset=padded(self.waves.form[member] - begin[:, None], -1),
            visit=visit,
            job=visit.worker_step,
            rows=self._rows(member, valid),
            read_slot=read_slot,
            read_offset=read_offset,
            form_read_slot=form_read_slot,
            form_read_offset=form_read_offset,
        )

    def _rows(self, member: np.ndarray, valid: np.ndarray) -> Any:
        """Return the examples of each commit's minibatches, ``[pieces, piece_size, window, batch]``."""
        if self._batches is None:
            return np.zeros((*member.shape, self._window, 0), np.int32)
        commits = member[valid]
        rows = self._batches.rows(self._columns["worker"][commits], self._columns["job"][commits], self._window)
        padded = np.zeros((*member.shape, *rows.shape[1:]), np.int32)
        padded[valid] = rows
        return padded


def _reads_of_pieces(reads: Reads, begin: np.ndarray, sizes: np.ndarray, room: int, scratch: int):
    """Return the slots and offsets of the separate reads of each piece, ``[pieces, room]`` each."""
    first = np.searchsorted(reads.position, begin, side="right")
    last = np.searchsorted(reads.position, begin + sizes, side="right")
    index = first[:, None] + np.arange(room)
    made = index < last[:, None]
    index = np.where(made, index, 0)
    if not room:
        return index.astype(np.int32), index.astype(np.int32)
    slot = np.where(made, reads.slot[index], scratch)
    offset = np.where(made, reads.position[index] - begin[:, None], 0)
    return slot.astype(np.int32), offset.astype(np.int32)
