"""The columns of a trace, in its four tables and in the frame that joins them; and its source."""

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.policy import Policy, as_policy

#: Outcomes of a message; a message that is lost does not arrive.
OUTCOMES = ("applied", "buffered", "discarded", "cancelled", "lost")
#: Their positions, for records that are not yet rows.
APPLIED, BUFFERED, DISCARDED, CANCELLED, LOST = range(len(OUTCOMES))
#: The outcomes of messages that the server takes up.
ACCEPTED = OUTCOMES[: BUFFERED + 1]
#: Causes of a lost step; a message that is ``"resent"`` has another row.
FAILED_BY = ("nothing", "crash", "leave", "loss", "resent")
#: Their positions.
NOTHING, CRASH, LEAVE, LOSS, RESENT = range(len(FAILED_BY))
#: The kinds of absences, of workers and of the server.
SPELLS = ("crash", "leave", "outage")

#: The columns of each table and their defaults; a column of names lists them, the default first.
TABLES: dict[str, dict[str, Any]] = {
    "steps": {
        "worker": 0,
        "job": 0,
        "local_steps": 1,
        "read": 0,
        **dict.fromkeys(
            ("start_time", "send_time", "arrive_time", "serve_time", "commit_time"), np.nan
        ),
        "outcome": OUTCOMES,
        "version": 0,
        "push_read": -1,
        "failed_by": FAILED_BY,
        "incarnation": 0,
        "partner": -1,
        "kept": 1.0,
    },
    "reads": {
        "worker": 0,
        "job": 0,
        "shard": -1,
        "version": 0,
        **dict.fromkeys(("arrive_time", "serve_time", "time"), np.nan),
        "is_open": False,
    },
    "messages": {
        "worker": 0,
        "step": -1,
        "by": -1,
        "taker": -1,
        "weight": 1.0,
        "shard": -1,
        "read": -1,
        "push_read": -1,
        **dict.fromkeys(("arrive_time", "serve_time", "commit_time"), np.nan),
        "outcome": OUTCOMES,
    },
    "absences": {
        "worker": -1,
        "kind": SPELLS,
        **dict.fromkeys(("begin", "end", "detected", "from_row", "to_row"), np.nan),
        "version": -1,
    },
}

#: The columns of the frame and their units.
COLUMNS = {
    "commit": "",
    "worker": "",
    "job": "",
    "local_steps": "",
    "read_version": "versions",
    "read_arrive_time": "s",
    "read_serve_time": "s",
    "read_time": "s",
    "start_time": "s",
    "send_time": "s",
    "push_version": "versions",
    "push_time": "s",
    "arrive_time": "s",
    "serve_time": "s",
    "commit_time": "s",
    "staleness": "versions",
    "version": "versions",
    "outcome": "",
}
#: The columns of a read in the frame, by their names in the table of reads.
READ_COLUMNS = {
    "version": "read_version",
    "arrive_time": "read_arrive_time",
    "serve_time": "read_serve_time",
    "time": "read_time",
}

#: The columns of the parts of messages, where there are several servers.
PART_COLUMNS = (
    "part",
    "commit",
    "worker",
    "job",
    "shard",
    *READ_COLUMNS.values(),
    "push_version",
    "push_time",
    "arrive_time",
    "serve_time",
    "commit_time",
    "staleness",
    "version",
    "outcome",
)

#: The protocol of traces without a server, and the columns that only their frames have.
GOSSIP = "gossip"
GOSSIP_COLUMNS = ("sources", "weights", "kept", "partner")
#: When workers of such a trace take up messages: before their gradient, or when it is applied.
TAKES_UP = ("read", "commit")


def table_of(name: str, columns: Mapping[str, Any], size: int | None = None) -> pd.DataFrame:
    """Build a table from its columns; missing columns have their defaults.

    Names may be given by their positions.
    """
    size = len(next(iter(columns.values()))) if size is None else size
    table: dict[str, Any] = {}
    for column, default in TABLES[name].items():
        names, values = default if isinstance(default, tuple) else (), columns.get(column)
        if names and values is not None and np.asarray(values).dtype.kind not in "iuf":
            values = pd.Categorical(values, names).codes
            if values.min(initial=0) < 0:
                raise InputError(f"{name}: {column} must be one of {', '.join(names)}")
        constant = np.int8(0) if names else np.asarray(default)
        # A constant takes no memory.
        array = (
            np.broadcast_to(constant, size)
            if values is None
            else np.ascontiguousarray(values, constant.dtype)
        )
        table[column] = pd.Categorical.from_codes(array, names) if names else array
    return pd.DataFrame(table, copy=False)


def arrays_of(table: pd.DataFrame, *names: str) -> list[np.ndarray]:
    """Return columns of a table as arrays; a column of names as the codes of its categories."""
    columns = (table[name] for name in names)
    return [
        (column.cat.codes if column.dtype == "category" else column).to_numpy()
        for column in columns
    ]


@functools.cache
def package_versions(*further: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that make traces, and of further ones."""
    from asyncsim import __version__  # not at the top: nothing else here needs the package itself

    names = ("numpy", "pandas", "pyarrow", "simpy", *further)
    packages = {name: metadata.version(name) for name in names}
    return {"asyncsim": __version__, "python": platform.python_version(), **packages}


@dataclass(frozen=True, eq=False)
class Source:
    """The origin of a trace: a cluster, a recording or a prescription."""

    workers: int  #: how many took part, also those without a commit
    #: the protocol of the visits; or ``"prescribed"``; or ``"gossip"``, where there is no server
    protocol: str
    window: int = 1  #: local steps per commit; the most of a worker's where they differ
    separate_reads: bool = False  #: whether reads are separate server visits
    seed: int = 0  #: the seed of the random numbers
    cluster: Cluster | None = (
        None  #: the simulated cluster; None if the trace was prescribed or recorded
    )
    #: Versions of the packages that made it.
    versions: dict[str, str] = field(default_factory=lambda: dict(package_versions()))
    #: Without a server: whether messages are taken up before the gradient, ``"read"``, or when it
    #: is applied, ``"commit"``. Else ``""``.
    takes_up: str = ""
    #: The groups of tensors that a prescribed read sees at a version each: their names in a
    #: problem's tree, or their number.
    groups: tuple[str, ...] | int = 1
    #: The timing policy of a recorded trace; a simulated trace has its cluster's.
    recorded_policy: str = "asynchronous()"

    @property
    def shards(self) -> int:
        """Number of groups of tensors that a prescribed read sees at a version each."""
        return self.groups if isinstance(self.groups, int) else len(self.groups)

    @property
    def servers(self) -> int:
        """Number of servers, each with a shard of the parameters; 1 without a cluster."""
        return 1 if self.cluster is None else self.cluster.server_count

    @property
    def policy(self) -> Policy:
        """The timing policy."""
        return as_policy(self.recorded_policy) if self.cluster is None else self.cluster.policy


def previous_rows(worker: np.ndarray, incarnation: Any = 0) -> np.ndarray:
    """Return the row before each row in the same life of its worker, ``[rows]``; -1 for none."""
    life = worker + incarnation * (worker.max(initial=0) + 1)
    order = np.argsort(life, kind="stable")
    previous = np.full(len(life), -1)
    is_same_life = life[order[1:]] == life[order[:-1]]
    previous[order[1:][is_same_life]] = order[:-1][is_same_life]
    return previous
