"""The index of finished studies: a SQLite database, made anew at any time from the folders, which are the truth.

A tag is a file ``tags/NAME.json`` inside the folder that it names, so that it moves with the folder. The index only
remembers what lies where: `refresh` looks at every known folder and at every folder of the roots, and reads again those
that have changed. Neither pandas nor JAX is imported here: a shell waits for the answer.
"""

import contextlib
import csv
import difflib
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError, require_choice, require_count, require_path, shown
from asyncsim.base.files import RUN, files_below, read_rows, read_text, remove, write_json, write_text
from asyncsim.replays.run import Run
from asyncsim.study import results

#: Raised whenever an older asyncsim could not read the database: it is made anew then.
_VERSION = 2
_SCHEMA = """
create table folders (path text primary key, stamp text, id text, study text, date text, cluster text, methods text,
                      headline text, runs integer);
create table tags (name text, path text, run text, commit_ integer, note text, date text, primary key (name, path));
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Levels of folders below a root that are searched for results.
_DEPTH = 3
#: The largest file (bytes) that is read for the index: a stranger's folder may hold anything.
_LARGEST = 50_000_000
#: Characters of a text in the index, of a list of methods or a note, and of a wrong name that a message compares.
_LONGEST_TEXT, _LONGEST_LIST = 100, 1000


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
    with _database() as database:
        gone = refresh(database)
        tags: dict[str, list[Tag]] = {}
        for tag in _tags(database):
            tags.setdefault(str(tag.folder), []).append(tag)
        columns = "path, study, date, cluster, methods, headline, runs"
        rows = database.execute(f"select {columns} from folders order by date desc, path").fetchall()
    return [IndexEntry._make((Path(path), *rest, tuple(tags.get(path, ())), path in gone)) for path, *rest in rows]


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
    if not isinstance(name, str) or not _NAME.fullmatch(name):
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
    with _database() as database:
        refresh(database)
        with _writing(database):
            for other in _tags(database):
                if other.name.casefold() == name.casefold() and _file(other).exists():
                    at = f", run {other.run}" if other.run else ""
                    at += f", commit {other.commit}" if other.commit is not None else ""
                    raise InputError(
                        f"name = {name!r}: is taken by {other.folder}{at}; choose another, or remove that one with: "
                        f"asyncsim tag --remove {other.name}"
                    )
            values = {field: value for field, value in made._asdict().items() if field != "folder"}
            write_json(_file(made), values)
            _insert(database, made)
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
    with _database() as database, _writing(database):
        remove(_file(found))
        with contextlib.suppress(OSError):  # others are there
            _file(found).parent.rmdir()
        database.execute("delete from tags where name = ? and path = ?", (found.name, str(found.folder)))
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
    nearest = difflib.get_close_matches(str(name)[:_LONGEST_TEXT], names, n=1, cutoff=0.5)
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
    with _database() as database:
        gone = refresh(database)
        _forget(database, gone)
    known = _roots()
    kept = [root for root in known if root.exists()]
    if len(kept) < len(known):
        lines = "".join(f"{root}\n" for root in kept)
        write_text(results.index_folder() / results.KNOWN, lines, mode=0o600)
    return len(gone)


def refresh(database: sqlite3.Connection) -> set[str]:
    """Bring the index up to date with the folders; return the paths of those that are gone."""
    known = {path: (stamp, id_) for path, stamp, id_ in database.execute("select path, stamp, id from folders")}
    found = {str(folder): _stamp(folder) for folder in _folders(map(Path, known))}
    changed = [path for path, stamp in found.items() if stamp != known.get(path, ("", ""))[0]]
    gone = known.keys() - found.keys()
    if changed:
        with _writing(database):
            for path in changed:
                _read(database, Path(path), found[path])
    if gone:
        ids = {id_ for path, id_ in database.execute("select path, id from folders") if path in found and id_}
        moved = {path for path in gone if known[path][1] in ids}
        _forget(database, moved)
        gone -= moved
    return set(gone)


def _forget(database: sqlite3.Connection, paths: set[str]) -> None:
    if paths:
        with _writing(database):
            for table in ("folders", "tags"):
                database.executemany(f"delete from {table} where path = ?", [(path,) for path in paths])


def _roots() -> list[Path]:
    """Return the folders that are searched: those that were added, and those that studies wrote to elsewhere."""
    try:
        lines = (results.index_folder() / results.KNOWN).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [Path(line) for line in dict.fromkeys(lines) if os.path.isabs(line)]


def _folders(known: Iterator[Path]) -> Iterator[Path]:
    """Yield each folder of results once: the known ones, then those found below the roots and ``results``."""
    seen = set()
    for path in known:
        if (path / results.CONFIG).exists():
            seen.add(path)
            yield path
    waiting = [(root, 0) for root in (Path("results").absolute(), *_roots())]
    while waiting:
        folder, depth = waiting.pop()
        if folder in seen or not str(folder).isprintable():  # a database or a terminal may refuse such names
            continue
        seen.add(folder)
        if (folder / results.CONFIG).exists():
            if isinstance(_json(folder / results.CONFIG).get("study"), str):
                yield folder
        elif depth < _DEPTH:
            with contextlib.suppress(OSError), os.scandir(folder) as inside:
                waiting += [
                    (Path(one.path), depth + 1)
                    for one in inside
                    if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")
                ]


def _stamp(folder: Path) -> str:
    """Return a text that changes whenever a file does that the index has read."""
    stamps = []
    for name in (results.CONFIG, results.SUMMARY, results.MADE, "tags"):
        try:
            found = os.stat(folder / name)
            stamps.append(f"{found.st_mtime_ns}.{found.st_size}.{found.st_ino}")
        except OSError:
            stamps.append("")
    return " ".join(stamps)


def _read(database: sqlite3.Connection, folder: Path, stamp: str) -> None:
    """Write a folder's study, cluster, methods, headline and tags into the index."""
    config, made = _json(folder / results.CONFIG), _json(folder / results.MADE)
    date = made.get("date")
    if not isinstance(date, str):
        with contextlib.suppress(OSError):
            begun = (folder / results.CONFIG).stat().st_mtime
            date = datetime.fromtimestamp(begun, UTC).isoformat(timespec="seconds")
    rows = _rows(folder / results.SUMMARY)
    methods = config.get("methods")
    headline = "; ".join(filter(None, [results.unfinished(folder, config), _headline(rows, config)]))
    values = (
        *(str(folder), stamp, one_line(made.get("id") or "")),
        *map(one_line, (config.get("study", ""), date or "", _cluster(config))),
        one_line(", ".join(map(str, methods)) if isinstance(methods, list) else "", _LONGEST_LIST),
        *(one_line(headline), len(rows)),
    )
    database.execute(f"insert or replace into folders values ({', '.join('?' * len(values))})", values)
    database.execute("delete from tags where path = ?", (str(folder),))
    files: list[Path] = []
    with contextlib.suppress(OSError, InputError):  # no folder of ours
        files = [file for file in files_below(folder / "tags") if file.suffix == ".json"]
    for file in files[:1000]:
        found = _json(file)
        run, commit, note = (found.get(field) for field in ("run", "commit", "note"))
        if _NAME.fullmatch(file.stem):
            run = one_line(run) if isinstance(run, str) else None
            commit = commit if isinstance(commit, int) and abs(commit) < 2**62 else None
            date = one_line(found.get("date", ""))
            _insert(database, Tag(file.stem, folder, run, commit, one_line(note or "", _LONGEST_LIST), date))


