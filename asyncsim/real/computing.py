"""The computations of real processes, by a replay's functions: local steps and commits.

The server holds the workers' method states, because it forms their messages: only there is the
central variable of the visit known.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.files import open_file, write_whole
from asyncsim.base.tracing import forget_other_precision, whole_products
from asyncsim.methods.method import Memories, Method, Visit
from asyncsim.problems.problem import Problem
from asyncsim.real.processes import Processes
from asyncsim.real.recording import RECORDED, Account, Event, Header
from asyncsim.replays.check import check_method
from asyncsim.replays.local import Learner, LocalResult, build_local, flatten
from asyncsim.replays.observing import observe
from asyncsim.replays.plan import method_key, visit_key
from asyncsim.replays.programs import IdentityKey, as_data, cast, on_vectors
from asyncsim.replays.recorders import energy
from asyncsim.replays.running import problem_state, start
from asyncsim.replays.state import WorkerRow, no_messages
from asyncsim.replays.step import ServerState, StepInputs, begin, finish

#: Recorder of each commit's quantities besides its loss and the length of its step.
RECORDER = energy()


class Computation(NamedTuple):
    """A worker's job."""

    job: int  #: its number among the worker's jobs, which decides the minibatches
    step: int  #: the worker's commits before it
    start: Any  #: the parameters, a vector
    learner: Learner  #: the local optimizer's and the problem's state


class OwnVisit:
    """The part of a `Visit` that a worker knows in advance: neither its time nor its staleness.

    ``kept`` is known only without a server.
    """

    def __init__(
        self,
        worker: Any,
        worker_step: Any,
        local_steps: Any,
        workers: Any,
        key: Any,
        kept: Any = None,
    ):
        self.worker, self.worker_step, self.key = worker, worker_step, key
        self.local_steps, self.workers = jnp.int32(local_steps), jnp.int32(workers)
        if kept is not None:
            self.kept = kept

    def _replace(self, key: Any) -> "OwnVisit":
        """Return the visit with another key, as `Visit._replace` does."""
        return OwnVisit(
            self.worker,
            self.worker_step,
            self.local_steps,
            self.workers,
            key,
            self.__dict__.get("kept"),
        )

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"method: its functions on a worker depend on the visit's {name}, which a real worker "
            "cannot know before "
            "the visit; let the server's message or apply do it, or replay a trace"
        )


class Computing:
    """Computes the jobs of a recording's workers, equal to a replay's."""

    def __init__(self, method: Method, problem: Problem, header: Header):
        seed, precision, workers = header.seed, header.precision, header.processes.workers
        self.x64, self._window = precision == "float64", header.processes.window
        self._batches = problem.batch_indices(seed, workers)
        with jax.enable_x64(self.x64):
            forget_other_precision()
            dtype = jnp.dtype(precision)
            self._start, self._key = start(problem, seed, dtype, workers)
            self.params = self._start.params
            self._method_key = method_key(seed)
            self.flat = flatten(self.params)
            self._data = jax.tree.map(jnp.asarray, as_data(problem.train, dtype))
            self._problem_state = problem_state(problem, dtype)
            #: On vectors, for the server and for workers without one.
            self.method = on_vectors(method, problem, dtype)
            self._compute = _compiled_steps(
                IdentityKey(self.method), IdentityKey(problem), workers, self._window, precision
            )

    def first_job(self) -> Computation:
        """Return a job with the shapes of any worker's first."""
        with jax.enable_x64(self.x64):
            return Computation(0, 0, np.asarray(self.flat.ravel(self.params)), self.first_learner())

    def first_replica(self, worker: int) -> Any:
        """Return the vector from which a worker starts."""
        return self.flat.ravel(self._start.of_worker(self.method, worker))

    def first_learner(self, worker: int = 0) -> Learner:
        """Return the initial states of the local optimizer and of the problem."""
        with jax.enable_x64(self.x64):
            params = self._start.of_worker(self.method, worker)
            return Learner(self.method.optimizer.init(params), self._problem_state)

    def run(self, worker: int, job: Computation) -> LocalResult:
        """Compute a job; the result has NumPy arrays."""
        with jax.enable_x64(self.x64):
            return jax.tree.map(np.asarray, self._compute(*self._arguments(worker, job)))

    def check(self) -> None:
        """Raise InputError if the local optimizer needs values that a worker lacks."""
        with jax.enable_x64(self.x64):
            jax.eval_shape(self._compute, *self._arguments(0, self.first_job()))

    def visit_key(self, worker: int, step: int) -> Any:
        """Return the key of a worker's visit after ``step`` commits; ``()`` without draws."""
        return (
            visit_key(self._method_key, np.int32(worker), np.int32(step))
            if self.method.needs_key
            else ()
        )

    def _arguments(self, worker: int, job: Computation) -> tuple[Any, ...]:
        rows = np.zeros((self._window, 0), np.int32)
        if self._batches is not None:
            rows = self._batches.rows([worker], [job.job], self._window)[0]
        numbers = (np.int32(number) for number in (worker, job.step, job.job))
        own_key = self.visit_key(worker, job.step)
        return self._data, self._key, own_key, job.start, job.learner, *numbers, rows


