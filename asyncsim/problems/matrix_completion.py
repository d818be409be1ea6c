"""Low-rank matrix completion: a nonconvex landscape whose minima are copies under rotations."""

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.declared import Count, Natural, Share, in_range
from asyncsim.base.errors import InputError
from asyncsim.base.streams import Streams
from asyncsim.problems.problem import Problem


@in_range
def matrix_completion(
    dimension: Count = 50,
    rank: Count = 5,
    observed: Share = 1.0,
    data_seed: Natural = 0,
) -> Problem:
    """Build the completion of a symmetric matrix of low rank from some of its entries.

    The parameters are the factor ``X``, ``[dimension, rank]``. There is no data, ``batch`` is None,
    and gradients are exact::

        M    = U U^T,    U_ij ~ N(0, 1 / dimension)
        loss = 1/4 sum over the observed entries of (X X^T - M)^2

    ``X Q`` has the same loss as ``X`` for every rotation ``Q``, so the mean of two minima is not a
    minimum. The entries of each worker's initial replica are drawn from ``N(0, 0.01 / dimension)``.

    Parameters
    ----------
    dimension, rank : int
        Number of rows of the matrix, and its rank, at most ``dimension``.
    observed : float
        Probability that an entry and its mirror image are observed, above zero; 1: all are.
    data_seed : int
        Seed of the matrix and of its observed entries, which a run's seed does not change.

    References
    ----------
    Teng et al. 2019, "Leader stochastic gradient descent", arXiv 1905.10395: the poster compares
    the deterministic forms of EASGD and LSGD on this task. Sizes and initial values are ours.
    """
    config = locals()
    if rank > dimension:
        raise InputError(f"rank = {rank}: must not exceed dimension = {dimension}")
    generator = Streams(data_seed, "matrix_completion").generator(0)
    factor = generator.standard_normal((dimension, rank)) / dimension**0.5
    matrix = factor @ factor.T
    upper = np.triu(generator.random((dimension, dimension)))
    mask = (upper + np.triu(upper, 1).T) < observed

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask, x @ x.T - jnp.asarray(matrix, x.dtype), 0) ** 2) / 4

    def start(key: jax.Array, worker: int = 0) -> jax.Array:
        normal = jax.random.normal(jax.random.fold_in(key, worker), (dimension, rank))
        return 0.1 * normal / dimension**0.5

    return Problem(
        "matrix_completion",
        start,
        lambda x, batch, key: loss(x),
        lambda x, state, data: {"loss": loss(x)},
        config=config,
        init_replica=start,
    )
