"""The events of clusters without a server: who computes, sends and takes up when.

Two kinds of events are enough: a worker's gradient is applied, and a worker goes on. A message needs no event of its
own, as its arrival is known when it is sent. At one instant gradients are applied first, worker by worker, then workers
go on: what is sent at an instant and takes no time is there for all that begin to compute at it.
"""

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
import pandas as pd

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.network import takes_no_time
from asyncsim.errors import require_memory
from asyncsim.simulation.delays import delays
from asyncsim.streams import Streams
from asyncsim.topologies import Topology
from asyncsim.traces.bookkeeping import trace_without_server
from asyncsim.traces.columns import GOSSIP, Source
from asyncsim.traces.trace import Trace

#: The kinds of events, in their order at one instant.
_APPLY, _GO_ON = 0, 1
#: Rows between two updates of the progress bar.
_BLOCK = 20_000
#: Memory (bytes) of a message in a trace.
_MESSAGE_BYTES = 120
#: Partners drawn at once for a worker.
_PARTNERS = 64
#: Entries of the record for each row: worker, begin and end of its computation, and when its gradient was applied.
_WIDTH = 4


def simulate_without_server(cluster: Cluster, commits: int, seed: int, report: Callable[[int], None]) -> Trace:
    """Return the trace of a cluster with a topology until ``commits`` gradients were applied."""
    run = _exchanges if cluster.policy.name == "handshake" else _messages
    return run(cluster, commits, seed, report)


