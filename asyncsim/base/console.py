"""Notices on standard error; counts, numbers, tables and lines as text."""

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from tqdm import tqdm

from asyncsim.base.errors import InputError, error_lines, printable

#: Joins a number and its noun while lines are broken, at plain spaces only.
_GLUE = "\u2007"


class Parser(argparse.ArgumentParser):
    """Reads options; raises InputError where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with argparse's message and a hint."""
        raise InputError(f"{message}; {self.prog} --help lists the options")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 worker``, ``20,000 workers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def summary_of(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((docstring or "").partition("\n\n")[0].split())


def over_seeds(count: int, prefix: str = "mean and range of", fewest: int | None = None) -> str:
    """Describe the seeds of curves: ``mean and range of 3 seeds``, or ``1 seed``.

    With ``fewest``, if some have fewer: ``mean and range of 1 to 3 seeds``. With an empty prefix:
    ``3 seeds``.
    """
    if count == 1:
        return counted(count, "seed")
    smallest = "" if fewest is None or fewest == count else f"{fewest:,} to "
    return f"{prefix} {smallest}{counted(count, 'seed')}".lstrip()


def wrapped(text: str, width: float) -> str:
    """Break a text into the fewest lines, if possible between its parts, of about the same length.

    ``width`` is in characters; a number and its noun stay together.
    """
    lines = _lines(text, int(width))
    even = (
        _lines(text, narrow)
        for narrow in range(max(1, len(text) // max(1, len(lines))), int(width))
    )
    lines = max([*(trial for trial in even if len(trial) == len(lines)), lines], key=_parted)
    return "\n".join(lines)


def _parted(lines: list[str]) -> tuple[int, int]:
    """Count the lines that end at a semicolon, and those that end at a comma or a colon."""
    ends = [line[-1] for line in lines[:-1]]
    return ends.count(";"), ends.count(",") + ends.count(":")


def _lines(text: str, width: int) -> list[str]:
    glued = re.sub(r"(?<=\d) (?=[a-z])", _GLUE, text)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]


def tensor_label(name: str) -> str:
    """Write a tensor's path with dots instead of brackets; ``all`` for a single tensor."""
    return ".".join(re.findall(r"[^][.'\"]+", name)) or "all"


#: Numbers from here on are written with an exponent.
_LARGE = 1e7
#: Smaller parts of a whole are left out of tables.
LEAST_SHARE = 0.0005


def number_text(value: float, digits: int = 3) -> str:
    """Write a number with ``digits`` significant digits; large ones whole, with commas."""
    if value == 0:
        return "0"
    if 10 ** (digits - 1) <= float(f"{abs(value):.{digits}g}") < _LARGE:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


def table_text(table: Any, digits: int = 3, file: str = "") -> str:
    """Write the rows of a DataFrame, with floats as in `number_text` and dashes for missing values.

    ``file``: the file with the whole table. On a terminal that is too narrow the last columns are
    left out, and a line below names them and the file.
    """
    count = len(table.columns)
    terminal = bool(file) and sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    while True:
        part = table.iloc[:, :count]
        text = str(
            part.to_string(
                index=False, float_format=lambda value: number_text(value, digits), na_rep="-"
            )
        )
        if width is None or count <= 2 or max(map(len, text.splitlines())) <= width:
            break
        count -= 1
    left_out = ", ".join(table.columns[count:])
    return (
        "\n".join([text, *textwrap.wrap(f"also in {file}: {left_out}", width or 80)])
        if left_out
        else text
    )


#: The printed notes, inside `each_note_once`.
_NOTES: ContextVar[set[str] | None] = ContextVar("notes", default=None)


def on_a_terminal() -> bool:
    """Return whether standard error is a terminal; a process may have none."""
    return sys.stderr is not None and sys.stderr.isatty()


def tell(text: str) -> None:
    """Print to standard error, above the progress bars; a closed standard error is ignored."""
    with contextlib.suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
        print(printable(text), file=sys.stderr, flush=True)


def tell_error(error: object, hint: str = "") -> None:
    """Print an error and its remedy to standard error, a line each; see
    `asyncsim.base.errors.error_lines`.
    """
    tell(error_lines(str(error), hint))


#: Characters of reports that ASCII lacks, and their substitutes on terminals of few characters.
_ASCII = str.maketrans({"\u00b1": "+-", "\u00d7": "x", "\u00b2": "^2"})


class _Output:
    """Standard output without control characters, in any encoding; optionally with a copy."""

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
    """Replace control and unencodable characters of standard output within a block."""
    return contextlib.redirect_stdout(_Output(sys.stdout))


def discard_output() -> None:
    """Print no more: the reader of standard output has ended, or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def heard() -> Iterator[io.StringIO]:
    """Yield a copy of the text printed within a block."""
    copy = io.StringIO()
    with contextlib.redirect_stdout(_Output(sys.stdout, copy)):
        yield copy


def note(text: str) -> None:
    """Print a notice on standard error; within `each_note_once`, each only once."""
    notes = _NOTES.get()
    if notes is None or text not in notes:
        tell(f"note: {text}")
    if notes is not None:
        notes.add(text)


@contextlib.contextmanager
def each_note_once() -> Iterator[None]:
    """Print each notice only once within a block, because the cells of a study repeat them."""
    notes = _NOTES.get()
    token = _NOTES.set(set() if notes is None else notes)
    try:
        yield
    finally:
        _NOTES.reset(token)
