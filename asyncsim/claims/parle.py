"""Claims of Parle (Chaudhari et al. 2017, arXiv 1707.00424) and Entropy-SGD (arXiv 1611.01838)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from asyncsim.claims.claim import Claim, Finding, above, below, log_ratio, spread, times
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Measure, tuned

SOURCE = "Chaudhari et al. 2017"


def _best(finished: Finished, measure: str, best: str = "most") -> dict[str, pd.DataFrame]:
    """Return the runs of each method at its best rate, by method."""
    runs = tuned(finished.summary, ["method"], Measure(measure, best))
    return {name: rows.set_index("seed") for name, rows in runs.groupby("method", sort=False)}


def faster(finished: Finished) -> list[Finding]:
    """Compare the times to the target of Parle and data-parallel SGD."""
    runs = _best(finished, "time_to_target", "least")
    ratio = log_ratio(runs["data_parallel"]["time_to_target"], runs["parle"]["time_to_target"])
    text = f"Parle is {times(ratio)} as fast"
    return [
        above(f"{text}: at least 2", ratio, np.log(2)),
        below("at most 4", ratio, np.log(4)),
    ]


def as_accurate(finished: Finished) -> list[Finding]:
    """Compare the final test errors of Parle and data-parallel SGD."""
    runs = _best(finished, "test_accuracy")
    gap = runs["parle"]["test_accuracy"] - runs["data_parallel"]["test_accuracy"]
    return [above(f"test accuracy minus data-parallel SGD's is {spread(gap, '+.2%')}", gap)]


def seldom(finished: Finished) -> list[Finding]:
    """Compare the rounds of communication until the target."""
    runs, window = _best(finished, "time_to_target", "least"), finished.config["window"]
    ratio = log_ratio(
        runs["data_parallel"]["gradients_to_target"],
        runs["parle"]["gradients_to_target"] / window,
    )
    return [above(f"data-parallel SGD needs {times(ratio, '.0f')} the rounds", ratio)]


def half_the_epochs(finished: Finished) -> list[Finding]:
    """Compare the gradients to the target of sequential SGD and Entropy-SGD."""
    runs = _best(finished, "gradients_to_target", "least")
    ratio = log_ratio(
        runs["sgd"]["gradients_to_target"], runs["entropy_sgd"]["gradients_to_target"]
    )
    text = f"SGD needs {times(ratio)} the gradients: at least 1.5"
    return [above(text, ratio, np.log(1.5))]


_REPLICAS = ("replicas --methods parle entropy_sgd sgd --tune 0.03 0.1 0.3 --seeds 10",)
_UNKNOWN = "wide residual networks with augmentation are not among the problems"

CLAIMS: Sequence[Claim] = (
    Claim(
        "Parle is 2 to 4 times faster than data-parallel SGD",
        f"{SOURCE}, abstract",
        _REPLICAS,
        faster,
        _UNKNOWN,
    ),
    Claim(
        "Parle ends with a lower error than data-parallel SGD",
        f"{SOURCE}, abstract",
        _REPLICAS,
        as_accurate,
        _UNKNOWN,
    ),
    Claim(
        "Parle communicates less often",
        f"{SOURCE}, abstract",
        _REPLICAS,
        seldom,
        _UNKNOWN,
    ),
    Claim(
        "Entropy-SGD needs about half the effective epochs of SGD",
        "Chaudhari et al. 2016, Entropy-SGD",
        _REPLICAS,
        half_the_epochs,
        _UNKNOWN,
    ),
)
