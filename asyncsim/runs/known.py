"""Finished studies: the known folders, their tags, and each in a few words.

A tag is a file ``tags/NAME.json`` inside the folder that it names, so that it moves with the
folder. Known are the folders in ``results`` of the working folder, and those in a list to which
studies append. Every command reads them again. Neither pandas nor JAX is imported here, so that a
shell answers at once.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncsim.base.console import counted
from asyncsim.base.errors import (
    InputError,
    nearest,
    require_choice,
    require_count,
    require_path,
    shown,
)
from asyncsim.base.files import RUN, files_below, require_real, write_json, write_text
from asyncsim.replays.run import Run
from asyncsim.study import results
from asyncsim.study.finished import answer_of

#: Names of tags.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Levels of folders below a listed one that are searched for results.
_DEPTH = 3
#: Longest text of an entry, and longest list of methods or note, in characters.
_LONGEST, _LONGEST_LIST = 100, 1000
#: Options that describe a cluster in a list, and their defaults.
_CLUSTER = {"topology": "server", "policy": "asynchronous", "protocol": "exchange"}


class Tag(NamedTuple):
    """A name for a folder, or for a place in one of its runs."""

    name: str
    folder: Path
    run: str | None = None  #: the name of its folder in ``runs``
    commit: int | None = None
    note: str = ""


class KnownStudy(NamedTuple):
    """A folder of results, or another folder with a tag."""

    folder: Path
    study: str  #: empty without results
    date: str  #: when the study began, in UTC
    cluster: str
    methods: str
    verdict: str  #: the study's answer; first the state of an unfinished study
    tags: tuple[Tag, ...]


def entries() -> list[KnownStudy]:
    """List all known folders of results, newest first."""
    roots = dict.fromkeys([Path("results").absolute(), *results.listed()])
    folders = dict.fromkeys(folder for root in roots for folder in _inside(root, _DEPTH))
    return sorted(map(_describe, folders), key=lambda entry: entry.date, reverse=True)


def missing() -> list[Path]:
    """Return the listed folders that are gone."""
    return [path for path in results.listed() if not path.exists()]


def forget() -> int:
    """Remove the folders that are gone from the list; return their number."""
    absent = missing()
    lines = [f"{path}\n" for path in results.listed() if path not in absent]
    write_text(results.index_folder() / results.FOLDER_LIST, "".join(lines))
    return len(absent)


def add_root(folder: str | os.PathLike) -> None:
    """Add a folder to those that are searched for results, with the folders inside it."""
    path = require_path("root", folder)
    if not path.is_dir():
        raise InputError(f"root = {str(folder)!r}: is no folder; give one that contains results")
    results.remember(path, strict=True)


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
    place = Path(os.path.abspath(require_path("folder", folder)))  # without ".."
    if not place.is_dir() or not str(place).isprintable():
        raise InputError(f"folder = {shown(str(folder))}: is no folder; give one that exists")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"name = {name!r}: must be of letters, digits, '.', '_' and '-', begin with a letter "
            "or a digit, and be at most 64 characters long"
        )
    if not isinstance(note, str) or not note.isprintable():
        raise InputError(f"note = {note!r}: must be a text of one line")
    if run is not None:
        run = _require_run(place, run, commit)
    elif commit is not None:
        raise InputError(f"commit = {commit}: of which run? give --run too (in Python run=...)")
    rivals = [tag for entry in entries() for tag in entry.tags]
    for rival in (rival for rival in rivals if rival.name.casefold() == name.casefold()):
        raise InputError(
            f"name = {name!r}: is taken by {rival.folder}{place_text(rival, ', run ')}; choose "
            f"another, or remove that one with: asyncsim tag --remove {rival.name}"
        )
    results.remember(place, strict=True)
    created = Tag(name, place, run, commit, note)
    values = {key: value for key, value in created._asdict().items() if key != "folder"}
    write_json(_file(created), values)
    return created


def untag(name: str) -> Tag:
    """Remove a tag from its folder; raise InputError unless one folder has it."""
    tag = find(name)
    if tag.name != name or not _file(tag).exists():
        raise InputError(f"name = {name!r}: is a folder, and no tag; asyncsim runs lists the tags")
    _file(tag).unlink()
    with contextlib.suppress(OSError):  # the folder has other tags
        _file(tag).parent.rmdir()
    return tag


def find(name: str) -> Tag:
    """Return the tag of this name, else a tag for the folder of results of this path or name.

    A folder of the working folder, or of ``results`` in it, comes before folders elsewhere.

    Raises
    ------
    InputError
        For an unknown name, or a name of several folders.
    """
    listed = entries()
    matches = [tag for entry in listed for tag in entry.tags if tag.name == name]
    if not matches:
        local = [path for path in (Path(name), Path("results", name)) if _has_results(path)]
        named = [entry.folder for entry in listed if entry.folder.name == name]
        folders = [path.absolute() for path in local[:1]] or named
        matches = [Tag(folder.name, folder) for folder in folders]
    if len(matches) > 1:
        places = ", ".join(str(tag.folder) for tag in matches)
        raise InputError(
            f"name = {name!r}: {len(matches)} folders have it: {places}; give the path of one"
        )
    if not matches:
        names = {tag.name for entry in listed for tag in entry.tags}
        names |= {entry.folder.name for entry in listed}
        match = nearest(name, names)
        hint = f"did you mean {match!r}? " if match else ""
        raise InputError(
            f"name = {shown(name)}: no tag and no folder of results; {hint}asyncsim runs lists "
            "all, after asyncsim runs --root FOLDER also those in that folder"
        )
    return matches[0]


def place_text(tag: Any, before: str) -> str:
    """Describe the run and the commit that a tag names; an empty text for a whole folder."""
    at = "" if tag.commit is None else f", commit {tag.commit}"
    return f"{before}{tag.run}{at}" if tag.run else ""


def runs_in(folder: Path) -> list[str]:
    """List the runs in a folder of results: ``gem-seed0``, or in a cell ``workers-5/gem-seed0``."""
    runs = folder / "runs"
    names = (
        path.parent.relative_to(runs).as_posix() for path in files_below(runs) if path.name == RUN
    )
    return sorted(name for name in names if "/." not in f"/{name}")  # leading dot: half-written


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """Convert a value to a short text of one line, without control characters for a terminal."""
    text = "".join(
        character if character.isprintable() else "?" for character in str(value)[: longest + 1]
    )
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _file(tag: Tag) -> Path:
    """Return the file of a tag; raise InputError for a link to other tags."""
    return require_real(tag.folder / "tags") / f"{tag.name}.json"


def _has_results(folder: Path) -> bool:
    """Return whether a folder has the results of a study; the path may be any text."""
    return os.path.isdir(folder) and isinstance(results.config_of(folder).get("study"), str)


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of results, or with tags, in a folder, itself among them."""
    if _has_results(folder) or (folder / "tags").is_dir():
        yield folder
    elif depth:
        with contextlib.suppress(OSError), os.scandir(folder) as inside:
            for entry in sorted(inside, key=lambda entry: entry.name):
                # A terminal may refuse names that are not printable.
                is_visible = entry.name.isprintable() and not entry.name.startswith(".")
                if is_visible and entry.is_dir(follow_symlinks=False):
                    yield from _inside(Path(entry.path), depth - 1)


