"""The contenders of the benchmark: the replay, the gradients alone, and the usual hand-written loop
in JAX.
"""

import heapq
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError
from asyncsim.base.streams import Streams
from asyncsim.base.tracing import whole_products
from asyncsim.benchmark.turns import Case, Contender, calibrate, timed
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Gamma
from asyncsim.methods import METHODS, Method, Visit
from asyncsim.problems import Problem, digits, quadratic
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.replays.replay import Replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study.cell import meet

#: Methods that the usual loops implement.
USUAL = ("downpour", "gem")
#: Number of random images that replace MNIST: timing does not depend on their content.
_IMAGES = 60_000
#: Sizes of pieces to try for the gradients alone; gradients whose minibatches are planned
#: beforehand.
_PIECES, _PLANNED = (1, 8, 64), 256
#: Commits per second that no replay reaches: it limits a turn's length where gradients cost
#: nothing.
_MOST_COMMITS = 300_000


def make_problem(task: str) -> Problem:
    """Return a task's problem: the quadratic, digits, or a network (cnn, mlp) on images of MNIST's
    shape.
    """
    if task == "quadratic":
        return quadratic(curvature=np.geomspace(0.01, 1, 16), noise=0.1)
    if task == "digits":
        return digits()
    generator = Streams(0, "random images").generator(0)
    image = generator.standard_normal((_IMAGES, 28, 28), np.float32)
    images = {"image": image, "label": generator.integers(0, 10, _IMAGES, np.int32)}
    return mnist_from_arrays(images, images, network=task)


def contenders(
    case: Case,
    problem: Problem,
    gradients: "GradientsAlone",
    seconds: float,
    torch_loop: Any = None,
) -> list[Contender]:
    """Build the contenders: the replay, the gradients alone and, for the methods in `USUAL`, the
    usual loops.

    ``gradients``: already tuned. ``seconds``: approximate length of a turn. ``torch_loop``: the
    class ``TorchLoop`` of `pytorch`, if PyTorch is installed.
    """
    # At this rate the quadratic does not diverge with this number of workers.
    method = METHODS[case.method](learning_rate=0.5 / max(100, case.workers))
    cluster = Cluster(case.workers, Gamma(mean=1.0, cv=0.2), service=Constant(0.0))
    commits = max(1, round(seconds / (1 / gradients.per_second + 1 / _MOST_COMMITS)))
    entries = [
        Contender(
            "replay",
            commits,
            replaying(case, meet(cluster, method.timing), method, problem, commits),
        ),
        Contender(
            "gradients alone", gradients.rounded(gradients.per_second * seconds), gradients.run
        ),
    ]
    for name, kind in (("usual loop, JAX", UsualLoop), ("usual loop, PyTorch", torch_loop)):
        if case.method in USUAL and kind is not None:
            loop = kind(method, problem, cluster)
            entries.append(Contender(name, loop.tune(seconds), loop.run))
    return entries


def replaying(
    case: Case, cluster: Cluster, method: Method, problem: Problem, commits: int
) -> Callable[[int], float]:
    """Build the timed replay of one trace, repeated in every turn, on one device and without
    evaluations.

    A turn samples a long run, so costs that occur once a run are excluded: compilation, the initial
    state, and each worker's first commit, at which it draws its first epoch. Planning the trace
    grows with its length and is included.
    """
    first, device = cluster.workers, jax.local_devices()[:1]

    def make(trace: Any, problem: Problem) -> Replay:
        return Replay(
            trace, method, problem, stops=np.unique([first, len(trace.accepted)]), devices=device
        )

    # The cost of planning: how much longer a replay of one parameter takes to build for the long
    # trace.
    toy, traces = (
        quadratic([1.0]),
        [simulate(cluster, length) for length in (first + commits, first)],
    )
    long, short = (min(timed(make, trace, toy) for _ in range(3)) for trace in traces)

    def run(commits: int) -> float:
        replay = make(traces[0], problem)

        def advance(stop: int) -> None:
            replay.advance(stop)
            replay.wait()

        advance(first)
        seconds = timed(advance, first + commits)
        if replay.position < first + commits:
            raise InputError(
                f"methods: {case}: the replay diverged at commit {replay.position}; leave it out"
            )
        return seconds + max(0.0, long - short)

    return run


