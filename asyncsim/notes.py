"""What a study tells its user aloud that needs no remedy."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

#: The notes that were told, where each is told once.
_TOLD: ContextVar[set[str] | None] = ContextVar("told", default=None)


def note(text: str) -> None:
    """Tell the user something that needs no remedy; in `each_note_once` not again."""
    told = _TOLD.get()
    if told is None or text not in told:
        print(f"note: {text}", file=sys.stderr)
    if told is not None:
        told.add(text)


@contextlib.contextmanager
def each_note_once() -> Iterator[None]:
    """Tell each note only once inside, as of the many cells of a study."""
    token = _TOLD.set(set())
    try:
        yield
    finally:
        _TOLD.reset(token)
