"""What the replay is to reach, and whether it did.

The bars are targets that this project has set itself; they are neither published nor of another program.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

#: Columns of the table of bars.
COLUMNS = ("measure", "workers", "method", "measured", "bar", "limit", "without_overlap", "verdict")
#: The GEM paper's run with 100 workers on MNIST: one epoch.
_PAPER_COMMITS = 93_800
_GIB = 2**30


#: The gradients of one compiled program at a time, in the best of several batchings, beside those of as many as the
#: replay has. Both are held against the same bars: these were set with the first, the second is the harder limit.
ONE_PROGRAM = "gradients alone, 1 at a time"


#: What stands above the table.
EXPLANATION = """\
A bar is a target that this project has set itself: at least (>=) or at most (<=) so much of what is measured here.
"met": this machine reaches it. "limit": what the gradients alone would reach in the place of the replay, which no
replay passes, so that a bar past it cannot be met. "without_overlap": what they and the commits alone would reach one
after the other; a replay that overlaps them may pass that."""


class Bar(NamedTuple):
    """A bar for a ratio of rates, at least.

    Attributes
    ----------
    task : str
    workers : tuple of int
    above, below : str
        The contenders whose rates are compared, as in ``ratios.csv``.
    bar : float
    on_cpu : bool
        Whether it is meant for CPUs, or for an accelerator.
    others : bool
        Whether it is meant for the methods that are not held against the usual loop, or for those that are.
    """

    task: str
    workers: tuple[int, ...]
    above: str
    below: str
    bar: float
    on_cpu: bool = True
    others: bool = False


RATIO_BARS = (
    Bar("digits", (100,), "replay", "gradients alone", 0.68),
    Bar("digits", (100,), "replay", ONE_PROGRAM, 0.68),
    Bar("digits", (100,), "replay", "gradients alone", 0.5, others=True),
    Bar("cnn", (10, 100), "replay", "gradients alone", 0.90),
    Bar("cnn", (10, 100), "replay", ONE_PROGRAM, 0.90),
    Bar("digits", (100,), "replay", "usual loop", 2.2),
    Bar("quadratic", (100,), "replay", "usual loop", 10.0),
    Bar("quadratic", (100,), "ensemble of 32", "usual loop", 30.0),
    Bar("cnn", (10, 100), "gradients alone", "gradients alone, PyTorch", 1.5),
    Bar("cnn", (100,), "replay", "usual loop, PyTorch", 1.5),
    # Against the convolutions that one would write; with this package's own in the loop there is less to gain.
    Bar("cnn", (100,), "replay", "usual loop, XLA's convolutions", 2.5),
    Bar("cnn", (100,), "replay", "gradients alone", 0.6, on_cpu=False),
)
#: By task, the most that a gradient's cost may grow from 10 to 1,000 workers.
_GROWTH_BARS, _FEW, _MANY = {"digits": 1.3, "cnn": 1.3}, 10, 1_000
_MEMORY_BAR, _PROCESS_BAR, _PAPER_SECONDS = 1.25, 8.0, 5.0


def bars(
    ratios: "pd.DataFrame", summary: "pd.DataFrame", memory: "pd.DataFrame | None", backend: str
) -> "pd.DataFrame":
    """Return the bars for what was measured.

    Parameters
    ----------
    ratios, summary, memory : pandas.DataFrame
        As the study writes them; ``memory`` only if it was measured.
    backend : str
        ``"cpu"`` or another.

    Returns
    -------
    pandas.DataFrame
        ``measure``, ``workers``, ``method``, ``measured``, ``bar``; ``limit``, what the gradients alone reach in the
        place of the replay; ``without_overlap``, what they and the commits alone reach one after the other, which a
        replay that overlaps them may pass; both where they were measured; and ``verdict``: met, or by how much it is
        missed, whether the bar is past the limit, and the smallest and the largest of the turns if it lies between.
    """
    import pandas as pd

    rows = _ratio_rows(ratios, backend == "cpu")
    if backend == "cpu":
        rows += _growth_rows(summary)
    else:
        rows += _paper_rows(summary)
    if memory is not None:
        rows += _memory_rows(memory)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def growth(summary: "pd.DataFrame") -> "pd.DataFrame":
    """Return how much more a replayed gradient costs with the most workers than with the fewest, at equal commits.

    Returns
    -------
    pandas.DataFrame
        ``task``, ``method``, ``fewest`` and ``most`` workers, and ``growth``: the ratio of the times per commit.
    """
    import pandas as pd

    rows = []
    replays = summary[summary["contender"] == "replay"]
    for (task, method), group in replays.groupby(["task", "method"], sort=False):
        rates = group.set_index("workers")["per_second"].sort_index()
        if len(rates) > 1:
            rows.append((task, method, rates.index[0], rates.index[-1], rates.iloc[0] / rates.iloc[-1]))
    return pd.DataFrame(rows, columns=["task", "method", "fewest", "most", "growth"])


def _ratio_rows(ratios: "pd.DataFrame", on_cpu: bool) -> list[tuple]:
    rows = []
    usual = set(ratios.loc[ratios["ratio"] == "replay / usual loop", "method"])
    for bar in RATIO_BARS:
        if bar.on_cpu != on_cpu:
            continue
        found = ratios[(ratios["task"] == bar.task) & (ratios["ratio"] == f"{bar.above} / {bar.below}")]
        found = found[found["method"].isin(usual) != bar.others]
        for row in found[found["workers"].isin(bar.workers)].itertuples():
            bounds = _bounds(ratios, bar, row.workers, row.method)
            judged = _at_least(float(row.median), bar.bar, *bounds)
            if row.min < bar.bar <= row.max:
                judged = *judged[:-1], f"{judged[-1]}; turns from {row.min:.4g} to {row.max:.4g}"
            rows.append((f"{bar.task}: {bar.above} / {bar.below}", row.workers, row.method, *judged))
    return rows


def _bounds(ratios: "pd.DataFrame", bar: Bar, workers: Any, method: Any) -> tuple[float, float]:
    """Return the columns ``limit`` and ``without_overlap`` of a replay's bar; nan where they were not measured."""
    if bar.above != "replay":
        return math.nan, math.nan
    case = (ratios["task"] == bar.task) & (ratios["workers"] == workers) & (ratios["method"] == method)
    median = ratios[case].set_index("ratio")["median"]
    if bar.below == ONE_PROGRAM:
        limit = 1 / float(median.get(f"{ONE_PROGRAM} / gradients alone", math.nan))
    else:
        limit = 1.0 if bar.below == "gradients alone" else float(median.get(f"gradients alone / {bar.below}", math.nan))
    return limit, limit / (1 + float(median.get("gradients alone / commits alone", math.nan)))


