"""Record real processes: check the task, start them in Ray, wait, and build the trace.

Ray is imported only when a recording begins, because it may not be installed.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import Progress, note
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_positive,
)
from asyncsim.base.files import field_values
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant
from asyncsim.real.arrays import RECORDER, Computing, Task
from asyncsim.real.peers import Peer, in_flight
from asyncsim.real.server import RealWorker, Server
from asyncsim.replays.observing import columns
from asyncsim.replays.programs import cast
from asyncsim.replays.replay import check_replay
from asyncsim.simulation.simulate import simulate
from asyncsim.traces.columns import GOSSIP
from asyncsim.traces.trace import Trace
from asyncsim.traces.visits import recorded

#: The fields of a cluster that describe real processes.
DESCRIBED = (
    "workers",
    "compute",
    "service",
    "window",
    "protocol",
    "exclusive",
    "discipline",
    "policy",
    "topology",
)
#: The policies of a real server: those without clocks, whose versions have equally many messages.
POLICIES = (
    "asynchronous",
    "bounded_staleness",
    "buffered",
    "first_of",
    "barrier",
    "discard_stale",
)
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


class Recorded(NamedTuple):
    """The results of real processes.

    Attributes
    ----------
    task : Task
        The arguments of `record`.
    trace : Trace
    commits : pandas.DataFrame
        One row per accepted commit, with the columns of `asyncsim.Run`.
    faults : pandas.DataFrame
        Deaths and restarts of processes: ``time`` (s), ``worker``, ``what``, and the lost or next
        ``job``.
    central : dict
        The central variable, a vector, after some numbers of commits. Without a server after the
        last, with the workers' states behind it.
    evaluation : dict
        Loss and other values of the final central variable on all data, with the names of the
        evaluations of an `asyncsim.Run`. A problem's own state is the mean over the workers.
    """

    task: Task
    trace: Trace
    commits: pd.DataFrame
    faults: pd.DataFrame
    central: dict[int, np.ndarray]
    evaluation: dict[str, float]


def record(
    method: Any,
    problem: Any,
    cluster: Cluster,
    commits: int,
    seed: int = 0,
    precision: str = "float32",
    *,
    keep_every: int = 50,
    restart: bool = False,
    address: str | None = None,
    timeout: float = 180.0,
    progress: bool | None = None,
) -> Recorded:
    """Train with real worker processes, with or without a real server, and record a trace.

    Parameters
    ----------
    cluster : Cluster
        ``compute``: seconds that a worker sleeps per local step, besides the gradient; ``service``:
        seconds that the server sleeps per visit, besides applying the message. Network and failures
        are real, and not described.
    commits : int
        Accepted commits, a multiple of the policy's messages per version.
    seed : int
        Of the initial parameters, the minibatches, the problem's randomness and the delays: the
        streams of a replay.
    keep_every : int
        Commits between two copies of the central variable. Without a server only the last is kept.
    restart : bool
        Replace a worker whose process died. The new one computes the job after the lost one, from a
        new read. Not without a server, nor under a policy by which workers wait.
    address : str, optional
        Of a Ray cluster; None starts one on this machine for as long as it takes.
    timeout : float
        Seconds without a commit after which the recording stops with an error; also the limit for
        the start of all processes.
    progress : bool, optional
        Show a progress bar on standard error; by default if it is a terminal.

    Notes
    -----
    The processes run wherever the cluster has room, each with one thread. A worker reports the
    begin and the end of its computation; on another machine than the server's, the error is up to
    half the time of the fastest of ten calls. For a method that uses the time of its visit this is
    the acceptance of its message, in a replay the end of the service.

    A real computation cannot be stopped: under ``barrier(count)`` late messages are discarded.

    Without a server each worker records its own gradients. Under policies that wait (`neighbours`,
    `overlap`) all workers compute equally many; otherwise each continues until the total is
    reached. The clock is worker 0's.

    Computations lost with a worker are rows of the trace with the outcome ``"cancelled"``. They
    start at the end of the read, because their true start is unknown.

    Raises
    ------
    InputError
        Ray is missing, real processes cannot compute the task, they do not start, one fails, or
        there is no progress. Nothing is kept then.
    """
    task = Task(method, problem, cluster, require_count("commits", commits), seed, precision)
    require_choice("precision", precision, ("float32", "float64"))
    require_count("seed", seed, minimum=0)
    require_count("keep_every", keep_every)
    require_positive("timeout", timeout, "s")
    check(task, restart)
    has_server, workers = cluster.topology is None, range(cluster.workers)
    with ray_cluster(address, cluster.workers + has_server) as ray:
        variables = {**_environment(), "JAX_ENABLE_X64": str(int(precision == "float64"))}
        options = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
        options["max_concurrency"] = 4 * cluster.workers + 8
        stored = ray.put(task)

        def start(kind: type, *arguments: Any) -> _Remote:
            return _Remote(ray.remote(kind).options(**options).remote(*arguments))

        actors = [start(RealWorker if has_server else Peer, index, stored) for index in workers]
        server = start(Server, stored, keep_every) if has_server else None
        clock = server or actors[0]
        try:
            calls = [clock.clock(), *(actor.ready() for actor in actors)]
            _wait_for_start(ray, calls, timeout)
            ray.get(clock.start())
            loops = {actor.run(server or actors): worker for worker, actor in enumerate(actors)}
            counted = [server] if server else actors
            with _counting(task, timeout, progress) as advance:
                while loops:
                    ended, _ = ray.wait([*loops], timeout=_POLL)
                    for loop in ended:
                        worker = loops.pop(loop)
                        if not _has_died(ray, loop, worker):
                            continue
                        if server is None or cluster.policy.chooses_when_to_reply:
                            raise InputError(
                                f"worker {worker}: its process died, and others wait for it; "
                                "record again"
                            )
                        ray.get(server.lose(worker))
                        note(f"worker {worker}: its process died")
                        if restart:
                            loops[start(RealWorker, worker, stored).run(server)] = worker
                    advance(sum(ray.get([actor.progress() for actor in counted])))
            results = ray.get([actor.result() for actor in counted])
        except ray.exceptions.RayError as error:
            raise InputError(f"server: {_trouble(ray, error)}; record again") from error
    if server and len(_applied(results[0][0])) < commits:
        raise InputError("workers: all processes died; record again, with restart=True")
    return assemble(task, results)


def check(task: Task, restart: bool = False) -> None:
    """Raise InputError unless real processes can compute a task."""
    method, cluster, policy = task.method, task.cluster, task.cluster.policy
    described = Cluster(**{name: getattr(cluster, name) for name in DESCRIBED})
    undescribed = [
        name for name, value in field_values(cluster).items() if value != getattr(described, name)
    ]
    if undescribed:
        raise InputError(
            f"cluster: {', '.join(undescribed)}: are real, and not to be described; give "
            f"{', '.join(DESCRIBED)} alone"
        )
    if len(set(cluster.windows)) > 1 or cluster.discipline == "lock_free":
        raise InputError("cluster: needs one window for all workers and a queue at the server")
    if cluster.topology is None:
        is_known = policy.name in POLICIES and policy.grace is None and policy.collective is None
        if not is_known:
            raise InputError(
                f"policy = {policy}: a real server has none that stops computations or cuts "
                f"versions by the clock; choose {', '.join(POLICIES)}"
            )
        if task.commits % policy.per_version(cluster.workers):
            raise InputError(
                f"commits = {task.commits}: must be a multiple of the "
                f"{policy.per_version(cluster.workers)} messages of a version under {policy}"
            )
    # Real computations take some time, whatever the sleep.
    timed = dataclasses.replace(cluster, compute=Constant(1.0), service=Constant(0.0))
    sample = simulate(timed, 2 * policy.per_version(cluster.workers) * cluster.workers)
    check_replay(sample, method, task.problem, ())
    waits = policy.chooses_when_to_reply or policy.staleness_limit is not None
    reads_first = method.same_reply and cluster.protocol == "read_then_write"
    if method.reply is not None and (cluster.separate_reads or reads_first or waits or restart):
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central "
            "variable, which no other read carries; choose protocol='exchange', the policy "
            "asynchronous() or buffered(count), and no restart"
        )
    if restart and (cluster.topology is not None or policy.chooses_when_to_reply):
        raise InputError(
            "restart = True: workers that wait for each other need all messages; leave it out"
        )
    if method.meet is not None and method.resume is not None:
        raise InputError(
            f"method = {method.name!r}: where workers meet, a real one resumes from its message; "
            "leave resume out"
        )
    with task.in_precision():
        _check_functions(task)


def _check_functions(task: Task) -> None:
    """Raise InputError if a worker's functions need values that it lacks."""
    try:
        Computing(task).trace(0)
        if task.cluster.topology is not None:
            Peer(0, task)
    except InputError:
        raise
    except Exception as error:
        lacks = "the visit's time, staleness or commit"
        if task.cluster.topology is not None:
            lacks += ", or the central variable"
        raise InputError(
            f"method = {task.method.name!r}: its functions on a worker depend on {lacks}, which a "
            f"real worker cannot know ({' '.join(str(error).split())[:200]}); let the server's "
            "functions do it, or replay a trace"
        ) from error


