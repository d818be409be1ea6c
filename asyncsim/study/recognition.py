"""How methods, problems and their data are recognised when a study goes on: by the hashes of their files."""

import dataclasses
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncsim.study.loading import sha256


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
