"""The server process and the worker processes of a recording.

Visits queue at the server and are served one at a time. Each visit is a call that waits in a thread of its own; one
more thread serves. It writes an event to the log before it answers, and hands a checkpoint to another thread every so
many commits.
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

#: How much longer than at its last writing a recording is when its trace is written again: all of it each time.
_GROWN = 1.2
#: Calls from which the offset between two machines' clocks is found: the quickest counts.
_CLOCK_CALLS = 10


class ServerVisit(NamedTuple):
    """A visit at the server, or something else to be done there in turn; the lowest worker is the first in order."""

    worker: int
    serve: Callable[["ServerVisit", float], None]  #: called at the end of the service, with the time when it began (s)
    arrive: float  #: when it arrived (s)
    answer: Future[Any]  #: what the visit goes on with; None means that there is nothing more to do

    def __lt__(self, other: Any) -> bool:
        return self.worker < other.worker


class Update(NamedTuple):
    """What a worker brings: the job, when it began and was done on the server's clock (s), and what was computed."""

    job: int
    start_time: float
    send_time: float
    update: Any
    loss: float
    learner: Any


class Server:
    """The parameter server of a recording, an object that several threads call.

    If the folder holds a recording already, it goes on from that; ``every``: commits between two checkpoints, of which
    it keeps the last, or all.
    """

    def __init__(self, method: Any, problem: Any, header: Header, folder: str, every: int = 50, keep: bool = False):
        self._header, self._folder, self._processes = header, Path(folder), header.processes
        self._every, self._keep = every, keep
        workers = header.processes.workers
        self._computing = Computing(method, problem, header)
        self._parameters = Parameters(method, header.processes, self._computing)
        self._log = Log(self._folder)  # before it is read: nobody else may write in between
        try:
            events, size = read_log(self._folder)
            self._log.file.truncate(size)  # what comes after was cut off
            self._ledger = self._go_on_from(events)
        except BaseException:
            self._log.file.close()
            raise
        self._events = len(events)
        self._busy = delays([header.processes.service] * workers, header.seed, "service")
        for event in events:
            if event["event"] in ("commit", "read"):
                self._busy(event["worker"])  # the named stream goes on, too
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

    def _go_on_from(self, events: list[Event]) -> Ledger:
        """Bring the arrays from the last checkpoint to the end of the log: compute again what came after it."""
        parameters, done = self._parameters, 0
        checkpoint = usable_checkpoint(self._folder / CHECKPOINT, len(events))
        if checkpoint is not None:
            parameters.state, done = load_state(checkpoint, parameters.state)
        ledger = Ledger(self._header, events[:done])
        for event in events[done:]:
            worker: Any = event.get("worker")
            if event["event"] == "commit":
                job = parameters.job(worker, ledger.accounts[worker])
                result = self._computing.run(worker, job)
                parameters.commit(event, job.start, result)
            elif event["event"] == "read":
                (parameters.read if ledger.accounts[worker].read is None else parameters.pull)(worker)
            ledger.take(event)
        for stop, path in states_in(self._folder).items():
            if stop > ledger.version:  # of a log that was longer
                path.unlink()
        return ledger

    def commits(self) -> int:
        """Return how many commits were made so far."""
        return self._ledger.version

    def warm_up(self) -> None:
        """Compile what the server runs, on a copy of its state."""
        state, parameters = self._parameters.state, self._parameters
        if self._open:
            row = self._ledger.commit_event(0, 0.0, 0.0, 0.0, 0.0, 0.0)
            job = parameters.job(0, self._ledger.accounts[0])
            parameters.commit(row, job.start, LocalResult(job.start, 0.0, job.learner))
            parameters.state = state

    def start(self) -> None:
        """Begin to serve: now is zero on the clock, or when it stopped if the recording goes on."""
        self._zero = time.monotonic() - self._ledger.time
        if self._events:
            self._enter({"event": "resumed", "time": self._ledger.time})
        self._thread.start()

    def clock(self) -> float:
        """Return the time on the server's clock (s)."""
        return time.monotonic() - self._zero

    def zero(self) -> float:
        """Return where the server's clock begins on the monotonic one of its machine (s)."""
        return self._zero

    def wait(self) -> str:
        """Wait until all commits are made; return what went wrong, if something did."""
        return self._finished.result()

    def begin(self, worker: int) -> Computation | None:
        """Return what a worker is to compute first; None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._begin(call), urgent=True)

    def pull(self, worker: int, job: int) -> Any:
        """Visit to read what the message of a job is formed with."""
        return self._visit(worker, lambda call, serve_time: self._pull(call, serve_time, job))

    def commit(self, worker: int, update: Update) -> Computation | None:
        """Visit to commit; return what to compute next, None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._commit(call, serve_time, update))

    def lost(self, worker: int, what: str) -> None:
        """Enter that a worker's process is gone; what it has waiting here goes with it."""
        self._visit(worker, lambda call, serve_time: self._lose(call, what), urgent=True)

    def _visit(self, worker: int, serve: Callable[[ServerVisit, float], None], urgent: bool = False) -> Any:
        with self._changed:
            if not self._open:
                return None
            call = ServerVisit(worker, serve, self.clock(), Future())
            (self._urgent if urgent else self._waiting).append(call)
            self._changed.notify()
        return call.answer.result()

    def _serve_all(self) -> None:
        """Serve until all commits are made, write the last checkpoint and the trace, and let all go."""
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
                self._enter({"event": "ended", "waiting": [(call.worker, call.arrive) for call in waiting]})
                self._checkpoint().result()
                if self._traced < self._events:
                    self._write_trace(self._events)
            self._writer.shutdown()
        except Exception as error:  # a disk that is full, say
            trouble = trouble or f"{type(error).__name__}: {error}"
        self._finished.set_result(trouble)

    def _begin(self, call: ServerVisit) -> None:
        """Let a worker go on with what it has read, or queue to read."""
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
            call.answer.set_result(None)  # of a process that was given up
            return
        start = self._parameters.job(worker, account).start
        row = ledger.commit_event(worker, update.start_time, update.send_time, call.arrive, serve_time, self.clock())
        recorded = self._parameters.commit(row, start, LocalResult(update.update, update.loss, update.learner))
        row["commit_time"] = self.clock()
        if not self._processes.pulls:
            row["push_time"] = row["commit_time"]
        self._enter({**row, "loss": float(update.loss), **recorded})
        if ledger.version % self._every == 0:
            self._checkpoint()
        if self._processes.protocol == "write_then_read":
            self._queue_to_read(call, ledger.time)
        else:
            call.answer.set_result(self._parameters.job(worker, account))

    def _read(self, call: ServerVisit, serve_time: float) -> None:
        self._enter(self._ledger.read_event(call.worker, call.arrive, serve_time, self.clock()))
        self._parameters.read(call.worker)
        call.answer.set_result(self._parameters.job(call.worker, self._ledger.accounts[call.worker]))

    def _pull(self, call: ServerVisit, serve_time: float, job: int) -> None:
        account = self._ledger.accounts[call.worker]
        if account.lost or account.job != job:
            call.answer.set_result(None)  # of a process that was given up
            return
        self._enter(self._ledger.read_event(call.worker, call.arrive, serve_time, self.clock()))
        call.answer.set_result(self._parameters.pull(call.worker))

    def _lose(self, call: ServerVisit, what: str) -> None:
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            for one in waiting:
                if one.worker == call.worker:
                    one.answer.set_result(None)  # nobody hears it, but its thread is free again
                else:
                    self._waiting.append(one)
        self._enter(self._ledger.lost_event(call.worker, self.clock(), what))
        call.answer.set_result(None)

    def _enter(self, event: Event) -> None:
        """Write an event to the log, then to the ledger: nobody hears of what is not written."""
        self._log.append(event)
        self._ledger.take(event)
        self._events += 1

    def _checkpoint(self) -> Any:
        """Have a checkpoint written; raise what went wrong with those before."""
        for written in [write for write in self._writes if write.done()]:
            self._writes.remove(written)
            written.result()
        state, events, version = self._parameters.state, self._events, self._ledger.version
        self._writes.append(self._writer.submit(self._write, state, events, version))
        return self._writes[-1]

    def _write(self, state: Any, events: int, version: int) -> None:
        """Write a checkpoint, and now and then the trace so far, in a thread of its own."""
        os.fsync(self._log.file.fileno())
        save_state(self._folder / CHECKPOINT, state, events)
        if self._keep:
            save_state(self._folder / STATES / f"{version:08}.npz", state, events)
        if events >= _GROWN * self._traced:
            self._write_trace(events)

    def _write_trace(self, events: int) -> None:
        trace = Ledger(self._header, read_log(self._folder)[0][:events]).trace()
        write_trace(trace, self._folder / TRACE)
        self._traced = events


