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
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from asyncsim.base.console import counted, number_text
from asyncsim.study.columns import NOT_REACHED, Column, as_column, is_until_target, text_of
from asyncsim.study.finished import Finished
from asyncsim.study.target import Target

#: Probability that all comparisons of a table hold together.
CONFIDENCE = 0.95
#: Printed below results of one seed.
ONE_SEED = "one seed cannot show the noise; give --seeds 3 or more"
#: Columns that bound a measure from below where the target was not reached.
_AT_LEAST = {"time_to_target": "simulated_seconds", "gradients_to_target": "gradients"}
#: Rows that a notice names; of more it gives the number.
_LISTED = 6
#: Most seeds that a user is advised to run.
_MANY_SEEDS = 100
#: Columns of the number of seeds that would distinguish a row from the row above, and from the best
#: row.
_NEEDS = {"above": "needs_seeds", "best": "needs_seeds_best"}


class Measure(NamedTuple):
    """The column of a summary by which runs are compared."""

    name: str
    best: str = "least"  #: or ``"most"``: which values are best
    title: str = ""  #: in a table; by default the title of the column

    @property
    def heading(self) -> str:
        """Its title in a table."""
        return self.title or as_column(self.name).title


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
    cases: Sequence[str] = (),
) -> pd.DataFrame:
    """Select the runs of each combination of the columns ``by`` at its best rate: the first in the
    order of `grid`.

    The combinations keep the order of the summary, and so do the runs of each.

    Parameters
    ----------
    over : Sequence[str]
        Columns of the values that were tried for each combination.
    cases : Sequence[str]
        Columns of cases, attacks for instance: the worst case counts for each tried value; only its
        runs remain.
    """
    values = [*by, *over]
    order = grid(summary, [*values, *cases], (), measure)
    best = order.drop_duplicates(values, keep="last").drop_duplicates(list(by))
    return summary[list(by)].drop_duplicates().merge(best[[*values, *cases]]).merge(summary)


def ranked(
    table: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], measure: Measure
) -> pd.DataFrame:
    """Add confidence intervals to some rows of a `grid`, the best first.

    Added columns: ``best_low`` and ``best_high``, the interval of this row's measure relative to
    the first row; ``above_low`` and ``above_high``, relative to the row above; ``apart_from_best``
    and ``apart_from_above``, whether the interval excludes equality; ``needs_seeds`` and
    ``needs_seeds_best``, about how many seeds would separate this row from the row above and from
    the first row if their means differ as measured; ``same_as_above``, whether both are equal with
    every seed; ``ratio`` and ``paired_seeds``. They are NaN or None without an interval: with one
    seed, for a diverged row, for two rows that did not reach the target.

    The intervals are of ratios, through differences of logarithms, if the least is best and all
    values are above zero; else of differences. All intervals of a table hold together with the
    probability `CONFIDENCE`; `Noise` has their widths.

    A row that did not reach the target with every seed has the lengths of its runs as times: the
    lower bound holds, and the upper bound is infinite.
    """
    table = table.reset_index(drop=True)
    runs = table[list(by)].rename_axis("place").reset_index().merge(summary, on=list(by))

    def per_seed(name: str) -> np.ndarray:
        return runs.pivot(index="place", columns="seed", values=name).to_numpy()

    paired = ~pd.isna(per_seed("status")).any(axis=0)
    finished = (per_seed("status") == "finished")[:, paired]
    values = per_seed(measure.name).astype(float)[:, paired]
    complete = np.isfinite(values).all(axis=1)
    compared = values.copy()
    if measure.name in _AT_LEAST:
        compared = np.where(
            np.isfinite(values), values, per_seed(_AT_LEAST[measure.name]).astype(float)[:, paired]
        )
    usable, seeds = finished.all(axis=1) & np.isfinite(compared).all(axis=1), int(paired.sum())
    ratio = measure.best == "least" and bool((compared[usable] > 0).all())
    compared = (
        np.log(compared, where=usable[:, None], out=compared)
        if ratio
        else compared * (1 if measure.best == "least" else -1)
    )
    noise = noise_of(compared[complete & usable], len(table)) if seeds > 1 else None
    intervals: list[dict[str, Any]] = []
    for row in range(len(table)):
        interval: dict[str, Any] = {}
        for name, better in (("best", 0), ("above", row - 1)):
            low = high = np.nan
            if row and noise is not None and complete[better] and usable[better] and usable[row]:
                differences = compared[row] - compared[better]
                gap, variance = differences.mean(), differences.var(ddof=1)
                width = noise.half_width(variance, seeds)
                low, high = gap - width, gap + width if complete[row] else np.inf
                if complete[row]:
                    interval[_NEEDS[name]] = noise.seeds_to_separate(gap, variance)
            interval[f"apart_from_{name}"] = None if np.isnan(low) else bool(low > 0)
            interval[f"{name}_low"], interval[f"{name}_high"] = (
                (np.exp(low), np.exp(high)) if ratio else (low, high)
            )
        interval["same_as_above"] = bool(
            row and complete[row] and (values[row] == values[row - 1]).all()
        )
        intervals.append(interval)
    names = (
        "best_low",
        "best_high",
        "above_low",
        "above_high",
        "apart_from_best",
        "apart_from_above",
    )
    added = pd.DataFrame(intervals, columns=[*names, *_NEEDS.values(), "same_as_above"])
    return table.assign(**{name: added[name] for name in added}, ratio=ratio, paired_seeds=seeds)


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


