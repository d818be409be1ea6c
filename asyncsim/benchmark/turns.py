"""Contenders that run in turns in one process, and the ratios of their rates."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import tell

#: Columns of the summary; a ratio is the first contender's rate over this one's, in the same turn.
COLUMNS = (
    "task",
    "workers",
    "method",
    "contender",
    "amount",
    "per_second",
    "per_second_min",
    "per_second_max",
    "ratio",
    "ratio_min",
    "ratio_max",
)


class Case(NamedTuple):
    """A benchmarked case: a task, a number of workers and a method (empty for a timing without
    one).
    """

    task: str
    workers: int
    method: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.task, f"{self.workers} workers", self.method]))


class Contender(NamedTuple):
    """One side of a comparison: ``run(amount)`` returns the seconds of ``amount`` visits or
    commits.
    """

    name: str
    amount: int
    run: Callable[[int], float]


def measure(case: Case, contenders: Sequence[Contender], repeats: int) -> pd.DataFrame:
    """Time the contenders in turns, after one uncounted call each that compiles.

    Returns a row per contender with the median, minimum and maximum over the turns; see `COLUMNS`.
    """
    for contender in contenders:
        tell(f"{case}: first call of {contender.name}")
        contender.run(contender.amount)
    rates = np.empty((repeats, len(contenders)))
    for turn in range(repeats):
        tell(f"{case}: turn {turn + 1} of {repeats}")
        # Forwards and backwards: no contender always runs first, or after the same predecessor.
        for index in range(len(contenders))[:: -1 if turn % 2 else 1]:
            _, amount, run = contenders[index]
            rates[turn, index] = amount / run(amount)
    rows = []
    for index, (name, amount, _) in enumerate(contenders):
        ratios = _spread(rates[:, 0] / rates[:, index]) if index else (np.nan, np.nan, np.nan)
        rows.append((*case, name, amount, *_spread(rates[:, index]), *ratios))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def calibrate(run: Callable[[int], float], seconds: float, amount: int = 4) -> int:
    """Return the amount that takes about ``seconds``, by runs that grow from ``amount``."""
    run(amount)  # compiles
    while True:
        # The faster of two, because another process may delay either.
        took = min(run(amount) for _ in range(2))
        target = max(1, round(amount * seconds / max(took, 1e-6)))
        if took >= seconds / 8 or target <= amount:
            return target
        amount = min(target, 16 * amount)


def timed(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(values)), float(values.min()), float(values.max())
