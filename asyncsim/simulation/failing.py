"""The event engine with failures, under any policy: who is away, what is lost, what is restored.

Spells are exogenous: when a slow one, a crash or an outage begins and ends is drawn from a stream of its own, whatever
the run does. So the end of a computation, or of a service, is known when it begins; only what a crash ends, and who
is counted, takes events.

A worker's *flow* is the one `Worker` that may go on for it. A crash takes it away, unless its message is on its way to
the server or served; that goes on, and its reply is lost if its worker is still away by then. Whoever finds at a step
that it is no flow any more stops there. Every read that is open at a crash is the read of a cancelled row, so that job
``j`` still computes from read ``j``.

A worker that comes back, or that reads anew after a message that was given up, reads at that instant: it costs the way
down, no way up, and a service only where reads are visits of their own.
"""

import functools
import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from simpy.events import NORMAL

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law, Uniform
from asyncsim.clusters.policy import Policy
from asyncsim.errors import InputError
from asyncsim.failures import Failure, presences
from asyncsim.simulation.delays import delays
from asyncsim.simulation.policy_engine import Admission, PolicySimulation
from asyncsim.simulation.station import Station, Step, Worker
from asyncsim.traces.bookkeeping import COMMIT_RECORD, FAILURE_RECORD
from asyncsim.traces.columns import APPLIED, CANCELLED, DISCARDED, FAILED_BY, LOST, SPELLS

#: Rows and spells without an accepted message after which a run is given up; so many more for each worker.
_FRUITLESS, _FRUITLESS_OF_A_WORKER = 100_000, 1_000
NOTHING, CRASH, LEAVE, LOSS, RESENT = range(len(FAILED_BY))
#: Spells in one computation after which it is given up.
_SPELLS_OF_A_STEP = 1_000_000


class Spells:
    """An alternating process, ``every`` seconds without and ``lasts`` with, made as far as it is asked for."""

    def __init__(self, every: Callable[[], float], lasts: Callable[[], float]):
        self._every, self._lasts = every, lasts
        self._made: list[tuple[float, float]] = []

    def at(self, number: int) -> tuple[float, float]:
        """Return the begin and the end of a spell."""
        while len(self._made) <= number:
            begin = (self._made[-1][1] if self._made else 0.0) + self._every()
            self._made.append((begin, begin + self._lasts()))
        return self._made[number]


