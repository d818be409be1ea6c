"""The parquet file of a trace: the columns of its four tables side by side, all else in the
header.
"""

import hashlib
import json
import mmap
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_free,
    require_path,
    require_switch,
)
from asyncsim.base.files import open_file, write_whole
from asyncsim.clusters.cluster import PROTOCOLS, Cluster
from asyncsim.clusters.workers import as_workers
from asyncsim.traces.columns import GOSSIP, OUTCOMES, TABLES, Source, table_of
from asyncsim.traces.rules import (
    require_order,
    require_parts,
    require_references,
    require_rows,
    require_shards,
)
from asyncsim.traces.samples import RolloutTables, rollout_tables
from asyncsim.traces.tables import SIDE_TABLES

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

#: Raised by one whenever the files change; `load_trace` reads all earlier formats.
FORMAT = 4
#: The formats that can be read: 1 has no times at which messages set off, 1 and 2 have no checksum;
#: up to 3 the file holds the rows of the frame, and its header the tables beside it.
_READ = (1, 2, 3, FORMAT)
#: Columns that had other names in formats 1 and 2.
_RENAMED = {"form_version": "push_version", "form_time": "push_time"}
#: Columns of whole numbers, and of names, in the tables that up to format 3 are in the header.
_COUNTS = (
    "part",
    "commit",
    "row",
    "worker",
    "taker",
    "job",
    "shard",
    "read_version",
    "push_version",
    "version",
    "staleness",
)
_NAMES = ("kind", "outcome")
_METADATA = b"asyncsim"
#: The entry with the SHA-256 of the whole file, in which its own digits are zeros, and how it looks
#: in the file.
_CHECKSUM = b"asyncsim.sha256"
_DIGITS = re.compile(re.escape(_CHECKSUM) + rb".{1,3}?([0-9a-f]{64})", re.DOTALL)


def save_trace(trace: "Trace", path: str | os.PathLike) -> Path:
    """Write a trace; see `Trace.save`."""
    return write_trace(trace, require_free("path", path))


def write_trace(trace: "Trace", path: Path) -> Path:
    """Write a trace; replace an existing file."""
    tables = {name: getattr(trace, name) for name in TABLES}
    if trace.rollouts is not None:
        tables |= trace.rollouts._asdict()
    columns, rows = {}, {name: len(table) for name, table in tables.items()}
    for name, contents in tables.items():
        for column, values in contents.items():
            array = pa.array(values)
            array = array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array
            padding = pa.nulls(
                max(rows.values()) - len(array), array.type
            )  # the tables have different lengths
            columns[f"{name}.{column}"] = pa.concat_arrays([array, padding])
    source = {entry.name: getattr(trace.source, entry.name) for entry in fields(Source)}
    if trace.source.shards == 1:  # files of whole reads have no groups
        del source["groups"]
    source["cluster"] = None if trace.cluster is None else trace.cluster.to_dict()
    header = {"kind": "trace", "format": FORMAT, "rows": rows, "source": source}
    header["units"] = {
        name: "s" for name in columns if name.endswith(("time", "begin", "end", "detected"))
    }
    metadata = {_METADATA: json.dumps(header, sort_keys=True).encode(), _CHECKSUM: b"0" * 64}
    table = pa.table(columns).replace_schema_metadata(metadata)

    def write(partial: Path) -> None:
        pq.write_table(table, partial, write_page_checksum=True)
        with partial.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            at, _, checksum = _checksum(content)
            content[at : at + 64] = checksum

    return write_whole(path, write)


def load_trace(kind: "type[Trace]", path: str | os.PathLike) -> "Trace":
    """Read a trace; see `Trace.load`."""
    path = require_path("path", path)
    table, is_sealed = _read_table(path)
    header = _read_header(path, table.schema.metadata)
    try:
        if header["format"] >= 3 and not is_sealed:
            raise ValueError("its checksum is missing")
        source = _source(header["source"])
        if header["format"] < FORMAT:
            return _of_frame(kind, table, source, header)
        rows = header["rows"]
        rollouts = None
        if "samples" in rows:
            rollouts = rollout_tables(
                {name: _columns(table, name, rows[name]) for name in RolloutTables._fields}
            )
        trace = kind(
            source, **{name: _table(table, name, rows[name]) for name in TABLES}, rollouts=rollouts
        )
        require_references(trace)
        require_shards(trace)
        require_rows(trace.frame, trace.taken_up, trace.in_flight, source)
        require_order(trace.frame)
        require_parts(trace.parts, trace.frame, source)
        return trace
    except Exception as error:  # of any origin: the content is a user's file
        raise InputError(
            f"path = {str(path)!r}: a damaged trace ({error}); copy it again or make it again"
        ) from error


