"""Claims of "Leader Stochastic Gradient Descent" (Teng et al. 2019, arXiv 1905.10395)."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from asyncsim.claims.claim import Claim, Finding, above, log_ratio, times
from asyncsim.study.finished import Finished
from asyncsim.study.results import RANKING
from asyncsim.study.target import time_to_target

SOURCE = "Teng et al. 2019"
#: Largest share of the elections that a worker may win without a monopoly.
_MONOPOLY = 0.5
#: Longest mean stay of a leader that changes often, in communication periods of all workers.
_STAY = 2.0
#: A final loss is as low as another if it is at most this multiple.
_AS_LOW = 1.1
#: Replicas that pull each other this little are alone.
_UNPULLED = "lgd(pull=1e-09)"
#: Gradient of a central variable at rest.
_RESTS = 1e-6


def sooner(finished: Finished) -> list[Finding]:
    """Compare the times to the target error of LSGD and EASGD, cell by cell."""
    target = 1 - float(finished.config["target"])  # the error of an accuracy

    def measure(row: pd.Series) -> float:
        evaluations = finished.run(row["run_folder"]).evaluations
        error = 1 - evaluations["test_accuracy"]
        return time_to_target(evaluations["commit_time"], error, target)

    return _compared(finished, measure, lambda ratio: f"LSGD is {times(ratio)} as fast as EASGD")


def as_low(finished: Finished) -> list[Finding]:
    """Compare the final training losses of LSGD and EASGD, cell by cell."""

    def measure(row: pd.Series) -> float:
        return float(row["train_loss"]) if row["status"] == "finished" else np.inf

    def text(ratio: pd.Series) -> str:
        return f"EASGD ends at {times(ratio)} LSGD's loss, at least {1 / _AS_LOW:.2f}"

    return _compared(finished, measure, text, -np.log(_AS_LOW))


def _compared(
    finished: Finished,
    measure: Callable[[pd.Series], float],
    text: Callable[[pd.Series], str],
    bound: float = 0.0,
) -> list[Finding]:
    """Compare the logarithm of EASGD's measure over LSGD's with a bound, at the best rates of the
    measure.
    """
    runs, findings = finished.summary, []
    runs = runs.assign(measure=runs.apply(measure, axis=1))
    for (n, window), cell in runs.groupby(["workers", "window"]):
        by_rate = cell.pivot(index=["method", "learning_rate"], columns="seed", values="measure")
        best = by_rate.loc[by_rate.mean(axis=1).groupby("method").idxmin()].droplevel(1)
        ratio = log_ratio(best.loc["aeasgd"], best.loc["lsgd"])
        findings.append(above(f"n = {n}, period {window}: {text(ratio)}", ratio, bound))
    return findings


def no_monopoly(finished: Finished) -> list[Finding]:
    """Judge the shares of the elections that the most frequent leader wins, and its stays."""
    table, findings = finished.table(RANKING), []
    for row in table[table["method"] == "lsgd"].itertuples():
        # A period of n workers has n elections.
        stay = 1 / (1 - row.kept) / row.workers
        findings += [
            Finding(
                f"n = {row.workers}, period {row.window}: a leader stays for {stay:.1f} periods",
                bool(stay < _STAY),
            ),
            Finding(
                f"the most frequent leader wins {row.largest_share:.0%} of the elections",
                bool(row.largest_share < _MONOPOLY),
            ),
        ]
    return findings


def stationary(finished: Finished) -> list[Finding]:
    """Judge the gradients where the central variables end."""
    ends = finished.table(RANKING).set_index("method")["gradient"]
    return [
        Finding(
            f"the gradient where LGD's leader ends is {ends['lgd']:.2g}",
            bool(ends["lgd"] < _RESTS),
        ),
        Finding(
            f"where EASGD's center ends it is {ends['easgd']:.2g}",
            bool(ends["easgd"] > 1e3 * _RESTS),
        ),
    ]


def not_decelerated(finished: Finished) -> list[Finding]:
    """Compare the times to the target of LGD and EASGD with that of workers alone."""
    times_to_target = finished.table(RANKING).set_index("method")["time_to_target"]
    unpulled, center = times_to_target.pop(_UNPULLED), times_to_target.pop("easgd")
    leader = times_to_target.item()
    return [
        Finding(
            f"the leader is in a well after {leader:,.0f} s, the best of workers alone after "
            f"{unpulled:,.0f} s",
            bool(leader <= unpulled),
        ),
        Finding(f"EASGD's center after {center:,.0f} s", bool(center > unpulled)),
    ]


def fewer_bytes(finished: Finished) -> list[Finding]:
    """Compare the traffic of LSGD and EASGD."""
    table = finished.table("comparison.csv").set_index("method")["gigabytes"]
    ratio = table["lsgd"] / table["aeasgd"]
    return [Finding(f"LSGD moves {ratio:.2f} times EASGD's bytes", bool(ratio < 1))]


_LEADERS = (
    "leaders --methods lsgd aeasgd --group-size 16 --window 4 16 --tune 0.2 0.4 0.8 "
    "--gradients 256 --seeds 8",
)
_PAPER = ("leaders --scale paper",)

_WELLS = (
    'leaders --problem "wells({})" --workers 4 --window 1 --tune 0.01 --gradients {} '
    "--methods {} --target 0.01 --seeds 1 --x64"
)
_PULLS = '"lgd(pull=[1e-09, 0.1])" "easgd(beta=0.9)"'
_TILTED = (_WELLS.format("tilt=0.3", 4000, '"lgd(pull=0.005)" "easgd(alpha=0.005)"'),)
_UNEVEN = (_WELLS.format("", 1000, _PULLS),)
_SYMMETRIC = (_WELLS.format("starts=[-1.2, 1.2, 0.9, -0.9]", 3000, _PULLS),)
_TRAFFIC = ("compare --workers 4 --methods lsgd aeasgd --steps 10 --seeds 1",)

CLAIMS: Sequence[Claim] = (
    Claim(
        "Stationary points of the loss stay stationary with a leader; EASGD moves them",
        f"{SOURCE}, theorem on stationary points",
        _TILTED,
        stationary,
        _TILTED,
    ),
    Claim(
        "Pulling to the leader does not decelerate as pulling to the average does",
        f"{SOURCE}, introduction",
        _UNEVEN,
        not_decelerated,
        _UNEVEN,
    ),
    Claim(
        "On a symmetric landscape the average is held between the wells, the leader is not",
        f"{SOURCE}, curse of symmetry",
        _SYMMETRIC,
        not_decelerated,
        _SYMMETRIC,
    ),
    Claim(
        "LSGD communicates less than EASGD",
        f"{SOURCE}, only losses go up and the leader's parameters come down",
        _TRAFFIC,
        fewer_bytes,
        _TRAFFIC,
    ),
    Claim(
        "LSGD reaches a test error sooner than EASGD, with 4 and with 16 workers",
        f"{SOURCE}, experiments",
        _LEADERS,
        sooner,
        _PAPER,
    ),
    Claim(
        "LSGD ends at least as low as EASGD",
        f"{SOURCE}, experiments",
        _LEADERS,
        as_low,
        _PAPER,
    ),
    Claim(
        "The leader changes often, and no worker monopolises the leadership",
        f"{SOURCE}, histogram of leaderships",
        _LEADERS,
        no_monopoly,
        _PAPER,
    ),
    Claim(
        "LSGD trains ResNet-50 on ImageNet faster than EASGD and data-parallel SGD",
        f"{SOURCE}, experiments",
        "ImageNet cannot be had without registration",
        paper="ImageNet cannot be had without registration",
    ),
)
