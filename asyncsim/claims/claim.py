"""A published claim: the commands that test it, the rule that judges their results, its verdict.

A rule is a list of comparisons, or a function from the results of the claim's commands, in their
order, to findings. A finding is a sentence with the measured numbers, and whether it supports the
claim: True, False, or None if the noise of the seeds hides the answer.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Measure, Noise, differences, paired_interval, tuned

#: Why a published number that rests on unpublished speeds cannot be tested.
SPEEDS_UNKNOWN = "the speeds of the nodes and of the network are not published"
#: Larger numbers of seeds are not stated: such a test takes hours.
_MOST_SEEDS = 100


class Finding(NamedTuple):
    """A measured statement, and whether it supports the claim."""

    text: str
    holds: bool | None
    condition: str = ""  #: the value of the claim's assumption


class Bounds(NamedTuple):
    """A bound on the mean over the seeds of a row's column, or of its ratio or difference to
    another row.

    A row has the runs with some values of the summary's columns; a function of the column's sorted
    values, `max` say, may stand for a value. A method is named with or without its options.
    """

    #: A sentence with ``{}`` for the number, and values as ``{of[workers]}`` and ``{to[workers]}``.
    text: str
    #: A column of the summary, or a function of a run.
    column: str | Callable[[Run], float]
    of: Mapping[str, Any]
    to: Mapping[str, Any] | None = None
    above: float | None = None
    below: float | None = None
    #: Whether two rows are compared by their ratio or by their difference.
    ratio: bool = True
    #: Columns for whose every value both rows are compared.
    per: tuple[str, ...] = ()
    #: Column whose consecutive values the two rows have.
    pairs: str = ""
    #: Measure by which the best value of ``over`` is chosen for each row.
    best: Measure | None = None
    over: tuple[str, ...] = ("learning_rate",)

    def judge(self, finished: Finished, other: Finished | None = None) -> Iterator[Finding]:
        """Yield a finding for each value of ``per``; ``other``: the results of the second row."""
        finished, other = (
            self._measured(results) for results in (finished, finished if other is None else other)
        )
        is_share = "accuracy" in self._name
        for of, to in self._rows(finished.summary):
            values = self._values(finished, of)
            if self.to is None:
                form, ratio = ".1%" if is_share else ".3g", False
                number = spread(values, form)
            else:
                form, ratio = ".2%" if is_share else ".3g", self.ratio
                reference = self._values(other, to)
                values = _paired(values, reference, ratio)
                number = interval_text(values, ratio, form)
            yield self._bounded(self.text.format(number, of=of, to=to), values, ratio, form)

    def _bounded(self, text: str, values: pd.Series, ratio: bool, form: str) -> Finding:
        """Judge a mean by one bound, or by two that it lies between."""
        answers = []
        for bound, word, test in ((self.above, "at least", above), (self.below, "at most", below)):
            if bound is not None:
                limit = np.log(bound) if ratio else bound
                remark, answer, _ = test("", values, limit)
                text += "" if bound == (1.0 if ratio else 0.0) else f", {word} {bound:{form}}"
                text += remark
                answers.append(answer)
        return Finding(text, False if False in answers else None if None in answers else True)

    @property
    def _name(self) -> str:
        return self.column if isinstance(self.column, str) else self.column.__name__

    def _measured(self, finished: Finished) -> Finished:
        """Add the column that is a function of a run."""
        if isinstance(self.column, str):
            return finished
        values = [self.column(finished.run(name)) for name in finished.summary["run_folder"]]
        return finished._replace(summary=finished.summary.assign(**{self._name: values}))

    def _rows(self, summary: pd.DataFrame) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the values of the two rows of every comparison."""

        def values_of(row: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: value(sorted(summary[name].unique())) if callable(value) else value
                for name, value in row.items()
            }

        of, to = values_of(self.of), values_of(self.to or {})
        if self.pairs:
            for low, high in itertools.pairwise(sorted(summary[self.pairs].unique())):
                yield of | {self.pairs: low}, to | {self.pairs: high}
            return
        rows = _selected(summary, of)
        for cell in itertools.product(*(sorted(rows[name].unique()) for name in self.per)):
            shared = dict(zip(self.per, cell, strict=True))
            yield of | shared, to | shared

    def _values(self, finished: Finished, row: Mapping[str, Any]) -> pd.Series:
        """Return a row's column by seed; of diverged runs infinity, or an accuracy of zero."""
        summary = _selected(finished.summary, row)
        if self.best is not None:
            summary = tuned(summary.assign(row=0), ["row"], self.best, self.over)
        diverged = 0.0 if "accuracy" in self._name else np.inf
        by_seed = summary.set_index("seed")
        return by_seed[self._name].where(by_seed["status"] == "finished", diverged)


def _selected(summary: pd.DataFrame, row: Mapping[str, Any]) -> pd.DataFrame:
    """Select the runs with some values."""
    for name, value in row.items():
        column = summary[name]
        is_family = name == "method" and value not in set(column)
        summary = summary[(column.str.partition("(")[0] if is_family else column) == value]
    if summary.empty:
        raise LookupError("no run with " + ", ".join(f"{name} {row[name]}" for name in row))
    return summary


Judge = Callable[..., Iterable[Finding]] | Sequence[Bounds]


