"""The results of a study as they lie in its folder, and what it prints and draws of them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.base.errors import InputError
from asyncsim.base.files import CHECKSUM, read_table, read_text, within, write_csv
from asyncsim.study import load_file, results, shipped
from asyncsim.study.jobs import read_summary

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.replays.run import Run
    from asyncsim.traces.trace import Trace

#: Commits of each worker from which on a trace is no short one: of 20 workers behind a barrier a bound that is all but
#: reached is exceeded by some per cent in hundreds of them.
_LONG_TRACE = 1000
#: Columns of the summary that name files.
_FILES = ("trace_file", "run_folder")


#: Papers, whose figures are of several studies, by the names of their modules in ``figures/``.
PAPERS = {
    "gem": "Gradient Energy Matching (Hermans and Louppe 2018, arXiv 1805.08469)",
    "agn": "thesis and Accumulated Gradient Normalization (Hermans 2017; Hermans et al. 2017, arXiv 1710.02368)",
    "momentum": "Asynchrony begets Momentum (Mitliagkas et al. 2016, arXiv 1605.09774)",
    "lsgd": "Leader Stochastic Gradient Descent (Teng et al. 2019, arXiv 1905.10395)",
}


class Finished(NamedTuple):
    """The results of a study, as they lie in its folder."""

    folder: Path
    config: dict[str, Any]  #: what ``config.json`` holds
    summary: "pd.DataFrame"  #: one row per cell, method and seed

    @property
    def remedy(self) -> str:
        """What makes the tables of the folder again."""
        command = f"python -m asyncsim.study {self.config['study']}"
        if CHECKSUM not in self.config:  # of a study that cannot go on
            return f"make it again with: {command} --out FOLDER"
        options = "" if results.COMMAND in self.config else "the same options and "
        return f"make it again with: {command} {options}{results.resume_option(self.folder)}"

    def require(self, columns: Sequence[str]) -> None:
        """Raise InputError unless the summary has some columns, and a value in each row of those that name files."""
        missing = [name for name in columns if name not in self.summary]
        missing = missing or [name for name in _FILES if name in columns and self.summary[name].isna().any()]
        if missing:
            told = f"folder = {str(self.folder)!r}: its {results.SUMMARY} lacks {', '.join(missing)}"
            raise InputError(f"{told}; {self.remedy}")

    def rows(self, **values: Any) -> "pd.DataFrame":
        """Return the rows of the summary that have these values: ``rows(method="gem", workers=5)``."""
        found = self.summary
        self.require(tuple(values))
        for name, value in values.items():
            found = found[found[name] == value]
        return found

    def runs(self, **values: Any) -> "list[Run]":
        """Load the runs of the rows that have these values."""
        return [self.run(name) for name in self.rows(**values)["run_folder"]]

    def run(self, run_folder: str) -> "Run":
        """Load the run of a row."""
        from asyncsim.replays.run import Run

        return Run.load(within(self.folder, run_folder))

    def each_run(
        self, measure: "Callable[[Run], Sequence[pd.DataFrame]]", columns: Sequence[str] = ("workers", "method", "seed")
    ) -> "list[pd.DataFrame]":
        """Return the tables that a function makes of a run, each of all runs together: first these of their columns."""
        import pandas as pd

        parts = []
        for row in self.summary.to_dict("records"):
            run = self.run(row["run_folder"])
            try:
                tables = measure(run)
            except InputError as error:
                raise InputError(f"{row['run_folder']}: {error}") from error
            for table in tables:
                for place, column in enumerate(columns):
                    table.insert(place, column, row[column])
            parts.append(tables)
        return [pd.concat(found) for found in zip(*parts, strict=True)]

    def table(self, name: str, columns: Sequence[str] = ()) -> "pd.DataFrame":
        """Read a table that the study wrote beside its summary."""
        path, remedy = self.folder / name, self.remedy
        try:
            table = read_table(path)
        except FileNotFoundError as error:
            raise InputError(f"folder = {str(self.folder)!r}: no {name} there; {remedy}") from error
        except InputError:  # a link, say
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{str(path)!r}: {_damage(error)}; {remedy}") from error
        missing = [column for column in columns if column not in table]
        if missing or table.empty:
            what = f"lacks {', '.join(missing)}" if missing else "has no rows"
            raise InputError(f"{str(path)!r}: {what}; {remedy}")
        return table

    def trace(self, trace_file: str) -> "Trace":
        """Load the trace of a row."""
        from asyncsim.traces.trace import Trace

        return Trace.load(within(self.folder, trace_file))


def read(folder: str | os.PathLike, study: str, columns: Sequence[str] | None = None) -> Finished:
    """Read the results of a study.

    ``columns``: that the summary must have, and a row with them; by default it may be empty.

    Raises
    ------
    InputError
        There are none in that folder, or they are another study's, or have no run or lack a column.
    """
    folder = Path(folder)
    config, found = study_of(folder)
    if found != study:
        raise InputError(
            f"folder = {str(folder)!r}: holds the study {found}, not {study}; make some with: "
            f"python -m asyncsim.study {study} --out FOLDER"
        )
    finished = Finished(folder, config, None)
    try:
        finished = finished._replace(summary=read_summary(folder))
    except InputError:  # a link, say
        raise
    except (OSError, ValueError) as error:
        what = f"its {results.SUMMARY} {_damage(error)}; {finished.remedy}"
        raise InputError(f"folder = {str(folder)!r}: {what}") from error
    if columns is not None and finished.summary.empty:
        what = f"no run was finished: its {results.SUMMARY} has no row of one; {finished.remedy}"
        raise InputError(f"folder = {str(folder)!r}: {what}")
    finished.require(columns or ())
    return finished


def study_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Return what the ``config.json`` of a folder of results holds, and the study that it names.

    Raises
    ------
    InputError
        There is none, or it is damaged, or names no study.
    """
    told, path = f"folder = {str(folder)!r}", folder / results.CONFIG
    try:
        config: Any = json.loads(read_text(path)) if path.exists() else {}
        if not isinstance(config, dict):
            raise ValueError("no table in JSON")
    except InputError:  # a link, say
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON, or cut off"
        raise InputError(
            f"{told}: its {results.CONFIG} is there but damaged ({why}); restore it, or make the results again "
            "with --out FOLDER"
        ) from error
    if not isinstance(config.get("study"), str):
        raise InputError(f"{told}: no results of a study (no {results.CONFIG} that names one); give its folder")
    return config, config["study"]


