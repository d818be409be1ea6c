"""Rank methods, policies or learning rates, and say how certain their order is.

A study's summary has a row for each run. `means` returns a row for each combination of some
columns, with means over the seeds; `grid` adds their spreads and puts the best first; `tuned`
selects the runs of each method at its best rate; `ranked` adds the confidence intervals of some
rows' order::

    every = grid(summary, ("method", "learning_rate"), ["time_to_target", "train_loss"], measure)
    table = ranked(every.drop_duplicates("method"), summary, ("method", "learning_rate"), measure)

Seeds are paired: with one seed all rows have the same delays and minibatches. The differences of
two rows, seed by seed, therefore have less noise than the rows.
"""

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from asyncsim.base.console import number_text
from asyncsim.study.columns import NOT_REACHED, Column, as_column, is_until_target, titled

#: Probability that all comparisons of a table hold together.
CONFIDENCE = 0.95
#: Smaller values are round-off, and so is a smaller share of a value: float32 has seven digits.
ROUND_OFF, _SHARE = 1e-12, 1e-6
#: Printed below results of one seed.
ONE_SEED = "one seed cannot show the noise; give --seeds 3 or more"
#: Columns that bound a measure from below where the target was not reached.
_AT_LEAST = {"time_to_target": "simulated_seconds", "gradients_to_target": "gradients"}
#: Rows that a notice or a verdict names; of more it gives the number.
_LISTED = 6
#: Most seeds that a user is advised to run.
_MANY_SEEDS = 100


class Measure(NamedTuple):
    """The column of a summary by which runs are compared."""

    name: str
    best: str = "least"  #: or ``"most"``: which values are best

    @property
    def heading(self) -> str:
        """Its title in a table."""
        return as_column(self.name).title


def means(
    summary: pd.DataFrame, by: Sequence[str], columns: Iterable[str], spreads: bool = False
) -> pd.DataFrame:
    """Return a row for each combination of the columns ``by`` of a summary, in the order of the
    summary.

    Columns: ``by``, ``seeds``, ``diverged``; with a target ``reached`` (seeds that met and held
    it); and means of the ``columns`` that the summary has. Means of ``..._to_target`` are over all
    seeds, infinite if one never reached it; the others are over the seeds that finished. With
    ``spreads`` also standard deviations (``..._sd``), and with a target ``touched`` (seeds that met
    it at all) and ``first_touch``.
    """
    columns, rows = [name for name in columns if name in summary], []
    for values, group in summary.groupby(list(by), sort=False, dropna=False):
        ended = group[group["status"] == "finished"]
        row = {
            **dict(zip(by, values, strict=True)),
            "seeds": len(group),
            "diverged": len(group) - len(ended),
        }
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


def grid(
    summary: pd.DataFrame, by: Sequence[str], columns: Iterable[str], measure: Measure
) -> pd.DataFrame:
    """Return a row for each combination of the columns ``by`` of a summary, the best first.

    Studies choose rates by this order: the fewest diverged seeds; the most seeds that have the
    measure, which for a target are the seeds that reached it; the best mean of the measure; the
    least mean of the final loss, on the training data if it is known. Rows that tie keep the order
    of the summary.

    Columns: as `means` with spreads returns for the measure and ``columns``.
    """
    loss = next((name for name in ("train_loss", "final_loss") if name in summary), measure.name)
    table = means(summary, by, dict.fromkeys((measure.name, *columns)), spreads=True)
    finished = summary["status"] == "finished"
    ranks = summary.assign(
        missing=~np.isfinite(summary[measure.name]), loss=summary[loss].where(finished)
    )
    ranks = ranks.groupby(list(by), sort=False, dropna=False).agg(
        {"missing": "sum", "loss": "mean"}
    )
    mean = table[measure.name] * (1 if measure.best == "least" else -1)
    # The last key decides first; NaN comes last.
    order = np.lexsort((ranks["loss"], mean, ranks["missing"], table["diverged"]))
    return table.iloc[order].reset_index(drop=True)


