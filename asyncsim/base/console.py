"""Notices on standard error that do not stop a run; counts, numbers, tables and lines as text."""

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from asyncsim.base.errors import error_lines, printable

#: Between a number and its noun while lines are broken, which is done at plain spaces only.
_GLUE = "\u2007"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 worker``, ``20,000 workers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def over_seeds(count: int, what: str = "mean and range of", fewest: int | None = None) -> str:
    """Return over how many seeds curves are: ``mean and range of 3 seeds``, or ``1 seed``.

    With ``fewest``, if some have fewer: ``mean and range of 1 to 3 seeds``. Without ``what``: ``3 seeds``.
    """
    if count == 1:
        return counted(count, "seed")
    few = "" if fewest is None or fewest == count else f"{fewest:,} to "
    return f"{what} {few}{counted(count, 'seed')}".lstrip()


def wrapped(text: str, width: float) -> str:
    """Break a text into as few lines as fit, between its parts if that can be, and of about the same length.

    ``width`` is in characters; a number and its noun stay together.
    """
    lines = _lines(text, int(width))
    even = (_lines(text, narrow) for narrow in range(max(1, len(text) // max(1, len(lines))), int(width)))
    lines = max([*(found for found in even if len(found) == len(lines)), lines], key=_parted)
    return "\n".join(lines)


def _parted(lines: list[str]) -> tuple[int, int]:
    """Return how many lines end where a part of a text does, and how many at a comma or a colon."""
    ends = [line[-1] for line in lines[:-1]]
    return ends.count(";"), ends.count(",") + ends.count(":")


def _lines(text: str, width: int) -> list[str]:
    glued = re.sub(r"(?<=\d) (?=[a-z])", _GLUE, text)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]


def tensor_label(name: str) -> str:
    """Return a tensor's path in the parameters with dots in place of brackets and quotes; the only one has none."""
    return ".".join(re.findall(r"[^][.'\"]+", name)) or "all"


#: Numbers from here on are told with an exponent.
_LARGE = 1e7
#: Parts of a whole that are smaller are next to nothing: tables leave them out.
LEAST_SHARE = 0.0005


def number_text(value: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits; large ones whole, with commas."""
    if value == 0:
        return "0"
    if 10 ** (digits - 1) <= float(f"{abs(value):.{digits}g}") < _LARGE:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


def table_text(table: Any, digits: int = 3, file: str = "") -> str:
    """Return the rows of a DataFrame: floats as `number_text` has them, and a dash for those that are missing.

    ``file``: where the whole table is: where standard output is a terminal that is too narrow, the last columns are
    left out, and a line below says which.
    """
    count = len(table.columns)
    terminal = bool(file) and sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    while True:
        shown = table.iloc[:, :count]
        text = str(shown.to_string(index=False, float_format=lambda value: number_text(value, digits), na_rep="-"))
        if width is None or count <= 2 or max(map(len, text.splitlines())) <= width:
            break
        count -= 1
    left_out = ", ".join(table.columns[count:])
    return "\n".join([text, *textwrap.wrap(f"also in {file}: {left_out}", width or 80)]) if left_out else text


#: The notes that were told, where each is told once.
_TOLD: ContextVar[set[str] | None] = ContextVar("told", default=None)


def on_a_terminal() -> bool:
    """Return whether standard error is a terminal; a process may have none."""
    return sys.stderr is not None and sys.stderr.isatty()


def tell(text: str) -> None:
    """Print to standard error, above the progress bars; a closed standard error is ignored."""
    with contextlib.suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
        print(printable(text), file=sys.stderr, flush=True)


def tell_error(error: object, hint: str = "") -> None:
    """Print an error and its remedy to standard error, a line each; see `asyncsim.base.errors.error_lines`."""
    tell(error_lines(str(error), hint))


#: Characters of reports that ASCII lacks, and their substitutes on terminals of few characters.
_ASCII = str.maketrans({"\u00b1": "+-", "\u00d7": "x", "\u00b2": "^2"})


class _Output:
    """Standard output whose text cannot control a terminal, and that any encoding can hold; it may keep a copy."""

    def __init__(self, stream: Any, copy: io.StringIO | None = None):
        # A process may have no standard output.
        self.stream, self._copy = io.StringIO() if stream is None else stream, copy

    def write(self, text: str) -> int:
        text = printable(text)
        if self._copy is not None:
            self._copy.write(text)
        encoding = self.stream.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def safe_output() -> contextlib.AbstractContextManager[Any]:
    """Print control characters, and those that standard output cannot encode, as plain characters inside."""
    return contextlib.redirect_stdout(_Output(sys.stdout))


@contextlib.contextmanager
def heard() -> Iterator[io.StringIO]:
    """Yield the text that is printed on standard output inside, which is printed as well."""
    copy = io.StringIO()
    with contextlib.redirect_stdout(_Output(sys.stdout, copy)):
        yield copy


def note(text: str) -> None:
    """Print a notice on standard error; inside `each_note_once`, each only once."""
    told = _TOLD.get()
    if told is None or text not in told:
        tell(f"note: {text}")
    if told is not None:
        told.add(text)


@contextlib.contextmanager
def each_note_once() -> Iterator[None]:
    """Print each notice only once inside, as the cells of a study repeat them."""
    told = _TOLD.get()
    token = _TOLD.set(set() if told is None else told)
    try:
        yield
    finally:
        _TOLD.reset(token)
