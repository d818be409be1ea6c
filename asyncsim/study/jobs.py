"""Run the jobs of a study: an executor computes them, the study's folder keeps them, and a resumed study reads them.

A job brings rows of tables: a run one row of ``summary.csv``, a measurement rows of any tables. Whatever the order in
which jobs end, the tables have their rows in the order of the study.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from asyncsim.base import hooks
from asyncsim.base.console import note, on_a_terminal, tell
from asyncsim.base.errors import InputError
from asyncsim.base.files import read_table, require_plain, set_aside, unsealed, write_csv, write_sealed
from asyncsim.study import results
from asyncsim.study.config import StudyOptions
from asyncsim.study.executor import Executor, JobError, Local

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.problems.problem import Problem

#: The rows of tables, by the names of their files.
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


class Result(NamedTuple):
    """What a study returns."""

    folder: Path  #: where everything was written
    summary: "pd.DataFrame"  #: one row per run, or whatever a study is of that has none; also in ``summary.csv``


class Job(NamedTuple):
    """A run or a measurement, independent of all others."""

    name: str  #: as the user reads it
    place: str  #: the file or folder, inside that of the study, where its result is kept
    function: Callable[..., Any]  #: what an executor calls, with these arguments
    arguments: tuple[Any, ...]
    #: From the study's folder and what the function has returned: writes it, and returns the rows.
    keep: Callable[[Path, Any], Tables]
    #: From the study's folder to the rows of what an earlier attempt has kept there; None if there is nothing, or
    #: nothing that can be used.
    read: Callable[[Path], Tables | None]
    labels: Mapping[str, Any] = {}  #: columns that tell which it is, in the row of one that has failed
    errors: str = results.SUMMARY  #: the table that gets this row
    say: Callable[[Tables], str] = lambda tables: ""  #: from the rows to a few words about them
    #: Whether the function writes to its place itself, and can go on there: it gets the study's folder first. Then the
    #: study's folder is kept as soon as one has begun.
    in_folder: bool = False


def measurement(name: str, function: Callable[..., Tables], *arguments: Any, place: str = "", **rest: Any) -> Job:
    """Return a job whose rows are kept as they are, as values of JSON.

    ``place`` is their file without its suffix, by default the job's name in ``parts``; ``rest``: other fields of `Job`.
    """
    place = f"{place or f'parts/{name}'}.json"

    def keep(folder: Path, tables: Tables) -> Tables:
        write_sealed(folder / place, {"tables": tables})
        return tables

    def read(folder: Path) -> Tables | None:
        if not require_plain(folder / place).exists():
            return None
        try:
            tables: Tables = unsealed(folder / place)["tables"]
            return tables
        except (OSError, ValueError, KeyError) as error:
            aside = set_aside(folder, place)
            note(f"{folder / place}: damaged ({error}): moved to {aside}, and computed again")
            return None

    return Job(name, place, function, arguments, keep, read, **rest)


class Runner:
    """Runs jobs into a folder, and writes their tables whenever one has ended."""

    def __init__(self, folder: Path, executor: Executor):
        self._folder, self._executor = folder, executor
        self.jobs: list[Job] = []
        self._ended: dict[int, Tables] = {}
        self.failed: dict[int, Tables] = {}  #: the rows of their errors, by the places of the jobs

    def run(self, jobs: Sequence[Job]) -> None:
        """Compute those of some jobs that the folder has not yet."""
        places = range(len(self.jobs), len(self.jobs) + len(jobs))
        self.jobs += jobs
        for place in places:
            found = self.jobs[place].read(self._folder)
            if found is not None:
                self._ended[place] = found
                self._tell(place, "read")
        missing = [place for place in places if place not in self._ended]
        if len(missing) < len(places) or any(job.in_folder for job in jobs):
            self._write()
        wanted = [self.jobs[place] for place in missing]
        calls = [(job.function, *([self._folder] if job.in_folder else []), *job.arguments) for job in wanted]
        told = set()
        # On a terminal: how many have ended, at what rate, and the time left.
        with tqdm(total=len(calls), desc="runs", unit="run", disable=not on_a_terminal(), leave=False) as bar:
            for done in self._executor.map(_timed, calls):
                bar.update()
                place = missing[done.place]
                job = self.jobs[place]
                if isinstance(done.value, JobError):
                    row = {**job.labels, "status": results.FAILED, "error": done.value.error}
                    self.failed[place] = {job.errors: [row]}
                    if done.value.error not in told:  # of each error the traceback once; a job that was lost has none
                        told.add(done.value.error)
                        if done.value.traceback:
                            tell(done.value.traceback.rstrip())
                    self._write()
                    self._tell(place, f"failed: {done.value.error}")
                else:
                    value, seconds = done.value
                    self._ended[place] = job.keep(self._folder, value)
                    self._write()
                    # Wall-clock times are said, not written: the same configuration writes the same bytes.
                    self._tell(place, f"in {seconds:.1f} s")

    @property
    def missing(self) -> list[str]:
        """Where the jobs that have not ended would be kept."""
        return [job.place for place, job in enumerate(self.jobs) if place not in self._ended]

    def tables(self) -> "dict[str, pd.DataFrame]":
        """Return the rows of each table in the order of the jobs."""
        import pandas as pd

        rows: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        begun: dict[int, Tables] = {
            place: {results.SUMMARY: [{**job.labels, "status": results.UNFINISHED}]}
            for place, job in enumerate(self.jobs)
            if job.in_folder and place not in {**self._ended, **self.failed}
        }
        # The columns come in the order of a row that has all; those that failed have few.
        for place, tables in [*sorted(self._ended.items()), *sorted(self.failed.items()), *begun.items()]:
            for name, own in tables.items():
                rows.setdefault(name, []).extend((place, row) for row in own)
        return {
            name: pd.DataFrame([row for _, row in own], index=[place for place, _ in own])
            .sort_index(kind="stable")
            .reset_index(drop=True)
            for name, own in rows.items()
        }

    def _write(self) -> None:
        for name, table in self.tables().items():
            write_csv(self._folder / name, table)

    def _tell(self, place: int, how: str) -> None:
        """Say that a job has ended: what is said is written."""
        job, found = self.jobs[place], self._ended.get(place)
        said = job.say(found) if found is not None else ""
        text = f"{job.name}: {f'{said}, ' if said else ''}{how}"
        tell(f"[{len(self._ended) + len(self.failed)}/{len(self.jobs)}] {text}")


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started


def run_jobs(
    study: str,
    config: StudyOptions,
    record: Mapping[str, Any],
    jobs: Sequence[Job],
    executor: contextlib.AbstractContextManager[Executor],
    conclude: "Callable[[Path, pd.DataFrame], None]",
    follow: "Callable[[Path, pd.DataFrame], Sequence[Job]] | None" = None,
) -> Result:
    """Run the jobs of a study into a new folder, or those that are missing in an old one, and conclude.

    A job that fails is a row with its error; the study ends with an error only if nothing else is in its summary.

    ``study``: its name. ``record``: what the results depend on, for ``config.json``. ``executor``: that gives what
    computes them, `opened` say. ``conclude``: from the folder and the summary, without what has failed: draws the
    figures and prints the tables of what there is. ``follow``: from the folder and the summary of these jobs to more of
    them, chosen by it, which are run then. After ``conclude`` it is said what the folder holds.

    A KeyboardInterrupt, or InputError, is passed on; tables and figures of what ended are there then, and
    ``config.json`` names what is missing.
    """
    place = results.new_folder(config.out, study, resumable=True)
    if config.resume is not None:
        place = results.old_folder(config.resume, record)

    def ends(folder: Path, ended: "pd.DataFrame") -> None:
        with hooks.on_a_page(folder):
            if unfinished := results.unfinished(folder):
                print(f"{unfinished}; tables and figures are of these")
            conclude(folder, ended)
        results.say_written(folder)

    started = time.perf_counter()
    with place as folder, executor as computing:
        runner = Runner(folder, computing)
        # Whatever ends the process, what it leaves does not look complete.
        results.write_config(folder, record, [job.place for job in jobs], len(jobs))
        results.write_made(folder)
        results.remember(folder)
        try:
            runner.run(jobs)
            if follow is not None and len(ended := _ended(folder)):
                runner.run(follow(folder, ended))
        except (KeyboardInterrupt, InputError):
            with contextlib.suppress(InputError, OSError):
                results.write_config(folder, record, runner.missing, len(runner.jobs), interrupted=True)
                results.write_made(folder, time.perf_counter() - started)
                if len(ended := _ended(folder)):
                    ends(folder, ended)
            raise
        results.write_config(folder, record, runner.missing, len(runner.jobs))
        results.write_made(folder, time.perf_counter() - started)
        summary = runner.tables()[results.SUMMARY]
        failed, tables = len(runner.failed), dict.fromkeys(name for rows in runner.failed.values() for name in rows)
        ended = _ended(folder)
        if not len(ended):
            raise InputError(f"all {failed} runs failed, the first with {summary['error'].iloc[0]}")
        ends(folder, ended)
        if failed:
            note(
                f"{failed} of {len(runner.jobs)} runs failed; {' and '.join(tables)} has their errors, and "
                f"{results.resume_option(folder)} tries them again"
            )
    return Result(folder, summary)


def read_summary(folder: Path) -> "pd.DataFrame":
    """Read the rows of a study's summary that have a run, not those that failed or are under way."""
    summary = read_table(folder / results.SUMMARY)
    if "status" not in summary:
        return summary
    kept = summary[~summary["status"].isin((results.FAILED, results.UNFINISHED))].drop(columns="error", errors="ignore")
    # Measurements have a status only beside others that failed.
    return (kept.drop(columns="status") if kept["status"].isna().all() else kept).reset_index(drop=True)


def _ended(folder: Path) -> Any:
    """Return the summary of what has ended; an empty list before its first row is written."""
    return read_summary(folder) if (folder / results.SUMMARY).exists() else []


@contextlib.contextmanager
def opened(config: StudyOptions, replays: "Iterable[tuple[Problem, int]]") -> Iterator[Executor]:
    """Return the executor that a config asks for, for the length of a ``with`` block.

    ``replays``: the problems that jobs replay, with how many workers; the largest decide how many are computed at once.
    """
    if config.executor == "local":
        from asyncsim.replays.tuning import replays_at_once

        yield Local(min(itertools.starmap(replays_at_once, replays)))
        return
    from asyncsim.study.ray_executor import RayExecutor, joined

    with joined(config.address):
        yield RayExecutor(config.cpus_per_run, config.accelerators_per_run, tpu=config.device == "tpu")
