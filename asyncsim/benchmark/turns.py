"""Contenders that run in turns in one process, and the ratios of their rates."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import tell

#: Columns of the summary; a ratio is the first contender's rate over this one's, in the same turn.
COLUMNS = (
    *("task", "workers", "method", "contender", "amount", "per_second", "per_second_min", "per_second_max"),
    *("ratio", "ratio_min", "ratio_max"),
)


class Case(NamedTuple):
    """What was run: a task, on a cluster of so many workers, with a method (empty where there is none)."""

    task: str
    workers: int
    method: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.task, f"{self.workers} workers", self.method]))


class Contender(NamedTuple):
    """One side of a comparison: ``run(amount)`` returns how many seconds that many visits or commits took."""

    name: str
    amount: int
    run: Callable[[int], float]


def measure(case: Case, contenders: Sequence[Contender], repeats: int) -> pd.DataFrame:
    """Let the contenders run in turns, after one call each that compiles and does not count.

    Returns a row per contender with the median, least and most over the turns; see `COLUMNS`.
    """
    for contender in contenders:
        tell(f"{case}: first call of {contender.name}")
        contender.run(contender.amount)
    rates = np.empty((repeats, len(contenders)))
    for turn in range(repeats):
        tell(f"{case}: turn {turn + 1} of {repeats}")
        # There and back, so that nobody always comes first or after the same one.
        for index in range(len(contenders))[:: -1 if turn % 2 else 1]:
            _, amount, run = contenders[index]
            rates[turn, index] = amount / run(amount)
    rows = []
    for index, (name, amount, _) in enumerate(contenders):
        ratios = _spread(rates[:, 0] / rates[:, index]) if index else (np.nan, np.nan, np.nan)
        rows.append((*case, name, amount, *_spread(rates[:, index]), *ratios))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def calibrate(run: Callable[[int], float], seconds: float, amount: int = 4) -> int:
    """Return the amount that takes about so many seconds, found with runs that grow from ``amount``."""
    run(amount)  # compiles
    while True:
        # The better of two: another process may have held up one.
        took = min(run(amount) for _ in range(2))
        wanted = max(1, round(amount * seconds / max(took, 1e-6)))
        if took >= seconds / 8 or wanted <= amount:
            return wanted
        amount = min(wanted, 16 * amount)


def timed(run: Callable[..., Any], *arguments: Any) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(values)), float(values.min()), float(values.max())
