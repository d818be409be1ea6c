"""Independent runs of a study as Ray tasks; see `asyncsim.study.executor`.

A task gets its function and arguments pickled by value where other machines cannot import them
(notebooks, studies and methods loaded by path); methods and problems are sent once, and each
process keeps them with their compiled programs.
"""

import contextlib
import functools
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import ray
import ray.cloudpickle as cloudpickle
from ray.exceptions import RayError

import asyncsim
from asyncsim.base.errors import InputError
from asyncsim.base.interruption import handlers_kept
from asyncsim.methods import Method
from asyncsim.problems import PolicyProblem, Problem
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.tuning import cores
from asyncsim.study.executor import attempt

#: Environment variable of Ray: ``token`` or ``disabled``.
_AUTH_MODE = "RAY_AUTH_MODE"
#: The longest transfer of an object over the network (s).
_FETCH = 600.0
#: Repetitions of a run whose process or node was lost.
_RETRIES = 3
#: Arguments of a job that are sent once, and that a process keeps.
_SENT = (Method, Problem, PolicyProblem, Recorder)
#: Modules that were loaded by path, by the first part of their names.
_BY_PATH = ("asyncsim.own.", "asyncsim.studies.", "asyncsim.figures.")
#: Packages whose versions must be the same on all nodes.
_PACKAGES = ("jax", "jaxlib", "numpy", "optax")


