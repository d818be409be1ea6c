"""Convex problems with different data on each worker: least squares, and logistic regression."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, ndtr

from asyncsim.base.declared import Count, Natural, NonNegative, Positive, in_range
from asyncsim.base.errors import InputError, require_positive
from asyncsim.base.streams import Streams
from asyncsim.problems.problem import Problem


def _require_condition(argument: str, value: float) -> float:
    if require_positive(argument, value) < 1:
        raise InputError(
            f"{argument} = {value!r}: must be one or above, the ratio of two eigenvalues"
        )
    return value


Condition = Annotated[float, _require_condition]


@in_range
def least_squares(
    workers: Count = 100,
    batch_size: int = 32,
    heterogeneity: NonNegative = 0.0,
    dimension: Count = 40,
    examples: Count = 250,
    condition: Condition = 10.0,
    label_noise: NonNegative = 0.1,
    data_seed: Natural = 0,
) -> Problem:
    """Return linear least squares on synthetic data, each worker with its own shard.

    Worker ``i`` holds ``examples`` pairs ``(a, b)`` with ``b = <a, x_i> + label_noise xi``, ``xi``
    standard normal. `asyncsim.problems.convex.make_shards` draws the features ``a`` and the truths
    ``x_i``: the covariance of the features has eigenvalues from 1 down to ``1/condition``, and the
    truths are normal around a shared truth of size one, at a distance of ``heterogeneity`` in root
    mean square. The loss of a minibatch is the mean of ``(<a, x> - b)^2 / 2``; the objective is the
    mean over all workers' examples. The parameters are the vector ``x`` and start at zero.

    With ``batch_size = examples`` every gradient is the full gradient of its worker. Mishchenko et
    al. (2022, arXiv 2206.07638) also use least squares with 10,000 examples and 40 workers; their
    features are uniform, not normal, their workers are alike, and there are 400 parameters.
    ``least_squares(workers=40, dimension=400, condition=1, label_noise=1e-5, batch_size=250)`` is
    close, up to the scale of the features.

    Examples ``{"features": [dimension], "target": []}``; ``evaluate`` gives ``"loss"``, the
    objective; ``"excess"``, the objective minus its minimum; and ``"gradient_norm"``. The minimiser
    is computed in float64, and the excess is the mean of ``<a, x - minimiser>^2 / 2``, so it has no
    cancellation and can become as small as the square of the precision.

    Parameters
    ----------
    workers : int
        Number of shards. The workers of a run must divide it; a single worker has all the data.
    heterogeneity : float
        Distance of each worker's truth from the shared one, zero or above; 0: all workers draw from
        one distribution, and their shards differ by chance only.
    dimension, examples : int
        Number of parameters, and of each worker's examples.
    condition : float
        Condition number of the features' covariance, one or above.
    label_noise : float
        Standard deviation of the noise in ``b``.
    data_seed : int
        Seed of the data, which a run's seed does not change.
    """
    config = locals()
    shards = make_shards(
        "least_squares", workers, dimension, examples, condition, heterogeneity, data_seed
    )
    target = shards.response + label_noise * shards.draw
    minimiser = np.linalg.lstsq(shards.features, target)[0]

    def objective(x: jax.Array, data: Any) -> jax.Array:
        return 0.5 * jnp.mean((data["features"] @ x - data["target"]) ** 2)

    def excess(x: jax.Array, data: Any, value: jax.Array) -> jax.Array:
        return 0.5 * jnp.mean((data["features"] @ (x - jnp.asarray(minimiser, x.dtype))) ** 2)

    return convex(
        "least_squares", objective, excess, {"features": shards.features, "target": target}, config
    )


def convex(
    name: str,
    objective: Callable[[jax.Array, Any], jax.Array],
    excess: Callable[[jax.Array, Any, jax.Array], jax.Array],
    train: dict[str, np.ndarray],
    config: dict[str, Any],
) -> Problem:
    """Return the problem of an objective of the vector ``x`` on one shard for each worker.

    ``excess`` maps ``x``, the data and the objective's value to the value less the minimum. ``x``
    starts at zero.
    """

    def evaluate(x: jax.Array, state: Any, data: Any) -> dict[str, jax.Array]:
        value, gradient = jax.value_and_grad(objective)(x, data)
        return {
            "loss": value,
            "excess": excess(x, data, value),
            "gradient_norm": jnp.linalg.norm(gradient),
        }

    return Problem(
        name,
        init=lambda key: jnp.zeros(config["dimension"]),
        loss=lambda x, batch, key: objective(x, batch),
        evaluate=evaluate,
        train=train,
        batch_size=config["batch_size"],
        split=whole_shards(name, config["workers"], config["workers"] * config["examples"]),
        config=config,
    )


def whole_shards(name: str, shards: int, examples: int) -> Callable[[int, int], Any]:
    """Return the split that gives each worker whole shards; example ``k`` is of shard
    ``k % shards``.
    """

    def split(workers: int, seed: int) -> list[np.ndarray]:
        if shards % workers:
            raise InputError(
                f"workers = {workers}: {name} was made for {shards} workers, one shard each; make "
                f"it with workers={workers}, or run a number of workers that divides {shards}"
            )
        return [np.arange(worker, examples, workers) for worker in range(workers)]

    return split


class Shards(NamedTuple):
    """The workers' shards; worker ``i`` of ``n`` has the examples ``i, i + n, ...``."""

    #: Shape ``[examples * workers, dimension]``.
    features: np.ndarray
    #: The label of each example without noise, ``<a, x_i>``; shape ``[examples * workers]``.
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
    """Draw the data of each worker from its own stream: adding a worker changes no other's data.

    A feature vector is ``a = sqrt(h) z`` with ``z`` standard normal, so the covariance of the
    features has the eigenvalues ``h``, in geometric steps from 1 down to ``1/condition``. The truth
    of worker ``i`` is::

        x_i = x_0 + heterogeneity v_i,    x_0, v_i ~ N(0, I / dimension)

    so two workers' truths are ``heterogeneity sqrt(2)`` apart, in root mean square, and at zero all
    workers draw from one distribution.

    ``purpose`` names the streams; the other parameters are explained in `least_squares`.
    """
    streams = Streams(data_seed, purpose)
    scale = np.geomspace(1, 1 / condition, dimension) ** 0.5
    # Block 1 of worker 0 is shared by all; block 0 of each worker is its own.
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


