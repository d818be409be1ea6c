"""What users' functions return when JAX traces them, and where they fail, as messages tell it."""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from asyncsim.errors import InputError

#: Where files are that are not the user's, besides those of installed packages.
_OURS = Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parent
_PACKAGES = {"site-packages", "dist-packages"}
#: How the files of a notebook's cells are called.
_CELLS = ("<ipython-input", "ipykernel_")


@contextlib.contextmanager
def telling_failures(call: str) -> Iterator[None]:
    """Raise InputError where such a call of a user's function fails: what went wrong, and in which line of its file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        what = (str(error).splitlines() or [""])[0]
        raise InputError(f"{call}: failed: {type(error).__name__}: {what}{_remedy(error)}{_place(error)}") from error


def told(tree: Any) -> str:
    """Return a tree in one line, its arrays as ``float32[parameters]``."""

    def leaf(value: Any) -> Any:
        return _Text(f"{value.dtype}{list(value.shape)}") if hasattr(value, "dtype") else value

    return " ".join(str(jax.tree.map(leaf, tree)).split())


def _remedy(error: Exception) -> str:
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "; choose between values with jax.numpy.where"
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return "; compute with jax.numpy, without float() and int()"
    return ""


def _place(error: Exception) -> str:
    """Return the last line that is the user's own, in brackets; nothing if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not own:
        return ""
    file = "a cell" if any(name in own[-1].filename for name in _CELLS) else Path(own[-1].filename).name
    return f" ({file}, line {own[-1].lineno})"


def _is_own(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_CELLS)
    path = Path(file).resolve()
    return not (_PACKAGES & set(path.parts) or any(path.is_relative_to(folder) for folder in _OURS))


class _Text(str):
    """A text that shows itself without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
