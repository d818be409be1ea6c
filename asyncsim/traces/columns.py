"""The columns of a trace, its outcomes, its source, and its parquet file: rows as columns, all else in the header."""

import functools
import hashlib
import json
import mmap
import os
import platform
import re
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from asyncsim.base.errors import InputError, require_choice, require_count, require_free, require_path, require_switch
from asyncsim.base.files import open_file, require_plain, write_whole
from asyncsim.clusters.cluster import PROTOCOLS, Cluster, as_workers
from asyncsim.traces.samples import rollout_tables

#: What can become of a message.
OUTCOMES = ("applied", "buffered", "discarded", "cancelled")
#: Their positions, for records that are not yet rows.
APPLIED, BUFFERED, DISCARDED, CANCELLED = range(len(OUTCOMES))
#: The outcomes of messages that the server takes up.
ACCEPTED = ("applied", "buffered")
#: Of clusters with failures also a message that did not arrive.
FAILING_OUTCOMES = (*OUTCOMES, "lost")
LOST = len(OUTCOMES)
#: What lost a row of such a trace; a message that is ``"resent"`` has another row.
FAILED_BY = ("nothing", "crash", "leave", "loss", "resent")
#: Their positions.
NOTHING, CRASH, LEAVE, LOSS, RESENT = range(len(FAILED_BY))
#: The spells that are recorded, of workers and of the server.
SPELLS = ("crash", "leave", "outage")
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
    "push_version": "versions",
    "push_time": "s",
    "arrive_time": "s",
    "serve_time": "s",
    "commit_time": "s",
    "staleness": "versions",
    "version": "versions",
    "outcome": "",
}