def ranked_text(
    table: pd.DataFrame, by: Sequence[str], measure: Measure, further: Iterable[str]
) -> str:
    """Return a `ranked` table as text; several rows have places, and a legend of the marks below.

    ``by``: the columns that name a row. ``more``: further columns, if the table has them.
    """
    ends = ["reached", "diverged", *(name for name in further if name != measure.name)]
    columns = table.assign(**{measure.name: spread(table, measure.name)})
    first = Column(measure.name, measure.heading)
    if len(table) == 1:
        return text_of(columns, [*by, first, *ends])
    order = order_columns(table)
    columns = columns.assign(**order)
    return f"{text_of(columns, ['', *by, first, *list(order)[1:], *ends])}\n{marks(table)}"


def order_columns(table: pd.DataFrame) -> dict[str, list[str]]:
    """Return columns of a printed table: the places, and the intervals relative to the row above
    and the best row, if there are any.

    The mark ``~`` before a place: not distinguishable from the row above; ``?``: not compared with
    it.
    """
    marks_of = {True: "", False: "~", None: "?"}
    places = [
        f"{marks_of[row.apart_from_above] if row.Index else ''}{row.Index + 1}"
        for row in table.itertuples()
    ]
    columns = {
        f"vs {name}": list(
            map(_interval, table[f"{name}_low"], table[f"{name}_high"], table["ratio"])
        )
        for name in ("above", "best")
    }
    shown = {name: texts for name, texts in columns.items() if set(texts) > {"-"}}
    return {"": places, **shown}


def marks(table: pd.DataFrame) -> str:
    """Return a legend of the columns and marks of `order_columns` that a table has."""
    relative = "how many times as much as" if table["ratio"].iloc[0] else "how much worse than"
    separated = table["apart_from_above"].iloc[1:]
    where = {"vs above": "in the line above", "vs best": "in the first"}
    shown = [name for name in order_columns(table) if name in where]
    parts = [f"{', '.join(shown)}: {relative} {', or '.join(where[name] for name in shown)}"]
    parts = parts if shown else []
    parts += ["~: not distinguishable from the line above"] if separated.eq(False).any() else []
    parts += ["?: not compared with the line above"] if separated.isna().any() else []
    return "; ".join(parts)


def _interval(low: float, high: float, ratio: bool) -> str:
    """Write an interval; a lower bound alone that includes equality says nothing."""
    if np.isnan(low) or (np.isinf(high) and low <= (1 if ratio else 0)):
        return "-"
    ends = [f"{end:.2f}" if 0.1 <= abs(end) < 100 else number_text(end, 2) for end in (low, high)]
    return " to ".join(ends) if np.isfinite(high) else f"over {ends[0]}"


def course(
    finished: Finished, table: pd.DataFrame, names: Sequence[str], by: Sequence[str], goal: Target
) -> str:
    """State the range of the target's measure at the ends of the runs of a table's rows, and the
    best row at the last time that all runs have.

    ``by``: the columns that identify a row's runs. Runs that diverged are left out.
    """
    rate = finished.summary.get("method.learning_rate", float("nan"))
    runs = finished.summary.assign(learning_rate=rate)
    runs = runs[runs["status"] == "finished"].drop_duplicates([*by, "seed"])
    evaluations = {}
    for name, row in zip(names, table.index, strict=True):
        folders = runs.merge(table.loc[[row], list(by)])["run_folder"]
        if len(folders):
            evaluations[name] = [finished.run(folder).evaluations for folder in folders]
    if len(evaluations) < 2:
        return ""
    every = list(itertools.chain.from_iterable(evaluations.values()))
    time = min(rows["commit_time"].iloc[-1] for rows in every)
    at_end, at_time = (
        {
            name: np.mean([np.interp(end, rows["commit_time"], rows[goal.of]) for rows in seeds])
            for name, seeds in evaluations.items()
        }
        for end in (np.inf, time)
    )
    gradients = [rows["gradients"].iloc[-1] for rows in every]
    counts = dict.fromkeys(f"{count:,.0f}" for count in (min(gradients), max(gradients)))
    choose = max if goal.from_below else min
    best = choose(at_time, key=lambda name: at_time[name])
    return (
        f"after {' to '.join(counts)} accepted gradients the "
        f"{as_column(goal.of).axis} is {number_text(min(at_end.values()))} to "
        f"{number_text(max(at_end.values()))}; at {number_text(time)} s (the last common time) "
        f"{best} is {'highest' if goal.from_below else 'lowest'} ({number_text(at_time[best])})"
    )


