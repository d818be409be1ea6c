"""How far synchronous SGD scales: computing against communication, without
gradients.

The analysis of Das et al. (2016, arXiv 1602.06709): convolutions are data parallel; fully connected
layers may be divided inside groups of nodes, which then exchange activations instead of gradients;
a layer's communication overlaps with the computation until the layer is used again, and the rest is
a bubble. Prints the layers, the efficiency by number of nodes beside the published speed-ups, and
the implications of the published points: which overhead, fitted to 64 nodes, predicts 128. Writes
these as tables, and a figure. Searches the speed of a node, the bandwidth and the latency that come
nearest to all published speed-ups, with bandwidth alone and with a latency.

The speeds of the nodes and of the network are not among the published numbers used here: --flops
and --bandwidth are assumptions.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError, require_count, require_nonnegative
from asyncsim.base.files import read_table
from asyncsim.base.units import BYTES, RATES, SECONDS, SPEEDS, positive, quantity
from asyncsim.clusters.collectives import (
    NETWORKS,
    Layer,
    best_groups,
    bubbles,
    exposed_time,
    hybrid_bytes,
)
from asyncsim.clusters.laws import Gamma
from asyncsim.study import results
from asyncsim.study.columns import Column, Columns, titled
from asyncsim.study.config import check_values
from asyncsim.study.finished import present
from asyncsim.study.jobs import folder_of
from asyncsim.theory import barrier_time

#: Files with the layers, the published speed-ups, and overheads that may explain them.
LAYERS, PUBLISHED, IMPLIED = "layers.csv", "published.csv", "implied.csv"
#: File with the speeds that come nearest to all published speed-ups.
FITTED = "fitted.csv"


class Point(NamedTuple):
    """A published speed-up of Das et al. over one node, and its set-up."""

    network: str
    examples: int  #: of all nodes; 0: unknown
    nodes: int
    speed_up: float
    layers: str
    node_examples: int  #: assumed where ``examples`` is unknown: 1,024 and 256 in all
    link: float | None = None  #: bytes per second, if stated


POINTS = (
    Point("VGG-A", 256, 64, 53.0, "vgg_a", 4),
    Point("VGG-A", 512, 128, 90.0, "vgg_a", 4),
    Point("OverFeat-FAST", 256, 64, 42.0, "overfeat_fast", 4),
    Point("speech, 7 fully connected layers", 0, 16, 6.5, "speech", 64),
    Point("VGG-A, virtual machines, 10 Gbit Ethernet", 0, 16, 14.0, "vgg_a", 16, 1.25e9),
)
#: The two points of VGG-A with equally many examples a node.
_FITTED, _PREDICTED = POINTS[:2]
#: Operations and bytes per second, and seconds of a message, to try: from, to, number.
_TRIED = ((1e11, 1e14, 13), (1e8, 1e11, 16), (1e-6, 1e-3, 10))
#: Numbers of nodes for which the overheads predict a speed-up.
_IMPLIED_NODES = (8, 16, 32, 64, 128, 256)
#: Most nodes: their divisors are computed in a fraction of a second.
_MOST_NODES = 10**12
#: Passes of a gradient: forward, backward by inputs and backward by weights.
_PASSES = 3

if TYPE_CHECKING:  # texts with units are numbers once they are checked
    Speed: TypeAlias = float
    Rate: TypeAlias = float
    Seconds: TypeAlias = float
    Size: TypeAlias = float
else:
    Speed = Rate = Seconds = Size = float | str


@dataclass(frozen=True)
class Config:
    """Options of the study of scaling."""

    network: Literal["vgg_a", "resnet50", "overfeat_fast", "speech", "gpt2_small", "llama_7b"] = (
        "vgg_a"
    )
    """Network whose layers are analysed; an example of a transformer is a sequence."""
    layers: Path | None = None
    """File with your own layers in the order of the forward pass, instead of a network: a CSV with
    the columns layer, parameters, operations (of the forward pass of one example) and, if fully
    connected layers may be divided, activations (input values of one example).
    """
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Nodes of the clusters, one after the other."""
    examples: int = 4
    """Examples of a minibatch on each node; 4 at both published points of VGG-A."""
    flops: Speed = 1.7e12
    """Floating-point operations that a node computes a second, 300 TFLOP/s say; an assumption."""
    bandwidth: Rate = 5e9
    """Of a node's link, each way, 100 Gbit/s say; an assumption."""
    latency: Seconds = 0.0
    """Of a message; a layer's all-reduce between G groups has 2 (G - 1) one after the
    other.
    """
    overlap: float = 0.0
    """Part of the sending that overlaps with receiving sums, 0 to 1."""
    value_bytes: int = 4
    """Bytes of a value: 2 for gradients in bfloat16."""
    bucket: Size | None = None
    """Limit of buckets as in PyTorch, 25 MB say: gradients are sent in buckets, and the next
    forward pass waits for all of them; data parallel alone. By default each layer is a message.
    """
    out: Path | None = None
    """Folder for the results, new or empty. By default results/scaling, then results/scaling-2,
    ...
    """

    @property
    def is_published(self) -> bool:
        """Whether the published speed-ups are of this network."""
        return self.network == "vgg_a" and self.layers is None

    def check(self) -> None:
        """Check the options."""
        check_values("nodes", self.nodes)
        if self.layers is not None and self.network != "vgg_a":
            raise InputError(
                f"network = {self.network!r}: layers are given, too; leave one of them out"
            )
        for count in self.nodes:
            if require_count("nodes", count) > _MOST_NODES:
                raise InputError(f"nodes = {count}: must be at most {_MOST_NODES:,}")
        require_count("examples", self.examples)
        require_count("value_bytes", self.value_bytes)
        for name, units in (("flops", SPEEDS), ("bandwidth", RATES), ("bucket", BYTES)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive(name, value, units))
        latency = quantity("latency", self.latency, SECONDS)
        object.__setattr__(self, "latency", require_nonnegative("latency", latency))
        if require_nonnegative("overlap", self.overlap) > 1:
            raise InputError(f"overlap = {self.overlap:g}: is a part; give at most 1")


