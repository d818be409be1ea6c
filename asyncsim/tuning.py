"""Sizes that only affect speed: constants, never tuned while running.

Those for the CPU are measured; an accelerator's are a guess until somebody measures them.

A size changes the order of floating-point sums, so these are constants: one machine, one result.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Tuning(NamedTuple):
    """Sizes for one kind of device and one size of problem.

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


#: Below this many parameters a piece's overhead counts for more than what its vectors take of the cache.
_FEW_PARAMETERS = 2_000

# CPU: two cores; a quadratic of 16 parameters (few), the perceptron of digits and MNIST's network (many), 10 and 100
# workers. A batched gradient of many parameters is no quicker there than one after the other, and larger pieces leave
# the cache.
_CPU_FEW = Tuning(piece_sizes=(1, 2, 4, 8), piece_overhead=0.5, chunk=512)
_CPU_MANY = Tuning(piece_sizes=(1, 2), piece_overhead=0.5, chunk=512)
_ACCELERATOR = Tuning(piece_sizes=(1, 4, 16, 32), piece_overhead=8.0, chunk=256)


def current_device() -> Any:
    """Return the device that JAX computes on now: the chosen one, else its default."""
    # Asked of an array, as jax.default_backend() knows nothing of a chosen default device.
    (device,) = jnp.zeros(()).devices()
    return device


def backend() -> str:
    """Return the kind of that device: "cpu", "gpu" or "tpu"."""
    return current_device().platform


def tuning(backend: str, parameters: int) -> Tuning:
    """Return the sizes for a JAX backend ("cpu", "gpu", "tpu") and a problem of so many parameters."""
    if backend != "cpu":
        return _ACCELERATOR
    return _CPU_FEW if parameters < _FEW_PARAMETERS else _CPU_MANY