class RealWorker:
    """A worker of a recording: an object whose `run` has a thread."""

    def __init__(self, index: int, method: Any, problem: Any, header: Header):
        self._index, self._processes = index, header.processes
        self._computing = Computing(method, problem, header)
        self._delay = delays(header.processes.delay_laws, header.seed, "delay", header.processes.window)

    def warm_up(self) -> None:
        """Compile what the worker runs."""
        self._computing.run(self._index, self._computing.first_job())

    def run(self, server: Any, same_clock: bool) -> None:
        """Compute and visit a `Server` until it has nothing more to do; ``same_clock``: it is on this machine."""
        zero = clock_zero(server, same_clock)
        job = server.begin(self._index)
        for _ in range(0 if job is None else job.job):
            self._delay(self._index)  # delays belong to jobs, also if another process computed those before
        while job is not None:
            start_time = time.monotonic() - zero
            time.sleep(self._delay(self._index))
            result = self._computing.run(self._index, job)
            send_time = time.monotonic() - zero
            if self._processes.pulls and server.pull(self._index, job.job) is None:
                return
            update = Update(job.job, start_time, send_time, result.update, float(result.loss), result.learner)
            job = server.commit(self._index, update)


def clock_zero(there: Any, same_clock: bool) -> float:
    """Return where another process' clock begins on the monotonic one of this machine (s).

    ``there`` has its functions ``zero`` and ``clock``; ``same_clock``: it is on this machine.
    """
    if same_clock:
        return there.zero()
    calls = []
    for _ in range(_CLOCK_CALLS):
        before, time_there, after = time.monotonic(), there.clock(), time.monotonic()
        calls.append((after - before, (before + after) / 2 - time_there))
    return min(calls)[1]


