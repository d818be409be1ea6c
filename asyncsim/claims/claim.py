"""A published claim: the commands that test it, the rule that judges their results, its verdict.

A rule receives the results of the claim's commands, in their order, and returns findings. Each
finding is a sentence with the measured numbers, and whether it supports the claim: True, False, or
None if the noise of the seeds hides the answer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Noise, paired_interval

#: Larger numbers of seeds are not stated: such a test takes hours.
_MOST_SEEDS = 100


class Finding(NamedTuple):
    """A measured statement, and whether it supports the claim."""

    text: str
    holds: bool | None


class Claim(NamedTuple):
    """A published claim and its test."""

    claim: str
    source: str
    #: Commands at small scale, without ``asyncsim study``; or the reason why there are none.
    small: tuple[str, ...] | str
    judge: Callable[..., Sequence[Finding]] | None = None
    #: Commands at the published scale; or the reason why there are none.
    paper: tuple[str, ...] | str = "its published set-up is unknown"

    def commands(self, scale: str) -> tuple[str, ...] | str:
        """Return the commands of a scale, or the reason why there are none."""
        return self.small if scale == "small" else self.paper


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict of findings.

    A claim holds if every finding supports it, and in part if some do. It does not hold if none
    does and one contradicts it.
    """
    answers = [finding.holds for finding in findings]
    if all(answers):
        return "holds"
    if any(answers):
        return "holds in part"
    if False in answers:
        return "does not hold"
    return "not testable here: the noise of the seeds hides the answer"


def measured(findings: Sequence[Finding]) -> str:
    """Join the findings in a sentence; marks distinguish contradictions and undecided ones."""
    marks = {True: "", False: "not so: ", None: "undecided: "}
    return "; ".join(f"{marks[finding.holds]}{finding.text}" for finding in findings)


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
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(a / b)


def losses(finished: Finished, column: str = "final_loss", **values: Any) -> pd.Series:
    """Return a loss by seed, infinite for diverged runs."""
    return _by_seed(finished, column, np.inf, values)


def accuracies(finished: Finished, column: str = "test_accuracy", **values: Any) -> pd.Series:
    """Return an accuracy by seed, zero for diverged runs."""
    return _by_seed(finished, column, 0.0, values)


def _by_seed(finished: Finished, column: str, diverged: float, values: Any) -> pd.Series:
    """Return a column of the rows with some values, by seed, and ``diverged`` for diverged runs."""
    rows = finished.rows(**values).set_index("seed")
    return rows[column].where(rows["status"] == "finished", diverged)


def spread(values: pd.Series, form: str = ".3g") -> str:
    """Format a mean with its range over the seeds."""
    if np.ptp(values) == 0:
        return f"{values.mean():{form}}"
    return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"


def times(ratio: pd.Series, form: str = ".2f") -> str:
    """Format the geometric mean of ratios, given as logarithms."""
    mean = ratio.mean()
    if not np.isfinite(mean):
        return "infinitely many times (a run diverges or falls short)"
    return f"{np.exp(mean):{form}} times"
