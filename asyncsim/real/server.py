"""The server process and the worker processes of a recording.

The functions of the server are coroutines: a visit waits for its turn, takes the time of the
service, acts, and waits for the policy's answer. So the event loop of the process is the queue, and
the gate of a simulated server decides. The log has the times that `asyncsim.recorded` turns into a
trace; it counts jobs, versions and staleness.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncsim.real.arrays import Computation, Computing, Parameters, Task, pulls
from asyncsim.replays.local import LocalResult
from asyncsim.simulation.delays import delays
from asyncsim.simulation.gates import gate_of
from asyncsim.simulation.station import waiting_room
from asyncsim.traces.columns import APPLIED, DISCARDED, OUTCOMES

Times = dict[str, float]
#: Calls for the offset between two machines' clocks: the fastest counts.
_CLOCK_CALLS = 10


@dataclass(eq=False)
class Turn:
    """A visit that waits at the server, for its turn and then for the answer; ordered by worker."""

    index: int  #: of its worker
    times: Times  #: of its arrival and of the begin of its service
    served: asyncio.Future[bool]  #: False: the recording has ended
    answered: asyncio.Future[None]

    def __lt__(self, other: Any) -> bool:
        return self.index < other.index


class ServerLog(NamedTuple):
    """The log of a server; the first three are tables of `asyncsim.recorded`."""

    visits: list[dict[str, Any]]
    reads: list[dict[str, Any]]
    present: list[dict[str, Any]]
    faults: list[dict[str, Any]]
    central: dict[int, np.ndarray]  #: the central variable after some numbers of commits


class Account:
    """The server's account of a worker; its reads are rows of the log."""

    def __init__(self) -> None:
        self.life = 0  # processes so far: calls of an earlier one have no effect
        self.job = self.steps = 0
        self.read: dict[str, Any] | None = {"read_version": 0, "read_time": 0.0}  # of its job
        self.pulled: dict[str, Any] | None = None  # of its next job, before the present commit


