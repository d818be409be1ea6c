"""Logistic regression whose workers hold different data: strongly convex, and not a quadratic."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, ndtr

from asyncsim.errors import require_positive
from asyncsim.problems.least_squares import convex, make_shards
from asyncsim.problems.problem import Problem

_SOLVED = 1e-10  # norm of the gradient at which the minimum is known to its last digit


def logistic(
    workers: int = 100,
    batch_size: int = 32,
    heterogeneity: float = 0.0,
    dimension: int = 40,
    examples: int = 250,
    condition: float = 10.0,
    regularisation: float = 1e-3,
    data_seed: int = 0,
) -> Problem:
    """Return regularised logistic regression on synthetic data, each worker with its own shard.

    Worker ``i`` holds ``examples`` pairs ``(a, y)`` with ``y`` 1 with probability ``1 / (1 + exp(-<a, x_i>))`` and
    -1 otherwise; the features ``a`` and the truths ``x_i`` are as in `least_squares`. The loss of a minibatch is the
    mean of ``log(1 + exp(-y <a, x>))``, in nats, plus ``regularisation |x|^2 / 2``; the objective is the same over
    all workers' examples. The parameters are the vector ``x`` and start at zero.

    Parameters
    ----------
    workers, batch_size, heterogeneity, dimension, examples, condition, data_seed
        As in `least_squares`.
    regularisation : float
        Above zero, so that there is one minimum also where the labels can be separated.

    Returns
    -------
    Problem
        Examples ``{"features": [dimension], "label": []}``; ``evaluate`` gives ``"loss"``, the objective;
        ``"excess"``, the objective minus its minimum, which in float32 round-off changes by a few 1e-7 of the loss, and
        by more of it where the loss is small; and ``"gradient_norm"``. The minimum is solved for once, in float64, to a
        gradient of norm 1e-10.

    Raises
    ------
    InputError
        Options out of range, or a batch larger than all the data. A run refuses one larger than its workers' shards.
    """
    regularisation = require_positive("regularisation", regularisation)
    shards = make_shards("logistic", workers, dimension, examples, condition, heterogeneity, data_seed)
    label = _labels(shards.response, shards.draw)
    minimum = _minimum(shards.features, label, regularisation)

    def objective(x: jax.Array, data: Any) -> jax.Array:
        margin = data["label"] * (data["features"] @ x)
        return jnp.mean(jax.nn.softplus(-margin)) + 0.5 * regularisation * jnp.vdot(x, x)

    def excess(x: jax.Array, data: Any, value: jax.Array) -> jax.Array:
        return value - minimum

    config = {
        "workers": workers,
        "batch_size": batch_size,
        "heterogeneity": heterogeneity,
        "dimension": dimension,
        "examples": examples,
        "condition": condition,
        "regularisation": regularisation,
        "data_seed": data_seed,
    }
    return convex("logistic", objective, excess, {"features": shards.features, "label": label}, config)


def _labels(response: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Return 1 with probability ``1 / (1 + exp(-response))``, else -1, from standard normal draws."""
    return np.where(ndtr(draw) < expit(response), 1.0, -1.0)


def _minimum(features: np.ndarray, label: np.ndarray, regularisation: float) -> float:
    """Return the minimum of the objective, by Newton's method in a trust region."""
    examples, dimension = features.shape
    signed = label[:, None] * features

    def value(x: np.ndarray) -> float:
        return float(np.mean(np.logaddexp(0, -signed @ x)) + 0.5 * regularisation * x @ x)

    def gradient(x: np.ndarray) -> np.ndarray:
        return -expit(-signed @ x) @ signed / examples + regularisation * x

    def hessian(x: np.ndarray) -> np.ndarray:
        wrong = expit(-signed @ x)
        curvature = (wrong * (1 - wrong))[:, None] * signed
        return curvature.T @ signed / examples + regularisation * np.eye(dimension)

    solved = minimize(
        value, np.zeros(dimension), jac=gradient, hess=hessian, method="trust-exact", options={"gtol": _SOLVED}
    )
    return float(solved.fun)