#: The columns of the parts of messages, where there are several servers.
PART_COLUMNS = (
    *("part", "commit", "worker", "job", "shard", "read_version", "read_arrive_time", "read_serve_time", "read_time"),
    *("push_version", "push_time", "arrive_time", "serve_time", "commit_time", "staleness", "version", "outcome"),
)
#: The protocol of traces without a server, and the columns that only they have.
GOSSIP = "gossip"
GOSSIP_COLUMNS = {"sources": "rows", "weights": "", "kept": "", "partner": ""}
#: The columns that only traces of clusters with failures have.
FAILURE_COLUMNS = {"failed_by": "", "incarnation": "", "restored": "versions", "restores": ""}
#: When workers of such a trace take up what they were sent: before their gradient, or when it is applied.
TAKES_UP = ("read", "commit")


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make traces."""
    from asyncsim import __version__  # not at the top: nothing else here needs the package itself

    packages = {name: metadata.version(name) for name in ("numpy", "pandas", "pyarrow", "simpy")}
    return {"asyncsim": __version__, "python": platform.python_version(), **packages}


@dataclass(frozen=True)
class Source:
    """Where a trace comes from."""

    workers: int  #: how many took part, also those without a commit
    protocol: str  #: the protocol of the visits; or ``"prescribed"``; or ``"gossip"``, where there is no server
    window: int = 1  #: local steps per commit; the most of a worker's where they differ
    separate_reads: bool = False  #: whether reads are server visits of their own
    seed: int = 0  #: the seed of the random numbers
    cluster: Cluster | None = None  #: what was simulated; None if the trace was prescribed or recorded
    #: Versions of the packages that made it.
    versions: dict[str, str] = field(default_factory=lambda: dict(package_versions()))
    #: Without a server: whether messages are taken up before the gradient, ``"read"``, or when it is applied,
    #: ``"commit"``. Else ``""``.
    takes_up: str = ""


def no_open_reads() -> pd.DataFrame:
    """Return an empty table of open reads."""
    counts = {name: np.zeros(0, np.int64) for name in ("worker", "job", "read_version")}
    times = {name: np.zeros(0) for name in ("read_arrive_time", "read_serve_time", "read_time")}
    return pd.DataFrame({**counts, **times})


_NO_PARTS = pd.DataFrame(
    {name: np.zeros(0, float if name.endswith("_time") else np.int64) for name in PART_COLUMNS}
    | {"outcome": pd.Categorical([], OUTCOMES)}
)
_NO_OPEN_PARTS = no_open_reads().assign(shard=np.zeros(0, np.int64))


def no_parts() -> pd.DataFrame:
    """Return an empty table of parts of messages."""
    return _NO_PARTS.copy()  # many times quicker than to make one: every trace of one server has such a table


def no_open_parts() -> pd.DataFrame:
    """Return an empty table of open reads of shards."""
    return _NO_OPEN_PARTS.copy()


def nobody_present() -> pd.DataFrame:
    """Return an empty table of visits present at the end."""
    return pd.DataFrame({"worker": np.zeros(0, np.int64), "arrive_time": np.zeros(0)})


def no_messages() -> pd.DataFrame:
    """Return an empty table of messages in flight."""
    counts = {name: np.zeros(0, np.int64) for name in ("row", "taker")}
    return pd.DataFrame({**counts, "weight": np.zeros(0), "arrive_time": np.zeros(0)})


def no_spells() -> pd.DataFrame:
    """Return an empty table of spells."""
    times = {name: np.zeros(0) for name in ("begin", "end", "detected", "from_row", "to_row")}
    return pd.DataFrame({"worker": np.zeros(0, np.int64), "kind": np.zeros(0, object), **times})


#: Raised by one whenever the files change.
FORMAT = 3
#: The formats that can be read: 1 does not tell when messages set off, 1 and 2 have no checksum.
_READ = (1, 2, FORMAT)
#: Columns that had other names in formats 1 and 2.
_RENAMED = {"form_version": "push_version", "form_time": "push_time"}
_METADATA = b"asyncsim"
#: The entry with the SHA-256 of the whole file, in which its own digits are zeros, and how it looks in the file.
_CHECKSUM = b"asyncsim.sha256"
_DIGITS = re.compile(re.escape(_CHECKSUM) + rb".{1,3}?([0-9a-f]{64})", re.DOTALL)
#: Small tables that travel in the header, by name, with what makes an empty one.
_SIDE_TABLES = {
    "open_reads": no_open_reads,
    "open_parts": no_open_parts,
    "present": nobody_present,
    "in_flight": no_messages,
    "spells": no_spells,
}


def save_trace(trace: Any, path: str | os.PathLike) -> Path:
    """Write a trace; see `Trace.save`."""
    return write_trace(trace, require_free("path", path))


def write_trace(trace: Any, path: Path) -> Path:
    """Write a trace; replace an existing file."""
    table = pa.Table.from_pandas(trace.frame[list(COLUMNS)], preserve_index=False)
    if trace.protocol == GOSSIP:
        kinds = (pa.list_(pa.int64()), pa.list_(pa.float64()), pa.float64(), pa.int64())
        for name, kind in zip(GOSSIP_COLUMNS, kinds, strict=True):
            table = table.append_column(name, pa.array(trace.frame[name], kind))
    if trace.has_failures:
        for name in FAILURE_COLUMNS:
            table = table.append_column(name, pa.array(trace.frame[name]))
    if trace.servers > 1:
        table = table.append_column("parts", _part_lists(trace.parts, len(trace)))
    if trace.rollouts is not None:
        for name, rows in trace.rollouts._asdict().items():
            table = table.append_column(f"rollouts.{name}", _in_first_row(rows, len(trace)))
    header = json.dumps(_header(trace), sort_keys=True).encode()
    table = table.replace_schema_metadata({_METADATA: header, _CHECKSUM: b"0" * 64})

    def write(partial: Path) -> None:
        pq.write_table(table, partial, write_page_checksum=True)
        with partial.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            at, _, checksum = _checksum(content)
            content[at : at + 64] = checksum

    return write_whole(path, write)


def load_trace(kind: Any, path: str | os.PathLike) -> Any:
    """Read a trace; see `Trace.load`."""
    path = require_path("path", path)
    table, is_sealed = _read_table(path)
    header = _read_header(path, table.schema.metadata)
    try:
        if header["format"] == FORMAT and not is_sealed:
            raise ValueError("its checksum is missing")
        frame = table.replace_schema_metadata(None).to_pandas()
        if header["format"] == 1:
            frame = frame.assign(send_time=np.nan)
        if header["format"] < FORMAT:
            frame = frame.rename(columns=_RENAMED)
        has_failures = "failed_by" in frame
        frame["outcome"] = pd.Categorical(frame["outcome"], FAILING_OUTCOMES if has_failures else OUTCOMES)
        if has_failures:
            frame["failed_by"] = pd.Categorical(frame["failed_by"], FAILED_BY)
        for name in {"sources", "weights"} & set(frame):
            frame[name] = table[name].to_pylist()
        rest = {name: _unpack(header[name], empty()) for name, empty in _SIDE_TABLES.items() if name in header}
        if "parts" in frame:
            del frame["parts"]
            rest["parts"] = _parts_of(table["parts"], _unpack(header["parts"], no_parts()))
        names = [name for name in frame if name.startswith("rollouts.")]
        if names:
            rest["rollouts"] = rollout_tables(
                {name.removeprefix("rollouts."): _from_first_row(table[name]) for name in names}
            )
            frame = frame.drop(columns=names)
        trace = kind(frame, _source(header["source"]), **rest)
        jobs = frame.groupby("worker", sort=False)["job"]
        again: Any = False
        if has_failures:  # a message that is sent again has several rows
            again = frame["failed_by"].eq("resent").groupby(frame["worker"]).shift(fill_value=False)
        if not ((frame["job"] >= 0) & (~(jobs.diff() <= 0) | again)).all():
            raise ValueError("the jobs of a worker do not come one after the other")
        return trace
    except Exception as error:  # of whatever made the file
        raise InputError(f"path = {str(path)!r}: a damaged trace ({error}); copy it again or make it again") from error


def _source(values: dict[str, Any]) -> Source:
    """Return where a trace comes from; raise an error for what cannot be."""
    cluster = values["cluster"]
    source = Source(**{**values, "cluster": None if cluster is None else Cluster.from_dict(cluster)})
    require_choice("protocol", source.protocol, (*PROTOCOLS, "prescribed", GOSSIP))
    as_workers(source.workers)
    for name, minimum in (("window", 1), ("seed", 0)):
        require_count(name, getattr(source, name), minimum)
    require_switch("separate_reads", source.separate_reads)
    if not isinstance(source.versions, dict):
        raise InputError(f"versions = {source.versions!r}: must be a table")
    return source


def _header(trace: Any) -> dict[str, Any]:
    """Return what the file holds besides the rows: plain values."""
    source = {entry.name: getattr(trace.source, entry.name) for entry in fields(Source)}
    if trace.cluster is not None:
        source["cluster"] = trace.cluster.to_dict()
    sides = {name: getattr(trace, name).to_dict("list") for name in _SIDE_TABLES}
    if not trace.has_failures:
        del sides["spells"]
    units = COLUMNS | GOSSIP_COLUMNS
    if trace.protocol != GOSSIP:  # what there is only without a server
        units = COLUMNS | (FAILURE_COLUMNS if trace.has_failures else {})
        del source["takes_up"], sides["in_flight"]
    if trace.servers > 1:
        sides["parts"] = trace.parts[trace.parts["commit"] < 0].to_dict("list")
    else:
        del sides["open_parts"]
    return {"kind": "trace", "format": FORMAT, "units": units, "source": source, **sides}


def _unpack(columns: dict[str, list], empty: pd.DataFrame) -> pd.DataFrame:
    """Return a side table with the types it had."""
    if "shard" in columns:  # of several servers
        empty = empty.assign(shard=np.zeros(0, np.int64))
    return pd.DataFrame({name: pd.array(columns[name], empty[name].dtype) for name in empty})


def _part_lists(parts: pd.DataFrame, rows: int) -> pa.Array:
    """Return the parts of each row as a list of structs."""
    columns = parts[parts["commit"] >= 0].sort_values("commit", kind="stable").drop(columns="commit")
    columns["outcome"] = columns["outcome"].cat.codes
    structs = pa.StructArray.from_arrays([pa.array(columns[name]) for name in columns], list(columns))
    return pa.ListArray.from_arrays(np.linspace(0, len(columns), rows + 1).astype(np.int32), structs)


def _parts_of(lists: pa.ChunkedArray, incomplete: pd.DataFrame) -> pd.DataFrame:
    """Return the table of parts from the lists in a file, and the parts of messages that are not complete."""
    structs = lists.combine_chunks()
    columns = {field.name: structs.flatten().field(field.name).to_numpy(False) for field in structs.type.value_type}
    parts = pd.DataFrame({**columns, "commit": np.repeat(np.arange(len(lists)), structs.value_lengths())})
    parts["outcome"] = pd.Categorical.from_codes(parts["outcome"], OUTCOMES)
    parts = pd.concat([parts, incomplete]).sort_values("part", ignore_index=True)
    return parts.assign(outcome=pd.Categorical(parts["outcome"], OUTCOMES))[list(PART_COLUMNS)]


def _in_first_row(rows: pd.DataFrame, length: int) -> pa.Array:
    """Return a column whose first entry is the list of a table's rows; other entries are empty lists."""
    arrays = [pa.array(rows[name]) for name in rows]
    arrays = [
        array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array for array in arrays
    ]
    offsets = pa.array([0, *[len(rows)] * length], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, list(rows)))


