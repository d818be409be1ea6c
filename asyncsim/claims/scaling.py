"""Claims of "Distributed Deep Learning Using Synchronous SGD" (Das et al. 2016, arXiv
1602.06709).
"""

from collections.abc import Sequence

import pandas as pd

from asyncsim.claims.claim import Claim, Finding
from asyncsim.study.finished import Finished

SOURCE = "Das et al. 2016"
#: The published speed-ups of VGG-A by the number of nodes.
_SPEED_UPS = {64: 53, 128: 90}
#: Relative error of a speed-up that agrees, and of one that an overhead predicts from another.
_AGREES, _PREDICTS = 0.1, 0.03


def _speed_up(finished: Finished, nodes: int, way: str = "hybrid") -> float:
    rows = finished.summary
    return float(rows.loc[(rows["nodes"] == nodes) & (rows["way"] == way), "speed_up"].iloc[0])


def speed_ups(finished: Finished) -> list[Finding]:
    """Compare the speed-ups of VGG-A with the published ones, with the assumed speeds."""
    findings = []
    for nodes, published in _SPEED_UPS.items():
        ours = _speed_up(finished, nodes)
        findings.append(
            Finding(
                f"{nodes} nodes: {ours:.0f} times as fast with the assumed speeds, published "
                f"{published:g}",
                abs(ours / published - 1) <= _AGREES,
            )
        )
    return findings


def one_mechanism(finished: Finished) -> list[Finding]:
    """Judge whether an overhead, fitted to 64 nodes, predicts 128 nodes."""
    table = finished.table("implied.csv")
    (nodes, fitted), (largest, published) = _SPEED_UPS.items()
    speed_up = table[table["nodes"] == largest].set_index("overhead")["speed_up"]
    predicts = (speed_up / published - 1).abs() <= _PREDICTS
    agreeing, contradicting = (
        ", ".join(f"{name} ({value:.0f})" for name, value in speed_up[mask].items()) or "none"
        for mask in (predicts, ~predicts)
    )
    return [
        Finding(
            f"fitted to {fitted} on {nodes} nodes, these overheads predict {published} on "
            f"{largest} nodes: {agreeing}; these do not: {contradicting}",
            bool(predicts.any()),
        )
    ]


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


_SCALING = ("scaling",)

CLAIMS: Sequence[Claim] = (
    Claim(
        "VGG-A is 53 times as fast on 64 nodes and 90 times on 128",
        f"{SOURCE}, abstract",
        _SCALING,
        speed_ups,
        _SCALING,
    ),
    Claim(
        "One overhead explains both points of VGG-A",
        f"{SOURCE}, abstract",
        _SCALING,
        one_mechanism,
        _SCALING,
    ),
    Claim(
        "The balance equations predict all five published speed-ups",
        f"{SOURCE}, abstract; the speeds of its nodes and links are unknown, and searched",
        _SCALING,
        all_points,
        _SCALING,
    ),
    Claim(
        "Convolutions scale by data parallelism, dense layers do not",
        f"{SOURCE}, balance equations",
        _SCALING,
        convolutions,
        _SCALING,
    ),
    Claim(
        "Dividing dense layers inside groups of nodes scales further",
        f"{SOURCE}, hybrid parallelism",
        _SCALING,
        hybrid_wins,
        _SCALING,
    ),
    Claim(
        "Dividing dense layers inside groups of nodes moves fewer bytes",
        f"{SOURCE}, hybrid parallelism",
        _SCALING,
        less_traffic,
        _SCALING,
    ),
)
