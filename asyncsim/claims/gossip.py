"""Claims of AD-PSGD (arXiv 1710.06952), SGP (arXiv 1811.10792), D-PSGD and Base-2 graphs."""

from collections.abc import Sequence
from typing import Any

from asyncsim.claims.claim import SPEEDS_UNKNOWN, Bounds, Claim
from asyncsim.study.ranking import Measure

#: An insensitive method becomes slower by less than this factor.
_INSENSITIVE = 1.2
#: The published range of AD-PSGD's speed-up, and a number of gradients per epoch that is the same.
_LEAST_SPEED_UP, _LARGEST_SPEED_UP, _AS_MANY = 4.0, 8.0, 1.2
#: Test accuracy that SGP loses at most.
_LOST = 0.012
_TIME, _ACCURACY = Measure("time_to_target"), Measure("test_accuracy", "most")


def _compare(text: str, of: str, to: str, column: str = "time_to_target", **bounds: Any) -> Bounds:
    """Compare two methods, each at its best learning rate and on its best topology."""
    best = _ACCURACY if column == _ACCURACY.name else _TIME
    over = ("learning_rate", "topology")
    return Bounds(text, column, {"method": of}, {"method": to}, best=best, over=over, **bounds)


def _slowed(cause: str, name: str, method: str, **bounds: Any) -> Bounds:
    """Compare a method's times in two studies."""
    return _compare(f"{cause} makes {name} {{}} times as slow", method, method, **bounds)


def _gossip(methods: str, collective: str = "ring", further: str = "") -> str:
    """Return a command; only pairs need the complete graph, as directed ones leave them out."""
    complete = '"complete()" ' if "adpsgd" in methods else ""
    return (
        f"gossip --methods {methods} \"batch_sgd(policy='barrier(collective={collective})')\" "
        f'--topology {complete}"one_peer_exponential()" '
        f"--workers 16 --steps 50 --tune 0.2 0.4 0.8 --target 0.9 --seeds 9{further}"
    )


_EVEN = _gossip("sgp osgp adpsgd")
_SLOW = _gossip("sgp adpsgd", further=' --compute "[gamma(5, 0.2)] + [gamma(1, 0.2)]*15"')
# Without latency and bandwidth every all-reduce takes no time. With latency alone a tree takes less
# than a ring: 4 s a round here, not 15 s.
_LATE = _gossip("sgp osgp", "tree", " --latency 0.5")
_STRAGGLER, _LATENCY = "a worker 5 times as slow", "a latency of half a gradient's time"
_FASTER = "{} is {{}} times as fast as all-reduce by a tree"
_IMAGENET = "ImageNet cannot be had without registration"

CLAIMS: Sequence[Claim] = (
    Claim(
        "With a slow worker AD-PSGD is 4 to 8 times faster than all-reduce, per epoch the same",
        "Lian et al. 2018, AD-PSGD",
        (_SLOW,),
        (
            _compare(
                "AD-PSGD is {} times as fast as all-reduce",
                *("batch_sgd", "adpsgd"),
                above=_LEAST_SPEED_UP,
                below=_LARGEST_SPEED_UP,
            ),
            _compare(
                "it needs {} times the gradients",
                *("adpsgd", "batch_sgd", "gradients_to_target"),
                below=_AS_MANY,
            ),
        ),
        _IMAGENET,
    ),
    Claim(
        "SGP and AD-PSGD are insensitive to a slow worker, all-reduce is not",
        "Assran et al. 2019, SGP; Lian et al. 2018",
        (_SLOW, _EVEN),
        (
            _slowed(_STRAGGLER, "SGP", "sgp", below=_INSENSITIVE),
            _slowed(_STRAGGLER, "AD-PSGD", "adpsgd", below=_INSENSITIVE),
            _slowed(_STRAGGLER, "all-reduce", "batch_sgd", above=_INSENSITIVE),
        ),
        _IMAGENET,
    ),
    Claim(
        "SGP and overlap SGP are insensitive to delays, all-reduce is not",
        "Assran et al. 2019, SGP",
        (_LATE, _EVEN),
        (
            _slowed(_LATENCY, "overlap SGP", "osgp", below=_INSENSITIVE),
            _slowed(_LATENCY, "SGP", "sgp", below=_INSENSITIVE),
            _slowed(_LATENCY, "all-reduce by a tree", "batch_sgd", above=_INSENSITIVE),
        ),
        _IMAGENET,
    ),
    Claim(
        "On a slow network SGP is faster than all-reduce",
        "Assran et al. 2019, SGP",
        (_LATE,),
        (
            _compare(_FASTER.format("SGP"), "batch_sgd", "sgp", above=1.0),
            _compare(_FASTER.format("overlap SGP"), "batch_sgd", "osgp", above=1.0),
        ),
        _IMAGENET,
    ),
    Claim(
        "SGP is at most 1.2 points less accurate than all-reduce",
        "Assran et al. 2019, SGP",
        (_EVEN,),
        (
            _compare(
                "SGP's test accuracy minus all-reduce's is {}",
                *("sgp", "batch_sgd", "test_accuracy"),
                above=-_LOST,
                ratio=False,
            ),
        ),
        _IMAGENET,
    ),
    Claim(
        "On heterogeneous data Base-2 graphs end more accurate than one-peer exponential graphs",
        "Takezawa et al. 2023, arXiv 2305.11420",
        (
            'gossip --workers 25 --methods dpsgd --topology "base2()" "one_peer_exponential()" '
            "--split 0.1 --tune 0.2 0.4 --steps 80 --seeds 15",
        ),
        (
            Bounds(
                "test accuracy with Base-2 is {} higher",
                "test_accuracy",
                {"topology": "base2()"},
                {"topology": "one_peer_exponential()"},
                above=0.0,
                ratio=False,
                best=_ACCURACY,
            ),
        ),
        "VGG is not among the problems",
    ),
    Claim(
        "SGP keeps 88.6 % of its efficiency from 4 to 32 nodes",
        "Assran et al. 2019, SGP",
        SPEEDS_UNKNOWN,
    ),
)
