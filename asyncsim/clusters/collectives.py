"""All-reduces: their time, their traffic, and the part of the time that computing hides.

An all-reduce gives all nodes the sum of their messages, without a server. `asyncsim.barrier` takes
one by its name, ``barrier(collective=ring)``: a round then lasts until the slowest worker has
computed, plus the all-reduce. `exposed_time` cuts the message into layers or buckets, for the study
`scaling`: only the time that computing does not hide remains.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncsim.base.declared import each
from asyncsim.base.errors import InputError, require_choice, require_count, require_nonnegative
from asyncsim.clusters.network import as_matrix, is_matrix

#: The all-reduces by their names.
COLLECTIVES = ("ring", "tree", "halving_doubling", "shared_link", "two_level")
#: All-reduces whose time between several sites is known.
BETWEEN_SITES = ("ring", "tree", "halving_doubling", "two_level")
#: Limit of the first bucket of PyTorch's DistributedDataParallel, bytes; the others have one of 25
#: MiB by default.
FIRST_BUCKET = 1024 * 1024
#: Share of the forward pass in the time of a gradient: each of the two backward passes costs as
#: much.
_FORWARD = 1 / 3


def collective_time(
    kind: str,
    message_bytes: float,
    nodes: int,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    *,
    sites: Sequence[int] | None = None,
    far_bandwidth: float | Sequence[Sequence[float]] | None = None,
    far_latency: float | Sequence[Sequence[float]] | None = None,
) -> float:
    """Return the time (s) of an all-reduce that all nodes start at once.

    With ``P`` nodes, ``M`` bytes, ``B`` bytes per second and ``L`` seconds of latency:

    - ``"ring"``: ``2 (P - 1) (M / (P B) + L)``.
    - ``"tree"``, not pipelined: ``2 ceil(log2 P) (M / B + L)``.
    - ``"halving_doubling"``, recursive: ``2 (P - 1) / P M / B + 2 log2(P) L`` for a power of two.
      Otherwise the next lower power, and each surplus node sends its message to another before, and
      receives the sum after: ``2 (M / B + L)`` more.
    - ``"shared_link"``, a server whose link carries one message at a time: ``P M / B`` up, as much
      down, and ``2 L``.
    - ``"two_level"``: a ring inside each site, a ring of one leader from each, and a broadcast
      inside each site, ``ceil(log2 p) (M / B + L)`` in one of ``p`` nodes. The largest site sets
      the time of the first and the last.

    Parameters
    ----------
    kind : str
        One of `COLLECTIVES`.
    message_bytes : float
        Bytes of each node's message, and of the sum.
    nodes : int
        Number of nodes; 1 takes no time, except with a server.
    bandwidth : float
        Bytes per second of each node's link, the same each way.
    latency : float
        Seconds of each message.
    sites : sequence of int, optional
        Nodes of each site, at least 1; ``"two_level"`` requires it. The formulas then hold only
        inside a site, and messages are timed one by one. A ``"ring"`` leaves each site once, and a
        node sends its next message after it has sent and received the previous one. In a ``"tree"``
        and in ``"halving_doubling"`` two nodes begin a message, or an exchange, when both have
        finished their previous ones. Nodes ``i`` and ``i + 2**k`` are partners, the largest ``k``
        first, then in the reverse order.
    far_bandwidth, far_latency : float or sequence of sequence of float, optional
        Between two sites; by default as inside. A matrix holds the values from site ``i`` (row) to
        site ``j`` (column), with 0 on the diagonal.

    References
    ----------
    Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
    MPICH".
    """
    require_choice("collective", kind, COLLECTIVES)
    size = require_nonnegative("message_bytes", message_bytes, "bytes")
    nodes = require_count("nodes", nodes)
    near = size / _rate("bandwidth", bandwidth), require_nonnegative("latency", latency, "seconds")
    if sites is None and kind == "two_level":
        raise InputError("collective = 'two_level': needs the nodes of each site; give sites")
    counts = [nodes] if sites is None else _sites(kind, sites, nodes)
    rate = _between("far_bandwidth", far_bandwidth, bandwidth, len(counts), _rate)
    seconds = functools.partial(require_nonnegative, unit="seconds")
    links = size / rate, _between("far_latency", far_latency, latency, len(counts), seconds)
    if kind == "shared_link":
        return 2 * nodes * near[0] + 2 * near[1]
    if kind == "ring" or (kind == "two_level" and len(counts) == 1):
        return _ring_time(counts, *links)
    if kind == "two_level":
        inside = max(_equal_ring_time(p, *near) + _doublings(p) * sum(near) for p in counts)
        return inside + _ring_time([1] * len(counts), *links)
    site, free = np.repeat(np.arange(len(counts)), counts), np.zeros(nodes)
    for source, to, share in _steps(kind, nodes):
        transfer, travel = (link[site[source], site[to]] for link in links)
        end = np.maximum(free[source], free[to]) + share * transfer + travel
        free[to] = end
        free[source] = np.maximum(free[source], end)
    return float(free.max())


def _ring_time(counts: Sequence[int], transfer: np.ndarray, latency: np.ndarray) -> float:
    """Return the time (s) of a ring through sites; links have shape ``[sites, sites]``."""
    nodes = sum(counts)
    if len(counts) == 1:
        return _equal_ring_time(nodes, transfer[0, 0], latency[0, 0])
    site = np.repeat(np.arange(len(counts)), counts)
    successor = np.roll(site, -1)
    sends, travels = transfer[site, successor] / nodes, latency[site, successor]
    begin = np.zeros(nodes)
    for _ in range(2 * (nodes - 1)):
        arrive = np.roll(begin + sends + travels, 1)
        begin = np.maximum(begin + sends, arrive)
    return float(arrive.max())


def _equal_ring_time(nodes: int, transfer: float, latency: float) -> float:
    """Return the time (s) of a ring of equal links."""
    return float(2 * (nodes - 1) * (transfer / nodes + latency))


def _steps(kind: str, nodes: int) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Return the steps of a tree or of halving and doubling.

    Each has the senders, the receivers, and the share of the message that is sent.
    """
    steps = []
    if kind == "halving_doubling" and (surplus := nodes - 2 ** (nodes.bit_length() - 1)):
        nodes -= surplus
        steps.append((np.arange(surplus) + nodes, np.arange(surplus), 1.0))
    for stride in (2**k for k in reversed(range(_doublings(nodes)))):
        if kind == "tree":
            lower = np.arange(min(stride, nodes - stride))
            steps.append((lower + stride, lower, 1.0))
        else:
            steps.append((np.arange(nodes), np.arange(nodes) ^ stride, stride / nodes))
    return [*steps, *((to, source, share) for source, to, share in reversed(steps))]


