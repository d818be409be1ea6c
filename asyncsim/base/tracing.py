"""Tracing users' functions, their failures, and the precision of JAX."""

import contextlib
import inspect
import re
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

from asyncsim.base.console import show_compilation
from asyncsim.base.errors import InputError

#: Folders of files that are not the user's, besides installed packages.
_OURS = Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parents[1]
_PACKAGES = {"site-packages", "dist-packages"}
#: Names of the files of a notebook's cells.
_CELLS = ("<ipython-input", "ipykernel_")
#: Addresses of functions in the text of a program.
_ADDRESS = re.compile(r"0x[0-9a-f]+")

#: The precisions, 64 bits or not, of functions in JAX's caches.
_precisions: set[bool] = set()
_lock = threading.Lock()

#: The events of JAX's steps of a compilation: a number when a step begins, its duration at its end.
_COMPILATION = "/jax/core/compile/"


def _begin(event: str, value: float | int, **_: str | int) -> None:
    if event.startswith(_COMPILATION):
        show_compilation(True)


def _end(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith(_COMPILATION):
        show_compilation(False)


jax.monitoring.register_scalar_listener(_begin)
jax.monitoring.register_event_duration_secs_listener(_end)


def forget_other_precision() -> None:
    """Clear JAX's caches if they hold traces in another precision; call it before a run is traced.

    JAX converts a NumPy array in a function's closure once, and gives the copy to every trace as
    long as one of them is in its caches: a loss that was traced in float32 would get a float32
    array in float64, too, which it rounds silently or cannot compile. So each change of precision
    compiles again.
    """
    present = jax.config.read("jax_enable_x64")
    with _lock:
        if _precisions - {present}:
            jax.clear_caches()
            _precisions.clear()
        _precisions.add(present)


def jax_settings() -> dict[str, Any]:
    """Return the settings of JAX that change results and that no option sets."""
    names = ("jax_threefry_partitionable", "jax_default_matmul_precision")
    return {name: getattr(jax.config, name) for name in names}


@contextlib.contextmanager
def naming_failures(call: str) -> Iterator[None]:
    """Raise InputError for a failing user function, with the error and the line in its file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{call}: failed: {type(error).__name__}: {text}{_remedy(error)}{_place(error)}"
        ) from error


def naming(call: str, function: Any) -> Callable[..., Any]:
    """Return a user's function that names itself when it fails.

    ``call``: how it is called, ``"loss(params, batch, key)"``.

    Raises
    ------
    InputError
        For a value that is no function; from a call, for a function that takes other arguments, or
        fails.
    """
    name = call.partition("(")[0]
    if not callable(function):
        raise InputError(f"{name} = {function!r}: must be a function, {call}")

    def named(*values: Any) -> Any:
        try:
            inspect.signature(function).bind(*values)
        except TypeError:
            raise InputError(
                f"{name}: takes {inspect.signature(function)}; it is called as {call}"
            ) from None
        except ValueError:  # functions that are not written in Python
            pass
        with naming_failures(call):
            return function(*values)

    return named


def shapes_of(call: str, function: Callable[..., Any], *arguments: Any, key: str) -> Any:
    """Return the shapes of a function's results, from the shapes of its arguments.

    ``key`` says, for an error message, which key the function's random numbers may use.
    """
    _precisions.add(jax.config.read("jax_enable_x64"))
    # Each trace needs a new function, because JAX caches its traces.
    traced = [
        jax.make_jaxpr(lambda *values: function(*values), return_shape=True)(*arguments)
        for _ in range(2)
    ]
    (first, shapes), (second, _) = traced
    is_same = _ADDRESS.sub("", str(first)) == _ADDRESS.sub("", str(second))
    if not is_same or list(map(_bytes, first.consts)) != list(map(_bytes, second.consts)):
        raise InputError(
            f"{call}: computes something else when it is traced again: values that it draws, "
            "counts or stores outside "
            f"of JAX are the same all through a run; draw with jax.random, {key}; keep values in a "
            "state"
        )
    return shapes


def _bytes(constant: Any) -> bytes:
    if isinstance(constant, jax.core.Tracer):  # from an outer trace, the same both times
        return b""
    is_key = jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


def require_form(call: str, result: Any, expected: Any) -> Any:
    """Return a result; raise InputError unless its structure, shapes and types are as expected."""
    if tree_text(result) != tree_text(expected):
        raise InputError(f"{call} returned {tree_text(result)}: must return {tree_text(expected)}")
    return result


def tree_text(tree: Any) -> str:
    """Write a tree on one line, its arrays as ``float32[parameters]``."""

    def leaf(value: Any) -> Any:
        return _Text(f"{value.dtype}{list(value.shape)}") if hasattr(value, "dtype") else value

    return " ".join(str(jax.tree.map(leaf, tree)).split())


def _remedy(error: Exception) -> str:
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "; choose between values with jax.numpy.where"
    if isinstance(
        error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    ):
        return "; compute with jax.numpy, without float() and int()"
    return ""


def _place(error: Exception) -> str:
    """Return the last line of the user's code, in brackets; empty without one."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)
    ]
    if not frames:
        return ""
    file = (
        "a cell"
        if any(name in frames[-1].filename for name in _CELLS)
        else Path(frames[-1].filename).name
    )
    return f" ({file}, line {frames[-1].lineno})"


def _is_own(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_CELLS)
    path = Path(file).resolve()
    return not (_PACKAGES & set(path.parts) or any(path.is_relative_to(folder) for folder in _OURS))


class _Text(str):
    """A text whose representation has no quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Multiply and convolve in the full precision of the elements: a context manager or decorator.

    By default JAX rounds factors in float32 to 10 bits on a GPU (TensorFloat-32) and to 7 on a TPU
    (bfloat16). A ``jax_default_matmul_precision`` of the user's is kept. On a CPU nothing changes.
    """
    config: Any = jax.config
    with jax.default_matmul_precision(config.jax_default_matmul_precision or "float32"):
        yield
