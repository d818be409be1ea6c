"""What the machine can do at most, and how near the gradients come: the roofline."""

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from asyncsim.problems import Problem

if TYPE_CHECKING:
    import pandas as pd

#: Side of the matrices multiplied, and bytes copied: far larger than any cache.
_SIDE, _BYTES = 2_048, 2**28
_REPEATS = 5


def machine(side: int = _SIDE, size: int = _BYTES) -> "pd.DataFrame":
    """Measure the machine, one row: what computes, and its ceilings for float32.

    Returns
    -------
    pandas.DataFrame
        ``backend``, ``device``, ``devices``, ``cpus``, ``jax``, ``matmul_gflops`` (1e9 operations per second, the best
        of some products) and ``copy_gbytes`` (1e9 bytes read or written per second, the best of some copies).
    """
    import pandas as pd

    devices = jax.local_devices()
    matrix = jnp.ones((side, side), jnp.float32)
    vector = jnp.ones(size // 4, jnp.float32)
    product = _best_seconds(jax.jit(lambda a: a @ a), matrix)
    copy = _best_seconds(jax.jit(lambda a: a + 1), vector)
    row = {
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "matmul_gflops": 2 * side**3 / product / 1e9,
        "copy_gbytes": 2 * size / copy / 1e9,
    }
    return pd.DataFrame([row])


def roofline(task: str, workers: int, problem: Problem, per_second: float, ceilings: "pd.DataFrame") -> "pd.DataFrame":
    """Return how near the gradients alone come to the machine's ceilings, one row.

    Returns
    -------
    pandas.DataFrame
        ``task``, ``workers``, ``parameters``; ``matrix_mflop``, 1e6 operations of a gradient's matrix products, and
        ``least_mbytes``, 1e6 bytes: parameters read and gradient written once; ``per_second``; the shares of both
        ceilings that are reached; and ``limit_per_second``, which neither ceiling lets pass.
    """
    import pandas as pd

    operations, parameters = matrix_operations(problem), problem.parameter_count
    least_bytes = 2 * 4 * parameters
    ceiling, bandwidth = ceilings["matmul_gflops"].iloc[0] * 1e9, ceilings["copy_gbytes"].iloc[0] * 1e9
    row = {
        "task": task,
        "workers": workers,
        "parameters": parameters,
        "matrix_mflop": operations / 1e6,
        "least_mbytes": least_bytes / 1e6,
        "per_second": per_second,
        "share_of_matmul": per_second * operations / ceiling,
        "share_of_copy": per_second * least_bytes / bandwidth,
        "limit_per_second": 1 / max(operations / ceiling, least_bytes / bandwidth),
    }
    return pd.DataFrame([row])


def matrix_operations(problem: Problem) -> int:
    """Return the additions and multiplications in the matrix products of one minibatch's gradient."""
    params = jax.eval_shape(problem.init, jax.random.key(0))
    size = problem.batch_size or 0
    batch = jax.tree.map(lambda array: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype), problem.train)
    return _operations(jax.make_jaxpr(jax.grad(problem.loss))(params, batch, jax.random.key(0)).jaxpr)


def _operations(jaxpr: Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            product: Any = equation.outvars[0].aval
            total += 2 * math.prod(left.shape[axis] for axis in contracted) * math.prod(product.shape)
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr):
                total += _operations(value.jaxpr)
            elif isinstance(value, Jaxpr):
                total += _operations(value)
    return total


def _best_seconds(run: Callable[[Any], Any], argument: Any) -> float:
    jax.block_until_ready(run(argument))
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run(argument))
        seconds.append(time.perf_counter() - started)
    return float(np.min(seconds))
