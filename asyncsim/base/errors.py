"""InputError, the error of a user's input, and the checks that raise it."""

import contextlib
import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

#: Longest path of a study, in bytes; systems end at 4,096, and the files inside have longer paths.
LONGEST_PATH = 2_000
#: Longest text that a message repeats, in characters.
_LONGEST_TEXT = 80
#: Longest message that the command line prints, in characters.
_LONGEST_MESSAGE = 4_000
#: A text in quotes, as `repr` writes it; an apostrophe follows a letter.
_QUOTED = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


class InputError(ValueError):
    """A value that cannot be used; the message names the argument, the value and the remedy.

    The command line prints it without a traceback and ends with exit code 2.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))  # it may quote foreign text


class TooLarge(InputError):
    """A value for which the machine has too little memory."""


def printable(text: str) -> str:
    """Replace characters that could control a terminal by question marks."""
    if text.isprintable():
        return text
    harmless = "\n\t\u00a0"  # a title keeps its unbreakable spaces
    return "".join(letter if letter.isprintable() or letter in harmless else "?" for letter in text)


@contextlib.contextmanager
def reading_results(folder: Path) -> Iterator[None]:
    """Raise InputError for any failure to read or draw a folder's results, which may be damaged."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"folder = {str(folder)!r}: its results cannot be read ({type(error).__name__}: "
            f"{shown(str(error))}); they "
            "were damaged, or changed by hand; run the study again"
        ) from error


def require_number(argument: str, value: Any) -> float:
    """Return ``value`` as a float; raise InputError unless it is a finite number."""
    # float() accepts these; but a text is a mistake that would be saved unchanged, and JAX takes no
    # fractions.
    if isinstance(value, str | bytes | Decimal | Fraction) or _is_bool(value):
        raise InputError(f"{argument} = {value!r}: must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{argument} = {value!r}: must be a number") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{argument} = {value!r:.80}: must be finite")
    return number


def _range(**rules: Callable[[float], bool]) -> Callable[..., Any]:
    """Return the check of a number: finite, and obeying rules, named by their words."""

    def require(argument: str, value: Any, unit: str = "") -> Any:
        if _is_traced(value):
            return value
        number = require_number(argument, value)
        for rule, holds in rules.items():
            if not holds(number):
                words = f"{rule.replace('_', ' ')}{f' ({unit})' if unit else ''}"
                raise InputError(f"{argument} = {value!r}: must be {words}")
        return number

    return require


# Each returns its value as a float; a third argument names the unit in the error.
require_positive = _range(above_zero=lambda number: number > 0)
require_nonnegative = _range(zero_or_above=lambda number: number >= 0)
require_fraction = _range(
    zero_or_above=lambda number: number >= 0, below_one=lambda number: number < 1
)
require_share = _range(above_zero=lambda number: number > 0, at_most_one=lambda number: number <= 1)


def require_count(argument: str, value: Any, minimum: int = 1, maximum: int = 2**63 - 1) -> int:
    """Return ``value`` as an int; raise InputError unless it is a whole number from ``minimum`` to
    ``maximum``, by default the largest of 64 bits.
    """
    try:
        count = operator.index(value)  # accepts an array only without axes
    except TypeError:
        count = None
    if count is None or _is_bool(value):
        raise InputError(f"{argument} = {value!r}: must be a whole number of at least {minimum}")
    if count < minimum:
        raise InputError(f"{argument} = {value!r}: must be at least {minimum}")
    if count > maximum:
        raise InputError(f"{argument} = {value!r:.80}: must be at most {maximum:,}")
    return count


