"""How counts are said, in messages, tables and titles, and how lists of names are read."""

from collections.abc import Iterable
from typing import Any


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
