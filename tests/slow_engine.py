"""Clusters without a server as plain loops over a heap of events; `UsualModel` is the slow engine
of those with one.
"""

import heapq
from collections import Counter, deque

import numpy as np
import pandas as pd

from asyncsim.base.streams import Streams
from asyncsim.simulation.delays import delays

COLUMNS = ["worker", "start_time", "send_time", "commit_time", "sources", "weights", "partner"]


def gossip(cluster, commits, seed):
    """Return the rows of a trace, with the columns `COLUMNS`."""
    engine = meetings if cluster.policy.name == "handshake" else messages
    return pd.DataFrame(engine(cluster, commits, seed), columns=COLUMNS)


def draws(cluster, seed):
    """Return functions of a worker that draw its times of computing and of travel."""
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    return duration, delays([cluster.latency_up] * cluster.workers, seed, "latency up")


ARRIVE, APPLY, GO_ON = range(3)


def messages(cluster, commits, seed):
    """The usual loop: an event for each arrival, and a look at who may go on after each."""
    n, policy = cluster.workers, cluster.policy
    matrices = cluster.topology.matrices(n)
    duration, latency = draws(cluster, seed)
    beside = policy.mix == "beside"
    events, rows, number = [], [], [0] * n
    box, idle, start, end = [[] for _ in range(n)], set(), [0.0] * n, [0.0] * n
    taken, arrived = [[] for _ in range(n)], Counter()  # messages of each taker and job

    def compute(i, now):
        start[i], end[i] = now, now + duration(i)
        heapq.heappush(events, (end[i], GO_ON if beside else APPLY, i, None))

    def may_go_on(i):
        job = number[i] - 1 - (policy.steps or 0)
        if policy.name == "asynchronous" or job < 0:
            return True
        return arrived[i, job] == np.count_nonzero(np.delete(matrices[job % len(matrices)][i], i))

    def go_on(i, now):
        heapq.heappush(events, (now, APPLY if beside else GO_ON, i, "go"))

    for i in range(n):
        compute(i, 0.0)
    while len(rows) < commits:
        now, kind, i, message = heapq.heappop(events)
        if kind == ARRIVE:
            box[i].append(message)
            arrived[i, message[1]] += 1
            if i in idle and may_go_on(i):
                idle.remove(i)
                go_on(i, now)
        elif kind == GO_ON and message is None:
            # A gradient beside the messages, or a worker done: go on if it can.
            if may_go_on(i):
                go_on(i, now)
            else:
                idle.add(i)
        else:
            if kind == GO_ON or beside:
                job = number[i] - 1
                taken[i] = sorted(m for m in box[i] if policy.name != "neighbours" or m[1] == job)
                box[i] = [m for m in box[i] if m not in taken[i]]
            if kind == GO_ON:
                compute(i, now)
                continue
            shares = matrices[number[i] % len(matrices)][:, i]
            for taker in np.flatnonzero(shares):
                if taker != i:
                    sent = len(rows), number[i], shares[taker]
                    heapq.heappush(events, (now + latency(i), ARRIVE, int(taker), sent))
            sources, weights = ([message[k] for message in taken[i]] for k in (0, 2))
            rows.append((i, start[i], end[i], now, sources, weights, -1))
            taken[i], number[i] = [], number[i] + 1
            if beside:
                compute(i, now)
            else:
                heapq.heappush(events, (now, GO_ON, i, None))
    return rows


def meetings(cluster, commits, seed):
    """Exchanges that queue at both replicas, and begin when they are the first at both."""
    n = cluster.workers
    duration, latency = draws(cluster, seed)
    near = cluster.topology.neighbours(n)
    queues, events, rows, number = [deque() for _ in range(n)], [], [], [0] * n
    start, end = [0.0] * n, [0.0] * n

    def compute(i, now):
        start[i], end[i] = now, now + duration(i)
        heapq.heappush(events, (end[i], 1, i, None))

    def begin(pair, now):
        if queues[pair[0]][0] == pair == queues[pair[1]][0]:
            heapq.heappush(events, (now + latency(pair[0]) + latency(pair[0]), 0, pair[0], pair))

    for i in range(n):
        compute(i, 0.0)
    while len(rows) < commits:
        now, kind, i, pair = heapq.heappop(events)
        if kind == 1:
            block, place = divmod(number[i], 64)
            drawn = Streams(seed, "partner").generator(i, block).integers(len(near[i]), size=64)
            pair = (i, near[i][drawn[place]], number[i])
            queues[i].append(pair)
            queues[pair[1]].append(pair)
            begin(pair, now)
        else:
            rows.append((i, start[i], end[i], now, [], [], pair[1]))
            number[i] += 1
            for queue in (queues[i], queues[pair[1]]):
                queue.popleft()
            for first in {queue[0] for queue in (queues[i], queues[pair[1]]) if queue}:
                begin(first, now)
            compute(i, now)
    return rows
