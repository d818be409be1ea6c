"""A study's folder of results: nothing half-written is ever taken for a result."""

import contextlib
import errno
import itertools
import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs

from asyncsim import __version__
from asyncsim.base import files
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_path
from asyncsim.base.files import (
    alone_in,
    files_below,
    flat,
    read_text,
    remove_partials,
    require_real,
    unsealed,
    write_json,
    write_sealed,
)

#: The table that every folder of results has; a folder without it has no finished run.
SUMMARY = "summary.csv"
#: The runs on which learning rates were chosen.
TRIALS = "trials.csv"
#: The table of a comparison: a row for each method at its best learning rate, the best method
#: first.
RANKING = "comparison.csv"
#: The file of everything that the results depend on; in it, the names of the missing runs and the
#: command line.
CONFIG, INCOMPLETE, COMMAND = files.CONFIG, "incomplete", "command"
#: Beside the names of the missing runs: the number of all runs.
ALL_RUNS = "all_runs"
#: In it, too: the paths of the user's own files, and their hashes; notes above the report.
FILES, NOTES = "files", "notes"
#: When, where and how long a study ran: the only file that differs between runs of the same
#: configuration.
ORIGIN = "made.json"
#: The page of a finished study.
PAGE = "report.html"
#: The printed text of a finished study, and its verdicts, texts and tables.
REPORT, ANSWER = "report.txt", "report.json"
#: In the folder of the index, the paths of results and of folders of results, a line each.
FOLDER_LIST = "folders"
#: The remedy for a folder that cannot be resumed.
RESTART = "begin again with --out FOLDER (in Python out=...)"
#: The largest file (bytes) that is read for a few numbers: a stranger's folder may hold anything.
LARGEST = 50_000_000
#: Status of a run that ended with an error: a row of the summary without a folder.
FAILED = "failed"
#: Status of a recording in progress, or of an interrupted one.
UNFINISHED = "unfinished"


@contextlib.contextmanager
def new_folder(
    out: str | os.PathLike | None, study: str, resumable: bool = False
) -> Iterator[Path]:
    """Create the folder that a study writes to; remove it if the study ends without a finished
    result.

    The study writes ``summary.csv`` after each result; an error or Ctrl-C after that leaves the
    folder in place::

        with results.new_folder(config.out, "staleness") as folder:
            ...

    The message of an interruption names the folder of the finished results and the command to
    resume. ``out`` must not exist, or be empty; None is the first free folder of ``results/STUDY``,
    ``results/STUDY-2``, ... ``resumable``: whether the study has the option ``--resume``.
    """
    folder, created = _make(None if out is None else require_path("out", out), study)
    instead = " instead of --out" if out is not None else ""
    with alone_in(folder, "out"):
        if any(folder.iterdir()):  # meanwhile
            raise _occupied(folder)
        with telling(folder, resumable, instead):
            try:
                yield folder
            except BaseException:
                if not _has_results(folder):
                    _remove_beginnings(folder, created)
                raise


def _has_results(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SUMMARY, TRIALS))


def _remove_beginnings(folder: Path, created: Sequence[Path]) -> None:
    """Remove the files that a study writes before its first result, and folders that are empty."""
    traces = [file for file in files_below(folder / "traces") if file.suffix == ".parquet"]
    for file in (folder / CONFIG, folder / ORIGIN, *traces):
        file.unlink(missing_ok=True)
    inside = [Path(place) for place, _, _ in os.walk(folder, topdown=False)]
    for path in dict.fromkeys([*inside, *created]):
        with contextlib.suppress(OSError):  # other files are inside
            path.rmdir()


@contextlib.contextmanager
def old_folder(folder: str | os.PathLike, record: Mapping[str, Any]) -> Iterator[Path]:
    """Open the folder of an unfinished study again; remove the half-written files of a killed
    process.

    ``record``: the required content of its ``config.json``, missing runs and the command line
    aside; the folder may have fewer seeds, methods or values of a grid.
    """
    folder = require_real(require_path("resume", folder))
    _require_same(folder, record)
    with alone_in(folder, "resume"), telling(folder):
        remove_partials(folder)
        yield folder


