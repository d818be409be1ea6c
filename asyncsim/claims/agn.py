"""Claims of Hermans' thesis (2017) and of "Accumulated Gradient Normalization" (arXiv
1710.02368).
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.claims.claim import Bounds, Claim, Finding, above, interval_text, spread
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished, figures

SOURCE = "Hermans 2017"
#: Least training accuracy of a run that learned, and largest of a guess among ten classes.
_LEARNED, _CHANCE = 0.9, 0.15
#: Least straightness of a straight path.
_STRAIGHT = 0.9
#: Share of the cells that AGN wins, as the thesis states it.
_WON = 0.6973
#: Layers of the thesis' perceptron, and of the network of the digits.
_LAYERS, _DIGITS_LAYERS = 4, 3
#: In a grid of more windows than this, the one next to the nearest agrees, too.
_COARSE_GRID = 3
#: The second largest of sorted values.
_SECOND = operator.itemgetter(-2)
_NAMES = {"downpour": "DOWNPOUR", "dynsgd": "DynSGD", "agn": "AGN", "aeasgd": "AEASGD"}


def _accuracy(
    method: str,
    workers: int,
    window: Any,
    above: float | None = None,
    below: float | None = None,
) -> Bounds:
    """Compare the training accuracy of a cell with a bound."""
    text = f"{_NAMES[method]}, n = {workers}, window {{of[window]}}: accuracy {{}}"
    of = {"method": method, "workers": workers, "window": window}
    return Bounds(text, "train_accuracy", of, above=above, below=below)


def _corner(workers: Any, window: Any) -> Bounds:
    """Compare the accuracies of a cell and of the most workers at the second-longest window."""
    text = (
        "n = {of[workers]}, window {of[window]}: accuracy is {} higher than with n = {to[workers]},"
        " window {to[window]}"
    )
    of = {"method": "agn", "workers": workers, "window": window}
    to = {"method": "agn", "workers": max, "window": _SECOND}
    return Bounds(text, "train_accuracy", of, to, above=0.0, ratio=False)


_DECLINES = Bounds(
    "window {of[window]}: accuracy with {of[workers]} workers is {} higher than with {to[workers]}",
    "train_accuracy",
    {"method": "aeasgd", "workers": min},
    {"method": "aeasgd", "workers": max},
    above=0.0,
    ratio=False,
    per=("window",),
)


def elastic_generalizes(finished: Finished) -> list[Finding]:
    """Compare AEASGD's test accuracy with its training accuracy."""
    rows = finished.rows(method="aeasgd")
    gap = rows["test_accuracy"] - rows["train_accuracy"]
    higher = int((gap > 0).sum())
    text = f"test accuracy is higher in {higher} of {len(gap)} runs"
    return [Finding(text, higher == len(gap))]


def converges_better(finished: Finished) -> Iterator[Finding]:
    """Compare AGN's temporal efficiency over AEASGD and over DynSGD with one, cell by cell."""
    table = _of_agn(finished)
    for (n, window), cell in table.groupby(["workers", "window"]):
        for rival in ("aeasgd", "dynsgd"):
            ratio = np.log(cell.loc[cell["against"] == rival, "efficiency"])
            number = interval_text(ratio)
            text = f"n = {n}, window {window}: temporal efficiency over {_NAMES[rival]} is {number}"
            yield above(text, ratio)


def _of_agn(finished: Finished) -> pd.DataFrame:
    """Return AGN's temporal efficiencies."""
    table = finished.table("efficiency.csv")
    return table[table["method"] == "agn"]


def efficiency_wins(finished: Finished) -> list[Finding]:
    """Count the cells in which AGN has the higher temporal efficiency, published and measured."""
    printed = figures("agn").published.grid("efficiency", "agn over aeasgd")
    table = _of_agn(finished)
    cells = table[table["against"] == "aeasgd"].groupby(["workers", "window"])
    ours, won = cells["efficiency"].mean(), float((printed > 1).mean())
    return [
        Finding(
            f"the thesis' own table has {(printed > 1).sum()} of {len(printed)} cells above 1, "
            f"{won:.1%}",
            abs(won - _WON) < 0.5 / len(printed),
        ),
        Finding(
            f"here {(ours > 1).sum()} of {len(ours)} cells are above 1, most would support it",
            bool((ours > 1).mean() > 0.5),
        ),
    ]


def mode(finished: Finished) -> list[Finding]:
    """Compare the mode of the staleness with n - 1 (target T5)."""
    table, findings = finished.table("staleness.csv"), []
    for n, rows in table[table["window"] == 1].groupby("workers"):
        peak = int(rows.loc[rows["share"].idxmax(), "staleness"])
        near = abs(peak - (n - 1)) <= max(1, 0.1 * n)
        findings.append(Finding(f"n = {n}: the mode is {peak}", near))
    return findings


