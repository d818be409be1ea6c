"""CIFAR-10 with three networks of the field: a small CNN, ResNet-20, and one like AlexNet."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import require_choice
from asyncsim.problems.data import as_images, load_cifar10
from asyncsim.problems.layers import (
    classifier,
    convolve,
    dense,
    group_norm,
    initial_layers,
    max_pool,
)
from asyncsim.problems.problem import Problem, SplitLike, split_record

# Means and standard deviations of the training pixels, in [0, 1]: red, green, blue.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)
_EVALUATED = 10_000
_EVALUATION_PIECE = 50  # images; their patches fit a CPU's cache
_GROUPS = 8
_GAIN = math.sqrt(6)

_SMALL = {
    "conv1": (3, 3, 3, 32),
    "conv2": (3, 3, 32, 64),
    "conv3": (3, 3, 64, 64),
    "dense1": (1024, 64),
    "dense2": (64, 10),
}
_ALEXNET = {
    "conv1": (5, 5, 3, 24),
    "conv2": (5, 5, 24, 64),
    "conv3": (3, 3, 64, 96),
    "conv4": (3, 3, 96, 96),
    "conv5": (3, 3, 96, 64),
    "fc6": (1024, 512),
    "fc7": (512, 512),
    "fc8": (512, 10),
}
_STAGES = (16, 32, 64)  # channels
_BLOCKS = 3  # a stage, of two convolutions each


def cifar10(
    batch_size: int = 64,
    split: SplitLike = None,
    data_dir: str | os.PathLike | None = None,
    network: str = "small",
) -> Problem:
    """Return CIFAR-10 and a convolutional network with rectifiers and cross-entropy.

    ``"small"``, 122,570 parameters: convolutions 3x3 without padding to 32, 64 and 64 channels,
    max-pool 2 after the first two; dense 1024 to 64 to 10.

    ``"resnet20"``, 269,722 parameters: He et al. 2016, arXiv 1512.03385, section 4.2. A convolution
    to 16 channels, three stages of three blocks of two convolutions, with 16, 32 and 64 channels,
    all 3x3 with padding and without biases; shortcuts without parameters (option A: every second
    pixel, channels of zeros added); global mean; dense 64 to 10. Group normalisation in 8 groups
    (Wu and He 2018, arXiv 1803.08494) replaces batch normalisation: it has the same number of
    parameters, but an example's loss depends on that example and the parameters alone. Running
    statistics would differ from worker to worker, a second kind of staleness.

    ``"alexnet"``, 1,026,666 parameters: Krizhevsky, Sutskever and Hinton 2012 for images of 32x32,
    a quarter of the channels and an eighth of the dense units. ``conv1`` 5x5 to 24, max-pool,
    ``conv2`` 5x5 to 64, max-pool, ``conv3`` to ``conv5`` 3x3 to 96, 96 and 64, max-pool, all with
    padding; ``fc6`` 1024 to 512, ``fc7`` 512 to 512, ``fc8`` to 10. No strides, overlapping pools,
    local response normalisation or dropout.

    Initial weights are uniform in ±sqrt(6/fan_in), in the last layer in ±1/sqrt(fan_in); biases
    zero. Pixels are standardised channel by channel; there is no augmentation.

    50,000 and 10,000 examples ``{"image": [3, 32, 32], "label": []}``; the pixels are stored as
    bytes, a quarter of the memory, and standardised on use. ``evaluate`` gives ``"loss"`` (nats)
    and ``"accuracy"`` over at most the first 10,000 examples: a fifth of the training set, which is
    in random order; the whole would take five times as long as the test set.

    Parameters
    ----------
    data_dir : path, optional
        Folder that contains ``cifar10/``; default the folder in ``ASYNCSIM_DATA``, then a download.
    """
    require_choice("network", network, NETWORKS)
    *train, test = load_cifar10(data_dir).values()
    return cifar10_from_arrays(
        _examples(np.concatenate(train)), _examples(test), batch_size, split, network
    )


def cifar10_from_arrays(
    train: Mapping[str, np.ndarray],
    test: Mapping[str, np.ndarray],
    batch_size: int = 64,
    split: SplitLike = None,
    network: str = "small",
) -> Problem:
    """Return the problem of `cifar10` on the caller's examples.

    ``train`` and ``test``: dicts of ``"image"``, uint8, shape ``[examples, 3, 32, 32]``;
    ``"label"``, int32, 0 to 9.
    """
    init, logits = NETWORKS[require_choice("network", network, NETWORKS)]

    return classifier(
        "cifar10",
        init,
        lambda params, images, key: logits(params, _standardised(images, params)),
        as_images("train", train, (3, 32, 32)),
        as_images("test", test, (3, 32, 32)),
        {"batch_size": batch_size, **split_record(split), "network": network},
        split,
        _EVALUATION_PIECE,
        _EVALUATED,
    )


def _examples(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"image": records[:, 1:].reshape(-1, 3, 32, 32), "label": records[:, 0].astype(np.int32)}


def _standardised(images: jax.Array, params: Any) -> jax.Array:
    """Standardise bytes, ``[examples, 3, 32, 32]``, into pixels, ``[3, 32, 32, examples]``.

    The result has the precision of the parameters, which the replay chooses.
    """
    dtype = jax.tree.leaves(params)[0].dtype
    mean, std = (np.asarray(values)[:, None, None, None] for values in (_MEAN, _STD))
    pixels = jnp.moveaxis(images, 0, -1).astype(dtype)
    return pixels * jnp.asarray(1 / (255 * std), dtype) - jnp.asarray(mean / std, dtype)


def _layers(
    key: jax.Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, jax.Array]]:
    layers = initial_layers(key, list(shapes.values()), _GAIN, biases=False)
    layers[-1]["weight"] /= _GAIN  # small first scores: a loss of about log(10)
    return dict(zip(shapes, layers, strict=True))


def _small_logits(params: Any, images: jax.Array) -> jax.Array:
    """Compute class scores, ``[10, examples]``, from ``images``, ``[3, 32, 32, examples]``."""
    activity = jax.nn.relu(max_pool(convolve(params["conv1"], images)))
    activity = jax.nn.relu(max_pool(convolve(params["conv2"], activity)))
    activity = jax.nn.relu(convolve(params["conv3"], activity))
    activity = activity.reshape(-1, activity.shape[-1])
    return dense(params["dense2"], jax.nn.relu(dense(params["dense1"], activity)))


def _alexnet_logits(params: Any, images: jax.Array) -> jax.Array:
    """Compute class scores, ``[10, examples]``, from ``images``, ``[3, 32, 32, examples]``."""
    activity = jax.nn.relu(max_pool(convolve(params["conv1"], images, padding=2)))
    activity = jax.nn.relu(max_pool(convolve(params["conv2"], activity, padding=2)))
    for name in ("conv3", "conv4"):
        activity = jax.nn.relu(convolve(params[name], activity, padding=1))
    activity = jax.nn.relu(max_pool(convolve(params["conv5"], activity, padding=1)))
    activity = activity.reshape(-1, activity.shape[-1])
    for name in ("fc6", "fc7"):
        activity = jax.nn.relu(dense(params[name], activity))
    return dense(params["fc8"], activity)


def _resnet_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of ResNet-20's weights by layer name, such as ``stage2_block1_conv1``."""
    shapes: dict[str, tuple[int, ...]] = {"conv": (3, 3, 3, _STAGES[0])}
    inputs = _STAGES[0]
    for stage, channels in enumerate(_STAGES, 1):
        for block in range(1, _BLOCKS + 1):
            shapes[f"stage{stage}_block{block}_conv1"] = (3, 3, inputs, channels)
            shapes[f"stage{stage}_block{block}_conv2"] = (3, 3, channels, channels)
            inputs = channels
    return shapes | {"dense": (inputs, 10)}