@functools.lru_cache(maxsize=32)
def _compiled_steps(
    method: IdentityKey, problem: IdentityKey, workers: int, window: int, precision: str
) -> Callable[..., Any]:
    """Return the jitted local steps of a method and a problem, compiled once in a process."""
    params = jax.eval_shape(
        lambda key: cast(problem.value.init(key), jnp.dtype(precision)), jax.random.key(0)
    )
    flat = flatten(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
    local = build_local(method.value, problem.value, flat, window)

    def compute(data, key, own_key, start, learner, worker, worker_step, job, rows):
        visit: Any = OwnVisit(worker, worker_step, window, workers, own_key)
        return local(data, key, start, learner, visit, job, rows)

    return jax.jit(whole_products()(compute))


class State(NamedTuple):
    """The server's arrays at one instant."""

    central: Any  #: the central variable, a vector
    server: Any  #: the method's state on the server
    workers: tuple[WorkerRow, ...]  #: all states of each worker
    read: tuple[Any, ...]  #: each worker's read for its present computation
    pulled: tuple[Any, ...]  #: each worker's read for its next message, if that is a separate visit


class Parameters:
    """The central variable and all states: applies commits and answers reads, one after the
    other.
    """

    def __init__(self, processes: Processes, computing: Computing):
        method = computing.method
        self._processes, self._x64, self._visit_key = processes, computing.x64, computing.visit_key
        with jax.enable_x64(self._x64):
            central = computing.flat.ravel(computing.params)
            self._dtype = central.dtype
            replicas = tuple(map(computing.first_replica, range(processes.workers)))
            rows = tuple(
                WorkerRow(
                    method=method.init_worker(replica),
                    memory=method.init_memory(replica),
                    recorders=(RECORDER.init(method, central),),
                    learner=computing.first_learner(worker),
                )
                for worker, replica in enumerate(replicas)
            )
            pulled = (central,) * processes.workers
            reads = replicas if method.reads_replica else pulled
            self.state = State(central, method.init_server(central), rows, reads, pulled)
        order = "before" if processes.protocol == "read_then_write" else "after"
        self._resumes, self._sees_memories = method.resume is not None, method.sees_memories
        self._begin, self._commit = _compiled_step(IdentityKey(method), order)

    def job(self, worker: int, account: Account) -> Computation:
        """Return a worker's present job."""
        row = self.state.workers[worker]
        start = self.state.read[worker]
        with jax.enable_x64(self._x64):
            start = np.asarray(self._begin(row, start) if self._resumes else start)
        return Computation(account.job, account.steps, start, jax.tree.map(np.asarray, row.learner))

    def commit(self, row: Event, start: Any, result: LocalResult) -> dict[str, float]:
        """Apply a worker's update; return the recorded quantities besides the loss."""
        worker, state = row["worker"], self.state
        counts = {name: row[name] for name in ("staleness", "worker", "worker_step", "local_steps")}
        counts |= {"commit": row["version"] - 1, "workers": self._processes.workers}
        typed: dict[str, Any] = {name: np.int32(count) for name, count in counts.items()}
        with jax.enable_x64(self._x64):
            typed |= {
                "time": np.asarray(row["commit_time"], self._dtype),
                "completes": np.bool_(True),
            }
            typed |= {"place": np.int32(0), "messages": np.int32(1)}
            typed["delays"] = typed["staleness"]
            visit = Visit(key=self._visit_key(worker, row["worker_step"]), **typed)
            pulled = state.pulled[worker]
            inputs = StepInputs(
                visit, state.workers[worker]._replace(learner=()), state.read[worker]
            )
            if self._processes.pulls:
                inputs = inputs._replace(pulled=pulled)
            local = LocalResult(result.update, np.asarray(result.loss, self._dtype), ())
            memories = tuple(row.memory for row in state.workers) if self._sees_memories else ()
            server_state = ServerState(state.central, state.server)
            server_state, worker_row, reply, numbers = self._commit(
                server_state, inputs, start, local, memories
            )
            _, *recorded = np.asarray(numbers).tolist()
        self.state = state._replace(
            central=server_state.central,
            server=server_state.server,
            workers=_put(state.workers, worker, worker_row._replace(learner=result.learner)),
            read=_put(state.read, worker, pulled if self._processes.pulls else reply),
        )
        return dict(zip(RECORDED[1:], recorded, strict=True))

    def read(self, worker: int) -> None:
        """Store the central variable as a worker's read for its next computation."""
        self.state = self.state._replace(read=_put(self.state.read, worker, self.state.central))

    def pull(self, worker: int) -> Any:
        """Store the central variable as a worker's read for its next message; return it."""
        self.state = self.state._replace(pulled=_put(self.state.pulled, worker, self.state.central))
        return np.asarray(self.state.central)


@functools.lru_cache(maxsize=32)
def _compiled_step(same_method: IdentityKey, reads: str) -> tuple[Any, Any]:
    """Return the jitted functions of a replay's step: the start of local steps, and a commit."""
    method = same_method.value

    def start(row, read):
        visit: Any = None  # known at the commit
        return begin(method, None, StepInputs(visit, row, read))[1]

    def commit(server_state, inputs, start, local, memories):
        # Each message makes a version.
        server_state = server_state._replace(
            waiting=no_messages(method, inputs.row, server_state.central, 1)
        )
        everyone = [_all_memories(memories)] if method.sees_memories else []
        outputs = finish(method, reads, server_state, inputs, start, local, *everyone)
        recorders, numbers = observe([RECORDER], inputs.row.recorders, outputs.commit)
        row = WorkerRow(outputs.commit.worker, outputs.commit.memory, recorders, ())
        return outputs.server_state._replace(waiting=()), row, outputs.read, numbers

    return jax.jit(start), jax.jit(whole_products()(commit))


def _all_memories(memories: tuple[Any, ...]) -> Memories:
    """Return the memories of all workers, without newer ones beside the table."""
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    return Memories(
        rows, jax.tree.map(lambda leaf: leaf[:1], rows), jnp.full(1, len(memories), jnp.int32)
    )


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def save_state(path: Path, state: State, events: int) -> Path:
    """Write a state and the number of its events; the whole file or nothing."""
    leaves: dict[str, Any] = {
        f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))
    }
    return write_whole(path, lambda partial: np.savez(partial, events=np.array(events), **leaves))


