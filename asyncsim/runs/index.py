"""The index of finished studies: a file that can be made anew at any time from their folders, which are the truth.

A tag is a file ``tags/NAME.json`` inside the folder that it names, so that it moves with the folder. The index only
remembers what lies where: every command looks at each known folder and at each folder of the roots, and reads again
those that have changed. Neither pandas nor JAX is imported here: a shell waits for the answer.
"""

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_choice, require_count, require_path, shown
from asyncsim.base.files import lock, remove, sealed, unsealed, write_json, write_text
from asyncsim.replays.run import Run
from asyncsim.runs import folders
from asyncsim.study import results

#: Raised whenever an older asyncsim could not read the index: it is made anew then.
_VERSION = 3
#: Seconds for which a command waits for another one that changes the index, and between two looks.
_PATIENCE, _LOOK = 60.0, 0.02


class Tag(NamedTuple):
    """A name for a folder of results, or for a place in one of its runs."""

    name: str
    folder: Path
    run: str | None = None  #: the name of its folder in ``runs``
    commit: int | None = None
    note: str = ""
    date: str = ""


class IndexEntry(NamedTuple):
    """A folder of results in the index."""

    folder: Path
    study: str
    date: str  #: when the study began, in UTC
    cluster: str
    methods: str
    headline: str  #: whether the study is unfinished, and the best mean over seeds
    runs: int  #: rows of its summary
    tags: tuple[Tag, ...]
    gone: bool  #: the folder is not there any more, and was not found elsewhere


def entries() -> list[IndexEntry]:
    """Return all known folders of results, the newest first."""
    with _index() as known:
        rows = [
            IndexEntry(
                folder=Path(path),
                tags=tuple(Tag(folder=Path(path), **tag) for tag in entry["tags"]),
                **{name: entry[name] for name in IndexEntry._fields if name not in ("folder", "tags")},
            )
            for path, entry in sorted(known.items())
        ]
    return sorted(rows, key=lambda entry: entry.date, reverse=True)


def tag(folder: str | os.PathLike, name: str, note: str = "", run: str | None = None, commit: int | None = None) -> Tag:
    """Give a folder of results, or a place in one of its runs, a name; it is kept inside the folder.

    Raises
    ------
    InputError
        The folder has no results, the run or the commit does not exist, or the name is malformed or taken.
    """
    place = require_path("folder", folder).absolute()
    if not isinstance(results.config_of(place).get("study"), str):
        raise InputError(f"folder = {str(folder)!r}: holds no results of a study; give a folder that a study wrote")
    if not isinstance(name, str) or not folders.NAME.fullmatch(name):
        raise InputError(
            f"name = {name!r}: must be of letters, digits, '.', '_' and '-', begin with a letter or a digit, and be at "
            "most 64 characters long"
        )
    if not isinstance(note, str) or not note.isprintable():
        raise InputError(f"note = {note!r}: must be a text of one line")
    if run is not None:
        run = _require_run(place, run, commit)
    elif commit is not None:
        raise InputError(f"commit = {commit}: of which run? give --run too (in Python run=...)")
    made = Tag(name, place, run, commit, note, datetime.now(UTC).isoformat(timespec="seconds"))
    results.remember(place)
    with _index() as known:
        for path, entry in known.items():
            for other in (Tag(folder=Path(path), **values) for values in entry["tags"]):
                if other.name.casefold() == name.casefold() and _file(other).exists():
                    at = f", run {other.run}" if other.run else ""
                    at += f", commit {other.commit}" if other.commit is not None else ""
                    raise InputError(
                        f"name = {name!r}: is taken by {other.folder}{at}; choose another, or remove that one with: "
                        f"asyncsim tag --remove {other.name}"
                    )
        write_json(_file(made), {field: value for field, value in made._asdict().items() if field != "folder"})
        _refresh(known)
    return made


def untag(name: str) -> Tag:
    """Remove a tag from its folder and from the index.

    Raises
    ------
    InputError
        No tag has this name, or tags of several folders have it.
    """
    found = find(name)
    if not _file(found).exists():
        raise InputError(f"name = {name!r}: is a folder, and no tag; asyncsim runs lists the tags")
    remove(_file(found))
    with contextlib.suppress(OSError):  # others are there
        _file(found).parent.rmdir()
    return found


