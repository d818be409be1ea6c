"""A worker's computation: the local steps of a replay, one job at a time, in whatever process it runs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.draws import method_key, visit_key
from asyncsim.replays.flat import flatten
from asyncsim.replays.local import Learner, LocalResult, build_local, from_vector
from asyncsim.replays.programs import Same, as_data, cast
from asyncsim.replays.running import problem_state, start
from asyncsim.tracing import forget_other_precision, whole_products


class Job(NamedTuple):
    """What a worker is to compute.

    Attributes
    ----------
    job : int
        Which of its computations: it decides the minibatches.
    step : int
        Its commits before.
    start : Float[ndarray, "parameters"]
    learner : Learner
        The local optimizer's and the problem's state.
    """

    job: int
    step: int
    start: Any
    learner: Learner


class OwnVisit:
    """What a worker knows of the visit that will commit its update: not when it will be, nor how stale.

    Attributes
    ----------
    worker, worker_step, local_steps, workers : int
        As of `asyncsim.methods.Visit`.
    key : jax.random.key or ()
        As there.
    """

    def __init__(self, worker: Any, worker_step: Any, local_steps: Any, workers: Any, key: Any):
        self.worker, self.worker_step, self.key = worker, worker_step, key
        self.local_steps, self.workers = jnp.int32(local_steps), jnp.int32(workers)

    def _replace(self, key: Any) -> "OwnVisit":
        """Return it with another key, as of a `Visit`."""
        return OwnVisit(self.worker, self.worker_step, self.local_steps, self.workers, key)

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"method: its local steps depend on the visit's {name}, which a real worker cannot know before the visit; "
            "let message or apply do it, or replay a trace"
        )


class Computing:
    """Computes the jobs of a run's workers.

    Parameters
    ----------
    method, problem : Method, Problem
    workers, window : int
    seed : int
        Of the initial parameters, the minibatches and the problem's randomness: a replay's.
    precision : {"float32", "float64"}
    """

    def __init__(self, method: Method, problem: Problem, workers: int, window: int, seed: int, precision: str):
        self.x64 = precision == "float64"
        self._window = window
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
            self._compute = _compiled(Same(method), Same(problem), workers, window, precision)

    def first_job(self) -> Job:
        """Return a job like the first of any worker."""
        with jax.enable_x64(self.x64):
            return Job(0, 0, np.asarray(self.flat.ravel(self.params)), self.first_learner())

    def first_learner(self) -> Learner:
        """Return what the local steps change besides the parameters, as it is at the start."""
        with jax.enable_x64(self.x64):
            return Learner(self._method.optimizer.init(self.params), self._problem_state)

    def run(self, worker: int, job: Job) -> LocalResult:
        """Compute a job; the result's arrays are NumPy's.

        Raises
        ------
        InputError
            The local optimizer asks for what a worker cannot know.
        """
        rows = np.zeros((self._window, 0), np.int32)
        if self._batches is not None:
            rows = self._batches.rows([worker], [job.job], self._window)[0]
        numbers = (np.int32(number) for number in (worker, job.step, job.job))
        with jax.enable_x64(self.x64):
            own = self.visit_key(worker, job.step)
            result = self._compute(self._data, self._key, own, job.start, job.learner, *numbers, rows)
            return jax.tree.map(np.asarray, result)

    def check(self) -> None:
        """Raise InputError if the local optimizer asks for what a worker cannot know, computing nothing."""
        with jax.enable_x64(self.x64):
            first = self.first_job()
            batch = 0 if self._batches is None else self._batches.rows([0], [0], self._window)[0].shape[-1]
            rows = np.zeros((self._window, batch), np.int32)
            given = first.start, first.learner, *[np.int32(0)] * 3, rows
            jax.eval_shape(self._compute, self._data, self._key, self.visit_key(0, 0), *given)

    def visit_key(self, worker: int, step: int) -> Any:
        """Return the key of a worker's visit after so many commits; ``()`` if the method draws nothing."""
        return visit_key(self._method_key, np.int32(worker), np.int32(step)) if self._method.draws else ()


@functools.lru_cache(maxsize=32)
def _compiled(method: Same, problem: Same, workers: int, window: int, precision: str) -> Callable[..., LocalResult]:
    """Return the jitted local steps of this very method and problem: compiled once in a process."""
    params = jax.eval_shape(lambda key: cast(problem.value.init(key), jnp.dtype(precision)), jax.random.key(0))
    flat = flatten(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
    local = from_vector(build_local(method.value, problem.value, window), flat)

    def compute(data, key, own_key, start, learner, worker, worker_step, job, rows):
        visit: Any = OwnVisit(worker, worker_step, window, workers, own_key)
        return local(data, key, start, learner, visit, job, rows)

    return jax.jit(whole_products()(compute))