def _between(
    argument: str, far: Any, near: float, sites: int, check: Callable[[str, Any], float]
) -> np.ndarray:
    """Return the latency or the bandwidth of each pair of sites, inside on the diagonal."""
    if is_matrix(far):
        values: np.ndarray = np.array(as_matrix(argument, far, sites, check))
    else:
        values = np.full((sites, sites), near if far is None else check(argument, far))
    np.fill_diagonal(values, near)
    return values


class Traffic(NamedTuple):
    """The bytes that an all-reduce sends."""

    total: float  #: sent by all nodes, and by the server if there is one
    busiest: float  #: sent by the node, or the server, that sends the most
    far: float  #: sent between sites


def collective_bytes(
    kind: str, message_bytes: float, nodes: int, sites: Sequence[int] | None = None
) -> Traffic:
    """Return the bytes that an all-reduce sends; arguments as in `collective_time`.

    Ring and, for a power of two, halving-doubling send ``2 (P - 1) / P M`` from each node, which is
    the least possible.
    """
    require_choice("collective", kind, COLLECTIVES)
    size = require_nonnegative("message_bytes", message_bytes, "bytes")
    nodes = require_count("nodes", nodes)
    counts = [nodes] if sites is None else _sites(kind, sites, nodes)
    places = len(counts)
    from_node = 2 * (nodes - 1) / nodes * size
    if kind == "two_level":
        busiest = (
            max(2 * (count - 1) / count + _doublings(count) for count in counts)
            + 2 * (places - 1) / places
        )
        total = 3 * (nodes - places) + 2 * (places - 1)
        return Traffic(total * size, busiest * size, 2 * (places - 1) * size)
    if kind == "shared_link":
        return Traffic(2 * nodes * size, nodes * size, 0.0)
    if kind == "ring":
        return Traffic(nodes * from_node, from_node, places * from_node if places > 1 else 0.0)
    site, sent, far = np.repeat(np.arange(places), counts), np.zeros(nodes), 0.0
    for source, to, share in _steps(kind, nodes):
        sent[source] += share * size
        far += share * size * np.count_nonzero(site[source] != site[to])
    return Traffic(float(sent.sum()), float(sent.max()), float(far))


