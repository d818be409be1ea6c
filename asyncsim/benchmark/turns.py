"""Contenders that run in turns in one process, and the ratios of their rates."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.notes import tell

if TYPE_CHECKING:
    import pandas as pd

#: What is compared: the first contender's rate over the second's, in the same turn.
RATIOS = (
    ("replay", "gradients alone"),
    ("replay and simulation", "gradients alone"),
    ("replay", "usual loop"),
    ("replay", "usual loop, same records"),
    ("replay", "usual loop, XLA's convolutions"),
    ("replay", "usual loop, PyTorch"),
    ("concurrent replays", "usual loop"),
    ("concurrent replays", "usual loop, same records"),
    ("concurrent replays", "usual loop, PyTorch"),
    ("gradients alone", "usual loop"),
    ("gradients alone", "usual loop, same records"),
    ("gradients alone", "usual loop, XLA's convolutions"),
    ("gradients alone", "usual loop, PyTorch"),
    ("gradients alone", "commits alone"),
    ("ensemble of 32", "usual loop"),
    ("gradients alone", "gradients alone, PyTorch"),
    ("simulate", "usual SimPy model"),
)
#: Columns of `times`, and whose they are.
_TIMES = {
    "gradients_us": "gradients alone",
    "commits_us": "commits alone",
    "replay_us": "replay",
    "with_simulation_us": "replay and simulation",
}
TURN_COLUMNS = ("task", "workers", "method", "turn", "contender", "amount", "seconds", "per_second", "setup_seconds")


class Case(NamedTuple):
    """What was run: a task, on a cluster of so many workers, with a method (empty where there is none)."""

    task: str
    workers: int
    method: str = ""

    def __str__(self) -> str:
        words = [self.task, f"{self.workers} workers" if self.workers else "", self.method]
        return ", ".join(word for word in words if word)


class Took(NamedTuple):
    """How long a run took, for those that measure themselves.

    Attributes
    ----------
    amount : int
        Visits, commits or gradients that ``seconds`` is for.
    seconds : float
    setup_seconds : float
        Before that, once a run.
    """

    amount: int
    seconds: float
    setup_seconds: float


class Contender(NamedTuple):
    """One side of a comparison.

    Attributes
    ----------
    name : str
    amount : int
        Visits, commits or gradients of a turn.
    run : function
        ``run(amount)``; may return a `Took`, else the whole call is timed.
    """

    name: str
    amount: int
    run: Callable[[int], Any]


def measure(case: Case, contenders: Sequence[Contender], repeats: int) -> "pd.DataFrame":
    """Let the contenders run in turns, after a call each that is not counted.

    Returns
    -------
    pandas.DataFrame
        A row per turn and contender: the case, ``turn``, ``contender``, ``amount``, ``seconds``, ``per_second``, and
        ``setup_seconds``, the fixed time of a run that ``seconds`` is without.
    """
    import pandas as pd

    for contender in contenders:
        tell(f"{case}: first call of {contender.name}")
        contender.run(contender.amount)
    rows: list[tuple[Any, ...]] = []
    for turn in range(repeats):
        tell(f"{case}: turn {turn + 1} of {repeats}")
        for index in order(len(contenders), turn):
            name, amount, run = contenders[index]
            took = timed(amount, run)
            rate = took.amount / took.seconds
            rows.append((*case, turn, name, took.amount, took.seconds, rate, took.setup_seconds))
    return pd.DataFrame(rows, columns=list(TURN_COLUMNS))


def order(count: int, turn: int) -> list[int]:
    """Return the order of the contenders in a turn: from turn to turn each follows another one.

    Williams' design: neighbours in ``0, 1, count - 1, 2, count - 2, ...`` all differ by another number.
    """
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(count)]
    return [(place + turn) % count for place in zigzag]


def calibrate(run: Callable[[int], Any], seconds: float, amount: int = 4) -> int:
    """Return the amount that takes about so many seconds, found with runs that grow from ``amount``."""
    run(amount)  # compiles
    while True:
        # The better of two: another process may have held up one.
        took = min(timed(amount, run).seconds for _ in range(2))
        wanted = max(1, round(amount * seconds / max(took, 1e-6)))
        if took >= seconds / 8 or wanted <= amount:
            return wanted
        amount = min(wanted, 16 * amount)


def timed(amount: int, run: Callable[[int], Any]) -> Took:
    """Return how long a run took: by itself if it says so, else as a whole."""
    started = time.perf_counter()
    took = run(amount)
    return took if isinstance(took, Took) else Took(amount, time.perf_counter() - started, 0.0)


def summarise(turns: "pd.DataFrame") -> "pd.DataFrame":
    """Return each contender's median rate over the turns, with the smallest and the largest."""
    by = turns.groupby(["task", "workers", "method", "contender"], sort=False)
    return by.agg(
        amount=("amount", "first"),
        per_second=("per_second", "median"),
        per_second_min=("per_second", "min"),
        per_second_max=("per_second", "max"),
    ).reset_index()


def times(summary: "pd.DataFrame") -> "pd.DataFrame":
    """Return where a replay's time goes, one row for a case's rows of `summarise`.

    Returns
    -------
    pandas.DataFrame
        The case, and microseconds a commit: ``gradients_us`` and ``commits_us``, both alone, which a replay may
        overlap; ``replay_us``; and ``with_simulation_us``, of a replay with its simulation and its set-up.
    """
    import pandas as pd

    rates = summary.set_index("contender")["per_second"]
    row = {column: 1e6 / float(rates.get(name, math.nan)) for column, name in _TIMES.items()}
    return pd.DataFrame([{**summary[["task", "workers", "method"]].iloc[0], **row}])


def ratios(turns: "pd.DataFrame") -> "pd.DataFrame":
    """Return the median, smallest and largest of each of `RATIOS` over the turns of one case."""
    import pandas as pd

    rates = turns.pivot(index="turn", columns="contender", values="per_second")
    case = turns[["task", "workers", "method"]].iloc[0].to_list()
    others = [name for name in rates if name.startswith("gradients alone, ") and name.endswith(" at a time")]
    rows = []
    against = [(above, name) for above in ("replay", "concurrent replays") for name in others]
    pairs = [*RATIOS, *((name, "gradients alone") for name in others), *against]
    for above, below in pairs:
        if above in rates and below in rates:
            ratio = rates[above] / rates[below]
            rows.append((*case, f"{above} / {below}", ratio.median(), ratio.min(), ratio.max()))
    return pd.DataFrame(rows, columns=["task", "workers", "method", "ratio", "median", "min", "max"])
