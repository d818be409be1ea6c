"""Quantities with a unit, ``"40 ms"``, ``"100 Mbit/s"`` or ``"25 MB"``, as numbers of seconds,
bytes/s and bytes.
"""

import functools
import math
import re
from decimal import Decimal, InvalidOperation, Overflow
from typing import Annotated, Any, NamedTuple

from asyncsim.base.errors import InputError, require_nonnegative, require_positive, shown


class Units(NamedTuple):
    """The units of a quantity, with their factors to the base unit."""

    base: str
    example: str
    factors: dict[str, Decimal]


_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = {
    **{f"{prefix}B": Decimal(factor) for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}iB": Decimal(1024**power) for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}bit": Decimal(factor) / 8 for prefix, factor in _PREFIXES.items()},
}
_SECONDS = {
    "ns": "1e-9",
    "us": "1e-6",
    "\u00b5s": "1e-6",
    "ms": "1e-3",
    "s": "1",
    "min": "60",
    "h": "3600",
    "d": "86400",
}
SECONDS = Units("seconds", "40 ms", {unit: Decimal(factor) for unit, factor in _SECONDS.items()})
BYTES = Units("bytes", "25 MB", _BYTES)
SPEEDS = Units(
    "operations/s",
    "300 TFLOP/s",
    {f"{prefix}FLOP/s": Decimal(factor) for prefix, factor in _PREFIXES.items()},
)
RATES = Units("bytes/s", "100 Mbit/s", {f"{unit}/s": factor for unit, factor in _BYTES.items()})
_NUMBER = r"-?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*((?![eE][-+]?\d)[^\W\d_][^\s\d,()\[\]]*)?\s*")
#: A quantity inside a longer text, outside quotes.
_WITHIN = re.compile(rf"(?<![\w.'\"-])({_NUMBER})\s*((?![eE][-+]?\d)[^\W\d_][\w/]*)")


def quantity(argument: str, value: Any, units: Units) -> Any:
    """Convert a text to a number in the base unit; return other values unchanged.

    It is the float nearest to the exact product: ``"35 ms"`` is 0.035.

    Raises
    ------
    InputError
        The text is not a number, alone or with one of the units, or is not finite.
    """
    if not isinstance(value, str):
        return value
    subject = f"{argument} = {shown(value)}"
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise InputError(
            f"{subject}: must be a number, or one with a unit such as {units.example!r}"
        )
    number, unit = match.groups()
    if unit is None or unit in units.factors:
        try:
            amount = float(Decimal(number) * (units.factors[unit] if unit else 1))
        except (InvalidOperation, Overflow):  # exponents beyond those of Decimal
            amount = float(number.replace("_", ""))
        if not math.isfinite(amount):
            raise InputError(f"{subject}: must be finite; give a number below 1e308 {units.base}")
        return amount
    choices = ", ".join(unit for unit in units.factors if unit.isascii())
    raise InputError(f"{subject}: unknown unit {unit!r}; choose from {choices}")


def positive(argument: str, value: Any, units: Units) -> float:
    """Return a quantity as a float; raise InputError unless it is finite and above zero."""
    return require_positive(argument, quantity(argument, value, units), units.base)


def delay(argument: str, value: Any) -> float:
    """Return a time (s) as a float; raise InputError unless it is finite and zero or above."""
    return require_nonnegative(argument, quantity(argument, value, SECONDS), "seconds")


Delay = Annotated[float, delay]  #: a time, zero or above
Duration = Annotated[float, functools.partial(positive, units=SECONDS)]


def quoted(text: str) -> str:
    """Quote the quantities in a call: ``gamma('40 ms', 0.2)`` for gamma(40 ms, 0.2)."""
    return _WITHIN.sub(lambda match: repr(match[0]), text)
