"""A trace as a parquet file: the rows as its columns, all else in its header."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from asyncsim.clusters.cluster import Cluster
from asyncsim.errors import InputError, require_free, require_path
from asyncsim.files import write_whole
from asyncsim.traces.columns import COLUMNS, OUTCOMES, Source, no_open_reads, nobody_present

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace

#: Raised by one whenever the files change.
FORMAT = 2
#: The format of the files that do not tell when messages set off.
_WITHOUT_SEND_TIMES = 1
_METADATA = b"asyncsim"
#: Small tables that travel in the header, by name, with what makes an empty one.
_SIDE_TABLES = {"open_reads": no_open_reads, "present": nobody_present}


def save(trace: "Trace", path: str | os.PathLike) -> Path:
    """Write a trace; see `Trace.save`."""
    path = require_free("path", path)
    table = pa.Table.from_pandas(trace.frame[list(COLUMNS)], preserve_index=False)
    header = json.dumps(_header(trace), sort_keys=True).encode()
    table = table.replace_schema_metadata({_METADATA: header})
    return write_whole(path, lambda partial: pq.write_table(table, partial, write_page_checksum=True))


def load(kind: "type[Trace]", path: str | os.PathLike) -> "Trace":
    """Read a trace; see `Trace.load`."""
    path = require_path("path", path)
    table = _read_table(path)
    header = _read_header(path, table.schema.metadata)
    try:
        frame = table.replace_schema_metadata(None).to_pandas()
        if header["format"] == _WITHOUT_SEND_TIMES:
            frame = frame.assign(send_time=np.nan)
        frame["outcome"] = pd.Categorical(frame["outcome"], OUTCOMES)
        cluster = header["source"].pop("cluster")
        source = Source(**header["source"], cluster=None if cluster is None else Cluster.from_dict(cluster))
        rest = {name: _unpack(header[name], empty()) for name, empty in _SIDE_TABLES.items()}
        return kind(frame, source, **rest)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"path = {str(path)!r}: a damaged trace ({error}); copy it again or make it again") from error


def _header(trace: "Trace") -> dict[str, Any]:
    """Return what the file holds besides the rows: plain values."""
    source = {entry.name: getattr(trace.source, entry.name) for entry in fields(Source)}
    if trace.cluster is not None:
        source["cluster"] = trace.cluster.to_dict()
    sides = {name: getattr(trace, name).to_dict("list") for name in _SIDE_TABLES}
    return {"kind": "trace", "format": FORMAT, "units": COLUMNS, "source": source, **sides}


def _unpack(columns: dict[str, list], empty: pd.DataFrame) -> pd.DataFrame:
    """Return a side table with the types it had."""
    return pd.DataFrame({name: np.asarray(columns[name], empty[name].dtype) for name in empty})


def _read_table(path: Path) -> Any:
    if not path.exists():
        raise InputError(f"path = {str(path)!r}: no such file; give one that Trace.save wrote")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"path = {str(path)!r}: cannot be read as parquet ({error}); it may be truncated or of "
            "another kind: copy it again, make it again, or give a file that Trace.save wrote"
        ) from error


def _read_header(path: Path, stored: dict[bytes, bytes] | None) -> dict[str, Any]:
    try:
        header = json.loads((stored or {})[_METADATA])
        kind, version = header["kind"], header["format"]
    except (KeyError, TypeError, ValueError):
        kind, version = None, None
    if kind != "trace":
        raise InputError(f"path = {str(path)!r}: not a trace; give a file that Trace.save wrote")
    if version not in (_WITHOUT_SEND_TIMES, FORMAT):
        made_by = header.get("source", {}).get("versions", {}).get("asyncsim", "unknown")
        raise InputError(
            f"path = {str(path)!r}: a trace of format {version!r}, made by asyncsim {made_by}; this one reads "
            f"formats {_WITHOUT_SEND_TIMES} and {FORMAT}: use that version, or simulate again"
        )
    return header
