"""Claims of "Optimal Time Complexities of Parallel Stochastic Optimization Methods" (Tyurin and
Richtarik 2023, arXiv 2305.12387), "Ringmaster ASGD" (Maranjyan, Tyurin and Richtarik 2025, arXiv
2501.16168) and "Ringleader ASGD" (Maranjyan and Richtarik 2025, arXiv 2509.22860).
"""

from collections.abc import Sequence

from asyncsim.claims.claim import Bounds, Claim
from asyncsim.study.ranking import Measure

#: Ratios of times that count as unchanged, and as those of the slow workers, 100 times as slow.
_UNCHANGED, _AS_THE_SLOW = 1.1, 50.0
_TIME, _LOSS = Measure("time_to_target"), Measure("train_loss")
_RINGMASTER, _RENNALA, _MINIBATCH = (
    {"method": name} for name in ("ringmaster", "rennala", "batch_sgd")
)


_UNDELAYED = tuple(
    Bounds(
        "with eight slow workers {of[method]} takes {} times as long as without",
        *(_TIME.name, method, method),
        below=_UNCHANGED,
        best=_TIME,
    )
    for method in (_RINGMASTER, _RENNALA)
)
_AS_THE_SLOWEST = Bounds(
    "with eight workers that are 100 times as slow minibatch SGD takes {} times as long",
    *(_TIME.name, _MINIBATCH, _MINIBATCH),
    above=_AS_THE_SLOW,
    best=_TIME,
)

_COMPARE = (
    'compare --service 0 --problem "quadratic([1, 0.3, 0.1, 0.03], noise=0.2)" --target 0.03 '
    "--tune 0.02 0.05 0.1 0.2 0.5 1 --seeds 5 --workers {} --compute {!r} --methods {}"
)
_RIVALS = (
    "\"ringmaster(policy='discard_stale(limit=8)')\" "
    "\"rennala(policy='discard_stale(limit=1, count=4)')\""
)
_LAWS = ", ".join(f"halfnormal({i}, {i**0.5:.3g})" for i in range(1, 33))
_UNEQUAL = (_COMPARE.format(32, f"[{_LAWS}]", f"{_RIVALS} dynsgd --time-budget 400"),)
_SLOW = tuple(
    _COMPARE.format(workers, compute, f"{_RIVALS} batch_sgd --steps 200")
    for workers, compute in ((16, "[1]*8 + [100]*8"), (8, "1"))
)
_CLIENTS = (
    "ringleader --workers 20 --time-budget 1000 --seeds 3 "
    '--problem "digits(hidden=[32], batch_size=4, split=0.1)"',
)
_COMPLEXITY = "Tyurin and Richtarik 2023, time complexity: the minimum over the fastest workers"

CLAIMS: Sequence[Claim] = (
    Claim(
        "Workers that are too slow do not delay Rennala SGD and Ringmaster ASGD",
        f"{_COMPLEXITY}; Maranjyan et al. 2025",
        _SLOW,
        _UNDELAYED,
    ),
    Claim(
        "Minibatch SGD is as slow as its slowest worker",
        "Tyurin and Richtarik 2023, time complexity of minibatch SGD",
        _SLOW,
        (_AS_THE_SLOWEST,),
    ),
    Claim(
        "Ringmaster ASGD is faster than delay-adaptive ASGD and Rennala SGD",
        "Maranjyan, Tyurin and Richtarik 2025, section G",
        _UNEQUAL,
        tuple(
            Bounds(
                f"Ringmaster takes {{}} times as long as {name}",
                *(_TIME.name, _RINGMASTER, {"method": method}),
                below=1.0,
                best=_TIME,
            )
            for name, method in (("delay-adaptive ASGD", "dynsgd"), ("Rennala", "rennala"))
        ),
    ),
    Claim(
        "Ringleader ASGD is the quickest where the workers' data differ",
        "Maranjyan and Richtarik 2025, experiments",
        _CLIENTS,
        tuple(
            Bounds(
                f"Ringleader ends at {{}} times the loss of {name}",
                *(_LOSS.name, {"method": "ringleader"}, {"method": method}),
                below=1.0,
                best=_LOSS,
            )
            for name, method in (("Malenia", "malenia"), ("IA2SGD", "ia2sgd"))
        ),
        ("ringleader --scale paper",),
    ),
)
