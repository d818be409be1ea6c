"""The server process: visits queue, and are served one at a time by the functions that a replay uses.

Each visit is a call that waits in a thread of its own; one more thread serves. It writes an event to the log before it
answers, and hands a checkpoint to another thread every so many commits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from asyncsim.real.book import Book
from asyncsim.real.computing import Computing, Job
from asyncsim.real.folder import CHECKPOINT, STATES, Header, write_trace
from asyncsim.real.log import Event, Log, read_log
from asyncsim.real.parameters import Parameters, load_state, save_state, usable_checkpoint
from asyncsim.simulation.delays import delays
from asyncsim.simulation.station import waiting_room

#: How much longer than at its last writing a recording is when its trace is written again: all of it each time.
_GROWN = 1.2


class Answer:
    """What a visit waits for."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._value: Any = None

    def give(self, value: Any) -> None:
        """Let the visit go on with this; None means that there is nothing more to do."""
        self._value = value
        self._given.set()

    def wait(self) -> Any:
        """Return what was given."""
        self._given.wait()
        return self._value


class Call(NamedTuple):
    """A visit at the server, or something else to be done there in turn; the lowest worker is the first in order.

    Attributes
    ----------
    worker : int
    serve : function
        From when it arrived and when its service began to what is done at the end of the service.
    arrive : float
        When it arrived (s).
    answer : Answer
    """

    worker: int
    serve: Callable[["Call", float], None]
    arrive: float
    answer: Answer

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
    """The parameter server of a recording: an actor of Ray's, or any object that several threads call.

    Parameters
    ----------
    method, problem : Method, Problem
    header : Header
    folder : str
        Of the recording. If it holds one already, the server goes on from it.
    checkpoint_every : int
        Commits between two checkpoints.
    keep_states : bool
        Keep all checkpoints, not only the last.
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
        self._every, self._keep = checkpoint_every, keep_states
        workers = header.processes.workers
        self._computing = Computing(method, problem, workers, header.processes.window, header.seed, header.precision)
        self._parameters = Parameters(method, header.processes, self._computing)
        self._log = Log(self._folder)  # before it is read: nobody else may write in between
        events, size = read_log(self._folder)
        self._log.cut(size)
        try:
            self._book = self._go_on_from(events)
        except BaseException:
            self._log.close()
            raise
        self._events = len(events)
        self._busy = delays([header.processes.service] * workers, header.seed, "service")
        for event in events:
            if event["event"] in ("commit", "read"):
                self._busy(event["worker"])  # the named stream goes on, too
        self._waiting: Any = waiting_room(header.processes.discipline, header.seed)
        self._urgent: deque[Call] = deque()
        self._changed = threading.Condition()
        self._open = self._book.version < header.commits
        self._finished = Answer()
        self._writer = ThreadPoolExecutor(1)
        self._traced = 0
        self._writes: list[Future[None]] = []
        self._zero = 0.0
        self._thread = threading.Thread(target=self._serve_all, daemon=True)

    def commits(self) -> int:
        """Return how many commits were made so far."""
        return self._book.version

    def warm_up(self) -> None:
        """Compile what the server runs, on a copy of its state."""
        state, parameters = self._parameters.state, self._parameters
        if self._book.version >= self._header.commits:
            return
        row = self._book.commit_event(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        job = parameters.job(0, self._book.accounts[0])
        parameters.commit(row, job.start, job.start, job.learner)
        parameters.state = state

    def start(self) -> None:
        """Begin to serve: now is zero on the clock, or when it stopped if the recording goes on."""
        self._zero = time.monotonic() - self._book.time
        if self._events:
            self._enter({"event": "resumed", "time": self._book.time})
        self._thread.start()

    def clock(self) -> float:
        """Return the time on the server's clock (s)."""
        return time.monotonic() - self._zero

    def zero(self) -> float:
        """Return where the server's clock begins on the monotonic one of its machine (s)."""
        return self._zero

    def wait(self) -> str:
        """Wait until all commits are made; return what went wrong, if something did."""
        return self._finished.wait()

    def begin(self, worker: int) -> Job | None:
        """Return what a worker is to compute first; None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._begin(call), urgent=True)

    def pull(self, worker: int, job: int) -> Any:
        """Visit to read what the message of a job is formed with."""
        return self._visit(worker, lambda call, serve_time: self._pull(call, serve_time, job))

    def commit(self, worker: int, update: Update) -> Job | None:
        """Visit to commit; return what to compute next, None if there is nothing to do."""
        return self._visit(worker, lambda call, serve_time: self._commit(call, serve_time, update))

    def lost(self, worker: int, what: str) -> None:
        """Enter that a worker's process is gone; what it has waiting here goes with it."""
        self._visit(worker, lambda call, serve_time: self._lose(call, what), urgent=True)

    def _visit(self, worker: int, serve: Callable[[Call, float], None], urgent: bool = False) -> Any:
        with self._changed:
            if not self._open:
                return None
            call = Call(worker, serve, self.clock(), Answer())
            (self._urgent if urgent else self._waiting).append(call)
            self._changed.notify()
        return call.answer.wait()

    def _serve_all(self) -> None:
        """Serve until all commits are made; the thread's work."""
        trouble = ""
        while not trouble and self._book.version < self._header.commits:
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
                call.answer.give(None)
        try:
            self._end(trouble)
        except Exception as error:  # a disk that is full, say
            trouble = trouble or f"{type(error).__name__}: {error}"
        self._finished.give(trouble)

    def _end(self, trouble: str) -> None:
        """Write the last checkpoint and the trace, and let all go."""
        with self._changed:
            self._open = False
            waiting = list(self._waiting)
            for call in [*waiting, *self._urgent]:
                call.answer.give(None)
        if not trouble:
            self._enter({"event": "ended", "waiting": [(call.worker, call.arrive) for call in waiting]})
            self._checkpoint().result()
            if self._traced < self._events:
                self._write_trace(self._events)
        self._writer.shutdown()

    def _begin(self, call: Call) -> None:
        """Let a worker go on with what it has read, or queue to read."""
        account = self._book.accounts[call.worker]
        if account.lost:
            self._enter({"event": "restarted", "worker": call.worker, "time": self.clock()})
        if account.read is None:
            self._queue(call._replace(serve=self._read, arrive=self.clock()))
        else:
            call.answer.give(self._parameters.job(call.worker, account))

    def _queue(self, call: Call) -> None:
        with self._changed:
            self._waiting.append(call)

    def _commit(self, call: Call, serve_time: float, update: Update) -> None:
        worker, book = call.worker, self._book
        account = book.accounts[worker]
        if account.lost or account.job != update.job:
            call.answer.give(None)  # of a process that was given up
            return
        start = self._parameters.job(worker, account).start
        row = book.commit_event(worker, update.start_time, update.send_time, call.arrive, serve_time, self.clock())
        recorded = self._parameters.commit(row, update.update, start, update.learner)
        row["commit_time"] = self.clock()
        if not self._processes.pulls:
            row["form_time"] = row["commit_time"]
        self._enter({**row, "loss": float(update.loss), **recorded})
        if book.version % self._every == 0:
            self._checkpoint()
        if self._processes.protocol == "write_then_read":
            self._queue(call._replace(serve=self._read, arrive=book.time))
        else:
            call.answer.give(self._parameters.job(worker, account))

    def _read(self, call: Call, serve_time: float) -> None:
        self._enter(self._book.read_event(call.worker, call.arrive, serve_time, self.clock()))
        self._parameters.read(call.worker)
        call.answer.give(self._parameters.job(call.worker, self._book.accounts[call.worker]))

    def _pull(self, call: Call, serve_time: float, job: int) -> None:
        account = self._book.accounts[call.worker]
        if account.lost or account.job != job:
            call.answer.give(None)  # of a process that was given up
            return
        self._enter(self._book.read_event(call.worker, call.arrive, serve_time, self.clock()))
        call.answer.give(self._parameters.pull(call.worker))

    def _lose(self, call: Call, what: str) -> None:
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            for one in waiting:
                if one.worker == call.worker:
                    one.answer.give(None)  # nobody hears it, but its thread is free again
                else:
                    self._waiting.append(one)
        self._enter(self._book.lost_event(call.worker, self.clock(), what))
        call.answer.give(None)

    def _enter(self, event: Event) -> None:
        """Write an event to the log and the books, in this order: nobody hears of what is not written."""
        self._log.append(event)
        self._book.take(event)
        self._events += 1

    def _checkpoint(self) -> Any:
        """Have a checkpoint written; raise what went wrong with those before."""
        for written in [write for write in self._writes if write.done()]:
            self._writes.remove(written)
            written.result()
        self._writes.append(self._writer.submit(self._write, self._parameters.state, self._events, self._book.version))
        return self._writes[-1]

    def _write(self, state: Any, events: int, version: int) -> None:
        """Write a checkpoint, and now and then the trace so far, in a thread of its own."""
        self._log.to_disk()
        save_state(self._folder / CHECKPOINT, state, events)
        if self._keep:
            save_state(self._folder / STATES / f"{version:08}.npz", state, events)
        if events >= _GROWN * self._traced:
            self._write_trace(events)

    def _write_trace(self, events: int) -> None:
        book = Book(self._processes, self._header.replies, read_log(self._folder)[0][:events])
        write_trace(self._folder, book.trace(self._header.seed))
        self._traced = events

    def _go_on_from(self, events: list[Event]) -> Book:
        """Bring the arrays from the last checkpoint to the end of the log: compute again what came after it."""
        done = 0
        checkpoint = usable_checkpoint(self._folder / CHECKPOINT, len(events))
        if checkpoint is not None:
            self._parameters.state, done = load_state(checkpoint, self._parameters.state)
        book = Book(self._processes, self._header.replies, events[:done])
        for event in events[done:]:
            self._apply(book, event)
            book.take(event)
        for path in (self._folder / STATES).glob("[0-9]*.npz"):
            if int(path.stem) > book.version:  # of a log that was longer
                path.unlink()
        return book

    def _apply(self, book: Book, event: Event) -> None:
        """Do to the arrays what an event did."""
        if event["event"] == "commit":
            worker = event["worker"]
            job = self._parameters.job(worker, book.accounts[worker])
            result = self._computing.run(worker, job)
            self._parameters.commit(event, result.update, job.start, result.learner)
        elif event["event"] == "read":
            pulls = book.accounts[event["worker"]].read is not None
            (self._parameters.pull if pulls else self._parameters.read)(event["worker"])
