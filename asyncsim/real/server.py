"""The server process and the worker processes of a recording.

Visits queue at the server and are served one at a time. Each visit is a call that waits in its own
thread; another thread serves. It writes an event to the log before it answers, and hands a
checkpoint to a third thread at regular numbers of commits.
"""

import functools
import hmac
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from asyncsim.real.computing import Computation, Computing, Parameters, load_state, save_state
from asyncsim.real.processes import require_ray
from asyncsim.real.recording import (
    CHECKPOINT,
    STATES,
    TRACE,
    Event,
    Header,
    Ledger,
    Log,
    read_log,
    states_in,
    usable_checkpoint,
)
from asyncsim.replays.local import LocalResult
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import waiting_room
from asyncsim.traces.archive import write_trace

#: Growth of a recording after which its trace is written again, each time as a whole.
_GROWN = 1.2
#: Calls for the offset between two machines' clocks: the fastest counts.
_CLOCK_CALLS = 10


class ServerVisit(NamedTuple):
    """A visit at the server, or another action there in turn; ordered by worker."""

    worker: int
    serve: Callable[["ServerVisit", float], None]  #: called after the service, with its start (s)
    arrive: float  #: time of arrival (s)
    answer: Future[Any]  #: the result of the visit; None if there is nothing more to do

    def __lt__(self, visit: Any) -> bool:
        return self.worker < visit.worker


class Update(NamedTuple):
    """A worker's result: the job, its start and end on the server's clock (s), and its values."""

    job: int
    start_time: float
    send_time: float
    update: Any
    loss: float
    learner: Any


