"""The 8x8 handwritten digits bundled with scikit-learn: real data that needs no network."""

import functools
import gzip
import importlib.util
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asyncsim.base.errors import InputError, require_count
from asyncsim.base.streams import Streams
from asyncsim.problems.layers import accuracy, cross_entropy, initial_layers
from asyncsim.problems.problem import Problem, SplitLike, split_record

_PIXELS = 64
_CLASSES = 10
_TEST_EVERY = 5


def digits(
    batch_size: int = 32,
    hidden: Sequence[int] = (128, 64),
    split: SplitLike = None,
) -> Problem:
    """Return the digits and a multilayer perceptron with rectifiers, by default 17,226 parameters.

    1,797 images of 8x8 pixels, scaled to [0, 1]; every fifth image of each class is for the test
    (1,437 and 360).

    Examples ``{"image": [64], "label": []}``; ``evaluate`` gives ``"loss"`` (nats) and
    ``"accuracy"``.

    Parameters
    ----------
    hidden : sequence of int
        Units of each hidden layer; none gives multinomial logistic regression.
    """
    if not isinstance(hidden, Sequence):
        raise InputError(f"hidden = {hidden!r}: must be a list with the units of each hidden layer")
    units = [require_count("hidden", width) for width in hidden]
    sizes = [_PIXELS, *units, _CLASSES]
    train, test = _load()

    def init(key: jax.Array) -> list[dict[str, jax.Array]]:
        return initial_layers(key, list(itertools.pairwise(sizes)), gain=math.sqrt(6), biases=False)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return cross_entropy(_logits(params, batch["image"]), batch["label"])

    def evaluate(params: Any, state: Any, data: Any) -> dict[str, jax.Array]:
        logits = _logits(params, data["image"])
        return {
            "loss": cross_entropy(logits, data["label"]),
            "accuracy": accuracy(logits, data["label"]),
        }

    def predict(params: Any, data: Any) -> jax.Array:
        return _logits(params, data["image"])

    config = {"batch_size": batch_size, "hidden": units, **split_record(split)}
    return Problem(
        "digits",
        init,
        loss,
        evaluate,
        train,
        test,
        batch_size,
        split=split,
        predict=predict,
        config=config,
    )


def _logits(params: Any, images: jax.Array) -> jax.Array:
    """Compute class scores, ``[examples, 10]``, from ``images``, ``[examples, 64]``."""
    *hidden, last = params
    activity = images
    for layer in hidden:
        activity = jax.nn.relu(activity @ layer["weight"] + layer["bias"])
    return activity @ last["weight"] + last["bias"]


@functools.cache
def _load() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    table = _table()
    by_class = np.argsort(table[:, -1], kind="stable")
    held_out = by_class[::_TEST_EVERY]
    training = np.setdiff1d(by_class, held_out)
    # The file runs through the classes in turn, so unshuffled shards would contain few of them.
    training = Streams(0, "digits").generator(0).permutation(training)
    return _examples(table[training]), _examples(table[held_out])


def _examples(table: np.ndarray) -> dict[str, np.ndarray]:
    examples = {
        "image": (table[:, :-1] / 16).astype(np.float32),
        "label": table[:, -1].astype(np.int32),
    }
    for array in examples.values():
        array.flags.writeable = False  # all problems share them
    return examples


def _table() -> np.ndarray:
    """Read scikit-learn's table, shape ``[1797, 65]``: pixels from 0 to 16, then the class."""
    # Reading the bundled file takes a hundredth of the time of importing scikit-learn.
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            with gzip.open(path, "rt") as file:
                return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, label = load_digits(return_X_y=True)
    return np.column_stack([pixels, label])
