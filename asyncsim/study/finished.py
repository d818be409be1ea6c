"""The results in a study's folder, its printed tables and its figures."""

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.base.console import VERDICT, WIDTH, table_text, terminal_width
from asyncsim.base.errors import InputError
from asyncsim.base.files import (
    CHECKSUM,
    folder_name,
    read_table,
    read_text,
    require_real,
    set_aside,
    within,
    write_csv,
    write_json,
    write_text,
)
from asyncsim.study import load_file, results, shipped
from asyncsim.study.jobs import read_summary

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.replays.run import Run
    from asyncsim.traces.trace import Trace

#: Fewest commits per worker of a long trace: with 20 workers behind a barrier, traces of some
#: hundred commits exceed a tight bound by some per cent.
_LONG_TRACE = 1000
#: The folder with the trace of the page's timeline.
EXAMPLE = "timeline"
#: Columns of the summary that name files.
_FILES = ("trace_file", "run_folder")


#: Papers, whose figures are of several studies, by the names of their modules in ``figures/``.
PAPERS = {
    "gem": "Gradient Energy Matching (Hermans and Louppe 2018, arXiv 1805.08469)",
    "agn": "thesis and Accumulated Gradient Normalization (Hermans 2017; Hermans et al. 2017, "
    "arXiv 1710.02368)",
    "lsgd": "Leader Stochastic Gradient Descent (Teng et al. 2019, arXiv 1905.10395)",
    "ringmaster_lmo": "Ringmaster LMO (Sadiev et al. 2026, arXiv 2605.18174)",
}


class Finished(NamedTuple):
    """The results in a study's folder."""

    folder: Path
    config: dict[str, Any]  #: the content of ``config.json``
    summary: "pd.DataFrame"  #: one row per cell, method and seed

    @property
    def remedy(self) -> str:
        """The command that computes the tables of the folder again."""
        command = f"asyncsim study {self.config['study']}"
        if CHECKSUM not in self.config:  # such a study cannot be resumed
            return f"make it again with: {command} --out FOLDER"
        options = "" if results.COMMAND in self.config else "the same options and "
        return f"make it again with: {command} {options}{results.resume_option(self.folder)}"

    def require(self, columns: Sequence[str]) -> None:
        """Raise InputError unless the summary has some columns, and a value in each row of those
        that name files.
        """
        missing = [name for name in columns if name not in self.summary]
        missing = missing or [
            name for name in _FILES if name in columns and self.summary[name].isna().any()
        ]
        if missing:
            subject = (
                f"folder = {str(self.folder)!r}: its {results.SUMMARY} lacks {', '.join(missing)}"
            )
            raise InputError(f"{subject}; {self.remedy}")

    def rows(self, **values: Any) -> "pd.DataFrame":
        """Return the rows of the summary that have these values: ``rows(method="gem",
        workers=5)``.
        """
        selected = self.summary
        self.require(tuple(values))
        for name, value in values.items():
            selected = selected[selected[name] == value]
        return selected

    def runs(self, **values: Any) -> "list[Run]":
        """Load the runs of the rows that have these values."""
        return [self.run(name) for name in self.rows(**values)["run_folder"]]

    def run(self, run_folder: str) -> "Run":
        """Load the run of a row."""
        from asyncsim.replays.run import Run

        return Run.load(within(self.folder, run_folder))

    def table(self, name: str, columns: Sequence[str] = ()) -> "pd.DataFrame":
        """Read a table that the study wrote beside its summary."""
        path = within(self.folder, name)
        table = self.readable(name, lambda: read_table(path))
        missing = [column for column in columns if column not in table]
        if missing or table.empty:
            fault = f"lacks {', '.join(missing)}" if missing else "has no rows"
            raise InputError(f"{str(path)!r}: {fault}; {self.remedy}")
        return table

    def readable(self, name: str, read: "Callable[[], pd.DataFrame]") -> "pd.DataFrame":
        """Read a table; raise InputError with the reason and the remedy if that is impossible."""
        try:
            return read()
        except InputError:  # a link, for example
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no table of text"
            raise InputError(
                f"folder = {str(self.folder)!r}: its {name} cannot be read ({reason}); "
                f"{self.remedy}"
            ) from error

    def trace(self, trace_file: str) -> "Trace":
        """Load the trace of a row."""
        from asyncsim.traces.trace import Trace

        return Trace.load(within(self.folder, trace_file))