def assemble(task: Task, results: Sequence[tuple[Any, ...]]) -> Recorded:
    """Build the recording from the results of the server, or of all workers without one."""
    with task.in_precision():
        computing = Computing(task)
        join = _with_server if task.cluster.topology is None else _without_server
        trace, numbers, faults, central, rows = join(task, computing, results)
        frame = trace.accepted.frame[["commit_time", "worker", "staleness"]]
        commits = frame.reset_index(drop=True).assign(commit=np.arange(len(frame)))
        commits["worker_step"] = trace.accepted.worker_step
        commits[list(columns([RECORDER])[: numbers.shape[1]])] = numbers
        table = pd.DataFrame(faults, columns=["time", "worker", "what", "job"])
        final = central[len(frame)][: computing.central.size]
        evaluation = evaluate(task.problem, computing, final, rows)
    return Recorded(task, trace, commits, table, central, evaluation)


def _form(task: Task) -> dict[str, Any]:
    """Return the arguments of `asyncsim.recorded` that the task says."""
    cluster = task.cluster
    form = {"workers": cluster.workers, "window": cluster.windows[0], "policy": cluster.policy}
    return {**form, "begin": 0.0, "seed": task.seed}


def _applied(log: Any) -> list[dict[str, Any]]:
    return [row for row in log.visits if "numbers" in row]


