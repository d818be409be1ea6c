"""Rank methods, policies or learning rates, and say how sure their order is.

A study's summary has a row for each run. `means` returns a row for each combination of some columns, with
means over the seeds; `grid` adds their spreads and puts the best first; `tuned` selects the runs of each method
at its best rate; `ranked` adds how sure the order of some rows is::

    every = grid(summary, ("method", "learning_rate"), ["time_to_target", "train_loss"], measure)
    table = ranked(every.drop_duplicates("method"), summary, ("method", "learning_rate"), measure)

Seeds are paired: with one seed all rows have the same delays and minibatches. The differences of two rows, seed by
seed, therefore hold less noise than the rows.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text
from asyncsim.study.columns import Column, as_column, text_of

#: Probability that all comparisons of a table hold together.
CONFIDENCE = 0.95
#: Columns that bound a measure from below where the target was not reached.
_AT_LEAST = {"time_to_target": "simulated_seconds", "gradients_to_target": "gradients"}
#: Most seeds that a user is advised to run.
_MANY_SEEDS = 100
#: Columns of the seeds that would tell a row from the one above it, and from the best.
_NEEDS = {"above": "needs_seeds", "best": "needs_seeds_best"}


class Measure(NamedTuple):
    """The column of a summary by which runs are compared."""

    name: str
    best: str = "least"  #: or ``"most"``: which values are best
    title: str = ""  #: in a table; by default that of the column

    @property
    def shown(self) -> str:
        """Its title in a table."""
        return self.title or as_column(self.name).title


def means(summary: pd.DataFrame, by: Sequence[str], columns: Iterable[str], spreads: bool = False) -> pd.DataFrame:
    """Return a row for each combination of the columns ``by`` of a summary, in the order of the summary.

    Columns: ``by``, ``seeds``, ``diverged``; with a target ``reached`` (seeds that met and held it); and means of
    the ``columns`` that the summary has. Means of ``..._to_target`` are over all seeds, infinite if one never
    reached it; the others are over the seeds that finished. With ``spreads`` also standard deviations (``..._sd``),
    and with a target ``touched`` (seeds that met it at all) and ``first_touch``.
    """
    columns, rows = [name for name in columns if name in summary], []
    for values, group in summary.groupby(list(by), sort=False, dropna=False):
        ended = group[group["status"] == "finished"]
        row = {**dict(zip(by, values, strict=True)), "seeds": len(group), "diverged": len(group) - len(ended)}
        if "time_to_target" in group:
            row["reached"] = int(np.isfinite(group["time_to_target"]).sum())
            if spreads:
                row["touched"] = int(np.isfinite(group["first_touch"]).sum())
                row["first_touch"] = group["first_touch"].mean()
        for name in columns:
            seeds = (group if name.endswith("_to_target") else ended)[name]
            row[name] = seeds.mean()
            if spreads:
                row[f"{name}_sd"] = seeds.std() if np.isfinite(seeds).all() else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def grid(summary: pd.DataFrame, by: Sequence[str], columns: Iterable[str], measure: Measure) -> pd.DataFrame:
    """Return a row for each combination of the columns ``by`` of a summary, the best first.

    Studies choose rates by this order: the fewest diverged seeds; the most seeds that have the measure, which for
    a target are the seeds that reached it; the best mean of the measure; the least mean of the final loss, on the
    training data if it is known. Rows that tie keep the order of the summary.

    Columns: those of `means` with spreads, of the measure and of ``columns``.
    """
    loss = next((name for name in ("train_loss", "final_loss") if name in summary), measure.name)
    table = means(summary, by, dict.fromkeys((measure.name, *columns)), spreads=True)
    finished = summary["status"] == "finished"
    ranks = summary.assign(missing=~np.isfinite(summary[measure.name]), loss=summary[loss].where(finished))
    ranks = ranks.groupby(list(by), sort=False, dropna=False).agg({"missing": "sum", "loss": "mean"})
    mean = table[measure.name] * (1 if measure.best == "least" else -1)
    # The last key decides first; NaN comes last.
    order = np.lexsort((ranks["loss"], mean, ranks["missing"], table["diverged"]))
    return table.iloc[order].reset_index(drop=True)


def tuned(
    summary: pd.DataFrame,
    by: Sequence[str],
    measure: Measure,
    over: Sequence[str] = ("learning_rate",),
    cases: Sequence[str] = (),
) -> pd.DataFrame:
    """Select the runs of each combination of the columns ``by`` at its best rate: the first in the order of `grid`.

    The combinations keep the order of the summary, and so do the runs of each.

    Parameters
    ----------
    over : Sequence[str]
        Columns of the values that were tried for each combination.
    cases : Sequence[str]
        Columns of cases, attacks for instance, of which the worst counts for each tried value; only its runs remain.
    """
    values = [*by, *over]
    order = grid(summary, [*values, *cases], (), measure)
    best = order.drop_duplicates(values, keep="last").drop_duplicates(list(by))
    return summary[list(by)].drop_duplicates().merge(best[[*values, *cases]]).merge(summary)


def ranked(table: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], measure: Measure) -> pd.DataFrame:
    """Return some rows of a `grid`, the best first, with how sure their order is.

    Added columns: ``best_low`` and ``best_high``, the interval of this row's measure relative to the first row;
    ``above_low`` and ``above_high``, relative to the row above; ``apart_from_best`` and ``apart_from_above``, whether
    the interval excludes equality; ``needs_seeds`` and ``needs_seeds_best``, about how many seeds would separate this
    row from the row above and from the first row if their means differ as measured; ``same_as_above``, whether both are
    equal with every seed; ``ratio`` and ``paired_seeds``. They are NaN or None without an interval: with one seed, for
    a row that diverged, for two rows that did not reach the target.

    The intervals are of ratios, through differences of logarithms, where the least is best and all values are above
    zero; else of differences. All intervals of a table hold together with the probability `CONFIDENCE`; `Noise` has
    their widths.

    For a row that has not reached the target with every seed, the lengths of its runs stand for its times: the lower
    bound holds, and the upper one is infinite.
    """
    table = table.reset_index(drop=True)
    runs = table[list(by)].rename_axis("place").reset_index().merge(summary, on=list(by))

    def per_seed(name: str) -> np.ndarray:
        return runs.pivot(index="place", columns="seed", values=name).to_numpy()

    paired = ~pd.isna(per_seed("status")).any(axis=0)
    finished = (per_seed("status") == "finished")[:, paired]
    values = per_seed(measure.name).astype(float)[:, paired]
    complete = np.isfinite(values).all(axis=1)
    known = values.copy()
    if measure.name in _AT_LEAST:
        known = np.where(np.isfinite(values), values, per_seed(_AT_LEAST[measure.name]).astype(float)[:, paired])
    usable, seeds = finished.all(axis=1) & np.isfinite(known).all(axis=1), int(paired.sum())
    ratio = measure.best == "least" and bool((known[usable] > 0).all())
    known = np.log(known, where=usable[:, None], out=known) if ratio else known * (1 if measure.best == "least" else -1)
    noise = noise_of(known[complete & usable], len(table)) if seeds > 1 else None
    intervals: list[dict[str, Any]] = []
    for row in range(len(table)):
        interval: dict[str, Any] = {}
        for name, better in (("best", 0), ("above", row - 1)):
            low = high = np.nan
            if row and noise is not None and complete[better] and usable[better] and usable[row]:
                differences = known[row] - known[better]
                gap, variance = differences.mean(), differences.var(ddof=1)
                width = noise.half_width(variance, seeds)
                low, high = gap - width, gap + width if complete[row] else np.inf
                if complete[row]:
                    interval[_NEEDS[name]] = noise.seeds_to_separate(gap, variance)
            interval[f"apart_from_{name}"] = None if np.isnan(low) else bool(low > 0)
            interval[f"{name}_low"], interval[f"{name}_high"] = (np.exp(low), np.exp(high)) if ratio else (low, high)
        interval["same_as_above"] = bool(row and complete[row] and (values[row] == values[row - 1]).all())
        intervals.append(interval)
    names = ("best_low", "best_high", "above_low", "above_high", "apart_from_best", "apart_from_above")
    more = pd.DataFrame(intervals, columns=[*names, *_NEEDS.values(), "same_as_above"])
    return table.assign(**{name: more[name] for name in more}, ratio=ratio, paired_seeds=seeds)


class Noise(NamedTuple):
    """The noise of a table's differences, and how well its seeds determine it.

    The intervals are Tukey's for all pairs (the studentized range), with a block for each seed. The
    variance of a pair is the pooled one, of the residuals of rows and seeds, or that of its own
    differences if it is larger: methods are not equally noisy. The pooled degrees of freedom count
    equally noisy rows only; Greenhouse and Geisser (1959) reduce them to as many as the spread of
    the residuals over the rows supports. With two seeds that is one.

    Half the width from a pair's own variance, with the degrees of freedom of its own seeds, would
    separate as few equal rows. But of tables with five seeds whose best of five equally noisy rows
    is four standard deviations better, it tells the best from all others in 65 %; this, in 90 %.
    """

    rows: int  #: of the table
    variance: float  #: of a difference of two rows, pooled over all pairs
    degrees: float  #: of freedom that each seed after the first adds: 1 to one less than the rows

    def half_width(self, variance: Any, seeds: int) -> Any:
        """Return half the width of the interval of a pair, or of pairs, from its variance."""
        factor = _studentized_range(self.rows, self.degrees * (seeds - 1))
        return factor * np.sqrt(np.maximum(self.variance, variance) / (2 * seeds))

    def seeds_to_separate(self, gap: float, variance: float) -> int:
        """Return the fewest seeds that separate a pair; `_MANY_SEEDS` + 1 if more are needed."""

        def negative_width(seeds: int) -> float:  # ascending, as a bisection needs it
            return -self.half_width(variance, seeds)

        return 2 + bisect.bisect_right(range(2, _MANY_SEEDS + 1), -abs(gap), key=negative_width)


def noise_of(values: np.ndarray, rows: int) -> Noise:
    """Return the noise of a table from its complete rows, ``[complete, seeds]``, of two seeds or more."""
    if len(values) < 2:
        return Noise(rows, 0.0, 1.0)
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    squares = (residuals**2).sum()
    degrees = squares**2 / ((residuals @ residuals.T) ** 2).sum() if squares else 1.0
    return Noise(rows, 2 * squares / ((len(values) - 1) * (values.shape[1] - 1)), degrees)


def _studentized_range(rows: int, degrees: float) -> float:
    """Return the quantile of the studentized range; between whole degrees at most 3 % too wide."""
    whole = max(1, math.floor(degrees))
    logs = np.log([_studentized_range_of(rows, whole + 1), _studentized_range_of(rows, whole)])
    return float(np.exp(np.interp(1 / degrees, [1 / (whole + 1), 1 / whole], logs)))


@functools.cache
def _studentized_range_of(rows: int, degrees: int) -> float:
    # SciPy needs a tenth of a second for each.
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(CONFIDENCE, rows, degrees))


def spread(table: pd.DataFrame, name: str) -> list[str]:
    """Return the means of a column with their standard deviations over the seeds, as texts: ``23.5 ± 3.1``."""
    pairs = zip(table[name], table[f"{name}_sd"], strict=True)
    return [number_text(mean) + (f" \u00b1 {number_text(sd, 2)}" if np.isfinite(sd) else "") for mean, sd in pairs]


def ranked_text(table: pd.DataFrame, by: Sequence[str], measure: Measure, more: Iterable[str], file: str = "") -> str:
    """Return a `ranked` table as text: of several rows with their places, and a legend of the marks below.

    ``by``: the columns that name a row. ``more``: further columns, as far as the table has them. ``file``: as in
    `asyncsim.base.console.table_text`.
    """
    ends = ["reached", "diverged", *(name for name in more if name != measure.name)]
    shown = table.assign(**{measure.name: spread(table, measure.name)})
    first = Column(measure.name, measure.shown)
    if len(table) == 1:
        return text_of(shown, [*by, first, *ends], file)
    order = order_columns(table)
    shown = shown.assign(**order)
    return f"{text_of(shown, ['', *by, first, *list(order)[1:], *ends], file)}\n{marks(table)}"


def order_columns(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return columns of a printed table: the places, and the intervals relative to the row above and the best row.

    A place that begins with ``~`` is within the noise of the row above; with ``?`` it was not compared.
    """
    sure = {True: "", False: "~", None: "?"}
    places = [f"{sure[row.apart_from_above] if row.Index else ''}{row.Index + 1}" for row in table.itertuples()]
    above, best = (map(_interval, table[f"{name}_low"], table[f"{name}_high"]) for name in ("above", "best"))
    return {"": places, "vs above": list(above), "vs best": list(best)}


