"""The files of a recording, and the ledger, which derives the state of all workers from its events.

``recording.json``
    The arguments of the recording.
``visits.jsonl``
    The log: one line per event, handed to the operating system before any process learns of the
    event, so that it survives the death of the process that wrote it. At each checkpoint it is
    flushed to the disk, against the loss of the machine. Each line has a checksum; an incomplete
    last line is no event.
``checkpoint.npz``
    All arrays after some of the events, replaced every ``checkpoint_every`` commits.
``states``
    The checkpoints, if all are kept.
``trace.parquet``
    The trace at the end, and before that at checkpoints by which it has grown by a fifth.

The kinds of events:

``commit``
    A message was applied: the columns of its row of the trace, and the recorded quantities of the
    commit.
``read``
    A visit that only reads was served; ``job`` is the job that will be computed from it.
``lost``
    A worker's process is gone. ``cancelled``: the row of its lost computation, None without one.
``restarted``, ``resumed``
    A worker, or the whole recording, continues.
``ended``
    All commits are made; ``waiting`` are the worker and the arrival of each visit still at the
    server.

Without a server the files are written at the end. The log has a ``commit`` for each gradient, the
row that its worker recorded for `asyncsim.recorded`, and ``ended`` with the messages ``in_flight``;
``states`` has the arrays at the end.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import note
from asyncsim.base.errors import InputError
from asyncsim.base.files import (
    RECORDING,
    files_below,
    lock,
    open_file,
    open_log,
    read_text,
    remove_partials,
    require_plain,
    write_json,
)
from asyncsim.clusters.cluster import Cluster
from asyncsim.real.processes import Processes
from asyncsim.traces.bookkeeping import READ_RECORD, STEP_RECORD, trace_of
from asyncsim.traces.columns import GOSSIP, OUTCOMES
from asyncsim.traces.trace import Trace
from asyncsim.traces.visits import recorded

HEADER = RECORDING
LOG = "visits.jsonl"
CHECKPOINT = "checkpoint.npz"
TRACE = "trace.parquet"
STATES = "states"
#: Format of all these files together; increased with every change that an older asyncsim could not
#: read.
FORMAT = 1
#: Quantities recorded with a commit besides its row of the trace, as in a replay.
RECORDED = ("loss", "update_norm", "central_energy", "proxy_energy")
Event = dict[str, Any]


class Header(NamedTuple):
    """The arguments of a recording."""

    processes: Processes
    commits: int
    seed: int
    precision: str
    method: dict[str, Any]  #: its name and its hyper-parameters
    problem: dict[str, Any]  #: its name and its configuration
    replies: bool  #: whether the method's server has its own replies

    def comparable(self) -> dict[str, Any]:
        """Return the header as plain values, as they come back from a file."""
        return json.loads(
            json.dumps({**self._asdict(), "processes": self.processes.to_dict()}, default=str)
        )

    def save(self, folder: Path) -> None:
        """Write it into the folder."""
        write_json(folder / HEADER, {"format": FORMAT, **self.comparable()})

    @classmethod
    def load(cls, folder: Path) -> "Header":
        """Read a saved header; raise InputError without one, or for another format."""
        try:
            values = json.loads(read_text(folder / HEADER))
            file_format = values.pop("format", FORMAT)
            if file_format == FORMAT:
                return cls(**{**values, "processes": Processes.from_dict(values["processes"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"folder = {str(folder)!r}: holds no recording ({error}); give one that real "
                "processes wrote"
            ) from None
        raise InputError(
            f"folder = {str(folder)!r}: recording of format {file_format!r}, this asyncsim reads "
            f"{FORMAT}; "
            "use the version that wrote it, or record again"
        )


class Log:
    """Appends events to a recording's log, which it locks."""

    def __init__(self, folder: Path):
        self.file = open_log(folder / LOG)  # for as long as its server lives
        if not lock(self.file.fileno()):
            self.file.close()
            raise InputError(
                f"folder = {str(folder)!r}: another process records there; wait for its end, or "
                "give another folder"
            )
        remove_partials(folder)

    def append(self, event: Event) -> None:
        """Hand one event to the operating system."""
        text = json.dumps(event)
        self.file.write(f'{text[:-1]}, "checksum": {zlib.crc32(text.encode())}}}\n'.encode())
        self.file.flush()


def read_log(folder: Path) -> tuple[list[Event], int]:
    """Read the events of a recording and the length of the log's complete lines, in bytes."""
    path = folder / LOG
    try:
        content = b""
        if require_plain(path).exists():
            with open_file(path) as file:
                content = file.read()
        size = content.rfind(b"\n") + 1
        events = [json.loads(line) for line in content[:size].splitlines()]
        for number, event in enumerate(events, 1):
            checksum = event.pop("checksum", None)  # older logs have none
            if checksum not in (None, zlib.crc32(json.dumps(event).encode())):
                raise ValueError(f"line {number} has another checksum")
        return events, size
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{str(path)!r}: a damaged log ({error}); record again") from None


