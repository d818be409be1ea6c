"""Files that are whole or not there, and tables that keep every digit."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

#: The entry of a JSON file that has the SHA-256 of the others.
CHECKSUM = "sha256"


class Held:
    """A folder that this process has to itself, and what was written there.

    ``argument``: what named it.
    """

    def __init__(self, folder: Path, argument: str):
        self._folder, self._argument, self._identity = folder.absolute(), argument, _identity(folder)
        #: Files and folders in the order in which they were made.
        self.written: dict[Path, None] = {}

    @property
    def is_there(self) -> bool:
        """Whether its path still leads to it: somebody may have removed it, and others made it again."""
        return _identity(self._folder) == self._identity

    def has(self, path: Path) -> bool:
        """Return whether a path lies inside."""
        return path.is_relative_to(self._folder)

    def require_there(self) -> None:
        """Raise InputError if its path leads to nothing, or to another folder."""
        if not self.is_there:
            raise InputError(
                f"{self._argument} = {str(self._folder)!r}: was removed, or replaced by another folder, while this "
                "ran; nothing more is written; start again with a folder that stays"
            )

    def remove_written(self) -> None:
        """Remove what was written, and nothing else: no file that others have put there, nor the folder around it."""
        for path in reversed(self.written) if self.is_there else ():
            with contextlib.suppress(OSError):  # of folders in which others have something
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


#: The folders that this process has to itself.
_held: list[Held] = []


@contextlib.contextmanager
def alone_in(folder: Path, argument: str) -> Iterator[Held]:
    """Let no other process, nor another thread, do the same in a folder meanwhile; ``argument`` is what named it.

    What this module writes there is listed, and is an InputError once the folder was removed or replaced.

    Raises
    ------
    InputError
        One does already, or it is no folder that can be read.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None  # which opens no folders
        held = Held(folder, argument)
    except OSError as error:
        raise InputError(f"{argument} = {str(folder)!r}: cannot be read: {error.strerror}; give another") from error
    try:
        if descriptor is not None and not lock(descriptor):
            raise InputError(
                f"{argument} = {str(folder)!r}: another process writes there; wait for its end, or give another folder"
            )
        _held.append(held)
        yield held
    finally:
        if held in _held:
            _held.remove(held)
        if descriptor is not None:
            os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; return False if it is locked already, on this machine.

    The end of a process, however it comes, ends its locks. Where the system or the file system knows none, there is
    none.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of a file system without locks
        pass
    return True


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write a file under a temporary name, and rename it when it is whole and on disk; make its folder if needed.

    Raises
    ------
    InputError
        It cannot be written (a full disk, a missing permission); nothing is left behind then. Or it lies in a folder
        that this process had to itself, and that was removed meanwhile.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        make_folder(path.parent)
        write(partial)
        put_in_place(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise InputError(f"{str(path)!r}: cannot be written: {error.strerror or error}") from error
        raise
    return path


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises
    ------
    InputError
        It lies in a folder that this process had to itself, and that was removed meanwhile.
    """
    _holders(folder)
    if not folder.is_dir():
        make_folder(folder.parent)
        _list(folder)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a whole file or folder of files: after a loss of power either all of it is there or nothing."""
    inside = sorted(partial.iterdir()) if partial.is_dir() else []
    for written in (*inside, partial):
        _sync(written)
    _list(path, *(path / entry.name for entry in inside))
    os.replace(partial, path)
    _sync(path.parent)


def _list(path: Path, *inside: Path) -> None:
    """List what comes into a held folder; raise InputError if that is not there any more."""
    for held in _holders(path):
        held.written.update(dict.fromkeys(one.absolute() for one in (path, *inside)))


def _holders(path: Path) -> list[Held]:
    """Return the held folders in which a path lies; raise InputError if one of them is not there any more."""
    found = [held for held in _held if held.has(path.absolute())]
    for held in found:
        held.require_there()
    return found


def _sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    folder = path.is_dir()
    if folder and sys.platform == "win32":  # which opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError:
        if not folder:  # some file systems know this of files only
            raise
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: of a function its name, of what is no number, list or table its text."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # arrays, and NumPy's numbers
        return value.tolist()
    if callable(value):  # its text is not the same in every run
        return f"function {getattr(value, '__name__', type(value).__name__)}"
    return value if isinstance(value, str | int | float | None) else str(value)


def write_json(path: Path, values: Any) -> Path:
    """Write plain values as an indented JSON file."""
    text = json.dumps(values, indent=1) + "\n"
    return write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def sealed(values: Mapping[str, Any]) -> str:
    """Return plain values as the text of a JSON file that ends with a checksum of the others; see `unsealed`."""
    body = {name: value for name, value in values.items() if name != CHECKSUM}
    checksum = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, CHECKSUM: checksum}, indent=1) + "\n"


def write_sealed(path: Path, values: Mapping[str, Any]) -> Path:
    """Write plain values as a JSON file with a checksum."""
    text = sealed(values)
    return write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def unsealed(file: Path, version: int | None = None) -> dict[str, Any]:
    """Return the values of a JSON file that has their checksum, and the ``format`` of this version if one is given.

    Raises
    ------
    ValueError
        It was changed, is of another format, or is no table in JSON.
    OSError
        It cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("no table in JSON")
        if version is not None and values.get("format") != version:
            raise ValueError(f"of format {values.get('format')!r}, this asyncsim reads {version}; make it again")
        if sealed(values) != text:
            raise ValueError("its checksum is of other values: it was damaged, or changed by hand")
    except RecursionError:
        raise ValueError("no JSON that anybody wrote: nested too deeply") from None
    del values[CHECKSUM]
    return values


def write_csv(path: Path, table: "pd.DataFrame") -> Path:
    """Write a table, numbers with all their digits."""
    return write_whole(path, lambda partial: table.to_csv(partial, index=False))


def read_table(path: Path) -> "pd.DataFrame":
    """Read what `write_csv` wrote: the same numbers to the last bit, and no text taken for a missing number."""
    import pandas as pd

    return pd.read_csv(path, keep_default_na=False, na_values=[""])
