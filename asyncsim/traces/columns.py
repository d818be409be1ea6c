"""The columns of a trace, its outcomes, and its source."""

import functools
import platform
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
import pandas as pd

from asyncsim import __version__
from asyncsim.clusters.cluster import Cluster

#: What can become of a message.
OUTCOMES = ("applied", "buffered", "discarded", "cancelled")
#: Their positions, for records that are not yet rows.
APPLIED, BUFFERED, DISCARDED, CANCELLED = range(len(OUTCOMES))
#: The outcomes of messages that the server takes up.
TAKEN_UP = ("applied", "buffered")
#: The columns of a trace and their units.
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
    "form_version": "versions",
    "form_time": "s",
    "arrive_time": "s",
    "serve_time": "s",
    "commit_time": "s",
    "staleness": "versions",
    "version": "versions",
    "outcome": "",
}


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make traces."""
    packages = {name: metadata.version(name) for name in ("numpy", "pandas", "pyarrow", "simpy")}
    return {"asyncsim": __version__, "python": platform.python_version(), **packages}


@dataclass(frozen=True)
class Source:
    """Where a trace comes from.

    Attributes
    ----------
    workers : int
        How many took part, also those without a commit.
    protocol : str
        The protocol of the visits, or ``"prescribed"``.
    window : int
        Local steps per commit; the most of a worker's where they differ.
    separate_reads : bool
        Whether reads are server visits of their own.
    seed : int
        The seed of the random numbers.
    cluster : Cluster or None
        What was simulated; None if the trace was prescribed or recorded.
    versions : dict
        Versions of the packages that made it.
    """

    workers: int
    protocol: str
    window: int = 1
    separate_reads: bool = False
    seed: int = 0
    cluster: Cluster | None = None
    versions: dict[str, str] = field(default_factory=lambda: dict(package_versions()))


def no_open_reads() -> pd.DataFrame:
    """Return an empty table of open reads."""
    counts = {name: np.zeros(0, np.int64) for name in ("worker", "job", "read_version")}
    times = {name: np.zeros(0) for name in ("read_arrive_time", "read_serve_time", "read_time")}
    return pd.DataFrame({**counts, **times})


def nobody_present() -> pd.DataFrame:
    """Return an empty table of visits present at the end."""
    return pd.DataFrame({"worker": np.zeros(0, np.int64), "arrive_time": np.zeros(0)})
