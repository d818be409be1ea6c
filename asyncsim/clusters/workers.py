"""The workers of a cluster: the laws of their computing, and their windows."""

import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncsim.base.declared import each
from asyncsim.base.errors import InputError, require_count, require_memory
from asyncsim.clusters.laws import Law, lasting, parse

#: Memory (bytes) that a simulation needs for a worker at the least: the durations drawn ahead.
WORKER_BYTES = 1_000
#: Largest number of local steps between two visits.
_LONGEST_WINDOW = 100_000
#: Guards the floor against quotients such as 3 * (1 / 3).
_ROUND_OFF = 1e-9


class HeterogeneityWarning(UserWarning):
    """One law per worker was given, and all are equal."""


def as_workers(argument: str, value: Any) -> int:
    """Check a number of workers: at least one, and at most as many as fit into memory."""
    workers = require_count(argument, value)
    require_memory(f"{argument} = {workers}", "a cluster of so many", workers * WORKER_BYTES)
    return workers


def _read(argument: str, value: Any) -> Any:
    """Read laws from a text, or a list from an array; leave anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    try:
        return parse(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{argument}: {error}") from None


def as_compute(value: Any, workers: int) -> Law | tuple[Law, ...]:
    """Check the law of computing: one for all workers, or one for each."""
    value = _read("compute", value)
    if not isinstance(value, list | tuple):
        return lasting("compute", value)
    laws = tuple(lasting(f"compute[{i}]", law) for i, law in enumerate(value))
    if len(laws) != workers:
        raise InputError(
            f"compute = a list of {len(laws)} laws: must hold one law per worker, and there are "
            f"{workers}; give one law for all, or as many as workers"
        )
    if all(law == laws[0] for law in laws[1:]):
        if workers > 1:
            warnings.warn(
                f"compute: one law per worker was given and all {workers} are {laws[0]}, which "
                "changes nothing; give one law for all, or different ones",
                HeterogeneityWarning,
                stacklevel=4,
            )
        return laws[0]
    return laws


def as_window(value: Any, workers: int) -> int | tuple[int, ...]:
    """Check the window: one for all workers, or one for each."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list | tuple):
        return _window("window", value)
    windows = tuple(_window(f"window[{i}]", item) for i, item in enumerate(value))
    if len(windows) != workers:
        raise InputError(
            f"window = a list of {len(windows)}: must hold one per worker, and there are "
            f"{workers}; give one for all, or as many as workers"
        )
    return windows[0] if len(set(windows)) == 1 else windows


def _window(argument: str, value: Any) -> int:
    if require_count(argument, value) > _LONGEST_WINDOW:  # all times of a window are drawn at once
        raise InputError(
            f"{argument} = {value}: must be at most {_LONGEST_WINDOW:,}; give fewer local steps"
        )
    return int(value)


def proportional_windows(
    compute: Sequence[Law | float | str] | str, window: int
) -> tuple[int, ...]:
    """Return windows in proportion to the workers' speeds, so that all communicate equally often.

    ::

        window of worker i = floor(window * speed of i / speed of the fastest), at least 1

    Parameters
    ----------
    compute : sequence of Law, or text
        Laws of the time of a local step, one per worker; the speed is the inverse of the mean.
    window : int
        Window of the fastest workers.

    Returns
    -------
    tuple of int
        For ``Cluster(window=...)``.

    References
    ----------
    Liu et al. 2024, "Asynchronous local-SGD training for language modeling", arXiv 2401.09135
    (DyLU).
    """
    require_count("window", window)
    laws = parse(compute) if isinstance(compute, str) else compute
    if isinstance(laws, Law | numbers.Real):
        raise InputError(
            f"compute = {compute!r}: must be a list of laws; with one for all, give one window"
        )
    means = [law.mean for law in each(lasting)("compute", laws)]
    fastest = min(means)
    return tuple(max(1, math.floor(window * fastest / mean + _ROUND_OFF)) for mean in means)
