"""Sizes that only affect speed, one row a backend: measured by us, never tuned while running.

A size changes the order of floating-point sums, so these are constants: one machine, one result.
"""

from typing import NamedTuple

import jax.numpy as jnp


class Tuning(NamedTuple):
    """Sizes for one backend.

    Attributes
    ----------
    piece_sizes : tuple of int
        Commits that a piece may have room for.
    piece_overhead : float
        What a piece costs beside its commits, in commits.
    chunk : int
        Most pieces planned and sent to the device at once.
    """

    piece_sizes: tuple[int, ...]
    piece_overhead: float
    chunk: int


# CPU: two cores, digits' perceptron. GPU and TPU: not measured yet.
_TUNING = {
    "cpu": Tuning(piece_sizes=(1, 2, 4, 8), piece_overhead=0.5, chunk=256),
    "gpu": Tuning(piece_sizes=(1, 4, 16, 32), piece_overhead=8.0, chunk=256),
}


def backend() -> str:
    """Return the kind of device that JAX computes on now: the chosen one, else its default."""
    # Asked of an array, as jax.default_backend() knows nothing of a chosen default device.
    (device,) = jnp.zeros(()).devices()
    return device.platform


def tuning(backend: str) -> Tuning:
    """Return the sizes for a JAX backend ("cpu", "gpu", "tpu")."""
    return _TUNING.get(backend, _TUNING["gpu"])
