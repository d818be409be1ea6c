"""Building blocks of the networks: initial weights, layers with the examples innermost, losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.problems.problem import Problem, SplitLike, mean_in_pieces

_SMALL = 1e-5  # keeps the division by a constant group's variance finite


def initial_layers(
    key: jax.Array, shapes: Sequence[tuple[int, ...]], gain: float = 1.0, biases: bool = True
) -> list[dict[str, jax.Array]]:
    """Draw layers with weights and biases uniform in ±gain/sqrt(fan_in).

    The draws are in float32 whatever the run's precision, so that both precisions start from the
    same values.

    ``key``: random key. ``shapes``: shape of each layer's weights, units last; ``fan_in`` is the
    product of the other sizes. ``gain``: 1 is PyTorch's default, ``sqrt(6)`` suits rectifiers (He
    et al. 2015, arXiv 1502.01852). ``biases``: draw the biases too; else they are zero.
    """
    # One draw for all layers: JAX compiles each other size of draw separately, 0.2 s each.
    sizes = [math.prod(shape) + shape[-1] for shape in shapes]
    draws = jnp.split(
        jax.random.uniform(key, (sum(sizes),), jnp.float32, -gain, gain), np.cumsum(sizes)[:-1]
    )
    layers = []
    for shape, draw in zip(shapes, draws, strict=True):
        bias, weight = jnp.split(draw / math.sqrt(math.prod(shape[:-1])), [shape[-1]])
        layers.append(
            {"weight": weight.reshape(shape), "bias": bias if biases else jnp.zeros_like(bias)}
        )
    return layers


def dense(layer: dict[str, jax.Array], activity: jax.Array) -> jax.Array:
    """Map shape ``[inputs, examples]`` to ``[units, examples]``."""
    return layer["weight"].T @ activity + layer["bias"][:, None]


def convolve(
    layer: dict[str, jax.Array], activity: jax.Array, stride: int = 1, padding: int = 0
) -> jax.Array:
    """Convolve with a square kernel, and add the bias if the layer has one.

    From ``[channels, height, width, examples]`` to ``[units, new height, new width, examples]``.

    The patches are stacked in front and the examples are innermost: on a CPU the convolution is
    then one matrix product over long rows, three times faster than XLA's convolution, which is even
    slower inside a loop.

    ``layer``: ``"weight"``, shape ``[kernel, kernel, channels, units]``, and optionally ``"bias"``,
    shape ``[units]``. ``stride``: pixels between two patches. ``padding``: zeros on every side.
    """
    kernel, _, channels, units = layer["weight"].shape
    if padding:
        activity = jnp.pad(activity, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    _, height, width, examples = activity.shape
    rows, columns = (height - kernel) // stride + 1, (width - kernel) // stride + 1

    def shifted(i: int, j: int) -> jax.Array:
        down, right = i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1
        return activity[:, i:down:stride, j:right:stride]

    patches = jnp.stack([shifted(i, j) for i in range(kernel) for j in range(kernel)])
    weight = layer["weight"].reshape(kernel**2 * channels, units)
    result = (weight.T @ patches.reshape(kernel**2 * channels, -1)).reshape(
        units, rows, columns, examples
    )
    return result + layer["bias"][:, None, None, None] if "bias" in layer else result


def max_pool(activity: jax.Array) -> jax.Array:
    """Take maxima over 2x2 pixels of ``[channels, height, width, examples]``; drop odd rows."""
    channels, height, width, examples = activity.shape
    even = activity[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(channels, height // 2, 2, width // 2, 2, examples).max((2, 4))


def group_norm(layer: dict[str, jax.Array], activity: jax.Array, groups: int) -> jax.Array:
    """Standardise each example's groups of channels, then scale and shift by channel.

    ``layer``: ``"scale"`` and ``"bias"``, shape ``[channels]``. ``groups``: number of groups;
    divides the channels.

    References
    ----------
    Wu and He 2018, arXiv 1803.08494.
    """
    grouped = activity.reshape(groups, -1, *activity.shape[1:])
    centred = grouped - grouped.mean((1, 2, 3), keepdims=True)
    variance = jnp.mean(centred * centred, (1, 2, 3), keepdims=True)
    standardised = (centred * jax.lax.rsqrt(variance + _SMALL)).reshape(activity.shape)
    return standardised * layer["scale"][:, None, None, None] + layer["bias"][:, None, None, None]


def cross_entropy(logits: jax.Array, labels: jax.Array, axis: int = -1) -> jax.Array:
    """Compute the mean cross-entropy, in nats.

    ``logits``: classes along ``axis``, examples along the other. ``labels``: shape ``[examples]``,
    the true classes. ``axis``: 0 or -1.
    """
    # A product with the one-hot labels has an elementwise gradient; a gather's gradient is a
    # scatter.
    one_hot = jax.nn.one_hot(labels, logits.shape[axis], dtype=logits.dtype, axis=axis)
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits, axis)) / labels.size


def accuracy(logits: jax.Array, labels: jax.Array, axis: int = -1) -> jax.Array:
    """Compute the share of examples whose largest logit is the true class; see `cross_entropy`."""
    right = jnp.argmax(logits, axis).astype(labels.dtype) == labels
    return jnp.mean(right, dtype=logits.dtype)


def classifier(
    name: str,
    init: Callable[[jax.Array], Any],
    scores: Callable[..., jax.Array],
    train: dict[str, np.ndarray],
    test: dict[str, np.ndarray],
    config: dict[str, Any],
    split: SplitLike,
    piece: int,
    evaluated: int | None = None,
) -> Problem:
    """Return the problem of a network's cross-entropy on labelled images.

    ``scores``: ``scores(params, images, key)``, the logits, shape ``[classes, examples]``; the key
    draws the training noise, such as dropout, and is None in evaluations. ``config``: with
    ``batch_size``. ``piece``: examples evaluated at a time.
    ``evaluated``: number of examples evaluated, the first ones; default all.
    """

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return cross_entropy(scores(params, batch["image"], key), batch["label"], axis=0)

    def evaluate(params: Any, state: Any, data: Any) -> dict[str, jax.Array]:
        def means(part: Any) -> dict[str, jax.Array]:
            logits, labels = scores(params, part["image"], None), part["label"]
            return {
                "loss": cross_entropy(logits, labels, 0),
                "accuracy": accuracy(logits, labels, 0),
            }

        return mean_in_pieces(means, jax.tree.map(lambda a: a[:evaluated], data), piece)

    return Problem(
        name,
        init,
        loss,
        evaluate,
        train,
        test,
        config["batch_size"],
        split=split,
        predict=lambda params, data: scores(params, data["image"], None).T,
        config=config,
    )
