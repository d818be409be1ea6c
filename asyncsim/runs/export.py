"""Export a study: tidy CSV tables of its runs, their commits and evaluations.

All cells can be read by R, by pandas and by LaTeX's pgfplots, which knows no quotes: texts contain
no commas, names of columns are letters, digits and underscores, and missing numbers are ``nan``.
"""

import os
from pathlib import Path

import pandas as pd

from asyncsim.base.console import note
from asyncsim.base.errors import reading_results, require_free
from asyncsim.base.files import free_folder, read_table, whole_folder, write_csv
from asyncsim.runs.known import find
from asyncsim.study.finished import read, study_of
from asyncsim.study.results import SUMMARY, cell_options

#: Characters that end a cell, or a line of LaTeX, and their replacements.
_UNFIT = {ord(","): ";", ord("\n"): " ", ord("\r"): " ", ord('"'): "'", ord("%"): " per cent "}


def write_tables(name: str, out: str | None = None) -> list[Path]:
    """Write the tables of a study into a new folder; return their paths.

    ``name``: a tag or a folder of results. ``out``: by default the first free folder of
    ``NAME-csv``, ``NAME-csv-2``, ... in the working folder.

    Raises
    ------
    InputError
        There are no results, they are damaged, or the folder exists.
    """
    folder = Path(name) if os.path.isdir(name) else find(name).folder
    target = require_free("out", out or free_folder(f"{folder.resolve().name}-csv"))
    with reading_results(folder):
        tables = _tables(folder)
    with whole_folder(target) as partial:
        for file, table in tables.items():
            write_csv(partial / file, tidy(table))
    return [target / file for file in tables]


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose columns and texts every reader of CSV takes as they are."""
    columns = {
        name: column.astype(str).str.translate(_UNFIT).where(column.notna(), "")
        if column.dtype.kind not in "iufb"
        else column.astype(int)
        if column.dtype.kind == "b"
        else column.astype(object).where(column.notna(), "nan")
        for name, column in table.items()
    }
    return pd.DataFrame(columns).rename(
        columns=lambda name: "".join(letter if letter.isalnum() else "_" for letter in name)
    )


def _tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the tables of a study by their files, the summary first."""
    config, study = study_of(folder)
    finished = read(folder, study)
    summary = finished.summary.reset_index(drop=True)
    tables = {SUMMARY: summary.rename_axis("run").reset_index()}
    for path in sorted(folder.glob("*.csv")):
        tables.setdefault(path.name, read_table(path))
    if "run_folder" not in summary:
        note(f"the study {study} has no runs: it has neither commits nor evaluations")
        return tables
    keys = [*cell_options(config), "workers", "method", "seed"]
    keys = [key for key in dict.fromkeys(keys) if key in summary]
    for file in ("commits", "evaluations"):
        parts = []
        for number, row in summary.dropna(subset="run_folder").iterrows():
            table = getattr(finished.run(row["run_folder"]), file)
            labels = {key: row[key] for key in keys if key not in table}
            table = table.assign(run=number, **labels)
            parts.append(table[["run", *labels, *table.columns.drop(["run", *labels])]])
        tables[f"{file}.csv"] = pd.concat(parts, ignore_index=True)
    return tables