def find(name: str) -> Tag:
    """Return the tag of this name; if no tag has it, one made for the folder of results of this name or path.

    Raises
    ------
    InputError
        There is none, several folders have the name, or the folder is gone.
    """
    known = entries()
    there = [entry for entry in known if not entry.gone]
    found = [tag for entry in there for tag in entry.tags if tag.name == name]
    found = found or [Tag(name, entry.folder) for entry in there if entry.folder.name == name]
    path = Path(name)
    if not found and path.is_dir() and isinstance(results.config_of(path).get("study"), str):
        found = [Tag(path.absolute().name, path.absolute())]
    if len(found) > 1:
        places = ", ".join(str(tag.folder) for tag in found)
        raise InputError(f"name = {name!r}: {len(found)} folders have it: {places}; give the path of one")
    if found:
        return found[0]
    for entry in known:
        if entry.gone and name in (entry.folder.name, *(tag.name for tag in entry.tags)):
            raise InputError(
                f"name = {name!r}: its folder {entry.folder} is gone; if it was moved, say where it is now with: "
                "asyncsim runs --root FOLDER; else remove it from the list with: asyncsim runs --forget"
            )
    names = {name for entry in there for name in (*(tag.name for tag in entry.tags), entry.folder.name)}
    nearest = difflib.get_close_matches(str(name)[: folders.LONGEST_TEXT], names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise InputError(f"name = {shown(name)}: no tag and no folder of results; {hint}asyncsim runs lists all")


def add_root(folder: str | os.PathLike) -> Path:
    """Search a folder, and the folders inside it, for results from now on."""
    path = require_path("root", folder).absolute()
    if not path.is_dir():
        raise InputError(f"root = {str(folder)!r}: is no folder; give one that holds results")
    results.remember(path, strict=True)
    return path


def forget() -> int:
    """Remove the folders that are gone from the index; return how many there were."""
    with _index() as known:
        gone = [path for path, entry in known.items() if entry["gone"]]
        for path in gone:
            del known[path]
    roots = folders.roots()
    if not all(root.exists() for root in roots):
        lines = "".join(f"{root}\n" for root in roots if root.exists())
        write_text(results.index_folder() / results.KNOWN, lines, mode=0o600)
    return len(gone)


def _file(tag: Tag) -> Path:
    return tag.folder / "tags" / f"{tag.name}.json"


def _require_run(folder: Path, run: str, commit: int | None) -> str:
    """Return the name of a run in a folder; raise InputError unless it is there and has that commit."""
    there = folders.runs_in(folder)
    if not there:
        raise InputError(f"run = {shown(run)}: {folder} has no runs; leave it out")
    name = require_choice("run", str(run).removeprefix("runs/").rstrip("/"), there)
    if commit is not None:
        require_count("commit", commit, minimum=0)
        commits = len(Run.load(folder / "runs" / name).commits)
        if commit >= commits:
            raise InputError(f"commit = {commit}: the run {name} has {counted(commits, 'commit')}, from 0")
    return name


@contextlib.contextmanager
def _index() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield what is known of each folder by its path, up to date; write changes at the end. Other processes wait.

    Raises
    ------
    InputError
        The user's data folder cannot be used.
    """
    file = results.index_folder() / "index.json"
    try:
        results.private_file(file)
        with _locked(file.parent):
            try:
                known = unsealed(file, _VERSION)["folders"]
            except (ValueError, KeyError):  # new, damaged, or of another version
                known = {}
            before = json.dumps(known)
            _refresh(known)
            yield known
            if json.dumps(known) != before:
                write_text(file, sealed({"format": _VERSION, "folders": known}), mode=0o600)
    except OSError as error:
        raise InputError(
            f"index = {str(file)!r}: cannot be used: {error}; set ASYNCSIM_INDEX to a folder that can be written"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; wait if another process has locked it."""
    if sys.platform == "win32":  # which opens no folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _PATIENCE
        while not lock(descriptor):
            if time.monotonic() > end:
                raise TimeoutError("another process has it")
            time.sleep(_LOOK)
        yield
    finally:
        os.close(descriptor)


def _refresh(known: dict[str, dict[str, Any]]) -> None:
    """Read the folders that have changed; mark those that are gone, and drop those that have moved."""
    stamps = {str(folder): folders.stamp(folder) for folder in folders.search(known)}
    for path, stamp in stamps.items():
        if stamp != known.get(path, {}).get("stamp"):
            known[path] = {"stamp": stamp, **folders.describe(Path(path))}
    ids = {known[path]["id"] for path in stamps}
    for path in list(known):
        known[path]["gone"] = path not in stamps
        if known[path]["gone"] and known[path]["id"] and known[path]["id"] in ids:
            del known[path]