def _messages(cluster: Cluster, commits: int, seed: int, report: Callable[[int], None]) -> Trace:
    """Return the trace of workers that send after each gradient, under `asynchronous`, `neighbours` and `overlap`."""
    assert cluster.topology is not None
    n, policy = cluster.workers, cluster.policy
    edges = cluster.topology.edges(n)
    cycle = len(edges)
    per_row = sum(len(one.sender) for one in edges) / (cycle * n)
    needed = commits * per_row * _MESSAGE_BYTES
    require_memory(f"commits = {commits}", f"a trace of so many, {per_row:g} messages each", needed)
    sends = cluster.topology.sends(n)
    expected = [np.bincount(one.taker, minlength=n).tolist() for one in edges]
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency, transfer, at_once = _journeys(cluster, seed)

    # Whether a worker waits for the round that lies `behind` its own; whether it takes up that round, or all there is.
    waits = policy.name != "asynchronous"
    behind = policy.steps or 0
    by_round = policy.name == "neighbours"
    beside = policy.mix == "beside"
    waited_for = _APPLY if beside else _GO_ON  # what a worker does once the round is there

    # Messages are (row, share, arrival). Those of a round are together, with the number and the latest arrival.
    rounds: list[dict[int, tuple[list[tuple[int, float, float]], list[float]]]] = [{} for _ in range(n)]
    inbox: list[list[tuple[float, int, float]]] = [[] for _ in range(n)]
    taken: list[list[tuple[int, float, float]]] = [[] for _ in range(n)]
    done = [0] * n  # gradients applied
    waiting = [-1] * n  # the round that a worker waits for
    ready = [0.0] * n  # since when it does
    begun, ended = [0.0] * n, [0.0] * n
    record: list[float] = []
    sources: list[list[int]] = []
    weights: list[list[float]] = []
    events: list[tuple[float, int, int]] = []

    def wait_or(then: int, worker: int, number: int, now: float) -> None:
        """Let a worker go on, or apply, as soon as all messages of a round have arrived."""
        if waits and number >= 0:
            needed = expected[number % cycle][worker]
            there, latest = rounds[worker].get(number, ((), (0.0,))) if needed else ((), (0.0,))
            if len(there) < needed:
                waiting[worker], ready[worker] = number, now
                return
            now = max(now, latest[0])
        heappush(events, (now, then, worker))

    def compute(worker: int, now: float) -> None:
        begun[worker] = now
        ended[worker] = end = now + duration(worker)
        if beside:
            wait_or(_APPLY, worker, done[worker] - 1, end)
        else:
            heappush(events, (end, _APPLY, worker))

    for worker in range(n):
        compute(worker, 0.0)
    stop = min(_BLOCK, commits)
    while True:
        now, kind, worker = heappop(events)
        if kind == _GO_ON:
            if by_round:
                messages = rounds[worker].pop(done[worker] - 1, None)
                found = messages[0] if messages else []
            else:
                box = inbox[worker]
                found = []
                while box and box[0][0] <= now:
                    arrived, row, share = heappop(box)
                    found.append((row, share, arrived))
                rounds[worker].pop(done[worker] - 1 - behind, None)
            found.sort()
            taken[worker] = found
            compute(worker, now)
            continue
        number = done[worker]
        if beside:
            messages = rounds[worker].pop(number - 1, None)
            found = sorted(messages[0]) if messages else []
        else:
            found = taken[worker]
            taken[worker] = []
        row = len(sources)
        record += (worker, begun[worker], ended[worker], now)
        sources.append([message[0] for message in found])
        weights.append([message[1] for message in found])
        done[worker] = number + 1
        for taker, share in sends[number % cycle][worker]:
            arrives = now if at_once else now + latency(worker, taker) + transfer(worker, taker)
            if not by_round:
                heappush(inbox[taker], (arrives, row, share))
            if not waits:
                continue
            of_taker = rounds[taker]
            if number not in of_taker:
                of_taker[number] = ([], [0.0])
            there, latest = of_taker[number]
            there.append((row, share, arrives))
            if arrives > latest[0]:
                latest[0] = arrives
            if waiting[taker] == number and len(there) == expected[number % cycle][taker]:
                waiting[taker] = -1
                heappush(events, (max(ready[taker], latest[0]), waited_for, taker))
        if row + 1 == stop:
            report(stop)
            if stop == commits:
                break
            stop = min(stop + _BLOCK, commits)
        if beside:
            compute(worker, now)
        else:
            wait_or(_GO_ON, worker, number - behind, now)

    # Whose last gradient has just been applied has not begun another.
    open_start = np.where(_begun(n, record, begun), begun, np.nan)
    flying = [(row, taker, share, arrives) for taker in range(n) for row, share, arrives in taken[taker]]
    if by_round:
        flying += [
            (row, taker, share, arrives)
            for taker in range(n)
            for messages in rounds[taker].values()
            for row, share, arrives in messages[0]
        ]
    else:
        flying += [(row, taker, share, arrives) for taker in range(n) for arrives, row, share in inbox[taker]]
    rows = _rows(cluster, record)
    job = rows.groupby("worker").cumcount().to_numpy()
    kept = np.array([one.kept(n) for one in edges])[(job - 1) % cycle, rows["worker"].to_numpy(np.int64)]
    rows = rows.assign(kept=np.where(job == 0, 1.0, kept), partner=-1)
    source = _source(cluster, seed, "commit" if beside else "read")
    return trace_without_server(source, rows, sources, weights, open_start, flying)