def _damage(error: Exception) -> str:
    """Say why a table cannot be read."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror})"
    return "is empty" if type(error).__name__ == "EmptyDataError" else "is damaged: no table of text"


def outcomes(folder: Path, summary: "pd.DataFrame", by: Sequence[str]) -> str:
    """Return how the runs of each cell ended, on which problem; ``by``: columns that set the lines apart."""
    from asyncsim.study.outcome import averaged, outcome_table

    config, _ = study_of(folder)
    return f"{config['problem']}, {averaged(summary, by)}\n{outcome_table(summary, by)}"


def report(folder: Path, summary: "pd.DataFrame", by: Sequence[str]) -> None:
    """Print how the runs of each cell ended, and draw the study's figures; ``by`` as in `outcomes`."""
    present(folder, {}, outcomes(folder, summary, by))


def present(folder: Path, tables: "Mapping[str, pd.DataFrame]", *texts: str) -> None:
    """Write the tables of a study into its folder, draw its figures, and print texts, of which some may be empty."""
    for name, table in tables.items():
        write_csv(folder / name, table)
    draw(folder)
    print("\n".join(filter(None, texts)))


def draw(folder: Path) -> list[Path]:
    """Draw the shipped figures of a study, of which there may be none, into the folder of its results.

    The study's name chooses among the figures; it is never imported itself.
    """
    _, study = study_of(folder)
    if study not in PAPERS and study in {path.stem for path in shipped("figures").glob("[!_]*.py")}:
        return list(figures(study).draw(folder))
    return [path for paper in PAPERS for path in figures(paper).draw_study(study, folder)]


def figures(name: str) -> ModuleType:
    """Import the shipped figures of a paper, or of a study that has a file of its own."""
    path = shipped("figures") / name / "__init__.py"
    path = path if path.exists() else path.parent.with_suffix(".py")
    return load_file(f"asyncsim.figures.{name}", path)


class Known(NamedTuple):
    """What theory says of a quantity: its value if that is ``exact``, else the largest possible one."""

    value: float
    name: str
    exact: bool


def trace_means(traces: "pd.DataFrame", workers: int) -> "pd.Series":
    """Return the means over a cluster's traces of what a study's summary says of them, as `Trace.summary` names it.

    Beside that ``steps``, the commits per worker of a trace, and ``least`` and ``most``, the commits of a worker
    relative to the mean.
    """
    mean = traces.filter(regex="^trace\\.").mean().rename(lambda column: column.removeprefix("trace."))
    mean["steps"] = (mean["commits"] + mean["warm_up"]) / workers
    mean["least"], mean["most"] = workers * mean["share_min"], workers * mean["share_max"]
    return mean


def beside(known: Known | None, measured: float, digits: int, steps: float) -> tuple[str, str]:
    """Return a measured value and what theory says of it, as texts.

    Nothing is said of None. ``digits``: after the point. ``steps``: commits per worker of the trace: a short
    one may lie beyond what bounds the long run, which is then said.
    """
    value = f"{measured:.{digits}f}"
    if known is None:
        return value, ""
    beyond = round(measured, digits) > round(known.value, digits)
    exceeded = not known.exact and beyond and steps < _LONG_TRACE
    why = f"{known.name}, which short traces exceed" if exceeded else known.name
    return value, f"{'' if known.exact else 'at most '}{known.value:.{digits}f} ({why})"
