"""Notices on standard error; counts, numbers, tables and lines as text."""

import argparse
import contextlib
import io
import numbers
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from asyncsim.base.errors import InputError, error_lines, printable

#: Joins a number and its noun while lines are broken, at plain spaces only.
_GLUE = "\u2007"


class Parser(argparse.ArgumentParser):
    """Reads options; raises InputError where argparse would end the program.

    ``Parser.latest`` is the parser of the present command.
    """

    latest: "Parser"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        Parser.latest = self

    def hint(self, message: str) -> str:
        """Explain the option that an error message begins with; of another, name the help."""
        name = re.split(r"\W", message, maxsplit=1)[0]
        for action in self._actions:
            if action.dest == name and action.option_strings and action.help:
                return f"{action.option_strings[0]}: {action.help}"
        return f"{self.prog} --help explains the options"

    def error(self, message: str) -> NoReturn:
        """Raise InputError with argparse's message and a hint."""
        raise InputError(f"{message}; {self.prog} --help lists the options")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 worker``, ``20,000 workers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def summary_of(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((docstring or "").partition("\n\n")[0].split())


def capital(text: str) -> str:
    """Begin a text with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


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


def percent_text(share: float) -> str:
    """Write a share in percent; only none and all of the whole are written 0% and 100%."""
    text = f"{share:.0%}"
    is_part = LEAST_SHARE < share < 1 - LEAST_SHARE
    return f"{share:.1%}" if is_part and text in ("0%", "100%") else text


#: Width (characters) of a table that is not printed to a terminal.
WIDTH = 100
#: A cell of a column that is aligned at the right: a number, or what stands for one.
_NUMBER = re.compile(r"[-+~?]?\d|-?inf|nan|-$|not reached|$")


def in_texts(table: Any, digits: int = 3) -> Any:
    """Convert the cells of a DataFrame to texts: floats as in `number_text`, dashes for missing
    values.
    """

    def text(value: Any) -> str:
        if value is None or value != value:
            return "-"
        is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
        return number_text(float(value), digits) if is_float else str(value)

    return table.map(text)


def terminal_width() -> int:
    """Return the width (characters) of tables on standard output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def table_text(table: Any, width: int = WIDTH) -> str:
    """Align the texts of a DataFrame, columns of numbers at the right.

    The first columns that fit the width are written, and the names of the others below.
    """
    lines = [""] * (len(table) + 1)
    rest: list[str] = []
    for title, cells in table.items():
        texts = [str(title), *cells]
        is_number = all(map(_NUMBER.match, texts[1:]))
        longest = max(map(len, texts))
        aligned = [text.rjust(longest) if is_number else text.ljust(longest) for text in texts]
        if rest or (lines[0] and len(lines[0]) + 2 + longest > width):
            rest.append(texts[0])
        else:
            pairs = zip(lines, aligned, strict=True)
            lines = [f"{line}  {text}" if line else text for line, text in pairs]
    below = [f"further columns in the files: {', '.join(rest)}"] if rest else []
    return "\n".join([*(line.rstrip() for line in lines), *below])


#: The begin of the printed line that answers a study's question.
VERDICT = "verdict: "
#: The colours of printed lines, as codes of ANSI terminals, by the begins of the lines.
_COLOURS = {VERDICT: "1;32", "error: ": "31", "hint: ": "36"}
_COLOURED = re.compile(f"({'|'.join(_COLOURS)}).*", re.DOTALL)
#: The begin of a line, up to its last column if it is a row of several; and its longest part of a
#: terminal's width to which further lines are indented.
_UP_TO_LAST_COLUMN, _FURTHEST_INDENT = re.compile(r"(?:.*\S {2,}|\s*)(?=\S)"), 0.75


def _for_terminal(text: str) -> str:
    """Fit a text to a terminal, with tables and lines of its width, and colours.

    Environment variables without colours: NO_COLOR (https://no-color.org) or TERM=dumb.
    """
    width = shutil.get_terminal_size().columns
    lines = [_broken(line, width) for line in text.split("\n")]
    if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        lines = [
            _COLOURED.sub(lambda part: f"\033[{_COLOURS[part[1]]}m{part[0]}\033[0m", line)
            if line.startswith(tuple(_COLOURS))
            else line
            for line in lines
        ]
    return "\n".join(lines)


def _broken(line: str, width: int) -> str:
    """Break a line at spaces; further lines are indented like its last column."""
    start = _UP_TO_LAST_COLUMN.match(line[:width])
    if len(line) <= width or start is None:
        return line
    indent = " " * (start.end() if start.end() <= _FURTHEST_INDENT * width else 0)
    parts = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts)


#: The printed notes, inside `each_note_once`.
_NOTES: ContextVar[set[str] | None] = ContextVar("notes", default=None)


def on_a_terminal() -> bool:
    """Return whether standard error is a terminal; a process may have none."""
    return sys.stderr is not None and sys.stderr.isatty()


def tell(text: str) -> None:
    """Print to standard error, above the progress bars; a closed standard error is ignored."""
    text = printable(text)
    above = (progress.bar.external_write_mode(file=sys.stderr) for progress in _bars)
    with contextlib.suppress(OSError), next(above, contextlib.nullcontext()):
        print(_for_terminal(text) if on_a_terminal() else text, file=sys.stderr, flush=True)


def tell_error(error: object, hint: str = "") -> None:
    """Print an error and its remedy to standard error, a line each; see
    `asyncsim.base.errors.error_lines`.
    """
    tell(error_lines(str(error), hint))


#: Characters of reports that ASCII lacks, and their substitutes on terminals of few characters.
_ASCII = str.maketrans({"\u00b1": "+-", "\u00d7": "x", "\u00b2": "^2"})


#: An entry for each step of a compilation in progress, in any thread; a step may contain others.
_compiling: list[None] = []
_bars: "set[Progress]" = set()


class Progress:
    """A progress bar that is removed at its end, and says meanwhile if JAX compiles.

    ``is_shown``: by default, if standard error is a terminal.
    """

    def __init__(self, total: int, description: str, unit: str, is_shown: bool | None = None):
        from tqdm import tqdm  # takes a tenth of a second, which short commands save

        is_shown = on_a_terminal() if is_shown is None else is_shown
        self.words, self.count = "", 0
        self.bar: Any = tqdm(
            total=total, desc=description, unit=unit, disable=not is_shown, leave=False
        )

    def __enter__(self) -> "Progress":
        if not self.bar.disable:
            _bars.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        _bars.discard(self)
        self.bar.close()

    def advance(self, count: int) -> None:
        """Show a count of finished units."""
        self.bar.update(count - self.count)
        self.count = count

    def say(self, words: str) -> None:
        """Replace the words at the end of the bar; "compiling" follows them."""
        self.words = words
        parts = filter(None, [words, "compiling" if _compiling else ""])
        self.bar.set_postfix_str(", ".join(parts))


def show_compilation(is_running: bool) -> None:
    """Count the steps of compilations; during one the progress bars say "compiling"."""
    was_running = bool(_compiling)
    if is_running:
        _compiling.append(None)
    elif _compiling:  # else the step began before the first call
        _compiling.pop()
    if bool(_compiling) != was_running:
        for bar in tuple(_bars):
            bar.say(bar.words)


class _Output:
    """Standard output without control characters, in any encoding; on a terminal lines of its
    width, and colours.
    """

    def __init__(self, stream: Any):
        # A process may have no standard output.
        self.stream = io.StringIO() if stream is None else stream

    def write(self, text: str) -> int:
        text = printable(text)
        if self.stream.isatty():
            text = _for_terminal(text)
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
