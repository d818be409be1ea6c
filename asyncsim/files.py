"""Files that are whole or not there, and tables that keep every digit."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


@contextlib.contextmanager
def alone_in(folder: Path, argument: str) -> Iterator[None]:
    """Let no other process, nor another thread, do the same in a folder meanwhile; ``argument`` is what named it.

    Raises
    ------
    InputError
        One does already, or it is no folder that can be read.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None  # which opens no folders
    except OSError as error:
        raise InputError(f"{argument} = {str(folder)!r}: cannot be read: {error.strerror}; give another") from error
    try:
        if descriptor is not None and not lock(descriptor):
            raise InputError(
                f"{argument} = {str(folder)!r}: another process writes there; wait for its end, or give another folder"
            )
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


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
    """Write a file under a temporary name and rename it when it is whole; create its folder if needed.

    Raises
    ------
    InputError
        It cannot be written (a full disk, a missing permission); nothing is left behind then.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise InputError(f"{str(path)!r}: cannot be written: {error.strerror or error}") from error
        raise
    return path


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


def write_csv(path: Path, table: "pd.DataFrame") -> Path:
    """Write a table, numbers with all their digits."""
    return write_whole(path, lambda partial: table.to_csv(partial, index=False))


def read_table(path: Path) -> "pd.DataFrame":
    """Read what `write_csv` wrote: the same numbers to the last bit, and no text taken for a missing number."""
    import pandas as pd

    return pd.read_csv(path, keep_default_na=False, na_values=[""])
