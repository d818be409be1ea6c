"""Two wells in each coordinate: a landscape on which workers may start in different wells."""

from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.declared import Count, NonNegative, in_range
from asyncsim.base.errors import InputError, require_number
from asyncsim.problems.problem import Problem


@in_range
def wells(
    tilt: Annotated[float, require_number] = 0.0,
    starts: Sequence[float] = (-1.2, 1.3, 0.9, -0.8),
    dimensions: Count = 1,
    noise: NonNegative = 0.0,
) -> Problem:
    """Return the sum of ``(x^2 - 1)^2 + tilt x`` over all coordinates, dimensionless.

    Without a tilt it is symmetric: the wells at 1 and -1 are equally deep, and 0 is a maximum. The
    parameters are the vector ``x``; there is no data and ``batch`` is None.

    Parameters
    ----------
    tilt : float
        Above zero, the well on the left is the deeper one.
    starts : sequence of float
        Initial value of all coordinates of each worker's replica; further workers begin again with
        the first. Methods without replicas start from the workers' mean.
    dimensions : int
    noise : float
        Standard deviation of each gradient coordinate.
    """
    if isinstance(starts, str) or not isinstance(starts, Sequence) or not starts:
        raise InputError(f"starts = {starts!r}: must be one number or more, [-1.2, 1.3] say")
    values = [require_number(f"starts[{place}]", value) for place, value in enumerate(starts)]

    def height(x: jax.Array) -> jax.Array:
        return jnp.sum((x**2 - 1) ** 2 + tilt * x)

    def loss(x: jax.Array, batch: None, key: jax.Array) -> jax.Array:
        if noise == 0:
            return height(x)
        return height(x) + noise * jnp.vdot(jax.random.normal(key, x.shape, x.dtype), x)

    def evaluate(x: jax.Array, state: Any, data: None) -> dict[str, jax.Array]:
        return {"loss": height(x)}

    return Problem(
        "wells",
        lambda key: jnp.full(dimensions, np.mean(values)),
        loss,
        evaluate,
        config={"tilt": tilt, "starts": values, "dimensions": dimensions, "noise": noise},
        init_replica=lambda key, worker: jnp.full(dimensions, values[worker % len(values)]),
    )