def _with_server(task: Task, computing: Computing, results: Any) -> tuple[Any, ...]:
    """Return the trace, the commits' numbers, the faults, the central variable's copies and the
    workers' states.
    """
    ((log, _, rows),) = results
    trace = recorded(
        [{name: value for name, value in row.items() if name != "numbers"} for row in log.visits],
        reads=log.reads,
        protocol=task.cluster.protocol,
        exclusive=task.cluster.exclusive,
        present=log.present or None,
        **_form(task),
    )
    numbers = np.array([row["numbers"] for row in _applied(log)])
    return trace, numbers, log.faults, log.central, rows


def _without_server(task: Task, computing: Computing, results: Any) -> tuple[Any, ...]:
    """Return the same as `_with_server`, without faults."""
    visits = sorted((row for log, *_ in results for row in log), key=lambda row: row["commit_time"])
    mixes_at_commit = task.cluster.policy.mix == "beside" or task.method.meet is not None
    trace = recorded(
        visits,
        protocol=GOSSIP,
        takes_up="commit" if mixes_at_commit else "read",
        in_flight=in_flight(task, visits) or None,
        **_form(task),
    )
    of_job = {(row["worker"], row["job"]): (row["loss"], row["update_norm"]) for row in visits}
    order = zip(trace.frame["worker"], trace.frame["job"], strict=True)
    numbers = np.array([of_job[pair] for pair in order])
    rows = [row for *_, row in results]
    mean = computing.central + sum(moved for _, moved, _ in results)
    states = [np.ravel(leaf) for row in rows for leaf in jax.tree.leaves(row.method)]
    central = np.concatenate([mean, *states]).astype(task.precision)
    return trace, numbers, [], {len(visits): central}, rows


