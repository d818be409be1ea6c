"""The usual SimPy model of a cluster under a timing policy: processes, a Resource, events and interrupts.

It shares only the delays and the description of the policy with the package. Laws have to be continuous: at one instant
it orders no more than who goes on when a version is made.
"""

import simpy

from asyncsim.simulation.delays import delays

APPLIED, BUFFERED, DISCARDED, CANCELLED = "applied", "buffered", "discarded", "cancelled"


class PolicyModel:
    """One run; ``rows`` holds what a trace's frame holds."""

    def __init__(self, cluster, commits, seed=0):
        self.cluster, self.policy, n = cluster, cluster.policy, cluster.workers
        self.env = simpy.Environment()
        self.server = simpy.Resource(self.env)
        same = [cluster.service] * n
        self.compute = delays(cluster.compute_laws, seed, "compute", cluster.windows)
        self.service = delays(same, seed, "service")
        self.up = delays([cluster.latency_up] * n, seed, "latency up")
        self.down = delays([cluster.latency_down] * n, seed, "latency down")
        self.version, self.taken, self.rows = 0, 0, []
        self.in_buffer = []
        self.read = [(0, 0.0)] * n  # version and time
        self.clock = [0] * n
        self.limit = {"barrier": 1}.get(self.policy.name, self.policy.limit)
        self.batch = self.policy.count or (n if self.policy.name == "barrier" else 1)
        self.changed = self.env.event()  # a version was made, or the slowest clock moved
        self.contributed, self.updated, self.next_round = set(), None, set()
        self.computing = set()
        self.processes = [self.env.process(self.worker(i)) for i in range(n)]
        while self.taken < commits:
            self.env.step()

    def outdated(self, read_version):
        return self.limit is not None and self.version - read_version >= self.limit

    def worker(self, i):
        while True:
            start, (read_version, read_time) = self.env.now, self.read[i]
            duration = self.compute(i)
            stopped = self.policy.name in ("barrier", "cancel_stale") and self.outdated(read_version)
            if not stopped:
                self.computing.add(i)
                try:
                    yield self.env.timeout(duration)
                except simpy.Interrupt:
                    stopped = True
                self.computing.discard(i)
            if stopped:
                times = (start, self.env.now, self.env.now, self.env.now)
                outcome = CANCELLED
            else:
                yield self.env.timeout(self.up(i))
                arrive = self.env.now
                with self.server.request() as request:
                    yield request
                    serve = self.env.now
                    yield self.env.timeout(self.service(i))
                times = (start, arrive, serve, self.env.now)
                own_read = self.version, self.env.now
                outcome = self.decide(i, read_version)
            self.rows.append((i, *times, read_version, read_time, self.version, outcome))
            yield from self.wait(i, outcome)
            if outcome == APPLIED:
                self.stop_outdated()
            if self.cluster.protocol == "write_then_read":
                with self.server.request() as request:
                    yield request
                    yield self.env.timeout(self.service(i))
            self.read[i] = self.version, self.env.now
            if self.cluster.protocol == "read_then_write":
                self.read[i] = own_read
            yield self.env.timeout(self.down(i))

    def decide(self, i, read_version):
        if self.outdated(read_version):
            return DISCARDED
        self.taken += 1
        slowest = min(self.clock)
        self.clock[i] += 1
        if self.policy.name == "rounds":
            made = self.round(i)
        else:
            self.in_buffer.append(i)
            made = len(self.in_buffer) == self.batch
        if made:
            self.version += 1
            self.in_buffer = []
        # Those who wait look only when it may be their turn, or their order would change.
        if min(self.clock) > slowest if self.policy.name == "bounded_staleness" else made:
            changed, self.changed = self.changed, self.env.event()
            changed.succeed()
        return APPLIED if made else BUFFERED

    def round(self, i):
        """Algorithm 1 of Ringleader as sets: who contributed in the first phase, who was updated in the second."""
        everyone = set(range(self.cluster.workers))
        if self.updated is None:
            self.contributed.add(i)
            if self.contributed < everyone:
                return False
            self.updated = {i}
        elif i in self.updated:
            self.next_round.add(i)
            return False
        else:
            self.updated.add(i)
        if self.updated == everyone:
            self.contributed, self.next_round, self.updated = self.next_round, set(), None
        return True

    def stop_outdated(self):
        if self.policy.name in ("barrier", "cancel_stale"):
            for i in sorted(self.computing):
                if self.outdated(self.read[i][0]):
                    self.processes[i].interrupt()

    def wait(self, i, outcome):
        if self.policy.name in ("first_of", "barrier") and outcome == BUFFERED:
            yield self.changed
        elif outcome == APPLIED and not self.ahead(i):
            yield self.env.timeout(0)  # those who waited go on first
        while self.ahead(i):
            yield self.changed

    def ahead(self, i):
        return self.policy.name == "bounded_staleness" and self.clock[i] - min(self.clock) > self.policy.bound
