"""What the classification networks share: initial weights, cross-entropy and accuracy."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def initial_layers(
    key: jax.Array, shapes: Sequence[tuple[int, ...]], gain: float = 1.0, biases: bool = True
) -> list[dict[str, jax.Array]]:
    """Return layers with weights and biases uniform in ±gain/sqrt(fan_in).

    Drawn in float32 whatever the run's precision, so that both precisions start from the same values.

    Parameters
    ----------
    key : jax.Array
        Random key.
    shapes : sequence of tuple of int
        Shape of each layer's weights, units last; ``fan_in`` is the product of the other sizes.
    gain : float
        1 is PyTorch's default, ``sqrt(6)`` suits rectifiers (He et al. 2015, arXiv 1502.01852).
    biases : bool
        Draw the biases too; else they are zero.
    """
    # One draw for all layers: JAX compiles a draw of every other size anew, 0.2 s each.
    sizes = [math.prod(shape) + shape[-1] for shape in shapes]
    draws = jnp.split(jax.random.uniform(key, (sum(sizes),), jnp.float32, -gain, gain), np.cumsum(sizes)[:-1])
    layers = []
    for shape, draw in zip(shapes, draws, strict=True):
        bias, weight = jnp.split(draw / math.sqrt(math.prod(shape[:-1])), [shape[-1]])
        layers.append({"weight": weight.reshape(shape), "bias": bias if biases else jnp.zeros_like(bias)})
    return layers


def cross_entropy(logits: jax.Array, labels: jax.Array, axis: int = -1) -> jax.Array:
    """Return the mean cross-entropy, in nats.

    Parameters
    ----------
    logits : float array
        Classes along ``axis``, examples along the other.
    labels : int array, shape ``[examples]``
        The right classes.
    axis : int
        0 or -1.
    """
    # A product with the one-hot labels: its gradient is elementwise, a gather's is a scatter.
    one_hot = jax.nn.one_hot(labels, logits.shape[axis], dtype=logits.dtype, axis=axis)
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits, axis)) / labels.size


def accuracy(logits: jax.Array, labels: jax.Array, axis: int = -1) -> jax.Array:
    """Return the share of examples whose largest logit is the right class; same shapes as above."""
    right = jnp.argmax(logits, axis).astype(labels.dtype) == labels
    return jnp.mean(right, dtype=logits.dtype)