def _table(stored: pa.Table, name: str, rows: int) -> pd.DataFrame:
    """Return one of the tables of a file."""
    columns = {column: stored[f"{name}.{column}"].slice(0, rows) for column in TABLES[name]}
    return table_of(name, {column: values.to_numpy() for column, values in columns.items()}, rows)


def _columns(stored: pa.Table, name: str, rows: int) -> pd.DataFrame:
    """Return a table of rollouts of a file, with whatever columns it has."""
    names = [column for column in stored.column_names if column.startswith(f"{name}.")]
    return pd.DataFrame(
        {column.partition(".")[2]: stored[column].slice(0, rows).to_pandas() for column in names}
    )


def _of_frame(
    kind: "type[Trace]", table: pa.Table, source: Source, header: dict[str, Any]
) -> "Trace":
    """Build the trace of a file that holds the rows of the frame."""
    frame = table.replace_schema_metadata(None).to_pandas()
    if header["format"] == 1:
        frame = frame.assign(send_time=np.nan)
    if header["format"] < 3:
        frame = frame.rename(columns=_RENAMED)
    for name in {"sources", "weights"} & set(frame):
        frame[name] = table[name].to_pylist()
    side_tables: dict[str, Any] = {}
    for name, columns in SIDE_TABLES.items():
        if name in header or name in ("open_reads", "present"):
            columns = [
                *columns,
                *(["shard"] if name == "present" and "shard" in header[name] else []),
            ]
            types = {
                column: np.int64 if column in _COUNTS else float
                for column in columns
                if column not in _NAMES
            }
            side_tables[name] = pd.DataFrame(
                {column: header[name][column] for column in columns}
            ).astype(types)
    if "parts" in frame:  # complete messages have theirs in lists; the header has the rest
        del frame["parts"]
        lists = table["parts"].combine_chunks()
        parts = pd.DataFrame(lists.flatten().to_pylist()).assign(
            commit=np.repeat(np.arange(len(lists)), lists.value_lengths())
        )
        parts = parts.assign(outcome=np.array(OUTCOMES)[parts["outcome"]])
        side_tables["parts"] = pd.concat([parts, side_tables["parts"]]).sort_values(
            "part", ignore_index=True
        )
    return kind.of(frame, source, **side_tables)


def _source(values: dict[str, Any]) -> Source:
    """Return where a trace comes from; raise an error for what cannot be."""
    cluster, groups = values["cluster"], values.get("groups", 1)
    values = {**values, "groups": groups if isinstance(groups, int) else tuple(groups)}
    source = Source(
        **{**values, "cluster": None if cluster is None else Cluster.from_dict(cluster)}
    )
    require_choice("protocol", source.protocol, (*PROTOCOLS, "prescribed", GOSSIP))
    as_workers(source.workers)
    for name, minimum in (("window", 1), ("seed", 0)):
        require_count(name, getattr(source, name), minimum)
    require_switch("separate_reads", source.separate_reads)
    if not isinstance(source.versions, dict):
        raise InputError(f"versions = {source.versions!r}: must be a table")
    return source


def _read_table(path: Path) -> tuple[Any, bool]:
    """Return the rows, and whether the file has a valid checksum."""
    if not path.exists():
        raise InputError(f"path = {str(path)!r}: no such file; give one that Trace.save wrote")
    try:
        with open_file(path) as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _, stored_digest, checksum = _checksum(content)
            if stored_digest not in (None, checksum):  # before the parser reads damaged bytes
                raise ValueError("its checksum is of other contents")
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                return parquet.read(), stored_digest is not None
    except Exception as error:  # of any type: the parser reads a user's file
        raise InputError(
            f"path = {str(path)!r}: cannot be read as parquet ({error}); it may be damaged, "
            "truncated or of "
            "another kind: copy it again, make it again, or give a file that Trace.save wrote"
        ) from error


def _checksum(content: mmap.mmap) -> tuple[int, bytes | None, bytes]:
    """Return the checksum's offset, the stored digest (None without a checksum) and the computed
    digest.
    """
    entry = content.rfind(_CHECKSUM)
    match = None if entry < 0 else _DIGITS.match(content, entry)
    if match is None:
        return 0, None, b""
    digest = hashlib.sha256()
    with memoryview(content) as view:
        for part in (view[: match.start(1)], b"0" * 64, view[match.end(1) :]):
            digest.update(part)
    return match.start(1), match[1], digest.hexdigest().encode()


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
            f"path = {str(path)!r}: a trace of format {version!r}, made by asyncsim {made_by}; "
            f"this one reads formats {_READ[0]} to {FORMAT}: use that version, or simulate again"
        )
    return header