def read(folder: str | os.PathLike, study: str, columns: Sequence[str] | None = None) -> Finished:
    """Read the results of a study.

    ``columns``: required columns of the summary, which then needs a row; by default it may be
    empty.

    Raises
    ------
    InputError
        There are none in that folder, or they are another study's, or have no run or lack a column.
    """
    folder = Path(folder)
    config, recorded_study = study_of(folder)
    if recorded_study != study:
        raise InputError(
            f"folder = {str(folder)!r}: holds the study {recorded_study}, not {study}; make some "
            "with: "
            f"asyncsim study {study} --out FOLDER"
        )
    finished = Finished(folder, config, None)
    summary = finished.readable(results.SUMMARY, lambda: read_summary(folder))
    finished = finished._replace(summary=summary)
    if columns is not None and finished.summary.empty:
        fault = f"no run was finished: its {results.SUMMARY} has no row of one; {finished.remedy}"
        raise InputError(f"folder = {str(folder)!r}: {fault}")
    finished.require(columns or ())
    return finished


def study_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Read the ``config.json`` of a folder of results, and the name of its study.

    Raises
    ------
    InputError
        There is none, or it is damaged, or names no study.
    """
    subject, path = f"folder = {str(folder)!r}", folder / results.CONFIG
    try:
        config: Any = json.loads(read_text(path)) if require_real(folder) and path.exists() else {}
        if not isinstance(config, dict):
            raise ValueError("no table in JSON")
    except InputError:  # a link, for example
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON, or cut off"
        raise InputError(
            f"{subject}: its {results.CONFIG} is there but damaged ({why}); restore it, or make "
            "the results again "
            "with --out FOLDER"
        ) from error
    if not isinstance(config.get("study"), str):
        raise InputError(
            f"{subject}: no results of a study (no {results.CONFIG} that names one); give its "
            "folder"
        )
    return config, config["study"]


def present(
    folder: Path,
    tables: "Mapping[str, pd.DataFrame]",
    *parts: "str | pd.DataFrame",
    verdict: str | Sequence[str] = "",
    example: "tuple[str, Trace] | None" = None,
) -> None:
    """Write the tables of a study into its folder, draw its figures, print its report.

    Parameters
    ----------
    folder : Path
        Of the study. The report is written as text, and as data for the study's page.
    tables : Mapping[str, pd.DataFrame]
        Tables by the names of their files.
    *parts : str or pd.DataFrame
        The report: texts, of which empty ones are skipped, and tables of texts, as
        `asyncsim.study.columns.titled` returns.
    verdict : str or Sequence[str], optional
        The answer to the study's question, one for each setting, the heading of the page. Further
        lines explain it.
    example : tuple[str, Trace], optional
        A trace and its name, for the timeline on the page of a study that saves no runs.
    """
    for name, table in tables.items():
        write_csv(folder / name, table)
    if example is not None:
        name, trace = example
        if os.path.lexists(folder / EXAMPLE):
            set_aside(folder, EXAMPLE)
        trace.save(folder / EXAMPLE / f"{folder_name(name)}.parquet")
    draw(folder)
    unfinished = results.unfinished(folder)
    notes = [f"note: {text}" for text in results.config_of(folder).get(results.NOTES, [])]
    notes += [f"{unfinished}; tables and figures are of these"] if unfinished else []
    report = [part for part in (*notes, *parts) if not isinstance(part, str) or part]
    verdicts = list(filter(None, [verdict] if isinstance(verdict, str) else verdict))
    answer = [
        {"text": part}
        if isinstance(part, str)
        else {"columns": list(map(str, part)), "rows": part.to_numpy().tolist()}
        for part in report
    ]
    write_json(folder / results.ANSWER, {"verdicts": verdicts, "parts": answer})
    report += [f"{VERDICT}{text}" for text in verdicts]

    write_text(folder / results.REPORT, f"{_printed(report, WIDTH)}\n")
    print(_printed(report, terminal_width()))


def _printed(report: "Sequence[str | pd.DataFrame]", width: int) -> str:
    """Write the parts of a report; a line is left free above the text that introduces a table."""
    texts = [part if isinstance(part, str) else table_text(part, width) for part in report]
    for number in range(1, len(report) - 1):
        if isinstance(report[number], str) and not isinstance(report[number + 1], str):
            texts[number] = f"\n{texts[number]}"
    return "\n".join(texts)


def answer_of(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the verdicts of a study and the parts of its report, as `present` wrote them.

    Both are empty without a report; a stranger may have written it.
    """
    table = results.json_table(folder / results.ANSWER)
    verdicts: Any = table.get("verdicts")
    parts: Any = table.get("parts")
    if not (_are(str, verdicts) and _are(dict, parts)):
        return [], []
    return verdicts, [part for part in parts if _is_part(part)]


