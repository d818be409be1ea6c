"""Synthetic data of workers that differ: what the convex problems share."""

from typing import NamedTuple

import numpy as np

from asyncsim.errors import InputError, require_count, require_nonnegative
from asyncsim.streams import Streams


class Shards(NamedTuple):
    """The shards of some workers, in the order in which worker ``i`` of ``n`` holds examples ``i, i + n, ...``."""

    #: Shape ``[examples * workers, dimension]``.
    features: np.ndarray
    #: What each example's worker would find without noise, ``<a, x_i>``; shape ``[examples * workers]``.
    response: np.ndarray
    #: One standard normal number an example, for noise or labels; shape ``[examples * workers]``.
    draw: np.ndarray


def make_shards(
    purpose: str,
    workers: int,
    dimension: int,
    examples: int,
    condition: float,
    heterogeneity: float,
    data_seed: int,
) -> Shards:
    """Return the data of ``workers`` workers, each from its own stream: adding a worker changes nobody else's.

    A feature vector is ``a = sqrt(h) z`` with ``z`` standard normal, so the covariance of the features has the
    eigenvalues ``h``, in geometric steps from 1 down to ``1/condition``. The truth of worker ``i`` is::

        x_i = x_0 + heterogeneity v_i,    x_0, v_i ~ N(0, I / dimension)

    so two workers' truths are ``heterogeneity sqrt(2)`` apart, in root mean square, and zero makes all workers draw
    from one distribution.

    Parameters
    ----------
    purpose : str
        Name of the streams.
    workers, dimension, examples : int
        Number of workers, of parameters, and of examples of each worker.
    condition : float
        Condition number of the features' covariance, one or above.
    heterogeneity : float
        How far the workers' truths lie apart, in units of the size of the truth that they share.
    data_seed : int
        Seed of the streams.

    Raises
    ------
    InputError
        A count below one, a condition below one, a negative heterogeneity or seed.
    """
    workers, dimension = require_count("workers", workers), require_count("dimension", dimension)
    examples = require_count("examples", examples)
    if require_nonnegative("condition", condition) < 1:
        raise InputError(f"condition = {condition!r}: must be one or above, the ratio of two eigenvalues")
    heterogeneity = require_nonnegative("heterogeneity", heterogeneity)
    streams = Streams(require_count("data_seed", data_seed, minimum=0), purpose)
    scale = np.geomspace(1, 1 / condition, dimension) ** 0.5
    # Block 1 of worker 0 is what all share; block 0 of each worker is its own.
    common = streams.generator(0, block=1).standard_normal(dimension)
    features = np.empty((examples, workers, dimension))
    response, draw = np.empty((2, examples, workers))
    for worker in range(workers):
        generator = streams.generator(worker)
        truth = (common + heterogeneity * generator.standard_normal(dimension)) / dimension**0.5
        features[:, worker] = scale * generator.standard_normal((examples, dimension))
        response[:, worker] = features[:, worker] @ truth
        draw[:, worker] = generator.standard_normal(examples)
    return Shards(features.reshape(-1, dimension), response.ravel(), draw.ravel())