def evaluate(problem: Any, computing: Computing, central: Any, rows: Any) -> dict[str, float]:
    """Evaluate a central variable on all data; a problem's own state is the workers' mean."""
    states = [row.learner.problem for row in rows]
    state = jax.tree.map(lambda *leaves: np.mean(leaves, 0).astype(leaves[0].dtype), *states)
    params = computing.flat.unravel(jnp.asarray(central))
    values: dict[str, float] = {}
    for part, data in {"train": problem.train, "test": problem.test}.items():
        if part == "train" or data is not None:  # without data there is a loss, too
            of_part = problem.evaluate(params, state, cast(data, central.dtype))
            values |= {f"{part}_{name}": float(value) for name, value in of_part.items()}
    return values


class _Remote:
    """A Ray actor whose functions are called like an object's; the answers can be awaited."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._actor, name).remote

    def __reduce__(self) -> Any:
        return _Remote, (self._actor,)


@contextlib.contextmanager
def ray_cluster(address: str | None = None, cpus: float = 1.0) -> Iterator[Any]:
    """Join a Ray cluster for a ``with`` block, or start one on this machine; yield the module Ray.

    See `asyncsim.study.ray_executor.joined`. A local cluster offers ``cpus``, whatever the machine
    has.
    """
    # Silences Ray's announcement of a change that does not matter here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError(
            'ray: is not installed, and real processes need it; pip install "asyncsim[ray]"'
        ) from None
    from asyncsim.study.ray_executor import joined, send_by_value

    with joined(address, num_cpus=math.ceil(cpus), object_store_memory=_STORE):
        send_by_value()
        yield ray


def _environment() -> dict[str, str]:
    """Return the variables of each process: the import path, JAX's cache, one thread."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
    caches = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("JAX_") and "CACHE" in name
    }
    return {**caches, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _wait_for_start(ray: Any, calls: list[Any], timeout: float) -> None:
    try:
        ray.get(calls, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        cpus = ray.cluster_resources().get("CPU", 0)
        raise InputError(
            f"timeout = {timeout:g}: {len(calls)} processes, a CPU each, did not start; the Ray "
            f"cluster has {cpus:g} CPUs; run fewer workers, add nodes, or give a longer timeout"
        ) from None
    except ray.exceptions.RayError as error:
        # The last line of a traceback has the error.
        cause = str(error).strip().splitlines()[-1]
        raise InputError(f"processes: one could not start: {cause}") from error


def _has_died(ray: Any, loop: Any, worker: int) -> bool:
    """Return whether a worker's process died; raise InputError if its function failed."""
    try:
        ray.get(loop)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError as error:
        raise InputError(f"worker {worker}: {_trouble(ray, error)}; record again") from error
    return False


def _trouble(ray: Any, error: Exception) -> str:
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    cause = getattr(error, "cause", None) or error
    return f"failed: {' '.join(f'{type(cause).__name__}: {cause}'.split())[:300]}"


@contextlib.contextmanager
def _counting(task: Task, timeout: float, progress: bool | None) -> Iterator[Any]:
    """Show a progress bar; yield the function that updates it, and that raises InputError where
    there is no commit within the timeout.
    """
    last, grown = 0, time.monotonic()
    with Progress(task.commits, task.method.name, "commit", progress) as bar:

        def advance(commits: int) -> None:
            nonlocal last, grown
            if commits > last:
                bar.advance(commits)
                last, grown = commits, time.monotonic()
            if time.monotonic() - grown > timeout:
                raise InputError(
                    f"timeout = {timeout:g}: no commit for this long, after {commits}; record "
                    "again, with a longer timeout"
                )

        yield advance