def _insert(database: sqlite3.Connection, tag: Tag) -> None:
    values = (tag.name, str(tag.folder), tag.run, tag.commit, tag.note, tag.date)
    database.execute("insert or replace into tags values (?, ?, ?, ?, ?, ?)", values)


def _tags(database: sqlite3.Connection) -> list[Tag]:
    found = database.execute("select name, path, run, commit_, note, date from tags order by name").fetchall()
    return [Tag(name, Path(path), *rest) for name, path, *rest in found]


def _file(tag: Tag) -> Path:
    return tag.folder / "tags" / f"{tag.name}.json"


def _require_run(folder: Path, run: str, commit: int | None) -> str:
    """Return the name of a run in a folder; raise InputError unless it is there and has that commit."""
    there = runs_in(folder)
    if not there:
        raise InputError(f"run = {shown(run)}: {folder} has no runs; leave it out")
    name = require_choice("run", str(run).removeprefix("runs/").rstrip("/"), there)
    if commit is not None:
        require_count("commit", commit, minimum=0)
        commits = len(Run.load(folder / "runs" / name).commits)
        if commit >= commits:
            raise InputError(f"commit = {commit}: the run {name} has {counted(commits, 'commit')}, from 0")
    return name


def runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder of results: ``gem-seed0``, or in a cell ``workers-5/gem-seed0``."""
    runs = folder / "runs"
    names = (path.parent.relative_to(runs).as_posix() for path in files_below(runs) if path.name == RUN)
    return sorted(name for name in names if "/." not in f"/{name}")  # what begins with a dot is half-written


def one_line(value: Any, longest: int = _LONGEST_TEXT) -> str:
    """Return any value as a short text of one line: no control characters reach a terminal."""
    text = "".join(one if one.isprintable() else "?" for one in str(value)[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _json(file: Path) -> dict[str, Any]:
    """Return the table of a JSON file; an empty one if it cannot be read."""
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        return dict(json.loads(read_text(file)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a summary as texts; none if it cannot be read."""
    try:
        if file.stat().st_size > _LARGEST:
            return []
        return read_rows(file)
    except (OSError, ValueError, csv.Error):
        return []


