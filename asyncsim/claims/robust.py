"""Claims on Byzantine workers: medians, CGE, Krum, momentum at the worker, BASGD and Kardam."""

from collections.abc import Sequence

import pandas as pd

from asyncsim.claims.claim import Claim, Finding, above, below, spread
from asyncsim.study.finished import Finished

#: A rule withstands an attack if it loses less than this test accuracy; it fails if it loses more
#: than the second.
_TOLERATED, _LOST = 0.1, 0.3
#: Test accuracies of a method that learns, and of one that does not.
_LEARNED, _FAILED = 0.8, 0.5
_NAMES = {
    "median()": "the median",
    "krum(f=f)": "Krum",
    "cge(f=f)": "CGE",
    "batch_sgd": "the mean",
    "basgd": "BASGD",
    "kardam": "Kardam",
    "downpour": "asynchronous SGD",
}


def _accuracy(finished: Finished, **values: object) -> pd.Series:
    """Return the test accuracy by seed, at the best rate; zero for diverged runs."""
    rows = finished.rows(**values)
    scored = rows.assign(score=rows["test_accuracy"].where(rows["status"] == "finished", 0.0))
    by_rate = scored.pivot(index="seed", columns="learning_rate", values="score").fillna(0.0)
    return by_rate[by_rate.mean().idxmax()]


def _withstands(
    finished: Finished, method: str, byzantine: int, attack: str, fails: bool = False
) -> Finding:
    """Judge whether a rule withstands an attack, or ``fails``."""
    lost = _accuracy(finished, method=method, byzantine=0) - _accuracy(
        finished, method=method, byzantine=byzantine, attack=attack
    )
    text = (
        f"{_NAMES[method]} with {byzantine} of {finished.config['workers']} Byzantine, {attack}: "
        f"{round(100 * lost.mean())} points of accuracy lost"
    )
    if fails:
        return above(f"{text}, at least {100 * _LOST:.0f}", lost, _LOST)
    return below(f"{text}, at most {100 * _TOLERATED:.0f}", lost, _TOLERATED)


def _attacks(finished: Finished) -> list[str]:
    return [name for name in finished.summary["attack"].unique() if name != "none"]


def median_half(finished: Finished) -> list[Finding]:
    """Judge the coordinate-wise median with almost half of the workers Byzantine."""
    byzantine = int(finished.summary["byzantine"].max())
    return [_withstands(finished, "median()", byzantine, attack) for attack in _attacks(finished)]


def median_few(finished: Finished) -> list[Finding]:
    """Judge the coordinate-wise median with few Byzantine workers."""
    byzantine = int(sorted(finished.summary["byzantine"].unique())[1])
    return [_withstands(finished, "median()", byzantine, attack) for attack in _attacks(finished)]


def cge_few(finished: Finished) -> list[Finding]:
    """Judge CGE with few Byzantine workers."""
    byzantine = int(sorted(finished.summary["byzantine"].unique())[1])
    return [_withstands(finished, "cge(f=f)", byzantine, attack) for attack in _attacks(finished)]


def cge_half(finished: Finished) -> list[Finding]:
    """Judge CGE with almost half of the workers Byzantine."""
    byzantine = int(finished.summary["byzantine"].max())
    return [_withstands(finished, "cge(f=f)", byzantine, attack) for attack in _attacks(finished)]


def mean_fails(finished: Finished) -> list[Finding]:
    """Judge the mean under scaled sign flips."""
    byzantine = int(sorted(finished.summary["byzantine"].unique())[1])
    return [_withstands(finished, "batch_sgd", byzantine, "sign_flip(scale=10)", fails=True)]


def little_is_enough(finished: Finished) -> list[Finding]:
    """Judge the rules under ALIE with the most Byzantine workers."""
    byzantine = int(finished.summary["byzantine"].max())
    rules = ("median()", "krum(f=f)")
    return [_withstands(finished, rule, byzantine, "alie", fails=True) for rule in rules]


def worker_momentum(worker: Finished, server: Finished) -> list[Finding]:
    """Compare momentum at the workers with momentum at the server."""
    byzantine = int(worker.summary["byzantine"].max())
    findings = []
    for rule in ("median()", "krum(f=f)"):
        at_worker, at_server = (
            _accuracy(finished, method=rule, byzantine=byzantine, attack="alie")
            for finished in (worker, server)
        )
        findings.append(
            above(
                f"{_NAMES[rule]}: test accuracy {at_worker.mean():.0%} with momentum at the "
                f"workers, {at_server.mean():.0%} at the server",
                at_worker - at_server,
            )
        )
    return findings


