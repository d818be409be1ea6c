"""Files and folders of results: written whole or not at all, and never through a link.

A folder of results may come from a stranger. So inside one, only plain files and folders are
followed, read, written, moved or removed: no link, FIFO or device. `require_plain` is this rule,
and every function here that takes a path applies it. A write goes to a new file with a random name,
which is renamed when it is complete.
"""

import contextlib
import csv
import dataclasses
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.base.errors import InputError, shown

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    import pandas as pd

#: The entry of a JSON file with the SHA-256 of the others.
CHECKSUM = "sha256"
#: The files that mark a folder of results: of a study, and of a run; and an entry of each.
CONFIG, RUN = "config.json", "run.json"
_MARKS = {CONFIG: "study", RUN: "diverged_at"}
#: The folder, inside a study's, to which a resumed study moves files that it cannot use.
SET_ASIDE = "aside"
#: Names of half-written files and folders, left by killed processes.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial(\.[^.]*)?", re.DOTALL)
#: Characters replaced in the names of folders; letters, digits and the signs of options' texts
#: stay.
_UNSAFE = re.compile(r"^\.|[^\w .,:+*%@=()\[\]'\"-]")
#: Longest name of a file or folder, without suffix, in bytes: file systems allow 255.
_LONGEST_NAME = 200
#: Flags of an exclusive new file; not every system has all of them.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


def results_of(path: Path) -> Path | None:
    """Return the outermost folder of results that is a path or contains it; None without one.

    Links above that folder, and the folder itself as a link, are the user's own.
    """
    path = _absolute(path)
    return next((folder for folder in (*reversed(path.parents), path) if _is_results(folder)), None)


def require_plain(path: Path) -> Path:
    """Return a path; raise InputError if it is or crosses a link or a device inside a folder of
    results.
    """
    folder = results_of(path)
    if folder is None:
        return path
    place = folder
    for part in _absolute(path).relative_to(folder).parts:
        place = place / part
        try:
            mode = os.lstat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            break
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise InputError(
                f"{str(place)!r}: is {kind}, and only files and folders are used inside the folder "
                "of "
                f"results {folder.name!r}; replace it by a copy, or remove it"
            )
    return path


def within(folder: Path, name: Any) -> Path:
    """Return a path that a table names; raise InputError if it is outside ``folder``."""
    path = Path(str(name))
    if path.is_absolute() or ".." in path.parts or not str(name).isprintable():
        raise InputError(
            f"folder = {str(folder)!r}: names {shown(str(name))}, which is not inside; mistrust it"
        )
    return folder / path


def folder_name(text: str) -> str:
    """Convert a text to the name of a file or folder: unsafe characters become "-", a long text is
    cut, and a changed one ends with a hash.
    """
    safe = _UNSAFE.sub("-", text)
    if len(safe.encode()) > _LONGEST_NAME:
        safe = safe.encode()[: _LONGEST_NAME - 9].decode(errors="ignore")
    return safe if safe == text else f"{safe}-{zlib.crc32(text.encode()):08x}"


def _absolute(path: Path) -> Path:
    """Return an absolute path without "..", each resolved together with the folders before it."""
    path = path.absolute()
    if ".." not in path.parts:
        return path
    end = len(path.parts) - path.parts[::-1].index("..")
    return Path(os.path.realpath(Path(*path.parts[:end])), *path.parts[end:])


def _is_results(folder: Path) -> bool:
    """Return whether a folder has a file that marks results, or is locked by this process."""
    if any(folder == locked.folder for locked in _locked):
        return True
    for name, entry in _MARKS.items():
        file = os.path.join(folder, name)  # not Path: called for every folder above every file
        try:
            mark = os.lstat(file)
        except (OSError, ValueError):
            continue
        if not stat.S_ISREG(mark.st_mode) or _has_entry(
            entry, file, mark.st_ino, mark.st_mtime_ns, mark.st_size
        ):
            return True
    return False


@functools.lru_cache(maxsize=1000)
def _has_entry(entry: str, file: str, *_version: int) -> bool:
    """Return whether a JSON file has an entry or cannot be read; cached by version of the file.

    Other programs also have files with the names that mark folders of results.
    """
    try:
        values = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(values, dict) and entry in values


