"""Claims of Parle (Chaudhari et al. 2017, arXiv 1707.00424) and Entropy-SGD (arXiv 1611.01838)."""

from collections.abc import Sequence

from asyncsim.claims.claim import Bounds, Claim
from asyncsim.replays.run import Run
from asyncsim.study.ranking import Measure

SOURCE = "Chaudhari et al. 2017"

#: "Significantly improved" error rates: at most this multiple of data-parallel SGD's.
_SIGNIFICANT = 0.9
#: "About half" of the gradients.
_HALF = 1.5
_TIME, _GRADIENTS = (Measure(f"{name}_to_target") for name in ("time", "gradients"))
_PARLE, _PARALLEL = {"method": "parle"}, {"method": "data_parallel"}


def test_error(run: Run) -> float:
    """Return the test error at the end of a run."""
    return 1 - float(run.evaluations["test_accuracy"].iloc[-1])


_REPLICAS = "replicas --methods parle entropy_sgd sgd --tune 0.03 0.1 0.3 --seeds 10"
_LATENCIES = tuple(
    f"replicas --methods parle --tune 0.03 0.1 0.3 --seeds 10 --latency {seconds}"
    for seconds in (0, 1, 3)
)
_UNKNOWN = "wide residual networks with augmentation are not among the problems"

CLAIMS: Sequence[Claim] = (
    Claim(
        "Parle is 2 to 4 times faster than data-parallel SGD",
        f"{SOURCE}, abstract",
        _LATENCIES,
        (
            Bounds(
                "Parle is {} times as fast",
                *("time_to_target", _PARALLEL, _PARLE),
                above=2.0,
                below=4.0,
                best=_TIME,
            ),
        ),
        _UNKNOWN,
        looked=4,
        assumption="latency",
    ),
    Claim(
        "Parle ends with a significantly lower error than data-parallel SGD",
        f"{SOURCE}, abstract",
        (_REPLICAS,),
        (
            Bounds(
                "Parle's test error is {} times data-parallel SGD's",
                *(test_error, _PARLE, _PARALLEL),
                below=_SIGNIFICANT,
                best=Measure("test_error"),
            ),
        ),
        _UNKNOWN,
        looked=4,
    ),
    Claim(
        "Parle communicates less often",
        f"{SOURCE}, abstract",
        (_REPLICAS,),
        (
            Bounds(
                "data-parallel SGD needs {} times the rounds",
                *("rounds_to_target", _PARALLEL, _PARLE),
                above=1.0,
                best=_TIME,
            ),
        ),
        _UNKNOWN,
        looked=4,
    ),
    Claim(
        "Entropy-SGD needs about half the effective epochs of SGD",
        "Chaudhari et al. 2016, Entropy-SGD",
        (_REPLICAS,),
        (
            Bounds(
                "SGD needs {} times the gradients",
                *("gradients_to_target", {"method": "sgd"}, {"method": "entropy_sgd"}),
                above=_HALF,
                best=_GRADIENTS,
            ),
        ),
        _UNKNOWN,
        looked=4,
    ),
)
