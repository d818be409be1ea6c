"""Where the independent runs of a study are computed: in this process, or on many machines by Ray.

``--executor local`` computes them in this process: one per core at a time, at most four, if each
keeps one core busy (2,000 to 100,000 parameters on a CPU); else in order. ``--executor ray`` is
`asyncsim.study.ray_executor`. The results are written in the order of the study, by the first
process; with the same number of threads they are the same byte for byte. ``docs/studies.md`` is
about many machines.
"""

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple, Protocol

from asyncsim.base.console import tell
from asyncsim.base.errors import InputError
from asyncsim.base.interruption import ignore_from_now_on
from asyncsim.base.threads import one_core_each, work_until


class JobError(NamedTuple):
    """Why a job has no result: the error in one line, and where it came from."""

    error: str
    traceback: str


class Completion(NamedTuple):
    """A job that has ended."""

    place: int  #: the index of the job
    value: Any  #: the function's result, or a `JobError`


class Executor(Protocol):
    """Computes independent jobs."""

    def map(
        self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
    ) -> Iterator[Completion]:
        """Call a function with the arguments of each job and yield the results in the order of
        completion.

        An InputError of the function is passed on, as a job's input is the study's; any other error
        is a `JobError`.
        """
        ...


class Local:
    """Computes jobs in this process.

    ``at_once``: the most jobs at a time, each in a separate thread. With 1 they run in order,
    without threads.
    """

    def __init__(self, at_once: int = 1):
        self._at_once = at_once

    def map(
        self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
    ) -> Iterator[Completion]:
        """See `Executor.map`. Replays whose results are no longer needed are stopped."""
        if self._at_once == 1:
            for place, job in enumerate(jobs):
                yield Completion(place, attempt(function, job))
            return
        stop, settings = threading.Event(), _jax_settings()

        def work(*job: Any) -> Any:
            with settings():
                return function(*job)

        pool = futures.ThreadPoolExecutor(self._at_once, initializer=work_until, initargs=(stop,))
        try:
            yield from completions(pool, work, jobs)
        except KeyboardInterrupt:
            tell("interrupted: the runs in progress are stopped")
            raise
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def completions(
    pool: futures.Executor, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[Completion]:
    """Let a pool call a function with the arguments of each job; yield as `Executor.map` does."""
    places = {pool.submit(attempt, function, job): place for place, job in enumerate(jobs)}
    for ended in futures.as_completed(places):
        yield Completion(places.pop(ended), ended.result())


def _jax_settings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context that gives another thread the JAX settings of this one."""
    import jax

    config: Any = jax.config
    precision, promotion = config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
    device = config.jax_default_device

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with (
            jax.default_matmul_precision(precision),
            jax.numpy_dtype_promotion(promotion),
            jax.default_device(device),
        ):
            yield

    return settings


def attempt(function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    """Call a function and return its result, or a `JobError`; pass on an InputError.

    Replays have one core each, so that results do not depend on the number of concurrent jobs.
    """
    try:
        with one_core_each():
            return function(*job)
    except InputError:
        raise
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return JobError(message, "".join(traceback.format_exception(error)))


class LocalProcesses:
    """Computes jobs of one function in processes of this machine, one per core; this process
    computes all others.

    For work that keeps Python itself busy, as simulations do; the function and its arguments must
    be picklable. One job, or one core, needs no other process.
    """

    def __init__(self, function: Callable[..., Any], processes: int | None = None):
        self._function = function
        self._processes = processes or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "1"
        )

    def map(
        self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
    ) -> Iterator[Completion]:
        """See `Executor.map`."""
        jobs = list(jobs)
        count = min(len(jobs), self._processes)
        if count < 2 or any(job[0] is not self._function for job in jobs):
            yield from Local().map(function, jobs)
            return
        from multiprocessing import get_context  # not for `asyncsim study NAME -h`

        # Not forked: JAX may have threads here. Ctrl-C is for this process, which ends the others.
        pool = futures.ProcessPoolExecutor(count, get_context("spawn"), ignore_from_now_on)
        try:
            yield from completions(pool, function, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