def _doublings(nodes: int) -> int:
    """Return the number of doublings from 1 to at least ``nodes``."""
    return (nodes - 1).bit_length()


def _rate(argument: str, value: float) -> float:
    if not (isinstance(value, int | float) and value > 0):  # infinite: messages take no time
        raise InputError(f"{argument} = {value!r}: must be above zero (bytes/s)")
    return float(value)


def _sites(kind: str, sites: Sequence[int], nodes: int) -> list[int]:
    counts = list(each(require_count)("sites", sites))
    if sum(counts) != nodes:
        raise InputError(
            f"sites = {counts}: have {sum(counts)} nodes together, and there are {nodes}; give as "
            "many"
        )
    if len(counts) > 1 and kind not in BETWEEN_SITES:
        raise InputError(
            f"collective = {kind!r}: its time between {len(counts)} sites is not known; choose "
            f"from {', '.join(BETWEEN_SITES)}"
        )
    return counts


class Layer(NamedTuple):
    """A layer of a network."""

    name: str
    parameters: float  #: all trained values, weights and others
    #: floating-point operations of the forward pass of one example; a product and its sum are two
    operations: float
    activations: float = 0.0  #: input values of one example

    @property
    def is_dense(self) -> bool:
        """Whether each weight is used once per example."""
        return self.operations <= 2 * self.parameters


def bubbles(
    layers: Sequence[Layer], computing: float, communicating: Sequence[float]
) -> np.ndarray:
    """Return the time (s) that computing waits for each layer's communication, shape ``[layers]``.

    Layer ``k``'s gradient is sent during the backward passes of the layers below it and their
    forward passes in the next iteration: they come between its gradient and the next use of its
    weights, so the first layer's communication cannot hide. All layers share the network, and a
    layer's message precedes the messages of higher layers, which are needed later. Before the
    forward pass of layer ``k`` computing waits for::

        max(0, communication of the layers 1 to j - computation below j), the largest of j = 1, ...,
        k

    No other order of the messages has a shorter total wait.

    Parameters
    ----------
    layers : sequence of Layer
        In the order of the forward pass.
    computing : float
        Seconds of forward and backward pass of a node's minibatch, divided among the layers by
        their operations.
    communicating : sequence of float
        Seconds of each layer's communication.

    References
    ----------
    Das et al. 2016, "Distributed deep learning using synchronous stochastic gradient descent",
    arXiv 1602.06709. There each layer waits for its ``max(0, communication - computation)``, as if
    it had the network alone.
    """
    below = np.cumsum([0.0, *(layer.operations for layer in layers)])[:-1]
    available = computing * below / max(sum(layer.operations for layer in layers), 1e-300)
    waited = np.maximum.accumulate(np.maximum(0.0, np.cumsum(communicating) - available))
    return np.diff(waited, prepend=0.0)


def exposed_time(
    layers: Sequence[Layer],
    computing: float,
    message_bytes: float,
    seconds_of: Callable[[float], float],
    bucket_bytes: float | None = None,
) -> float:
    """Return the time (s) of an iteration's communication that computing does not hide.

    Without buckets each layer is a message, which may take until the layer's next use: the sum of
    `bubbles`. Buckets follow PyTorch's DistributedDataParallel: gradients fill them from the last
    layer to the first; a bucket is full at its limit, 1 MiB for the first one; it is sent once its
    last gradient is computed and the previous bucket is sent; the next forward pass begins when all
    buckets are sent.

    Parameters
    ----------
    layers, computing
        As in `bubbles`.
    message_bytes : float
        Bytes of all layers, divided among them by their parameters.
    seconds_of : function
        From the bytes of a message to the seconds of its all-reduce.
    bucket_bytes : float, optional
        Limit of the buckets; PyTorch's default is 25 MiB.

    References
    ----------
    Li et al. 2020, "PyTorch distributed: experiences on accelerating data parallel training", arXiv
    2006.15704.
    """
    parameters, operations = (
        math.fsum(getattr(layer, field) for layer in layers)
        for field in ("parameters", "operations")
    )
    sizes = [message_bytes * layer.parameters / parameters for layer in layers]
    if bucket_bytes is None:
        return float(bubbles(layers, computing, [seconds_of(size) for size in sizes]).sum())
    time, sent, size, limit = _FORWARD * computing, 0.0, 0.0, min(FIRST_BUCKET, bucket_bytes)
    for place in reversed(range(len(layers))):
        time += (1 - _FORWARD) * computing * layers[place].operations / operations
        size += sizes[place]
        if size >= limit or place == 0:
            sent = max(sent, time) + seconds_of(size)
            size, limit = 0.0, bucket_bytes
    return max(0.0, sent - computing)


