"""The driver of a recording: checks what is asked for, starts the processes in a Ray cluster, and supervises them.

Ray is imported when a recording is made: it may not be installed.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import asyncsim.real.peers as peers
from asyncsim.base.console import note, on_a_terminal
from asyncsim.base.errors import InputError, require_count, require_path, require_positive
from asyncsim.base.files import plain, require_plain
from asyncsim.methods.method import OF_JOURNEYS
from asyncsim.real.computing import Computing, check
from asyncsim.real.processes import Processes, require_ray
from asyncsim.real.recording import CHECKPOINT, TRACE, Header, Recorded, load, read_log, usable_checkpoint
from asyncsim.real.server import ServerActor, WorkerActor
from asyncsim.replays.suitable import require_enough
from asyncsim.traces.archive import write_trace

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
#: Seconds between two looks at how far the processes are.
_LOOK = 0.2
#: Seconds for an answer of the server to a question that needs no turn.
_ANSWER = 30.0
_REMEDY = "what was recorded is kept: go on with resume=True, in a study with --resume and its folder"


def record(
    method: Any,
    problem: Any,
    processes: Processes,
    commits: int,
    seed: int = 0,
    *,
    folder: str | Path,
    precision: str = "float32",
    checkpoint_every: int = 50,
    keep_states: bool = False,
    restart: bool = False,
    resume: bool = False,
    address: str | None = None,
    cpus: float = 1.0,
    memory: int | None = None,
    start_timeout: float = 180.0,
    timeout: float = 120.0,
    progress: bool | None = None,
) -> Recorded:
    """Train with real worker processes around a real parameter server, or without one, and record it as a trace.

    Parameters
    ----------
    method : Method
        Without a timing policy, and whose local steps depend on nothing that a worker cannot know.
    seed : int
        Of the initial parameters, the minibatches, the problem's randomness and the delays: the streams of a replay.
    folder : path
        For the recording; see `asyncsim.real.recording`.
    checkpoint_every : int
        Commits between two checkpoints, of which the last is kept; with ``keep_states`` all. Without a server the
        arrays at the end are kept.
    restart : bool
        Start a worker again whose process was lost: from a read of its own, and with the job after the lost one. Not
        without a server.
    resume : bool
        Go on with the recording in the folder, which was broken off. Not without a server.
    address : str, optional
        Of a Ray cluster; None starts one on this machine for as long as it takes.
    cpus, memory : number
        CPUs and bytes that each process asks the cluster for.
    start_timeout : float
        Seconds for all processes to start and compile.
    timeout : float
        Seconds without a commit after which it is given up, and for the server to show that it lives.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Notes
    -----
    The server runs on this machine, where the folder is; the workers wherever the cluster has room, each on CPUs and
    with one thread. The worker says when a computation began: on another machine up to half the time of the quickest of
    ten calls off. A clock stands still while a recording is broken off. A method that uses the time of its visit sees
    when its message was accepted, and in a replay when the service ended.

    Without a server each worker records its own gradients. Where somebody waits (`neighbours`, `overlap`) all make as
    many; else they share them, each going on for as long as there are any left. The recording is written at the end,
    and lost if a process dies or fails before. Its clock is worker 0's.

    Computations that went with a lost worker are rows of the trace with the outcome ``"cancelled"``, which start at the
    end of the read: nobody knows when they really did.

    Raises
    ------
    InputError
        Ray is not installed; arguments cannot be used, or processes cannot start; the server died, or all workers did:
        the message says so, and what was recorded is kept.
    """
    require_ray()
    folder = require_path("folder", folder)
    require_count("checkpoint_every", checkpoint_every)
    for name, value in (("cpus", cpus), ("start_timeout", start_timeout), ("timeout", timeout)):
        require_positive(name, value)
    require_count("commits", commits)
    require_count("seed", seed, minimum=0)
    named = {"name": method.name, "hyperparameters": plain(method.hyperparameters)}
    solved = {"name": problem.name, "config": plain(problem.config)}
    header = Header(processes, commits, seed, precision, named, solved, method.reply is not None)
    require_timing(method, processes)
    check(method, problem, header)
    limits = _Limits(cpus, memory, start_timeout, timeout, on_a_terminal() if progress is None else progress)
    if processes.topology is not None:
        for name, asked in (("restart", restart), ("resume", resume)):
            if asked:
                raise InputError(
                    f"{name} = True: without a server nobody knows what is lost; leave it out, record anew"
                )
        peers.check(method, problem, header)
        _prepare(folder, header, resume)
        with ray_cluster(address, cpus * processes.workers) as ray:
            results = _without_server(ray, method, problem, header, limits)
        peers.write(folder, header, Computing(method, problem, header).first_job().start, results)
        return load(folder)
    _prepare(folder, header, resume)
    with ray_cluster(address, cpus * (processes.workers + 1)) as ray:
        supervisor = Supervisor(ray, method, problem, header, limits)
        try:
            supervisor.start(str(folder.resolve()), checkpoint_every, keep_states)
            try:
                supervisor.watch(restart)
            except BaseException:
                supervisor.end()  # before the server writes the same file
                with contextlib.suppress(InputError):
                    write_trace(load(folder).trace, folder / TRACE)
                raise
        finally:
            supervisor.end()
    return load(folder)


def require_timing(method: Any, processes: Processes) -> None:
    """Raise InputError if real processes cannot give a method what it needs."""
    topology, policy = processes.topology, processes.policy
    gossips = method.mix is not None or method.meet is not None
    if gossips != (topology is not None):
        server = "no server" if gossips else "a server"
        remedy = "give the processes a topology" if gossips else "choose dpsgd, sgp, osgp or adpsgd, or no topology"
        raise InputError(f"method = {method.name!r}: has {server}, unlike these processes; {remedy}")
    if gossips and (method.meet is not None) != (policy.name == "handshake"):
        do, needed = ("meet in pairs", "handshake()") if method.meet else ("send messages", "neighbours()")
        raise InputError(
            f"method = {method.name!r}: its workers {do}, and the policy of these processes is {policy}; give {needed}"
        )
    require_enough(method.name, method.timing, processes.workers)
    for name, needed in vars(method.timing).items():
        has = getattr(processes, name, None)
        if needed not in (None, has) and name not in (*OF_JOURNEYS, "fewest_workers"):
            raise InputError(
                f"method = {method.name!r}: needs {name} = {needed}, and these processes have "
                f"{'none' if has is None else has}"
            )
    if policy.mix == "beside" and method.timing.policy is None:
        raise InputError(
            f"method = {method.name!r}: nothing says that its gradients are of replicas that are not mixed; with the "
            f"policy {policy} its timing must say so, as that of dpsgd does"
        )
    if method.meet is not None and method.resume is not None:
        raise InputError(
            f"method = {method.name!r}: where workers meet, a real one goes on from its message; leave resume out"
        )
    if method.reply is not None and processes.separate_reads:
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central variable, which reads of "
            "their own do not bring; choose protocol='exchange'"
        )


def _prepare(folder: Path, header: Header, resume: bool) -> None:
    """Make the folder, or see that it holds this very recording."""
    require_plain(folder)
    if not resume:
        try:
            if folder.exists() and any(folder.iterdir()):
                raise InputError(f"folder = {str(folder)!r}: exists and is not empty; give another, or go on (resume)")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder = {str(folder)!r}: cannot be written: {error.strerror}; give another") from error
        if header.processes.topology is None:
            header.save(folder)
        return
    found = Header.load(folder).comparable()
    for name, value in header.comparable().items():
        if value != found[name]:
            raise InputError(
                f"resume: {name} = {value!r}, and the recording in {str(folder)!r} has {found[name]!r}; go on with "
                "what it was begun with"
            )
    # The server reads them too; here the user sees what is wrong.
    load(folder)
    usable_checkpoint(folder / CHECKPOINT, len(read_log(folder)[0]))


@contextlib.contextmanager
def ray_cluster(address: str | None = None, cpus: float = 1.0) -> Iterator[Any]:
    """Join a Ray cluster for a ``with`` block, or start one on this machine; the block gets the module Ray.

    See `asyncsim.study.ray_executor.joined`. A local cluster has so many CPUs to give, whatever the machine has.
    """
    ray = require_ray()
    from asyncsim.study.ray_executor import joined, send_by_value

    if address is not None and address.startswith("ray://"):
        raise InputError(f"address = {address!r}: the server writes to this machine; give HOST:PORT of the cluster")
    with joined(address, num_cpus=math.ceil(cpus), object_store_memory=_STORE):
        send_by_value()
        yield ray


class _Limits(NamedTuple):
    """The resources of each process, and the seconds to wait for processes; see `record`."""

    cpus: float
    memory: int | None
    start_timeout: float
    timeout: float
    progress: bool


@contextlib.contextmanager
def _counting(limits: _Limits, total: int, unit: str, remedy: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in a ``with`` block; yield a function that takes the count so far.

    It raises InputError if the count has not grown for too long.
    """
    count, grown = 0, time.monotonic()
    with tqdm(total=total, unit=unit, disable=not limits.progress, leave=False) as bar:

        def advance(now: int) -> None:
            nonlocal count, grown
            if now > count:
                bar.update(now - count)
                count, grown = now, time.monotonic()
            if time.monotonic() - grown > limits.timeout:
                raise InputError(f"timeout = {limits.timeout:g}: no {unit} for so long, after {now}; {remedy}")

        yield advance


