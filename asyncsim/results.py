"""A study's folder of results: nothing half-written is ever taken for a result."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def new_folder(out: str | os.PathLike | None, study: str) -> Path:
    """Make the folder that a study writes to.

    Parameters
    ----------
    out : path, optional
        Must not exist, or be empty; else the first free one of ``results/STUDY``, ``results/STUDY-2``, ...

    Raises
    ------
    InputError
        The folder holds something already, or cannot be made or written.
    """
    folder = _first_free(Path("results") / study) if out is None else Path(out)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"out = {str(folder)!r}: exists and is not an empty folder; give another, or remove it first")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise InputError(
            f"out = {str(folder)!r}: cannot be written: {error.strerror or error}; give a folder that can"
        ) from error
    return folder


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
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"{str(path)!r}: cannot be written: {error.strerror or error}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, values: Any) -> Path:
    """Write plain values as an indented JSON file."""
    return write_whole(path, lambda partial: partial.write_text(json.dumps(values, indent=1) + "\n"))


def write_csv(path: Path, table: "pd.DataFrame") -> Path:
    """Write a table, numbers with all their digits."""
    return write_whole(path, lambda partial: table.to_csv(partial, index=False))


def _first_free(folder: Path) -> Path:
    if not folder.exists():
        return folder
    return next(
        candidate
        for number in itertools.count(2)
        if not (candidate := folder.with_name(f"{folder.name}-{number}")).exists()
    )
