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

#: Confidence of a statement about the mean over the seeds.
CONFIDENCE = 0.95


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


def above(values: Iterable[float], bound: float = 0.0) -> bool | None:
    """Decide whether the mean over the seeds exceeds a bound, by a t interval.

    None if the interval contains the bound, or if there is one seed only. Values that are not
    finite, of diverged runs, have no interval: then all seeds must agree.
    """
    sample = np.asarray(list(values), float) - bound
    if len(sample) < 2:
        return None
    spread = sample.std(ddof=1) / np.sqrt(len(sample)) if np.isfinite(sample).all() else np.inf
    if spread in (0.0, np.inf):
        return True if (sample > 0).all() else False if (sample <= 0).all() else None
    from scipy.stats import t  # a third of a second

    width = float(t.ppf((1 + CONFIDENCE) / 2, len(sample) - 1)) * spread
    return None if abs(sample.mean()) <= width else bool(sample.mean() > 0)


def below(values: Iterable[float], bound: float = 0.0) -> bool | None:
    """Decide whether the mean over the seeds is below a bound; see `above`."""
    return above((-value for value in values), -bound)


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
    return f"{np.exp(mean):{form}} times" if np.isfinite(mean) else "infinitely many times"
