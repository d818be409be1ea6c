"""Run the jobs of a study: an executor computes them, the study's folder keeps them, and a resumed
study reads them.

A job brings rows of tables: a run one row of ``summary.csv``, a measurement rows of any tables.
Whatever the order in which jobs end, the tables have their rows in the order of the study.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.base import hooks
from asyncsim.base.console import Progress, note, tell
from asyncsim.base.errors import InputError
from asyncsim.base.files import (
    field_values,
    folder_name,
    plain,
    read_table,
    set_aside,
    unsealed,
    write_csv,
    write_json,
    write_sealed,
)
from asyncsim.study import results
from asyncsim.study.config import JobOptions
from asyncsim.study.executor import InOrder, JobError, Threads, completions

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.problems.problem import Problem

#: The rows of tables, by the names of their files.
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


class Result(NamedTuple):
    """The result of a study."""

    folder: Path  #: where everything was written
    summary: "pd.DataFrame"  #: one row per run or per measurement; also in ``summary.csv``


class Job(NamedTuple):
    """A run or a measurement, independent of all others."""

    name: str  #: as the user reads it
    place: str  #: the file or folder of its result, inside the study's folder
    function: Callable[..., Any]  #: an executor calls it with these arguments
    arguments: tuple[Any, ...]
    #: Writes the function's result into the study's folder, and returns the rows.
    keep: Callable[[Path, Any], Tables]
    #: Returns the rows of an earlier attempt from the study's folder; None if there is no usable
    #: result.
    read: Callable[[Path], Tables | None]
    labels: Mapping[str, Any] = {}  #: columns that identify the job in the row of its error
    errors: str = results.SUMMARY  #: the table that gets this row
    say: Callable[[Tables], str] = lambda tables: ""  #: describes the rows in a few words
    #: Whether the function itself writes to the place, and can resume there: its first argument is
    #: the study's folder, which then remains as soon as such a job has begun.
    in_folder: bool = False


def measurement(
    name: str, function: Callable[..., Tables], *arguments: Any, folder: str = "parts", **rest: Any
) -> Job:
    """Return a job whose rows are stored as JSON, in a file with the job's name.

    ``folder``: the file's folder, inside the study's; ``rest``: other fields of `Job`.
    """
    place = f"{folder}/{folder_name(name)}.json"

    def keep(results_folder: Path, tables: Tables) -> Tables:
        write_sealed(results_folder / place, {"tables": tables})
        return tables

    def read(results_folder: Path) -> Tables | None:
        file = results_folder / place
        if not file.exists():
            return None
        try:
            tables: Tables = unsealed(file)["tables"]
            return tables
        except (OSError, ValueError, KeyError) as error:
            moved = set_aside(results_folder, place)
            note(f"{file}: damaged ({error}): moved to {moved}, and computed again")
            return None

    return Job(name, place, function, arguments, keep, read, **rest)


class Runner:
    """Runs jobs into a folder, and writes their tables after each job."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.jobs: list[Job] = []
        self._ended: dict[int, Tables] = {}
        self.failed: dict[int, Tables] = {}  #: the rows of their errors, by the places of the jobs

    def run(self, jobs: Sequence[Job], executor: futures.Executor) -> None:
        """Compute the jobs whose results are not in the folder yet."""
        places = range(len(self.jobs), len(self.jobs) + len(jobs))
        self.jobs += jobs
        for place in places:
            tables = self.jobs[place].read(self._folder)
            if tables is not None:
                self._ended[place] = tables
                self._tell(place, "read")
        missing = [place for place in places if place not in self._ended]
        if len(missing) < len(places) or any(job.in_folder for job in jobs):
            self._write()
        pending = [self.jobs[place] for place in missing]
        calls = [
            (job.function, *([self._folder] if job.in_folder else []), *job.arguments)
            for job in pending
        ]
        errors = set()
        started = time.time()
        with Progress(len(calls), "runs", "run") as bar:
            for count, completion in enumerate(completions(executor, _timed, calls), start=1):
                bar.advance(count)
                bar.say(expected_end(started, count, len(calls)))
                place = missing[completion.place]
                job = self.jobs[place]
                if isinstance(completion.value, JobError):
                    row = {**job.labels, "status": results.FAILED, "error": completion.value.error}
                    self.failed[place] = {job.errors: [row]}
                    if (
                        completion.value.error not in errors
                    ):  # one traceback per error; a lost job has none
                        errors.add(completion.value.error)
                        if completion.value.traceback:
                            tell(completion.value.traceback.rstrip())
                    self._write()
                    self._tell(place, f"failed: {completion.value.error}")
                else:
                    if not self._folder.is_dir():
                        raise InputError(
                            f"out = {str(self._folder)!r}: was removed while this ran; nothing "
                            "more is written; start again with a folder that stays"
                        )
                    value, seconds = completion.value
                    self._ended[place] = job.keep(self._folder, value)
                    self._write()
                    # Wall-clock times are printed, not written: the same configuration writes the
                    # same bytes.
                    self._tell(place, f"in {seconds:.1f} s")

    @property
    def missing(self) -> list[str]:
        """The places of the jobs that have not ended."""
        return [job.place for place, job in enumerate(self.jobs) if place not in self._ended]

    def tables(self) -> "dict[str, pd.DataFrame]":
        """Return the rows of each table in the order of the jobs."""
        import pandas as pd

        rows: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        started: dict[int, Tables] = {
            place: {results.SUMMARY: [{**job.labels, "status": results.UNFINISHED}]}
            for place, job in enumerate(self.jobs)
            if job.in_folder and place not in {**self._ended, **self.failed}
        }
        # The columns have the order of a complete row; rows of failed jobs have few.
        for place, tables in [
            *sorted(self._ended.items()),
            *sorted(self.failed.items()),
            *started.items(),
        ]:
            for name, entries in tables.items():
                rows.setdefault(name, []).extend((place, row) for row in entries)
        return {
            name: pd.DataFrame([row for _, row in entries], index=[place for place, _ in entries])
            .sort_index(kind="stable")
            .reset_index(drop=True)
            for name, entries in rows.items()
        }

    def _write(self) -> None:
        for name, table in self.tables().items():
            write_csv(self._folder / name, table)

    def _tell(self, place: int, how: str) -> None:
        """Print that a job has ended; its results are written by then."""
        job, tables = self.jobs[place], self._ended.get(place)
        words = job.say(tables) if tables is not None else ""
        text = f"{job.name}: {f'{words}, ' if words else ''}{how}"
        tell(f"[{len(self._ended) + len(self.failed)}/{len(self.jobs)}] {text}")