def _describe(folder: Path) -> KnownStudy:
    """Read a folder's entry; a stranger may have written the files."""
    config, origin = results.config_of(folder), results.json_table(folder / results.ORIGIN)
    verdicts = [verdict.partition("\n")[0] for verdict in answer_of(folder)[0]]
    study, date = (
        one_line(text) if isinstance(text, str) else ""
        for text in (config.get("study"), origin.get("date"))
    )
    methods = config.get("methods")
    return KnownStudy(
        folder,
        study,
        date,
        one_line(_cluster(config)),
        one_line(", ".join(map(str, methods)) if isinstance(methods, list) else "", _LONGEST_LIST),
        one_line("; ".join(filter(None, [results.unfinished(folder, config), *verdicts]))),
        tuple(_tags(folder)),
    )


def _tags(folder: Path) -> Iterator[Tag]:
    """Read the tags of a folder."""
    for file in sorted((folder / "tags").glob("*.json")):
        if _NAME.fullmatch(file.stem):
            values = results.json_table(file)
            run, commit = values.get("run"), values.get("commit")
            yield Tag(
                file.stem,
                folder,
                one_line(run) if isinstance(run, str) else None,
                commit if isinstance(commit, int) else None,
                one_line(values.get("note") or "", _LONGEST_LIST),
            )


def _cluster(config: Mapping[str, Any]) -> str:
    """Describe the cluster of a study: its workers, and options that differ from the defaults."""
    workers = config.get("workers")
    numbers = workers if isinstance(workers, list) else [] if workers is None else [workers]
    parts = [f"{', '.join(map(str, numbers))} worker{'' if numbers == [1] else 's'}"]
    settings = [(config.get(name), usual) for name, usual in _CLUSTER.items()]
    parts += [text for text, usual in settings if isinstance(text, str) and text != usual]
    return ", ".join(parts if numbers else parts[1:])


def _require_run(folder: Path, run: str, commit: int | None) -> str:
    """Return the name of a run in a folder; raise InputError without that run or that commit."""
    names = runs_in(folder)
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
