"""The driver of a recording: checks arguments, starts processes in Ray, and supervises them.

Ray is imported only when a recording is made, because it may not be installed.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import asyncsim.real.peers as peers
from asyncsim.base.console import Progress, note, on_a_terminal
from asyncsim.base.errors import InputError, require_count, require_path, require_positive
from asyncsim.base.files import plain, require_plain
from asyncsim.methods.method import OF_JOURNEYS
from asyncsim.real.computing import Computing, check
from asyncsim.real.processes import Processes, require_ray
from asyncsim.real.recording import (
    CHECKPOINT,
    TRACE,
    Header,
    Recorded,
    load,
    read_log,
    usable_checkpoint,
)
from asyncsim.real.server import ServerActor, WorkerActor
from asyncsim.replays.suitable import require_enough
from asyncsim.traces.archive import write_trace

#: One thread for each process, because several processes share the cores.
_ONE_THREAD = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "MKL_NUM_THREADS": "1",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
#: Bytes of a local cluster's object store: the method, the problem and messages in flight.
_STORE = 512 * 2**20
#: Seconds between two polls of the processes' progress.
_POLL = 0.2
#: Seconds for an answer of the server to a question outside its queue.
_ANSWER = 30.0
_REMEDY = (
    "the recording so far is kept: continue with resume=True, in a study with --resume and its "
    "folder"
)


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
    """Train with real worker processes, with or without a real server, and record a trace.

    Parameters
    ----------
    method : Method
        Without a timing policy, and with local steps that need only values known to a worker.
    seed : int
        Of the initial parameters, the minibatches, the problem's randomness and the delays: the
        streams of a replay.
    folder : path
        For the recording; see `asyncsim.real.recording`.
    checkpoint_every : int
        Commits between two checkpoints; only the last is kept, with ``keep_states`` all.
        Without a server only the final arrays are kept.
    restart : bool
        Restart a worker whose process was lost, with a new read, and with the job after the lost
        one. Not without a server.
    resume : bool
        Continue the interrupted recording in the folder. Not without a server.
    address : str, optional
        Of a Ray cluster; None starts a temporary one on this machine.
        Of a Ray cluster; None starts one on this machine for as long as it takes.
    cpus, memory : number
        CPUs and bytes that each process requests from the cluster.
    start_timeout : float
        Seconds for all processes to start and compile.
    timeout : float
        Seconds without a commit after which the recording stops with an error; also the limit for a
        sign of life from the server.
    progress : bool, optional
        Show a progress bar on standard error; by default if it is a terminal.

    Notes
    -----
    The server runs on this machine, where the folder is; the workers run wherever the cluster has
    room, each on its own CPUs and with one thread. The worker reports the start of a computation:
    on another machine the error is up to half the time of the fastest of ten calls. The clock stops
    while a recording is interrupted. For a method that uses the time of its visit this is the
    acceptance of its message, in a replay the end of the service.

    Without a server each worker records its own gradients. Under policies that wait (`neighbours`,
    `overlap`) all workers make equally many; otherwise each continues until the total is reached.
    The recording is written at the end, and lost if a process dies or fails before. Its clock is
    worker 0's.

    Computations lost with a worker are rows of the trace with the outcome ``"cancelled"``. They
    start at the end of the read, because their true start is unknown.

    Raises
    ------
    InputError
        If Ray is not installed, arguments are invalid, or processes cannot start; if the server or
        all workers died: the message says so, and the recording so far is kept.
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
    limits = _Limits(
        cpus, memory, start_timeout, timeout, on_a_terminal() if progress is None else progress
    )
    if processes.topology is not None:
        for name, switch in (("restart", restart), ("resume", resume)):
            if switch:
                raise InputError(
                    f"{name} = True: without a server the lost work is unknown; leave it out, "
                    "record again"
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
    """Raise InputError if real processes cannot give a method the timing that it needs."""
    topology, policy = processes.topology, processes.policy
    gossips = method.gossips
    if gossips != (topology is not None):
        server = "no server" if gossips else "a server"
        remedy = (
            "give the processes a topology"
            if gossips
            else "choose dpsgd or another method without a server, or no topology"
        )
        raise InputError(
            f"method = {method.name!r}: has {server}, unlike these processes; {remedy}"
        )
    if gossips and (method.meet is not None) != (policy.name == "handshake"):
        do, required = (
            ("meet in pairs", "handshake()") if method.meet else ("send messages", "neighbours()")
        )
        raise InputError(
            f"method = {method.name!r}: its workers {do}, and the policy of these processes is "
            f"{policy}; "
            f"give {required}"
        )
    require_enough(method.name, method.timing, processes.workers)
    for name, required in vars(method.timing).items():
        value = getattr(processes, name, None)
        if required not in (None, value) and name not in (*OF_JOURNEYS, "fewest_workers"):
            raise InputError(
                f"method = {method.name!r}: needs {name} = {required}, and these processes have "
                f"{'none' if value is None else value}; give {name} = {required}"
            )
    if policy.mix == "beside" and method.timing.policy is None:
        raise InputError(
            f"method = {method.name!r}: nothing says that its gradients are of replicas that are "
            "not mixed; with the "
            f"policy {policy} its timing must say so, as dpsgd's does"
        )
    if method.meet is not None and method.resume is not None:
        raise InputError(
            f"method = {method.name!r}: where workers meet, a real one resumes from its message; "
            "leave resume out"
        )
    reads_before = method.same_reply and processes.protocol == "read_then_write"
    if method.reply is not None and (processes.separate_reads or reads_before):
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central "
            "variable, which separate "
            "reads do not carry; choose protocol='exchange'"
        )


