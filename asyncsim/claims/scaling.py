"""Claims of "Distributed Deep Learning Using Synchronous SGD" (Das et al. 2016, arXiv
1602.06709).
"""

from collections.abc import Sequence

import pandas as pd

from asyncsim.claims.claim import SPEEDS_UNKNOWN, Claim, Finding
from asyncsim.study.finished import Finished

SOURCE = "Das et al. 2016"
#: Relative error of a speed-up that agrees.
_AGREES = 0.1


def _speed_up(finished: Finished, nodes: int, way: str = "hybrid") -> float:
    rows = finished.summary
    return float(rows.loc[(rows["nodes"] == nodes) & (rows["way"] == way), "speed_up"].iloc[0])


def all_points(finished: Finished) -> list[Finding]:
    """Judge whether one choice of speeds predicts all published speed-ups."""
    findings = []
    for model, rows in finished.table("fitted.csv").groupby("model", sort=False):
        first = rows.iloc[0]
        numbers = ", ".join(
            f"{row.predicted:.3g} for {row.published:g} ({row.network.partition(',')[0]}, "
            f"{row.nodes} nodes)"
            for row in rows.itertuples()
        )
        findings.append(
            Finding(
                f"{model}: the nearest speeds, {first['flops'] / 1e9:.0f} Gflop/s, "
                f"{first['bandwidth'] / 1e9:.2g} GB/s and {1e3 * first['latency']:.2g} ms a "
                f"message, predict {numbers}",
                bool(((rows["predicted"] / rows["published"] - 1).abs() <= _AGREES).all()),
            )
        )
    return findings


def convolutions(finished: Finished) -> list[Finding]:
    """Compare the bubbles of convolutions and of dense layers, all data parallel."""
    table = finished.table("layers.csv")
    rows = table[(table["way"] == "data parallel") & (table["nodes"] == 128)]
    dense = rows["layer"].str.startswith("fc")
    share = rows["communicating"].groupby(dense).sum() / rows["computing"].groupby(dense).sum()
    bubble = rows["bubble"].groupby(dense).sum()
    return [
        Finding(
            f"on 128 nodes convolutions communicate for {share[False]:.2g} of their computing "
            f"time, and the nodes wait {1e3 * bubble[False]:.2g} ms for them",
            bool(share[False] < 1),
        ),
        Finding(
            f"dense layers communicate for {share[True]:.0f} times their computing time, and the "
            f"nodes wait {1e3 * bubble[True]:.0f} ms",
            bool(share[True] > 1),
        ),
    ]


def hybrid_wins(finished: Finished) -> list[Finding]:
    """Compare hybrid and data-parallel speed-ups."""
    hybrid, data = (_speed_up(finished, 128, way) for way in ("hybrid", "data parallel"))
    text = f"128 nodes are {hybrid:.0f} times as fast as one with groups, {data:.0f} times without"
    return [Finding(text, hybrid > data)]


def _bytes_of(finished: Finished, way: str) -> pd.Series:
    table = finished.table("layers.csv")
    rows = table[(table["way"] == way) & (table["nodes"] == 128)]
    return rows.set_index("layer")["bytes"]


def less_traffic(finished: Finished) -> list[Finding]:
    """Compare the bytes that dense layers move, hybrid and data parallel."""
    hybrid, data = _bytes_of(finished, "hybrid"), _bytes_of(finished, "data parallel")
    dense = data.index[data.index.str.startswith("fc")]
    return [
        Finding(
            f"{name} moves {hybrid[name] / 1e6:.0f} MB instead of {data[name] / 1e6:.0f} MB",
            bool(hybrid[name] < data[name]),
        )
        for name in dense
    ]


_SCALING = tuple(f"scaling --bandwidth {rate}" for rate in ("5e8", "5e9", "5e10"))
_ONE_POINT = (
    "one of two points fits an overhead, and the other cannot distinguish overheads: the latency "
    "of a ring and the activations of a group both predict 90"
)

CLAIMS: Sequence[Claim] = (
    Claim(
        "VGG-A is 53 times as fast on 64 nodes and 90 times on 128",
        f"{SOURCE}, abstract",
        SPEEDS_UNKNOWN,
    ),
    Claim(
        "One overhead explains both points of VGG-A",
        f"two numbers of {SOURCE}, abstract",
        _ONE_POINT,
        ours=True,
    ),
    Claim(
        "The balance equations predict all five published speed-ups",
        f"five numbers of {SOURCE}, abstract; the speeds are searched",
        _SCALING[1:2],
        all_points,
        _SCALING[1:2],
        ours=True,
    ),
    Claim(
        "Convolutions scale by data parallelism, dense layers do not",
        f"{SOURCE}, balance equations",
        _SCALING,
        convolutions,
        _SCALING,
        assumption="bandwidth",
    ),
    Claim(
        "Dividing dense layers inside groups of nodes scales further",
        f"{SOURCE}, hybrid parallelism",
        _SCALING,
        hybrid_wins,
        _SCALING,
        assumption="bandwidth",
    ),
    Claim(
        "Dividing dense layers inside groups of nodes moves fewer bytes",
        f"{SOURCE}, hybrid parallelism",
        _SCALING[1:2],
        less_traffic,
        _SCALING[1:2],
    ),
)
