"""Studies of independent measurements, each some rows of a few tables; runs and traces are not kept."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.errors import InputError
from asyncsim.files import write_csv
from asyncsim.study import results
from asyncsim.study.config import StudyOptions
from asyncsim.study.executor import Failure, Failures, map_kept, opened
from asyncsim.study.sweep import study_folder
from asyncsim.wording import note, tell

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.problems.problem import Problem
    from asyncsim.study.executor import Executor

#: The rows of tables, by the names of their files.
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


class Job(NamedTuple):
    """A measurement.

    Attributes
    ----------
    name : str
        As the user is told.
    arguments : tuple
        Of the function that measures.
    file : str, optional
        Name of its file in ``parts``, without a suffix; by default that of the job.
    labels : mapping
        Columns that tell which it is, in the row of one that has failed.
    """

    name: str
    arguments: tuple[Any, ...]
    file: str | None = None
    labels: Mapping[str, Any] = {}


class Collected(NamedTuple):
    """What the measurements of a study have brought: the rows of those that did not fail, and those of the others."""

    tables: "dict[str, pd.DataFrame]"
    failed: list[Mapping[str, Any]]


def _nothing(tables: Tables) -> str:
    return ""


def collect(
    executor: "Executor",
    function: Callable[..., Tables],
    jobs: Sequence[Job],
    folder: Path,
    errors: str = results.SUMMARY,
    told: Callable[[Tables], str] = _nothing,
) -> Collected:
    """Measure and write the tables into a folder as results come, in the order of the jobs.

    What each job has brought has a file of its own in ``parts``; a job whose file is there is not measured again. One
    that fails is a row with its error.

    Parameters
    ----------
    executor : Executor
    function : function
        From the arguments of a job to the rows of each table: values that JSON can hold.
    jobs : sequence of Job
    folder : Path
    errors : str
        The table that has the rows of jobs that fail.
    told : function, optional
        From the rows of a job to what the user is told of them.
    """
    failures, files = Failures(), [_file(folder, job) for job in jobs]
    parts: dict[int, Tables] = {}
    failed: dict[int, Tables] = {}
    for place, value in map_kept(executor, function, [job.arguments for job in jobs], files):
        job = jobs[place]
        if isinstance(value, Failure):
            failures.tell(job.name, value)
            failed[place] = {errors: [{"job": job.name, **job.labels, "status": results.FAILED, "error": value.error}]}
        else:
            parts[place] = value
            said = told(value)
            tell(f"[{len(parts) + len(failed)}/{len(jobs)}] {job.name}{': ' if said else ''}{said}")
        for name, table in _in_order(parts | failed).items():
            write_csv(folder / name, table)
    return Collected(_in_order(parts), [row for place in sorted(failed) for row in failed[place][errors]])


def say_failed(failed: int, jobs: int, folder: Path, errors: str = results.SUMMARY) -> None:
    """Say how many measurements have failed, if any, where their errors are, and how to try them again."""
    if failed:
        note(
            f"{failed} of {jobs} measurements failed; {errors} has their errors, and {results.resume_option(folder)} "
            "tries them again"
        )


@contextlib.contextmanager
def tabulated(
    config: StudyOptions,
    study: str,
    record: Mapping[str, Any],
    function: Callable[..., Tables],
    jobs: Sequence[Job],
    replays: "Sequence[tuple[Problem, int]]",
    told: Callable[[Tables], str] = _nothing,
) -> Iterator[tuple[Path, "dict[str, pd.DataFrame]"]]:
    """Measure with the study's executor, and then go on in the study's folder; see `collect`.

    Parameters
    ----------
    config : StudyOptions
    study : str
    record : mapping
        What ``config.json`` says.
    function, jobs, told
        Those of `collect`.
    replays : sequence of (Problem, int)
        What the jobs replay, with how many workers.

    Yields
    ------
    folder : Path
    tables : dict of str to pandas.DataFrame
        The rows of the jobs that did not fail; those that did are in ``summary.csv`` with their error.

    Raises
    ------
    InputError
        A folder or a disk that cannot be written; an executor that cannot be had; all jobs failed.
    KeyboardInterrupt
        Passed on; the tables of the jobs that were finished are there then.
    """
    with study_folder(config, study, record) as folder, opened(config, replays) as executor:
        _record(folder, record, jobs)
        try:
            found = collect(executor, function, jobs, folder, told=told)
        finally:
            with contextlib.suppress(InputError, OSError):
                _record(folder, record, jobs)
        if not found.tables:
            first, *_ = found.failed
            raise InputError(f"all {len(jobs)} measurements failed, the first with {first['error']}")
        yield folder, found.tables
        say_failed(len(found.failed), len(jobs), folder)


def _file(folder: Path, job: Job) -> Path:
    """Return the file of what a job has brought."""
    return folder / "parts" / f"{job.file or job.name}.json"


def _record(folder: Path, record: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Let ``config.json`` say what the results depend on, and name the measurements that are missing."""
    absent = [job.name for job in jobs if not _file(folder, job).exists()]
    results.write_config(folder, record, absent)


def _in_order(parts: Mapping[int, Tables]) -> "dict[str, pd.DataFrame]":
    """Return the tables with the rows of each job, in the order of the jobs."""
    import pandas as pd

    rows: dict[str, list[Mapping[str, Any]]] = {}
    for place in sorted(parts):
        for name, own in parts[place].items():
            rows.setdefault(name, []).extend(own)
    return {name: pd.DataFrame(own) for name, own in rows.items()}