class Server:
    """The parameter server of a recording; workers call its coroutines.

    ``keep_every``: commits between two copies of the central variable.
    """

    def __init__(self, task: Task, keep_every: int):
        self._task, self._keep_every, cluster = task, keep_every, task.cluster
        self.parameters = Parameters(task, Computing(task))
        self.parameters.warm_up()
        self._service = delays([cluster.service] * cluster.workers, task.seed, "service")
        self._waiting: Any = waiting_room(cluster.discipline, task.seed)
        self._gate: Any = gate_of(cluster.policy, cluster.workers, range(cluster.workers))
        self._accounts = [Account() for _ in range(cluster.workers)]
        self._log = ServerLog([], [], [], [], {})
        self._unanswered: dict[int, Turn] = {}
        self._acting = asyncio.Lock()
        self._is_busy, self._zero, self._commits, self._place = False, time.monotonic(), 0, 0

    async def start(self) -> None:
        """Set the clock to zero."""
        self._zero = time.monotonic()

    async def clock(self) -> float:
        """Return the time since the start (s)."""
        return self._now()

    async def progress(self) -> int:
        """Return the number of accepted commits so far."""
        return self._commits

    async def result(self) -> tuple[ServerLog, Any, Any]:
        """Return the log, the central variable and the workers' states."""
        return self._log, np.asarray(self.parameters.state.central), self.parameters.rows

    async def begin(self, worker: int) -> tuple[int, Computation | None]:
        """Return the number of a worker's process and its job, after a death from a new read."""
        account = self._accounts[worker]
        account.life += 1
        if account.read is None:
            self._log_fault(worker, "restarted")
            await self._visit(worker, account.life, self._read)
        return account.life, self._job(worker)

    async def pull(self, worker: int, life: int) -> None:
        """Read the parameters for the next message and for the next job."""
        await self._visit(worker, life, self._pull)

    async def commit(
        self, worker: int, life: int, job: Computation, sent: Times, result: LocalResult
    ) -> Computation | None:
        """Commit an update; return the next job, None if there is none.

        ``sent``: the begin and the end of the computation on the server's clock (s).
        """
        account = self._accounts[worker]

        async def act(turn: Turn) -> None:
            await self._take(turn, job, sent, result)

        turn = await self._visit(worker, life, act)
        if worker in self._unanswered:
            await turn.answered
        if life == account.life and account.read is None:
            await self._visit(worker, life, self._read)
        return self._job(worker) if life == account.life else None

    async def lose(self, worker: int) -> None:
        """Record the death of a worker's process, and the loss of its computation."""
        async with self._acting:
            account, now = self._accounts[worker], self._now()
            account.life += 1
            self._log_fault(worker, "process died")
            if account.pulled is not None:
                self._log.reads.remove(account.pulled)  # no job will be computed from it
            if account.read is not None:
                names = ("send_time", "arrive_time", "serve_time", "commit_time")
                row = dict.fromkeys(names, now) | {"start_time": account.read["read_time"]}
                self._log.visits.append({"worker": worker, **row, "outcome": "cancelled"})
                account.job += 1
            account.read = account.pulled = self.parameters.pulled[worker] = None

    @property
    def _is_over(self) -> bool:
        return self._commits >= self._task.commits

    def _now(self) -> float:
        return time.monotonic() - self._zero

    def _job(self, worker: int) -> Computation | None:
        account = self._accounts[worker]
        return None if self._is_over else self.parameters.job(worker, account.job, account.steps)

    async def _visit(self, worker: int, life: int, act: Callable[[Turn], Awaitable[None]]) -> Turn:
        """Wait for the turn and for the service, and act, unless worker or recording have ended."""
        loop = asyncio.get_running_loop()
        turn = Turn(
            worker, {"arrive_time": self._now()}, loop.create_future(), loop.create_future()
        )
        self._waiting.append(turn)
        if not self._is_busy:
            self._serve_next()
        if await turn.served:
            turn.times["serve_time"] = self._now()
            await asyncio.sleep(self._service(worker))
            async with self._acting:
                if life == self._accounts[worker].life:
                    await act(turn)
            self._serve_next()
        return turn

    def _serve_next(self) -> None:
        """Begin the next service; after the last commit, send all waiting workers away."""
        self._is_busy = bool(self._waiting) and not self._is_over
        if self._is_busy:
            self._waiting.popleft().served.set_result(True)
        while self._is_over and self._waiting:
            turn = self._waiting.popleft()
            if turn.times["arrive_time"] <= self._log.visits[-1]["commit_time"]:
                self._log.present.append({"worker": turn.index, **turn.times})
            turn.served.set_result(False)
        while self._is_over and self._unanswered:
            self._unanswered.popitem()[1].answered.set_result(None)

    async def _take(self, turn: Turn, job: Computation, sent: Times, result: LocalResult) -> None:
        """Apply, buffer or discard a message, and answer the workers that continue."""
        worker, parameters, gate = turn.index, self.parameters, self._gate
        account, before, visible = self._accounts[worker], gate.version, parameters.visible
        read, pulled = account.read, account.pulled
        assert read is not None
        outcome = gate.take(worker, read["read_version"])
        row: dict[str, Any] = {"worker": worker, "outcome": OUTCOMES[outcome], **turn.times}
        if outcome != DISCARDED:
            counts = {"staleness": before - read["read_version"], "worker": worker}
            counts |= {"worker_step": account.steps, "commit": self._commits, "place": self._place}
            counts["completes"] = outcome == APPLIED
            # In a thread, so that visits that arrive meanwhile get the time of their arrival.
            row["numbers"] = await asyncio.to_thread(
                parameters.commit, counts, self._now(), job.start, result
            )
            self._commits, account.steps = self._commits + 1, account.steps + 1
            self._place = 0 if outcome == APPLIED else self._place + 1
            if self._commits % self._keep_every == 0 or self._is_over:
                self._log.central[self._commits] = np.asarray(parameters.state.central)
        # Clocks of two machines agree up to the time of a message.
        until = turn.times["arrive_time"] if pulled is None else pulled["read_time"]
        row["start_time"] = min(max(sent["start_time"], read["read_time"]), until)
        row["send_time"] = min(max(sent["send_time"], row["start_time"]), until)
        row["commit_time"] = self._now()
        self._log.visits.append(row)
        account.job, account.read, account.pulled = account.job + 1, pulled, None
        if pulled is not None:
            parameters.read[worker], parameters.pulled[worker] = parameters.pulled[worker], None
        elif self._task.cluster.protocol == "read_then_write":
            account.read = self._log_read(turn, before, row["commit_time"])
            parameters.set_read(worker, visible)
        self._unanswered[worker] = turn
        for released in gate.released(turn, outcome):
            if self._task.cluster.protocol == "exchange":
                version, at = gate.version, row["commit_time"]
                self._accounts[released.index].read = self._log_read(released, version, at)
                parameters.set_read(released.index, parameters.visible)
            self._unanswered.pop(released.index).answered.set_result(None)

    async def _read(self, turn: Turn) -> None:
        """Let a worker's next job start from the newest version."""
        self.parameters.set_read(turn.index, self.parameters.visible)
        self._accounts[turn.index].read = self._log_read(turn, self._gate.version, self._now())

    async def _pull(self, turn: Turn) -> None:
        self.parameters.pulled[turn.index] = self.parameters.visible
        self._accounts[turn.index].pulled = self._log_read(turn, self._gate.version, self._now())

    def _log_read(self, turn: Turn, version: int, at: float) -> dict[str, Any]:
        row = {f"read_{name}": value for name, value in turn.times.items()}
        row |= {"worker": turn.index, "read_time": at, "read_version": version}
        self._log.reads.append(row)
        return row

    def _log_fault(self, worker: int, event: str) -> None:
        account = self._accounts[worker]
        row = {"time": self._now(), "worker": worker, "what": event, "job": account.job}
        self._log.faults.append(row)


class RealWorker:
    """A worker of a recording around a server."""

    def __init__(self, index: int, task: Task):
        self._index, self._pulls, cluster = index, pulls(task.cluster), task.cluster
        self._computing = Computing(task)
        self._computing.run(index, self._computing.first_job(index))  # compiles
        self._sleep = delays(cluster.compute_laws, task.seed, "delay", cluster.windows[0])

    async def ready(self) -> None:
        """Return once the worker can begin."""

    async def run(self, server: Any) -> None:
        """Compute and visit a `Server` until no job is left."""
        zero, index = await clock_zero(server), self._index
        life, job = await server.begin(index)
        for _ in range(0 if job is None else job.number):
            self._sleep(index)  # delays belong to jobs, even to those of an earlier process
        while job is not None:
            start_time = time.monotonic() - zero
            result = await asyncio.to_thread(self._compute, job)
            sent = {"start_time": start_time, "send_time": time.monotonic() - zero}
            if self._pulls:
                await server.pull(index, life)
            job = await server.commit(index, life, job, sent, result)

    def _compute(self, job: Computation) -> LocalResult:
        time.sleep(self._sleep(self._index))
        return self._computing.run(self._index, job)


async def clock_zero(process: Any) -> float:
    """Return the start of another process' clock on the monotonic clock of this machine (s)."""
    calls = []
    for _ in range(_CLOCK_CALLS):
        before, its_time, after = time.monotonic(), await process.clock(), time.monotonic()
        calls.append((after - before, (before + after) / 2 - its_time))
    return min(calls)[1]