class Counted(Admission[Worker]):
    """A policy that counts the living: workers that are away, and known to be, are waited for by nobody.

    Attributes
    ----------
    counted : set of int
    """

    def __init__(self, policy: Policy, workers: int, counted: set[int]):
        super().__init__(policy, workers)
        self.counted = counted
        self._name, self._batch = policy.name, policy.per_version(workers)
        alone = self._batch == 1 and not self._waits_for_version and self._name not in ("rounds", "buckets")
        self._completes = (lambda index: True) if alone else self._is_last
        self._taken = 0
        #: Of a barrier and the first to deliver: who has; of rounds, see `asyncsim.rounds`; of buckets, which are full.
        self._delivered = set[int]()
        self._missing, self._due, self._ahead = set(counted), set[int](), set[int]()
        self._workers_at[0] = len(counted)

    def _is_last(self, index: int) -> bool:
        """Take a message in; return whether it completes a version."""
        if self._name == "rounds":
            return self._is_last_of_round(index)
        self._taken += 1
        self._delivered.add(index % self._batch if self._name == "buckets" else index)
        if not self._is_full():
            return False
        self._empty()
        return True

    def _is_full(self) -> bool:
        if self._name == "buckets":  # those of the living; the others may be empty
            return self._delivered >= {index % self._batch for index in self.counted}
        if self._taken >= self._batch:
            return True
        enough = self._waits_for_version and len(self._delivered) >= len(self.counted)
        return enough and self._taken > 0 and self._delivered >= self.counted

    def _empty(self) -> None:
        self._taken = 0
        self._delivered.clear()

    def _is_last_of_round(self, index: int) -> bool:
        if self._missing:
            self._missing.discard(index)
            if self._missing:
                return False
            self._due = self.counted - {index}
        elif index in self._due:
            self._due.discard(index)
        else:
            self._ahead.add(index)
            return False
        self._turn_rounds()
        return True

    def _turn_rounds(self) -> None:
        """Begin the next phase of a round where nobody is left in this one."""
        if not self._missing and not self._due:
            self._missing, self._ahead = self.counted - self._ahead, set()
            if not self._missing:  # there is a message of everyone, and the next of each makes a version
                self._due = set(self.counted)

    def who_goes_on(self, worker: Worker, index: int, outcome: int) -> Sequence[Worker]:
        """Return the workers that go on after a message; its sender may be away."""
        if self._bound is not None and index not in self.counted:
            return (worker,)
        return super().who_goes_on(worker, index, outcome)

    def must_wait(self, index: int) -> bool:
        """Return whether a worker that comes back has to wait, as it would have if it had not been away."""
        if self._bound is not None:
            return self._clocks[index] - self._slowest > self._bound
        return self._waits_for_version and index in self._delivered

    def wait(self, worker: Worker) -> None:
        """Let a worker wait that came back."""
        self._waiting.append(worker)

    def forget(self, index: int) -> None:
        """Let a worker that is gone wait no more."""
        self._waiting = [one for one in self._waiting if one.index != index]

    def died(self, index: int) -> Sequence[Worker]:
        """Count a worker no longer; return who goes on for it. That may make a version."""
        collects = bool(self._missing)
        for members in (self.counted, self._missing, self._due):
            members.discard(index)
        if self._name == "rounds":
            if collects and not self._missing:
                self._due = set(self.counted)  # the table was complete but for it
            self._turn_rounds()
        if self._bound is not None:
            self._workers_at[self._clocks[index]] -= 1
            return self._all_waiting() if self._catch_up() else ()
        if self._waits_for_version and self._taken and self._is_full():
            self._empty()
            self.version += 1
            return self._all_waiting()
        return ()

    def came(self, index: int) -> None:
        """Count a worker that joins or comes back."""
        if self._bound is not None:
            self._catch_up()
            self._clocks[index] = self._slowest
            self._workers_at[self._slowest] += 1
        if self._name == "rounds" and (self._missing or not self.counted):
            self._missing.add(index)
        self.counted.add(index)

    def _catch_up(self) -> bool:
        """Return whether the slowest of the counted workers is at a higher clock than before."""
        before = self._slowest
        clocks = [clock for clock, count in self._workers_at.items() if count > 0]
        self._slowest = max(before, min(clocks, default=before))
        return self._slowest > before

    def restored(self) -> Sequence[Worker]:
        """Begin anew what was buffered; return those that waited for the version that it would have gone into."""
        self.version += 1
        self._empty()
        self._missing, self._due, self._ahead = set(self.counted), set(), set()
        return self._all_waiting() if self._waits_for_version else ()


