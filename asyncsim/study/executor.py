"""Where the independent runs of a study are computed: in this process, or on many machines by Ray.

``--executor local`` computes them in this process: one per core at a time, at most four, if each
keeps one core busy (2,000 to 100,000 parameters on a CPU); else in order. ``--executor ray`` is
`asyncsim.study.ray_executor`. The results are written in the order of the study, by the first
process; with the same number of threads they are the same byte for byte. ``docs/studies.md`` is
about many machines.
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

    ``at_once``: the most jobs at a time, each in a separate thread; a job starts when the caller
    takes a result. With 1 they run in order, without threads.
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
        ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        threads: dict[int, threading.Thread] = {}
        waiting, stop, settings = enumerate(jobs), threading.Event(), _jax_settings()

        def work(place: int, job: tuple[Any, ...]) -> None:
            work_until(stop)
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
                yield Completion(place, value)
        except KeyboardInterrupt:
            tell("interrupted: the runs in progress are stopped")
            raise
        finally:
            stop.set()
            for thread in threads.values():
                thread.join()


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


@contextlib.contextmanager
def computing_device(kind: str) -> Iterator[None]:
    """Let JAX compute on a kind of device, for the length of a ``with`` block; ``default`` leaves
    it to JAX.
    """
    import jax

    if kind == "default":
        yield
        return
    try:
        device = jax.devices(kind)[0]
    except RuntimeError:
        raise InputError(
            f"device = {kind!r}: JAX finds none here; choose default, which is "
            f"{jax.default_backend()}"
        ) from None
    with jax.default_device(device):
        yield


class LocalProcesses:
    """Computes jobs of one function in processes of this machine, one per core; another executor
    computes the rest.

    For work that keeps Python itself busy, as simulations do; the function and its arguments must
    be picklable. One job, or one core, needs no other process.
    """

    def __init__(
        self, function: Callable[..., Any], otherwise: Executor, processes: int | None = None
    ):
        self._function, self._otherwise = function, otherwise
        self._processes = processes or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "1"
        )

    def map(
        self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
    ) -> Iterator[Completion]:
        """See `Executor.map`."""
        jobs = list(jobs)
        is_alike = all(job[0] is self._function for job in jobs)
        if not is_alike or min(len(jobs), self._processes) < 2:
            yield from (Local() if is_alike else self._otherwise).map(function, jobs)
            return
        count = min(len(jobs), self._processes)
        # Not forked: JAX may have threads here. Ctrl-C is for this process, which ends the others.
        pool = ProcessPoolExecutor(count, get_context("spawn"), ignore_from_now_on)
        try:
            places = {pool.submit(attempt, function, job): place for place, job in enumerate(jobs)}
            for ended in as_completed(places):
                yield Completion(places[ended], ended.result())
        finally:
            pool.shutdown(cancel_futures=True)
