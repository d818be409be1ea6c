"""Simulate a cluster: the visits of workers to the server, and the staleness of their messages.

`asyncsim.simulation.world` has the events with a server, `asyncsim.simulation.peers` without one;
`asyncsim.traces.bookkeeping` builds the rows of the trace from their record.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncsim.base.console import Progress, on_a_terminal
from asyncsim.base.errors import InputError, require_count, require_memory
from asyncsim.base.threads import require_wanted
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.workers import WORKER_BYTES
from asyncsim.simulation.handshakes import Handshakes
from asyncsim.simulation.messages import Messages
from asyncsim.simulation.world import World
from asyncsim.traces.bookkeeping import reads_of_commits, trace_of
from asyncsim.traces.trace import Trace

#: Memory (bytes) of a commit, at least: the record and the columns.
_COMMIT_BYTES = 400


def simulate(
    cluster: Cluster, commits: int, seed: int = 0, *, progress: bool | None = None
) -> Trace:
    """Simulate a cluster until its server has accepted ``commits`` messages.

    Without a server the run ends after ``commits`` gradients. Several servers have accepted a
    message once the last of them has its part.

    Every worker holds version 0 at time 0 and starts computing then. Events of the same instant
    happen in the order in which they were scheduled, exactly as in a SimPy model with a process per
    worker and a `simpy.Resource` for the server.

    Parameters
    ----------
    cluster : Cluster
        The workers, the server, the network and the policy.
    commits : int
        Messages applied or buffered: traces of all policies hold the same number of useful
        gradients. Discarded messages and cancelled computations come on top. A longer trace starts
        like a shorter one.
    seed : int
        Determines the random numbers. Every worker has its own stream: adding a worker, or changing
        the discipline or another worker's law, does not change a worker's durations.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Returns
    -------
    Trace
        One row per message or cancelled computation.
    """
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster = {cluster!r}: must be an asyncsim.Cluster")
    commits = require_count("commits", commits)
    seed = require_count("seed", seed, minimum=0)
    memory = (commits * _COMMIT_BYTES + cluster.workers * WORKER_BYTES) * cluster.server_count
    require_memory(
        f"commits = {commits}", f"a trace of so many by {cluster.workers} workers", memory
    )

    with _no_garbage_collection(), _progress(commits, progress) as report:
        if cluster.topology is not None:
            peers = (
                Handshakes(cluster, seed)
                if cluster.policy.name == "handshake"
                else Messages(cluster, seed, commits)
            )
            peers.run(commits, report)
            return peers.trace()
        world = World(cluster, seed)
        world.run(commits, report)
    commits_made, absences = world.steps.table(), None
    shards = (
        [(shard.steps.table(), shard.reads.table()) for shard in world.shards]
        if cluster.server_count > 1
        else []
    )
    if world.absences is not None:
        commits_made |= world.causes.table()
        absences = world.absences.table()
    rollouts = None if world.slots is None else world.slots.tables()
    reads = (
        reads_of_commits(cluster, commits_made) if world.reads_are_commits else world.reads.table()
    )
    return trace_of(cluster, seed, commits_made, reads, world.present(), absences, shards, rollouts)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off: it would search all workers, and finds no cycles."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _progress(commits: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the number of commits, on a progress bar if wanted."""
    if not (on_a_terminal() if show is None else show):
        yield lambda count: require_wanted()
        return

    def report(count: int) -> None:
        require_wanted()
        bar.advance(count)

    with Progress(commits, "simulate", "commit", is_shown=True) as bar:
        yield report
