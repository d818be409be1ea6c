"""What asyncsim is compared with: the model and the loop that one would write by hand."""

import heapq
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import simpy
from jax.flatten_util import ravel_pytree

from asyncsim.clusters.cluster import Cluster
from asyncsim.methods import Method, Visit
from asyncsim.problems import Problem
from asyncsim.problems.batches import BatchIndices
from asyncsim.problems.layers import cross_entropy
from asyncsim.products import whole_products
from asyncsim.replays.replay_state import PROXY_MOMENTUM
from asyncsim.simulation.delays import delays
from asyncsim.streams import Streams

#: The constant in the place of a gradient: thousands of such steps hardly move any parameter.
_SMALL_GRADIENT = 1e-6


def usual_model(cluster: Cluster, commits: int, seed: int = 0) -> np.ndarray:
    """Simulate an exchange through a first-in-first-out server as SimPy's documentation does.

    A process per worker and a Resource for the server; the times come from the same random streams as `simulate`'s.

    Returns
    -------
    Float64[ndarray, "commits 4"]
        Worker, arrival, begin and end of service (s) of each commit.
    """
    env = simpy.Environment()
    compute = delays(cluster.compute_laws, seed, "compute", cluster.windows)
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


class Events:
    """The heap of an event loop: whose computation ends next, and when.

    Delays are drawn from the compute law before the loop; the server is instantaneous.
    """

    def __init__(self, cluster: Cluster, commits: int, seed: int = 0):
        streams = Streams(seed, "usual")
        count = 2 * commits // cluster.workers + 64
        self._times = [law.sample(streams.generator(i), count) for i, law in enumerate(cluster.compute_laws)]
        self._heap = [(times[0], i) for i, times in enumerate(self._times)]
        heapq.heapify(self._heap)

    def next(self) -> int:
        """Return the worker whose computation ends next."""
        return self._heap[0][1]

    def start(self, job: int) -> None:
        """Let that worker start its next job."""
        now, worker = self._heap[0]
        heapq.heapreplace(self._heap, (now + self._times[worker][job], worker))


class Minibatches:
    """The examples of each job, drawn once for all runs: an epoch's shuffling is no part of a short run's time."""

    def __init__(self, problem: Problem, seed: int = 0):
        self._problem, self._seed = problem, seed
        self._of_workers: dict[int, BatchIndices | None] = {}

    def of(self, workers: int) -> BatchIndices | None:
        """Return the minibatches of so many workers; None for a problem without data."""
        if workers not in self._of_workers:
            self._of_workers[workers] = self._problem.batch_indices(self._seed, workers)
        return self._of_workers[workers]