def tuned(
    summary: pd.DataFrame,
    by: Sequence[str],
    measure: Measure,
    over: Sequence[str] = ("learning_rate",),
) -> pd.DataFrame:
    """Select the runs of each combination of the columns ``by`` at its best rate: the first in the
    order of `grid`.

    The combinations keep the order of the summary, and so do the runs of each. ``over``: columns of
    the values that were tried for each combination.
    """
    best = grid(summary, [*by, *over], (), measure).drop_duplicates(list(by))
    return summary[list(by)].drop_duplicates().merge(best[[*by, *over]]).merge(summary)


def ranked(
    table: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], measure: Measure
) -> pd.DataFrame:
    """Add to some rows of a `grid`, the best first, their intervals relative to the first row.

    Added columns: ``low`` and ``high``, the interval; ``is_apart``, whether it excludes equality;
    ``needs_seeds``, about how many seeds would separate the rows if their means differ as measured,
    infinite if they are equal up to round-off; ``ratio`` and ``paired_seeds``. NaN or None without
    an interval: with one seed, for a diverged row, for two rows that did not reach the target.

    The intervals are of ratios, through differences of logarithms, if the least is best and all
    values are above zero; else of differences. All intervals of a table hold together with the
    probability `CONFIDENCE`. A row that did not reach the target with every seed has the lengths of
    its runs as times: the lower bound holds, and the upper bound is infinite. Intervals contain the
    distance of evaluations: the columns ``..._low`` and ``..._high`` of a measure.
    """
    table = table.reset_index(drop=True)
    runs = table[list(by)].rename_axis("place").reset_index().merge(summary, on=list(by))

    def per_seed(name: str) -> np.ndarray:
        return runs.pivot(index="place", columns="seed", values=name).to_numpy()

    paired = ~pd.isna(per_seed("status")).any(axis=0)
    finished = (per_seed("status") == "finished")[:, paired]
    values = per_seed(measure.name).astype(float)[:, paired]
    complete = np.isfinite(values).all(axis=1)
    if measure.name in _AT_LEAST:
        ends = per_seed(_AT_LEAST[measure.name]).astype(float)[:, paired]
        values = np.where(np.isfinite(values), values, ends)
    usable, seeds = finished.all(axis=1) & np.isfinite(values).all(axis=1), int(paired.sum())
    ratio = measure.best == "least" and bool((values[usable] > 0).all())
    sign = 1 if measure.best == "least" else -1
    with np.errstate(all="ignore"):
        compared = np.log(np.maximum(values, ROUND_OFF)) if ratio else sign * values
    before, after = np.zeros((2, *values.shape))  # how far the values may be off
    if f"{measure.name}_low" in summary:
        least, most = (
            per_seed(f"{measure.name}_{end}").astype(float)[:, paired] for end in ("low", "high")
        )
        with np.errstate(invalid="ignore"):
            before, after = differences(values, least, ratio), differences(most, values, ratio)
        before, after = (np.where(np.isfinite(off), off, 0.0) for off in (before, after))
    low, high, needs = np.full((3, len(table)), np.nan)
    if seeds > 1 and complete[0] and usable[0]:
        noise = noise_of(compared[complete & usable], len(table))
        for row in range(1, len(table)):
            if usable[row]:
                apart = sign * differences(values[row], values[0], ratio)
                gap, variance = apart.mean(), apart.var(ddof=1)
                width = noise.half_width(variance, seeds)
                off = (before[row] + after[0]).mean()
                low[row] = gap - width - off
                high[row] = np.inf
                if complete[row]:
                    high[row] = gap + width + (after[row] + before[0]).mean()
                    if not apart.any():
                        needs[row] = np.inf
                    elif abs(gap) > off:
                        needs[row] = noise.seeds_to_separate(abs(gap) - off, variance)
    is_apart = [None if np.isnan(end) else bool(end > 0) for end in low]
    low, high = (np.exp(low), np.exp(high)) if ratio else (low, high)
    return table.assign(
        low=low, high=high, is_apart=is_apart, needs_seeds=needs, ratio=ratio, paired_seeds=seeds
    )


def are_equal(a: Any, b: Any) -> Any:
    """Return whether values differ by round-off at most: an array of booleans."""
    return np.isclose(a, b, rtol=_SHARE, atol=ROUND_OFF)


