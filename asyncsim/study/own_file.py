"""Methods and problems of the user's own, of which a study is told as ``FILE.py:FUNCTION``."""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from asyncsim.errors import InputError
from asyncsim.notes import note
from asyncsim.study.loading import load_file, told_in_a_line

Made = TypeVar("Made")


def is_own(option: str, entry: Any) -> bool:
    """Return whether an entry names a function of a file; raise InputError if that is what it seems to be meant for."""
    if not isinstance(entry, str):
        return False
    if ".py:" in entry:
        return True
    if entry.endswith(".py"):
        raise InputError(f"{option} = {entry!r}: is a file; name its function, too: {entry}:FUNCTION")
    if ":" in entry:
        raise InputError(f"{option} = {entry!r}: write FILE.py:FUNCTION for one of your own")
    return False


def load(option: str, entry: str) -> Callable[..., Any]:
    """Return the function that ``FILE.py:FUNCTION`` names; raise InputError if there is none."""
    text, _, name = entry.rpartition(":")
    path = Path(text).absolute()
    if not path.is_file():
        raise InputError(f"{option} = {entry!r}: there is no file {text}")
    if str(path.parent) not in sys.path:  # as of a script: what lies beside it can be imported
        sys.path.insert(0, str(path.parent))
    try:
        module = load_file(f"asyncsim.own.{path.stem}", path)
    except (Exception, SystemExit) as error:
        raise InputError(f"{option} = {entry!r}: cannot be imported: {told_in_a_line(error, str(path))}") from error
    found = getattr(module, name, None)
    if not callable(found):
        if found is not None:
            wanted = "Method" if option == "methods" else "Problem"
            raise InputError(
                f"{option} = {entry!r}: {name} is a {type(found).__name__}, must be a function that returns a {wanted}"
            )
        raise InputError(f"{option} = {entry!r}: {text} has no function {name}")
    return found


def make(option: str, entry: str, kind: type[Made], example: str, function: Callable[..., Any]) -> Made:
    """Return what a function makes; raise InputError if it fails or makes something else.

    ``example`` makes one of the kind, for the message.
    """
    try:
        made = function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        path = str(Path(entry.rpartition(":")[0]).absolute())
        raise InputError(f"{option} = {entry!r}: cannot be made: {told_in_a_line(error, path)}") from error
    if not isinstance(made, kind):
        raise InputError(f"{option} = {entry!r}: returned {made!r}; must return a {kind.__name__}, as {example} does")
    return made


def arguments(
    option: str, entry: str, function: Callable[..., Any], offered: Mapping[str, Any], chosen: Collection[str]
) -> dict[str, Any]:
    """Return those of the offered options, by name, that were chosen; of the others the function's own defaults stand.

    Where these are others than the study's, that is said aloud.

    Raises
    ------
    InputError
        An argument has neither a default nor a value.
    """
    given = {name: value for name, value in offered.items() if name in chosen}
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise InputError(f"{option} = {entry!r}: {error}; give every argument a default") from error
    own = {name: inspect.signature(function).parameters[name].default for name in offered if name not in given}
    # Others than numbers and texts, schedules say, cannot be compared or told in short; None leaves the choice open.
    kept = [
        f"{name} = {default!r} (the study's: {offered[name]!r})"
        for name, default in own.items()
        if isinstance(default, int | float | str) and offered[name] is not None and default != offered[name]
    ]
    if kept:
        note(f"{entry} keeps its own {', '.join(kept)}")
    return given