def _exchanges(cluster: Cluster, commits: int, seed: int, report: Callable[[int], None]) -> Trace:
    """Return the trace of workers that average in pairs, under `handshake`.

    An exchange queues for both replicas when it is asked for. Its begin is then known: when both are free of those that
    were asked for before.
    """
    assert cluster.topology is not None
    n = cluster.workers
    partner_of = partners(cluster.topology, n, seed)
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency, transfer, at_once = _journeys(cluster, seed)
    done, free = [0] * n, [0.0] * n
    begun, ended, partner = [0.0] * n, [0.0] * n, [-1] * n
    record: list[float] = []
    met: list[int] = []
    events: list[tuple[float, int, int]] = []

    def compute(worker: int, now: float) -> None:
        begun[worker] = now
        ended[worker] = end = now + duration(worker)
        partner[worker] = partner_of(worker, done[worker])
        heappush(events, (end, _APPLY if at_once or partner[worker] < 0 else _GO_ON, worker))

    for worker in range(n):
        compute(worker, 0.0)
    stop = min(_BLOCK, commits)
    while True:
        now, kind, worker = heappop(events)
        if kind == _GO_ON:
            other = partner[worker]
            begin = max(now, free[worker], free[other])
            there, back = latency(worker, other), latency(worker, other)
            end = begin + there + back + (transfer(worker, other) + transfer(other, worker))
            free[worker] = free[other] = end
            heappush(events, (end, _APPLY, worker))
            continue
        record += (worker, begun[worker], ended[worker], now)
        met.append(partner[worker])
        done[worker] += 1
        if len(met) == stop:
            report(stop)
            if stop == commits:
                break
            stop = min(stop + _BLOCK, commits)
        compute(worker, now)
    open_start = np.where(_begun(n, record, begun), begun, np.nan)
    rows = _rows(cluster, record).assign(kept=1.0, partner=met)
    sources: list[list[int]] = [[] for _ in range(commits)]
    weights: list[list[float]] = [[] for _ in range(commits)]
    return trace_without_server(_source(cluster, seed, "commit"), rows, sources, weights, open_start, [])


def _journeys(cluster: Cluster, seed: int) -> tuple[Callable[[int, int], float], Callable[[int, int], float], bool]:
    """Return from sender and taker to a message's latency and to what the bandwidth adds (s), and if both are zero."""
    assert cluster.topology is not None
    (near, _), (far, _) = cluster.near_ways, cluster.ways
    at_once = takes_no_time(far.latency + near.latency) and not any(far.transfer + near.transfer)
    latency, slow = delays(near.latency, seed, "latency up"), cluster.topology.slowness(cluster.workers)
    if near == far and not slow:
        return lambda sender, taker: latency(sender), lambda sender, taker: near.transfer[sender], at_once
    between = delays(far.latency, seed, "far latency up")
    sites = cluster.sites or (cluster.workers,)
    site = np.repeat(np.arange(len(sites)), sites).tolist()

    def take(sender: int, taker: int) -> float:
        drawn = latency(sender) if site[sender] == site[taker] else between(sender)
        return drawn * slow.get((sender, taker), 1.0)

    def transfer(sender: int, taker: int) -> float:
        way = near if site[sender] == site[taker] else far
        return way.transfer[sender] * slow.get((sender, taker), 1.0)

    return take, transfer, at_once


def partners(topology: Topology, workers: int, seed: int) -> Callable[[int, int], int]:
    """Return which neighbour a worker averages with after a gradient of a number, drawn at random; -1 for nobody.

    A worker's numbers must come in order, from 0.
    """
    neighbours, streams = topology.neighbours(workers), Streams(seed, "partner")
    ahead: list[list[int]] = [[] for _ in range(workers)]

    def partner(worker: int, number: int) -> int:
        near = neighbours[worker]
        if not near:
            return -1
        block, place = divmod(number, _PARTNERS)
        if place == 0:
            ahead[worker] = streams.generator(worker, block).integers(len(near), size=_PARTNERS).tolist()
        return near[ahead[worker][place]]

    return partner


def _begun(workers: int, record: list[float], begun: list[float]) -> np.ndarray:
    """Return which workers compute at the end, ``[workers]``: those that began since their last row."""
    started = np.full(workers, -1.0)
    started[np.array(record[0::_WIDTH], np.int64)] = record[1::_WIDTH]
    return np.array(begun) > started


def _rows(cluster: Cluster, record: list[float]) -> pd.DataFrame:
    table = np.array(record).reshape(-1, _WIDTH)
    rows = pd.DataFrame(table, columns=["worker", "start_time", "send_time", "commit_time"])
    return rows.assign(local_steps=np.array(cluster.windows)[rows["worker"].to_numpy(np.int64)])


def _source(cluster: Cluster, seed: int, takes_up: str) -> Source:
    return Source(cluster.workers, GOSSIP, max(cluster.windows), seed=seed, cluster=cluster, takes_up=takes_up)