def differences(a: Any, b: Any, ratio: bool) -> np.ndarray:
    """Return the differences of pairs, of their logarithms for a ratio; zero for equal pairs."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.log(np.maximum(a, ROUND_OFF) / np.maximum(b, ROUND_OFF)) if ratio else a - b
    return np.where(np.isfinite(apart) & are_equal(a, b), 0.0, apart)


class Noise(NamedTuple):
    """The noise of a table's differences, and how well its seeds determine it.

    The intervals are Tukey's for all pairs (the studentized range), with a block for each seed. The
    variance of a pair is the pooled variance of the residuals of rows and seeds, or the variance of
    its differences if that is larger: methods are not equally noisy. The pooled degrees of freedom
    count equally noisy rows only; Greenhouse and Geisser (1959) reduce them to the number that the
    spread of the residuals over the rows supports. With two seeds that is one.

    The variance of each pair alone, with the degrees of freedom of its seeds, would separate equal
    rows as rarely. But it has less power: among tables with five seeds whose best of five equally
    noisy rows is four standard deviations better, it separates the best from all others in 65 %;
    this rule, in 90 %.
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
    """Return the noise of a table from its complete rows, ``[complete, seeds]``, of two seeds or
    more.
    """
    if len(values) < 2:
        return Noise(rows, 0.0, 1.0)
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    squares = (residuals**2).sum()
    degrees = squares**2 / ((residuals @ residuals.T) ** 2).sum() if squares else 1.0
    return Noise(rows, 2 * squares / ((len(values) - 1) * (values.shape[1] - 1)), degrees)


def _studentized_range(rows: int, degrees: float) -> float:
    """Return the quantile of the studentized range; between whole degrees at most 3 % too wide."""
    floor = max(1, math.floor(degrees))
    logs = np.log([_studentized_range_of(rows, floor + 1), _studentized_range_of(rows, floor)])
    return float(np.exp(np.interp(1 / degrees, [1 / (floor + 1), 1 / floor], logs)))


@functools.cache
def _studentized_range_of(rows: int, degrees: int) -> float:
    # SciPy needs a tenth of a second for each.
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(CONFIDENCE, rows, degrees))


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval; without bounds (NaN) from one seed."""

    mean: float
    low: float
    high: float


def paired_interval(differences: Iterable[float]) -> Interval:
    """Return the mean of paired differences and Student's interval for this mean alone."""
    values = np.asarray(list(differences), float)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(mean, np.nan, np.nan)
    quantile = stdtrit(count - 1, (1 + CONFIDENCE) / 2)
    width = float(quantile * values.std(ddof=1) / np.sqrt(count))
    return Interval(mean, mean - width, mean + width)


def spread(table: pd.DataFrame, name: str) -> list[str]:
    """Return the means of a column with their standard deviations over the seeds, as texts:
    ``23.5 ± 3.1``.
    """
    pairs = zip(table[name], table[f"{name}_sd"], strict=True)
    return [
        NOT_REACHED
        if np.isinf(mean) and is_until_target(name)
        else number_text(mean) + (f" \u00b1 {number_text(sd, 2)}" if np.isfinite(sd) else "")
        for mean, sd in pairs
    ]


def ranked_parts(
    table: pd.DataFrame,
    by: Sequence[str | Column],
    measure: Measure,
    further: Iterable[str | Column],
) -> list[str | pd.DataFrame]:
    """Return a `ranked` table as texts; several rows have places, and a legend of the marks.

    ``by``: the columns that name a row; ``further``: other columns, if the table has them.
    """
    columns = table.assign(**{measure.name: spread(table, measure.name)})
    first = Column(measure.name, measure.heading)
    ends = ["reached", "diverged", *(name for name in further if name != measure.name)]
    if len(table) == 1:
        return [titled(columns, [*by, first, *ends])]
    marks = {True: "", False: "~", None: "?"}
    columns[""] = [
        f"{marks[row.is_apart] if row.Index else ''}{row.Index + 1}" for row in table.itertuples()
    ]
    columns["vs best"] = list(map(_interval, table["low"], table["high"], table["ratio"]))
    relative = "how many times as much as" if table["ratio"].iloc[0] else "how much worse than"
    return [
        titled(columns, ["", *by, first, "vs best", *ends]),
        f"vs best: {relative} in the first line; ~: not distinguishable from it; ?: not compared",
    ]