def _prepare(folder: Path, header: Header, resume: bool) -> None:
    """Create the folder, or check that it holds this very recording."""
    require_plain(folder)
    if not resume:
        try:
            if folder.exists() and any(folder.iterdir()):
                raise InputError(
                    f"folder = {str(folder)!r}: exists and is not empty; give another, or "
                    "resume=True"
                )
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"folder = {str(folder)!r}: cannot be written: {error.strerror}; give another"
            ) from error
        if header.processes.topology is None:
            header.save(folder)
        return
    stored = Header.load(folder).comparable()
    for name, value in header.comparable().items():
        if value != stored[name]:
            raise InputError(
                f"resume: {name} = {value!r}, and the recording in {str(folder)!r} has "
                f"{stored[name]!r}; resume with "
                "the original arguments"
            )
    # The server reads these files, too; checked here, the user gets the error.
    load(folder)
    usable_checkpoint(folder / CHECKPOINT, len(read_log(folder)[0]))


@contextlib.contextmanager
def ray_cluster(address: str | None = None, cpus: float = 1.0) -> Iterator[Any]:
    """Join a Ray cluster for a ``with`` block, or start one on this machine; yield the module Ray.

    See `asyncsim.study.ray_executor.joined`. A local cluster offers ``cpus``, whatever the machine
    has.
    """
    ray = require_ray()
    from asyncsim.study.ray_executor import joined, send_by_value

    if address is not None and address.startswith("ray://"):
        raise InputError(
            f"address = {address!r}: the server writes to this machine; give HOST:PORT of the "
            "cluster"
        )
    with joined(address, num_cpus=math.ceil(cpus), object_store_memory=_STORE):
        send_by_value()
        yield ray


class _Limits(NamedTuple):
    """The resources of each process, and the time limits; see `record`."""

    cpus: float
    memory: int | None
    start_timeout: float
    timeout: float
    progress: bool