def marks(table: pd.DataFrame) -> str:
    """Return a legend of the columns and marks of `order_columns` that a table has."""
    relative = "how many times as much as" if table["ratio"].iloc[0] else "how much worse than"
    apart = table["apart_from_above"].iloc[1:]
    parts = [f"vs above, vs best: {relative} in the line above, in the first line"]
    parts += ["~: within the noise of the line above"] if apart.eq(False).any() else []
    parts += ["?: not compared with the line above"] if apart.isna().any() else []
    return "; ".join(parts)


def _interval(low: float, high: float) -> str:
    if np.isnan(low):
        return "-"
    ends = [f"{end:.2f}" if 0.1 <= abs(end) < 100 else number_text(end, 2) for end in (low, high)]
    return " to ".join(ends) if np.isfinite(high) else f"over {ends[0]}"


def verdict(table: pd.DataFrame, names: Sequence[str], measure: Measure, what: str = "method") -> str:
    """Return in words which rows of a `ranked` table are best, which cannot be separated, and how sure that is.

    ``names``: the names of the rows. ``what``: what a row is.
    """
    seeds, total = int(table["paired_seeds"].iloc[0]), int(table["seeds"].max())
    first = table.iloc[0]
    unit = f"times the {measure.shown.partition(' (')[0]} of" if first["ratio"] else f"less {measure.shown} than"
    if measure.best == "least" and not first["ratio"]:
        unit = unit.replace("less", "more")
    if not np.isfinite(first[measure.name]):
        why = "diverged" if first["diverged"] else "did not reach the target"
        return f"no {what} can be called the best: even {names[0]} {why} with some seed; the order is of losses"
    if len(table) == 1:
        return f"{names[0]} is the only {what}: there is nothing to compare it with"
    if seeds < 2:
        return "one seed: nothing can be said of how sure this order is; give --seeds 3 or more"
    rows = list(zip(names, table.to_dict("records"), strict=True))
    rivals, others = (
        ", ".join(
            f"{name} ({_interval(row['best_low'], row['best_high'])})"
            for name, row in rows[1:]
            if row["apart_from_best"] is apart
        )
        for apart in (False, True)
    )
    lines = []
    if rivals:
        lines.append(
            f"best: {names[0]}, but {counted(seeds, 'seed')} do not tell it apart from {rivals}; "
            + (f"it is told apart from {others}; " if others else "")
            + f"in brackets {unit} {names[0]}"
        )
    elif all(row["apart_from_best"] is None for _, row in rows[1:]):
        lines.append(f"best: {names[0]}, the only one that can be compared")
    else:
        name, row = min(
            ((name, row) for name, row in rows[1:] if row["apart_from_best"]), key=lambda one: one[1]["best_low"]
        )
        gap = _interval(row["best_low"], row["best_high"])
        lines.append(f"best: {names[0]}, told apart from all others; the nearest, {name}, has {gap} {unit} {names[0]}")
    pairs = [(above, name, row, "above") for (above, _), (name, row) in itertools.pairwise(rows)]
    pairs += [(names[0], name, row, "best") for name, row in rows[2:] if not row["same_as_above"]]
    for better, name, row, beside in pairs:
        if beside == "above" and row["same_as_above"]:
            lines.append(f"the same with every seed: {better} and {name}")
        elif row[f"apart_from_{beside}"] is False and np.isinf(row[f"{beside}_high"]):
            lines.append(f"not told apart: {better} and {name} ({_lacking(row)}; longer runs might)")
        elif row[f"apart_from_{beside}"] is False:
            more = int(row[_NEEDS[beside]])
            would = f"about {more} seeds" if more <= _MANY_SEEDS else f"more than {_MANY_SEEDS} seeds"
            lines.append(f"within the noise: {better} and {name}; {would} would tell, if they differ as it seems")
    unknown = [f"{name} ({_lacking(row)})" for name, row in rows if row["apart_from_best"] is None][1:]
    if unknown:
        lines.append(f"not compared: {', '.join(unknown)}")
    if seeds == 2:
        lines.append("two seeds allow hardly any claim: their intervals are several times as wide as those of three")
    shared = "" if seeds == total else f", those that every {what} has"
    lines.append(
        f"how sure: all intervals and what follows from them hold together with {CONFIDENCE:.0%} confidence, paired "
        f"over {counted(seeds, 'seed')}{shared}"
    )
    return "\n".join(lines)