def _interval(low: float, high: float, ratio: bool) -> str:
    """Write an interval; a lower bound alone that includes equality says nothing."""
    if np.isnan(low) or (np.isinf(high) and low <= (1 if ratio else 0)):
        return "-"
    ends = [f"{end:.2f}" if 0.1 <= abs(end) < 100 else number_text(end, 2) for end in (low, high)]
    return " to ".join(ends) if np.isfinite(high) else f"over {ends[0]}"


def verdict(
    table: pd.DataFrame,
    names: Sequence[str],
    measure: Measure,
    what: str = "method",
    goal: object = "the target",
    longer: str = "--steps",
) -> str:
    """Say which row of a `ranked` table is the best, in at most 15 words; in further lines, which
    rows cannot be distinguished from it, or the reason and the remedy if there is no best row.

    ``names``: of the rows; ``what``: the noun for a row; ``goal``: the target in words; ``longer``:
    the option that makes runs longer.
    """
    (best, first), *rest = zip(names, table.to_dict("records"), strict=True)
    is_time, seeds = measure.name == "time_to_target", int(first["paired_seeds"])
    early = [  # their runs ended before the best row's time, after they had touched the target
        name
        for name, row in rest
        if is_time
        and np.isinf(row[measure.name])
        and max(row["first_touch"], row.get("simulated_seconds", np.inf)) < first[measure.name]
    ]
    if first["diverged"]:
        return f"no best {what}: each diverged with some seed"
    if not np.isfinite(first[measure.name]):
        return f"no {what} reached {goal} with every seed\ngive more {longer}"
    if early:
        return f"no fastest {what}\n{early[0]} touched {goal} before {best} held it"
    if is_until_target(measure.name) and first[measure.name] == 0:
        return f"no best {what}: the start meets {goal}\ngive a harder --target"
    if not rest:
        return f"{best} is the only {what}"
    if seeds < 2:
        return "one seed: no order"
    rivals = {name: row for name, row in rest if row["is_apart"] is False}
    unknown = [name for name, row in rest if row["is_apart"] is None]
    equal = [name for name, row in rivals.items() if np.isinf(row["needs_seeds"])]
    sure = f"({CONFIDENCE:.0%} confidence, {seeds} seeds)"
    lines = [f"{best} is the {'fastest' if is_time else 'best'} {what} {sure}"]
    if equal:
        lines = [f"no best {what}: some are equal up to round-off"]
        lines.append(f"equal to {best}: {_first(equal)}")
        rivals = {name: row for name, row in rivals.items() if name not in equal}
    if rivals and not equal:
        lines = [f"undecided: {best} leads, within the noise {sure}"]
    if rivals:
        needs = np.max([row["needs_seeds"] for row in rivals.values()])  # NaN: a run was too short
        remedy = f"more than {_MANY_SEEDS}" if needs > _MANY_SEEDS else f"about {needs:.0f}"
        remedy = "longer runs" if np.isnan(needs) else f"{remedy} seeds"
        if np.isnan(needs) and all(np.isfinite(row[measure.name]) for row in rivals.values()):
            remedy = "a smaller --evaluate-every"
        lines.append(f"not distinguishable from {best}: {_first(rivals)} ({remedy} needed)")
    if unknown:
        lines.append(f"not compared: {_first(unknown)}")
    return "\n".join(lines)


def _first(names: Iterable[str]) -> str:
    """List names; of many the first, and how many more there are."""
    first, rest = (names := list(names))[:_LISTED], len(names[_LISTED:])
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def at_the_edge(table: pd.DataFrame, tried: Sequence[float] | None, names: Sequence[str]) -> str:
    """Return a notice of the rows whose best rate is the least or the largest; empty if there are
    none.

    ``tried``: the rates; ``names``: the names of the rows.
    """
    if tried is None or len(tried) < 2:
        return ""
    edges = []
    for edge, rate in (("least", min(tried)), ("largest", max(tried))):
        best = [
            name
            for name, best_rate in zip(names, table["learning_rate"], strict=True)
            if best_rate == rate
        ]
        if best:
            edges.append(f"at the {edge} rate of --tune, {rate:g}: {_first(dict.fromkeys(best))}")
    return f"best {'; '.join(edges)}; a rate beyond it may be better" if edges else ""
