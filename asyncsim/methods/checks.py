"""Checks of hyper-parameters that several methods share."""

from typing import Any

from asyncsim.errors import InputError, require_positive


def require_rate(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is a positive number or a schedule (a function of the Visit)."""
    if not callable(value):
        require_positive(argument, value)


def require_switch(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{argument} = {value!r}: must be True or False")