def expected_end(started: float, ended: int, count: int) -> str:
    """Estimate the time of day at which jobs end, from the mean time of those that have ended."""
    now = time.time()
    end = time.localtime(now + (now - started) / ended * (count - ended))
    is_today = end[:3] == time.localtime(now)[:3]
    return time.strftime("end about %H:%M" if is_today else "end about %d %b %H:%M", end)


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started


def run_jobs(
    study: str,
    config: JobOptions,
    record: Mapping[str, Any],
    jobs: Sequence[Job],
    executor: contextlib.AbstractContextManager[futures.Executor],
    conclude: "Callable[[Path, pd.DataFrame], None]",
    follow: "Callable[[Path], Sequence[Job]] | None" = None,
    following: contextlib.AbstractContextManager[futures.Executor] | None = None,
) -> Result:
    """Run the jobs of a study into a new folder, or the missing jobs of an old folder, and
    conclude.

    A failed job is a row with its error; the study ends with an error only if all jobs failed.

    ``study``: its name. ``record``: the content of ``config.json``, everything that the results
    depend on. ``executor``: a context that yields the executor, as `executor_of` does.
    ``conclude(folder, summary)`` draws the figures and prints the tables of the finished runs; a
    list of the folder's files follows. ``follow(folder)`` returns further jobs, for the executor
    ``following`` or else the same one.

    After a KeyboardInterrupt or InputError, which is passed on, the folder has tables and figures
    of the finished runs, and ``config.json`` names the missing runs.
    """
    record = {"study": study, **record}
    place = results.new_folder(config.out, study, resumable=True)
    if config.resume is not None:
        place = results.old_folder(config.resume, record)

    def ends(folder: Path, ended: "pd.DataFrame") -> None:
        with hooks.on_a_page(folder):
            conclude(folder, ended)
        results.say_written(folder)

    started = time.perf_counter()
    with place as folder, executor as computing:
        runner = Runner(folder)
        # Whatever ends the process, the folder does not look complete.
        results.write_config(folder, record, [job.place for job in jobs], len(jobs))
        results.write_origin(folder)
        results.remember(folder)
        try:
            runner.run(jobs, computing)
            if follow is not None:
                with following or contextlib.nullcontext(computing) as further:
                    runner.run(follow(folder), further)
        except (KeyboardInterrupt, InputError):
            if not folder.is_dir():  # removed meanwhile
                raise
            with contextlib.suppress(InputError, OSError):
                results.write_config(
                    folder, record, runner.missing, len(runner.jobs), interrupted=True
                )
                results.write_origin(folder, time.perf_counter() - started)
                if len(ended := _ended(folder)):
                    ends(folder, ended)
            raise
        results.write_config(folder, record, runner.missing, len(runner.jobs))
        results.write_origin(folder, time.perf_counter() - started)
        written = runner.tables()
        summary = written.get(results.SUMMARY, next(iter(written.values())))
        failed, tables = (
            len(runner.failed),
            dict.fromkeys(name for rows in runner.failed.values() for name in rows),
        )
        ended = _ended(folder)
        if not len(ended):
            raise InputError(f"all {failed} runs failed, the first with {summary['error'].iloc[0]}")
        ends(folder, ended)
        if failed:
            note(
                f"{failed} of {len(runner.jobs)} runs failed; {' and '.join(tables)} has their "
                "errors, and "
                f"{results.resume_option(folder)} tries them again"
            )
    return Result(folder, summary)