def verdict(
    table: pd.DataFrame,
    names: Sequence[str],
    measure: Measure,
    what: str = "method",
    goal: object = "the target",
    losses: str = "",
    longer: str = "--steps",
) -> str:
    """Say which row of a `ranked` table is the best, which rows cannot be distinguished, and with
    which confidence.

    Parameters
    ----------
    names : Sequence[str]
        The names of the rows.
    what : str
        The noun for a row.
    goal : object
        The target in words.
    losses : str
        A sentence on the losses (see `course`), for tables whose rows all missed the target.
    longer : str
        The option that makes runs longer.
    """
    seeds, total = int(table["paired_seeds"].iloc[0]), int(table["seeds"].max())
    one_seed = " (one seed)" if total == 1 else ""
    rows = list(zip(names, table.to_dict("records"), strict=True))
    (best, first), *rest = rows
    if not np.isfinite(first[measure.name]):
        order = losses or "the order is by loss"
        if first["diverged"]:
            return f"no {what} is the best: even {best} {_lacking(first)}; {order}{one_seed}"
        if table["reached"].any():
            seeds_of_best = f"{best} did with {first['reached']} of {first['seeds']}"
            return f"no {what} reached {goal} with every seed; {seeds_of_best}"
        return f"no {what} reached {goal}; {order}{one_seed}"
    if not rest:
        return f"{best} is the only {what}: there is nothing to compare it with{one_seed}"
    cut_off = _cut_off(rows, measure, what, longer)
    if seeds < 2:
        uncertain = "one seed cannot show how certain this order is: give --seeds 3 or more"
        return f"{cut_off or f'{best} is first; {uncertain}'}{one_seed}"
    lines = [cut_off or _best_of(rows, measure, what, seeds)]
    for (above, _), (name, row) in itertools.pairwise(rows):
        if row["same_as_above"]:
            lines.append(f"equal with every seed: {above} and {name}")
        elif row["apart_from_above"] is False and above != best:
            lines.append(f"not distinguishable: {above} and {name} ({_remedy([row], 'above')})")
    unknown = [f"{name} ({_lacking(row)})" for name, row in rest if row["apart_from_best"] is None]
    if unknown:
        lines.append(f"not compared: {', '.join(unknown)}")
    if seeds == 2:
        lines.append(
            "two seeds support hardly any claim: their intervals are several times as wide as with "
            "three"
        )
    common = "" if seeds == total else f", those of every {what}"
    lines.append(
        f"confidence: {CONFIDENCE:.0%} for all statements together, paired over "
        f"{counted(seeds, 'seed')}{common}"
    )
    return "\n".join(lines)


def _cut_off(
    rows: list[tuple[str, dict[str, Any]]], measure: Measure, what: str, longer: str
) -> str:
    """Name the rows that touched the target before the best row's time, and whose runs ended before
    that time or (``cut_off``) while they met the target; empty if there are none.
    """
    (best, first), *rest = rows
    time = first[measure.name]
    if measure.name != "time_to_target":
        return ""
    rivals = [
        f"{name} touched it at {number_text(row['first_touch'])} s, but its runs end at "
        f"{number_text(row['simulated_seconds'])} s, before it was held"
        for name, row in rest
        if row["first_touch"] < time
        and np.isinf(row[measure.name])
        and (row.get("cut_off") or row.get("simulated_seconds", np.inf) < time)
    ]
    if not rivals:
        return ""
    is_alone = all(np.isinf(row[measure.name]) for _, row in rest)
    holder = f"only {best} held the target" if is_alone else f"{best} held the target first"
    return (
        f"no fastest {what}: {holder} ({number_text(time)} s); {'; '.join(rivals)}; give more "
        f"{longer}"
    )


