"""Where the independent runs of a study are computed: in this process, or on many machines by Ray.

``--executor local`` computes them in this process: one per core at a time, at most four, if each
keeps one core busy (2,000 to 100,000 parameters on a CPU); else in order. ``--executor ray`` is
`asyncsim.study.ray_executor`. The results are written in the order of the study, by the first
process; with the same number of threads they are the same byte for byte. ``docs/studies.md`` is
about many machines.
"""

import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

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


def completions(
    executor: futures.Executor, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[Completion]:
    """Let an executor call a function with the arguments of each job; yield the results in the
    order of completion.

    An InputError of the function is passed on, as a job's input is the study's; any other error is
    a `JobError`. What ends the iteration early ends the executor, too.
    """
    places = {}
    try:
        for place, job in enumerate(jobs):
            future = executor.submit(attempt, function, *job)
            if future.done():
                yield Completion(place, _result(future))
            else:
                places[future] = place
        for future in futures.as_completed(places):
            yield Completion(places.pop(future), _result(future))
    except BaseException as error:
        if places and isinstance(error, KeyboardInterrupt):
            tell("interrupted: the runs in progress are stopped")
        executor.shutdown(cancel_futures=True)
        raise


def attempt(function: Callable[..., Any], *job: Any) -> Any:
    """Call a function and return its result, or a `JobError`, or an InputError.

    Replays have one core each, so that results do not depend on the number of concurrent jobs.
    """
    try:
        with one_core_each():
            return function(*job)
    except InputError as error:
        return error
    except Exception as error:
        return JobError(_line(error), "".join(traceback.format_exception(error)))


def _result(future: futures.Future[Any]) -> Any:
    """Return what `attempt` returned; a `JobError` if its process was lost."""
    try:
        result = future.result()
    except Exception as error:
        return JobError(_line(error)[:300], "")
    if isinstance(result, InputError):
        raise result
    return result


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class InOrder(futures.Executor):
    """Computes each job when it is submitted, in this thread."""

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> futures.Future[Any]:
        """Call the function; return its result as a future."""
        future: futures.Future[Any] = futures.Future()
        future.set_result(function(*args, **kwargs))
        return future


class Threads(futures.ThreadPoolExecutor):
    """Computes jobs in threads of this process, with its JAX settings.

    The end of the executor stops the replays in progress: their results are no longer needed.
    """

    def __init__(self, at_once: int):
        self._stop, enter_settings = threading.Event(), _jax_settings()

        def begin() -> None:
            work_until(self._stop)
            enter_settings()

        super().__init__(at_once, initializer=begin)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the replays, and the threads."""
        self._stop.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


def processes(count: int) -> futures.Executor:
    """Return an executor of this machine's processes, one per core and at most ``count``; with
    one, this process.

    For work that keeps Python itself busy, as simulations do; the functions and their arguments
    must be picklable.
    """
    cores = len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "1")
    if min(count, cores) < 2:
        return InOrder()
    from multiprocessing import get_context  # not for `asyncsim study NAME -h`

    # Not forked: JAX may have threads here. Ctrl-C is for this process, which ends the others.
    spawn = get_context("spawn")
    return futures.ProcessPoolExecutor(min(count, cores), spawn, ignore_from_now_on)


def _jax_settings() -> Callable[[], None]:
    """Return a function that gives the JAX settings of this thread to another one, to its end."""
    import jax

    config: Any = jax.config
    settings = (
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        (jax.default_device, config.jax_default_device),
    )

    def enter() -> None:
        for context, value in settings:
            context(value).__enter__()

    return enter
