"""The arrays of real processes, computed by the functions of a replay's step.

The server holds the workers' method states, because it forms their messages: only there is the
central variable of the visit known.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.tracing import forget_other_precision, whole_products
from asyncsim.clusters.cluster import Cluster
from asyncsim.methods.method import Memories, Visit
from asyncsim.replays.local import Learner, LocalResult, build_local
from asyncsim.replays.observing import observe
from asyncsim.replays.plan import method_key, visit_key
from asyncsim.replays.programs import cast, flatten_problem, on_vectors
from asyncsim.replays.recorders import energy
from asyncsim.replays.running import problem_state, start
from asyncsim.replays.state import WorkerRow, no_messages
from asyncsim.replays.step import ServerState, StepInputs, begin, finish

#: Recorder of each commit's quantities besides its loss and the length of its step.
RECORDER = energy()


class Task(NamedTuple):
    """The arguments of a recording; see `asyncsim.real.record`."""

    method: Any
    problem: Any
    cluster: Cluster
    commits: int
    seed: int
    precision: str

    def in_precision(self) -> Any:
        """Return the context in which JAX computes in the task's precision."""
        return jax.enable_x64(self.precision == "float64")


def pulls(cluster: Cluster) -> bool:
    """Return whether workers read, in a visit of its own, the parameters for their next message."""
    return cluster.separate_reads and cluster.protocol == "read_then_write"


class Computation(NamedTuple):
    """A worker's computation."""

    number: int | np.integer  #: among the worker's jobs, which decides the minibatches
    step: int | np.integer  #: the worker's accepted commits before it
    start: Any  #: the parameters, a vector
    learner: Learner  #: the local optimizer's and the problem's state


class Computing:
    """Computes the jobs of a task, equal to a replay's."""

    def __init__(self, task: Task):
        forget_other_precision()
        problem, cluster, dtype = task.problem, task.cluster, jnp.dtype(task.precision)
        self._window, self._workers = cluster.windows[0], cluster.workers
        self._batches = problem.batch_indices(task.seed, cluster.workers)
        self._start, key = start(problem, task.seed, dtype, cluster.workers)
        self._problem_state = problem_state(problem, dtype)
        self._method_key = method_key(task.seed)
        self.flat = flatten_problem(problem, dtype, jax.devices()[0])
        self.method = on_vectors(task.method, problem, dtype)
        self.central = self.flat.ravel(self._start.params)
        data = jax.tree.map(jnp.asarray, cast(problem.train, dtype))
        local = build_local(self.method, problem, self.flat, self._window)

        @jax.jit
        @whole_products()
        def compute(data, key, own_key, worker, job, rows):
            visit = self.visit(worker, job.step, own_key)
            return local(data, key, job.start, job.learner, visit, job.number, rows)

        self._compute = lambda *arguments: compute(data, key, *arguments)

    def visit(self, worker: Any, step: Any, key: Any, kept: Any = ()) -> Visit:
        """Return the part of a visit that a worker knows in advance."""
        unknown: Any = None  # its time, its staleness, its commit
        window, workers = jnp.int32(self._window), jnp.int32(self._workers)
        return Visit(
            unknown, worker, step, unknown, unknown, window, kept=kept, workers=workers, key=key
        )

    def visit_key(self, worker: int, step: Any) -> Any:
        """Return the key of a worker's visit after ``step`` commits; ``()`` without draws."""
        if not self.method.needs_key:
            return ()
        return visit_key(self._method_key, np.int32(worker), np.int32(step))

    def first(self, worker: int) -> tuple[Any, WorkerRow]:
        """Return the vector from which a worker starts, and its states."""
        method, params = self.method, self._start.of_worker(self.method, worker)
        replica = self.flat.ravel(params)
        memory = () if method.gossips else method.init_memory(replica)
        recorders = (RECORDER.init(method, self.central),)
        learner = Learner(method.optimizer.init(params), self._problem_state)
        return replica, WorkerRow(method.init_worker(replica), memory, recorders, learner)

    def first_job(self, worker: int) -> Computation:
        """Return a job with the shapes of all jobs."""
        replica, row = self.first(worker)
        return Computation(0, 0, np.asarray(replica), row.learner)

    def trace(self, worker: int) -> None:
        """Trace the local steps, which must not need values that a worker lacks."""
        jax.eval_shape(self._compute, *self._arguments(worker, self.first_job(worker)))

    def run(self, worker: int, job: Computation) -> LocalResult:
        """Compute a job; the result has NumPy arrays."""
        return jax.tree.map(np.asarray, self._compute(*self._arguments(worker, job)))

    def _arguments(self, worker: int, job: Computation) -> tuple[Any, ...]:
        rows = np.zeros((self._window, 0), np.int32)
        if self._batches is not None:
            rows = self._batches.rows([worker], [job.number], self._window)[0]
        typed = job._replace(number=np.int32(job.number), step=np.int32(job.step))
        return self.visit_key(worker, job.step), np.int32(worker), typed, rows