def _lacking(row: dict[str, Any]) -> str:
    """Return why a row was not compared."""
    if row["diverged"]:
        return f"diverged with {row['diverged']} of {row['seeds']} seeds"
    if "reached" in row:
        return f"not reached with {row['seeds'] - row['reached']} of {row['seeds']} seeds"
    return "nothing to compare"


def as_good(every: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], measure: Measure) -> pd.Series:
    """Return which rows of a `grid` over methods and rates are as good as the method's best, with less noise.

    Their mean is within one standard error of the best's, of their differences seed by seed, and their standard
    deviation is less. The best stays the one of the best mean: to choose the rate of the least spread makes noise look
    smaller than it is. In simulations of five methods with four rates each that do not differ, up to ten times as noisy
    methods or rates among them, and three seeds, some pair of methods was told apart in 0 to 5 % of the tables; in 1 to
    6 % if the quietest rate within one standard error was chosen, in 6 to 15 % within four.
    """
    runs = every[list(by)].rename_axis("place").reset_index().merge(summary, on=list(by))
    values = runs.pivot(index="place", columns="seed", values=measure.name)
    first = every.groupby(by[0], sort=False)[by[1]].transform(lambda rates: rates.index[0])
    with np.errstate(invalid="ignore"):
        worse = (values - values.loc[first].to_numpy()) * (1 if measure.best == "least" else -1)
        near = worse.mean(axis=1, skipna=False) <= worse.std(axis=1, skipna=False) / np.sqrt(worse.shape[1])
    spreads = every[f"{measure.name}_sd"]
    return near & (spreads < spreads.loc[first].to_numpy())


