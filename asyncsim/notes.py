"""What the user is told aloud, on standard error, and does not end what goes on."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

#: The notes that were told, where each is told once.
_TOLD: ContextVar[set[str] | None] = ContextVar("told", default=None)


def on_a_terminal() -> bool:
    """Return whether somebody may look at standard error; a process can be without one."""
    return sys.stderr is not None and sys.stderr.isatty()


def tell(text: str) -> None:
    """Print to standard error, above the progress bars of runs that go on; if nobody can hear it, they go on."""
    from tqdm import tqdm

    with contextlib.suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Tell the user something that ends nothing; in `each_note_once` not again."""
    told = _TOLD.get()
    if told is None or text not in told:
        tell(f"note: {text}")
    if told is not None:
        told.add(text)


@contextlib.contextmanager
def each_note_once() -> Iterator[None]:
    """Tell each note only once inside, as of the many cells of a study; inside another one, once in that."""
    told = _TOLD.get()
    token = _TOLD.set(set() if told is None else told)
    try:
        yield
    finally:
        _TOLD.reset(token)