def run(config: Config) -> pd.DataFrame:
    """Run the study; return its summary, a row per number of nodes and way to divide the work."""
    config.check()
    layers = NETWORKS[config.network] if config.layers is None else read_layers(config.layers)
    ways = ("data parallel", "hybrid") if config.bucket is None else ("data parallel",)
    with folder_of("scaling", config) as folder:
        of_layers = [
            layer_table(config, layers, nodes, way) for way in ways for nodes in config.nodes
        ]
        tables = {LAYERS: pd.concat(of_layers, ignore_index=True)}
        summary = iterations(config, tables[LAYERS])
        parts = _parts(config, of_layers[-1], summary)
        if config.is_published:
            published = [_published(), explanations(), nearest_speeds()]
            tables |= dict(zip((PUBLISHED, IMPLIED, FITTED), published, strict=True))
            parts += _published_parts(*published)
        present(folder, {**tables, results.SUMMARY: summary}, *parts, verdict=_verdict(summary))
    return summary


def _verdict(summary: pd.DataFrame) -> str:
    """Say how much faster the most nodes are, by the way of dividing the work."""
    largest = summary[summary["nodes"] == summary["nodes"].max()]
    ways = [f"{row.way} {number_text(row.speed_up)}" for row in largest.itertuples()]
    return f"speed-up of {counted(int(summary['nodes'].max()), 'node')}: {', '.join(ways)}"


