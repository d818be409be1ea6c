"""MNIST with the convolutional network of the GEM paper (Hermans and Louppe 2018, appendix A)."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError, require_nonnegative
from asyncsim.problems.data import load_mnist
from asyncsim.problems.layers import accuracy, cross_entropy, initial_layers
from asyncsim.problems.problem import Problem, mean_in_pieces

_MEAN, _STD = 0.1307, 0.3081  # of the training pixels, in [0, 1]
_KERNEL = 5
_EVALUATION_PIECE = 100  # images whose patches stay in a CPU's cache: 1.6 times as fast as 1,000
_SHAPES = {
    "conv1": (_KERNEL, _KERNEL, 1, 10),
    "conv2": (_KERNEL, _KERNEL, 10, 20),
    "dense1": (320, 300),
    "dense2": (300, 200),
    "dense3": (200, 10),
}


def mnist(
    batch_size: int = 64,
    dropout: float = 0.5,
    sharded: bool = False,
    data_dir: str | os.PathLike | None = None,
) -> Problem:
    """Return MNIST with the GEM paper's network, 163,790 parameters.

    Convolution 1 to 10 channels, 5x5, max-pool 2, rectifier; convolution 10 to 20, dropout of whole
    channels, max-pool 2, rectifier; dense 320 to 300 to 200 to 10; cross-entropy. Pixels are scaled to
    [0, 1] and standardised. Initial weights and biases are uniform in ±1/sqrt(fan_in).

    Parameters
    ----------
    batch_size : int
        Examples a minibatch.
    dropout : float
        Probability that a channel of an example is dropped, from 0 to below 1. Evaluation drops none.
    sharded : bool
        Each worker draws from its own shard instead of from the whole set.
    data_dir : path, optional
        Folder that holds ``mnist/``; default the one named by ``ASYNCSIM_DATA``, then a download.

    Returns
    -------
    Problem
        60,000 and 10,000 examples ``{"image": [28, 28], "label": []}``; ``evaluate`` gives ``"loss"``
        (nats) and ``"accuracy"``.

    Raises
    ------
    InputError
        Options out of range; data that are absent and cannot be downloaded, or damaged.
    """
    if require_nonnegative("dropout", dropout) >= 1:
        raise InputError(f"dropout = {dropout}: must be below 1, the probability that a channel is dropped")
    arrays = load_mnist(data_dir)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return cross_entropy(_logits(params, batch["image"], dropout, key), batch["label"], axis=0)

    def evaluate(params: Any, state: Any, data: Any) -> dict[str, jax.Array]:
        def means(part: Any) -> dict[str, jax.Array]:
            logits, labels = _logits(params, part["image"]), part["label"]
            return {"loss": cross_entropy(logits, labels, 0), "accuracy": accuracy(logits, labels, 0)}

        return mean_in_pieces(means, data, _EVALUATION_PIECE)

    return Problem(
        name="mnist",
        init=_init,
        loss=loss,
        evaluate=evaluate,
        train=_examples(arrays, "train"),
        test=_examples(arrays, "t10k"),
        batch_size=batch_size,
        sharded=sharded,
        map_on_cpu=True,
        config={"batch_size": batch_size, "dropout": dropout, "sharded": sharded},
    )


def _examples(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    image = arrays[f"{part}-images-idx3-ubyte"].astype(np.float32)
    image /= 255
    image -= _MEAN
    image /= _STD
    return {"image": image, "label": arrays[f"{part}-labels-idx1-ubyte"].astype(np.int32)}


def _init(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    return dict(zip(_SHAPES, initial_layers(key, list(_SHAPES.values())), strict=True))


def _logits(params: Any, images: jax.Array, dropout: float = 0.0, key: jax.Array | None = None) -> jax.Array:
    """Return the class scores, shape ``[10, examples]``.

    The examples are the innermost axis all through: on a CPU a convolution is then one matrix product
    over long rows, three times quicker than XLA's own, also inside a loop (where XLA's own slows down).

    Parameters
    ----------
    params : dict
        The layers.
    images : float array, shape ``[examples, 28, 28]``
        Standardised pixels.
    dropout : float
        Probability that a channel is dropped.
    key : jax.Array, optional
        Random key; needed with dropout.
    """
    activity = jnp.moveaxis(images, 0, -1)[None]
    activity = jax.nn.relu(_pool(_convolve(params["conv1"], activity)))
    activity = _pool(_convolve(params["conv2"], activity))
    if dropout > 0:
        # After pooling, not before as in the paper: a channel's factor is not negative and the same
        # everywhere, so both give the same and this is a quarter of the work.
        activity = _drop_channels(activity, dropout, key)
    activity = jax.nn.relu(activity).reshape(-1, activity.shape[-1])
    activity = jax.nn.relu(_dense(params["dense1"], activity))
    activity = jax.nn.relu(_dense(params["dense2"], activity))
    return _dense(params["dense3"], activity)


def _dense(layer: dict[str, jax.Array], activity: jax.Array) -> jax.Array:
    """From shape ``[inputs, examples]`` to ``[units, examples]``."""
    return layer["weight"].T @ activity + layer["bias"][:, None]


def _convolve(layer: dict[str, jax.Array], activity: jax.Array) -> jax.Array:
    """From shape ``[channels, height, width, examples]`` to the same of the layer, without padding."""
    channels, height, width, examples = activity.shape
    height, width = height - _KERNEL + 1, width - _KERNEL + 1
    patches = jnp.stack([activity[:, i : i + height, j : j + width] for i in range(_KERNEL) for j in range(_KERNEL)])
    weight = layer["weight"].reshape(_KERNEL**2 * channels, -1)
    units = weight.T @ patches.reshape(_KERNEL**2 * channels, -1)
    return units.reshape(-1, height, width, examples) + layer["bias"][:, None, None, None]


def _pool(activity: jax.Array) -> jax.Array:
    """Return the maximum of every 2x2 pixels; ``[channels, height, width, examples]``, even sizes."""
    channels, height, width, examples = activity.shape
    return activity.reshape(channels, height // 2, 2, width // 2, 2, examples).max((2, 4))


def _drop_channels(activity: jax.Array, dropout: float, key: jax.Array | None) -> jax.Array:
    """Set whole channels of an example to zero and scale the others up by 1/(1 - dropout)."""
    assert key is not None
    channels, _, _, examples = activity.shape
    # Drawn in float32 whatever the run's precision, so that both precisions drop the same channels.
    kept = jax.random.uniform(key, (channels, 1, 1, examples), jnp.float32) >= dropout
    return jnp.where(kept, activity / (1 - dropout), 0.0)