@contextlib.contextmanager
def folder_of(study: str, config: Any) -> Iterator[Path]:
    """Yield a new folder for a study without jobs, which is not resumed, with its ``config.json``;
    at the end write the origin and the page, and print the names of the files.
    """
    with results.new_folder(config.out, study) as folder:
        options = {name: plain(value) for name, value in field_values(config).items()}
        command = getattr(config, results.COMMAND, None)
        del options["out"]
        write_json(folder / results.CONFIG, {"study": study, results.COMMAND: command, **options})
        with hooks.on_a_page(folder):
            yield folder
            results.write_origin(folder)
            results.remember(folder)
    results.say_written(folder)


def read_summary(folder: Path, name: str = results.SUMMARY) -> "pd.DataFrame":
    """Read the rows of finished runs of a study's table, without failed and unfinished runs."""
    summary = read_table(folder / name)
    if "status" not in summary:
        return summary
    completed = summary[~summary["status"].isin((results.FAILED, results.UNFINISHED))].drop(
        columns="error", errors="ignore"
    )
    # Measurements have a status only beside others that failed.
    return (
        completed.drop(columns="status") if completed["status"].isna().all() else completed
    ).reset_index(drop=True)


def _ended(folder: Path) -> Any:
    """Return the summary of the finished runs; an empty list before its first row is written."""
    return read_summary(folder) if (folder / results.SUMMARY).exists() else []


@contextlib.contextmanager
def executor_of(
    config: JobOptions, replays: "Iterable[tuple[Problem, int]]"
) -> Iterator[futures.Executor]:
    """Yield the executor that a config chooses.

    ``replays``: the problems of the jobs with their numbers of workers; the largest limits the
    concurrent jobs. Without any, local jobs run one after the other.
    """
    if config.executor == "local":
        from asyncsim.replays.tuning import replays_at_once

        at_once = min(itertools.starmap(replays_at_once, replays), default=1)
        with InOrder() if at_once == 1 else Threads(at_once) as executor:
            yield executor
        return
    from asyncsim.study.ray_executor import RayExecutor, joined

    with joined(config.address):
        yield RayExecutor(
            config.cpus_per_run, config.accelerators_per_run, tpu=config.device == "tpu"
        )
