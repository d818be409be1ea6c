"""The folder of a recording: its files, and what can be read from them with no process running.

``recording.json``
    What was asked for.
``visits.jsonl``
    The log, see `asyncsim.real.log`: everything that happened, each event written before it is answered.
``checkpoint.npz``
    All arrays after some of the events, replaced every ``checkpoint_every`` commits.
``states``
    The checkpoints, if all are kept.
``trace.parquet``
    The trace at the end, and before that at a checkpoint by which it has grown by a fifth.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.errors import InputError
from asyncsim.files import write_json, write_whole
from asyncsim.real.book import Book
from asyncsim.real.log import LOG, read_log
from asyncsim.real.processes import Processes
from asyncsim.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

HEADER = "recording.json"
CHECKPOINT = "checkpoint.npz"
TRACE = "trace.parquet"
STATES = "states"
#: Of all these files together; increased with every change that an older asyncsim could not read.
FORMAT = 1


class Header(NamedTuple):
    """What a recording was asked for.

    Attributes
    ----------
    processes : Processes
    commits : int
    seed : int
    precision : str
    method, problem : dict
        Name and hyper-parameters or configuration.
    replies : bool
        Whether the method's server answers with something else than the central variable.
    """

    processes: Processes
    commits: int
    seed: int
    precision: str
    method: dict[str, Any]
    problem: dict[str, Any]
    replies: bool

    def comparable(self) -> dict[str, Any]:
        """Return it as plain values, as they come back from a file."""
        return json.loads(json.dumps({**self._asdict(), "processes": self.processes.to_dict()}, default=str))

    def save(self, folder: Path) -> None:
        """Write it into the folder."""
        write_json(folder / HEADER, {"format": FORMAT, **self.comparable()})

    @classmethod
    def load(cls, folder: Path) -> "Header":
        """Read what `save` wrote; raise InputError if there is nothing of the kind, or of another format."""
        try:
            values = json.loads((folder / HEADER).read_text())
            written = values.pop("format", FORMAT)
            if written == FORMAT:
                return cls(**{**values, "processes": Processes.from_dict(values["processes"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"folder = {str(folder)!r}: holds no recording ({error}); give one that real processes wrote"
            ) from None
        raise InputError(
            f"folder = {str(folder)!r}: recording of format {written!r}, this asyncsim reads {FORMAT}; use the version "
            "that wrote it, or record again"
        )


class Recorded(NamedTuple):
    """What real processes did, so far.

    Attributes
    ----------
    folder : Path
    header : Header
    trace : Trace
    commits : pandas.DataFrame
        One row per commit, as `asyncsim.Run` has it.
    faults : pandas.DataFrame
        What happened to the processes: ``time`` (s), ``worker``, ``what``, and the ``job`` that was lost or is next.
    """

    folder: Path
    header: Header
    trace: Trace
    commits: "pd.DataFrame"
    faults: "pd.DataFrame"

    @property
    def complete(self) -> bool:
        """Whether it has all the commits that were asked for."""
        return len(self.commits) >= self.header.commits


def load(folder: str | Path) -> Recorded:
    """Read a recording, complete or broken off: everything in its log.

    Raises
    ------
    InputError
        There is none, or it is damaged.
    """
    folder = Path(folder)
    header = Header.load(folder)
    events = read_log(folder)[0] if (folder / LOG).exists() else []
    try:
        book = Book(header.processes, header.replies, events)
        return Recorded(folder, header, book.trace(header.seed), book.commits(), book.fault_table())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{str(folder / LOG)!r}: a damaged log, whose events are not those of a recording ({error}); record again"
        ) from error


def write_trace(folder: Path, trace: Trace) -> Path:
    """Write the trace so far in the place of the one before."""

    def write(partial: Path) -> None:
        partial.unlink(missing_ok=True)
        trace.save(partial)

    return write_whole(folder / TRACE, write)