def _growth_rows(summary: "pd.DataFrame") -> list[tuple]:
    rows = []
    for row in growth(summary[summary["workers"].isin((_FEW, _MANY))]).itertuples():
        bar = _GROWTH_BARS.get(str(row.task))
        if bar is not None:
            text = f"{row.task}: time per commit, {_MANY} / {_FEW} workers"
            rows.append((text, _MANY, row.method, *_at_most(float(row.growth), bar)))
    return rows


def _paper_rows(summary: "pd.DataFrame") -> list[tuple]:
    found = summary[(summary["task"] == "cnn") & (summary["workers"] == 100) & (summary["contender"] == "replay")]
    rows = []
    for row in found.itertuples():
        seconds = _PAPER_COMMITS / float(row.per_second)
        text = f"cnn: {_PAPER_COMMITS:,} commits at the replay's rate (s)"
        rows.append((text, 100, row.method, *_at_most(seconds, _PAPER_SECONDS)))
    return rows


def _memory_rows(memory: "pd.DataFrame") -> list[tuple]:
    rows = []
    for row in memory.itertuples():
        if (row.task, row.workers) == ("mlp", 100):
            text, measured, bar = "mlp: peak memory / workers' state", float(row.memory_ratio), _MEMORY_BAR
        elif (row.task, row.workers) == ("cnn", 1_000):
            text, measured, bar = "cnn: peak memory (GiB)", float(row.peak_bytes) / _GIB, _PROCESS_BAR
        else:
            continue
        rows.append((text, row.workers, row.method, *_at_most(measured, bar)))
    return rows


def _at_least(measured: float, bar: float, limit: float, without_overlap: float) -> tuple:
    """Return the columns from ``measured`` on, for a bar that is to be reached."""
    verdict = "met" if measured >= bar else f"missed by {1 - measured / bar:.0%}"
    if limit < bar:
        verdict += ", past the limit"
    return measured, f">= {bar:g}", limit, without_overlap, verdict


def _at_most(measured: float, bar: float) -> tuple:
    """Return the columns from ``measured`` on, for a bar that is not to be passed."""
    verdict = "met" if measured <= bar else f"missed by {measured / bar - 1:.0%}"
    return measured, f"<= {bar:g}", math.nan, math.nan, verdict