class Claim(NamedTuple):
    """A published claim and its test."""

    claim: str
    source: str
    #: Commands at small scale, without ``asyncsim study``; or the reason why there are none at any.
    small: tuple[str, ...] | str
    judge: Judge | None = None
    #: Commands at the published scale; or the reason why there are none.
    paper: tuple[str, ...] | str = "its published set-up is unknown"
    #: Whether this project asks the question, not the source.
    ours: bool = False
    #: Seeds of a first look at small scale, after which more seeds were run.
    looked: int = 0
    #: Whether the first look decided the rule, or is repeated: only later seeds count.
    later_seeds: bool = False
    #: Option whose value the source does not state: each command has one, and the verdict says with
    #: which the claim holds.
    assumption: str = ""

    def commands(self, scale: str) -> tuple[str, ...] | str:
        """Return the commands of a scale, or the reason why there are none."""
        is_small = scale == "small" or isinstance(self.small, str)
        return self.small if is_small else self.paper

    def findings(self, evidence: Sequence[Finished], scale: str = "small") -> list[Finding]:
        """Judge the results of the commands."""
        if self.later_seeds and scale == "small":
            evidence = [
                results._replace(summary=results.summary[results.summary["seed"] >= self.looked])
                for results in evidence
            ]
        if not self.assumption:
            return list(self._judge(*evidence))
        findings = []
        for command, results in zip(self.commands(scale), evidence, strict=True):
            _, _, typed = command.partition(f"--{self.assumption} ")
            condition = f"{self.assumption} {typed.split()[0]}"
            findings += [finding._replace(condition=condition) for finding in self._judge(results)]
        return findings

    def _judge(self, *evidence: Finished) -> Iterable[Finding]:
        assert self.judge is not None
        if callable(self.judge):
            return self.judge(*evidence)
        judged = (comparison.judge(*evidence) for comparison in self.judge)
        return itertools.chain.from_iterable(judged)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict of findings.

    A claim holds if every finding supports it, and in part if some do. It does not hold if none
    does and one contradicts it; else it is undecided. With an assumption the verdict names the
    values with which it holds, and those with which it does not.
    """
    by_value: dict[str, list[bool | None]] = {}
    for finding in findings:
        by_value.setdefault(finding.condition, []).append(finding.holds)
    verdicts = {value: _verdict(answers) for value, answers in by_value.items()}
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    values: dict[str, list[str]] = {}
    for value, text in verdicts.items():
        values.setdefault(text, []).append(value)
    parts = [f"{text} with {', '.join(having)}" for text, having in values.items()]
    return f"depends: {'; '.join(parts)}"


def _verdict(answers: Sequence[bool | None]) -> str:
    if all(answers):
        return "holds"
    if any(answers):
        return "holds in part"
    return "does not hold" if False in answers else "undecided"


def measured(findings: Sequence[Finding]) -> str:
    """Join the findings in a sentence; marks distinguish contradictions and undecided ones."""
    marks = {True: "", False: "not so: ", None: "undecided: "}
    return "; ".join(
        f"{condition}: " * bool(condition) + marks[holds] + text
        for text, holds, condition in findings
    )


def above(text: str, values: Iterable[float], bound: float = 0.0) -> Finding:
    """Judge whether the mean over the seeds exceeds a bound, by its 95 % interval of Student's t.

    ``values``: one per seed. The finding is undecided if the interval contains the bound, or if
    there is one seed only; the text then says how many seeds would decide, if the noise and the
    mean stay. Values that are not finite, of diverged runs, have no interval: then all seeds must
    agree.
    """
    sample = np.asarray(list(values), float) - bound
    if not np.isfinite(sample).all() or np.ptp(sample) == 0:
        is_single = len(sample) < 2
        positive, negative = (sample > 0).all(), (sample <= 0).all()
        return Finding(text, None if is_single or positive == negative else bool(positive))
    interval = paired_interval(sample)
    if np.isnan(interval.low) or interval.low <= 0 <= interval.high:
        return Finding(f"{text} ({_remedy(sample)})", None)
    return Finding(text, bool(interval.low > 0))


def below(text: str, values: Iterable[float], bound: float = 0.0) -> Finding:
    """Judge whether the mean over the seeds is below a bound; see `above`."""
    return above(text, (-value for value in values), -bound)


def _remedy(sample: np.ndarray) -> str:
    """Say how many seeds would decide on which side of zero the mean is."""
    if len(sample) < 2:
        return "one seed cannot decide"
    # With two rows the interval of a ranking is Student's.
    seeds = Noise(2, 0.0, 1.0).seeds_to_separate(sample.mean(), sample.var(ddof=1))
    count = f"about {seeds}" if seeds <= _MOST_SEEDS else f"more than {_MOST_SEEDS}"
    return f"{len(sample)} seeds; {count} would decide"


def log_ratio(a: pd.Series, b: pd.Series) -> pd.Series:
    """Return the logarithm of the ratio of two series, seed by seed."""
    return _paired(a, b, ratio=True)


def _paired(a: pd.Series, b: pd.Series, ratio: bool) -> pd.Series:
    a, b = a.align(b)
    return pd.Series(differences(a, b, ratio), a.index)


def spread(values: pd.Series, form: str = ".3g") -> str:
    """Format a mean with its range over the seeds."""
    if np.ptp(values) == 0:
        return f"{values.mean():{form}}"
    return f"{values.mean():{form}} (seeds {values.min():{form}} to {values.max():{form}})"


def interval_text(values: pd.Series, ratio: bool = True, form: str = ".3g") -> str:
    """Format a mean and its 95 % interval; of logarithms of ratios the geometric mean."""
    if not np.isfinite(values).all():
        return "infinitely many (a run diverges or falls short)"
    numbers = [np.exp(end) if ratio else end for end in paired_interval(values)]
    mean, *ends = (f"{number:{form}}" for number in numbers)
    return mean if len(values) < 2 else f"{mean} (95 % interval {ends[0]} to {ends[1]})"
