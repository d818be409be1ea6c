"""Checks of hyper-parameters that several methods share."""

from typing import Any

from asyncsim.errors import require_positive


def require_rate(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is a positive number or a schedule (a function of the Visit)."""
    if not callable(value):
        require_positive(argument, value)