def _from_first_row(lists: pa.ChunkedArray) -> pd.DataFrame:
    structs = lists.combine_chunks().flatten()
    return pd.DataFrame({field.name: structs.field(field.name).to_pandas() for field in structs.type})


def _read_table(path: Path) -> tuple[Any, bool]:
    """Return the rows, and whether a checksum has vouched for them."""
    if not require_plain(path).exists():
        raise InputError(f"path = {str(path)!r}: no such file; give one that Trace.save wrote")
    try:
        with open_file(path) as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _, written, checksum = _checksum(content)
            if written not in (None, checksum):  # before a parser sees it
                raise ValueError("its checksum is of other contents")
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                return opened.read(), written is not None
    except Exception as error:  # a parser's, of whatever made the file
        raise InputError(
            f"path = {str(path)!r}: cannot be read as parquet ({error}); it may be damaged, truncated or of "
            "another kind: copy it again, make it again, or give a file that Trace.save wrote"
        ) from error


def _checksum(content: mmap.mmap) -> tuple[int, bytes | None, bytes]:
    """Return where a file has its checksum, if it has one, what is written there, and what should be."""
    entry = content.rfind(_CHECKSUM)
    found = None if entry < 0 else _DIGITS.match(content, entry)
    if found is None:
        return 0, None, b""
    digest = hashlib.sha256()
    with memoryview(content) as view:
        for part in (view[: found.start(1)], b"0" * 64, view[found.end(1) :]):
            digest.update(part)
    return found.start(1), found[1], digest.hexdigest().encode()


def _read_header(path: Path, stored: dict[bytes, bytes] | None) -> dict[str, Any]:
    try:
        header = json.loads((stored or {})[_METADATA])
        kind, version = header["kind"], header["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        kind, version = None, None
    if kind != "trace":
        raise InputError(f"path = {str(path)!r}: not a trace; give a file that Trace.save wrote")
    if version not in _READ:
        made_by = header.get("source", {}).get("versions", {}).get("asyncsim", "unknown")
        raise InputError(
            f"path = {str(path)!r}: a trace of format {version!r}, made by asyncsim {made_by}; this one reads "
            f"formats {_READ[0]} to {FORMAT}: use that version, or simulate again"
        )
    return header