class Parameters:
    """The central variable and all states at a server: applies commits and answers reads.

    Attributes
    ----------
    state : ServerState
    visible : Array
        The central variable of the newest version, which reads see.
    rows : list of WorkerRow
        The states of each worker.
    read, pulled : list of Array
        The reads of each worker, for its job and for its next message. The latter is None unless
        that read is a separate visit.
    """

    def __init__(self, task: Task, computing: Computing):
        self._cluster, self._computing = task.cluster, computing
        method, central = computing.method, computing.central
        replicas, rows = zip(*map(computing.first, range(task.cluster.workers)), strict=True)
        messages = task.cluster.policy.per_version(task.cluster.workers)
        waiting = no_messages(method, rows[0], central, messages)
        self.state = ServerState(central, method.init_server(central), waiting)
        self.visible, self.rows = central, [*rows]
        self.read: list[Any] = [*replicas] if method.reads_replica else [central] * len(rows)
        self.pulled: list[Any] = [None] * len(rows)
        order = "before" if task.cluster.protocol == "read_then_write" else "after"

        @jax.jit
        def start_of(row, read):
            unknown: Any = None  # the visit is known at the commit
            return begin(method, None, StepInputs(unknown, row, read))[1]

        @jax.jit
        @whole_products()
        def commit(state, inputs, start, local, memories):
            outputs = finish(method, order, state, inputs, start, local, *memories)
            recorders, numbers = observe([RECORDER], inputs.row.recorders, outputs.commit)
            row = WorkerRow(outputs.commit.worker, outputs.commit.memory, recorders, ())
            return outputs.server_state, row, outputs.read, numbers

        self._start_of, self._commit = start_of, commit
        self._replies = method.reply is not None

    def job(self, worker: int, number: int, step: int) -> Computation:
        """Return a worker's next job."""
        row = self.rows[worker]
        start = np.asarray(self._start_of(row, self.read[worker]))
        return Computation(number, step, start, jax.tree.map(np.asarray, row.learner))

    def commit(
        self, counts: Mapping[str, int], time: float, start: Any, result: LocalResult
    ) -> list[float]:
        """Apply a worker's update; return its loss and the numbers of `RECORDER`.

        ``counts``: staleness, worker, worker_step, commit, place and completes of its `Visit`.
        """
        worker, cluster, dtype = counts["worker"], self._cluster, self.state.central.dtype
        messages = cluster.policy.per_version(cluster.workers)
        counts = {**counts, "local_steps": cluster.windows[0], "messages": messages}
        counts["workers"] = cluster.workers
        typed: dict[str, Any] = {name: np.int32(count) for name, count in counts.items()}
        typed |= {"completes": np.bool_(counts["completes"]), "time": np.asarray(time, dtype)}
        typed["delays"] = typed["staleness"]
        visit = Visit(**typed, key=self._computing.visit_key(worker, counts["worker_step"]))
        pulled = () if self.pulled[worker] is None else self.pulled[worker]
        row = self.rows[worker]._replace(learner=())
        inputs = StepInputs(visit, row, self.read[worker], pulled)
        local = LocalResult(result.update, np.asarray(result.loss, dtype), ())
        self.state, row, reply, numbers = self._commit(
            self.state, inputs, start, local, self._memories()
        )
        self.rows[worker] = row._replace(learner=result.learner)
        if self._replies:
            self.read[worker] = reply
        if counts["completes"]:
            self.visible = self.state.central
        _, *recorded = np.asarray(numbers).tolist()
        return [float(result.loss), *recorded]

    def set_read(self, worker: int, read: Any) -> None:
        """Let a worker's next job start from a read, unless the method has replied to it."""
        if not self._replies:
            self.read[worker] = read

    def warm_up(self) -> None:
        """Compile all programs; change no array."""
        arrays = self.state, self.visible, [*self.rows], [*self.read], [*self.pulled]
        if pulls(self._cluster):
            self.pulled[0] = self.visible
        job, names = self.job(0, 0, 0), ("staleness", "worker", "worker_step", "commit", "place")
        result = LocalResult(job.start, 0.0, job.learner)
        self.commit({**dict.fromkeys(names, 0), "completes": 0}, 0.0, job.start, result)
        self.state, self.visible, self.rows, self.read, self.pulled = arrays

    def _memories(self) -> tuple[Memories, ...]:
        if not self._computing.method.sees_memories:
            return ()
        memories = [row.memory for row in self.rows]
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
        newer = jax.tree.map(lambda leaf: leaf[:1], rows)  # of no worker
        return (Memories(rows, newer, jnp.full(1, len(memories), jnp.int32)),)