def _best_of(
    rows: list[tuple[str, dict[str, Any]]], measure: Measure, what: str, seeds: int
) -> str:
    """Return the sentence about the best row: its rivals, or else the nearest of the others."""
    (best, first), *rest = rows
    praise = f"{best} is the {'fastest' if measure.name == 'time_to_target' else 'best'}"
    equal = {name for name, _ in itertools.takewhile(lambda item: item[1]["same_as_above"], rest)}
    rivals = {
        name: row for name, row in rest if row["apart_from_best"] is False and name not in equal
    }
    if rivals:
        listed = f"{', '.join(rivals)} ({_remedy(list(rivals.values()), 'best')})"
        return f"{praise}; not distinguishable with {counted(seeds, 'seed')}: {listed}"
    worse = {name: row["best_low"] for name, row in rest if row["apart_from_best"]}
    if not worse:
        return f"{praise}{'' if equal else f'; no other {what} can be compared'}"
    nearest = min(worse, key=lambda name: worse[name])
    row = dict(rows)[nearest]
    heading = measure.heading.partition(" (")[0]
    if first["ratio"]:
        unit, than = f"times the {heading}", f" of {best}"
    else:
        unit, than = f"{'less' if measure.best == 'most' else 'more'} {heading}", f" than {best}"
    gap = _interval(row["best_low"], row["best_high"], first["ratio"])
    return (
        f"{praise}, distinguishable from all others; the nearest, {nearest}, has {gap} {unit}{than}"
    )


def _remedy(rows: list[dict[str, Any]], than: str) -> str:
    """Say what would distinguish some rows from the best row, or from the row above."""
    if any(np.isinf(row[f"{than}_high"]) for row in rows):
        return "longer runs might distinguish them: some runs did not reach the target"
    count = int(max(row[_NEEDS[than]] for row in rows))
    if count > _MANY_SEEDS:
        return f"more than {_MANY_SEEDS} seeds would be needed"
    return f"about {count} seeds would distinguish them"


def _lacking(row: dict[str, Any]) -> str:
    """Return the reason why a row was not compared."""
    if row["diverged"]:
        return f"diverged with {row['diverged']} of {row['seeds']} seeds"
    if "reached" in row:
        return f"not reached with {row['seeds'] - row['reached']} of {row['seeds']} seeds"
    return "nothing to compare"


def as_good(
    rates: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], measure: Measure
) -> pd.Series:
    """Mark the rows of a `grid` over methods and rates that are as good as the method's best, with
    less noise.

    Their mean is within one standard error (of the differences, seed by seed) of the best mean, and
    their standard deviation is less. The best rate remains the rate of the best mean: the rate of
    the least spread would make the noise look smaller than it is. In simulations of five equal
    methods with four equal rates each, some up to ten times as noisy, and three seeds, the
    intervals separated some pair of methods in 0 to 5 % of the tables; in 1 to 6 % with the
    quietest rate within one standard error, in 6 to 15 % within four.
    """
    runs = rates[list(by)].rename_axis("place").reset_index().merge(summary, on=list(by))
    values = runs.pivot(index="place", columns="seed", values=measure.name)
    first = rates.groupby(by[0], sort=False)[by[1]].transform(lambda rates: rates.index[0])
    with np.errstate(invalid="ignore"):
        worse = (values - values.loc[first].to_numpy()) * (1 if measure.best == "least" else -1)
        near = worse.mean(axis=1, skipna=False) <= worse.std(axis=1, skipna=False) / np.sqrt(
            worse.shape[1]
        )
    spreads = rates[f"{measure.name}_sd"]
    return near & (spreads < spreads.loc[first].to_numpy())


def rates_as_good(rates: pd.DataFrame, measure: Measure) -> str:
    """Name the rates that are `as_good` as the best of their methods; empty if there are none.

    ``rates``: a `grid` over ``method`` and ``learning_rate``, with the columns ``best`` and
    ``as_good``.
    """
    rates, lines = rates.assign(shown=spread(rates, measure.name)), []
    for _, rows in rates.groupby("method", sort=False):
        (best,) = rows[rows["best"]].itertuples()
        lines += [
            f"{row.method}: {row.learning_rate:g} ({row.shown}) is as good as "
            f"{best.learning_rate:g} ({best.shown}), "
            "with less noise"
            for row in rows[rows["as_good"]].itertuples()
        ]
    return "\n".join(lines)


def at_the_edge(
    table: pd.DataFrame, tried: Sequence[float] | None, names: Sequence[str], option: str = "--tune"
) -> str:
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
            listed = list(dict.fromkeys(best))
            if len(listed) > _LISTED:
                listed = [f"{len(best)} of {len(names)}, such as {best[0]}"]
            edges.append(f"at the {edge} rate of {option}, {rate:g}: {', '.join(listed)}")
    return f"best {'; '.join(edges)}; a rate beyond it may be better" if edges else ""
