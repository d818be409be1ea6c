"""Where the independent runs of a study are computed: in this process, or on many machines by Ray.

``--executor local`` computes them in this process: as many at once as there are cores, at most four, if each keeps one
core busy (2,000 to 100,000 parameters on a CPU); else in order. ``--executor ray`` starts a Ray cluster on this machine
and ends it with the study, or joins a running one (``--address``), and computes as many at once as there are cores
(``--cpus-per-run``) and accelerators (``--accelerators-per-run``). Whatever the order in which they finish, the results
are written in the order of the study, by the process that was started; with the same number of threads they are the
same byte for byte. Ray's processes get that number from this one, as well as JAX's environment variables.

Several machines. Install ``asyncsim[ray]`` on each, in the same version and with the same Python; methods, problems and
their data are sent, but not what the file of a method of your own imports. Ray wants the same token everywhere, or
none: make one (``ray get-auth-token --generate``), copy ``~/.ray/auth_token`` to all and set ``RAY_AUTH_MODE=token``
there, or on a network of your own ``RAY_AUTH_MODE=disabled``. Then::

    ray start --head --port=6379                                            # on the first
    ray start --address=FIRST:6379                                          # on each of the others
    python -m asyncsim.study stability --executor ray --address FIRST:6379  # on any of them
    ray stop                                                                # on each, at the end

A run that is lost with its process or node is computed again, three times at most, and then is a row with that error.
If no node has what a run asks for, the study says so and ends after half a minute. If the process that was started is
lost, or Ray's head: start it again with ``--resume FOLDER``, which reads what is there and computes what is not.

Tested with Ray 2.60: three nodes that were processes of one machine, one of them killed on the way. Networks between
machines and accelerators were not there to be tested.
"""

import contextlib
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncsim.errors import InputError, require_choice, require_count, require_nonnegative
from asyncsim.threads import one_core_each, work_until
from asyncsim.wording import tell

if TYPE_CHECKING:
    from asyncsim.study.config import StudyOptions

EXECUTORS = ("local", "ray")


class Failure(NamedTuple):
    """Why a job has no result: the error in one line, and where it came from."""

    error: str
    traceback: str


class Done(NamedTuple):
    """A job that has ended."""

    place: int  #: which of the jobs
    value: Any  #: what the function returned, or a `Failure`


class Executor(Protocol):
    """What computes independent jobs."""

    def map(self, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Done]:
        """Call a function with the arguments of each job and yield the results as they are there, in any order.

        Raises
        ------
        InputError
            By the function: a job's input is the study's. Any other error of the function is a `Failure`.
        """
        ...


class Local:
    """Computes jobs in this process.

    Parameters
    ----------
    at_once : int
        At most so many at a time, each in a thread of its own, the next when a result is taken. With 1 they come in
        order, and there is no thread.
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
    """Return what a function returns, or a `Failure`; pass on an InputError.

    Replays have one core each, so that what is written does not depend on how many jobs are computed at a time.
    """
    try:
        with one_core_each():
            return function(*job)
    except InputError:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return Failure(told, "".join(traceback.format_exception(error)))


def check(config: "StudyOptions") -> None:
    """Raise InputError for options of the executor that cannot be used, or if Ray is asked for and not installed."""
    ray = require_choice("executor", config.executor, EXECUTORS) == "ray"
    require_count("cpus_per_run", config.cpus_per_run)
    accelerators = require_nonnegative("accelerators_per_run", config.accelerators_per_run)
    if not ray:
        asked = {"address": config.address is not None, "accelerators_per_run": accelerators > 0}
        for name, given in (asked | {"cpus_per_run": config.cpus_per_run > 1}).items():
            if given:
                raise InputError(f"{name} = {getattr(config, name)!r}: is an option of --executor ray; add that")
        return
    if find_spec("ray") is None:
        raise InputError("executor = 'ray': Ray is not installed; install it with: pip install \"asyncsim[ray]\"")
    if accelerators > 1 and accelerators != int(accelerators):
        raise InputError(f"accelerators_per_run = {accelerators}: above one it must be a whole number")
    if config.device in ("gpu", "tpu") and not accelerators:
        raise InputError(
            f"device = {config.device!r}: runs that Ray spreads have only the accelerators they ask for; "
            "give accelerators_per_run as well"
        )
    if config.device == "cpu" and accelerators:
        raise InputError(
            f"accelerators_per_run = {accelerators:g}: would lie idle with device = 'cpu'; give one of them"
        )


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
