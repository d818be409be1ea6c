"""Claims of AD-PSGD (arXiv 1710.06952), SGP (arXiv 1811.10792), D-PSGD and Base-2 graphs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from asyncsim.claims.claim import Claim, Finding, above, below, log_ratio, spread, times
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Measure, tuned

#: An insensitive method loses less than this factor of its speed.
_INSENSITIVE = 1.2


_TIME, _ACCURACY = Measure("time_to_target"), Measure("test_accuracy", "most")


def _best(finished: Finished, measure: Measure = _TIME) -> pd.DataFrame:
    """Return the runs of each method and topology at the best rate."""
    return tuned(finished.summary, ["topology", "method"], measure)


def _times(finished: Finished, method: str, column: str = "time_to_target") -> pd.Series:
    """Return a method's times to the target by seed, on its best topology."""
    runs = _best(finished)
    runs = runs[runs["method"] == method]
    means = runs.groupby("topology", sort=False)["time_to_target"].mean()
    return runs[runs["topology"] == means.idxmin()].set_index("seed")[column]


def pairs_beat_stragglers(finished: Finished) -> list[Finding]:
    """Compare AD-PSGD with all-reduce where a worker is slow."""
    ratio = log_ratio(_times(finished, "batch_sgd"), _times(finished, "adpsgd"))
    work = log_ratio(
        _times(finished, "adpsgd", "gradients_to_target"),
        _times(finished, "batch_sgd", "gradients_to_target"),
    )
    return [
        Finding(f"{times(ratio)} as fast: at least 4", above(ratio, np.log(4))),
        Finding("at most 8", below(ratio, np.log(8))),
        Finding(
            f"AD-PSGD needs {times(work)} the gradients, the same per epoch up to 20 %",
            below(work, np.log(1.2)),
        ),
    ]


def straggler(slow: Finished, even: Finished) -> list[Finding]:
    """Compare how much a slow worker delays each method."""
    findings = []
    for method in ("sgp", "adpsgd"):
        loss = log_ratio(_times(slow, method), _times(even, method))
        findings.append(
            Finding(
                f"a worker 5 times as slow makes {method} {times(loss)} as slow",
                below(loss, np.log(_INSENSITIVE)),
            )
        )
    loss = log_ratio(_times(slow, "batch_sgd"), _times(even, "batch_sgd"))
    return [
        *findings,
        Finding(f"and all-reduce {times(loss)}", above(loss, np.log(_INSENSITIVE))),
    ]


def slow_network(late: Finished, even: Finished) -> list[Finding]:
    """Compare how much a latency delays each method."""
    findings = []
    for method in ("osgp", "sgp", "batch_sgd"):
        loss = log_ratio(_times(late, method), _times(even, method))
        text = f"a latency of a gradient's time makes {method} {times(loss)} as slow"
        holds = above if method == "batch_sgd" else below
        findings.append(Finding(text, holds(loss, np.log(_INSENSITIVE))))
    return findings


def faster_on_slow_network(late: Finished, even: Finished) -> list[Finding]:
    """Compare SGP and OSGP with all-reduce on a slow network."""
    reduced = _times(late, "batch_sgd")
    return [
        Finding(f"{method} {times(ratio)} as fast as all-reduce", above(ratio))
        for method in ("sgp", "osgp")
        for ratio in [log_ratio(reduced, _times(late, method))]
    ]


def same_accuracy(late: Finished, even: Finished) -> list[Finding]:
    """Compare the final test accuracy of SGP with all-reduce's."""
    runs = _best(even, _ACCURACY).set_index("seed")
    sgp, reduced = (
        runs.loc[runs["method"] == method, "test_accuracy"] for method in ("sgp", "batch_sgd")
    )
    return [
        Finding(
            f"SGP {spread(sgp, '.2%')}, all-reduce {spread(reduced, '.2%')}",
            above(sgp - reduced, -0.012),
        )
    ]


def finite_time_graphs(finished: Finished) -> list[Finding]:
    """Compare Base-2 and one-peer exponential graphs on heterogeneous data."""
    runs = _best(finished, _ACCURACY)
    by_graph = {
        name: rows.set_index("seed")["test_accuracy"] for name, rows in runs.groupby("topology")
    }
    gap = by_graph["base2()"] - by_graph["one_peer_exponential()"]
    return [Finding(f"accuracy {spread(gap, '+.2%')} higher with Base-2", above(gap))]


_COMMON = "--workers 16 --steps 50 --tune 0.2 0.8 --target 0.9 --seeds 3"
_STRAGGLERS = (
    'gossip --methods sgp adpsgd batch_sgd --topology "complete()" "one_peer_exponential()" '
    + _COMMON
)
_NETWORK = f'gossip --methods sgp osgp batch_sgd --topology "one_peer_exponential()" {_COMMON}'
_SLOW, _LATE = f"{_STRAGGLERS} --slow 5", f"{_NETWORK} --latency 0.5"
_IMAGENET = "ImageNet cannot be had without registration"

CLAIMS: Sequence[Claim] = (
    Claim(
        "With a slow worker AD-PSGD is 4 to 8 times faster than all-reduce, per epoch the same",
        "Lian et al. 2018, AD-PSGD",
        (_SLOW,),
        pairs_beat_stragglers,
        _IMAGENET,
    ),
    Claim(
        "SGP and AD-PSGD are insensitive to a slow worker, all-reduce is not",
        "Assran et al. 2019, SGP; Lian et al. 2018",
        (_SLOW, _STRAGGLERS),
        straggler,
        _IMAGENET,
    ),
    Claim(
        "SGP and overlap SGP are insensitive to delays, all-reduce is not",
        "Assran et al. 2019, SGP",
        (_LATE, _NETWORK),
        slow_network,
        _IMAGENET,
    ),
    Claim(
        "On a slow network SGP is faster than all-reduce",
        "Assran et al. 2019, SGP",
        (_LATE, _NETWORK),
        faster_on_slow_network,
        _IMAGENET,
    ),
    Claim(
        "SGP is at most 1.2 points less accurate than all-reduce",
        "Assran et al. 2019, SGP",
        (_LATE, _NETWORK),
        same_accuracy,
        _IMAGENET,
    ),
    Claim(
        "On heterogeneous data Base-2 graphs end more accurate than one-peer exponential graphs",
        "Takezawa et al. 2023, arXiv 2305.11420",
        (
            'gossip --workers 25 --methods dpsgd --topology "base2()" "one_peer_exponential()" '
            "--dirichlet 0.1 --tune 0.4 0.8 --steps 80 --seeds 6",
        ),
        finite_time_graphs,
        "VGG is not among the problems",
    ),
    Claim(
        "SGP keeps 88.6 % of its efficiency from 4 to 32 nodes",
        "Assran et al. 2019, SGP",
        "the speeds of the nodes and of the network are not published",
        paper="the speeds of the nodes and of the network are not published",
    ),
)
