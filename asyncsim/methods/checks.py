"""Checks of hyper-parameters that several methods share."""

from typing import Any

from asyncsim.clusters.policy import Policy, parse_policy
from asyncsim.errors import InputError, require_positive


def require_rate(argument: str, value: Any) -> None:
    """Raise InputError unless ``value`` is a positive number or a schedule (a function of the Visit)."""
    if not callable(value):
        require_positive(argument, value)


def require_policy(policy: Policy | str | None) -> Policy | None:
    """Return the timing policy that a method needs, which may be given as text; None for any.

    Raises
    ------
    InputError
        For anything else.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise InputError(f"policy = {policy!r}: must be a policy, such as asyncsim.buffered(10), or None for any")
    try:
        return parse_policy(policy)
    except InputError as error:
        raise InputError(f"policy = {policy!r}: {str(error).removeprefix(f'policy = {policy!r}: ')}") from None


def require_optimizer(argument: str, value: Any) -> Any:
    """Return ``value``; raise InputError unless it is a transformation of optax."""
    if not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise InputError(f"{argument} = {value!r}: must be an optimizer of optax, such as optax.adam(1e-3)")
    return value
