"""The index of finished studies: a file that can be rebuilt at any time from their folders.

A tag is a file ``tags/NAME.json`` inside the folder that it names, so that it moves with the
folder. The index only caches the folders' contents: every command scans the known folders and the
roots, and reads changed folders again. Neither pandas nor JAX is imported here, so that a shell
answers at once.
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

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_choice, require_count, require_path, shown
from asyncsim.base.files import lock, remove, sealed, unsealed, write_json, write_text
from asyncsim.replays.run import Run
from asyncsim.runs import folders
from asyncsim.study import results

#: Version of the file's format; a file of another version is rebuilt.
_VERSION = 4
#: Longest wait for another command that changes the index, and pause between two attempts (s).
_PATIENCE, _PAUSE = 60.0, 0.02


class Tag(NamedTuple):
    """A name for a folder, or for a place in one of its runs."""

    name: str
    folder: Path
    run: str | None = None  #: the name of its folder in ``runs``
    commit: int | None = None
    note: str = ""
    date: str = ""


class IndexEntry(NamedTuple):
    """A folder of results in the index, or another folder with a tag."""

    folder: Path
    study: str  #: empty without results
    date: str  #: when the study began, in UTC
    cluster: str
    methods: str
    headline: str  #: an unfinished study's state, and the best mean over seeds
    runs: int  #: rows of its summary
    tags: tuple[Tag, ...]
    missing: bool  #: whether the folder is neither at its place nor elsewhere


def entries() -> list[IndexEntry]:
    """List all known folders of results, newest first."""
    with _index() as table:
        rows = [
            IndexEntry(
                folder=Path(path),
                tags=tuple(Tag(folder=Path(path), **tag) for tag in entry["tags"]),
                **{
                    name: entry[name]
                    for name in IndexEntry._fields
                    if name not in ("folder", "tags")
                },
            )
            for path, entry in sorted(table.items())
        ]
    return sorted(rows, key=lambda entry: entry.date, reverse=True)


def tag(
    folder: str | os.PathLike,
    name: str,
    note: str = "",
    run: str | None = None,
    commit: int | None = None,
) -> Tag:
    """Name a folder, or a place in one of its runs, by a file inside the folder.

    Raises
    ------
    InputError
        For a missing folder, an unknown run or commit, or a name that is malformed or taken.
    """
    place = require_path("folder", folder).absolute()
    if not place.is_dir() or not str(place).isprintable():
        raise InputError(f"folder = {shown(str(folder))}: is no folder; give one that exists")
    if not isinstance(name, str) or not folders.NAME.fullmatch(name):
        raise InputError(
            f"name = {name!r}: must be of letters, digits, '.', '_' and '-', begin with a letter "
            "or a digit, and be at "
            "most 64 characters long"
        )
    if not isinstance(note, str) or not note.isprintable():
        raise InputError(f"note = {note!r}: must be a text of one line")
    if run is not None:
        run = _require_run(place, run, commit)
    elif commit is not None:
        raise InputError(f"commit = {commit}: of which run? give --run too (in Python run=...)")
    created = Tag(name, place, run, commit, note, datetime.now(UTC).isoformat(timespec="seconds"))
    has_results = isinstance(results.config_of(place).get("study"), str)
    results.remember(place, strict=has_results, tagged=not has_results)
    with _index() as table:
        for path, entry in table.items():
            for rival in (Tag(folder=Path(path), **values) for values in entry["tags"]):
                if rival.name.casefold() == name.casefold() and _file(rival).exists():
                    at = f", run {rival.run}" if rival.run else ""
                    at += f", commit {rival.commit}" if rival.commit is not None else ""
                    raise InputError(
                        f"name = {name!r}: is taken by {rival.folder}{at}; choose another, or "
                        "remove that one with: "
                        f"asyncsim untag {rival.name}"
                    )
        write_json(
            _file(created),
            {field: value for field, value in created._asdict().items() if field != "folder"},
        )
        _refresh(table)
    return created


def untag(name: str) -> Tag:
    """Remove a tag from its folder and from the index.

    Raises
    ------
    InputError
        If no tag has this name, or tags of several folders have it.
    """
    tag = find(name)
    if not _file(tag).exists():
        raise InputError(f"name = {name!r}: is a folder, and no tag; asyncsim runs lists the tags")
    remove(_file(tag))
    with contextlib.suppress(OSError):  # the folder has other tags
        _file(tag).parent.rmdir()
    return tag


def find(name: str) -> Tag:
    """Return the tag of this name, else a tag for the folder of results of this name or path.

    Of several folders of this name, the one in ``results`` of the working folder is chosen, with a
    note.

    Raises
    ------
    InputError
        For an unknown name, a name of several folders, or a missing folder.
    """
    all_entries = entries()
    present = [entry for entry in all_entries if not entry.missing]
    matches = [tag for entry in present for tag in entry.tags if tag.name == name]
    matches = matches or [Tag(name, entry.folder) for entry in present if entry.folder.name == name]
    path = Path(name)
    if not matches and path.is_dir() and isinstance(results.config_of(path).get("study"), str):
        matches = [Tag(path.absolute().name, path.absolute())]
    local = Tag(name, Path("results").absolute() / name)
    if len(matches) > 1 and local in matches:
        note(f"{counted(len(matches), 'folder')} named {name}; this is {local.folder}")
        matches = [local]
    if len(matches) > 1:
        places = ", ".join(str(tag.folder) for tag in matches)
        raise InputError(
            f"name = {name!r}: {len(matches)} folders have it: {places}; give the path of one"
        )
    if matches:
        return matches[0]
    for entry in all_entries:
        if entry.missing and name in (entry.folder.name, *(tag.name for tag in entry.tags)):
            raise InputError(
                f"name = {name!r}: its folder {entry.folder} is gone; if it was moved, say where "
                "it is now with: "
                "asyncsim runs --root FOLDER; else remove it from the list with: asyncsim runs "
                "--forget"
            )
    names = {
        name for entry in present for name in (*(tag.name for tag in entry.tags), entry.folder.name)
    }
    nearest = difflib.get_close_matches(str(name)[: folders.LONGEST_TEXT], names, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise InputError(
        f"name = {shown(name)}: no tag and no folder of results; {hint}asyncsim runs lists all"
    )


def add_root(folder: str | os.PathLike) -> Path:
    """Add a folder to those that are searched for results, with the folders inside it."""
    path = require_path("root", folder).absolute()
    if not path.is_dir():
        raise InputError(f"root = {str(folder)!r}: is no folder; give one that contains results")
    results.remember(path, strict=True)
    return path


def forget() -> int:
    """Remove the missing folders from the index; return their number."""
    with _index() as table:
        missing = [path for path, entry in table.items() if entry["missing"]]
        for path in missing:
            del table[path]
    roots = folders.roots()
    if not all(root.exists() for root in roots):
        lines = "".join(f"{root}\n" for root in roots if root.exists())
        write_text(results.index_folder() / results.FOLDER_LIST, lines, mode=0o600)
    return len(missing)


def _file(tag: Tag) -> Path:
    return tag.folder / "tags" / f"{tag.name}.json"


def _require_run(folder: Path, run: str, commit: int | None) -> str:
    """Return the name of a run in a folder; raise InputError without that run or that commit."""
    names = folders.runs_in(folder)
    if not names:
        raise InputError(f"run = {shown(run)}: {folder} has no runs; leave it out")
    name = require_choice("run", str(run).removeprefix("runs/").rstrip("/"), names)
    if commit is not None:
        require_count("commit", commit, minimum=0)
        commits = len(Run.load(folder / "runs" / name).commits)
        if commit >= commits:
            raise InputError(
                f"commit = {commit}: the run {name} has {counted(commits, 'commit')}, from 0"
            )
    return name


@contextlib.contextmanager
def _index() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the refreshed entries by path and write changes at the end; other processes wait.

    Raises
    ------
    InputError
        If the user's data folder cannot be used.
    """
    file = results.index_folder() / "index.json"
    try:
        results.private_file(file)
        with _locked(file.parent):
            try:
                table = unsealed(file, _VERSION)["folders"]
            except (ValueError, KeyError):  # new, damaged, or of another version
                table = {}
            before = json.dumps(table)
            _refresh(table)
            yield table
            if json.dumps(table) != before:
                write_text(file, sealed({"format": _VERSION, "folders": table}), mode=0o600)
    except OSError as error:
        raise InputError(
            f"index = {str(file)!r}: cannot be used: {error}; set ASYNCSIM_INDEX to a folder that "
            "can be written"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; wait if another process has locked it."""
    if sys.platform == "win32":  # cannot open folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _PATIENCE
        while not lock(descriptor):
            if time.monotonic() > end:
                raise TimeoutError("another process uses it")
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _refresh(table: dict[str, dict[str, Any]]) -> None:
    """Read changed folders; mark missing ones, and drop those that moved."""
    stamps = {str(folder): folders.stamp(folder) for folder in folders.search(table)}
    for path, stamp in stamps.items():
        if stamp != table.get(path, {}).get("stamp"):
            table[path] = {"stamp": stamp, **folders.describe(Path(path))}
    ids = {table[path]["id"] for path in stamps}
    for path, entry in list(table.items()):
        entry["missing"] = path not in stamps
        is_elsewhere = entry["id"] and entry["id"] in ids
        # A folder without results is known by its tags alone.
        has_no_tag = not entry["study"] and Path(path).is_dir()
        if entry["missing"] and (is_elsewhere or has_no_tag):
            del table[path]
