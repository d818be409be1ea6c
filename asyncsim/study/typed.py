"""Options as they were typed on the command line, before anything reads them."""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")


def split_numbers(options: Sequence[str]) -> list[str]:
    """Split numbers that were given with commas between them, as names may be."""
    split: list[str] = []
    for option in options:
        found = _NUMBERS.fullmatch(option)
        name, values = found.groups() if found else ("", option)
        split += [name] if name else []
        split += values.split(",") if found else [values]
    return split


def value_of(name: str, options: Sequence[str]) -> str:
    """Return the last value of an option that has one; empty if it was not given."""
    last = ""
    for option, following in itertools.pairwise([*options, ""]):
        typed, given, value = option.partition("=")
        if typed == f"--{name}":
            last = value if given else following
    return last


def fields_of(options: Iterable[str]) -> frozenset[str]:
    """Return the fields whose options were typed, the negations of switches among them."""
    names = {option.removeprefix("--").partition("=")[0] for option in options if option.startswith("--")}
    return frozenset(name.removeprefix("no-").replace("-", "_") for name in names)


def without(options: Iterable[str], fields: Collection[str]) -> list[str]:
    """Return what was typed but for the options of some fields, and their values."""
    kept, keeps = [], True
    for option in options:
        if option.startswith("--"):
            keeps = fields_of([option]).isdisjoint(fields)
        if keeps:
            kept.append(option)
    return kept
