"""The precision of products of matrices on accelerators."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Let JAX multiply matrices, and convolve, in the precision of their elements: a context, or a decorator.

    Left to itself it rounds factors in float32 to 10 bits on a GPU (TensorFloat-32) and to 7 on a TPU (bfloat16).
    ``jax_default_matmul_precision``, where it is set, is left as it is. On a CPU nothing changes.
    """
    config: Any = jax.config
    with jax.default_matmul_precision(config.jax_default_matmul_precision or "float32"):
        yield
