"""The one error that a user's input can cause, and the checks that raise it."""

import difflib
import math
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """A value that cannot be used; the message names the argument, the value and the remedy.

    The command line prints it without a traceback and ends with exit code 2.
    """


def require_positive(argument: str, value: Any, unit: str = "") -> float:
    """Return ``value`` as a float; raise InputError unless it is finite and above zero."""
    number = _number(argument, value)
    if number <= 0:
        raise InputError(f"{argument} = {value!r}: must be above zero{_unit(unit)}")
    return number


def require_nonnegative(argument: str, value: Any, unit: str = "") -> float:
    """Return ``value`` as a float; raise InputError unless it is finite and zero or above."""
    number = _number(argument, value)
    if number < 0:
        raise InputError(f"{argument} = {value!r}: must be zero or above{_unit(unit)}")
    return number


def require_fraction(argument: str, value: Any) -> float:
    """Return ``value`` as a float; raise InputError unless it lies in [0, 1)."""
    number = require_nonnegative(argument, value)
    if number >= 1:
        raise InputError(f"{argument} = {value!r}: must be below one")
    return number


def require_count(argument: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` as an int; raise InputError unless it is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{argument} = {value!r}: must be a whole number of at least {minimum}")
    if value.__index__() < minimum:
        raise InputError(f"{argument} = {value!r}: must be at least {minimum}")
    return int(value)


def require_choice(argument: str, value: str, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``; else raise InputError with the nearest and the whole list."""
    choices = list(choices)
    if value in choices:
        return value
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise InputError(f"{argument} = {value!r}: unknown; {hint}choose from {', '.join(choices)}")


def _number(argument: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{argument} = {value!r}: must be a number") from None
    if not math.isfinite(number):
        raise InputError(f"{argument} = {value!r}: must be finite")
    return number


def _unit(unit: str) -> str:
    return f" ({unit})" if unit else ""