class FailingSimulation(PolicySimulation):
    """One run with failures.

    Attributes
    ----------
    jobs : list of int
        How many reads of each worker have been consumed.
    first : list of bool
        Whether each was there at the begin.
    """

    commit_record: tuple[str, ...] = (*COMMIT_RECORD, "outcome", *FAILURE_RECORD)

    def __init__(self, cluster: Cluster, seed: int):
        super().__init__(cluster, seed)
        n = cluster.workers
        self._presences = presences(cluster.failures, n, cluster.sites)
        self.first = [not changes or not changes[0][1] for changes in self._presences]
        there = {index for index in range(n) if self.first[index]}
        self.admission: Counted = Counted(cluster.policy, n, there)
        self.send_time = array("d", [0.0]) * n
        self._collective_time: float | None = None  # of the counted workers; None until it is asked for
        self.jobs, self._spells = [0] * n, list[list[float]]()
        self._reads_made = [int(one) for one in self.first]
        self._away = [int(not one) for one in self.first]  # spells that keep it away
        self._flow: list[Worker | None] = [None] * n
        self._under_way = [False] * n  # a message of it is on its way to the server, or there
        self._begun = [False] * n  # there is a computation without a row
        self._incarnation = [int(not one) for one in self.first]
        self._incarnation_of_job = list(self._incarnation)
        self._absence: list[list[float]] = [[] for _ in range(n)]
        for index in range(n):
            if not self.first[index]:
                self._absence[index] = [index, SPELLS.index("leave"), 0.0, math.nan, 0.0, 0.0, math.nan]
                self._spells.append(self._absence[index])
        self._restored, self._restores = -1.0, 0
        self._checkpoint, self._since_checkpoint, self._writing_until = 0, 0, 0.0
        self._down, self._when_up = False, list[Callable[[], None]]()
        self._fruitless, self._most_fruitless = 0, _FRUITLESS + _FRUITLESS_OF_A_WORKER * n
        numbers: dict[str, int] = {}
        self._speeds: list[list[tuple[Spells, float]]] = [[] for _ in range(n)]
        self._spell_numbers: list[list[int]] = [[] for _ in range(n)]
        self._losses: list[list[tuple[Failure, Callable[[int], float]]]] = [[] for _ in range(n)]
        self._outages: Spells | None = None
        self._outage: Failure | None = None
        for failure in cluster.failures:
            name = failure.name
            number = numbers[name] = numbers.get(name, -1) + 1
            self._begin(failure, f"failure {name} {number}")
        for index, changes in enumerate(self._presences):
            for time, comes in changes:
                change = functools.partial(self._come, index) if comes else functools.partial(self._go, index, LEAVE)
                self._at(time, change)

    @property
    def spells(self) -> list[float]:
        """Rows of `Trace.spells`, entry by entry."""
        return list(itertools.chain.from_iterable(self._spells))

    def _begin(self, failure: Failure, purpose: str) -> None:
        """Set a kind of failure going."""
        cluster, seed, n = self.cluster, self.seed, self.cluster.workers
        if failure.name == "loss":
            chance = delays([Uniform(0.0, 1.0)] * n, seed, purpose)
            for index in itertools.chain.from_iterable(failure.groups(n, cluster.sites)):
                self._losses[index].append((failure, chance))
        if failure.every is None or failure.lasts is None:
            return
        every, lasts = self._drawn(failure.every, f"{purpose} every"), self._drawn(failure.lasts, f"{purpose} lasts")
        if failure.name == "outage":
            self._outage = failure
            self._outages = Spells(functools.partial(every, 0), functools.partial(lasts, 0))
            self.server.busy = self._serving(self.server.busy)
            self._next_outage(self._outages, 0)
            return
        for group in failure.groups(n, cluster.sites):
            spells = Spells(functools.partial(every, group[0]), functools.partial(lasts, group[0]))
            if failure.name == "crash":
                self._next_crash(failure, group, spells, 0)
                continue
            for index in group:
                self._speeds[index].append((spells, 0.0 if failure.name == "pause" else failure.speed or 0.0))
                self._spell_numbers[index].append(0)

    def _drawn(self, law: Law, purpose: str) -> Callable[[int], float]:
        return delays([law] * self.cluster.workers, self.seed, purpose)

    def _at(self, time: float, then: Callable[[], None]) -> None:
        timeout = self.env.timeout(max(time - self.env._now, 0.0))
        timeout.callbacks.append(lambda _: then())

    # What the steps of a worker become.

    def _round(self) -> Step:
        compute = super()._round()

        def start(worker: Worker) -> None:
            if self.first[worker.index]:
                self._flow[worker.index] = worker
                compute(worker)

        return start

    def _compute(self, computed: list[Callable[[Any], None]]) -> Step:
        env, flow, admission, stops = self.env, self._flow, self.admission, self._stops
        start_time, send_time, begun, speeds = self.start_time, self.send_time, self._begun, self._speeds
        read_version, last_read, incarnation = self.read_version, self.last_read, self._incarnation
        duration = delays(self.cluster.compute_laws, self.seed, "compute", self.cluster.windows)

        def ended(worker: Worker) -> None:
            index = worker.index
            if flow[index] is worker:
                if stops:
                    del self._computing[index]
                send_time[index] = env._now
                computed[0](worker)

        callbacks: list[Callable[[Any], None]] = [ended]

        def compute(worker: Worker) -> None:
            index = worker.index
            if flow[index] is not worker:
                return
            version = read_version[index] = last_read[index]
            start_time[index] = env._now
            send_time[index] = math.inf
            begun[index] = True
            self._incarnation_of_job[index] = incarnation[index]
            lasts = duration(index)
            worker.callbacks = callbacks
            env.schedule(worker, NORMAL, self._computing_time(index, lasts) if speeds[index] else lasts)
            if stops:
                self._computing[index] = worker
                if admission.outdated(version):
                    self._stop(index)
                else:
                    self._began_from[version].append(index)

        self._compute_again = compute
        return compute

    def _computing_time(self, index: int, work: float) -> float:
        """Return how long a computation takes that begins now, at the speeds to come."""
        now = time = self.env._now
        spells, numbers = self._speeds[index], self._spell_numbers[index]
        for which, (own, _) in enumerate(spells):
            while own.at(numbers[which])[1] <= now:
                numbers[which] += 1
        ahead = list(numbers)
        for _ in range(_SPELLS_OF_A_STEP):
            speed, until = 1.0, math.inf
            for which, (own, factor) in enumerate(spells):
                while own.at(ahead[which])[1] <= time:
                    ahead[which] += 1
                begin, end = own.at(ahead[which])
                speed *= factor if begin <= time else 1.0
                until = min(until, end if begin <= time else begin)
            if speed > 0 and time + work / speed <= until:
                return work if time == now and speed == 1.0 else time + work / speed - now
            work -= (until - time) * speed
            time = until
        raise InputError(f"failures: a computation of worker {index} is not done after {_SPELLS_OF_A_STEP:,} spells")

    def _serving(self, busy: Callable[[int], float]) -> Callable[[int], float]:
        """Return how long a service takes that begins now, with the checkpoint and the outages before its end."""
        outages, number = self._outages, 0
        assert outages is not None

        def busy_time(index: int) -> float:
            nonlocal number
            now, lasts = self.env._now, busy(index)
            begin = time = max(now, self._writing_until)
            while outages.at(number)[1] <= now:
                number += 1
            ahead, left = number, lasts
            while outages.at(ahead)[0] < time + left:
                out, back = outages.at(ahead)
                if back > time:
                    if out <= begin:
                        begin = back
                    left -= max(out - time, 0.0)
                    time = back
                ahead += 1
            if isinstance(self.server, Station):
                self.server.serve_time = begin
            if time == now:
                return lasts
            takes = time + left - now
            while now + takes < begin:  # by round-off
                takes = math.nextafter(takes, math.inf)
            return takes

        return busy_time

    def _station(self, busy: Callable[[int], float], waiting: Any) -> Station:
        station = super()._station(busy, waiting)
        if not hasattr(self, "_flow"):  # the server; all else are links
            return station
        # Nothing is sent to a worker that has crashed since.
        station.busy = lambda index: busy(index) if station.serving is self._flow[index] else 0.0
        return station

    def _way(self, direction: int) -> Callable[..., Step]:
        way = super()._way(direction)
        if direction == 1:
            return self._all_reduce if self.cluster.collective_time else way

        flow, losses, under_way = self._flow, self._losses, self._under_way

        def up(then: Step, loaded: bool = True) -> Step:
            step = way(then, loaded)

            def send(worker: Worker) -> None:
                index = worker.index
                if flow[index] is not worker:
                    return
                for failure, chance in losses[index] if loaded else ():
                    assert failure.probability is not None and failure.timeout is not None
                    if chance(index) < failure.probability:
                        worker.callbacks = [functools.partial(self._time_out, failure, send)]
                        self.env.schedule(worker, NORMAL, failure.timeout)
                        return
                under_way[index] = True
                step(worker)

            return send

        return up

    def _all_reduce(self, then: Step, loaded: bool = True) -> Step:
        """Put the all-reduce of the counted workers before a step."""
        env, arrived = self.env, [then]

        def depart(worker: Worker) -> None:
            if self._collective_time is None:
                self._collective_time = self.cluster.collective_time_of(self.admission.counted)
            worker.callbacks = arrived
            env.schedule(worker, NORMAL, self._collective_time)

        return depart

    def _time_out(self, failure: Failure, send: Step, worker: Worker) -> None:
        """Send a lost message again, or give it up."""
        index, now = worker.index, self.env._now
        if self._flow[index] is not worker:
            return
        self._row(index, now, now, now, LOST, RESENT if failure.resend else LOSS)
        if failure.resend:
            self.start_time[index] = self.send_time[index] = now
            self._begun[index] = True
            send(worker)
        elif self._reads_made[index] > self.jobs[index]:  # it has read for the next computation
            self._compute_again(worker)
        else:
            self._flow[index] = None
            self._enter_when_up(index)

    def _atomic(self, then: Step) -> Step:
        if self.cluster.protocol != "read_then_write":
            return self._commit(self._reply(then))
        commit = self._commit(then)

        def read_and_commit(worker: Worker) -> None:
            self._recorded_read(worker.index, self.server.serve_time)
            commit(worker)

        return read_and_commit

    def _commit(self, then: Step) -> Step:
        env, server, admission, away, under_way = self.env, self.server, self.admission, self._away, self._under_way
        serve_time, arrive_time, read_version, row = self.serve_time, server.arrive_time, self.read_version, self._row
        again, policy = self.cluster.protocol == "write_then_read", self.cluster.policy
        lets_wait, watches = policy.bound is not None or policy.waits_for_version, self._outage or self._stops

        def go_on(worker: Worker) -> None:
            under_way[worker.index] = again  # to ask for its read
            then(worker)

        self._go_on = go_on

        def commit(worker: Worker) -> None:
            index = worker.index
            serve_time[index] = server.serve_time
            outcome = admission.take(index, read_version[index])
            row(index, arrive_time[index], server.serve_time, env._now, outcome, NOTHING)
            under_way[index] = False
            if outcome != DISCARDED:
                self.taken.append(index)
            released = admission.who_goes_on(worker, index, outcome) if lets_wait else (worker,)
            if away[index]:
                admission.forget(index)
                self._end_flow(index)
                released = [one for one in released if one is not worker]
            for one in released:
                go_on(one)
            if watches and outcome == APPLIED:
                self._version_made()

        return commit

    def _read(self, then: Step) -> Step:
        def visit(worker: Worker) -> None:
            index = worker.index
            self._recorded_read(index, self.server.serve_time)
            self._under_way[index] = False
            if self._away[index]:
                self._end_flow(index)
            else:
                then(worker)

        return visit

    def _recorded_read(self, index: int, serve_time: float) -> None:
        version = self.last_read[index] = self.admission.version
        self.reads.extend((index, version, self.server.arrive_time[index], serve_time, self.env._now))
        self._reads_made[index] += 1

    def _stop(self, index: int) -> None:
        now = self.env._now
        del self._computing[index]
        self._row(index, now, now, now, CANCELLED, NOTHING)
        self.server.arrive_time[index] = self.serve_time[index] = now
        worker = self._flow[index] = Worker(self.env, index)
        self._go_on(worker)

    def _row(self, index: int, arrive: float, serve: float, now: float, outcome: int, failed_by: int) -> None:
        """Record what became of a worker's next job."""
        start = send = now
        if self._begun[index]:
            start, send = self.start_time[index], self.send_time[index]
            if send > now:
                send = now
            self._begun[index] = False
        jobs = self.jobs
        number, version = jobs[index], self.admission.version
        also = number, version, failed_by, self._incarnation_of_job[index], self._restored, self._restores
        self.commits.extend((index, start, send, arrive, serve, now, outcome, *also))
        if self._restores:
            self._restored, self._restores = -1.0, 0
        if failed_by != RESENT:
            jobs[index] = number + 1
        if outcome < CANCELLED:
            self._fruitless = 0
        else:
            self._count_failure()

    def _count_failure(self) -> None:
        """Raise InputError where there is nothing but failures."""
        self._fruitless += 1
        if self._fruitless > self._most_fruitless:
            raise InputError(
                f"failures = {', '.join(map(str, self.cluster.failures))}: so often that the server got no message "
                f"in {self._fruitless:,} failures; give longer times between them, or shorter computations"
            )

    def _version_made(self) -> None:
        """Write a checkpoint if one is due, and stop what the newest version has made too stale."""
        outage, now = self._outage, self.env._now
        if outage is not None and self._outages is not None and outage.checkpoint_every and not self._down:
            self._since_checkpoint += 1
            if self._since_checkpoint >= outage.checkpoint_every:
                self._since_checkpoint = 0
                begins = self._outages.at(self._outages_begun)[0]
                written = now + (outage.checkpoint_time or 0.0)
                self._writing_until = min(written, begins)
                if written <= begins:
                    self._checkpoint = self.admission.version
        if self._stops:
            self._stop_outdated()

    # What failures do.

    def _next_crash(self, failure: Failure, group: list[int], spells: Spells, number: int) -> None:
        begin, end = spells.at(number)

        def crash() -> None:
            self._count_failure()
            for index in group:
                self._go(index, CRASH, failure.detect or 0.0)
            self._at(end, come)

        def come() -> None:
            for index in group:
                self._come(index)
            self._next_crash(failure, group, spells, number + 1)

        self._at(begin, crash)

    def _go(self, index: int, why: int, detect: float = 0.0) -> None:
        """Take a worker away; its message, if it is on its way, stays."""
        self._away[index] += 1
        if self._away[index] == 1:
            kind = SPELLS.index(FAILED_BY[why])
            self._absence[index] = [index, kind, self.env._now, math.nan, math.nan, math.nan, math.nan]
            self._spells.append(self._absence[index])
            if not self._under_way[index]:
                self.admission.forget(index)
                self._end_flow(index)
            self._incarnation[index] += 1
        number = self._incarnation[index]
        if detect:
            self._at(self.env._now + detect, functools.partial(self._detect, index, number))
        else:
            self._detect(index, number)

    def _end_flow(self, index: int) -> None:
        """Cancel what a worker that is away would have computed."""
        self._flow[index] = None
        self._computing.pop(index, None)
        now, why = self.env._now, FAILED_BY.index(SPELLS[int(self._absence[index][1])])
        while self._reads_made[index] > self.jobs[index]:
            self._row(index, now, now, now, CANCELLED, why)

    def _detect(self, index: int, incarnation: int) -> None:
        """Count a worker no longer, if it is still away."""
        if self._down:
            self._when_up.append(functools.partial(self._detect, index, incarnation))
            return
        if not self._away[index] or incarnation != self._incarnation[index] or index not in self.admission.counted:
            return
        self._absence[index][4:6] = self.env._now, len(self.commits) // len(self.commit_record)
        version, self._collective_time = self.admission.version, None
        for one in self.admission.died(index):
            self._go_on(one)
        if self.admission.version > version:
            self._version_made()

    def _come(self, index: int) -> None:
        """Let a worker back in, with the newest version."""
        self._away[index] -= 1
        if self._away[index]:
            return
        absence = self._absence[index]
        absence[3], absence[6] = self.env._now, len(self.commits) // len(self.commit_record)
        if index not in self.admission.counted:
            self.admission.came(index)
            self._collective_time = None
        self._enter_when_up(index)

    def _enter_when_up(self, index: int) -> None:
        if self._down:
            self._when_up.append(functools.partial(self._enter_when_up, index))
        elif not self._away[index] and self._flow[index] is None:
            worker = self._flow[index] = Worker(self.env, index)
            self.server.arrive_time[index] = self.serve_time[index] = self.env._now
            if self.admission.must_wait(index):
                self.admission.wait(worker)
                return
            if self.cluster.protocol != "read_then_write":
                self._go_on(worker)
            elif self.cluster.separate_reads:
                self._under_way[index] = True
                self.server.visit(self._read(self._go_on))(worker)
            else:
                self._recorded_read(index, self.env._now)
                self._go_on(worker)

    def _next_outage(self, outages: Spells, number: int) -> None:
        begin, end = outages.at(number)
        self._outages_begun = number

        def go_down() -> None:
            self._count_failure()
            self._down = True
            self._at(end, restore)

        def restore() -> None:
            self._spells.append([-1, SPELLS.index("outage"), begin, end, math.nan, math.nan, math.nan])
            self._down = False
            self._restored, self._restores = float(self._checkpoint), self._restores + 1
            self._since_checkpoint = 0
            self._next_outage(outages, number + 1)
            for one in self.admission.restored():
                self._go_on(one)
            if self._stops:
                self._stop_outdated()
            waiting, self._when_up = self._when_up, []
            for then in waiting:
                then()

        self._at(begin, go_down)
