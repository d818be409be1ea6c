"""What a cluster is made of, from what users write; each function raises InputError for what cannot be that."""

import math
import warnings
from typing import Any

import numpy as np

from asyncsim.clusters.laws import Law, as_law, parse
from asyncsim.clusters.policy import POLICIES, Policy, form_of, parse_policy
from asyncsim.errors import InputError, require_count, require_positive

#: Most local steps between two visits.
_LONGEST_WINDOW = 100_000


class HeterogeneityWarning(UserWarning):
    """Different speeds were asked for, but all of them are equal."""


def _read(argument: str, value: Any) -> Any:
    """Return the law or the laws of a text, the list of an array, and anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    try:
        return parse(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{argument}: {error}") from None


def as_compute(value: Any, workers: int) -> Law | tuple[Law, ...]:
    """Return one law of computing for all workers, or one for each."""
    value = _read("compute", value)
    if not isinstance(value, list | tuple):
        return _lasting("compute", as_law("compute", value))
    laws = tuple(_lasting(f"compute[{i}]", as_law(f"compute[{i}]", law)) for i, law in enumerate(value))
    if len(laws) != workers:
        raise InputError(
            f"compute = a list of {len(laws)} laws: must hold one law per worker, and there are {workers}; "
            "give one law for all, or as many as workers"
        )
    if all(law == laws[0] for law in laws[1:]):
        if workers > 1:
            warnings.warn(
                f"compute: one law per worker was given and all {workers} are {laws[0]}, which changes "
                "nothing; give one law for all, or different ones",
                HeterogeneityWarning,
                stacklevel=4,
            )
        return laws[0]
    return laws


def as_window(value: Any, workers: int) -> int | tuple[int, ...]:
    """Return one window for all workers, or one for each."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list | tuple):
        return _window("window", value)
    windows = tuple(_window(f"window[{i}]", one) for i, one in enumerate(value))
    if len(windows) != workers:
        raise InputError(
            f"window = a list of {len(windows)}: must hold one per worker, and there are {workers}; give one for all, "
            "or as many as workers"
        )
    return windows[0] if len(set(windows)) == 1 else windows


def _window(argument: str, value: Any) -> int:
    if require_count(argument, value) > _LONGEST_WINDOW:  # all times of a window are drawn at once
        raise InputError(f"{argument} = {value}: must be at most {_LONGEST_WINDOW:,}; give fewer local steps")
    return int(value)


def as_latency(value: Any) -> Law | tuple[Law, Law]:
    """Return one law for both ways, or that of the way up and that of the way down."""
    value = _read("latency", value)
    if not isinstance(value, list | tuple):
        return with_mean("latency", as_law("latency", value))
    if len(value) != 2:
        raise InputError(
            f"latency = a list of {len(value)} laws: must be one law, or a pair: the way up and the way down"
        )
    up, down = (with_mean(f"latency[{i}]", as_law(f"latency[{i}]", law)) for i, law in enumerate(value))
    return up if up == down else (up, down)


def as_message_bytes(value: Any) -> float | tuple[float, float]:
    """Return one size for both ways, or that of messages on the way up and on the way down."""
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return require_positive("message_bytes", value, "bytes")
    if len(value) != 2:
        raise InputError(
            f"message_bytes = {value!r}: must be one number, or a pair: of messages on the way up and on the way down"
        )
    up, down = (require_positive(f"message_bytes[{i}]", size, "bytes") for i, size in enumerate(value))
    return up if up == down else (up, down)


def as_policy(value: Any) -> Policy:
    """Return a policy from itself or its text."""
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, Policy):
        called = any(value is one for one in POLICIES.values())
        instead = f"call it, as in asyncsim.{form_of(value.__name__)}" if called else "write asyncsim.asynchronous()"
        raise InputError(f"policy = {value!r}: must be a policy; {instead}")
    return value


def with_mean(argument: str, law: Law) -> Law:
    """Return a law that has a mean."""
    if not math.isfinite(law.mean):
        raise InputError(f"{argument} = {law}: its mean is infinite; choose a law with a finite mean")
    return law


def _lasting(argument: str, law: Law) -> Law:
    if with_mean(argument, law).mean <= 0:
        raise InputError(f"{argument} = {law}: a local step must take some time; give a mean above zero")
    return law