def average_helps_cge(plain: Finished, averaged: Finished) -> list[Finding]:
    """Compare CGE on gradients and on their averages over time."""
    findings = []
    for attack in _attacks(averaged):
        byzantine = int(averaged.summary["byzantine"].max())
        a, b = (
            _accuracy(finished, method="cge(f=f)", byzantine=byzantine, attack=attack)
            for finished in (averaged, plain)
        )
        findings.append(
            above(
                f"{attack}: test accuracy {a.mean():.0%} with averages at the workers, "
                f"{b.mean():.0%} with the same momentum at the server",
                a - b,
            )
        )
    return findings


def buffers(finished: Finished) -> list[Finding]:
    """Judge BASGD, Kardam and plain asynchronous SGD under negated gradients."""
    summary = finished.summary.assign(learning_rate=finished.summary["method.learning_rate"])
    finished = finished._replace(summary=summary)
    finished.summary["method"] = summary["method"].str.partition("(")[0]
    findings = []
    for method, learns in (("basgd", True), ("kardam", False), ("downpour", False)):
        values = _accuracy(finished, method=method)
        text = f"{_NAMES[method]}: test accuracy {spread(values, '.0%')}"
        findings.append(
            above(f"{text}, at least {_LEARNED:.0%}", values, _LEARNED)
            if learns
            else below(f"{text}, at most {_FAILED:.0%}", values, _FAILED)
        )
    return findings


_ROBUST = (
    'robustness --rules "median()" "krum(f=f)" "cge(f=f)" --byzantine 2 6 '
    '--attack "sign_flip(scale=10)" alie --tune 0.2 --steps 30 --seeds 8'
)
_MOMENTUM = (
    'robustness --rules "median()" "krum(f=f)" "cge(f=f)" --byzantine 6 --attack alie '
    "--tune 0.1 --steps 30 --seeds 5"
)
_AT_WORKER, _AT_SERVER = f"{_MOMENTUM} --worker-momentum 0.9", f"{_MOMENTUM} --server-momentum 0.9"
_BASGD = (
    'compare --workers 15 --attack "sign_flip(workers=3, scale=10)" --methods '
    '"basgd(count=8)" "kardam(f=3)" downpour --tune 0.02 0.1 --measure test_accuracy '
    "--steps 60 --seeds 3"
)
_NO_PAPER = "only parts of the published set-ups are known"

CLAIMS: Sequence[Claim] = (
    Claim(
        "Scaled sign flips of a few workers break the mean",
        "Blanchard et al. 2017, Krum",
        (_ROBUST,),
        mean_fails,
        _NO_PAPER,
    ),
    Claim(
        "The coordinate-wise median withstands a few Byzantine workers",
        "Yang et al. 2019, LICM-SGD (its core)",
        (_ROBUST,),
        median_few,
        _NO_PAPER,
    ),
    Claim(
        "The coordinate-wise median withstands almost half of the workers",
        "Yang et al. 2019, LICM-SGD (its core)",
        (_ROBUST,),
        median_half,
        _NO_PAPER,
    ),
    Claim(
        "LICM-SGD withstands up to half of the workers without knowing their number",
        "Yang et al. 2019, abstract",
        "the rule that selects gradients is not in any source that can be had",
        paper="the rule that selects gradients is not in any source that can be had",
    ),
    Claim(
        "CGE withstands a few Byzantine workers",
        "Gupta et al. 2020, CGE",
        (_ROBUST,),
        cge_few,
        _NO_PAPER,
    ),
    Claim(
        "CGE withstands almost half of the workers",
        "Gupta et al. 2020, CGE; its proof allows fewer the worse the loss is conditioned",
        (_ROBUST,),
        cge_half,
        _NO_PAPER,
    ),
    Claim(
        "Averages of each worker's gradients over time improve CGE's tolerance",
        "Gupta et al. 2020, CGE",
        (_AT_SERVER, _AT_WORKER),
        average_helps_cge,
        _NO_PAPER,
    ),
    Claim(
        "A little is enough: ALIE breaks the median and Krum",
        "Baruch et al. 2019",
        (_ROBUST,),
        little_is_enough,
        _NO_PAPER,
    ),
    Claim(
        "Momentum at the workers repairs what momentum at the server does not",
        "El Mhamdi et al. 2021",
        (_AT_WORKER, _AT_SERVER),
        worker_momentum,
        _NO_PAPER,
    ),
    Claim(
        "Under negated gradients BASGD learns; asynchronous SGD and Kardam do not",
        "Yang and Li 2021, BASGD",
        (_BASGD,),
        buffers,
        _NO_PAPER,
    ),
)
