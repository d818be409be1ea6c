"""The usual SimPy model of a cluster: a process per worker, a Resource for the server.

Written as SimPy's own examples are, to compare the package with: in tests the sequence of events,
in benchmarks the speed. Only the delays come from the package, so that both draw the same.
"""

from collections import deque
from functools import partial

import numpy as np
import simpy

from asyncsim.clusters.laws import Constant, Uniform
from asyncsim.simulation.delays import delays


class RandomResource(simpy.Resource):
    """Serves one at a time; among those that wait each is as likely as the others."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.uniform = delays([Uniform(0.0, 1.0)], seed, "discipline")

    def _trigger_put(self, _):
        waiting = self.put_queue
        if waiting and self.count < self.capacity:
            chosen = int(self.uniform(0) * len(waiting)) if len(waiting) > 1 else 0
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            self._do_put(waiting.pop())


def usual_model(cluster, commits, seed=0):
    """Run the usual model until so many commits have been applied.

    Returns
    -------
    list of (what, worker, start_time, arrive_time, serve_time, end_time)
        The visits to the server in order; ``what`` is "exchange", "read_then_write", "read" or "write".
    """
    env = simpy.Environment()
    laws = [cluster.service] * cluster.workers
    compute = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    service = delays(laws, seed, "service")
    up = way(env, cluster, cluster.latency_up, "latency up", seed)
    down = way(env, cluster, cluster.latency_down, "latency down", seed)
    if cluster.discipline == "random":
        server = RandomResource(env, seed)
    elif cluster.discipline == "lowest_rank":
        server = simpy.PriorityResource(env)
    else:
        server = simpy.Resource(env)
    visits = []
    done = env.event()
    remaining = iter(range(commits - 1, -1, -1))

    def committed():
        if next(remaining, None) == 0:
            done.succeed()

    def ask(worker):
        if cluster.discipline == "lowest_rank":
            return partial(server.request, priority=worker)
        return server.request

    def one_visit(worker):
        request_server = ask(worker)
        while True:
            start = env.now
            yield env.timeout(compute(worker))
            if up:
                yield from up(worker)
            arrive = env.now
            with request_server() as request:
                yield request
                serve = env.now
                yield env.timeout(service(worker))
            visits.append((cluster.protocol, worker, start, arrive, serve, env.now))
            committed()
            if down:
                yield from down(worker)

    def write_then_read(worker):
        request_server = ask(worker)
        while True:
            start = env.now
            yield env.timeout(compute(worker))
            if up:
                yield from up(worker)
            for what in ("write", "read"):
                arrive = env.now
                with request_server() as request:
                    yield request
                    serve = env.now
                    yield env.timeout(service(worker))
                    visits.append((what, worker, start, arrive, serve, env.now))
                    if what == "write":
                        committed()
            if down:
                yield from down(worker)

    def read_then_write(worker):
        request_server = ask(worker)
        while True:
            start = env.now
            yield env.timeout(compute(worker))
            for what in ("read", "write"):
                if up:
                    yield from up(worker, loaded=what == "write")
                arrive = env.now
                with request_server() as request:
                    yield request
                    serve = env.now
                    yield env.timeout(service(worker))
                visits.append((what, worker, start, arrive, serve, env.now))
                if what == "write":
                    committed()
                if down:
                    yield from down(worker, loaded=what == "read")

    if not cluster.separate_reads:
        process = one_visit
    else:
        process = write_then_read if cluster.protocol == "write_then_read" else read_then_write
    for worker in range(cluster.workers):
        env.process(process(worker))
    env.run(until=done)
    return visits


def way(env, cluster, law, purpose, seed):
    """Return a generator function for a message's way, or None if it takes no time."""
    latency = delays([law] * cluster.workers, seed, purpose)
    no_latency = law == Constant(0.0)
    transfer = cluster.transfer_up if purpose == "latency up" else cluster.transfer_down
    link = simpy.Resource(env) if cluster.shared_bandwidth else None
    if no_latency and transfer == 0:
        return None

    def travel(worker, loaded=True):
        alone = transfer if loaded and link is None else 0.0
        if loaded and link is not None:
            with link.request() as request:
                yield request
                yield env.timeout(transfer)
        if not no_latency or alone:
            yield env.timeout(latency(worker) + alone)

    return travel


def follow(visits, commits, workers):
    """Follow the versions through the visits, one at a time.

    Returns
    -------
    dict of ndarray
        A column for each entry of a commit, its ``read_version``, ``read_time``, ``staleness``, and
        ``others``: how many other reads were open at that increment.
    list of (worker, read_version, read_time)
        The reads open after the last commit.
    """
    version = 0
    held = [deque([(0, 0.0)]) for _ in range(workers)]
    rows = []
    for what, worker, start, arrive, serve, end in visits:
        for act in {"exchange": ("write", "read"), "read_then_write": ("read", "write")}.get(what, (what,)):
            if act == "read":
                held[worker].append((version, end))
                continue
            others = sum(map(len, held)) - 1
            read_version, read_time = held[worker].popleft()
            rows.append((worker, start, arrive, serve, end, read_version, read_time, version - read_version, others))
            version += 1
        if len(rows) == commits:
            break
    names = ("worker", "start_time", "arrive_time", "serve_time", "commit_time")
    names += ("read_version", "read_time", "staleness", "others")
    open_reads = [(worker, *read) for worker, reads in enumerate(held) for read in reads]
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}, open_reads
