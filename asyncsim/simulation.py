"""From a cluster to a trace: when every worker visits the server, and how stale it is by then.

SimPy's environment is the event engine: each end of a computation, of a journey and of a service is
one event in its queue. A worker waits for one thing at a time, so it *is* its next event, used again
and again: no process and no request object, and two events per visit when the network takes no time.

What a worker does is a chain of steps. A step is a function that sets a worker going and knows the
step that follows; the protocols are ways to chain them. Versions are not followed during the
run: `asyncsim.bookkeeping` counts them from its record.
"""

import gc
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from simpy.events import NORMAL

from asyncsim.bookkeeping import COMMIT_RECORD, READ_RECORD, trace_of
from asyncsim.cluster import Cluster
from asyncsim.delays import delays
from asyncsim.environment import environment
from asyncsim.errors import InputError, require_count
from asyncsim.laws import Constant, Law
from asyncsim.station import Station, Step, Worker, waiting_room

if TYPE_CHECKING:
    from asyncsim.trace import Trace


#: Commits between two updates of the progress bar: a fraction of a second.
_BLOCK = 20_000
#: Memory (bytes) that a commit and a worker take at the least: the record and the columns; the durations drawn ahead.
_BYTES = {"commit": 400, "worker": 1_000}


def simulate(cluster: Cluster, commits: int, seed: int = 0, *, progress: bool | None = None) -> "Trace":
    """Run a cluster until so many commits have been applied.

    Every worker holds version 0 at time 0 and starts computing then. Events of the same instant
    happen in the order in which they were scheduled, exactly as in a SimPy model with a process per
    worker and a `simpy.Resource` for the server.

    Parameters
    ----------
    cluster : Cluster
        How long things take and who queues where.
    commits : int
        Length of the trace. A longer one starts like a shorter one.
    seed : int
        Names the random numbers. Every worker draws its own: adding a worker, or changing the
        discipline or another worker's law, leaves the durations that a worker draws as they are.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Returns
    -------
    Trace
        One row per commit.

    Raises
    ------
    InputError
        A value that cannot be used, or a trace that does not fit into the memory of this machine.
    """
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster = {cluster!r}: must be an asyncsim.Cluster")
    commits = require_count("commits", commits)
    seed = require_count("seed", seed, minimum=0)
    _require_memory(cluster, commits)
    with _no_garbage_collection(), _progress(commits, progress) as told:
        simulation = _Simulation(cluster, seed)
        simulation.run(commits, told)
    return trace_of(
        cluster,
        seed,
        commits=_columns(COMMIT_RECORD, simulation.commits),
        reads=_columns(READ_RECORD, simulation.reads),
        present=simulation.present(),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Spare a run the collector: it makes no cycles, and all workers would be searched again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _progress(commits: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield what is told how many commits there are; a bar on standard error, if wanted."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=commits, desc="simulate", unit="commit", leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)


def _require_memory(cluster: Cluster, commits: int) -> None:
    """Raise InputError if a trace surely cannot be held, before hours have gone into it."""
    needed = commits * _BYTES["commit"] + cluster.workers * _BYTES["worker"]
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return
    if needed > there > 0:
        raise InputError(
            f"commits = {commits}: a trace of so many by {cluster.workers} workers needs at least "
            f"{needed / 2**30:.3g} GiB of memory and this machine has {there / 2**30:.3g}; simulate fewer"
        )


class _Simulation:
    """One run: the record of its visits, and the steps that write it."""

    def __init__(self, cluster: Cluster, seed: int):
        self.cluster = cluster
        self.seed = seed
        self.commits: list[float] = []
        self.reads: list[float] = []
        self.env = environment(cluster)
        service = self._delays(cluster.service, "service")
        self.server = self._station(service, waiting_room(cluster.discipline, seed))
        self.start_time = array("d", [0.0]) * cluster.workers

    def run(self, commits: int, told: Callable[[int], None]) -> None:
        """Go on until there are so many commits, telling how many there are now and then."""
        start = self._round()
        for index in range(self.cluster.workers):
            start(Worker(self.env, index))
        step, record, width = self.env.step, self.commits, len(COMMIT_RECORD)
        for stop in [*range(_BLOCK, commits, _BLOCK), commits]:
            length = stop * width
            while len(record) < length:
                step()
            told(stop)

    def present(self) -> dict[str, np.ndarray]:
        """Return who waits at the server or is served, and since when."""
        server = self.server
        served = [] if server.serving is None else [server.serving]
        worker = np.array(sorted(worker.index for worker in [*server.waiting, *served]), np.int64)
        return {"worker": worker, "arrive_time": np.array(server.arrive_time)[worker]}

    def _round(self) -> Step:
        """Chain a worker's steps from one computation to the next, and return the computation."""
        computed: list[Callable[[Any], None]] = []
        compute = self._compute(computed)
        up, down = self._way("up", self.cluster.latency_up), self._way("down", self.cluster.latency_down)
        visit, commit, read = self.server.visit, self._commit, self._read
        if not self.cluster.separate_reads:
            first = up(visit(commit(down(compute))))
        elif self.cluster.protocol == "write_then_read":
            first = up(visit(commit(visit(read(down(compute))))))
        else:
            acknowledged = down(compute, loaded=False)
            first = up(visit(read(down(up(visit(commit(acknowledged)))))), loaded=False)
        computed.append(first)
        return compute

    def _compute(self, computed: list[Callable[[Any], None]]) -> Step:
        cluster, env, start_time = self.cluster, self.env, self.start_time
        duration = delays(cluster.compute_laws, self.seed, "compute", cluster.window)

        def compute(worker: Worker) -> None:
            index = worker.index
            start_time[index] = env._now
            worker.callbacks = computed
            env.schedule(worker, NORMAL, duration(index))

        return compute

    def _way(self, direction: str, law: Law) -> Callable[..., Step]:
        """Return the function that puts a journey before a step."""
        env, cluster = self.env, self.cluster
        latency = self._delays(law, f"latency {direction}")
        transfer = cluster.transfer_time
        link = self._station(lambda worker: transfer, deque()) if cluster.shared_bandwidth else None

        def travel(then: Step, extra: float) -> Step:
            if extra == 0 and law == Constant(0.0):
                return then
            arrived = [then]

            def depart(worker: Worker) -> None:
                worker.callbacks = arrived
                env.schedule(worker, NORMAL, latency(worker.index) + extra)

            return depart

        def way(then: Step, loaded: bool = True) -> Step:
            if loaded and link is not None:
                return link.visit(travel(then, 0.0))
            return travel(then, transfer if loaded else 0.0)

        return way

    def _commit(self, then: Step) -> Step:
        env, server, record = self.env, self.server, self.commits.extend
        start_time, arrive_time = self.start_time, self.server.arrive_time

        def commit(worker: Worker) -> None:
            index = worker.index
            record((index, start_time[index], arrive_time[index], server.serve_time, env._now))
            then(worker)

        return commit

    def _read(self, then: Step) -> Step:
        env, server, record = self.env, self.server, self.reads.extend
        commits, width = self.commits, len(COMMIT_RECORD)

        def read(worker: Worker) -> None:
            index = worker.index
            version = len(commits) // width
            record((index, version, server.arrive_time[index], server.serve_time, env._now))
            then(worker)

        return read

    def _delays(self, law: Law, purpose: str) -> Callable[[int], float]:
        return delays([law] * self.cluster.workers, self.seed, purpose)

    def _station(self, busy: Callable[[int], float], waiting: Any) -> Station:
        return Station(self.env, self.cluster.workers, busy, waiting)


def _columns(names: tuple[str, ...], record: list[float]) -> dict[str, np.ndarray]:
    table = np.fromiter(record, np.float64, len(record)).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}
