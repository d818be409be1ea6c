"""What real processes compute, by the functions of a replay: a worker's local steps, and the server's commits.

The workers' method states are with the server, as it forms their messages: there the central variable is what it is at
the visit.
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
from asyncsim.methods.check import check_method
from asyncsim.methods.method import Memories, Method, Visit
from asyncsim.problems.problem import Problem
from asyncsim.real.processes import Processes
from asyncsim.real.recording import RECORDED, Account, Event, Header
from asyncsim.replays.local import Learner, LocalResult, build_local, flatten
from asyncsim.replays.observing import observe
from asyncsim.replays.plan import method_key, visit_key
from asyncsim.replays.programs import Same, as_data, cast
from asyncsim.replays.recorders import energy
from asyncsim.replays.running import problem_state, start
from asyncsim.replays.state import WorkerRow, no_messages
from asyncsim.replays.step import Held, Place, begin, finish

#: What the server records of each commit besides its loss and the length of its step.
RECORDER = energy()


class Computation(NamedTuple):
    """What a worker is to compute."""

    job: int  #: which of its computations: it decides the minibatches
    step: int  #: its commits before
    start: Any  #: the parameters, a vector
    learner: Learner  #: the local optimizer's and the problem's state


class OwnVisit:
    """The part of a `Visit` that a worker knows before it: not when the visit will be, nor how stale its update.

    ``kept`` it knows only without a server.
    """

    def __init__(self, worker: Any, worker_step: Any, local_steps: Any, workers: Any, key: Any, kept: Any = None):
        self.worker, self.worker_step, self.key = worker, worker_step, key
        self.local_steps, self.workers = jnp.int32(local_steps), jnp.int32(workers)
        if kept is not None:
            self.kept = kept

    def _replace(self, key: Any) -> "OwnVisit":
        """Return it with another key, as of a `Visit`."""
        return OwnVisit(self.worker, self.worker_step, self.local_steps, self.workers, key, self.__dict__.get("kept"))

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"method: its functions on a worker depend on the visit's {name}, which a real worker cannot know before "
            "the visit; let the server's message or apply do it, or replay a trace"
        )


class Computing:
    """Computes the jobs of a recording's workers: those of a replay with its seed and its precision."""

    def __init__(self, method: Method, problem: Problem, header: Header):
        seed, precision, workers = header.seed, header.precision, header.processes.workers
        self.x64, self._window = precision == "float64", header.processes.window
        self._batches = problem.batch_indices(seed, workers)
        with jax.enable_x64(self.x64):
            forget_other_precision()
            dtype = jnp.dtype(precision)
            self.params, self._key = start(problem, seed, dtype)
            self._method_key = method_key(seed)
            self.flat = flatten(self.params)
            self._data = jax.tree.map(jnp.asarray, as_data(problem.train, dtype))
            self._problem_state = problem_state(problem, dtype)
            self._method = method
            self._compute = _compiled_steps(Same(method), Same(problem), workers, self._window, precision)

    def first_job(self) -> Computation:
        """Return a job like the first of any worker."""
        with jax.enable_x64(self.x64):
            return Computation(0, 0, np.asarray(self.flat.ravel(self.params)), self.first_learner())

    def first_learner(self) -> Learner:
        """Return the initial states of the local optimizer and of the problem."""
        with jax.enable_x64(self.x64):
            return Learner(self._method.optimizer.init(self.params), self._problem_state)

    def run(self, worker: int, job: Computation) -> LocalResult:
        """Compute a job; the result's arrays are NumPy's."""
        with jax.enable_x64(self.x64):
            return jax.tree.map(np.asarray, self._compute(*self._given(worker, job)))

    def check(self) -> None:
        """Raise InputError if the local optimizer depends on what a worker cannot know; compute nothing."""
        with jax.enable_x64(self.x64):
            jax.eval_shape(self._compute, *self._given(0, self.first_job()))

    def visit_key(self, worker: int, step: int) -> Any:
        """Return the key of a worker's visit after so many commits; ``()`` if the method draws nothing."""
        return visit_key(self._method_key, np.int32(worker), np.int32(step)) if self._method.needs_key else ()

    def _given(self, worker: int, job: Computation) -> tuple[Any, ...]:
        rows = np.zeros((self._window, 0), np.int32)
        if self._batches is not None:
            rows = self._batches.rows([worker], [job.job], self._window)[0]
        numbers = (np.int32(number) for number in (worker, job.step, job.job))
        own_key = self.visit_key(worker, job.step)
        return self._data, self._key, own_key, job.start, job.learner, *numbers, rows