def mean_staleness(finished: Finished) -> list[Finding]:
    """Compare means over the staleness with the thesis' formulas."""
    n = int(finished.config["workers"])
    names = finished.summary.drop_duplicates("trace_file")["trace_file"]
    frames = [finished.trace(name).frame["staleness"].to_numpy()[n:] for name in names]
    mean = pd.Series([values.mean() for values in frames])
    inverse = pd.Series([(1 / (values + 1)).mean() for values in frames])
    stated, exact = 1 / (n - 1), np.log(n) / (n - 1)
    return [
        Finding(f"the mean staleness is {spread(mean)}, n - 1 = {n - 1}", _near(mean, n - 1)),
        Finding(
            f"the mean of 1/(staleness + 1) is {spread(inverse)}, not {stated:.3g} = 1/(n - 1); "
            f"the geometric law gives ln(n)/(n - 1) = {exact:.3g}",
            _near(inverse, stated),
        ),
    ]


def _near(values: pd.Series, stated: float) -> bool:
    """Return whether a mean is within a tenth of a stated value."""
    return bool(abs(values.mean() / stated - 1) <= 0.1)


def implicit_momentum(finished: Finished) -> list[Finding]:
    """Compare the measured momentum with 1 - 1/n, law by law."""
    table, findings = finished.table("momentum.csv"), []
    for law, rows in table.groupby("compute", sort=False):
        theory = 1 - 1 / rows["workers"]
        off = (rows["momentum_measured"] - theory).abs()
        within = off <= np.maximum(3 * rows["standard_error"], 0.01)
        numbers = ", ".join(
            f"{row.momentum_measured:.3f} (theory {1 - 1 / row.workers:.3f}) with {row.workers}"
            for row in rows.itertuples()
        )
        findings.append(Finding(f"{law}: {numbers} workers", bool(within.all())))
    return findings


def _mean(column: str) -> Callable[[Run], float]:
    """Return a function that averages a column of a run's commits."""

    def mean(run: Run) -> float:
        return float(run.commits[column].mean())

    return mean


def _longer_window(
    column: str, words: str, above: float | None = None, below: float | None = None
) -> Bounds:
    """Compare the mean of a column of the commits between the longest and the shortest window."""
    text = f"{words} with window {{of[window]}} is {{}} times that with {{to[window]}}"
    of, to = ({"method": "agn", "window": end} for end in (max, min))
    return Bounds(text, _mean(column), of, to, above, below)


def straight_path(finished: Finished) -> list[Finding]:
    """Judge the path of the central variable for the longest window."""
    path = finished.summary.groupby("window")["straightness"].mean()
    numbers = ", ".join(f"{value:.2f} with window {window}" for window, value in path.items())
    text = f"the distance from the start to the end over the length of the path is {numbers}"
    return [Finding(text, bool(path.is_monotonic_increasing and path.iloc[-1] >= _STRAIGHT))]


def heuristic(finished: Finished) -> list[Finding]:
    """Compare AGN's best windows, published and measured, with the heuristic (n + layers) / 2."""
    printed = figures("agn").published.grid("train_accuracy", "agn")
    runs = finished.rows(method="agn")
    ours = runs.groupby(["workers", "window"])["train_accuracy"].mean()
    layers = _DIGITS_LAYERS if finished.config["problem"] == "digits" else _LAYERS
    return [
        _best_windows("the thesis' table", printed, _LAYERS),
        _best_windows("our runs", ours, layers),
    ]


def _best_windows(name: str, accuracy: pd.Series, layers: int) -> Finding:
    """Judge whether the best windows are the grid's nearest to the heuristic, or next to
    them.
    """
    best = accuracy.groupby(level=0).idxmax().map(lambda cell: cell[1])
    tried = np.sort(accuracy.index.get_level_values(1).unique())
    places = np.searchsorted(tried, best)
    nearest = [np.abs(tried - (n + layers) / 2).argmin() for n in best.index]
    near = np.abs(places - nearest) <= (1 if len(tried) > _COARSE_GRID else 0)
    pairs = ", ".join(f"{window} for n = {n}" for n, window in best.items())
    text = f"{name}: the best of {len(tried)} windows is {pairs}; {near.sum()} of {len(near)} agree"
    return Finding(text, bool(near.all()))


_DIRECTIONS = (
    "windows --workers 5 --window 1 15 --methods agn --epochs 20 --optimizer none "
    "--learning-rate 0.05 --directions-every 5 --seeds 3",
)
# As many visits with each window; the longest stands for a window without bound.
_PATH = (
    "windows --workers 5 --window 1 15 150 --methods agn --epochs none --steps 20 "
    "--optimizer none --learning-rate 0.05 --seeds 3",
)
_WINDOWS = ('windows --methods agn "aeasgd(alpha=0.05)" --epochs 60 --seeds 3',)
_COLLAPSE = ("windows --workers 10 20 --window 1 --methods downpour dynsgd --epochs 60 --seeds 22",)
_ACCUMULATED = ("windows --workers 10 --window 10 40 --methods downpour --epochs 60 --seeds 3",)
_RIVALS = (
    'windows --workers 10 20 --window 10 --methods agn "aeasgd(alpha=0.05)" dynsgd --epochs 60 '
    "--seeds 6",
)
_DELTAS = (
    "windows --workers 5 --window 15 --methods agn downpour --epochs none --steps 20 "
    "--optimizer none --learning-rate 0.05 --seeds 3",
)
_PAPER = ("windows --scale paper",)
_PAPER_ALL = (
    "windows --scale paper --epochs 5 --workers 10 20 --window 1 5 10 20 --methods agn "
    '"aeasgd(alpha=0.05)" downpour dynsgd',
)