class UsualLoop:
    """A heap of events, one jitted gradient and one jitted update per event, separate arrays per worker.

    It keeps the losses or, if it ``records``, all that a replay records of every commit, and for that the momentum of a
    proxy for each worker. Made once, so that compilation can be left out of the measurement.
    """

    def __init__(self, method: Method, problem: Problem, seed: int = 0, records: bool = False):
        self.method, self.seed = method, seed
        self._keeps_proxy = records and method.proxy is None
        self.minibatches = Minibatches(problem, seed)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(jax.random.key(seed)))
        self.start, unravel = ravel_pytree(params)
        self.data = jax.tree.map(jnp.asarray, problem.train)

        # One array for all that a visit knows: every argument more costs a transfer per event.
        @jax.jit
        @whole_products()
        def gradient(x, data, rows, key, facts):
            visit = _visit(facts)
            batch = jax.tree.map(lambda array: array[rows], data)
            key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), visit.worker_step)
            loss, gradients = jax.value_and_grad(problem.loss)(unravel(x), batch, key)
            steps, _ = method.optimizer.update(gradients, method.optimizer.init(params), None, visit=visit)
            return loss, ravel_pytree(steps)[0]

        @jax.jit
        @whole_products()
        def update(central, server, worker, memory, proxy, step, start, facts):
            visit = _visit(facts)
            origin = method.origin(worker, start) if method.origin else start
            message, worker, _ = method.message(worker, step, start, central, visit)
            applied = method.apply(server, central, message, memory, visit)
            recorded: Any = ()
            if records:
                momentum = method.proxy(worker) if method.proxy else PROXY_MOMENTUM * proxy + step
                proxy = momentum if self._keeps_proxy else ()
                vectors = applied.central - central, applied.central - origin, momentum
                recorded = jnp.stack([jnp.vdot(vector, vector) for vector in vectors])
            return applied.central, applied.server, worker, applied.memory, proxy, recorded

        self.gradient, self.update = gradient, update

    def run(self, cluster: Cluster, commits: int) -> Any:
        """Run some commits from the start; return the central variable, the losses and what else is recorded.

        That is for each commit ``[3]``: the squared norms of the central variable's step, of its way from where the
        worker measures it, and of the proxy's momentum.
        """
        n = cluster.workers
        events, batches = Events(cluster, commits, self.seed), self.minibatches.of(n)
        key = jax.random.key(self.seed)
        central, server = self.start, self.method.init_server(self.start)
        starts, reads, jobs = [central] * n, [0] * n, [0] * n
        # Nothing is changed in place, so all may begin with the same arrays.
        workers, memories = [self.method.init_worker(central)] * n, [self.method.init_memory(central)] * n
        proxies: list[Any] = [jnp.zeros_like(central) if self._keeps_proxy else ()] * n
        losses, recorded = [], []
        for commit in range(commits):
            i = events.next()
            facts = np.array([commit - reads[i], i, jobs[i], commit], np.int32)
            rows = batches.rows([i], [jobs[i]])[0, 0] if batches is not None else None
            loss, step = self.gradient(starts[i], self.data, rows, key, facts)
            central, server, workers[i], memories[i], proxies[i], numbers = self.update(
                central, server, workers[i], memories[i], proxies[i], step, starts[i], facts
            )
            losses.append(loss)
            recorded.append(numbers)
            starts[i], reads[i], jobs[i] = central, commit + 1, jobs[i] + 1
            events.start(jobs[i])
        return jax.block_until_ready((central, losses, recorded))


def with_usual_convolutions(problem: Problem) -> Problem:
    """Return ``mnist`` with its network ``"cnn"`` as one would write it: XLA's own convolutions and pooling.

    The parameters and the loss are the same; dropout comes before pooling, as in the paper.
    """
    dropout = problem.config["dropout"]

    def convolved(layer: Any, images: jax.Array) -> jax.Array:
        layout = "NHWC", "HWIO", "NHWC"
        made = jax.lax.conv_general_dilated(images, layer["weight"], (1, 1), "VALID", dimension_numbers=layout)
        return made + layer["bias"]

    def pooled(images: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        activity = jax.nn.relu(pooled(convolved(params["conv1"], batch["image"][..., None])))
        activity = convolved(params["conv2"], activity)
        if dropout > 0:
            examples, _, _, channels = activity.shape
            kept = jax.random.uniform(key, (channels, 1, 1, examples), jnp.float32) >= dropout
            activity = jnp.where(kept.T, activity / (1 - dropout), 0.0)
        activity = jax.nn.relu(pooled(activity))
        activity = jnp.moveaxis(activity, -1, 1).reshape(len(activity), -1)
        for name in ("dense1", "dense2"):
            activity = jax.nn.relu(activity @ params[name]["weight"] + params[name]["bias"])
        return cross_entropy(activity @ params["dense3"]["weight"] + params["dense3"]["bias"], batch["label"])

    return replace(problem, loss=loss)


def without_gradients(problem: Problem) -> Problem:
    """Return a problem of the same parameters and data whose gradient is a constant, which only has to be written.

    What a replay of it takes is what commits take, with the host's planning and recording of them.
    """

    @jax.custom_vjp
    def constant(params: Any) -> jax.Array:
        return jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))

    def gradient(params: Any, of_loss: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda leaf: jnp.full_like(leaf, _SMALL_GRADIENT) * of_loss, params),)

    constant.defvjp(lambda params: (constant(params), params), gradient)
    return replace(problem, loss=lambda params, batch, key: constant(params), init_state=None)


def _visit(facts: Any) -> Visit:
    return Visit(facts[0], facts[1], facts[2], facts[3], time=jnp.float32(0), local_steps=jnp.int32(1))
