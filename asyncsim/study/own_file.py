"""Methods and problems of the user's own: ``FILE.py:FUNCTION``, and how they are recognised when a study goes on."""

import dataclasses
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from asyncsim.errors import InputError
from asyncsim.study import results
from asyncsim.study.loading import load_file, sha256, told_in_a_line
from asyncsim.wording import note, split_names

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
    text, name = _halves(entry)
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


def files_of(options: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the files of all ``FILE.py:FUNCTION`` in the values of options: option and sha256 by path."""
    found = {}
    for option, value in options.items():
        entries = value if isinstance(value, tuple | list) else (value,)
        texts = [one for one in entries if isinstance(one, str)]
        for entry in dict.fromkeys([*texts, *split_names(texts)]):
            file, _ = _halves(entry)
            if file and Path(file).is_file():
                found[file] = option, sha256(Path(file).read_bytes())
    return found


def require_as_they_were(values: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError for a file in values of options that only a folder of results names, if it may be a stranger's.

    It is imported again only if its hash is that which is recorded and it lies outside the folder; or if it is typed.
    """
    recorded = results.config_of(folder).get(results.FILES)
    for file, (option, found) in files_of(values).items():
        if folder.resolve() in Path(file).resolve().parents:
            why = "lies inside the results"
        elif not isinstance(recorded, dict) or recorded.get(file) != found:
            why = "is not the file that it was"
        else:
            continue
        raise InputError(
            f"resume = {str(folder)!r}: {file} {why}, so it is not run because {results.CONFIG} names it; give "
            f"--{option.replace('_', '-')} again if you trust it"
        )


def _halves(entry: str) -> tuple[str, str]:
    file, _, name = entry.rpartition(":")
    return file, name


class Unrecognised(Exception):
    """A function that is in no file."""


def recognised(value: Any) -> str | None:
    """Return a hash by which a method or a problem is recognised, also in another process.

    Of its functions it has the files, with what these import from the same folder, and what they have closed over; of
    data the bytes. Not seen are libraries, and objects of other kinds than these. None if a function is in no file, as
    those of a notebook are.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(value, {}):
            digest.update(part)
    except Unrecognised:
        return None
    return digest.hexdigest()[:16]


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yield the bytes of what makes a value; ``seen`` has those before it, which come once, by their id."""
    yield f"{type(value).__qualname__}:".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{value!r};".encode()
        return
    if id(value) in seen:
        yield f"{seen[id(value)][0]};".encode()
        return
    seen[id(value)] = len(seen), value
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        items: Any = (value.tolist(),) if value.dtype == object else ()
        yield b"" if items else f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif hasattr(value, "dtype"):  # keys of random numbers
        items = (str(value),)
    elif isinstance(value, Mapping):
        items = [one for item in value.items() for one in item]
    elif isinstance(value, tuple | list):
        items = value
    elif isinstance(value, set | frozenset):
        items = sorted(value, key=repr)
    elif isinstance(value, functools.partial):
        items = (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        items = (value.__func__, value.__self__)
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # compiled functions
        items = (wrapped,)
    elif isinstance(value, types.FunctionType):
        code, cells = value.__code__, value.__closure__ or ()
        yield _source(code.co_filename, value.__globals__) + f"{code.co_qualname}:{code.co_firstlineno}".encode()
        filled = [cell.cell_contents for cell in cells if cell != types.CellType()]  # not those without a value
        items = (value.__defaults__, value.__kwdefaults__, filled)
    else:
        kind = value if isinstance(value, type) else type(value)
        items = (f"{kind.__module__}.{kind.__qualname__}", str(getattr(value, "__name__", "")))
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is not None and not _is_of_library(file):
            yield _source(file, vars(sys.modules[kind.__module__]))
            items = (*items, {} if isinstance(value, type) else getattr(value, "__dict__", {}))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = (*items, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    for item in items:
        yield from _parts(item, seen)
    yield f";{len(items)}".encode()


def _source(file: str, namespace: Mapping[str, Any]) -> bytes:
    """Return the hashes of a file and of those in its folder from which its namespace has something."""
    if _is_of_library(file):
        return b"library"
    found: dict[str, bytes] = {}
    open_files = [(file, namespace)]
    while open_files:
        path, names = open_files.pop()
        if path in found:
            continue
        try:
            found[path] = sha256(Path(path).read_bytes()).encode()
        except OSError:
            raise Unrecognised from None
        for named in list(names.values()):
            name = named.__name__ if isinstance(named, types.ModuleType) else getattr(named, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            beside = getattr(module, "__file__", None)
            if beside and Path(beside).parent == Path(file).parent:
                open_files.append((beside, vars(module)))
    return b"".join(sorted(found.values()))


@functools.cache
def _is_of_library(file: str) -> bool:
    standard = Path(sysconfig.get_paths()["stdlib"]) in Path(file).parents
    return standard or file.startswith("<frozen") or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


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