def _init_resnet(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    params = _layers(key, _resnet_shapes())
    for name, layer in params.items():
        if "conv" in name:
            layer["scale"] = jnp.ones_like(layer["bias"])
    return params


def _resnet_logits(params: Any, images: jax.Array) -> jax.Array:
    """Compute class scores, ``[10, examples]``, from ``images``, ``[3, 32, 32, examples]``."""

    def normalised(name: str, activity: jax.Array, stride: int = 1) -> jax.Array:
        layer = params[name]
        # The normalisation subtracts the mean, so a bias of the convolution would have no effect.
        return group_norm(
            layer, convolve({"weight": layer["weight"]}, activity, stride, padding=1), _GROUPS
        )

    activity = jax.nn.relu(normalised("conv", images))
    for stage in range(1, len(_STAGES) + 1):
        for block in range(1, _BLOCKS + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            inside = jax.nn.relu(normalised(f"stage{stage}_block{block}_conv1", activity, stride))
            inside = normalised(f"stage{stage}_block{block}_conv2", inside)
            activity = jax.nn.relu(inside + _shortcut(activity, stride))
    return dense(params["dense"], activity.mean((1, 2)))


def _shortcut(activity: jax.Array, stride: int) -> jax.Array:
    """Take every ``stride``-th pixel and pad the channels with zeros, half on each side."""
    padding = activity.shape[0] * (stride - 1) // 2
    return jnp.pad(activity[:, ::stride, ::stride], ((padding, padding), (0, 0), (0, 0), (0, 0)))


class _Network(NamedTuple):
    init: Callable[[jax.Array], dict[str, dict[str, jax.Array]]]
    logits: Callable[[Any, jax.Array], jax.Array]


NETWORKS = {
    "small": _Network(lambda key: _layers(key, _SMALL), _small_logits),
    "resnet20": _Network(_init_resnet, _resnet_logits),
    "alexnet": _Network(lambda key: _layers(key, _ALEXNET), _alexnet_logits),
}
