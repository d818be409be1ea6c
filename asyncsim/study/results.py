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

from asyncsim.base import files
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_path
from asyncsim.base.files import (
    LockedFolder,
    alone_in,
    read_text,
    remove_partials,
    require_plain,
    unsealed,
    write_json,
    write_sealed,
)

#: The table that makes a folder of results one; a folder without it holds nothing that was finished.
SUMMARY = "summary.csv"
#: The table of a comparison: a row for each method at its best learning rate, the best method first.
RANKING = "comparison.csv"
#: What the results depend on; in it, the names of the runs that are missing, and what was typed on the command line.
CONFIG, INCOMPLETE, COMMAND = files.CONFIG, "incomplete", "command"
#: Beside the names of the runs that are missing: the number of all runs that are known.
ALL_RUNS = "all_runs"
#: In it, too: the paths of the user's own files, and their hashes.
FILES = "files"
#: When, where and how long a study ran: the only file of which the same configuration does not give the same bytes.
MADE = "made.json"
#: The page of a finished study.
PAGE = "report.html"
#: In the folder of the index, the paths of results and of folders that hold some: a line each.
KNOWN = "folders"
#: What to do with a folder in which a study cannot go on.
ANEW = "begin anew with --out FOLDER (in Python out=...)"
#: The largest file (bytes) of which a few numbers are read: a stranger's folder may hold anything.
LARGEST = 50_000_000
#: Status of a run that ended with an error: a row of the summary without a folder.
FAILED = "failed"
#: Status of a recording that is being made, or was broken off.
UNFINISHED = "unfinished"


@contextlib.contextmanager
def new_folder(out: str | os.PathLike | None, study: str, resumable: bool = False) -> Iterator[Path]:
    """Make the folder that a study writes to; take it away again if the study ends without a finished result.

    The study writes ``summary.csv`` whenever something is finished, so that an error or Ctrl-C after that keeps it::

        with results.new_folder(config.out, "staleness") as folder:
            ...

    An interruption is passed on, saying where the finished results are and how to go on. ``out`` must not exist, or be
    empty; None is the first free one of ``results/STUDY``, ``results/STUDY-2``, ... ``resumable``: whether the study
    has the option ``--resume``, which an interruption then names.
    """
    folder, made = _make(None if out is None else require_path("out", out), study)
    instead = " instead of --out" if out is not None else ""
    with alone_in(folder, "out") as held:
        if any(folder.iterdir()):  # meanwhile
            raise _taken(folder)
        with telling(folder, held, resumable, instead):
            try:
                yield folder
            except BaseException:
                if held.is_there and not (folder / SUMMARY).exists():
                    held.remove_written()
                    with contextlib.suppress(OSError):  # others have put something there
                        for path in made:
                            path.rmdir()
                raise


@contextlib.contextmanager
def old_folder(folder: str | os.PathLike, record: Mapping[str, Any]) -> Iterator[Path]:
    """Return to the folder of a study that ended early; only half-written files of a killed process are removed.

    ``record``: what its ``config.json`` must hold, whatever is missing and was typed; it may be of fewer seeds, or of
    some of the methods only.
    """
    folder = require_path("resume", folder)
    _require_same(folder, record)
    with alone_in(folder, "resume") as held, telling(folder, held):
        remove_partials(folder)
        yield folder


