"""Clusters without a server as plain loops over a heap of events; `UsualModel` is the slow engine
of those with one.
"""

import heapq
from collections import deque

import numpy as np
import pandas as pd

from asyncsim.base.streams import Streams
from asyncsim.simulation.delays import delays

COLUMNS = ["worker", "start_time", "send_time", "commit_time", "sources", "weights", "partner"]


def gossip(cluster, commits, seed):
    """Return the rows of a trace, with the columns `COLUMNS`."""
    engine = meetings if cluster.policy.name == "handshake" else messages
    return pd.DataFrame(engine(cluster, commits, seed), columns=COLUMNS)


ARRIVE, APPLY, GO_ON = range(3)


def messages(cluster, commits, seed):
    """The usual loop: an event for each arrival, and a look at who may go on after each."""
    n, policy = cluster.workers, cluster.policy
    matrices = cluster.topology.matrices(n)
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency = delays([cluster.latency_up] * n, seed, "latency up")
    beside = policy.mix == "beside"
    events, rows, number = [], [], [0] * n
    box, idle, start, end = [[] for _ in range(n)], {}, [0.0] * n, [0.0] * n
    taken = [[] for _ in range(n)]

    def compute(i, now):
        start[i], end[i] = now, now + duration(i)
        heapq.heappush(events, (end[i], APPLY if not beside else GO_ON, i, None))

    def may_go_on(i):
        if policy.name == "asynchronous":
            return True
        job = number[i] - 1 - (policy.steps or 0)
        if job < 0:
            return True
        needed = np.count_nonzero(matrices[job % len(matrices)][i]) - (
            matrices[job % len(matrices)][i, i] > 0
        )
        return sum(k == job for _, k, _ in received[i]) == needed

    received = [[] for _ in range(n)]  # whatever has come: (row, job, share)
    for i in range(n):
        compute(i, 0.0)
    while len(rows) < commits:
        now, kind, i, message = heapq.heappop(events)
        if kind == ARRIVE:
            box[i].append(message)
            received[i].append(message)
            if i in idle and may_go_on(i):
                del idle[i]
                heapq.heappush(events, (now, APPLY if beside else GO_ON, i, "go"))
        elif (
            kind == GO_ON and message is None
        ):  # a gradient beside the messages, or a worker done: go on if it can
            if may_go_on(i):
                heapq.heappush(events, (now, APPLY if beside else GO_ON, i, "go"))
            else:
                idle[i] = True
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
                    arrives = now + latency(i)
                    heapq.heappush(
                        events, (arrives, ARRIVE, int(taker), (len(rows), number[i], shares[taker]))
                    )
            rows.append(
                (i, start[i], end[i], now, [m[0] for m in taken[i]], [m[2] for m in taken[i]], -1)
            )
            taken[i], number[i] = [], number[i] + 1
            if beside:
                compute(i, now)
            else:
                heapq.heappush(events, (now, GO_ON, i, None))
    return rows


def meetings(cluster, commits, seed):
    """Exchanges that queue at both replicas, and begin when they are the first at both."""
    n = cluster.workers
    duration = delays(cluster.compute_laws, seed, "compute", cluster.windows)
    latency = delays([cluster.latency_up] * n, seed, "latency up")
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
