"""The gradients and nothing else: no replay of the same gradients can be faster, so this is its limit."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asyncsim.problems import Problem
from asyncsim.products import whole_products
from asyncsim.streams import Streams

#: How a piece's gradients are computed: one after the other, or as one batch, its rows copied or gathered.
WAYS = ("map", "vmap", "vmap, gathered rows")
#: A way whose rate fell below this share of the best is not tried with larger pieces; if quick, the other.
_HOPELESS, _HOPELESS_QUICK = 0.6, 0.95
#: Gradients whose workers and minibatches are laid out beforehand; longer runs go through them again.
_PLANNED = 256


class Batching(NamedTuple):
    """How many distinct workers' gradients make a piece, and how they are computed (see `WAYS`)."""

    size: int
    way: str


class Jobs(NamedTuple):
    """The planned pieces, arrays of shape ``[pieces, size]``; ``rows`` has shape ``[pieces, size, batch]``."""

    worker: Any
    job: Any
    rows: Any


class GradientsAlone:
    """Gradients of a problem at the parameters of distinct workers, in pieces, without any update.

    The loss, the size of minibatches and where they come from are those of a replay. Each piece's gradients are
    written to memory, and the next piece reads from them, so that none of the work can be left out.

    Attributes
    ----------
    best : Batching
        What `run` uses.
    devices : list of jax.Device
        All that the process has.
    """

    def __init__(self, problem: Problem, workers: int, seed: int = 0):
        self._problem, self._workers, self._seed = problem, workers, seed
        self._batches = problem.batch_indices(seed, workers)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed)))
        start, self._unravel = ravel_pytree(params)
        self.devices = jax.local_devices()
        central = np.asarray(start)
        # A row for each worker, as in a replay: what of them is in a cache is then as there.
        self._params = self._put(lambda: np.tile(central, (workers, 1)))
        self._data = self._put(lambda: problem.train)
        self._key = self._put(lambda: jax.random.key(seed))
        self._programs: dict[Batching, tuple[Any, list[Jobs]]] = {}
        self.best = Batching(1, "map")

    def run(self, count: int, batching: Batching | None = None, at_once: int = 1) -> float:
        """Compute about ``count`` gradients, so many pieces at a time; return the sum of their losses.

        Each part has pieces of its own and is started from a thread of its own (see `asyncsim.replays.side_by_side`),
        on the next device if there are several. The amount is rounded to whole pieces for each; `amount` says what it
        becomes.
        """
        batching = batching or self.best
        program, jobs = self._program(batching)
        pieces = self.amount(count, batching, at_once) // batching.size // at_once

        def part(i: int) -> float:
            on = i % len(self.devices)
            own = self._params[on], self._data[on], self._key[on], jobs[on]
            return float(program(*own, np.int32(i * pieces), np.int32(pieces)))

        with ThreadPoolExecutor(at_once) as threads:
            return sum(threads.map(part, range(at_once)))

    def amount(self, count: int, batching: Batching | None = None, at_once: int = 1) -> int:
        """Return how many gradients `run` computes for a ``count``."""
        size = (batching or self.best).size * at_once
        return max(1, round(count / size)) * size

    def gradients(self, batching: Batching) -> tuple[Jobs, Any]:
        """Return the first piece's jobs, and their gradients as a tree with a leading axis of jobs: for tests."""
        _, jobs = self._program(batching)
        first = jax.tree.map(lambda leaf: leaf[0], jobs[0])
        compute = jax.jit(lambda *arguments: self._piece(batching, *arguments)[1])
        return first, compute(self._params[0], self._data[0], self._key[0], first)

    def sweep(self, mean_wave: float, seconds: float, quick: bool = False) -> Iterator[tuple[Batching, float]]:
        """Time sizes of pieces up to the mean wave, each way for so many seconds; `best` is the quickest so far.

        Yields
        ------
        tuple of Batching and float
            And its gradients per second.
        """
        in_turn = self._problem.map_on_cpu and jax.default_backend() == "cpu"
        tried = (1 if in_turn else 2) if quick else len(WAYS)
        best, last = 0.0, dict.fromkeys(WAYS[:tried], np.inf)
        for size in piece_sizes(mean_wave, quick):
            for way in last if size > 1 else WAYS[:1]:
                if last[way] < (_HOPELESS_QUICK if quick else _HOPELESS) * best:
                    continue
                batching = Batching(size, way)
                last[way] = self._rate(batching, seconds)
                if last[way] > best:
                    best, self.best = last[way], batching
                yield batching, last[way]
                if batching != self.best:
                    del self._programs[batching]

    def _rate(self, batching: Batching, seconds: float) -> float:
        """Return the better of two rates, per second: another process may have held up one."""
        count = batching.size
        self.run(count, batching)
        while (took := self._seconds(count, batching)) < seconds / 8:
            count = min(16 * count, round(count * seconds / max(took, 1e-6)))
        count = self.amount(round(count * seconds / took / 2), batching)
        return count / min(self._seconds(count, batching) for _ in range(2))

    def _seconds(self, count: int, batching: Batching) -> float:
        started = time.perf_counter()
        self.run(count, batching)
        return time.perf_counter() - started

    def _put(self, make: Callable[[], Any]) -> list[Any]:
        """Return a copy of a tree for each device."""
        return [jax.device_put(make(), device) for device in self.devices]

    def _program(self, batching: Batching) -> tuple[Any, list[Jobs]]:
        if batching not in self._programs:
            jobs = self._jobs(batching.size)
            self._programs[batching] = jax.jit(self._loop(batching)), self._put(lambda: jobs)
        return self._programs[batching]

    def _jobs(self, size: int) -> Jobs:
        """Plan pieces of distinct workers that go through all workers in random order, again and again."""
        pieces = -(-max(_PLANNED, self._workers) // size)
        shuffled = Streams(self._seed, "gradients").generator(0).permutation(self._workers)
        worker = np.resize(shuffled, pieces * size)
        job = np.arange(pieces * size) // self._workers
        if self._batches is None:
            rows = np.zeros((pieces * size, 0), np.int32)
        else:
            rows = self._batches.rows(worker, job)[:, 0]
        flat = Jobs(worker.astype(np.int32), job.astype(np.int32), rows)
        return Jobs(*(leaf.reshape(pieces, size, *leaf.shape[1:]) for leaf in flat))

    def _loop(self, batching: Batching) -> Callable[..., Any]:
        """Return the function that computes ``count`` pieces, from ``begin`` on, and sums their losses."""

        def loop(params, data, key, jobs, begin, count):
            def piece(index, carry):
                total, before = carry
                now = jax.tree.map(lambda leaf: leaf[(begin + index) % leaf.shape[0]], jobs)
                losses, gradients = self._piece(batching, params, data, key, now)
                # A number of the piece before, from memory: so it has to be there, all of it. It is far too small
                # to change the sum, but no compiler knows.
                kept = sum(leaf.reshape(-1)[-1] for leaf in jax.tree.leaves(before))
                return total + jnp.sum(losses) + 1e-30 * kept, gradients

            shapes = jax.eval_shape(self._unravel, params[0])
            nothing = jax.tree.map(lambda leaf: jnp.zeros((batching.size, *leaf.shape), leaf.dtype), shapes)
            return jax.lax.fori_loop(0, count, piece, (jnp.zeros((), params.dtype), nothing))[0]

        return loop

    @whole_products()
    def _piece(self, batching: Batching, params: Any, data: Any, key: Any, jobs: Jobs) -> tuple[Any, Any]:
        """Return the losses and the gradients of a piece's jobs."""

        def row(worker):
            return jax.lax.dynamic_index_in_dim(params, worker, keepdims=False)

        def gradient(x, job):
            batch = jax.tree.map(lambda leaf: leaf[job.rows], data)
            own_key = jax.random.fold_in(jax.random.fold_in(key, job.worker), job.job)
            return jax.value_and_grad(self._problem.loss)(self._unravel(x), batch, own_key)

        if batching.way == "map":
            return jax.lax.map(lambda job: gradient(row(job.worker), job), jobs)
        read = params[jobs.worker] if "gathered" in batching.way else jax.lax.map(row, jobs.worker)
        return jax.vmap(gradient)(read, jobs)


def piece_sizes(mean_wave: float, quick: bool = False) -> list[int]:
    """Return the sizes to try, up to the mean wave: powers of two and the mean wave, or powers of eight if quick."""
    limit = max(1, int(mean_wave))
    sizes = {(8 if quick else 2) ** power for power in range(limit.bit_length())}
    return sorted({size for size in sizes if size <= limit} | (set() if quick else {limit}))


def mean_wave(worker: np.ndarray) -> float:
    """Return the mean length of the longest runs of a trace's commits in which no worker comes twice."""
    waves, seen = 1, set[int]()
    for one in worker.tolist():
        if one in seen:
            waves += 1
            seen.clear()
        seen.add(one)
    return len(worker) / waves