def usable_checkpoint(path: Path, events: int) -> Path | None:
    """Return the checkpoint from which a recording of so long a log resumes; None without one.

    A checkpoint that cannot be read is renamed, and a note reports it.

    Raises
    ------
    InputError
        If the checkpoint has more events than the log, which was cut then, or belongs to another
        recording.
    """
    if not require_plain(path).exists():
        return None
    try:
        with open_file(path) as stream, np.load(stream) as file:
            checkpointed = int(file["events"])
            for name in file.files:
                file[name]  # compares checksums
    except (
        OSError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        renamed = path.replace(require_plain(path.with_name(f"{path.name}.broken")))
        note(
            f"{path}: a broken checkpoint ({error}), now {renamed.name}; all commits of the log "
            "are computed again"
        )
        return None
    if checkpointed > events:
        raise InputError(
            f"{str(path)!r}: a checkpoint after {checkpointed} events, and the log beside it has "
            f"{events}: "
            "it was cut, or is of another recording; put the whole log back, or remove the "
            "checkpoint, "
            "to resume from the log"
        )
    return path


def states_in(folder: Path) -> dict[int, Path]:
    """Return the files of a recording's stored states, by the number of commits before each."""
    return {int(path.stem): path for path in files_below(folder / STATES) if path.stem.isdecimal()}


class Read(NamedTuple):
    """A read of the central variable: its version; arrival, start and end of its visit (s)."""

    version: int = 0
    arrive: float = 0.0
    serve: float = 0.0
    time: float = 0.0


#: A worker's first read: version 0, at time 0.
FIRST = Read()


@dataclass
class Account:
    """The state of one worker in the ledger."""

    job: int = 0  #: its present computation, or its next
    steps: int = 0  #: its commits so far
    read: Read | None = FIRST  #: the read for that computation; None before it
    pulled: Read | None = None  #: the read for its next message, in a separate visit
    lost: bool = False  #: whether its process is gone


class Ledger:
    """The accounts of all workers and the rows of the trace, derived from the events alone."""

    def __init__(self, header: Header, events: Iterable[Event] = ()):
        self._header, self._processes = header, header.processes
        self.accounts = [Account() for _ in range(header.processes.workers)]
        self.version = 0  #: commits so far
        self.time = 0.0  #: of the last event (s)
        self.rows: list[Event] = []  #: of the trace
        self._reads = [(worker, *FIRST) for worker in range(header.processes.workers)]
        self.waiting: list[
            tuple[int, float]
        ] = []  #: worker and arrival (s) of each visit at the server at the end
        self.faults: list[
            tuple[float, int | None, str, int | None]
        ] = []  #: rows of `Recorded.faults`
        for event in events:
            self.take(event)

    def commit_event(
        self, worker: int, start: float, send: float, arrive: float, serve: float, commit: float
    ) -> Event:
        """Build the event of a worker's commit: its row of the trace."""
        account = self.accounts[worker]
        read, form = (
            account.read or FIRST,
            account.pulled or Read(self.version, arrive, serve, commit),
        )
        # The clocks of two machines agree up to the time of a message.
        sent_until = arrive if account.pulled is None else form.arrive
        start = min(max(start, read.time), sent_until)
        return {
            "event": "commit",
            "worker": worker,
            "job": account.job,
            "local_steps": self._processes.window,
            "read_version": read.version,
            "read_arrive_time": read.arrive,
            "read_serve_time": read.serve,
            "read_time": read.time,
            "start_time": start,
            "send_time": min(max(send, start), sent_until),
            "push_version": form.version,
            "push_time": form.time,
            "arrive_time": arrive,
            "serve_time": serve,
            "commit_time": commit,
            "staleness": self.version - read.version,
            "version": self.version + 1,
            "outcome": "applied",
            "worker_step": account.steps,
        }

    def read_event(self, worker: int, arrive: float, serve: float, time: float) -> Event:
        """Build the event of a visit that only reads."""
        account = self.accounts[worker]
        job, version = account.job + (account.read is not None), self.version
        return dict(
            event="read",
            worker=worker,
            job=job,
            version=version,
            arrive=arrive,
            serve=serve,
            time=time,
        )

    def lost_event(self, worker: int, time: float, cause: str) -> Event:
        """Build the event of a lost process; its computation counts from its read."""
        read, cancelled = self.accounts[worker].read, None
        if read is not None:
            cancelled = self.commit_event(worker, read.time, time, time, time, time)
            cancelled |= dict(
                push_version=self.version, push_time=time, version=self.version, outcome="cancelled"
            )
        return {
            "event": "lost",
            "worker": worker,
            "time": time,
            "what": cause,
            "cancelled": cancelled,
        }

    def take(self, event: Event) -> None:
        """Update the accounts and rows with an event."""
        kind = event["event"]
        if kind == "ended":
            self.waiting = [(worker, arrive) for worker, arrive in event["waiting"]]
            return
        self.time = event["commit_time" if kind == "commit" else "time"]
        if kind == "resumed":
            for account in self.accounts:
                account.lost = False
            self.faults.append((self.time, None, "resumed", None))
            return
        worker = event["worker"]
        account = self.accounts[worker]
        if kind == "commit":
            visit = Read(
                self.version,
                *(event[name] for name in ("arrive_time", "serve_time", "commit_time")),
            )
            if self._processes.protocol == "exchange":
                account.read = visit._replace(version=self.version + 1)
            elif self._processes.protocol == "write_then_read":
                account.read = None
            else:
                account.read = account.pulled if self._processes.pulls else visit
            if not self._processes.separate_reads:
                self._reads.append((worker, *account.read))
            account.job, account.steps, account.pulled = account.job + 1, account.steps + 1, None
            self.version = event["version"]
            self.rows.append(event)
        elif kind == "read":
            read = Read(*(event[name] for name in ("version", "arrive", "serve", "time")))
            self._reads.append((worker, *read))
            if account.read is None:
                account.read = read
            else:
                account.pulled = read
        elif kind == "lost":
            row = event["cancelled"]
            if row is not None:
                account.job += 1
                self.rows.append(row)
            # A method's reply cannot be repeated: such a worker resumes from its last one.
            account.read = account.read if self._header.replies else None
            account.pulled, account.lost = None, True
            self.faults.append(
                (self.time, worker, event["what"], None if row is None else row["job"])
            )
        elif kind == "restarted":
            account.lost = False
            self.faults.append((self.time, worker, "restarted", account.job))
        else:
            raise ValueError(f"an event {kind!r}")

    def trace(self) -> Trace:
        """Return the trace so far."""
        processes, seed = self._processes, self._header.seed
        names = [name for name in STEP_RECORD if name != "outcome"]
        commits = {name: np.array([row[name] for row in self.rows], float) for name in names}
        commits["version"] = commits["version"].astype(int)
        commits["outcome"] = np.array([OUTCOMES.index(row["outcome"]) for row in self.rows], int)
        reads = np.array(self._reads, float).reshape(-1, len(READ_RECORD)).T
        waiting = np.array(sorted(self.waiting), float).reshape(-1, 2).T
        form = Cluster(
            processes.workers,
            1.0,
            window=processes.window,
            protocol=processes.protocol,
            exclusive=not processes.pulls,
        )
        trace = trace_of(
            form,
            seed,
            commits,
            dict(zip(READ_RECORD, reads, strict=True)),
            dict(zip(("worker", "arrive_time"), waiting, strict=True)),
        )
        return replace(trace, source=replace(trace.source, cluster=None))


class Recorded(NamedTuple):
    """The results of real processes, complete or so far.

    Two tables: ``commits``, one row per commit, as in `asyncsim.Run`; and ``faults``, the failures
    and restarts of processes: ``time`` (s), ``worker``, ``what``, and the ``job`` that was lost or
    is next.
    """

    folder: Path
    header: Header
    trace: Trace
    commits: pd.DataFrame
    faults: pd.DataFrame

    @property
    def complete(self) -> bool:
        """Whether it has all requested commits."""
        return len(self.commits) >= self.header.commits


def load(folder: str | Path) -> Recorded:
    """Read a recording, complete or interrupted, with all events of its log."""
    folder = Path(folder)
    header = Header.load(folder)
    events = read_log(folder)[0]
    try:
        if header.processes.topology is not None:
            return _load_without_server(folder, header, events)
        ledger = Ledger(header, events)
        rows = [row for row in ledger.rows if row["outcome"] == "applied"]
        commits: dict[str, Any] = {"commit": np.arange(len(rows))}
        for name in ("commit_time", "worker", "worker_step", "staleness", *RECORDED):
            commits[name] = np.array(
                [row[name] for row in rows], np.int64 if name.startswith("worker") else None
            )
        faults = pd.DataFrame(ledger.faults, columns=["time", "worker", "what", "job"])
        faults = faults.astype({"worker": "Int64", "job": "Int64"})
        return Recorded(folder, header, ledger.trace(), pd.DataFrame(commits), faults)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{str(folder / LOG)!r}: a damaged log, whose events are not those of a recording "
            f"({error}); record again"
        ) from error


def _load_without_server(folder: Path, header: Header, events: list[Event]) -> Recorded:
    """Load a recording without a server; order its rows consistently with each worker's order."""
    (ended,) = (event for event in events if event["event"] == "ended")
    rows = pd.DataFrame([event for event in events if event["event"] == "commit"])
    processes = header.processes
    trace = recorded(
        rows,
        workers=processes.workers,
        protocol=GOSSIP,
        window=processes.window,
        begin=0.0,
        seed=header.seed,
        takes_up="read"
        if processes.policy.mix != "beside" and processes.policy.name != "handshake"
        else "commit",
        in_flight=ended["in_flight"] or None,
    )
    keys = ["worker", "job"]
    frame = trace.frame[["commit", "commit_time", *keys, "staleness"]]
    commits = frame.merge(rows[[*keys, *RECORDED[:2]]], on=keys).rename(
        columns={"job": "worker_step"}
    )
    faults = pd.DataFrame({"time": [], "worker": [], "what": [], "job": []})
    return Recorded(folder, header, trace, commits, faults)
