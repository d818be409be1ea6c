"""The next character of a text, with a small transformer: a language model for a CPU."""

import functools
import hashlib
import math
import os
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.declared import Count, in_range
from asyncsim.base.errors import InputError, require_path
from asyncsim.problems.layers import accuracy, cross_entropy, initial_layers
from asyncsim.problems.problem import Problem, SplitLike, mean_in_pieces, split_record

_BUNDLED = Path(__file__).with_name("queues.txt")
_TEST_SHARE = 0.1
_EXPANSION = 4  # hidden units of a block's perceptron, in widths
_EVALUATION_PIECE = 64  # windows; their attention fits a CPU's cache
_EMBEDDED = 0.1  # standard deviation of the embeddings' initial values
_SMALL = 1e-5  # keeps the division by a constant vector's variance finite


@in_range
def characters(
    batch_size: int = 32,
    split: SplitLike = None,
    text: Annotated[str | os.PathLike, require_path] | None = None,
    context: Count = 64,
    width: Count = 64,
    heads: Count = 4,
    layers: Count = 2,
    stride: Count | None = None,
) -> Problem:
    """Return a causal transformer that predicts each next character of a text.

    It sees at most ``context`` characters before the predicted one.

    A decoder in the form of GPT-2 (Radford et al. 2019): learnt embeddings of characters and
    positions; ``layers`` blocks, each with attention to the characters so far and a perceptron of
    ``4 width`` units (GELU, by its hyperbolic tangent), both after a layer normalisation and added
    to their input; a last normalisation, and a dense layer to the scores. No dropout; the embedding
    is not tied to the last layer. By default, with the bundled text's 57 characters, it has 111,545
    parameters. Initial weights are uniform in ±sqrt(3/fan_in), variance ``1/fan_in``; weights whose
    outputs are added to the stream are divided by ``sqrt(2 layers)``. Embeddings have standard
    deviation 0.1; biases are zero.

    The alphabet is the set of the text's characters. The last tenth of the text is the test set. A
    training example is a window of ``context + 1`` characters that begins at a multiple of
    ``stride``. The test windows follow each other, so that each test character is predicted once
    (except the first, and an incomplete last window).

    Examples ``[context + 1]`` of int32; ``evaluate`` gives ``"loss"``, nats a character, and
    ``"accuracy"``.

    Parameters
    ----------
    batch_size : int
        Windows a minibatch.
    text : path, optional
        Any text file in UTF-8. Default: the bundled essay on queues and staleness.
    context : int
        Largest number of characters that a prediction sees.
    width, heads, layers : int
        Size of a character's vector, attention heads, which must divide it, and blocks.
    stride : int, optional
        Characters from one training window to the next; default an eighth of the context.
    """
    sizes = {"context": context, "width": width, "heads": heads, "layers": layers}
    if width % heads:
        raise InputError(f"heads = {heads}: must divide width = {width}")
    stride = stride or max(1, context // 8)
    path = _BUNDLED if text is None else Path(text)
    content = _read(path)
    alphabet, codes = _encode(content)
    train, test = _split(path, codes, context, stride)

    def scores(params: Any, windows: jax.Array) -> jax.Array:
        return _logits(params, windows[:, :-1], heads, layers).reshape(-1, len(alphabet))

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(scores(params, batch), batch[:, 1:].reshape(-1))

    def evaluate(params: Any, state: Any, data: jax.Array) -> dict[str, jax.Array]:
        def means(part: jax.Array) -> dict[str, jax.Array]:
            logits, labels = scores(params, part), part[:, 1:].reshape(-1)
            return {"loss": cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

        return mean_in_pieces(means, data, _EVALUATION_PIECE)

    return Problem(
        name="characters",
        init=functools.partial(
            _init, alphabet=len(alphabet), context=context, width=width, layers=layers
        ),
        loss=loss,
        evaluate=evaluate,
        train=train,
        test=test,
        batch_size=batch_size,
        split=split,
        config={
            "batch_size": batch_size,
            **split_record(split),
            "text": path.name,
            "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
            "characters": len(codes),
            "alphabet": "".join(alphabet),
            **sizes,
            "stride": stride,
        },
    )


def _read(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a device may have no end
            raise InputError(f"text = {str(path)!r}: not a file; give a text file")
        # As bytes, so that the line ends are the same on every system.
        content = path.read_bytes().decode()
    except OSError as error:
        raise InputError(
            f"text = {str(path)!r}: cannot be read ({error.strerror}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"text = {str(path)!r}: not text in UTF-8 ({error}); convert it, or give another"
        ) from error
    if "\0" in content:
        raise InputError(
            f"text = {str(path)!r}: holds zero bytes, so it is not text; give another file"
        )
    return content


def _encode(content: str) -> tuple[list[str], np.ndarray]:
    """Return the sorted alphabet of a text, and its characters as positions in it, int32."""
    points, codes = np.unique(
        np.array(list(content), dtype="U1").view(np.uint32), return_inverse=True
    )
    return [chr(point) for point in points], codes.astype(np.int32)


def _split(
    path: Path, codes: np.ndarray, context: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut training and test windows, shape ``[examples, context + 1]``."""
    cut = len(codes) - int(_TEST_SHARE * len(codes))
    if min(cut, len(codes) - cut) <= context:
        raise InputError(
            f"text = {str(path)!r}: too short, {len(codes)} characters; its last tenth must hold "
            "more than "
            f"context = {context}: give a longer text, or a shorter context"
        )
    windows = np.lib.stride_tricks.sliding_window_view
    return windows(codes[:cut], context + 1)[::stride].copy(), windows(codes[cut:], context + 1)[
        ::context
    ].copy()


def _init(key: jax.Array, alphabet: int, context: int, width: int, layers: int) -> dict[str, Any]:
    hidden = _EXPANSION * width
    block = {
        "attention": (width, 3 * width),
        "attended": (width, width),
        "expand": (width, hidden),
        "contract": (hidden, width),
    }
    names = [f"block{i}" for i in range(1, layers + 1)]
    shapes = [
        (alphabet, width),
        (context, width),
        *(list(block.values()) * layers),
        (width, alphabet),
    ]
    characters, positions, *inner, last = initial_layers(key, shapes, math.sqrt(3), biases=False)
    # A table's rows are not summed over, so their number is no fan-in.
    params: dict[str, Any] = {
        "characters": characters["weight"] * (_EMBEDDED * math.sqrt(alphabet)),
        "positions": positions["weight"] * (_EMBEDDED * math.sqrt(context)),
    }
    for i, name in enumerate(names):
        weights = dict(zip(block, inner[len(block) * i : len(block) * (i + 1)], strict=True))
        for added in ("attended", "contract"):
            weights[added]["weight"] /= math.sqrt(2 * layers)
        params[name] = {"norm1": _norm(width), **weights, "norm2": _norm(width)}
    return {**params, "norm": _norm(width), "last": last}


def _norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width, jnp.float32), "bias": jnp.zeros(width, jnp.float32)}


def _logits(params: Any, codes: jax.Array, heads: int, layers: int) -> jax.Array:
    """Compute the scores of each next character, shape ``[windows, context, alphabet]``.

    Parameters
    ----------
    params : dict
        The layers.
    codes : int array, shape ``[windows, context]``
        The characters.
    heads, layers : int
        Attention heads, and blocks.
    """
    table = params["characters"]
    # A product with the one-hot characters has a product as its gradient; a gather has a scatter.
    stream = jax.nn.one_hot(codes, table.shape[0], dtype=table.dtype) @ table + params["positions"]
    for block in (params[f"block{i}"] for i in range(1, layers + 1)):
        stream = stream + _attend(block, _normalised(block["norm1"], stream), heads)
        hidden = jax.nn.gelu(_dense(block["expand"], _normalised(block["norm2"], stream)))
        stream = stream + _dense(block["contract"], hidden)
    return _dense(params["last"], _normalised(params["norm"], stream))


def _attend(block: Any, stream: jax.Array, heads: int) -> jax.Array:
    """Attend from each position to itself and earlier ones; shape ``[windows, context, width]``."""
    windows, context, width = stream.shape
    mixed = _dense(block["attention"], stream).reshape(windows, context, 3, heads, width // heads)
    query, key, value = jnp.moveaxis(
        mixed, (2, 3), (0, 2)
    )  # each [windows, heads, context, width / heads]
    fit = query @ key.swapaxes(-1, -2) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((context, context), bool))
    share = jax.nn.softmax(jnp.where(causal, fit, -jnp.inf))
    return _dense(block["attended"], (share @ value).swapaxes(1, 2).reshape(stream.shape))


def _dense(layer: dict[str, jax.Array], activity: jax.Array) -> jax.Array:
    return activity @ layer["weight"] + layer["bias"]


def _normalised(layer: dict[str, jax.Array], activity: jax.Array) -> jax.Array:
    """Standardise each vector, then scale and shift it."""
    centred = activity - activity.mean(-1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + _SMALL) * layer["scale"] + layer["bias"]