def read_layers(file: Path) -> tuple[Layer, ...]:
    """Read layers from a CSV file with the columns of ``--layers``.

    Raises
    ------
    InputError
        The file cannot be read, lacks a column, or has a row without a number.
    """
    subject = f"layers = {str(file)!r}"
    try:
        table = read_table(file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no table"
        raise InputError(f"{subject}: cannot be read ({why}); give a CSV file") from None
    if missing := sorted({"layer", "parameters", "operations"} - set(table)):
        raise InputError(
            f"{subject}: lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; give "
            "layer, parameters, operations"
        )
    texts = table.reindex(columns=["parameters", "operations", "activations"]).fillna(0)
    numbers = texts.apply(pd.to_numeric, errors="coerce")
    for row, column in np.argwhere(~((numbers >= 0) & (numbers < np.inf))):
        raise InputError(
            f"{subject}: {texts.columns[column]} in line {row + 2} is "
            f"'{texts.iloc[row, column]}'; give a number from zero on"
        )
    if not numbers[["parameters", "operations"]].sum().all():
        raise InputError(f"{subject}: no layer has parameters, or none has operations; give both")
    values = numbers.astype(float).itertuples(index=False, name=None)
    return tuple(Layer(str(name), *row) for name, row in zip(table["layer"], values, strict=True))


def layer_table(config: Config, layers: tuple[Layer, ...], nodes: int, way: str) -> pd.DataFrame:
    """Tabulate the layers in the order of the forward pass.

    Columns: ``nodes``, ``way``, ``layer``; ``groups`` of nodes, equal to ``nodes`` for a
    data-parallel layer; ``computing`` (s), ``bytes`` that each node moves, ``communicating`` (s)
    and ``bubble`` (s).
    """
    minibatch = nodes * config.examples
    seconds = [_PASSES * layer.operations * config.examples / config.flops for layer in layers]
    groups = [
        best_groups(layer, nodes, minibatch, config.overlap)
        if way == "hybrid" and layer.is_dense and layer.activations
        else nodes
        for layer in layers
    ]
    divided = list(zip(layers, groups, strict=True))
    moved = [
        hybrid_bytes(layer, nodes, count, minibatch, config.overlap, config.value_bytes)
        for layer, count in divided
    ]
    spent = [
        size / config.bandwidth + 2 * (count - 1) * config.latency
        for size, count in zip(moved, groups, strict=True)
    ]
    if config.bucket is None:
        bubble = bubbles(layers, math.fsum(seconds), spent)
    else:  # the next forward pass waits for all buckets

        def seconds_of(size: float) -> float:
            return size / config.bandwidth + 2 * (nodes - 1) * config.latency

        waits = exposed_time(layers, math.fsum(seconds), sum(moved), seconds_of, config.bucket)
        bubble = np.r_[waits if nodes > 1 else 0.0, np.zeros(len(layers) - 1)]
    return pd.DataFrame(
        {
            "nodes": nodes,
            "way": way,
            "layer": [layer.name for layer in layers],
            "groups": groups,
            "computing": seconds,
            "bytes": moved,
            "communicating": spent,
            "bubble": bubble,
        }
    )


def iterations(config: Config, layers: pd.DataFrame) -> pd.DataFrame:
    """Sum up the layers of each cluster."""
    costs = ["computing", "communicating", "bytes", "bubble"]
    table = layers.groupby(["nodes", "way"], sort=False)[costs].sum().reset_index()
    seconds = table["computing"] + table["bubble"]
    efficiency = table["computing"] / seconds
    return table.assign(
        efficiency=efficiency,
        speed_up=table["nodes"] * efficiency,
        examples_per_second=table["nodes"] * config.examples / seconds,
    )


def explanations() -> pd.DataFrame:
    """Predict speed-ups under several overheads per iteration, each with one constant fitted at 64
    nodes.

    An overhead is relative to a node's computing time. Columns: ``overhead`` (its growth),
    ``constant`` (fitted), ``nodes``, ``speed_up`` (at 64 nodes the published one by construction).
    """
    excess = _FITTED.nodes / _FITTED.speed_up - 1
    overheads: dict[str, Callable[..., float]] = {
        "bandwidth: constant": lambda c, count: c,
        "latency of a tree: c log2 N": lambda c, count: c * math.log2(count),
        "latency of a ring: c (N - 1)": lambda c, count: c * (count - 1),
        "activations of one group: c N": lambda c, count: c * count,
        "slowest at the barrier: gamma of cv c": lambda c, count: (
            barrier_time(Gamma(1.0, c), count) - 1
        ),
    }
    rows = []
    for name, overhead in overheads.items():
        of_fitted = functools.partial(overhead, count=_FITTED.nodes)
        constant = brentq(lambda c, of: of(c) - excess, 0.001, 1.0, args=(of_fitted,))
        rows += [
            (name, constant, count, count / (1 + overhead(constant, count)))
            for count in _IMPLIED_NODES
        ]
    return pd.DataFrame(rows, columns=["overhead", "constant", "nodes", "speed_up"])


def nearest_speeds() -> pd.DataFrame:
    """Search the speeds whose hybrid speed-ups are nearest to all published ones.

    The largest absolute logarithm of predicted over published is minimised, from the best point of
    a grid. Columns:
    ``model`` (bandwidth alone, or with a latency), ``flops``, ``bandwidth``, ``latency``,
    ``network``, ``nodes``, ``published``, ``predicted``. A stated bandwidth of a link takes
    precedence.
    """
    prepared, rows = [], []
    for point in POINTS:
        config = Config(examples=point.node_examples, flops=1.0, bandwidth=1.0, latency=0.0)
        layers = NETWORKS[point.layers]
        table = layer_table(config, layers, point.nodes, "hybrid")
        rounds = 2 * (table["groups"].to_numpy() - 1)
        sizes = table["computing"].sum(), table["bytes"].to_numpy(), rounds
        prepared.append((layers, point, *sizes))
    published = np.array([point.speed_up for point in POINTS])

    def predicted(flops: float, bandwidth: float, latency: float = 0.0) -> np.ndarray:
        speed_ups = []
        for layers, point, operations, size, rounds in prepared:
            computing = operations / flops
            spent = size / (point.link or bandwidth) + rounds * latency
            waiting = bubbles(layers, computing, spent).sum()
            speed_ups.append(point.nodes * computing / (computing + waiting))
        return np.array(speed_ups)

    def off(logs: Sequence[float]) -> float:
        return float(np.abs(np.log(predicted(*np.exp(logs)) / published)).max())

    grids = [np.log(np.geomspace(*tried)) for tried in _TRIED]
    for model, searched in (("bandwidth alone", grids[:2]), ("with a latency", grids)):
        start = min(itertools.product(*searched), key=off)
        speeds = np.exp(minimize(off, start, method="Nelder-Mead").x).tolist()
        predictions = predicted(*speeds).tolist()
        speeds += [0.0] * (len(grids) - len(speeds))
        rows += [
            (model, *speeds, point.network, point.nodes, point.speed_up, value)
            for point, value in zip(POINTS, predictions, strict=True)
        ]
    columns = ["model", "flops", "bandwidth", "latency", "network", "nodes"]
    return pd.DataFrame(rows, columns=[*columns, "published", "predicted"])


def _parts(config: Config, layers: pd.DataFrame, summary: pd.DataFrame) -> list[str | pd.DataFrame]:
    nodes, stage = int(layers["nodes"].iloc[0]), layers["layer"].str.partition(".")[0]
    costs = ["computing", "bytes", "communicating", "bubble"]
    by_stage = layers.groupby(stage, sort=False).agg(
        {"groups": "min"} | dict.fromkeys(costs, "sum")
    )
    by_stage[costs] *= [1e3, 1e-6, 1e3, 1e3]
    columns: Columns = [
        "layer",
        "groups",
        Column("computing", "computing (ms)"),
        Column("bytes", "MB a node"),
        *(Column(name, f"{name} (ms)") for name in ("communicating", "bubble")),
    ]
    wide = summary.pivot(index="nodes", columns="way", values=["efficiency", "speed_up"])
    wide.columns = [f"{ratio.replace('_', '-')}, {way}" for ratio, way in wide.columns]
    name = config.network if config.layers is None else config.layers.name
    return [
        f"{name}, {config.examples} examples a node, assumed {config.flops:g} operations/s and "
        f"{config.bandwidth:g} bytes/s a node\nlayers on {nodes} nodes, {layers['way'].iloc[0]}",
        titled(by_stage.rename_axis("layer").reset_index(), columns),
        "all layers",
        titled(wide.reset_index()),
    ]


def _published() -> pd.DataFrame:
    """Tabulate the published speed-ups."""
    table = pd.DataFrame(POINTS)[["network", "examples", "nodes", "speed_up"]]
    return table.assign(efficiency=table["speed_up"] / table["nodes"])


def _published_parts(
    published: pd.DataFrame, implied: pd.DataFrame, fitted: pd.DataFrame
) -> list[str | pd.DataFrame]:
    """Return the published points, and their implications."""
    ends = {64: "at 64 (fitted)", 128: "at 128 (published: 90)"}
    implied = implied.pivot(index=["overhead", "constant"], columns="nodes", values="speed_up")
    implied = implied[[*ends]].rename(columns=ends).sort_values(ends[128], ascending=False)
    by_model = fitted.pivot(index=["network", "nodes", "published"], columns="model")["predicted"]
    speeds = "; ".join(
        f"{row.model}: {row.flops:.2g} operations/s, {row.bandwidth:.2g} bytes/s, "
        f"{row.latency:.2g} s a message"
        for row in fitted.drop_duplicates("model").itertuples()
    )
    points = ("network", "nodes", Column("speed_up", "speed-up"), "efficiency")
    constant, worth = (point.nodes / point.speed_up for point in (_PREDICTED, _FITTED))
    return [
        "published (Das et al. 2016)",
        titled(published, points),
        "implications of the two points of VGG-A: both have 4 examples a node, so that a node "
        "computes and moves the same amount at 64 and 128. Bandwidth alone predicts one efficiency "
        f"for both; the second needs iterations {constant / worth:.2f} times as long. Speed-ups "
        "with one overhead each:",
        titled(implied.reset_index()),
        "Each overhead has one constant c, fitted at 64 nodes. Overheads proportional to the nodes "
        "predict the point at 128: consistent, but no proof of a mechanism, with one constant and "
        "one point.",
        f"speeds nearest to all published speed-ups ({speeds})",
        titled(by_model.reset_index()),
    ]