class LockedFolder:
    """A folder locked by this process, and the list of files written there.

    ``argument``: the argument that named it.
    """

    def __init__(self, folder: Path, argument: str):
        self.folder, self._argument, self._identity = _absolute(folder), argument, _identity(folder)
        #: Files and folders in the order of their creation.
        self.written: dict[Path, None] = {}

    @property
    def is_there(self) -> bool:
        """Whether its path still leads to this folder, and not to a new one or nowhere."""
        return _identity(self.folder) == self._identity

    def contains(self, path: Path) -> bool:
        """Return whether a path lies inside."""
        return _absolute(path).is_relative_to(self.folder)

    def require_there(self) -> None:
        """Raise InputError if its path leads nowhere, or to another folder."""
        if not self.is_there:
            raise InputError(
                f"{self._argument} = {str(self.folder)!r}: was removed, or replaced by another "
                "folder, while this "
                "ran; nothing more is written; start again with a folder that stays"
            )

    def remove_written(self) -> None:
        """Remove the listed files and folders only: neither files of others nor the folder
        itself.
        """
        for path in reversed(self.written) if self.is_there else ():
            with contextlib.suppress(OSError, InputError):  # folders with foreign files
                require_plain(path)
                path.rmdir() if path.is_dir() else path.unlink()


#: The folders locked by this process.
_locked: list[LockedFolder] = []


@contextlib.contextmanager
def alone_in(folder: Path, argument: str) -> Iterator[LockedFolder]:
    """Lock a folder against other processes and threads; ``argument`` is the argument that named
    it.

    Files that this module writes there are listed; writing is an InputError once the folder was
    removed or replaced.

    Raises
    ------
    InputError
        If it is locked already, or cannot be read as a folder.
    """
    try:
        # Windows cannot open folders.
        descriptor = (
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if sys.platform != "win32" else None
        )
        locked = LockedFolder(folder, argument)
    except OSError as error:
        raise InputError(
            f"{argument} = {str(folder)!r}: cannot be read: {error.strerror}; give another"
        ) from error
    try:
        if descriptor is not None and not lock(descriptor):
            raise InputError(
                f"{argument} = {str(folder)!r}: another process writes there; wait for its end, or "
                "give another folder"
            )
        _locked.append(locked)
        yield locked
    finally:
        if locked in _locked:
            _locked.remove(locked)
        if descriptor is not None:
            os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; return False if it is locked on this machine.

    The end of a process ends its locks. Systems and file systems without locks lock nothing.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def partial_of(path: Path) -> Path:
    """Return a new path beside another, for a half-written file or folder."""
    return path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial{path.suffix}")