@functools.lru_cache(maxsize=32)
def _compiled_steps(method: Same, problem: Same, workers: int, window: int, precision: str) -> Callable[..., Any]:
    """Return the jitted local steps of this very method and problem: compiled once in a process."""
    params = jax.eval_shape(lambda key: cast(problem.value.init(key), jnp.dtype(precision)), jax.random.key(0))
    flat = flatten(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
    local = build_local(method.value, problem.value, flat, window)

    def compute(data, key, own_key, start, learner, worker, worker_step, job, rows):
        visit: Any = OwnVisit(worker, worker_step, window, workers, own_key)
        return local(data, key, start, learner, visit, job, rows)

    return jax.jit(whole_products()(compute))


class State(NamedTuple):
    """The server's arrays at one instant."""

    central: Any  #: the central variable, a vector
    server: Any  #: the method's own state on the server
    workers: tuple[WorkerRow, ...]  #: all that belongs to each worker
    read: tuple[Any, ...]  #: what each worker has read for the computation that it is at
    pulled: tuple[Any, ...]  #: what each has read for its next message, where that is a visit of its own


class Parameters:
    """The central variable and all states: applies commits and answers reads, one after the other."""

    def __init__(self, method: Method, processes: Processes, computing: Computing):
        self._processes, self._x64, self._visit_key = processes, computing.x64, computing.visit_key
        with jax.enable_x64(self._x64):
            central = computing.flat.ravel(computing.params)
            self._dtype = central.dtype
            row = WorkerRow(
                method=method.init_worker(central),
                memory=method.init_memory(central),
                recorders=(RECORDER.init(method, central),),
                learner=computing.first_learner(),
            )
            each = (central,) * processes.workers
            self.state = State(central, method.init_server(central), (row,) * processes.workers, each, each)
        reads = "before" if processes.protocol == "read_then_write" else "after"
        self._resumes, self._sees_memories = method.resume is not None, method.sees_memories
        self._begin, self._commit = _compiled_step(Same(method), reads)

    def job(self, worker: int, account: Account) -> Computation:
        """Return what a worker is to compute now."""
        row = self.state.workers[worker]
        start = self.state.read[worker]
        with jax.enable_x64(self._x64):
            start = np.asarray(self._begin(row, start) if self._resumes else start)
        return Computation(account.job, account.steps, start, jax.tree.map(np.asarray, row.learner))

    def commit(self, row: Event, start: Any, result: LocalResult) -> dict[str, float]:
        """Apply a worker's update; return what is recorded of it besides the loss."""
        worker, state = row["worker"], self.state
        counts = {name: row[name] for name in ("staleness", "worker", "worker_step", "local_steps")}
        counts |= {"commit": row["version"] - 1, "workers": self._processes.workers}
        typed: dict[str, Any] = {name: np.int32(count) for name, count in counts.items()}
        with jax.enable_x64(self._x64):
            typed |= {"time": np.asarray(row["commit_time"], self._dtype), "completes": np.bool_(True)}
            typed |= {"place": np.int32(0), "messages": np.int32(1)}
            visit = Visit(key=self._visit_key(worker, row["worker_step"]), **typed)
            pulled = state.pulled[worker]
            held = Held(visit, state.workers[worker]._replace(learner=()), state.read[worker])
            if self._processes.pulls:
                held = held._replace(pulled=pulled)
            local = LocalResult(result.update, np.asarray(result.loss, self._dtype), ())
            memories = tuple(row.memory for row in state.workers) if self._sees_memories else ()
            place = Place(state.central, state.server)
            place, kept, seen, numbers = self._commit(place, held, start, local, memories)
            _, *recorded = np.asarray(numbers).tolist()
        self.state = state._replace(
            central=place.central,
            server=place.server,
            workers=_put(state.workers, worker, kept._replace(learner=result.learner)),
            read=_put(state.read, worker, pulled if self._processes.pulls else seen),
        )
        return dict(zip(RECORDED[1:], recorded, strict=True))

    def read(self, worker: int) -> None:
        """Let a worker read for its next computation."""
        self.state = self.state._replace(read=_put(self.state.read, worker, self.state.central))

    def pull(self, worker: int) -> Any:
        """Let a worker read what its next message is formed with; return it."""
        self.state = self.state._replace(pulled=_put(self.state.pulled, worker, self.state.central))
        return np.asarray(self.state.central)


@functools.lru_cache(maxsize=32)
def _compiled_step(same_method: Same, reads: str) -> tuple[Any, Any]:
    """Return the jitted functions of a replay's step: the start of local steps, and a commit with its numbers."""
    method = same_method.value

    def start(row, read):
        visit: Any = None  # known at the commit
        return begin(method, None, Held(visit, row, read))[1]

    def commit(place, held, start, local, memories):
        # Each message makes a version.
        place = place._replace(waiting=no_messages(method, held.row, place.central, 1))
        everyone = [_all_memories(memories)] if method.sees_memories else []
        left = finish(method, reads, place, held, start, local, *everyone)
        made = left.commit
        recorders, numbers = observe([RECORDER], held.row.recorders, made)
        return left.place._replace(waiting=()), WorkerRow(made.worker, made.memory, recorders, ()), left.read, numbers

    return jax.jit(start), jax.jit(whole_products()(commit))


def _all_memories(memories: tuple[Any, ...]) -> Memories:
    """Return the memories of all workers, none of which is newer than the others."""
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    return Memories(rows, jax.tree.map(lambda leaf: leaf[:1], rows), jnp.full(1, len(memories), jnp.int32))


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def save_state(path: Path, state: State, events: int) -> Path:
    """Write a state and how many events of the log are in it; the whole file or nothing."""
    leaves: dict[str, Any] = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    return write_whole(path, lambda partial: np.savez(partial, events=np.array(events), **leaves))


def load_state(path: Path, like: State) -> tuple[State, int]:
    """Read what `save_state` wrote of a state with the structure of another one."""
    with open_file(path) as opened, np.load(opened) as file:
        leaves, structure = jax.tree.flatten(like)
        found = [file[name] for name in file.files if name != "events"]
        if [leaf.shape for leaf in found] != [leaf.shape for leaf in leaves]:
            raise InputError(
                f"{str(path)!r}: states of other shapes than the method and the problem have now; remove it, to go on "
                "from what the log has"
            )
        return jax.tree.unflatten(structure, found), int(file["events"])


def check(method: Method, problem: Problem, header: Header) -> None:
    """Raise InputError if real processes cannot compute a method: it is wrong, or keeps or needs what they cannot."""
    params = jax.eval_shape(problem.init, jax.random.key(0))
    check_method(method, params)

    def states(params: Any) -> Any:
        central = jnp.concatenate([leaf.reshape(-1).astype(float) for leaf in jax.tree.leaves(params)])
        own = [make(central) for make in (method.init_worker, method.init_server, method.init_memory)]
        return own, method.optimizer.init(params)

    for leaf in jax.tree.leaves(jax.eval_shape(states, params)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise InputError(
                f"method = {method.name!r}: keeps a random key in a state, which real processes cannot write; keep "
                "jax.random.key_data of it, or draw from visit.key"
            )
    Computing(method, problem, header).check()
