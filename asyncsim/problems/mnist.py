"""MNIST with the networks of Hermans' papers: the GEM paper's CNN and his thesis' perceptron."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_list,
)
from asyncsim.problems.data import as_images, load_mnist
from asyncsim.problems.layers import classifier, convolve, dense, initial_layers, max_pool
from asyncsim.problems.problem import Problem, SplitLike, split_record

_MEAN, _STD = 0.1307, 0.3081  # of the training pixels, in [0, 1]
_KERNEL = 5
_EVALUATION_PIECE = 100  # images; their patches fit a CPU's cache: 1.6 times as fast as 1,000
_CNN = {
    "conv1": (_KERNEL, _KERNEL, 1, 10),
    "conv2": (_KERNEL, _KERNEL, 10, 20),
    "dense1": (320, 300),
    "dense2": (300, 200),
    "dense3": (200, 10),
}
_HIDDEN = (1000, 2000, 1000)
NETWORKS = ("cnn", "mlp")
_DROPOUT = 0.5


def mnist(
    batch_size: int = 64,
    dropout: float | None = None,
    split: SplitLike = None,
    data_dir: str | os.PathLike | None = None,
    network: str = "cnn",
    hidden: Sequence[int] | None = None,
) -> Problem:
    """Return MNIST with the GEM paper's network, 163,790 parameters, or the thesis', 4,798,010.

    ``"cnn"``: convolution 1 to 10 channels, 5x5, max-pool 2, rectifier; convolution 10 to 20,
    dropout of whole channels, max-pool 2, rectifier; dense 320 to 300 to 200 to 10; cross-entropy.
    Initial weights and biases are uniform in ±1/sqrt(fan_in).

    ``"mlp"``: dense 784 to 1000 to 2000 to 1000 to 10, with rectifiers; cross-entropy. Initial
    weights are uniform in ±sqrt(6/(fan_in + fan_out)), Keras' default, biases zero.

    Pixels are scaled to [0, 1], and for ``"cnn"`` standardised.

    60,000 and 10,000 examples ``{"image": [28, 28], "label": []}``; ``evaluate`` gives ``"loss"``
    (nats) and ``"accuracy"``.

    Parameters
    ----------
    dropout : float, optional
        Probability that a channel of an example is dropped by ``"cnn"``, from 0 to below 1; default
        0.5. Evaluation drops none.
    data_dir : path, optional
        Folder that contains ``mnist/``; default the folder in ``ASYNCSIM_DATA``, then a download.
    hidden : sequence of int, optional
        Units of each hidden layer of ``"mlp"``; default the thesis'.

    References
    ----------
    Hermans and Louppe 2018, arXiv 1805.08469, appendix A. Hermans 2017, "On scalable deep learning
    and parallelizing gradient descent", master thesis, Maastricht University.
    """
    _checked_dropout(dropout, network)
    arrays = load_mnist(data_dir)
    train, test = (
        _examples(arrays, part, standardised=network == "cnn") for part in ("train", "t10k")
    )
    return mnist_from_arrays(train, test, batch_size, dropout, split, network, hidden)


def mnist_from_arrays(
    train: Mapping[str, np.ndarray],
    test: Mapping[str, np.ndarray],
    batch_size: int = 64,
    dropout: float | None = None,
    split: SplitLike = None,
    network: str = "cnn",
    hidden: Sequence[int] | None = None,
) -> Problem:
    """Return the problem of `mnist` on the caller's examples.

    ``train`` and ``test``: dicts of ``"image"``, float32, shape ``[examples, 28, 28]``, scaled as
    the network needs it; ``"label"``, int32, from 0 to 9.
    """
    probability = _checked_dropout(dropout, network)
    if hidden is not None and network != "mlp":
        raise InputError(
            f"hidden = {hidden!r}: the cnn has its own layers; leave it out, or choose the mlp"
        )
    units = [
        require_count("hidden", width)
        for width in require_list("hidden", _HIDDEN if hidden is None else hidden)
    ]

    def init_mlp(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        return _init_mlp(key, units)

    def scores(params: Any, images: jax.Array, key: jax.Array | None) -> jax.Array:
        if network == "mlp":
            return _mlp_logits(params, images)
        return _cnn_logits(params, images, 0.0 if key is None else probability, key)

    config = {
        "batch_size": batch_size,
        **split_record(split),
        "network": network,
        **({} if hidden is None else {"hidden": units}),
    }
    return classifier(
        "mnist",
        init_mlp if network == "mlp" else _init_cnn,
        scores,
        as_images("train", train, (28, 28)),
        as_images("test", test, (28, 28)),
        config if network == "mlp" else config | {"dropout": probability},
        split,
        _EVALUATION_PIECE,
    )


def _checked_dropout(dropout: float | None, network: str) -> float:
    """Return the probability of dropping a channel; raise InputError if the network has none."""
    if require_choice("network", network, NETWORKS) == "mlp":
        if dropout:
            raise InputError(
                f"dropout = {dropout}: the mlp has no channels to drop; leave it out, or choose "
                "the cnn"
            )
        return 0.0
    return _DROPOUT if dropout is None else require_fraction("dropout", dropout)


def _examples(
    arrays: dict[str, np.ndarray], part: str, standardised: bool
) -> dict[str, np.ndarray]:
    image = arrays[f"{part}-images-idx3-ubyte"].astype(np.float32)
    image /= 255
    if standardised:
        image -= _MEAN
        image /= _STD
    return {"image": image, "label": arrays[f"{part}-labels-idx1-ubyte"].astype(np.int32)}


def _init_cnn(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    return dict(zip(_CNN, initial_layers(key, list(_CNN.values())), strict=True))


def _init_mlp(key: jax.Array, hidden: Sequence[int]) -> dict[str, dict[str, jax.Array]]:
    shapes = list(itertools.pairwise((784, *hidden, 10)))
    names = [f"dense{i}" for i in range(1, len(shapes) + 1)]
    initial = initial_layers(key, shapes, gain=math.sqrt(6), biases=False)
    layers = dict(zip(names, initial, strict=True))
    for name, (inputs, units) in zip(names, shapes, strict=True):
        layers[name]["weight"] *= math.sqrt(inputs / (inputs + units))
    return layers


def _cnn_logits(
    params: Any, images: jax.Array, dropout: float = 0.0, key: jax.Array | None = None
) -> jax.Array:
    """Compute class scores, ``[10, examples]``, from standardised ``images``,
    ``[examples, 28, 28]``.

    The examples are the innermost axis throughout, as `convolve` requires.
    """
    activity = jnp.moveaxis(images, 0, -1)[None]
    activity = jax.nn.relu(max_pool(convolve(params["conv1"], activity)))
    activity = max_pool(convolve(params["conv2"], activity))
    if dropout > 0:
        # After pooling, not before as in the paper: a channel's factor is uniform and not negative,
        # so the result is the same at a quarter of the work.
        activity = _drop_channels(activity, dropout, key)
    activity = jax.nn.relu(activity).reshape(-1, activity.shape[-1])
    activity = jax.nn.relu(dense(params["dense1"], activity))
    activity = jax.nn.relu(dense(params["dense2"], activity))
    return dense(params["dense3"], activity)


def _mlp_logits(params: Any, images: jax.Array) -> jax.Array:
    """Compute class scores, ``[10, examples]``, from ``images``, ``[examples, 28, 28]``.

    The examples are innermost here too: on a CPU a third faster than one row per example.
    """
    *hidden, last = params.values()
    activity = images.reshape(images.shape[0], -1).T
    for layer in hidden:
        activity = jax.nn.relu(dense(layer, activity))
    return dense(last, activity)


def _drop_channels(activity: jax.Array, dropout: float, key: jax.Array | None) -> jax.Array:
    """Set whole channels of an example to zero and scale the others up by 1/(1 - dropout)."""
    assert key is not None
    channels, _, _, examples = activity.shape
    # Drawn in float32 whatever the run's precision, so that both precisions drop the same channels.
    retained = jax.random.uniform(key, (channels, 1, 1, examples), jnp.float32) >= dropout
    return jnp.where(retained, activity / (1 - dropout), 0.0)
