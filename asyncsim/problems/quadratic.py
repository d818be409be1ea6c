"""A quadratic with Gaussian gradient noise: the test bed of most theory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from asyncsim.base.errors import InputError, require_nonnegative
from asyncsim.problems.problem import Problem


def quadratic(curvature: ArrayLike, noise: float = 0.0, start: ArrayLike = 1.0) -> Problem:
    """Return the quadratic ``h_1 x_1^2 / 2 + h_2 x_2^2 / 2 + ...`` in its own axes, dimensionless.

    A minibatch's loss is ``sum(h x^2) / 2 + noise <xi, x>`` with ``xi`` standard normal, drawn for
    every gradient, so the gradient is ``h x + noise xi``. The parameters are the vector ``x``;
    there is no data and ``batch`` is None.

    ``evaluate`` gives the noiseless ``"loss"``.

    Parameters
    ----------
    curvature : array_like, shape ``[parameters]``
        The Hessian's eigenvalues ``h``, above zero.
    noise : float
        Standard deviation of each gradient coordinate, in units of the gradient.
    start : float or array_like, shape ``[parameters]``
        Initial value of every coordinate.
    """
    h = _vector("curvature", curvature)
    if h.ndim != 1 or not h.size or not np.all(h > 0):
        raise InputError(f"curvature = {curvature!r}: must be a list of eigenvalues above zero")
    noise = require_nonnegative("noise", noise)
    x0 = _vector("start", start)
    if x0.shape not in ((), h.shape):
        raise InputError(
            f"start = {start!r}: must be one number or as many as curvature has, {h.size}"
        )

    def energy(x: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(jnp.asarray(h, x.dtype) * x * x)

    def init(key: jax.Array) -> jax.Array:
        return jnp.asarray(np.broadcast_to(x0, h.shape))

    def loss(x: jax.Array, batch: None, key: jax.Array) -> jax.Array:
        if noise == 0:
            return energy(x)
        xi = jax.random.normal(key, x.shape, x.dtype)
        return energy(x) + noise * jnp.vdot(xi, x)

    def evaluate(x: jax.Array, state: Any, data: None) -> dict[str, jax.Array]:
        return {"loss": energy(x)}

    config = {"curvature": h.tolist(), "noise": noise, "start": x0.tolist()}
    return Problem("quadratic", init, loss, evaluate, config=config)


def _vector(argument: str, value: ArrayLike) -> np.ndarray:
    try:
        # Check the original entries: NumPy converts texts and truth values to numbers.
        mistaken = any(
            np.asarray(entry).dtype.kind not in "iuf" for entry in np.asarray(value, object).flat
        )
        array = np.zeros(1) if mistaken else np.asarray(value, np.float64)
    except (TypeError, ValueError):
        mistaken = True
    if mistaken:
        raise InputError(f"{argument} = {value!r}: must be numbers")
    if not np.all(np.isfinite(array)):
        raise InputError(f"{argument} = {value!r}: must be finite")
    return array