def _is_part(part: Mapping[str, Any]) -> bool:
    columns: Any = part.get("columns")
    rows: Any = part.get("rows")
    is_table = _are(str, columns) and _are(list, rows)
    is_table = is_table and all(_are(str, row) and len(row) == len(columns) for row in rows)
    return isinstance(part.get("text"), str) or is_table


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def draw(folder: Path) -> list[Path]:
    """Draw the shipped figures of a study, if there are any, into the folder of its results.

    The study's name selects the figures; the study is never imported.
    """
    config, study = study_of(folder)
    comparison = figures("comparison").draw(folder, study) if "compared" in config else []
    if study not in PAPERS and study in {path.stem for path in shipped("figures").glob("[!_]*.py")}:
        return [*comparison, *figures(study).draw(folder)]
    papers = [figures(paper).draw_study(study, folder) for paper in PAPERS]
    return [*comparison, *itertools.chain.from_iterable(papers)]


def figures(name: str) -> ModuleType:
    """Import the shipped figures of a paper or of a study."""
    path = shipped("figures") / name / "__init__.py"
    path = path if path.exists() else path.parent.with_suffix(".py")
    return load_file(f"asyncsim.figures.{name}", path)


class TheoryValue(NamedTuple):
    """The theoretical value of a quantity if ``exact``, else an upper bound."""

    value: float
    name: str
    exact: bool


def trace_means(traces: "pd.DataFrame", workers: int) -> "pd.Series":
    """Return the means of the trace statistics in a study's summary, with the names of
    `Trace.summary`.

    Also ``steps``, the commits per worker of a trace, and ``least`` and ``most``, the commits of a
    worker relative to the mean.
    """
    mean = (
        traces.filter(regex="^trace\\.").mean().rename(lambda column: column.removeprefix("trace."))
    )
    mean["steps"] = (mean["commits"] + mean["warm_up"]) / workers
    mean["least"], mean["most"] = workers * mean["share_min"], workers * mean["share_max"]
    return mean


def with_theory(
    theory: TheoryValue | None, measured: float, digits: int, steps: float
) -> tuple[str, str]:
    """Return a measured value and its theoretical value as texts; without theory the second is
    empty.

    ``digits``: after the point. ``steps``: commits per worker of the trace: a short trace may
    exceed the bound of the long run, which the text then says.
    """
    value = f"{measured:.{digits}f}"
    if theory is None:
        return value, ""
    beyond = round(measured, digits) > round(theory.value, digits)
    exceeded = not theory.exact and beyond and steps < _LONG_TRACE
    why = f"{theory.name}, which short traces exceed" if exceeded else theory.name
    return value, f"{'' if theory.exact else 'at most '}{theory.value:.{digits}f} ({why})"