def rates_as_good(every: pd.DataFrame, measure: Measure) -> str:
    """Return in words which rates are `as_good` as the best of their methods; empty if none is.

    ``every``: a `grid` over ``method`` and ``learning_rate``, with the columns ``best`` and ``as_good``.
    """
    every, said = every.assign(shown=spread(every, measure.name)), []
    for _, rows in every.groupby("method", sort=False):
        (best,) = rows[rows["best"]].itertuples()
        said += [
            f"{row.method}: {row.learning_rate:g} ({row.shown}) is as good as {best.learning_rate:g} ({best.shown}), "
            "with less noise"
            for row in rows[rows["as_good"]].itertuples()
        ]
    return "\n".join(said)


def at_the_edge(
    table: pd.DataFrame, tried: Sequence[float] | None, names: Sequence[str], option: str = "--tune"
) -> str:
    """Return a notice of the rows whose best rate is the least or the largest tried; empty if there is none.

    ``tried``: the rates; ``names``: the names of the rows.
    """
    if tried is None or len(tried) < 2:
        return ""
    edges = []
    for which, rate in (("least", min(tried)), ("largest", max(tried))):
        there = [name for name, own in zip(names, table["learning_rate"], strict=True) if own == rate]
        if there:
            edges.append(f"at the {which} rate of {option}, {rate:g}: {', '.join(dict.fromkeys(there))}")
    return f"best {'; '.join(edges)}; a rate beyond it may be better" if edges else ""