@contextlib.contextmanager
def _counting(
    limits: _Limits, total: int, unit: str, remedy: str
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in a ``with`` block; yield a function that updates it.

    The function raises InputError if the count has not grown within the timeout.
    """
    count, grown = 0, time.monotonic()
    with Progress(total, "", unit, limits.progress) as bar:

        def advance(total_now: int) -> None:
            nonlocal count, grown
            if total_now > count:
                bar.update(total_now - count)
                count, grown = total_now, time.monotonic()
            if time.monotonic() - grown > limits.timeout:
                raise InputError(
                    f"timeout = {limits.timeout:g}: no {unit} for this long, after {total_now}; "
                    f"{remedy}"
                )

        yield advance


class Supervisor:
    """Starts the processes of the server and the workers, watches over them, and ends them."""

    def __init__(self, ray: Any, method: Any, problem: Any, header: Header, limits: _Limits):
        count = header.processes.workers + 1
        options, self._content = _actor_options(ray, method, problem, count, limits)
        self._node = ray.get_runtime_context().get_node_id()
        this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self._node, soft=False
        )
        self._server_actor = ray.remote(ServerActor).options(
            scheduling_strategy=this_node, max_concurrency=2 * count + 6, **options
        )
        self._worker_actor = ray.remote(WorkerActor).options(**options)
        self._ray, self._header, self._key = ray, header, secrets.token_hex(32)
        self._limits = limits
        self.server: Any = None
        self.workers: list[Any] = []
        self._running: dict[Any, int] = {}  # the call of a worker's loop, and the worker
        self._starting: dict[Any, tuple[int, float]] = {}  # call of a restart, worker, deadline

    def start(self, folder: str, checkpoint_every: int, keep_states: bool) -> None:
        """Start all processes, and the workers' loops when all are ready."""
        self.server = self._server_actor.remote(
            self._content, self._header, self._key, folder, checkpoint_every, keep_states
        )
        self.workers = [self._worker(index) for index in range(self._header.processes.workers)]
        calls = [self._call("warm_up"), *(worker.warm_up.remote() for worker in self.workers)]
        _require_start(self._ray, calls, f"{len(calls)} processes", self._limits.start_timeout)
        self._ask("start")
        for index in range(len(self.workers)):
            self._set_going(index)

    def watch(self, restart: bool) -> None:
        """Wait until all commits are made; record lost workers, and restart them on request."""
        finished = self._call("wait")
        with _counting(self._limits, self._header.commits, "commit", _REMEDY) as advance:
            while True:
                calls = [finished, *self._running, *self._starting]
                ended, _ = self._ray.wait(calls, num_returns=1, timeout=_POLL)
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
                        self._handle_end(call, restart)
                for call, (index, deadline) in self._starting.items():
                    if time.monotonic() > deadline:
                        _require_start(self._ray, [call], f"worker {index}", 0.0)
                commits = self._ask("commits")
                if not self._running and not self._starting and commits < self._header.commits:
                    raise InputError(f"workers: all are lost after commit {commits}; {_REMEDY}")
                advance(commits)

    def end(self) -> None:
        """End all processes."""
        for process in [self.server, *self.workers]:
            if process is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(process)

    def _handle_end(self, call: Any, restart: bool) -> None:
        """Handle the end of a worker's loop: success, the loss of its process, or an error."""
        index = self._running.pop(call)
        try:
            self._ray.get(call, timeout=_ANSWER)
            return
        except self._ray.exceptions.RayError as error:
            self._ask("commits")  # raises if the server is gone
            cause = _trouble(self._ray, error)
        self._ask("lost", index, cause)
        note(f"worker {index}: {cause}{', restarting it' if restart else ''}")
        if restart:
            self.workers[index] = self._worker(index)
            deadline = time.monotonic() + self._limits.start_timeout
            self._starting[self.workers[index].warm_up.remote()] = index, deadline

    def _worker(self, index: int) -> Any:
        return self._worker_actor.remote(self._content, index, self._header)

    def _set_going(self, index: int) -> None:
        call = self.workers[index].visit.remote(
            self.server, self._key, self._node, self._limits.timeout
        )
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
            raise InputError(
                f"server: its process is gone ({type(error).__name__}); {_REMEDY}"
            ) from error


def _without_server(
    ray: Any, method: Any, problem: Any, header: Header, limits: _Limits
) -> list[peers.PeerResult]:
    """Run workers without a server; return the recorded results when all are done."""
    count, key = header.processes.workers, secrets.token_hex(32)
    options, content = _actor_options(ray, method, problem, count, limits)
    actor = ray.remote(peers.PeerActor).options(max_concurrency=2 * count + 6, **options)
    workers = [actor.remote(content, key, index, header) for index in range(count)]

    def answer(index: int, call: Any) -> Any:
        try:
            return ray.get(call, timeout=_ANSWER)
        except ray.exceptions.RayError as error:
            raise InputError(
                f"worker {index}: {_trouble(ray, error)}; nothing is kept, record again"
            ) from error

    def ask_all(name: str) -> list[Any]:
        return [
            answer(*call)
            for call in enumerate([worker.call.remote(key, name) for worker in workers])
        ]

    try:
        starting = [worker.call.remote(key, "warm_up") for worker in workers]
        _require_start(ray, starting, f"{count} processes", limits.start_timeout)
        node = answer(0, workers[0].begin.remote())  # all use worker 0's clock
        trained = [worker.train.remote(workers, node) for worker in workers]
        with _counting(
            limits, header.commits, "gradient", "nothing is kept, record again"
        ) as advance:
            while True:
                ended, unfinished = ray.wait(trained, num_returns=count, timeout=_POLL)
                for call in ended:
                    answer(trained.index(call), call)  # raises a worker's error
                if not unfinished:
                    return ask_all("result")
                advance(sum(ask_all("progress")))
    finally:
        for worker in workers:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(worker)


def _actor_options(
    ray: Any, method: Any, problem: Any, count: int, limits: _Limits
) -> tuple[dict[str, Any], Any]:
    """Return the options of ``count`` actors, and their content; check the resources."""
    cpus, memory, *_ = limits
    resources = ray.cluster_resources()
    for name, amount, unit in (("CPU", cpus, "CPUs"), ("memory", memory or 0, "bytes of memory")):
        if amount * count > resources.get(name, 0):
            raise InputError(
                f"workers: {count} processes, a server's among them, ask for {amount * count:g} "
                f"{unit}, and the Ray "
                f"cluster has {resources.get(name, 0):g}; run fewer, ask for less of each, or add "
                "nodes to the cluster"
            )
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    caches = {
        name: os.environ[name] for name in os.environ if name.startswith("JAX_") and "CACHE" in name
    }
    variables = {**caches, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": variables},
    }
    if memory is not None:
        options["memory"] = memory
    return options, ray.put(ray.cloudpickle.dumps((method, problem)))


def _trouble(ray: Any, error: Exception) -> str:
    """Describe the failure of an actor that does not answer."""
    if isinstance(error, ray.exceptions.RayActorError):
        return "process died"
    cause = getattr(error, "cause", None) or error
    return f"failed: {' '.join(f'{type(cause).__name__}: {cause}'.split())[:300]}"


def _require_start(ray: Any, calls: list[Any], processes: str, timeout: float) -> None:
    """Wait for the first calls of actors; raise InputError if one does not start in time."""
    errors = ray.exceptions
    try:
        ray.get(calls, timeout=timeout)
    except errors.GetTimeoutError:
        free = {
            name: n for name, n in ray.available_resources().items() if name in ("CPU", "memory")
        }
        raise InputError(
            f"{processes} did not start within {timeout:g} s; the Ray cluster has left: {free}; "
            "run fewer, "
            "ask for less of each, wait longer (start_timeout), or add nodes"
        ) from None
    except errors.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise InputError(str(error.cause)) from None
        raise
    except errors.RayError as error:
        # The last line of a traceback has the error.
        raise InputError(
            f"{processes} could not start: {str(error).strip().splitlines()[-1]}"
        ) from error