def _require_same(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise InputError unless a folder holds results of a study whose record is the same."""
    try:
        found = _of_results(unsealed(folder / CONFIG))
    except FileNotFoundError as error:
        raise InputError(f"resume = {str(folder)!r}: no results of a study; give the folder of one") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"resume = {str(folder)!r}: its {CONFIG} cannot be used ({why}); give the folder of a study, or {ANEW}"
        ) from error
    if "study" not in found:
        raise InputError(f"resume = {str(folder)!r}: its {CONFIG} names no study; give the folder of one")
    wanted = _of_results(json.loads(json.dumps(record)))
    if found["study"] != wanted.get("study"):
        raise InputError(
            f"resume = {str(folder)!r}: holds results of the study {found['study']}; give the folder of one of "
            f"{wanted.get('study')}"
        )
    found = _with_more_runs(found, wanted)
    differing = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    # The hash of what is made from options differs with these, and says nothing more.
    differing = [name for name in differing if not name.startswith("code ")] or differing
    if differing:
        told = "; ".join(_difference(name, found.get(name), wanted.get(name)) for name in differing[:3])
        told += f"; and in {', '.join(differing[3:])}" if differing[3:] else ""
        raise InputError(
            f"resume = {str(folder)!r}: holds results of another configuration ({told}); give the options, the code "
            f"and the versions that it was made with, or {ANEW}"
        )


def _of_results(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return that of a configuration on which the results depend."""
    return {name: value for name, value in config.items() if name not in (INCOMPLETE, ALL_RUNS, COMMAND, FILES)}


def write_config(
    folder: Path, record: Mapping[str, Any], absent: Sequence[str], count: int, interrupted: bool = False
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


def write_made(folder: Path, seconds: float | None = None) -> None:
    """Write a study's start, its device, and its seconds so far, including earlier attempts."""
    record = json_table(folder / MADE)
    record = record or {"id": secrets.token_hex(8), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    jax = sys.modules.get("jax")  # studies without gradients load none
    device = jax.devices()[0].device_kind if jax is not None and seconds is not None else record.get("device")
    record |= {"device": device, "cores": os.cpu_count(), "system": platform.platform()}
    if seconds is not None:
        earlier = record.get("wall_time")
        record["wall_time"] = round(seconds + (earlier if isinstance(earlier, int | float) else 0), 3)
    write_json(folder / MADE, record)


def index_folder() -> Path:
    """Return the folder of the index of results: that of ASYNCSIM_INDEX, else in the user's data folder."""
    given = os.environ.get("ASYNCSIM_INDEX")
    return Path(given) if given else platformdirs.user_data_path("asyncsim")


def private_file(file: Path) -> Path:
    """Create a file of the index and its folder unless they exist; only the user may read them."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with contextlib.suppress(OSError):  # of another user, or on a read-only disk
        file.chmod(0o600)
    return file


def add_line(file: Path, line: str) -> None:
    """Append a line to a file of the index, unless the file has it.

    An appended line is whole, however many processes append.
    """
    if line not in private_file(file).read_text(encoding="utf-8").splitlines():
        with file.open("a", encoding="utf-8") as opened:
            opened.write(f"{line}\n")


def remember(folder: Path, strict: bool = False) -> None:
    """Let the index find a folder of results, or the folders inside one; ``strict``: an InputError if it cannot."""
    path = folder.absolute()
    path = path.parent if path.parent.name == "results" else path
    file = index_folder() / KNOWN
    try:
        if str(path).isprintable():
            add_line(file, str(path))
    except (OSError, ValueError) as error:
        if strict:
            raise InputError(
                f"index = {str(file)!r}: cannot be written: {error}; set ASYNCSIM_INDEX to a folder that can"
            ) from error


def _with_more_runs(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the seeds and methods of another, if these are more."""
    more = dict(found)
    seeds, methods, made = (found.get(name) for name in ("seeds", "methods", "hyperparameters"))
    if isinstance(seeds, int) and wanted["seeds"] > seeds:
        more["seeds"] = wanted["seeds"]
    if isinstance(methods, list) and isinstance(made, dict) and set(wanted["methods"]) > set(map(str, methods)):
        added = [name for name in wanted["methods"] if name not in methods]
        more["methods"] = wanted["methods"]
        more["hyperparameters"] = made | {name: wanted["hyperparameters"][name] for name in added}
        more |= {f"code of {name}": wanted[f"code of {name}"] for name in added}
    return more


def command_of(folder: str, study: str) -> list[str]:
    """Return what was typed for a study in its folder; nothing if it is not one of that study, or was run in Python."""
    is_one = folder and config_of(Path(folder)).get("study") == study
    return (typed_in(Path(folder)) if is_one else None) or []


def typed_in(folder: Path | None) -> list[str] | None:
    """Return what was typed for the study in a folder; None if nobody knows."""
    typed = None if folder is None else config_of(folder).get(COMMAND)
    return typed if isinstance(typed, list) and all(isinstance(one, str) for one in typed) else None


def _difference(name: str, found: Any, wanted: Any) -> str:
    """Say how a value of another configuration differs: of tables in which entries, of fingerprints that it does."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        entries = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        return "; ".join(_difference(f"{name} {key}", found.get(key), wanted.get(key)) for key in entries)
    if name == "seeds" and isinstance(found, int) and wanted is not None:
        return f"seeds = {found}, not {wanted}: seeds may only be added"
    if name.startswith("code ") and found is not None and wanted is not None:
        return f"{name} has changed"
    return f"{name} = {found!r}, not {wanted!r}"


def resume_option(folder: Path) -> str:
    """Return the option that goes on in a folder, as a shell takes it."""
    return f"--resume {shlex.quote(str(folder))}"


@contextlib.contextmanager
def telling(folder: Path, held: LockedFolder, resumable: bool = True, instead: str = "") -> Iterator[None]:
    """Let interruptions and bad input say where the finished results are, and interruptions how to go on.

    ``held``: the folder as `asyncsim.base.files.alone_in` gave it;
    ``resumable``: whether the study has the option ``--resume``; ``instead`` ends the advice to use it with the same
    options, if nobody knows what was typed, and says of which it takes the place.
    """
    try:
        yield
    except BaseException as error:
        finished = held.is_there and (folder / SUMMARY).exists()
        if isinstance(error, KeyboardInterrupt):
            told = f"what was finished is in {folder}" if finished else "nothing was finished"
            if finished and resumable:
                again = "the same options and " if typed_in(folder) is None else ""
                told += f"; go on with {again}{resume_option(folder)}{instead if again else ''}"
            raise KeyboardInterrupt(told) from None
        if isinstance(error, InputError) and finished:
            raise InputError(f"{error}; what was finished before is in {folder}") from error
        raise


def say_written(folder: Path) -> None:
    """Print what a study has written into its folder: the options, folders, tables, then figures."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    paths.sort(key=lambda path: (path.name != CONFIG, not path.is_dir(), path.name != SUMMARY, path.suffix != ".csv"))
    print(f"\nwrote {folder}: {', '.join(path.name for path in paths)}")


def lacks_runs(folder: Path | None) -> bool:
    """Return whether a study has left its folder with runs that are missing."""
    return folder is not None and bool(config_of(folder).get(INCOMPLETE))


def cell_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options in which the cells of a study may differ, from its ``config.json``."""
    cells = config.get("cells")
    tables = [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []
    return list(dict.fromkeys(name for cell in tables for name in cell))


def config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder's ``config.json`` holds; nothing if it cannot be read, of which `old_folder` says why."""
    return json_table(folder / CONFIG)


def json_table(file: Path) -> dict[str, Any]:
    """Return the table of a JSON file; an empty one if it cannot be read."""
    try:
        return dict(json.loads(read_text(file))) if file.stat().st_size <= LARGEST else {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _make(out: Path | None, study: str) -> tuple[Path, list[Path]]:
    """Make the folder that the user chose, unless it is there and empty, or the first free one of a study.

    Two studies that start together get one each, or one of them is refused. Returned are also the folders that were not
    there, innermost first.
    """
    for number in itertools.count(1):
        folder = Path("results", study if number == 1 else f"{study}-{number}") if out is None else out
        try:
            is_present = out is not None and require_plain(folder).exists()
            if is_present and (not folder.is_dir() or any(folder.iterdir())):
                raise _taken(folder)
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=is_present)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return folder, made
        except OSError as error:
            exists = isinstance(error, FileExistsError)
            if exists and out is None:
                continue
            if exists and folder.is_dir():  # meanwhile
                raise _taken(folder) from error
            raise InputError(
                f"out = {str(folder)!r}: cannot be written: {error.strerror or error}; give a folder that can"
            ) from error
    raise AssertionError("unreachable")


def _taken(folder: Path) -> InputError:
    return InputError(f"out = {str(folder)!r}: exists and is not an empty folder; give another, or remove it first")