CLAIMS: Sequence[Claim] = (
    Claim(
        "DOWNPOUR learns with 10 workers and collapses to chance with 20",
        f"{SOURCE}, chapter 3",
        _COLLAPSE,
        (_accuracy("downpour", 10, 1, above=_LEARNED), _accuracy("downpour", 20, 1, below=_CHANCE)),
        _PAPER_ALL,
        looked=3,
    ),
    Claim(
        "Accumulated updates break DOWNPOUR with 10 workers",
        f"{SOURCE}, chapter 3",
        _ACCUMULATED,
        tuple(_accuracy("downpour", 10, window, below=_LEARNED) for window in (_SECOND, max)),
        _PAPER_ALL,
    ),
    Claim(
        "DynSGD learns with 20 workers, where DOWNPOUR collapses",
        f"{SOURCE}, chapter 3",
        _COLLAPSE,
        (_accuracy("dynsgd", 20, 1, above=_LEARNED), _accuracy("downpour", 20, 1, below=_LEARNED)),
        _PAPER_ALL,
        looked=3,
    ),
    Claim(
        "AGN loses accuracy only with many workers and short windows",
        f"{SOURCE}, table of chapter 4",
        _WINDOWS,
        (_corner(min, _SECOND), _corner(max, max)),
        _PAPER,
    ),
    Claim(
        "AEASGD's training accuracy falls with the number of workers, at any window",
        f"{SOURCE}, table of chapter 4",
        _WINDOWS,
        (_DECLINES,),
        _PAPER,
    ),
    Claim(
        "AEASGD's validation accuracy is above its training accuracy",
        f"{SOURCE}, chapter 4",
        _WINDOWS,
        elastic_generalizes,
        _PAPER,
    ),
    Claim(
        "AGN's temporal efficiency is above AEASGD's in 69.73 % of the cells",
        f"{SOURCE}, chapter 4",
        _WINDOWS,
        efficiency_wins,
        _PAPER,
    ),
    Claim(
        "AGN converges better than AEASGD and DynSGD",
        "Hermans et al. 2017, abstract",
        _RIVALS,
        converges_better,
        _PAPER_ALL,
    ),
    Claim(
        "The magnitude of a worker's delta is smaller than that of accumulated gradients",
        "Hermans et al. 2017, abstract",
        _DELTAS,
        (
            Bounds(
                "window {of[window]}: the mean length of AGN's delta is {} times DOWNPOUR's",
                _mean("update_norm"),
                {"method": "agn"},
                {"method": "downpour"},
                below=1.0,
                per=("window",),
            ),
        ),
    ),
    Claim(
        "The staleness has its mode near n - 1",
        f"{SOURCE}, chapter 3",
        _WINDOWS,
        mode,
        _PAPER_ALL,
    ),
    Claim(
        "AGN's updates have a better direction than first-order gradients",
        f"{SOURCE}, chapter 4",
        _DIRECTIONS,
        (
            _longer_window("gradient_cosine", "cosine with the full gradient", above=1.0),
            _longer_window("target_cosine", "cosine with the way to the end", above=1.0),
        ),
    ),
    Claim(
        "AGN aligns the implicit momentum",
        f"{SOURCE}, chapter 4",
        _DIRECTIONS,
        (_longer_window("previous_cosine", "cosine with the previous step", above=1.0),),
    ),
    Claim(
        "A longer window makes AGN's steps smaller",
        f"{SOURCE}, chapter 4",
        _PATH,
        (_longer_window("update_norm", "mean length of a step", below=1.0),),
    ),
    Claim(
        "The longer AGN's window, the straighter its path; without bound it is straight",
        f"{SOURCE}, chapter 4",
        _PATH,
        straight_path,
    ),
    Claim(
        "AGN's best window is about (n + layers) / 2",
        f"{SOURCE}, chapter 4",
        _WINDOWS,
        heuristic,
        _PAPER,
    ),
    Claim(
        "The mean staleness is n - 1, and E[1/staleness] is 1/(n - 1)",
        f"{SOURCE}, chapter 3",
        (
            'staleness --workers 20 --learning-rate 0.05 --compute "exponential(1)" '
            '--service "constant(0)" --methods downpour --steps 100',
        ),
        mean_staleness,
    ),
    Claim(
        "Asynchrony adds the momentum 1 - 1/n",
        "Mitliagkas et al. 2016, theorem 5; used in Hermans 2017",
        (
            'momentum --workers 2 8 32 --compute "exponential(1)" "gamma(mean=1, cv=0.2)" '
            "--seeds 60",
        ),
        implicit_momentum,
        ("momentum --scale paper",),
    ),
)
