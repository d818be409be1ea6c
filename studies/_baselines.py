"""What asyncsim is compared with: the model and the loop that one would write by hand."""

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import simpy
from jax.flatten_util import ravel_pytree

from asyncsim.cluster import Cluster
from asyncsim.delays import delays
from asyncsim.flat import flatten
from asyncsim.kernel import initial_state, read_rows
from asyncsim.local import build_local
from asyncsim.methods import Method, Visit
from asyncsim.plan import Plan
from asyncsim.problems import Problem
from asyncsim.streams import Streams
from asyncsim.trace import Trace


def usual_model(cluster: Cluster, commits: int, seed: int = 0) -> np.ndarray:
    """Simulate an exchange through a first-in-first-out server as SimPy's documentation does.

    A process per worker and a Resource for the server; the times come from the same random streams as `simulate`'s.

    Returns
    -------
    Float64[ndarray, "commits 4"]
        Worker, arrival, begin and end of service (s) of each commit.
    """
    env = simpy.Environment()
    compute = delays(cluster.compute_laws, seed, "compute", cluster.window)
    service = delays([cluster.service] * cluster.workers, seed, "service")
    server = simpy.Resource(env)
    visits: list[tuple[int, float, float, float]] = []
    finished = env.event()

    def work(worker: int):
        while True:
            yield env.timeout(compute(worker))
            arrive = env.now
            with server.request() as request:
                yield request
                serve = env.now
                yield env.timeout(service(worker))
            visits.append((worker, arrive, serve, env.now))
            if len(visits) == commits:
                finished.succeed()

    for worker in range(cluster.workers):
        env.process(work(worker))
    env.run(until=finished)
    return np.array(visits[:commits])


class UsualLoop:
    """A heap of events, one jitted gradient and one jitted update per event, separate arrays per worker.

    Delays are drawn from the compute law when a computation starts; the server is instantaneous. Made once, so that
    compilation can be left out of the measurement.
    """

    def __init__(self, cluster: Cluster, method: Method, problem: Problem, seed: int = 0):
        self.cluster, self.method, self.problem, self.seed = cluster, method, problem, seed
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed)))
        self.start, unravel = ravel_pytree(params)
        self.data = jax.tree.map(jnp.asarray, problem.train)

        # One array for all that a visit knows: every argument more costs a transfer per event.
        @jax.jit
        def gradient(x, data, rows, key, facts):
            visit = _visit(facts)
            batch = jax.tree.map(lambda array: array[rows], data)
            key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), visit.worker_step)
            loss, gradients = jax.value_and_grad(problem.loss)(unravel(x), batch, key)
            steps, _ = method.optimizer.update(gradients, method.optimizer.init(params), None, visit=visit)
            return loss, ravel_pytree(steps)[0]

        @jax.jit
        def update(central, server, worker, memory, step, start, facts):
            visit = _visit(facts)
            message, worker, _ = method.message(worker, step, start, central, visit)
            applied = method.apply(server, central, message, memory, visit)
            return applied.central, applied.server, worker, applied.memory

        self.gradient, self.update = gradient, update

    def run(self, commits: int) -> Any:
        """Run some commits from the start; return the central variable and the losses."""
        n = self.cluster.workers
        streams = Streams(self.seed, "usual")
        batches = self.problem.batch_indices(self.seed, n)
        times = [
            law.sample(streams.generator(i), 2 * commits // n + 64) for i, law in enumerate(self.cluster.compute_laws)
        ]
        key = jax.random.key(self.seed)
        central, server = self.start, self.method.init_server(self.start)
        starts, reads, jobs = [central] * n, [0] * n, [0] * n
        workers = [self.method.init_worker(central) for _ in range(n)]
        memories = [self.method.init_memory(central) for _ in range(n)]
        events = [(times[i][0], i) for i in range(n)]
        heapq.heapify(events)
        losses = []
        for commit in range(commits):
            now, i = events[0]
            facts = np.array([commit - reads[i], i, jobs[i], commit], np.int32)
            rows = batches.rows([i], [jobs[i]])[0, 0] if batches is not None else None
            loss, step = self.gradient(starts[i], self.data, rows, key, facts)
            central, server, workers[i], memories[i] = self.update(
                central, server, workers[i], memories[i], step, starts[i], facts
            )
            losses.append(loss)
            starts[i], reads[i], jobs[i] = central, commit + 1, jobs[i] + 1
            heapq.heapreplace(events, (now + times[i][jobs[i]], i))
        return jax.block_until_ready((central, losses))


def _visit(facts: Any) -> Visit:
    return Visit(facts[0], facts[1], facts[2], facts[3], time=jnp.float32(0), local_steps=jnp.int32(1))


class GradientsAlone:
    """The gradients of a replay and nothing else: the same function, pieces and batches, parameters per worker.

    Attributes
    ----------
    amount : int
        Gradients that one `run` computes.
    """

    def __init__(self, trace: Trace, method: Method, problem: Problem, seed: int = 0):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed)))
        plan = Plan(trace, problem, seed, np.array([len(trace)]), 0, jnp.dtype("float32"))
        layout, flat = plan.layout(trace, problem, proxy_momentum=0.0), flatten(params)
        local = build_local(method, problem, trace.window, flat)
        self.state = initial_state(method, flat, params, (), plan.waves.slots, 0, trace.workers)
        self.data = jax.tree.map(jnp.asarray, problem.train)
        self.key = jax.random.key(seed)
        self.chunks = [(pieces, len(starts) - 1) for starts, pieces in plan.chunks(0, len(trace))]
        self.amount = len(trace)

        @jax.jit
        def gradients(state, data, key, pieces, count):
            def one_piece(index, carry):
                total, scratch = carry
                piece = jax.tree.map(lambda leaf: leaf[index], pieces)
                read = read_rows(state.read, piece.slot, piece.size, scratch)
                rows = jax.tree.map(lambda leaf: leaf[: layout.piece_size], state.workers)
                arguments = (rows, read, piece.visit, piece.job, piece.rows)
                if layout.one_by_one:
                    results = jax.lax.map(lambda one: local(data, key, *one), arguments)
                else:
                    results = jax.vmap(lambda *one: local(data, key, *one))(*arguments)
                return total + jnp.sum(results.update[:, 0]) + results.update[0], read

            empty = jnp.zeros((layout.piece_size, state.central.size), state.central.dtype)
            return jax.lax.fori_loop(0, count, one_piece, (jnp.zeros_like(state.central), empty))[0]

        self.gradients = gradients

    def run(self) -> Any:
        """Compute all gradients once."""
        results = [
            self.gradients(self.state, self.data, self.key, pieces, np.int32(count)) for pieces, count in self.chunks
        ]
        return jax.block_until_ready(results)
