"""What users' functions return when JAX traces them, and where they fail, as messages tell it."""

import site
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import jax

from asyncsim.errors import InputError

#: Where files are that are not the user's.
_INSTALLED = tuple(
    str(Path(folder).resolve())
    for folder in (*site.getsitepackages(), sysconfig.get_path("stdlib"), str(Path(__file__).parent))
)


def failure(call: str, error: Exception) -> InputError:
    """Return what to raise where such a call of a function failed: what went wrong, and in which line of its file."""
    told = (str(error).splitlines() or [""])[0]
    if isinstance(error, jax.errors.ConcretizationTypeError):
        told += "; choose between values with jax.numpy.where"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return InputError(f"{call}: failed: {type(error).__name__}: {told}{where}")


def _is_own(file: str) -> bool:
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(_INSTALLED)


def told(tree: Any) -> str:
    """Return a tree in one line, its arrays as ``float32[parameters]``."""

    def leaf(value: Any) -> Any:
        return _Text(f"{value.dtype}{list(value.shape)}") if hasattr(value, "dtype") else value

    return " ".join(str(jax.tree.map(leaf, tree)).split())


class _Text(str):
    """A text that shows itself without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
