"""Claims on Byzantine workers: medians, CGE, Krum, momentum at the worker, BASGD and Kardam."""

import functools
from collections.abc import Sequence

from asyncsim.claims.claim import Bounds, Claim
from asyncsim.study.ranking import Measure

#: A rule withstands an attack if it loses at most this test accuracy, and breaks if it loses more.
_TOLERATED = 0.1
#: Least test accuracy of a method that learns.
_LEARNED = 0.8
_NAMES = {
    "median()": "the median",
    "krum(f=f)": "Krum",
    "cge(f=f)": "CGE",
    "batch_sgd": "the mean",
}
_ATTACKS = ("sign_flip(scale=10)", "alie")
_ACCURACY = Measure("test_accuracy", "most")


def _lost(
    rule: str, byzantine: int, attacks: Sequence[str] = _ATTACKS, breaks: bool = False
) -> tuple[Bounds, ...]:
    """Compare the test accuracy that a rule loses under attacks with the tolerated one."""
    return tuple(
        Bounds(
            f"{_NAMES[rule]} with {byzantine} Byzantine, {attack}: {{}} of accuracy lost",
            "test_accuracy",
            {"method": rule, "byzantine": 0},
            {"method": rule, "byzantine": byzantine, "attack": attack},
            above=_TOLERATED if breaks else None,
            below=None if breaks else _TOLERATED,
            ratio=False,
            best=_ACCURACY,
        )
        for attack in attacks
    )


def _at_worker(rule: str) -> Bounds:
    """Compare momentum at the workers with momentum at the server, under ALIE."""
    row = {"method": rule, "byzantine": max, "attack": "alie"}
    text = f"{_NAMES[rule]}, alie: test accuracy with momentum at the workers is {{}} higher"
    return Bounds(text, "test_accuracy", row, row, above=0.0, ratio=False, best=_ACCURACY)


def _learns(
    name: str, method: str, above: float | None = None, below: float | None = None
) -> Bounds:
    """Compare a method's test accuracy with the least of one that learns."""
    text = f"{name}: test accuracy {{}}"
    return Bounds(
        text, "test_accuracy", {"method": method}, above=above, below=below, best=_ACCURACY
    )


_ROBUST = (
    'robustness --rules "median()" "krum(f=f)" "cge(f=f)" --byzantine 2 6 '
    '--attack "sign_flip(scale=10)" alie --tune 0.2 --steps 30 --seeds 11'
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

#: A first look with three seeds decided these rules: later seeds count.
_under_attack = functools.partial(
    Claim, small=(_ROBUST,), paper=_NO_PAPER, looked=3, later_seeds=True
)

CLAIMS: Sequence[Claim] = (
    _under_attack(
        "Scaled sign flips of a few workers break the mean",
        "Blanchard et al. 2017, Krum",
        judge=_lost("batch_sgd", 2, _ATTACKS[:1], breaks=True),
    ),
    _under_attack(
        "The coordinate-wise median withstands a few Byzantine workers",
        "Yang et al. 2019, LICM-SGD (its core)",
        judge=_lost("median()", 2),
    ),
    _under_attack(
        "The coordinate-wise median withstands almost half of the workers",
        "Yang et al. 2019, LICM-SGD (its core)",
        judge=_lost("median()", 6),
    ),
    Claim(
        "LICM-SGD withstands up to half of the workers without knowing their number",
        "Yang et al. 2019, abstract",
        "the rule that selects gradients is not in any source that can be had",
    ),
    _under_attack(
        "CGE withstands a few Byzantine workers",
        "Gupta et al. 2020, CGE",
        judge=_lost("cge(f=f)", 2),
    ),
    _under_attack(
        "CGE withstands almost half of the workers",
        "Gupta et al. 2020, CGE; its proof allows fewer the worse the loss is conditioned",
        judge=_lost("cge(f=f)", 6),
    ),
    Claim(
        "Averages of each worker's gradients over time improve CGE's tolerance",
        "Gupta et al. 2020, CGE",
        (_AT_WORKER, _AT_SERVER),
        (_at_worker("cge(f=f)"),),
        _NO_PAPER,
        looked=3,
    ),
    _under_attack(
        "A little is enough: ALIE breaks the median and Krum",
        "Baruch et al. 2019",
        judge=(
            *_lost("median()", 6, _ATTACKS[1:], breaks=True),
            *_lost("krum(f=f)", 6, _ATTACKS[1:], breaks=True),
        ),
    ),
    Claim(
        "Momentum at the workers repairs what momentum at the server does not",
        "El Mhamdi et al. 2021",
        (_AT_WORKER, _AT_SERVER),
        (_at_worker("median()"), _at_worker("krum(f=f)")),
        _NO_PAPER,
        looked=3,
    ),
    Claim(
        "Under negated gradients BASGD learns; asynchronous SGD and Kardam do not",
        "Yang and Li 2021, BASGD",
        (_BASGD,),
        (
            _learns("BASGD", "basgd", above=_LEARNED),
            _learns("Kardam", "kardam", below=_LEARNED),
            _learns("asynchronous SGD", "downpour", below=_LEARNED),
        ),
        _NO_PAPER,
    ),
)