_SOLVED = 1e-10  # norm of the gradient at which the minimum is exact to the last digit


@in_range
def logistic(
    workers: Count = 100,
    batch_size: int = 32,
    heterogeneity: NonNegative = 0.0,
    dimension: Count = 40,
    examples: Count = 250,
    condition: Condition = 10.0,
    regularisation: Positive = 1e-3,
    data_seed: Natural = 0,
) -> Problem:
    """Return regularised logistic regression on synthetic data, each worker with its own shard.

    Worker ``i`` holds ``examples`` pairs ``(a, y)`` with ``y`` 1 with probability
    ``1 / (1 + exp(-<a, x_i>))`` and -1 otherwise; the features ``a`` and the truths ``x_i`` are as
    in `least_squares`. The loss of a minibatch is the mean of ``log(1 + exp(-y <a, x>))``, in nats,
    plus ``regularisation |x|^2 / 2``; the objective is the same over all workers' examples. The
    parameters are the vector ``x`` and start at zero.

    Examples ``{"features": [dimension], "label": []}``; ``evaluate`` gives ``"loss"``, the
    objective; ``"excess"``, the objective minus its minimum, with a round-off in float32 of a few
    1e-7 of the loss, and of more where the loss is small; and ``"gradient_norm"``. The minimum is
    computed once, in float64, to a gradient of norm 1e-10.

    Parameters
    ----------
    workers, heterogeneity, dimension, examples, condition, data_seed
        As in `least_squares`.
    regularisation : float
        Above zero, so that the minimum is unique even if the labels can be separated.
    """
    config = locals()
    shards = make_shards(
        "logistic", workers, dimension, examples, condition, heterogeneity, data_seed
    )
    label = _labels(shards.response, shards.draw)
    minimum = _minimum(shards.features, label, regularisation)

    def objective(x: jax.Array, data: Any) -> jax.Array:
        margin = data["label"] * (data["features"] @ x)
        return jnp.mean(jax.nn.softplus(-margin)) + 0.5 * regularisation * jnp.vdot(x, x)

    def excess(x: jax.Array, data: Any, value: jax.Array) -> jax.Array:
        return value - minimum

    return convex(
        "logistic", objective, excess, {"features": shards.features, "label": label}, config
    )


def _labels(response: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Set 1 with probability ``1 / (1 + exp(-response))``, else -1, by standard normal draws."""
    return np.where(ndtr(draw) < expit(response), 1.0, -1.0)


def _minimum(features: np.ndarray, label: np.ndarray, regularisation: float) -> float:
    """Compute the minimum of the objective."""
    signed = label[:, None] * features

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signed @ x
        loss = np.mean(np.logaddexp(0, -margin)) + 0.5 * regularisation * x @ x
        return loss, regularisation * x - expit(-margin) @ signed / len(signed)

    start, options = np.zeros(features.shape[1]), {"gtol": _SOLVED}
    return float(minimize(value_and_gradient, start, jac=True, options=options).fun)