class Server:
    """The parameter server of a recording, an object that several threads call.

    It resumes a recording that the folder already holds. ``checkpoint_every``: commits between two
    checkpoints; it keeps the last, or all (``keep_states``).
    """

    def __init__(
        self,
        method: Any,
        problem: Any,
        header: Header,
        folder: str,
        checkpoint_every: int = 50,
        keep_states: bool = False,
    ):
        self._header, self._folder, self._processes = header, Path(folder), header.processes
        self._checkpoint_every, self._keep_states = checkpoint_every, keep_states
        workers = header.processes.workers
        self._computing = Computing(method, problem, header)
        self._parameters = Parameters(header.processes, self._computing)
        self._log = Log(self._folder)  # locks before reading: no other process writes
        try:
            events, size = read_log(self._folder)
            self._log.file.truncate(size)  # drops an incomplete last line
            self._ledger = self._resume(events)
        except BaseException:
            self._log.file.close()
            raise
        self._events = len(events)
        self._busy = delays([header.processes.service] * workers, header.seed, "service")
        for event in events:
            if event["event"] in ("commit", "read"):
                self._busy(event["worker"])  # advances the named stream
        self._waiting: Any = waiting_room(header.processes.discipline, header.seed)
        self._urgent: deque[ServerVisit] = deque()
        self._changed = threading.Condition()
        self._open = self._ledger.version < header.commits
        self._finished: Future[str] = Future()
        self._writer = ThreadPoolExecutor(1)
        self._traced = 0
        self._writes: list[Future[None]] = []
        self._zero = 0.0
        self._thread = threading.Thread(target=self._serve_all, daemon=True)

    def _resume(self, events: list[Event]) -> Ledger:
        """Load the last checkpoint and recompute the events after it."""
        parameters, checkpointed = self._parameters, 0
        checkpoint = usable_checkpoint(self._folder / CHECKPOINT, len(events))
        if checkpoint is not None:
            parameters.state, checkpointed = load_state(checkpoint, parameters.state)
        ledger = Ledger(self._header, events[:checkpointed])
        for event in events[checkpointed:]:
            worker: Any = event.get("worker")
            if event["event"] == "commit":
                job = parameters.job(worker, ledger.accounts[worker])
                result = self._computing.run(worker, job)
                parameters.commit(event, job.start, result)
            elif event["event"] == "read":
                (parameters.read if ledger.accounts[worker].read is None else parameters.pull)(
                    worker
                )
            ledger.take(event)
        for stop, path in states_in(self._folder).items():
            if stop > ledger.version:  # from a longer log
                path.unlink()
        return ledger

    def commits(self) -> int:
        """Return the number of commits so far."""
        return self._ledger.version

    def warm_up(self) -> None:
        """Compile the server's programs, on a copy of its state."""
        state, parameters = self._parameters.state, self._parameters
        if self._open:
            row = self._ledger.commit_event(0, 0.0, 0.0, 0.0, 0.0, 0.0)
            job = parameters.job(0, self._ledger.accounts[0])
            parameters.commit(row, job.start, LocalResult(job.start, 0.0, job.learner))
            parameters.state = state

    def start(self) -> None:
        """Start serving, with the clock at zero or where a resumed recording stopped."""
        self._zero = time.monotonic() - self._ledger.time
        if self._events:
            self._enter({"event": "resumed", "time": self._ledger.time})
        self._thread.start()

    def clock(self) -> float:
        """Return the time on the server's clock (s)."""
        return time.monotonic() - self._zero

    def zero(self) -> float:
        """Return the start of the server's clock on its machine's monotonic clock (s)."""
        return self._zero

    def wait(self) -> str:
        """Wait until all commits are made; return the error text, empty for success."""
        return self._finished.result()

    def begin(self, worker: int) -> Computation | None:
        """Return a worker's first job; None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._begin(call), urgent=True)

    def pull(self, worker: int, job: int) -> Any:
        """Visit to read the parameters for the message of a job."""
        return self._visit(worker, lambda call, serve_time: self._pull(call, serve_time, job))

    def commit(self, worker: int, update: Update) -> Computation | None:
        """Visit to commit; return the next job, None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._commit(call, serve_time, update))

    def lost(self, worker: int, cause: str) -> None:
        """Record the loss of a worker's process; its waiting visits are dropped."""
        self._visit(worker, lambda call, serve_time: self._lose(call, cause), urgent=True)

    def _visit(
        self, worker: int, serve: Callable[[ServerVisit, float], None], urgent: bool = False
    ) -> Any:
        with self._changed:
            if not self._open:
                return None
            call = ServerVisit(worker, serve, self.clock(), Future())
            (self._urgent if urgent else self._waiting).append(call)
            self._changed.notify()
        return call.answer.result()

    def _serve_all(self) -> None:
        """Serve until all commits are made; then write the last files and release all."""
        trouble = ""
        while not trouble and self._ledger.version < self._header.commits:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._waiting)
                urgent = bool(self._urgent)
                call = (self._urgent if urgent else self._waiting).popleft()
            try:
                serve_time = self.clock()
                if not urgent:
                    time.sleep(self._busy(call.worker))
                call.serve(call, serve_time)
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
                if not call.answer.done():
                    call.answer.set_result(None)
        try:
            with self._changed:
                self._open = False
                waiting = list(self._waiting)
                for call in [*waiting, *self._urgent]:
                    call.answer.set_result(None)
            if not trouble:
                self._enter(
                    {"event": "ended", "waiting": [(call.worker, call.arrive) for call in waiting]}
                )
                self._checkpoint().result()
                if self._traced < self._events:
                    self._write_trace(self._events)
            self._writer.shutdown()
        except Exception as error:  # such as a full disk
            trouble = trouble or f"{type(error).__name__}: {error}"
        self._finished.set_result(trouble)

    def _begin(self, call: ServerVisit) -> None:
        """Answer with a job from the worker's last read, or queue the worker to read."""
        account = self._ledger.accounts[call.worker]
        if account.lost:
            self._enter({"event": "restarted", "worker": call.worker, "time": self.clock()})
        if account.read is None:
            self._queue_to_read(call, self.clock())
        else:
            call.answer.set_result(self._parameters.job(call.worker, account))

    def _queue_to_read(self, call: ServerVisit, arrive: float) -> None:
        with self._changed:
            self._waiting.append(call._replace(serve=self._read, arrive=arrive))

    def _commit(self, call: ServerVisit, serve_time: float, update: Update) -> None:
        worker, ledger = call.worker, self._ledger
        account = ledger.accounts[worker]
        if account.lost or account.job != update.job:
            call.answer.set_result(None)  # the process was given up
            return
        start = self._parameters.job(worker, account).start
        row = ledger.commit_event(
            worker, update.start_time, update.send_time, call.arrive, serve_time, self.clock()
        )
        recorded = self._parameters.commit(
            row, start, LocalResult(update.update, update.loss, update.learner)
        )
        row["commit_time"] = self.clock()
        if not self._processes.pulls:
            row["push_time"] = row["commit_time"]
        self._enter({**row, "loss": float(update.loss), **recorded})
        if ledger.version % self._checkpoint_every == 0:
            self._checkpoint()
        if self._processes.protocol == "write_then_read":
            self._queue_to_read(call, ledger.time)
        else:
            call.answer.set_result(self._parameters.job(worker, account))

    def _read(self, call: ServerVisit, serve_time: float) -> None:
        self._enter(self._ledger.read_event(call.worker, call.arrive, serve_time, self.clock()))
        self._parameters.read(call.worker)
        call.answer.set_result(
            self._parameters.job(call.worker, self._ledger.accounts[call.worker])
        )

    def _pull(self, call: ServerVisit, serve_time: float, job: int) -> None:
        account = self._ledger.accounts[call.worker]
        if account.lost or account.job != job:
            call.answer.set_result(None)  # the process was given up
            return
        self._enter(self._ledger.read_event(call.worker, call.arrive, serve_time, self.clock()))
        call.answer.set_result(self._parameters.pull(call.worker))

    def _lose(self, call: ServerVisit, cause: str) -> None:
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            for visit in waiting:
                if visit.worker == call.worker:
                    visit.answer.set_result(None)  # frees the thread
                else:
                    self._waiting.append(visit)
        self._enter(self._ledger.lost_event(call.worker, self.clock(), cause))
        call.answer.set_result(None)

    def _enter(self, event: Event) -> None:
        """Write an event to the log, then to the ledger: only logged events have effects."""
        self._log.append(event)
        self._ledger.take(event)
        self._events += 1

    def _checkpoint(self) -> Any:
        """Submit a checkpoint for writing; raise errors of earlier ones."""
        for write in [write for write in self._writes if write.done()]:
            self._writes.remove(write)
            write.result()
        state, events, version = self._parameters.state, self._events, self._ledger.version
        self._writes.append(self._writer.submit(self._write, state, events, version))
        return self._writes[-1]

    def _write(self, state: Any, events: int, version: int) -> None:
        """Write a checkpoint, and at intervals the trace so far; runs in its own thread."""
        os.fsync(self._log.file.fileno())
        save_state(self._folder / CHECKPOINT, state, events)
        if self._keep_states:
            save_state(self._folder / STATES / f"{version:08}.npz", state, events)
        if events >= _GROWN * self._traced:
            self._write_trace(events)

    def _write_trace(self, events: int) -> None:
        trace = Ledger(self._header, read_log(self._folder)[0][:events]).trace()
        write_trace(trace, self._folder / TRACE)
        self._traced = events


