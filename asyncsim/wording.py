"""How counts are said, in messages, tables and titles, where their lines break, and how lists of names are read."""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

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


def split_names(names: Iterable[Any]) -> list[Any]:
    """Split names that were given with commas between them; leave all that is not text as it is."""
    entries: list[Any] = []
    for entry in [names] if isinstance(names, str) else names:
        entries += [name.strip() for name in entry.split(",") if name.strip()] if isinstance(entry, str) else [entry]
    return entries


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