def load_state(path: Path, like: State) -> tuple[State, int]:
    """Read a file of `save_state` into the structure of another state."""
    with open_file(path) as stream, np.load(stream) as file:
        leaves, structure = jax.tree.flatten(like)
        arrays = [file[name] for name in file.files if name != "events"]
        if [leaf.shape for leaf in arrays] != [leaf.shape for leaf in leaves]:
            raise InputError(
                f"{str(path)!r}: states of other shapes than the method and the problem have now; "
                "remove it, to resume "
                "from the log"
            )
        return jax.tree.unflatten(structure, arrays), int(file["events"])


def check(method: Method, problem: Problem, header: Header) -> None:
    """Check that real processes can compute a method; raise InputError otherwise."""
    params = problem.shapes
    check_method(method, params)
    computing = Computing(method, problem, header)
    method = computing.method

    def states(params: Any) -> Any:
        central = jnp.concatenate(
            [leaf.reshape(-1).astype(float) for leaf in jax.tree.leaves(params)]
        )
        method_states = [
            make(central) for make in (method.init_worker, method.init_server, method.init_memory)
        ]
        return method_states, method.optimizer.init(params)

    for leaf in jax.tree.leaves(jax.eval_shape(states, params)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise InputError(
                f"method = {method.name!r}: keeps a random key in a state, which real processes "
                "cannot write; store "
                "jax.random.key_data of it, or draw from visit.key"
            )
    computing.check()
