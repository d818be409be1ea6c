"""The books of a recording: from its events to who may do what next, and to the rows of a trace.

Everything here follows from the events alone, so that a process that reads the log knows what the one that wrote it
did. The kinds of events:

``commit``
    A message was applied: the columns of its row of the trace, and what is recorded of a commit.
``read``
    A visit that only reads has been served; ``job`` is the one that will be computed from it.
``lost``
    A worker's process is gone. ``cancelled``: the row of the computation that went with it, None without one.
``restarted``, ``resumed``
    A worker, or the whole recording, goes on.
``ended``
    All commits are made; ``waiting`` are the worker and the arrival of each visit still at the server.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.real.log import Event
from asyncsim.real.processes import Processes
from asyncsim.traces.columns import COLUMNS, OUTCOMES, Source
from asyncsim.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

#: What is recorded of a commit besides its row of the trace; as of a replay.
RECORDED = ("loss", "update_norm", "central_energy", "proxy_energy")
_COUNTS = {name for name, unit in COLUMNS.items() if unit != "s"} - {"outcome"}
#: What happened to processes, as a table.
FAULTS = ("time", "worker", "what", "job")


class Read(NamedTuple):
    """A read of the central variable: its version, and when its visit came, was begun and ended (s)."""

    version: int = 0
    arrive: float = 0.0
    serve: float = 0.0
    time: float = 0.0


#: A worker's first: version 0, at time 0.
FIRST = Read()


@dataclass
class Account:
    """What is known of one worker.

    Attributes
    ----------
    job : int
        The computation that it is at, or will begin next.
    steps : int
        Its commits so far.
    read : Read or None
        What that computation started from; None if it has yet to read.
    pulled : Read or None
        What it has read for its next message, in a visit of its own.
    lost : bool
        Whether its process is gone.
    """

    job: int = 0
    steps: int = 0
    read: Read | None = FIRST
    pulled: Read | None = None
    lost: bool = False


class Book:
    """The accounts of all workers, and the rows so far.

    Attributes
    ----------
    accounts : list of Account
    version : int
        Commits so far.
    time : float
        Of the last event (s).
    rows : list of dict
        Of the trace, without ``commit``.
    waiting : list of (int, float)
        The worker and the arrival (s) of each visit at the server at the end.
    faults : list of dict
    """

    def __init__(self, processes: Processes, replies: bool, events: Iterable[Event] = ()):
        """``replies``: whether the method answers with something else than the central variable."""
        self.processes, self.replies = processes, replies
        self.accounts = [Account() for _ in range(processes.workers)]
        self.version, self.time = 0, 0.0
        self.rows: list[Event] = []
        self.waiting: list[tuple[int, float]] = []
        self.faults: list[Event] = []
        for event in events:
            self.take(event)

    def commit_event(self, worker: int, start: float, send: float, arrive: float, serve: float, commit: float) -> Event:
        """Return the row of the commit that a worker makes now."""
        account = self.accounts[worker]
        read, form = account.read or FIRST, Read(self.version, arrive, serve, commit)
        if account.pulled is not None:
            form = account.pulled
        # The clocks of two machines agree up to the time of a message.
        sent_until = arrive if account.pulled is None else account.pulled.arrive
        start = min(max(start, read.time), sent_until)
        return {
            "event": "commit",
            "worker": worker,
            "job": account.job,
            "local_steps": self.processes.window,
            "read_version": read.version,
            "read_arrive_time": read.arrive,
            "read_serve_time": read.serve,
            "read_time": read.time,
            "start_time": start,
            "send_time": min(max(send, start), sent_until),
            "form_version": form.version,
            "form_time": form.time,
            "arrive_time": arrive,
            "serve_time": serve,
            "commit_time": commit,
            "staleness": self.version - read.version,
            "version": self.version + 1,
            "outcome": "applied",
            "worker_step": account.steps,
        }

    def read_event(self, worker: int, arrive: float, serve: float, time: float) -> Event:
        """Return the event of a visit that only reads."""
        account = self.accounts[worker]
        job = account.job + (account.read is not None)
        return {
            "event": "read",
            "worker": worker,
            "job": job,
            "version": self.version,
            "arrive": arrive,
            "serve": serve,
            "time": time,
        }

    def lost_event(self, worker: int, time: float, what: str) -> Event:
        """Return the event of a worker whose process is gone; when its computation began is not known then."""
        account = self.accounts[worker]
        cancelled = None
        if account.read is not None:
            row = self.commit_event(worker, account.read.time, time, time, time, time)
            cancelled = {
                **row,
                "form_version": self.version,
                "form_time": time,
                "version": self.version,
                "outcome": "cancelled",
            }
        return {"event": "lost", "worker": worker, "time": time, "what": what, "cancelled": cancelled}

    def take(self, event: Event) -> None:
        """Enter an event."""
        getattr(self, f"_take_{event['event']}")(event)

    def _take_commit(self, event: Event) -> None:
        account = self.accounts[event["worker"]]
        account.job, account.steps = account.job + 1, account.steps + 1
        own = Read(self.version, *(event[name] for name in ("arrive_time", "serve_time", "commit_time")))
        if self.processes.protocol == "exchange":
            account.read = own._replace(version=self.version + 1)
        elif self.processes.protocol == "write_then_read":
            account.read = None
        else:
            account.read = account.pulled if self.processes.pulls else own
        account.pulled = None
        self.version, self.time = event["version"], event["commit_time"]
        self.rows.append(event)

    def _take_read(self, event: Event) -> None:
        account = self.accounts[event["worker"]]
        read = Read(*(event[name] for name in ("version", "arrive", "serve", "time")))
        if account.read is None:
            account.read = read
        else:
            account.pulled = read
        self.time = event["time"]

    def _take_lost(self, event: Event) -> None:
        account = self.accounts[event["worker"]]
        row = event["cancelled"]
        if row is not None:
            account.job += 1
            self.rows.append(row)
        # A reply cannot be given anew: such a worker goes on from the one that it had.
        account.read = account.read if self.replies else None
        account.pulled, account.lost = None, True
        self.time = event["time"]
        self._fault(event, event["what"], None if row is None else row["job"])

    def _take_restarted(self, event: Event) -> None:
        self.accounts[event["worker"]].lost = False
        self._fault(event, "restarted", self.accounts[event["worker"]].job)

    def _take_resumed(self, event: Event) -> None:
        for account in self.accounts:
            account.lost = False
        self._fault({"worker": None, **event}, "resumed", None)

    def _take_ended(self, event: Event) -> None:
        self.waiting = [(worker, arrive) for worker, arrive in event["waiting"]]

    def _fault(self, event: Event, what: str, job: int | None) -> None:
        self.time = event["time"]
        self.faults.append({"time": event["time"], "worker": event["worker"], "what": what, "job": job})

    def trace(self, seed: int) -> Trace:
        """Return the trace so far."""
        import pandas as pd

        columns: dict[str, Any] = {"commit": np.arange(len(self.rows))}
        for name in COLUMNS:
            if name not in ("commit", "outcome"):
                # Logs of before do not tell when messages set off.
                values = [row.get(name, np.nan) if name == "send_time" else row[name] for row in self.rows]
                columns[name] = np.array(values, np.int64 if name in _COUNTS else np.float64)
        columns["outcome"] = pd.Categorical([row["outcome"] for row in self.rows], OUTCOMES)
        processes = self.processes
        source = Source(
            processes.workers, processes.protocol, processes.window, processes.separate_reads, seed, cluster=None
        )
        present = pd.DataFrame(sorted(self.waiting), columns=["worker", "arrive_time"])
        present = present.astype({"worker": np.int64, "arrive_time": np.float64})
        return Trace(pd.DataFrame(columns)[list(COLUMNS)], source, self._open_reads(), present)

    def commits(self) -> "pd.DataFrame":
        """Return what is recorded of each commit, as `asyncsim.Run` has it."""
        import pandas as pd

        rows = [row for row in self.rows if row["outcome"] == "applied"]
        columns: dict[str, Any] = {"commit": np.arange(len(rows))}
        for name in ("commit_time", "worker", "worker_step", "staleness", *RECORDED):
            columns[name] = np.array([row[name] for row in rows], np.int64 if name.startswith("worker") else None)
        return pd.DataFrame(columns)

    def fault_table(self) -> "pd.DataFrame":
        """Return what happened to the processes: the time (s), the worker, what, and the job that was lost."""
        import pandas as pd

        return pd.DataFrame(self.faults, columns=list(FAULTS)).astype({"worker": "Int64", "job": "Int64"})

    def _open_reads(self) -> "pd.DataFrame":
        import pandas as pd

        rows = []
        for worker, account in enumerate(self.accounts):
            held = [read for read in (account.read, account.pulled) if read is not None]
            rows += [(worker, account.job + ahead, *read) for ahead, read in enumerate(held)]
        names = ["worker", "job", "read_version", "read_arrive_time", "read_serve_time", "read_time"]
        table = pd.DataFrame(rows, columns=names)
        return table.astype(dict.fromkeys(names[:3], np.int64) | dict.fromkeys(names[3:], np.float64))