def _cluster(config: Mapping[str, Any]) -> str:
    """Return the cluster of a study in a few words: its workers, and what is not the default."""
    workers = config.get("workers")
    count = ", ".join(map(str, workers)) if isinstance(workers, list) else "" if workers is None else str(workers)
    said = [f"{count} worker{'' if count == '1' else 's'}"] if count else []
    for name, usual in (("topology", None), ("policy", "asynchronous"), ("protocol", "exchange")):
        value = config.get(name)
        if isinstance(value, str) and value != usual:
            said.append(value)
    return ", ".join(said)


#: The measure of a headline is the first of these columns that a summary has; and whether more of it is better.
_HEADLINES = (
    ("time_to_target", False),
    ("test_accuracy", True),
    ("test_loss", False),
    ("train_loss", False),
    ("final_loss", False),
)


def _headline(rows: Sequence[Mapping[str, str]], config: Mapping[str, Any]) -> str:
    """Return the best mean over seeds of a measure, and its method; without a measure, the mean staleness.

    A study whose runs differ in more than method, learning rate and seed has no best: its means go from the least to
    the most.
    """
    options = [name for name in results.cell_options(config) if name != "learning_rate"]
    unlike = [name for name in options if len({row.get(name) for row in rows}) > 1]
    for column, more in _HEADLINES:
        groups: dict[tuple[str, ...], list[float]] = {}
        for row in rows:
            conditions = (str(row.get(name) or "") for name in ("method", "method.learning_rate", *unlike))
            with contextlib.suppress(KeyError, TypeError, ValueError):
                value = float(row[column])
                groups.setdefault(tuple(conditions), []).append(value)
        means = {key: sum(seeds) / len(seeds) for key, seeds in groups.items()}
        means = {key: mean for key, mean in means.items() if math.isfinite(mean)}
        if not means:
            continue
        name, unit = column.replace("_", " "), " s" if column == "time_to_target" else ""
        if unlike:
            ends = dict.fromkeys(map(number_text, (min(means.values()), max(means.values()))))
            return f"{name} {' to '.join(ends)}{unit}, by {', '.join(unlike)}"
        best = (max if more else min)(means, key=means.__getitem__)
        return f"{name} {number_text(means[best])}{unit} {best[0]}".rstrip()
    with contextlib.suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        values = [float(row["trace.staleness_mean"]) for row in rows]
        return f"staleness {number_text(sum(values) / len(values))}"
    return ""


@contextlib.contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open the index; one that is damaged, or of another version, is made anew.

    Raises
    ------
    InputError
        The user's data folder cannot be written.
    """
    file = results.index_folder() / "index.sqlite"
    try:
        results.private_file(file)
        try:
            database = _opened(file)
        except _OF_SQLITE as error:
            if not _is_damage(error):
                raise
            file.unlink(missing_ok=True)
            database = _opened(results.private_file(file))
        with contextlib.closing(database):
            yield database
    except (OSError, *_OF_SQLITE) as error:
        if isinstance(error, _OF_SQLITE) and _is_damage(error):  # met while in use
            file.unlink(missing_ok=True)
            raise InputError(f"index = {str(file)!r}: was damaged, and is removed; give the command again") from error
        raise InputError(
            f"index = {str(file)!r}: cannot be used: {error}; set ASYNCSIM_INDEX to a folder that can be written"
        ) from error


#: Errors of SQLite, whose messages about a damaged file may be no text.
_OF_SQLITE = (sqlite3.Error, UnicodeDecodeError)
#: What SQLite reports of a place that cannot be used; whatever else it reports is wrong with the file.
_OF_THE_PLACE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL),
)


def _is_damage(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _OF_THE_PLACE


def _opened(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=60, isolation_level=None)
    try:
        if database.execute("pragma integrity_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("damaged")
        if database.execute("pragma user_version").fetchone()[0] != _VERSION:
            with _writing(database):
                if database.execute("pragma user_version").fetchone()[0] != _VERSION:  # not by another meanwhile
                    for table in ("folders", "tags"):
                        database.execute(f"drop table if exists {table}")
                    for statement in _SCHEMA.strip().split(";")[:-1]:
                        database.execute(statement)
                    database.execute(f"pragma user_version = {_VERSION}")
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def _writing(database: sqlite3.Connection) -> Iterator[None]:
    """Make all changes inside, or none; other processes wait."""
    database.execute("begin immediate")
    try:
        yield
        database.execute("commit")
    except BaseException:
        if database.in_transaction:
            database.execute("rollback")
        raise
