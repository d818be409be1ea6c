"""Where the independent runs of a study are computed: in this process, or on many machines by Ray.

``--executor local`` computes them in this process: as many at once as there are cores, at most four, if each keeps one
core busy (2,000 to 100,000 parameters on a CPU); else in order. ``--executor ray`` is `asyncsim.study.ray_executor`.
Whatever the order in which they finish, the results are written in the order of the study, by the process that was
started; with the same number of threads they are the same byte for byte. ``docs/real.md`` is about many machines.
"""

import contextlib
import itertools
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple, Protocol

from asyncsim.base.console import tell
from asyncsim.base.errors import InputError
from asyncsim.base.interruption import ignore_from_now_on
from asyncsim.base.threads import one_core_each, work_until


class JobError(NamedTuple):
    """Why a job has no result: the error in one line, and where it came from."""

    error: str
    traceback: str


class Done(NamedTuple):
    """A job that has ended."""

    place: int  #: which of the jobs
    value: Any  #: what the function returned, or a `JobError`


class Executor(Protocol):
    """What computes independent jobs."""

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        """Call a function with the arguments of each job and yield the results as they are there, in any order.

        An InputError of the function is passed on, as a job's input is the study's; any other error is a `JobError`.
        """
        ...


class Local:
    """Computes jobs in this process.

    ``at_once``: at most so many at a time, each in a thread of its own, the next when a result is taken. With 1 they
    come in order, and there is no thread.
    """

    def __init__(self, at_once: int = 1):
        self._at_once = at_once

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        """See `Executor.map`. Replays that go on when nobody waits for them any more are ended."""
        if self._at_once == 1:
            for place, job in enumerate(jobs):
                yield Done(place, attempt(function, job))
            return
        ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        threads: dict[int, threading.Thread] = {}
        waiting, unwanted, settings = enumerate(jobs), threading.Event(), _jax_settings()

        def work(place: int, job: tuple[Any, ...]) -> None:
            work_until(unwanted)
            try:
                with settings():
                    ended.put((place, attempt(function, job)))
            except BaseException as error:
                ended.put((place, error))

        def begin(count: int) -> None:
            for place, job in itertools.islice(waiting, count):
                thread = threading.Thread(target=work, args=(place, job), daemon=True)
                thread.start()
                threads[place] = thread  # only one that has begun can be waited for

        try:
            begin(self._at_once)
            while threads:
                place, value = ended.get()
                del threads[place]
                if isinstance(value, BaseException):
                    raise value
                begin(1)
                yield Done(place, value)
        except KeyboardInterrupt:
            tell("interrupted: the runs in progress are stopped")
            raise
        finally:
            unwanted.set()
            for thread in threads.values():
                thread.join()


def _jax_settings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context for other threads in which results are those of this one: JAX keeps settings for each thread."""
    import jax

    config: Any = jax.config
    precision, promotion = config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
    device = config.jax_default_device

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion(promotion), jax.default_device(device):
            yield

    return settings


def attempt(function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    """Return what a function returns, or a `JobError`; pass on an InputError.

    Replays have one core each, so that what is written does not depend on how many jobs are computed at a time.
    """
    try:
        with one_core_each():
            return function(*job)
    except InputError:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return JobError(told, "".join(traceback.format_exception(error)))


@contextlib.contextmanager
def computing_device(kind: str) -> Iterator[None]:
    """Let JAX compute on a kind of device, for the length of a ``with`` block; ``default`` leaves it to JAX."""
    import jax

    if kind == "default":
        yield
        return
    try:
        device = jax.devices(kind)[0]
    except RuntimeError:
        raise InputError(
            f"device = {kind!r}: JAX finds none here; choose default, which is {jax.default_backend()}"
        ) from None
    with jax.default_device(device):
        yield


class LocalProcesses:
    """Computes jobs of one function in processes of this machine, one a core, and jobs of others as another executor.

    For what keeps Python itself busy, as simulations do; the function and its arguments must be importable elsewhere.
    With one job, or one core, there is no other process.
    """

    def __init__(self, function: Callable[..., Any], otherwise: Executor, processes: int | None = None):
        self._function, self._otherwise = function, otherwise
        self._processes = processes or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "1")

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        """See `Executor.map`."""
        jobs = list(jobs)
        own = all(job[0] is self._function for job in jobs)
        if not own or min(len(jobs), self._processes) < 2:
            yield from (Local() if own else self._otherwise).map(function, jobs)
            return
        count = min(len(jobs), self._processes)
        # Not forked: JAX may have threads here. Ctrl-C is for this process, which ends the others.
        pool = ProcessPoolExecutor(count, get_context("spawn"), ignore_from_now_on)
        try:
            places = {pool.submit(attempt, function, job): place for place, job in enumerate(jobs)}
            for ended in as_completed(places):
                yield Done(places[ended], ended.result())
        finally:
            pool.shutdown(cancel_futures=True)