class GradientsAlone:
    """Gradients at the parameters of distinct workers, without updates, in the fastest batching.

    A batching is (size, way, threads). ``size``: workers whose gradients form a piece. ``way``:
    within a compiled loop over pieces, sequential (``"map"``) or one batch (``"vmap"``); or one
    call per gradient (``"call"``: a CPU splits a long gradient among its cores only outside loops).
    ``threads``: threads that compute concurrently. Loss, minibatches and parameter rows are those
    of a replay. `tune` sets ``best``, the fastest batching, and ``per_second``, its rate.
    """

    def __init__(self, problem: Problem, workers: int, seed: int = 0):
        self._problem, self._workers, self._seed = problem, workers, seed
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed))
        )
        start, self._unravel = ravel_pytree(params)
        # One row per worker, so that caches behave as in a replay.
        self._params, self._key = jnp.tile(start, (workers, 1)), jax.random.key(seed)
        self._data = jax.tree.map(jnp.asarray, problem.train)
        self._programs: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.best, self.per_second = (1, "map", 1), 0.0

    def run(self, count: int, batching: tuple[int, str, int] | None = None) -> float:
        """Compute ``rounded(count)`` gradients; return the seconds."""
        size, way, threads = batching or self.best
        program, jobs = self._program(size, way)
        pieces = self.rounded(count, batching) // size // threads

        def part(thread: int) -> None:
            arguments, begin = (self._params, self._data, self._key, jobs), thread * pieces
            if way == "call":
                jax.block_until_ready(
                    [program(*arguments, np.int32(begin + index))[0] for index in range(pieces)]
                )
            else:
                program(*arguments, np.int32(begin), np.int32(pieces)).block_until_ready()

        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(part, range(threads))))

    def rounded(self, count: float, batching: tuple[int, str, int] | None = None) -> int:
        """Round a count to whole pieces for each thread."""
        size, _, threads = batching or self.best
        return max(1, round(count / size / threads)) * size * threads

    def tune(self, seconds: float) -> None:
        """Time every batching for about ``seconds``; keep the fastest."""
        for size in sorted({min(size, self._workers) for size in _PIECES}):
            for way in ("map", "vmap") if size > 1 else ("map", "call"):
                for threads in sorted({1, os.cpu_count() or 1}):
                    batching = size, way, threads
                    run = partial(self.run, batching=batching)
                    amount = self.rounded(calibrate(run, seconds / 2, size * threads), batching)
                    rate = amount / min(run(amount) for _ in range(2))
                    if rate > self.per_second:
                        self.best, self.per_second = batching, rate

    def _program(self, size: int, way: str) -> tuple[Any, Any]:
        """Compile a loop over pieces; return it with the workers, job numbers and rows of the
        planned pieces.
        """
        if (size, way) in self._programs:
            return self._programs[size, way]
        # Pieces of distinct workers, cycling through all workers in random order.
        pieces = -(-max(_PLANNED, self._workers) // size)
        shuffled = Streams(self._seed, "gradients").generator(0).permutation(self._workers)
        worker, job = np.resize(shuffled, pieces * size), np.arange(pieces * size) // self._workers
        flat = (
            worker.astype(np.int32),
            job.astype(np.int32),
            minibatches(self._problem, self._workers)(worker, job),
        )
        jobs = jax.tree.map(
            lambda leaf: jnp.asarray(leaf.reshape(pieces, size, *leaf.shape[1:])), flat
        )

        def piece_gradients(params, data, key, jobs, index):
            piece_jobs = jax.tree.map(lambda leaf: leaf[index % leaf.shape[0]], jobs)
            return self._piece(way, params, data, key, piece_jobs)

        def loop(params, data, key, jobs, begin, count):
            def piece(index, carry):
                total, before = carry
                losses, gradients = piece_gradients(params, data, key, jobs, begin + index)
                # A value from the previous piece, too small to change the sum. The compiler cannot
                # know that, so it must compute and store the whole piece.
                dependency = sum(leaf.reshape(-1)[-1] for leaf in jax.tree.leaves(before))
                return total + jnp.sum(losses) + 1e-30 * dependency, gradients

            shapes = jax.eval_shape(self._unravel, params[0])
            nothing = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), shapes)
            return jax.lax.fori_loop(0, count, piece, (jnp.zeros((), params.dtype), nothing))[0]

        return self._programs.setdefault(
            (size, way), (jax.jit(piece_gradients if way == "call" else loop), jobs)
        )

    @whole_products()
    def _piece(self, way: str, params: Any, data: Any, key: Any, jobs: Any) -> tuple[Any, Any]:
        """Compute the losses and the gradients of a piece, with a leading axis."""

        def gradient(x, worker, job, rows):
            batch = jax.tree.map(lambda leaf: leaf[rows], data)
            own_key = jax.random.fold_in(jax.random.fold_in(key, worker), job)
            return jax.value_and_grad(self._problem.loss)(self._unravel(x), batch, own_key)

        if way == "call":
            worker, job, rows = (leaf[0] for leaf in jobs)
            return gradient(params[worker], worker, job, rows)
        if way == "map":
            return jax.lax.map(lambda job: gradient(params[job[0]], *job), jobs)
        # Rows are copied one by one: gathering them takes longer.
        return jax.vmap(gradient)(jax.lax.map(lambda worker: params[worker], jobs[0]), *jobs)