class KeyedActor:
    """An actor of Ray's that serves only callers with its key: whom the recording started."""

    def __init__(self, key: str, served: Any):
        self._key, self._served = key, served

    def call(self, key: str, name: str, *arguments: Any) -> Any:
        """Call a function of what is served; raise PermissionError if the key is another one."""
        if not hmac.compare_digest(key, self._key):
            raise PermissionError(f"{name}: of a process that this recording did not start")
        return getattr(self._served, name)(*arguments)


class ServerActor(KeyedActor):
    """A `Server` as an actor of Ray's."""

    def __init__(self, content: bytes, header: Header, key: str, *options: Any):
        method, problem = pickle.loads(content)
        super().__init__(key, Server(method, problem, header, *options))


class WorkerActor(RealWorker):
    """A `RealWorker` as an actor of Ray's."""

    def __init__(self, content: bytes, index: int, header: Header):
        method, problem = pickle.loads(content)
        super().__init__(index, method, problem, header)

    def visit(self, server: Any, key: str, node: str, timeout: float) -> None:
        """Compute and visit until the server, an actor on this node of the cluster, has nothing more to do."""
        ray = require_ray()

        class Remote:
            """The server: its functions are calls that wait for the answer."""

            def __getattr__(self, name: str) -> Any:
                return functools.partial(self._call, name)

            def _call(self, *arguments: Any) -> Any:
                """Wait as long as it takes (a visit may starve), if only the server answers others meanwhile."""
                answer = server.call.remote(key, *arguments)
                while True:
                    try:
                        return ray.get(answer, timeout=timeout)
                    except ray.exceptions.GetTimeoutError:
                        ray.get(server.call.remote(key, "commits"), timeout=timeout)

        self.run(Remote(), ray.get_runtime_context().get_node_id() == node)
