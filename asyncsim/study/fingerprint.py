"""What functions and data are, in a few letters: the same from one process to the next, others where they differ."""

import dataclasses
import dis
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

#: Packages whose functions are not followed to what these name in turn.
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "equinox", "builtins", *sys.stdlib_module_names)


def fingerprint(value: Any) -> str:
    """Return what tells a value from others: numbers, arrays, containers of these, and functions by what they do.

    A function is its compiled code, its defaults, what it has closed over, and the functions and data that it names in
    its file, or takes from modules that are files of the user's own. An object is its class's functions and its
    attributes. Comments and where a function stands do not count, and neither does another docstring. Not seen is what
    libraries do, and the state of objects that keep it elsewhere (generators of random numbers, tables).
    """
    try:
        return _digest(value, {}, {}).hex()
    except RecursionError:
        return hashlib.blake2b(type(value).__qualname__.encode(), digest_size=8).hexdigest()


def _digest(value: Any, path: dict[int, int], done: dict[int, tuple[Any, bytes]]) -> bytes:
    """Return a digest of a value; ``path`` has the places of those that it lies in, ``done`` what is known by id.

    What is known is kept there with its value, so that nothing else gets its id.
    """
    digest = hashlib.blake2b(type(value).__qualname__.encode(), digest_size=8)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        digest.update(repr(value).encode())
    elif id(value) in path:  # as a function that calls itself
        digest.update(f"{len(path) - path[id(value)]} out".encode())
    elif id(value) in done:
        return done[id(value)][1]
    else:
        path[id(value)] = len(path)
        if isinstance(value, np.ndarray | jax.Array):
            value_parts = list(_array_parts(value, path, done))
        else:
            value_parts = [_digest(item, path, done) for item in _items(value)]
            if isinstance(value, set | frozenset):  # in another order in another process
                value_parts.sort()
        del path[id(value)]
        for part in value_parts:
            digest.update(part)
        done[id(value)] = value, digest.digest()
    return digest.digest()


def _array_parts(array: Any, path: dict[int, int], done: dict[int, tuple[Any, bytes]]) -> Iterator[bytes]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.ascontiguousarray(array)
    yield f"{array.dtype}{array.shape}".encode()
    yield array.tobytes() if array.dtype != object else _digest(array.tolist(), path, done)


def _items(value: Any) -> Iterator[Any]:
    """Yield what makes a value that is no leaf; of what is unknown, its name."""
    if isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, item)
    elif isinstance(value, types.CodeType):
        yield from _code_items(value, value.co_consts)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _function_items(value)
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # compiled functions
        yield wrapped
    else:
        yield from _object_items(value)


def _object_items(value: Any) -> Iterator[Any]:
    name = getattr(value, "__qualname__", "")
    yield name if isinstance(name, str) else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name)
    kind = value if isinstance(value, type) else type(value)
    if _is_of_package(kind):
        return
    for one in kind.__mro__:
        if not _is_of_package(one):
            members = vars(one)
            yield from (members[at] for at in sorted(members) if isinstance(members[at], types.FunctionType))
    if not isinstance(value, type):
        own = inspect.getattr_static(value, "__dict__", None)
        if own is not None:
            yield dict(sorted(vars(value).items()))


def _code_items(code: types.CodeType, constants: tuple[Any, ...]) -> Iterator[Any]:
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    yield from (code.co_code, code.co_names, constants, arguments, code.co_flags, code.co_freevars)
    yield code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _function_items(function: types.FunctionType) -> Iterator[Any]:
    code = function.__code__
    # A docstring is the first of the constants.
    yield from _code_items(code, code.co_consts[1:] if function.__doc__ is not None else code.co_consts)
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing was put there
            yield None
    if _is_of_package(function):
        return
    for name in sorted(_globals_of(code)):
        named = function.__globals__.get(name)
        if isinstance(named, types.ModuleType):
            yield name
            if _is_own(named):
                yield from (vars(named)[at] for at in sorted(_attributes_of(code)) if at in vars(named))
        elif isinstance(named, types.FunctionType | type) and _is_of_package(named):
            yield name
        else:
            yield named


def _is_of_package(function: Any) -> bool:
    """Return whether a function or class comes with Python or a library, not with somebody's method."""
    return str(function.__module__ or "").partition(".")[0] in _PACKAGES


def _is_own(module: types.ModuleType) -> bool:
    """Return whether a module is a file of the user's own, and not of a library."""
    parts = Path(getattr(module, "__file__", None) or "site-packages").parts
    known = module.__name__.partition(".")[0] in (*_PACKAGES, "asyncsim")
    return not known and not {"site-packages", "dist-packages"} & {*parts}


def _attributes_of(code: types.CodeType) -> set[str]:
    """Return the names that a function and those inside it look for in anything, as in modules."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return own.union(*map(_attributes_of, inner))


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names that a function and those inside it look for in their file."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return own.union(*map(_globals_of, inner))
