"""What functions and data are, in a few letters: the same from one process to the next, others where they differ."""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

#: Packages whose functions are told from others by their names: results name the versions.
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "equinox")


def fingerprint(value: Any) -> str:
    """Return what tells a value from others: numbers, arrays, containers of these, and functions by what they do.

    A function is its compiled code, its defaults, what it has closed over, and what it names of its own file that is
    a function or plain data. Comments and where it stands do not count, and neither does another docstring.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(value, {}):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """Yield what is fed to the digest; what was seen before, as a function that calls itself, only by its type."""
    yield f"<{type(value).__qualname__}>".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield repr(value).encode()
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that nothing else gets its place
    if isinstance(value, np.ndarray | jax.Array):
        yield from _array_parts(value)
    elif isinstance(value, set | frozenset):  # in another order in another process
        yield from sorted(b"".join(_parts(item, {})) for item in value)
    else:
        for item in _items(value):
            yield from _parts(item, seen)


def _array_parts(array: Any) -> Iterator[bytes]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.ascontiguousarray(array)
    yield f"{array.dtype}{array.shape}".encode()
    yield array.tobytes() if array.dtype != object else repr(array.tolist()).encode()


def _items(value: Any) -> Iterator[Any]:
    """Yield what makes a value that is no leaf; of what is unknown, its name."""
    if isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, item)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, *value.co_consts)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _function_items(value)
    elif hasattr(value, "__wrapped__"):  # compiled functions
        yield value.__wrapped__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name)
    else:
        yield getattr(value, "__qualname__", "")


def _function_items(function: types.FunctionType) -> Iterator[Any]:
    code = function.__code__
    # A docstring is the first of the constants.
    constants = code.co_consts[1:] if function.__doc__ is not None else code.co_consts
    yield from (code.co_code, code.co_names, constants, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        yield cell.cell_contents
    if function.__module__.partition(".")[0] in _PACKAGES:
        return
    for name in sorted(_names(code)):
        named = function.__globals__.get(name)
        if isinstance(named, types.FunctionType | type) and named.__module__ != function.__module__:
            continue
        if not isinstance(named, types.ModuleType):
            yield named


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and those inside it look for outside."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