class RealWorker:
    """A worker of a recording: an object whose `run` occupies a thread."""

    def __init__(self, index: int, method: Any, problem: Any, header: Header):
        self._index, self._processes = index, header.processes
        self._computing = Computing(method, problem, header)
        self._delay = delays(
            header.processes.delay_laws, header.seed, "delay", header.processes.window
        )

    def warm_up(self) -> None:
        """Compile the worker's programs."""
        self._computing.run(self._index, self._computing.first_job())

    def run(self, server: Any, same_clock: bool) -> None:
        """Compute and visit a `Server` until no job is left; ``same_clock``: on one machine."""
        zero = clock_zero(server, same_clock)
        job = server.begin(self._index)
        for _ in range(0 if job is None else job.job):
            self._delay(self._index)  # delays belong to jobs, even to those of an earlier process
        while job is not None:
            start_time = time.monotonic() - zero
            time.sleep(self._delay(self._index))
            result = self._computing.run(self._index, job)
            send_time = time.monotonic() - zero
            if self._processes.pulls and server.pull(self._index, job.job) is None:
                return
            update = Update(
                job.job, start_time, send_time, result.update, float(result.loss), result.learner
            )
            job = server.commit(self._index, update)


def clock_zero(process: Any, same_clock: bool) -> float:
    """Return the start of another process' clock on the monotonic clock of this machine (s).

    ``process`` has functions ``zero`` and ``clock``; ``same_clock``: it is on this machine.
    """
    if same_clock:
        return process.zero()
    calls = []
    for _ in range(_CLOCK_CALLS):
        before, its_time, after = time.monotonic(), process.clock(), time.monotonic()
        calls.append((after - before, (before + after) / 2 - its_time))
    return min(calls)[1]


class KeyedActor:
    """A Ray actor that serves only callers with its key: processes of the same recording."""

    def __init__(self, key: str, served: Any):
        self._key, self._served = key, served

    def call(self, key: str, name: str, *arguments: Any) -> Any:
        """Call a function of the served object; raise PermissionError for another key."""
        if not hmac.compare_digest(key, self._key):
            raise PermissionError(f"{name}: of a process that this recording did not start")
        return getattr(self._served, name)(*arguments)


class ServerActor(KeyedActor):
    """A `Server` as a Ray actor."""

    def __init__(self, content: bytes, header: Header, key: str, *options: Any):
        method, problem = pickle.loads(content)
        super().__init__(key, Server(method, problem, header, *options))


class WorkerActor(RealWorker):
    """A `RealWorker` as a Ray actor."""

    def __init__(self, content: bytes, index: int, header: Header):
        method, problem = pickle.loads(content)
        super().__init__(index, method, problem, header)

    def visit(self, server: Any, key: str, node: str, timeout: float) -> None:
        """Compute and visit a server actor on this node until it has no job left."""
        ray = require_ray()

        class Remote:
            """The server: each function call waits for the answer."""

            def __getattr__(self, name: str) -> Any:
                return functools.partial(self._call, name)

            def _call(self, *arguments: Any) -> Any:
                """Wait as long as the server answers other calls: a visit may starve."""
                answer = server.call.remote(key, *arguments)
                while True:
                    try:
                        return ray.get(answer, timeout=timeout)
                    except ray.exceptions.GetTimeoutError:
                        ray.get(server.call.remote(key, "commits"), timeout=timeout)

        self.run(Remote(), ray.get_runtime_context().get_node_id() == node)