def hybrid_bytes(
    layer: Layer, nodes: int, groups: float, minibatch: int, overlap: float = 0.0, width: int = 4
) -> float:
    """Return the bytes that each node moves for a layer in an iteration, with the nodes in groups.

    Inside a group the layer is divided (model parallel) and activations are exchanged; between
    groups the gradients of each part are exchanged (data parallel)::

        2 width activations minibatch / groups + width (2 - overlap) parameters groups / nodes

    With a group for each node, data parallelism, the first term is zero; with one group, the
    second.

    Parameters
    ----------
    layer : Layer
    nodes, groups : int
    minibatch : int
        Examples of all nodes.
    overlap : float
        Share of the sending that overlaps with the receiving, 0 to 1.
    width : int
        Bytes of a value.
    """
    inside = 2 * width * layer.activations * minibatch / groups if groups < nodes else 0.0
    between = width * (2 - overlap) * layer.parameters * groups / nodes if groups > 1 else 0.0
    return inside + between


def best_groups(layer: Layer, nodes: int, minibatch: int, overlap: float = 0.0) -> int:
    """Return the number of equal groups with the fewest bytes per node; the largest among ties."""
    small = [count for count in range(1, math.isqrt(nodes) + 1) if nodes % count == 0]
    counts = sorted({*small, *(nodes // count for count in small)}, reverse=True)
    return min(counts, key=lambda count: hybrid_bytes(layer, nodes, count, minibatch, overlap))


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1, extra: int = 0
) -> Layer:
    """Return a convolution of square images with ``size`` pixels a side, padded to
    ``size / stride``.

    ``extra``: parameters besides the weights: biases, or scales and shifts of a batch
    normalization.
    """
    weights, positions = kernel * kernel * inputs * outputs, math.ceil(size / stride) ** 2
    return Layer(name, weights + extra, 2.0 * weights * positions, float(inputs * size * size))


def _dense(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, (inputs + 1) * outputs, 2.0 * inputs * outputs, float(inputs))


def _vgg_a() -> tuple[Layer, ...]:
    """Return VGG-A for 224 x 224 pixels: Simonyan and Zisserman 2014, arXiv 1409.1556, table 1,
    configuration A.
    """
    layers: list[Layer] = []
    inputs, size = 3, 224
    for block in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for outputs in block:
            layers.append(
                _convolution(f"conv{len(layers) + 1}", inputs, outputs, 3, size, extra=outputs)
            )
            inputs = outputs
        size //= 2  # max pooling
    sizes = (inputs * size * size, 4096, 4096, 1000)
    return (
        *layers,
        *(_dense(f"fc{i + 1}", *pair) for i, pair in enumerate(itertools.pairwise(sizes))),
    )


def _resnet50() -> tuple[Layer, ...]:
    """Return ResNet-50, strides in the first convolution of a block: He et al. 2015, arXiv
    1512.03385, table 1.
    """
    layers, inputs, size = [_convolution("conv1", 3, 64, 7, 224, stride=2, extra=128)], 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=2):
        for block in range(1, blocks + 1):
            stride = 2 if block == 1 and stage > 2 else 1
            name, outputs = f"conv{stage}_{block}", 4 * width
            if block == 1:
                layers.append(
                    _convolution(f"{name}.skip", inputs, outputs, 1, size, stride, 2 * outputs)
                )
            layers.append(_convolution(f"{name}.1", inputs, width, 1, size, stride, 2 * width))
            size //= stride
            layers.append(_convolution(f"{name}.2", width, width, 3, size, extra=2 * width))
            layers.append(_convolution(f"{name}.3", width, outputs, 1, size, extra=2 * outputs))
            inputs = outputs
    return (*layers, _dense("fc", inputs, 1000))


def _transformer(
    blocks: int,
    width: int,
    tokens: int,
    embedding: float,
    attention: float,
    feed_forward: float,
    head: float,
    vocabulary: int,
) -> tuple[Layer, ...]:
    """Return the layers of a decoder; an example is a sequence of ``tokens`` tokens.

    ``embedding``, ``attention``, ``feed_forward``, ``head``: parameters, of which a product with
    each weight costs two operations a token. Scores and weighted values cost ``4 tokens width``
    operations a token and block more, over the whole sequence, as programs compute them.
    """
    activations = float(tokens * width)
    layers = [Layer("embedding", embedding, 0.0, activations)]
    for block in range(1, blocks + 1):
        scores = 4.0 * tokens * tokens * width
        operations = 2.0 * tokens * attention + scores
        layers += [
            Layer(f"block{block}.attention", attention, operations, activations),
            Layer(f"block{block}.mlp", feed_forward, 2.0 * tokens * feed_forward, activations),
        ]
    return (*layers, Layer("head", head, 2.0 * tokens * width * vocabulary, activations))


def _gpt2_small() -> tuple[Layer, ...]:
    """Return GPT-2 small, 124,439,808 parameters, with 1,024 tokens: Radford et al. 2019, table 2.

    The head is the embedding's matrix, whose gradient is complete after the backward pass of the
    embedding; scales and shifts of the last normalization count with it.
    """
    width, vocabulary = 768, 50_257
    normalization = 2 * width
    attention = normalization + width * 3 * width + 3 * width + width * width + width
    feed_forward = normalization + 2 * 4 * width * width + 5 * width
    embedding = (vocabulary + 1024) * width + normalization
    return _transformer(12, width, 1024, embedding, attention, feed_forward, 0.0, vocabulary)


def _llama_7b() -> tuple[Layer, ...]:
    """Return Llama 7B, 6,738,415,616 parameters, with 2,048 tokens: Touvron et al. 2023, arXiv
    2302.13971, table 2; the width of its feed-forward layers, 11,008, is from the published
    program.
    """
    width, vocabulary = 4096, 32_000
    table = vocabulary * width
    attention, feed_forward = width + 4 * width * width, width + 3 * width * 11_008
    return _transformer(32, width, 2048, table, attention, feed_forward, table + width, vocabulary)


def _overfeat_fast() -> tuple[Layer, ...]:
    """Return OverFeat's fast model: Sermanet et al. 2013, arXiv 1312.6229, table 1.

    The first convolution is unpadded, of 231 pixels a side; 224 padded ones have its 56 outputs.
    """
    return (
        _convolution("conv1", 3, 96, 11, 224, stride=4, extra=96),
        _convolution("conv2", 96, 256, 5, 24, extra=256),
        _convolution("conv3", 256, 512, 3, 12, extra=512),
        _convolution("conv4", 512, 1024, 3, 12, extra=1024),
        _convolution("conv5", 1024, 1024, 3, 12, extra=1024),
        _dense("fc1", 1024 * 6 * 6, 3072),
        _dense("fc2", 3072, 4096),
        _dense("fc3", 4096, 1000),
    )


def _speech() -> tuple[Layer, ...]:
    """Return a network of speech recognition with seven hidden layers: Seide, Li and Yu 2011,
    "Conversational speech transcription using context-dependent deep neural networks".
    """
    sizes = (429, *[2048] * 7, 9304)
    return tuple(_dense(f"fc{i + 1}", *pair) for i, pair in enumerate(itertools.pairwise(sizes)))


#: Layers of published networks, in the order of the forward pass.
NETWORKS: dict[str, tuple[Layer, ...]] = {
    "vgg_a": _vgg_a(),
    "resnet50": _resnet50(),
    "gpt2_small": _gpt2_small(),
    "llama_7b": _llama_7b(),
    "overfeat_fast": _overfeat_fast(),
    "speech": _speech(),
}