def require_switch(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        hint = ", Python's own; write bool(...)" if hasattr(value, "dtype") else ""
        raise InputError(f"{argument} = {value!r}: must be True or False{hint}")


def require_list(argument: str, value: Any) -> list[Any]:
    """Return the entries of ``value``; raise InputError unless it is a non-empty list or the
    like.
    """
    try:
        entries = None if isinstance(value, str | bytes) else list(value)
    except TypeError:  # also for an array without axes
        entries = None
    if entries is None:
        raise InputError(f"{argument} = {value!r}: must be a list")
    if not entries:
        raise InputError(f"{argument} = []: must hold at least one entry")
    return entries


def require_choice(argument: str, value: str, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``; else raise InputError with the nearest one."""
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return value
    text = shown(value) if isinstance(value, str) else repr(value)
    raise InputError(f"{argument} = {text}: unknown; {choices_like(value, choices)}")


def choices_like(value: Any, choices: Iterable[str]) -> str:
    """Return the choice nearest to a wrong value, and all choices, for the end of a message.

    Choices may be forms, ``name(parameter)``: then the names are compared, upper case as lower.
    """
    choices = list(choices)
    match = nearest(value, choices)
    hint = f"did you mean {match!r}? " if match else ""
    return f"{hint}choose from {', '.join(choices)}"


def nearest(value: Any, choices: Iterable[str]) -> str:
    """Return the choice whose name is nearest to a wrong value; empty if none is near."""
    # The dashes of options would make all of them alike.
    forms = {choice.partition("(")[0].casefold().lstrip("-"): choice for choice in choices}
    text = str(value)[:_LONGEST_TEXT].casefold().lstrip("-")
    cutoff = 0.5 if len(text) < 4 else 0.6  # in a short name a single wrong letter weighs more
    matches = difflib.get_close_matches(text, forms, n=1, cutoff=cutoff)
    return forms[matches[0]] if matches else ""


def error_lines(message: str, hint: str = "") -> str:
    """Return an error as the command line prints it: a line that says what is wrong, and a line
    with the remedy.

    The remedy is the message's part after its first semicolon outside quotes; of a message without
    one, ``hint``.
    """
    message = " ".join(message.splitlines())
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    semicolon = re.search(r"; ", _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), message))
    if semicolon:
        message, hint = message[: semicolon.start()], message[semicolon.end() :]
    return f"error: {message}" + (f"\nhint: {hint}" if hint else "")


def shown(text: str) -> str:
    """Quote a text for a message, cut if it is long."""
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}...")


def require_name(noun: str, name: Any) -> str:
    """Return the name of a method, a problem, ...; raise InputError unless a folder can have it."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise InputError(f"{noun}: name = {name!r}: must be a text of one line")
    if name.startswith(".") or set(name) & set('/\\:*?"<>|'):
        raise InputError(
            f'{noun}: name = {name!r}: names folders and files; leave out any of / \\ : * ? " < > |'
        )
    return name


def require_path(argument: str, value: Any) -> Path:
    """Return ``value`` as a path; raise InputError unless it is a path or a non-empty text."""
    if isinstance(value, str) and not value:  # pathlib would use the working folder
        raise InputError(f"{argument} = '': is empty; give the name of a file or folder")
    try:
        path = Path(value)
        name = str(path).encode()
    except TypeError:
        raise InputError(
            f"{argument} = {value!r}: must be a path; give text or a pathlib.Path"
        ) from None
    except UnicodeEncodeError:  # bytes from the shell, which no table can store
        raise InputError(
            f"{argument} = {str(value)!r}: its name is not UTF-8; give another"
        ) from None
    if len(name) > LONGEST_PATH:
        raise InputError(
            f"{argument} = {shown(str(path))}: has {len(name)} bytes, at most {LONGEST_PATH}; give "
            "less"
        )
    return path


def require_free(argument: str, value: Any) -> Path:
    """Return ``value`` as a path; raise InputError if it exists: nothing is overwritten."""
    path = require_path(argument, value)
    if path.exists():
        raise InputError(
            f"{argument} = {str(path)!r}: exists already; give another, or remove it first"
        )
    return path


def require_memory(argument: str, subject: str, size: float) -> None:
    """Raise TooLarge if the machine has less memory than ``size`` bytes."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return
    if size > memory > 0:
        size = min(size, 1e300)  # an int may be too large for a float
        raise TooLarge(
            f"{argument}: {subject} needs at least {size / 2**30:.3g} GiB of memory and this "
            "machine has "
            f"{memory / 2**30:.3g}; simulate fewer"
        )


def _is_traced(value: Any) -> bool:
    """Return whether JAX traces a value, as in an ensemble, whose values were checked before."""
    return hasattr(value, "aval") and hasattr(value, "_trace")  # without importing JAX


def _is_bool(value: Any) -> bool:
    """Return whether a value is True or False, of Python's or of an array's type."""
    return isinstance(value, bool) or getattr(value, "dtype", None) == "bool"