def free_folder(stem: str) -> Path:
    """Return the first path of ``stem``, ``stem-2``, ``stem-3``, ... at which nothing exists."""
    numbers = (Path(stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
    return next(path for path in numbers if not os.path.lexists(path))


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Create a folder as a whole: yield a hidden folder, which gets the name at the end.

    Nothing is left behind after an error. Raises InputError if it cannot be written.
    """
    partial = partial_of(path)
    try:
        make_folder(path.parent)
        require_plain(path)
        partial.mkdir()
        yield partial
        put_in_place(partial, path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise InputError(
                f"{str(path)!r}: cannot be written: {error.strerror or error}; give a folder that "
                "can"
            ) from error
        raise


def write_whole(path: Path, write: Callable[[Path], Any], mode: int = 0o666) -> Path:
    """Write a file under a random name, and rename it when it is complete and on disk.

    Missing folders are created. ``write`` gets the path of the new, empty file; ``mode``: its
    permissions, less the umask's.

    Raises
    ------
    InputError
        If it cannot be written (a full disk, a missing permission, a link in its place); nothing is
        left behind then. Or if a locked folder around it was removed meanwhile.
    """
    partial = partial_of(path)
    try:
        make_folder(path.parent)
        require_plain(path)
        os.close(os.open(partial, _NEW, mode))
        write(partial)
        put_in_place(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise InputError(
                f"{str(path)!r}: cannot be written: {error.strerror or error}"
            ) from error
        raise
    return path


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, unless it exists.

    Raises
    ------
    InputError
        If it is, or crosses, a link inside a folder of results; or if a locked folder around it was
        removed meanwhile.
    """
    _holders(folder)
    if not require_plain(folder).is_dir():
        make_folder(folder.parent)
        _list(folder)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as error:  # a file
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
        _sync(folder.parent)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file to read.

    Raises
    ------
    InputError
        If it is, or crosses, a link inside a folder of results; or if it is a FIFO or a device,
        wherever it lies.
    OSError
        If it cannot be read.
    """
    mode = os.stat(require_plain(path)).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise InputError(f"{str(path)!r}: is no regular file; give one")
    return path.open("rb")


def read_text(path: Path) -> str:
    """Read a text file; see `open_file`."""
    with open_file(path) as file:
        return file.read().decode()


def files_below(folder: Path) -> list[Path]:
    """List the plain files in a folder and in those inside it, sorted; none without the folder.

    Raises
    ------
    InputError
        If the folder is, or crosses, a link inside a folder of results.
    """
    inside = (
        Path(place, name) for place, _, names in os.walk(require_plain(folder)) for name in names
    )
    return sorted(path for path in inside if stat.S_ISREG(os.lstat(path).st_mode))


def remove(path: Path) -> None:
    """Remove a file if it exists; raise InputError for a link inside a folder of results."""
    require_plain(path).unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Remove the half-written files and folders that killed processes left."""
    for place, _, names in os.walk(require_plain(folder), topdown=False):
        is_half = any(map(_PARTIAL.fullmatch, Path(place).relative_to(folder).parts))
        for path in (Path(place, name) for name in names if is_half or _PARTIAL.fullmatch(name)):
            if stat.S_ISREG(os.lstat(path).st_mode):
                path.unlink()
        if is_half:
            with contextlib.suppress(OSError):  # it has other files
                os.rmdir(place)


def set_aside(folder: Path, name: str) -> Path:
    """Move a file or folder inside a folder of results out of the way; return its new path."""
    source = require_plain(folder / name)
    for number in itertools.count(1):
        target = folder / SET_ASIDE / (name if number == 1 else f"{name}-{number}")
        if not os.path.lexists(target):
            break
    make_folder(target.parent)
    os.rename(source, target)
    _sync(source.parent)
    _sync(target.parent)
    return target


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete file or folder: after a power loss all of it is there or nothing."""
    inside = sorted(partial.iterdir()) if partial.is_dir() else []
    for entry in (*inside, partial):
        _sync(entry)
    _list(path, *(path / entry.name for entry in inside))
    os.replace(partial, path)
    _sync(path.parent)


def _list(path: Path, *inside: Path) -> None:
    """Record new files of a locked folder; raise InputError if it was removed or replaced."""
    for locked in _holders(path):
        locked.written.update(dict.fromkeys(file.absolute() for file in (path, *inside)))


def _holders(path: Path) -> list[LockedFolder]:
    """Return the locked folders around a path; raise InputError if one was removed or replaced."""
    holders = [locked for locked in _locked if locked.contains(path)]
    for locked in holders:
        locked.require_there()
    return holders


def _sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    folder = path.is_dir()
    if folder and sys.platform == "win32":  # cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError:
        if not folder:  # some file systems support it for files only
            raise
    finally:
        os.close(descriptor)


def field_values(value: Any, kind: Any = None) -> dict[str, Any]:
    """Return the fields of a dataclass by name; ``kind``: only the fields of this base class."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind or value)}


def plain(value: Any) -> Any:
    """Convert a value for JSON: functions to their names, and values of unknown types to texts."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # arrays, and NumPy's numbers
        return value.tolist()
    if callable(value):  # its text differs between runs
        return f"function {getattr(value, '__name__', type(value).__name__)}"
    return value if isinstance(value, str | int | float | None) else str(value)


def write_text(path: Path, text: str, mode: int = 0o666) -> Path:
    """Write a text file; see `write_whole`."""
    return write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"), mode)


def write_json(path: Path, values: Any) -> Path:
    """Write plain values as an indented JSON file."""
    return write_text(path, json.dumps(values, indent=1) + "\n")


def sealed(values: Mapping[str, Any]) -> str:
    """Format values as the text of a JSON file that ends with their checksum; see `unsealed`."""
    body = {name: value for name, value in values.items() if name != CHECKSUM}
    checksum = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, CHECKSUM: checksum}, indent=1) + "\n"


def write_sealed(path: Path, values: Mapping[str, Any]) -> Path:
    """Write plain values as a JSON file with a checksum."""
    return write_text(path, sealed(values))


def unsealed(file: Path, version: int | None = None) -> dict[str, Any]:
    """Read the values of a JSON file; check their checksum and, if given, the ``format``'s version.

    Raises
    ------
    ValueError
        If it was changed, is of another format, or is no table in JSON.
    OSError
        If it cannot be read.
    """
    text = read_text(file)
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("no table in JSON")
        if version is not None and values.get("format") != version:
            raise ValueError(
                f"of format {values.get('format')!r}, this asyncsim reads {version}; make it again"
            )
        if sealed(values) != text:
            raise ValueError("its checksum is of other values: it was damaged, or changed by hand")
    except RecursionError:
        raise ValueError("nested too deeply for JSON") from None
    del values[CHECKSUM]
    return values


def write_csv(path: Path, table: "pd.DataFrame") -> Path:
    """Write a table, with all digits of its numbers."""
    return write_whole(path, lambda partial: table.to_csv(partial, index=False))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file as texts by column; see `open_file`."""
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def read_table(path: Path) -> "pd.DataFrame":
    """Read a table of `write_csv`: the same numbers to the last bit, and texts unchanged."""
    import pandas as pd

    with open_file(path) as file:
        return pd.read_csv(file, keep_default_na=False, na_values=[""])