@contextlib.contextmanager
def joined(address: str | None, **local: Any) -> Iterator[None]:
    """Join the Ray cluster at an address, or start one on this machine, and leave or end it again.

    A process that has joined a cluster already, for example a notebook, keeps it. A new cluster
    accepts only processes with its token, as its ports are open to the network; to join a cluster,
    the user must have chosen.

    ``address``: of a cluster, ``"auto"`` or ``"192.168.0.1:6379"``; None starts one. ``local``:
    options of ``ray.init`` for one that is started.

    Raises
    ------
    InputError
        There is no cluster, this machine cannot join it, or it is unknown whether it needs a token.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    chosen = os.environ.get(_AUTH_MODE)
    if address is None:
        _set_auth_mode("token")
    elif chosen is None:
        raise InputError(
            f"address = {address!r}: whether this cluster wants a token is not said; set "
            f"{_AUTH_MODE}=token on all "
            "machines, with one ~/.ray/auth_token (ray get-auth-token --generate), or, only where "
            "everybody on the "
            f"network may run code on them, {_AUTH_MODE}=disabled"
        )
    elif address != "auto":
        _require_answer(address)
    try:
        with warnings.catch_warnings(), handlers_kept():
            # JAX warns of the processes that Ray starts: those become other programs at once.
            warnings.filterwarnings(
                "ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning
            )
            ray.init(
                address=address or "local",  # else Ray would join whatever it finds on the machine
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"include_dashboard": False, **local} if address is None else {}),
            )
        if address is None:
            with contextlib.suppress(OSError):  # the token may be stored elsewhere
                Path.home().joinpath(".ray", "auth_token").chmod(
                    0o600
                )  # Ray lets all users of the machine read it
    except (RayError, OSError, ValueError, RuntimeError) as error:
        _set_auth_mode(chosen)
        raise InputError(
            f"address = {address!r}: no Ray cluster could be joined "
            f"({' '.join(str(error).split())}); start one with: "
            "ray start --head, join it from one of its machines, and with the RAY_AUTH_MODE that "
            "it has"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
        _set_auth_mode(chosen)


def _set_auth_mode(mode: str | None) -> None:
    """Set the environment variable, or remove it, and let Ray, which read it when it was imported,
    read it again.
    """
    if mode is None:
        os.environ.pop(_AUTH_MODE, None)
    else:
        os.environ[_AUTH_MODE] = mode
    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]  # a compiled module


class RayExecutor(futures.Executor):
    """Computes jobs as tasks of the Ray cluster that this process has joined.

    ``cpus``: cores that each job reserves. ``accelerators``: accelerators that each job reserves:
    GPUs, or TPUs if ``tpu``. Without any a job computes on a CPU.
    """

    def __init__(self, cpus: int, accelerators: float, tpu: bool = False):
        self._needs = {"CPU": float(cpus)}
        if accelerators:
            self._needs["TPU" if tpu else "GPU"] = float(accelerators)
        self._task = ray.remote(_work).options(
            num_cpus=cpus,
            num_gpus=0 if tpu else accelerators,
            resources={"TPU": accelerators} if tpu and accelerators else None,
            max_retries=_RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": _settings(bool(accelerators))},
        )
        self._sent: dict[int, tuple[Any, ray.ObjectRef]] = {}
        self._started: dict[futures.Future[Any], ray.ObjectRef] = {}

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> futures.Future[Any]:
        """Start a task that calls the function; see `asyncsim.study.executor.completions`."""
        if not self._started:
            self._require_room()
            send_by_value()
        refs = [self._send(value) if isinstance(value, _SENT) else None for value in args]
        rest = [value if ref is None else None for value, ref in zip(args, refs, strict=True)]
        call = cloudpickle.dumps((functools.partial(function, **kwargs), rest))
        ref = self._task.remote(call, refs, _versions())
        future: futures.Future[Any] = ref.future()
        self._started[future] = ref
        # Ray keeps a result as long as somebody refers to it.
        future.add_done_callback(lambda ended: self._started.pop(ended, None))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the tasks that have not ended."""
        for ref in list(self._started.values()):
            with contextlib.suppress(RayError):
                ray.cancel(ref, force=True)

    def _send(self, value: Any) -> Any:
        """Put an object where all nodes can get it, once."""
        if id(value) not in self._sent:
            self._sent[id(value)] = value, ray.put(cloudpickle.dumps(value))
        return self._sent[id(value)][1]

    def _require_room(self) -> None:
        """Raise InputError if no node has the resources of a job, for which Ray would wait."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            all(resources.get(name, 0.0) >= count for name, count in self._needs.items())
            for resources in nodes
        ):
            requested = ", ".join(f"{name} {count:g}" for name, count in self._needs.items())
            raise InputError(
                f"executor = 'ray': a run asks for {requested}, and no node of the Ray cluster has "
                "that; ask for less, or add a node"
            )


@functools.lru_cache(32)
def _received(ref: ray.ObjectRef) -> Any:
    """Return an object that was sent apart; the same object each time, so that it is compiled
    once.
    """
    return cloudpickle.loads(ray.get(ref, timeout=_FETCH))


def _work(call: bytes, refs: list[ray.ObjectRef | None], versions: dict[str, str]) -> Any:
    """Unpickle a call and run it: the body of a task."""
    return attempt(_call, call, refs, versions)


def _call(call: bytes, refs: list[ray.ObjectRef | None], versions: dict[str, str]) -> Any:
    installed = _versions()
    if installed != versions:
        differences = ", ".join(
            f"{name} {installed[name]}, not {versions[name]}"
            for name in installed
            if installed[name] != versions[name]
        )
        raise InputError(
            f"the node {socket.gethostname()} has {differences}; install the same on all"
        )
    function, rest = cloudpickle.loads(call)
    arguments = zip(rest, refs, strict=True)
    return function(*(value if ref is None else _received(ref) for value, ref in arguments))


def _settings(accelerated: bool) -> dict[str, str]:
    """Return the environment in which JAX computes the same elsewhere: its variables, its threads
    and its devices.
    """
    config: Any = jax.config
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))
    }
    variables["NPROC"] = str(cores())  # XLA takes the size of its pool of threads from this
    if config.jax_num_cpu_devices > 0:
        variables["JAX_NUM_CPU_DEVICES"] = str(config.jax_num_cpu_devices)
    if not accelerated:
        variables["JAX_PLATFORMS"] = "cpu"
    return variables


def _versions() -> dict[str, str]:
    return {"asyncsim": asyncsim.__version__, **{name: version(name) for name in _PACKAGES}}


def send_by_value() -> None:
    """Pickle the content of modules that were loaded by path by value: other processes cannot
    import them.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_BY_PATH):
            cloudpickle.register_pickle_by_value(module)


def _require_answer(address: str) -> None:
    """Raise InputError unless something listens there; Ray itself would try for a long time."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, ValueError) as error:
        raise InputError(
            f"address = {address!r}: no Ray cluster there ({error}); give auto, or HOST:PORT of "
            "its head"
        ) from error
