"""Claims of "Leader Stochastic Gradient Descent" (Teng et al. 2019, arXiv 1905.10395)."""

from collections.abc import Iterator, Sequence

from asyncsim.claims.claim import Bounds, Claim, Finding
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Measure
from asyncsim.study.results import RANKING

SOURCE = "Teng et al. 2019"
#: Largest share of the elections that a worker may win without a monopoly.
_MONOPOLY = 0.5
#: Longest mean stay of a leader that changes often, in communication periods of all workers.
_STAY = 2.0
#: A final loss is as low as another if it is at most this multiple.
_AS_LOW = 1.1
#: Replicas that pull each other this little are alone.
_UNPULLED = "lgd(pull=1e-09)"
#: Largest gradient of a central variable at rest.
_RESTS = 1e-6
_EASGD, _LSGD = {"method": "aeasgd"}, {"method": "lsgd"}
_CELLS = ("workers", "window")
_SOONER = Bounds(
    "n = {of[workers]}, period {of[window]}: LSGD is {} times as fast as EASGD",
    *("time_to_target", _EASGD, _LSGD),
    above=1.0,
    per=_CELLS,
    best=Measure("time_to_target"),
)
_AT_LEAST_AS_LOW = Bounds(
    "n = {of[workers]}, period {of[window]}: EASGD ends at {} times LSGD's loss",
    *("train_loss", _EASGD, _LSGD),
    above=1 / _AS_LOW,
    per=_CELLS,
    best=Measure("train_loss"),
)


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
            bool(ends["easgd"] > _RESTS),
        ),
    ]


def not_decelerated(finished: Finished) -> Iterator[Finding]:
    """Compare the times to the target of LGD and EASGD, each at its best strength of the pull, and
    of workers alone.
    """
    seconds = finished.table(RANKING).set_index("method")["time_to_target"]
    unpulled = seconds.pop(_UNPULLED)
    for name, words, is_quick in (
        ("lgd", "LGD's leader", True),
        ("easgd", "EASGD's center", False),
    ):
        of_method = seconds[seconds.index.str.startswith(name)]
        strengths = of_method.index.str.extract(r"=([^,)]+)", expand=False).astype(float)
        of_method = of_method.set_axis(strengths).sort_index()
        listed = ", ".join(f"{value:,.0f}" for value in of_method)
        yield Finding(
            f"{words} is in a well after {of_method.min():,.0f} s at its best strength (of "
            f"{_STRENGTHS}: {listed} s), the best of workers alone after {unpulled:,.0f} s",
            bool(of_method.min() <= unpulled) == is_quick,
        )


def fewer_bytes(finished: Finished) -> Iterator[Finding]:
    """Compare the traffic of LSGD and EASGD."""
    table = finished.table("comparison.csv").set_index("method")["gigabytes"]
    ratio = table["lsgd"] / table["aeasgd"]
    # EASGD's workers move two vectors a visit, and the leader's is one more a round.
    through = ratio + 1 / (2 * finished.config["workers"])
    text = f"LSGD moves {ratio:.2f} times EASGD's bytes if the leader's upload is not counted"
    yield Finding(f"{text}, {through:.2f} times through a server", bool(through < 1))


_LEADERS = (
    "leaders --methods lsgd aeasgd --group-size 16 --window 4 16 --tune 0.2 0.4 0.8 "
    "--gradients 256 --seeds 8",
)
_PAPER = ("leaders --scale paper",)

_WELLS = (
    'leaders --problem "wells({})" --workers 4 --window 1 --tune 0.01 --gradients {} '
    "--methods {} --target 0.01 --seeds {} --x64"
)
_STRENGTHS = "0.01, 0.03, 0.1, 0.2"
_PULLS = f'"lgd(pull=[1e-09, {_STRENGTHS}])" "easgd(alpha=[{_STRENGTHS}])"'
_TILTED = (_WELLS.format("tilt=0.3", 4000, '"lgd(pull=0.005)" "easgd(alpha=0.005)"', 1),)
_UNEVEN = (_WELLS.format("", 1000, _PULLS, 3),)
_SYMMETRIC = (_WELLS.format("starts=[-1.2, 1.2, 0.9, -0.9]", 3000, _PULLS, 1),)
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
        (_SOONER,),
        _PAPER,
        looked=3,
    ),
    Claim(
        "LSGD ends at least as low as EASGD",
        f"{SOURCE}, experiments",
        _LEADERS,
        (_AT_LEAST_AS_LOW,),
        _PAPER,
        looked=3,
    ),
    Claim(
        "The leader changes often, and no worker monopolises the leadership",
        f"{SOURCE}, histogram of leaderships",
        _LEADERS,
        no_monopoly,
        _PAPER,
        looked=3,
    ),
    Claim(
        "LSGD trains ResNet-50 on ImageNet faster than EASGD and data-parallel SGD",
        f"{SOURCE}, experiments",
        "ImageNet cannot be had without registration",
    ),
)