def events(cluster: Cluster, commits: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Yield pairs of worker and job in the order in which jobs end, from a heap of end times.

    Delays are drawn from the compute laws beforehand; the server is instantaneous.
    """
    streams, count = Streams(seed, "usual"), 2 * commits // cluster.workers + 64
    times = [law.sample(streams.generator(i), count) for i, law in enumerate(cluster.compute_laws)]
    heap = [(of_worker[0], i, 0) for i, of_worker in enumerate(times)]
    heapq.heapify(heap)
    for _ in range(commits):
        time, i, job = heap[0]
        yield i, job
        heapq.heapreplace(heap, (time + times[i][job + 1], i, job + 1))


def minibatches(problem: Problem, workers: int, seed: int = 0) -> Callable[[Any, Any], np.ndarray]:
    """Return a function from workers and jobs to the rows of their minibatches; empty without
    data.
    """
    batches = problem.batch_indices(seed, workers)
    if batches is None:
        return lambda worker, job: np.zeros((len(worker), 0), np.int32)
    return lambda worker, job: batches.rows(worker, job)[:, 0]


class UsualLoop:
    """A heap of events, one jitted gradient and one jitted update per event, separate arrays per
    worker.

    It records only losses; ``central`` and ``losses`` are the results of the last run.
    """

    def __init__(self, method: Method, problem: Problem, cluster: Cluster, seed: int = 0):
        self._method, self._cluster, self._seed = method, cluster, seed
        self._rows = minibatches(problem, cluster.workers, seed)
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed))
        )
        self.central, unravel = ravel_pytree(params)
        self._start, self._data = self.central, jax.tree.map(jnp.asarray, problem.train)
        self.losses: list[jax.Array] = []

        # One array for all fields of a visit: every further argument costs a transfer per event.
        def visit_of(facts):
            return Visit(
                facts[0],
                facts[1],
                facts[2],
                facts[3],
                time=jnp.float32(0),
                local_steps=jnp.int32(1),
            )

        @jax.jit
        @whole_products()
        def gradient(x, data, rows, key, facts):
            visit = visit_of(facts)
            batch = jax.tree.map(lambda array: array[rows], data)
            key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), visit.worker_step)
            loss, gradients = jax.value_and_grad(problem.loss)(unravel(x), batch, key)
            step, _ = method.optimizer.update(
                gradients, method.optimizer.init(params), None, visit=visit
            )
            return loss, ravel_pytree(step)[0]

        @jax.jit
        @whole_products()
        def update(central, server, worker, memory, step, start, facts):
            visit = visit_of(facts)
            message, worker, _ = method.message(worker, step, start, central, visit)
            applied = method.apply(server, central, message, memory, visit)
            return applied.central, applied.server, worker, applied.memory

        self._gradient, self._update = gradient, update

    def tune(self, seconds: float) -> int:
        """Return the number of commits that take about ``seconds``."""
        return calibrate(self.run, seconds)

    def run(self, commits: int) -> float:
        """Run ``commits`` commits from the start; return the seconds."""
        return timed(self._run, commits)

    def _run(self, commits: int) -> None:
        n, method, key = self._cluster.workers, self._method, jax.random.key(self._seed)
        central, server, losses = self._start, method.init_server(self._start), []
        starts, reads = [central] * n, [0] * n
        # Nothing is changed in place, so all may begin with the same arrays.
        workers, memories = [method.init_worker(central)] * n, [method.init_memory(central)] * n
        for commit, (i, job) in enumerate(events(self._cluster, commits, self._seed)):
            facts = np.array([commit - reads[i], i, job, commit], np.int32)
            loss, step = self._gradient(
                starts[i], self._data, self._rows([i], [job])[0], key, facts
            )
            central, server, workers[i], memories[i] = self._update(
                central, server, workers[i], memories[i], step, starts[i], facts
            )
            losses.append(loss)
            starts[i], reads[i] = central, commit + 1
        self.central, self.losses = jax.block_until_ready((central, losses))
