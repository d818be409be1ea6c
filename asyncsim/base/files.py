"""Files and folders of results: written whole or not at all, by one process in a folder at a time.

A folder of results may come from a stranger. A file is opened once, without following a link and
without blocking, and must be a regular file. A file is written under a new random name, which then
takes the place of the file or link there. `require_real` refuses folders that are links. Nothing is
removed but half-written files: `set_aside` moves what is in the way.
"""

import contextlib
import csv
import dataclasses
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
#: The files that name the contents of a study's folder, and of a run's.
CONFIG, RUN = "config.json", "run.json"
#: The folder, inside a study's, to which a resumed study moves files that it cannot use.
SET_ASIDE = "aside"
#: Names of half-written files and folders, left by killed processes.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial(\.[^.]*)?", re.DOTALL)
#: Characters replaced in the names of folders; letters, digits and the signs of options' texts
#: stay.
_UNSAFE = re.compile(r"^\.|[^\w .,:+*%@=()\[\]'\"-]")
#: Longest name of a file or folder, without suffix, in bytes: file systems allow 255.
_LONGEST_NAME = 200
#: Flags of `open_file`; not every system has all of them.
_OPEN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def folder_name(text: str) -> str:
    """Convert a text to the name of a file or folder: unsafe characters become "-", a long text is
    cut, and a changed one ends with a hash.
    """
    safe = _UNSAFE.sub("-", text)
    if len(safe.encode()) > _LONGEST_NAME:
        safe = safe.encode()[: _LONGEST_NAME - 9].decode(errors="ignore")
    return safe if safe == text else f"{safe}-{zlib.crc32(text.encode()):08x}"


def free_folder(stem: str) -> Path:
    """Return the first path of ``stem``, ``stem-2``, ``stem-3``, ... at which nothing exists."""
    numbers = (Path(stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
    return next(path for path in numbers if not os.path.lexists(path))


def within(folder: Path, name: Any) -> Path:
    """Return a path that a table names; raise InputError if it is outside ``folder``."""
    path = Path(str(name))
    if path.is_absolute() or ".." in path.parts or not str(name).isprintable():
        raise InputError(
            f"folder = {str(folder)!r}: names {shown(str(name))}, which is not inside; mistrust it"
        )
    return folder / path


def require_real(folder: Path) -> Path:
    """Return a folder; raise InputError if it, or a folder inside it, is a link."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise InputError(
                f"{str(path)!r}: is a link, and results are in real folders only; replace it by a "
                "copy, or give the folder itself"
            )
    return folder


@contextlib.contextmanager
def alone_in(folder: Path, argument: str) -> Iterator[None]:
    """Lock a folder against other processes and threads.

    ``argument``: the argument that named it, for the InputError if it is locked already, or cannot
    be read. The end of a process ends its lock. A file system without locks locks nothing.
    """
    if sys.platform == "win32":  # cannot open folders
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(
            f"{argument} = {str(folder)!r}: cannot be read: {error.strerror}; give another"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(
            f"{argument} = {str(folder)!r}: another process writes there; wait for its end, or "
            "give another folder"
        ) from error
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a new path beside another, which gets its name when it is complete and on disk.

    Missing folders are created. After an error nothing is left behind, and an OSError (a full disk,
    a missing permission) is an InputError.
    """
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.partial{path.suffix}")
    try:
        make_folder(path.parent)
        yield partial
        for entry in (*(sorted(partial.iterdir()) if partial.is_dir() else ()), partial):
            _sync(entry)
        os.replace(partial, path)
        _sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        if isinstance(error, OSError):
            raise InputError(
                f"{str(path)!r}: cannot be written: {error.strerror or error}; give a path that can"
            ) from error
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Create a folder as a whole: yield a hidden folder, which gets the name at the end."""
    with _whole(path) as partial:
        partial.mkdir()
        yield partial


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write a file under a random name, and rename it when it is complete and on disk.

    ``write`` gets the path of the new file. A link in the file's place is replaced.
    """
    with _whole(path) as partial:
        write(partial)
    return path


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, unless it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file to read, without following a link and without blocking.

    Raises
    ------
    InputError
        It is a link, a folder, a FIFO or a device.
    OSError
        It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise InputError(f"{str(path)!r}: is a link; replace it by a copy, or remove it") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{str(path)!r}: is no regular file; give one")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Read a text file; see `open_file`."""
    with open_file(path) as file:
        return file.read().decode()


def files_below(folder: Path) -> list[Path]:
    """List the plain files in a folder and in those inside it, sorted; none without the folder."""
    return sorted(path for path in folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode))


def remove_partials(folder: Path) -> None:
    """Remove the half-written files and folders that killed processes left."""
    for path in [path for path in folder.rglob(".*") if _PARTIAL.fullmatch(path.name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def set_aside(folder: Path, name: str) -> Path:
    """Move a file or folder inside a folder of results out of the way; return its new path."""
    target = free_folder(str(folder / SET_ASIDE / name))
    try:
        make_folder(target.parent)
        os.rename(folder / name, target)
    except OSError as error:
        raise InputError(
            f"{str(folder / name)!r}: cannot be moved to {target}: {error.strerror}; move it"
        ) from error
    _sync((folder / name).parent)
    _sync(target.parent)
    return target


def _sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    is_folder = path.is_dir()
    # Not every system has it for folders.
    with contextlib.suppress(OSError) if is_folder else contextlib.nullcontext():
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
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


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables, their names joined by dots."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_text(path: Path, text: str) -> Path:
    """Write a text file; see `write_whole`."""
    return write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


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
        if version is not None and values.get("format") != version:
            raise ValueError(
                f"of format {values.get('format')!r}, this asyncsim reads {version}; make it again"
            )
        if sealed(values) != text:
            raise ValueError("its checksum is of other values: it was damaged, or changed by hand")
    except AttributeError:
        raise ValueError("no table in JSON") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
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
