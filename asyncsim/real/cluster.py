"""Ray: joining a cluster or starting one, and actors that start or say why not. Ray is imported here, when needed."""

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncsim.errors import InputError

#: One thread for all that a process computes: several processes share the cores.
_ONE_THREAD = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "MKL_NUM_THREADS": "1",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
#: Bytes of a local cluster's store of objects: the method, the problem and messages on their way.
_STORE = 512 * 2**20


def ray() -> Any:
    """Return the module; raise InputError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError('ray: is not installed, and real processes need it; pip install "asyncsim[ray]"')
    # Ray's own announcement of a change that does not matter here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


@contextlib.contextmanager
def ray_cluster(address: str | None = None, cpus: float = 1.0) -> Iterator[Any]:
    """Join a Ray cluster for the length of a ``with`` block, or start one on this machine that ends with it.

    Parameters
    ----------
    address : str, optional
        Of a cluster, ``"auto"`` or ``"192.168.0.1:6379"``; None starts a local one. If this process has joined a
        cluster already, that one is used, and left as it is.
    cpus : float
        That a local cluster has to give to processes, whatever the machine has.

    Yields
    ------
    module
        Ray.

    Raises
    ------
    InputError
        Ray is not installed, or there is no cluster at the address.
    """
    module = ray()
    from asyncsim.study.ray_executor import joined

    if address is not None and address.startswith("ray://"):
        raise InputError(f"address = {address!r}: the server writes to this machine; give HOST:PORT of the cluster")
    with joined(address, num_cpus=math.ceil(cpus), object_store_memory=_STORE):
        yield module


def check_room(module: Any, processes: int, cpus: float, memory: int | None) -> None:
    """Raise InputError if a cluster can never hold so many processes."""
    there = module.cluster_resources()
    for name, each, unit in (("CPU", cpus, "CPUs"), ("memory", memory or 0, "bytes of memory")):
        needed, has = each * processes, there.get(name, 0)
        if needed > has:
            raise InputError(
                f"workers: {processes} processes, the server's among them, ask for {needed:g} {unit}, and the Ray "
                f"cluster has {has:g}; run fewer, ask for less of each, or add nodes to the cluster"
            )


def actor(module: Any, kind: type, cpus: float, memory: int | None, here: bool = False, threads: int = 1) -> Any:
    """Return what makes actors of a class, with `remote`.

    Parameters
    ----------
    kind : type
    cpus : float
    memory : int, optional
        Bytes that it asks the cluster for.
    here : bool
        On this very machine.
    threads : int
        Calls at once.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    kept = {name: os.environ[name] for name in os.environ if name.startswith("JAX_") and "CACHE" in name}
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "max_restarts": 0,
        "max_concurrency": threads,
        "runtime_env": {"env_vars": {**kept, **_ONE_THREAD, "PYTHONPATH": paths}},
    }
    if memory is not None:
        options["memory"] = memory
    if here:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = module.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return module.remote(kind).options(**options)


def share(module: Any, *values: Any) -> Any:
    """Put what all processes need into the cluster's store, once; a user's own files go by value."""
    from ray import cloudpickle

    own = [file for name, file in sys.modules.items() if name.startswith("asyncsim.own.")]
    for file in own:
        cloudpickle.register_pickle_by_value(file)
    try:
        return module.put(cloudpickle.dumps(values))
    finally:
        for file in own:
            cloudpickle.unregister_pickle_by_value(file)


def shared(content: bytes) -> Any:
    """Return what `share` was given."""
    import pickle

    return pickle.loads(content)


def started(module: Any, calls: list[Any], what: str, timeout: float) -> list[Any]:
    """Return the results of the first calls of some actors.

    Raises
    ------
    InputError
        An actor did not start in time, or its start failed.
    """
    try:
        return module.get(calls, timeout=timeout)
    except module.exceptions.GetTimeoutError:
        free = {name: count for name, count in module.available_resources().items() if name in ("CPU", "memory")}
        raise InputError(
            f"{what} did not start within {timeout:g} s; the Ray cluster has left: {free}; run fewer, ask for less of "
            "each, wait longer (start_timeout), or add nodes"
        ) from None
    except module.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise InputError(str(error.cause)) from None
        raise
    except module.exceptions.RayError as error:
        # What was raised is the last line, after a traceback.
        raise InputError(f"{what} could not start: {str(error).strip().splitlines()[-1]}") from error
