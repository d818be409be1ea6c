"""The parquet file of a trace: one row, with a list for each column of its tables.

The header has the format, the source, the units, and the SHA-256 of all of these and of the tables.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from asyncsim.base.errors import InputError, TooLarge, require_free, require_memory, require_path
from asyncsim.base.files import field_values, open_file, write_whole
from asyncsim.clusters.cluster import Cluster
from asyncsim.traces.columns import TABLES, Source, arrays_of, table_of
from asyncsim.traces.samples import SAMPLE_OUTCOMES, RolloutTables
from asyncsim.traces.tables import Tables

#: Raised whenever the files change; other formats are refused.
FORMAT = 5
_HEADER = b"asyncsim"
_T = TypeVar("_T", bound=Tables)


def save_trace(trace: Tables, path: str | os.PathLike) -> Path:
    """Write a trace; see `Trace.save`."""
    return write_trace(trace, require_free("path", path))


def write_trace(trace: Tables, path: Path) -> Path:
    """Write a trace; replace an existing file."""
    tables = {name: getattr(trace, name) for name in TABLES}
    if trace.rollouts is not None:
        tables |= trace.rollouts._asdict()
    columns = {
        f"{name}.{column}": pa.ListArray.from_arrays([0, len(values)], pa.array(values))
        for name, table in tables.items()
        for column, values in table.items()
    }
    source = field_values(trace, Source)
    source["cluster"] = None if trace.cluster is None else trace.cluster.to_dict()
    units = {name: "s" for name in columns if name.endswith(("time", "begin", "end", "detected"))}
    header = {"format": FORMAT, "source": source, "units": units}
    text = json.dumps({**header, "sha256": _digest(header, tables)}, sort_keys=True)
    table = pa.table(columns).replace_schema_metadata({_HEADER: text})
    checked = {"write_page_checksum": True, "write_statistics": False}
    return write_whole(path, lambda file: pq.write_table(table, file, **checked))


def load_trace(kind: type[_T], path: str | os.PathLike) -> _T:
    """Read a trace; see `Trace.load`."""
    path = require_path("path", path)
    if not path.exists():
        raise InputError(f"path = {str(path)!r}: no such file; give one that Trace.save wrote")
    try:
        with (
            open_file(path) as file,
            pq.ParquetFile(file, page_checksum_verification=True) as parquet,
        ):
            header = json.loads((parquet.schema_arrow.metadata or {}).get(_HEADER, b"{}"))
            if header.get("format") == FORMAT:
                _require_room(path, parquet.metadata)
                return _trace(kind, header, parquet.read())
    except TooLarge:
        raise
    except Exception as error:  # of any origin: it is a user's file
        reason = " ".join(str(error).split())
        raise InputError(
            f"path = {str(path)!r}: a damaged trace ({reason}); copy it again, or make it again"
        ) from error
    if "format" not in header:
        raise InputError(f"path = {str(path)!r}: not a trace; give a file that Trace.save wrote")
    raise InputError(
        f"path = {str(path)!r}: a trace of format {header['format']!r}, this asyncsim reads "
        f"{FORMAT}; use the version that wrote it, or simulate again"
    )


def _require_room(path: Path, metadata: pq.FileMetaData) -> None:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(
        group.column(number).num_values for group in groups for number in range(group.num_columns)
    )
    require_memory(f"path = {str(path)!r}", "a trace of its length", 8.0 * values)


def _trace(kind: type[_T], header: dict[str, Any], stored: pa.Table) -> _T:
    columns: dict[str, dict[str, Any]] = {}
    for name in stored.column_names:
        table, _, column = name.partition(".")
        columns.setdefault(table, {})[column] = stored[name][0].values.to_pandas()
    tables = {name: table_of(name, columns[name]) for name in TABLES}
    rollouts = None
    if "samples" in columns:
        rollouts = RolloutTables(*(pd.DataFrame(columns[name]) for name in RolloutTables._fields))
        outcome = pd.Categorical(rollouts.samples["outcome"], SAMPLE_OUTCOMES)
        rollouts = rollouts._replace(samples=rollouts.samples.assign(outcome=outcome))
    digest = header.pop("sha256")
    if digest != _digest(header, tables | (rollouts._asdict() if rollouts else {})):
        raise ValueError("its checksum is of other contents")
    source = header["source"]
    if source["cluster"] is not None:
        source["cluster"] = Cluster.from_dict(source["cluster"])
    if isinstance(source["groups"], list):
        source["groups"] = tuple(source["groups"])
    return kind(**source, **tables, rollouts=rollouts)


def _digest(header: dict[str, Any], tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the SHA-256 of a header and of tables: names, types and values of their columns."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, table in tables.items():
        for column, values in zip(table, arrays_of(table, *table), strict=True):
            digest.update(f"{name}.{column} {values.dtype} {len(values)}".encode())
            digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