class Supervisor:
    """Starts the server's and the workers' processes, watches over them, and ends them."""

    def __init__(self, ray: Any, method: Any, problem: Any, header: Header, limits: _Limits):
        count = header.processes.workers + 1
        options, self._content = _sent(ray, method, problem, count, limits)
        self._node = ray.get_runtime_context().get_node_id()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)
        self._server_actor = ray.remote(ServerActor).options(
            scheduling_strategy=here, max_concurrency=2 * count + 6, **options
        )
        self._worker_actor = ray.remote(WorkerActor).options(**options)
        self._ray, self._header, self._key = ray, header, secrets.token_hex(32)
        self._limits = limits
        self.server: Any = None
        self.workers: list[Any] = []
        self._running: dict[Any, int] = {}  # the call of a worker's loop and its index
        self._starting: dict[Any, tuple[int, float]] = {}  # the same of one that starts again, and when it is late

    def start(self, folder: str, checkpoint_every: int, keep_states: bool) -> None:
        """Start all processes, and let them go when all are ready."""
        given = (self._header, self._key, folder, checkpoint_every, keep_states)
        self.server = self._server_actor.remote(self._content, *given)
        self.workers = [self._worker(index) for index in range(self._header.processes.workers)]
        calls = [self._call("warm_up"), *(worker.warm_up.remote() for worker in self.workers)]
        _require_start(self._ray, calls, f"{len(calls)} processes", self._limits.start_timeout)
        self._ask("start")
        for index in range(len(self.workers)):
            self._set_going(index)

    def watch(self, restart: bool) -> None:
        """Return when all commits are made; enter the workers that are lost, and start them again if asked."""
        finished = self._call("wait")
        with _counting(self._limits, self._header.commits, "commit", _REMEDY) as advance:
            while True:
                calls = [finished, *self._running, *self._starting]
                ended, _ = self._ray.wait(calls, num_returns=1, timeout=_LOOK)
                if finished in ended:
                    trouble = self._answer(finished)
                    if trouble:
                        raise InputError(f"server: failed: {trouble}; {_REMEDY}")
                    return
                for call in ended:
                    if call in self._starting:
                        index, _ = self._starting.pop(call)
                        _require_start(self._ray, [call], f"worker {index}", _ANSWER)
                        self._set_going(index)
                    else:
                        self._look_after(call, restart)
                for call, (index, late) in self._starting.items():
                    if time.monotonic() > late:
                        _require_start(self._ray, [call], f"worker {index}", 0.0)
                now = self._ask("commits")
                if not self._running and not self._starting and now < self._header.commits:
                    raise InputError(f"workers: all are lost after commit {now}; {_REMEDY}")
                advance(now)

    def end(self) -> None:
        """End all processes."""
        for process in [self.server, *self.workers]:
            if process is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(process)

    def _look_after(self, call: Any, restart: bool) -> None:
        """Look after a worker whose loop has ended: well, because its process is gone, or by an error of its own."""
        index = self._running.pop(call)
        try:
            self._ray.get(call, timeout=_ANSWER)
            return
        except self._ray.exceptions.RayError as error:
            self._ask("commits")  # or it is the server that is gone
            what = _trouble(self._ray, error)
        self._ask("lost", index, what)
        note(f"worker {index}: {what}{', starting it again' if restart else ''}")
        if restart:
            self.workers[index] = self._worker(index)
            late = time.monotonic() + self._limits.start_timeout
            self._starting[self.workers[index].warm_up.remote()] = index, late

    def _worker(self, index: int) -> Any:
        return self._worker_actor.remote(self._content, index, self._header)

    def _set_going(self, index: int) -> None:
        call = self.workers[index].visit.remote(self.server, self._key, self._node, self._limits.timeout)
        self._running[call] = index

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.server.call.remote(self._key, name, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._answer(self._call(name, *arguments))

    def _answer(self, call: Any) -> Any:
        """Return the server's answer; raise InputError if its process is gone."""
        try:
            return self._ray.get(call, timeout=_ANSWER)
        except self._ray.exceptions.RayError as error:
            raise InputError(f"server: its process is gone ({type(error).__name__}); {_REMEDY}") from error


def _without_server(ray: Any, method: Any, problem: Any, header: Header, limits: _Limits) -> list[peers.PeerResult]:
    """Start workers without a server, and return what each has recorded when all are done; raise InputError if not."""
    count, key = header.processes.workers, secrets.token_hex(32)
    options, content = _sent(ray, method, problem, count, limits)
    actor = ray.remote(peers.PeerActor).options(max_concurrency=2 * count + 6, **options)
    workers = [actor.remote(content, key, index, header) for index in range(count)]

    def answer(index: int, call: Any) -> Any:
        """Return what a worker answers."""
        try:
            return ray.get(call, timeout=_ANSWER)
        except ray.exceptions.RayError as error:
            raise InputError(f"worker {index}: {_trouble(ray, error)}; nothing is kept, record anew") from error

    def ask_all(name: str) -> list[Any]:
        return [answer(*one) for one in enumerate([one.call.remote(key, name) for one in workers])]

    try:
        starting = [one.call.remote(key, "warm_up") for one in workers]
        _require_start(ray, starting, f"{count} processes", limits.start_timeout)
        node = answer(0, workers[0].begin.remote())  # whose clock all have
        trained = [one.train.remote(workers, node) for one in workers]
        with _counting(limits, header.commits, "gradient", "nothing is kept, record anew") as advance:
            while True:
                ended, left = ray.wait(trained, num_returns=count, timeout=_LOOK)
                for call in ended:
                    answer(trained.index(call), call)  # which may be an error
                if not left:
                    return ask_all("result")
                advance(sum(ask_all("made")))
    finally:
        for one in workers:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(one)


def _sent(ray: Any, method: Any, problem: Any, count: int, limits: _Limits) -> tuple[dict[str, Any], Any]:
    """Return the options of ``count`` actors, and what they compute with; raise InputError if there is no room."""
    cpus, memory, *_ = limits
    there = ray.cluster_resources()
    for name, each, unit in (("CPU", cpus, "CPUs"), ("memory", memory or 0, "bytes of memory")):
        if each * count > there.get(name, 0):
            raise InputError(
                f"workers: {count} processes, a server's among them, ask for {each * count:g} {unit}, and the Ray "
                f"cluster has {there.get(name, 0):g}; run fewer, ask for less of each, or add nodes to the cluster"
            )
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    kept = {name: os.environ[name] for name in os.environ if name.startswith("JAX_") and "CACHE" in name}
    variables = {**kept, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
    if memory is not None:
        options["memory"] = memory
    return options, ray.put(ray.cloudpickle.dumps((method, problem)))


def _trouble(ray: Any, error: Exception) -> str:
    """Return what has happened to an actor that does not answer."""
    if isinstance(error, ray.exceptions.RayActorError):
        return "process died"
    cause = getattr(error, "cause", None) or error
    return f"failed: {' '.join(f'{type(cause).__name__}: {cause}'.split())[:300]}"


def _require_start(ray: Any, calls: list[Any], what: str, timeout: float) -> None:
    """Wait for the first calls of some actors; raise InputError if one did not start in time, or failed."""
    errors = ray.exceptions
    try:
        ray.get(calls, timeout=timeout)
    except errors.GetTimeoutError:
        left = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "memory")}
        raise InputError(
            f"{what} did not start within {timeout:g} s; the Ray cluster has left: {left}; run fewer, ask for less "
            "of each, wait longer (start_timeout), or add nodes"
        ) from None
    except errors.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise InputError(str(error.cause)) from None
        raise
    except errors.RayError as error:
        # What was raised is the last line, after a traceback.
        raise InputError(f"{what} could not start: {str(error).strip().splitlines()[-1]}") from error