def _require_same(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise InputError unless a folder holds results of a study whose record is the same."""
    try:
        recorded = _of_results(unsealed(folder / CONFIG))
    except FileNotFoundError as error:
        raise InputError(
            f"resume = {str(folder)!r}: no results of a study; give a folder of results"
        ) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"resume = {str(folder)!r}: its {CONFIG} cannot be used ({why}); give the folder of a "
            f"study, or {RESTART}"
        ) from error
    if "study" not in recorded:
        raise InputError(
            f"resume = {str(folder)!r}: its {CONFIG} names no study; give a folder of results"
        )
    requested = _of_results(json.loads(json.dumps(record)))
    if recorded["study"] != requested.get("study"):
        raise InputError(
            f"resume = {str(folder)!r}: holds results of the study {recorded['study']}; give a "
            "folder of "
            f"{requested.get('study')}"
        )
    before, after = dict(flat(recorded)), dict(flat(requested))
    differing = [
        f"{name} = {before.get(name)!r}, not {after.get(name)!r}"
        for name in {**after, **before}
        if before.get(name) != after.get(name)
        and not _adds_runs(name, before.get(name), after.get(name))
    ]
    if differing:
        more = f"; and {counted(len(differing) - 3, 'other')}" if differing[3:] else ""
        raise InputError(
            f"resume = {str(folder)!r}: holds results of another configuration "
            f"({'; '.join(differing[:3])}{more}); give the options, files and versions of that "
            f"folder, to which seeds, methods and values of a grid may be added, or {RESTART}"
        )


def _adds_runs(name: str, before: Any, after: Any) -> bool:
    """Return whether a changed entry of the configuration only adds runs to those in the folder:
    seeds, methods, or values of a grid.
    """
    if name == "seeds":
        return isinstance(before, int) and after > before
    if isinstance(before, list) and isinstance(after, list):
        return all(value in after for value in before)
    if name.startswith(FILES):  # in Python a study's own file is unknown
        return not before or after is None
    return not before and name.startswith("hyperparameters.")


def _of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that determine the results."""
    return {
        name: value
        for name, value in config.items()
        if name not in (INCOMPLETE, ALL_RUNS, COMMAND, NOTES, files.CHECKSUM)
    }


def write_config(
    folder: Path,
    record: Mapping[str, Any],
    absent: Sequence[str],
    count: int,
    interrupted: bool = False,
) -> None:
    """Write the configuration of the results, and the names of the absent runs of ``count``."""
    missing = {INCOMPLETE: list(absent), ALL_RUNS: count} if absent or interrupted else {}
    write_sealed(folder / CONFIG, {**record, **missing})


def unfinished(folder: Path, config: Mapping[str, Any] | None = None) -> str:
    """Return ``"unfinished: 12 of 108 runs"`` of a study with missing runs; else an empty text.

    A study that was killed has not updated the list of missing runs: those in its folder count as
    finished. ``config``: the content of its ``config.json``.
    """
    config = config_of(folder) if config is None else config
    absent, count = config.get(INCOMPLETE), config.get(ALL_RUNS)
    if not isinstance(absent, list):
        return ""
    # A stranger's folder may name any path.
    names = [name for name in absent if isinstance(name, str) and name.isprintable()]
    inside = [name for name in names if not os.path.isabs(name) and ".." not in Path(name).parts]
    missing = len(absent) - sum(os.path.lexists(folder / name) for name in inside)
    if not isinstance(count, int) or count < missing:
        return f"unfinished: {counted(missing, 'run')} missing"
    bound = "" if missing else "more than "
    return f"unfinished: {count - missing:,} of {bound}{counted(count, 'run')}"


def write_origin(folder: Path, seconds: float | None = None) -> None:
    """Write a study's start, its version, its device, and its seconds so far, including earlier
    attempts.
    """
    record = json_table(folder / ORIGIN)
    record = record or {
        "id": secrets.token_hex(8),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    jax = sys.modules.get("jax")  # studies without gradients load none
    device = (
        jax.devices()[0].device_kind
        if jax is not None and seconds is not None
        else record.get("device")
    )
    record |= {
        "version": __version__,
        "device": device,
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    if seconds is not None:
        earlier = record.get("wall_time")
        record["wall_time"] = round(
            seconds + (earlier if isinstance(earlier, int | float) else 0), 3
        )
    write_json(folder / ORIGIN, record)


def index_folder() -> Path:
    """Return the folder of the index of results: ASYNCSIM_INDEX, or a folder of the user's data."""
    folder = os.environ.get("ASYNCSIM_INDEX")
    return Path(folder) if folder else platformdirs.user_data_path("asyncsim")


def listed() -> list[Path]:
    """Return the folders that studies wrote to and that users added, outside ``results`` here."""
    lines = text_in(index_folder() / FOLDER_LIST).splitlines()
    return [Path(line) for line in dict.fromkeys(lines) if os.path.isabs(line)]


def around(path: Path) -> Path | None:
    """Return the folder of results that contains a path; None without one."""
    return next((folder for folder in path.parents if config_of(folder).get("study")), None)


def remember(folder: Path, strict: bool = False) -> None:
    """Append a folder of results, or the folder around it, to the list of known folders.

    Results inside another study's, as the evidence of claims, are not added.
    ``strict``: add these, too, and raise InputError if that fails.
    """
    path = folder.absolute()
    if not strict and around(path):
        return
    path = path.parent if path.parent.name == "results" else path
    file = index_folder() / FOLDER_LIST
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if str(path).isprintable() and path not in listed():
            with file.open("a", encoding="utf-8") as stream:  # one whole line, beside others
                stream.write(f"{path}\n")
    except OSError as error:
        if strict:
            raise InputError(
                f"index = {str(file)!r}: cannot be written: {error}; set ASYNCSIM_INDEX to a "
                "folder that can"
            ) from error


def typed_in(folder: str | os.PathLike | None, study: str | None = None) -> list[str] | None:
    """Return the command line of the study in a folder; None if it is unknown, or of another study
    than ``study``.
    """
    config = config_of(Path(folder)) if folder else {}
    typed = config.get(COMMAND)
    is_typed = isinstance(typed, list) and all(isinstance(option, str) for option in typed)
    return typed if is_typed and study in (None, config.get("study")) else None


def resume_option(folder: Path) -> str:
    """Return the option that resumes a folder, quoted for a shell."""
    return f"--resume {shlex.quote(str(folder))}"


@contextlib.contextmanager
def telling(folder: Path, resumable: bool = True, instead: str = "") -> Iterator[None]:
    """Add the folder of the finished results to interruptions and bad input, and to interruptions
    how to resume.

    ``resumable``: whether the study has the option ``--resume``; ``instead``: the end of the advice
    for an unknown command line, " instead of --out".
    """
    try:
        yield
    except BaseException as error:
        finished = _has_results(folder)
        if isinstance(error, KeyboardInterrupt):
            message = (
                f"the finished results are in {folder}" if finished else "nothing was finished"
            )
            if finished and resumable:
                same_options = "the same options and " if typed_in(folder) is None else ""
                message += (
                    "; resume with "
                    f"{same_options}{resume_option(folder)}{instead if same_options else ''}"
                )
            raise KeyboardInterrupt(message) from None
        if isinstance(error, InputError) and finished:
            raise InputError(f"{error}; the finished results are in {folder}") from error
        raise


def say_written(folder: Path) -> None:
    """Print the names of a study's files: the options, folders, tables, then figures; and the
    command that opens its page.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    paths.sort(
        key=lambda path: (
            path.name != CONFIG,
            not path.is_dir(),
            path.name != SUMMARY,
            path.suffix != ".csv",
        )
    )
    print(f"\nwrote {folder}: {', '.join(path.name for path in paths)}")
    # A name alone could also be a tag, or another folder of this name.
    path = folder if len(folder.parts) > 1 else f".{os.sep}{folder}"
    print(f"open it: asyncsim show {shlex.quote(str(path))}")


def lacks_runs(folder: Path | None) -> bool:
    """Return whether runs are missing in a study's folder."""
    return folder is not None and bool(config_of(folder).get(INCOMPLETE))


def cell_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options that differ between the cells of a study, from its ``config.json``."""
    cells = config.get("cells")
    tables = [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []
    return list(dict.fromkeys(name for cell in tables for name in cell))


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``config.json``; an empty dict if it cannot be read
    (`old_folder` says why).
    """
    return json_table(folder / CONFIG)


def json_table(file: Path) -> dict[str, Any]:
    """Return the table of a JSON file; an empty one if it cannot be read."""
    try:
        return dict(json.loads(text_in(file)))
    except (ValueError, TypeError, RecursionError):
        return {}


def text_in(file: Path) -> str:
    """Return the text of a file; an empty one if it cannot be read, or is very long."""
    try:
        return read_text(file) if file.stat().st_size <= LARGEST else ""
    except (OSError, ValueError):
        return ""


def _make(out: Path | None, study: str) -> tuple[Path, list[Path]]:
    """Create the user's folder, unless it exists and is empty, or the first free folder of a study.

    Two simultaneous studies get different folders, or one is refused. The second result are the
    created folders, innermost first.
    """
    for number in itertools.count(1):
        folder = (
            Path("results", study if number == 1 else f"{study}-{number}") if out is None else out
        )
        try:
            is_present = out is not None and folder.exists()
            if is_present and (not folder.is_dir() or any(folder.iterdir())):
                raise _occupied(folder)
            created = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=is_present)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return folder, created
        except OSError as error:
            exists = isinstance(error, FileExistsError)
            if exists and out is None:
                continue
            if exists and folder.is_dir():  # meanwhile
                raise _occupied(folder) from error
            raise InputError(
                f"out = {str(folder)!r}: cannot be written: {error.strerror or error}; give a "
                "folder that can"
            ) from error
    raise AssertionError("unreachable")


def _occupied(folder: Path) -> InputError:
    return InputError(
        f"out = {str(folder)!r}: exists and is not an empty folder; give another, or remove it "
        "first"
    )
