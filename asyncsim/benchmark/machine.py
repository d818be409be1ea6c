"""What the machine can do at most: how near the gradients come, and what commits leave of their rate."""

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from asyncsim.benchmark.memory import expected_bytes
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.products import whole_products

if TYPE_CHECKING:
    import pandas as pd


#: Side of the matrices multiplied, and bytes copied: far larger than any cache.
_SIDE, _BYTES = 2_048, 2**28
_REPEATS = 5
#: Passes over a vector in place, so that it hardly counts that the first one is to new memory.
_PASSES = 16
#: Bytes of workers' rows that are moved in a measurement; of the array that they belong to, at most; fewest rows moved.
_MOVED, _ARRAY, _FEWEST_ROWS = 2**28, 2**30, 64
#: Bytes below which to move a row is no matter of memory.
_SMALL_ROW = 2**16


def machine(side: int = _SIDE, size: int = _BYTES) -> "pd.DataFrame":
    """Measure the machine, one row: what computes, and its ceilings for float32.

    Returns
    -------
    pandas.DataFrame
        ``backend``, ``device``, ``devices``, ``cpus``, ``jax``, ``matmul_gflops`` (1e9 operations per second, the best
        of some products) and ``copy_gbytes`` (1e9 bytes read or written per second, when a vector far larger than the
        cache is changed in place).
    """
    import pandas as pd

    devices = jax.local_devices()
    matrix = jnp.ones((side, side), jnp.float32)
    vector = jnp.ones(size // 4, jnp.float32)
    product = _best_seconds(jax.jit(whole_products()(lambda a: a @ a)), matrix)
    passes = jax.jit(lambda a: jax.lax.fori_loop(0, _PASSES, lambda _, a: a + 1, a))
    copy = _best_seconds(passes, vector) / (_PASSES + 1)  # and one from the argument, which is kept
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


def commit_limit(case: Any, method: Method, problem: Problem, gradients_per_second: float) -> "pd.DataFrame":
    """Return what moving the workers' rows leaves of the gradients' rate, one row; none where rows are small.

    A commit reads and writes what its worker keeps (the method's vectors, or the proxy's momentum of those that have
    none, and a local optimizer's state), and writes what the worker reads; with the gradient that is read again. These
    rows are scattered over arrays of all workers, which mostly are not in the cache. Here they are read and written as
    fast as one core does it, between gradients and in an order without pattern. Workers that share one copy of a
    version write less, as do those of commits that are dispatched a few at a time: what these read is passed on.

    Returns
    -------
    pandas.DataFrame
        The case; ``commit_mbytes``, 1e6 bytes that a commit reads or writes; ``gbytes_per_second``, 1e9 bytes, at
        which they are moved; and ``share_left``, of the rate of the gradients one piece at a time.
    """
    import pandas as pd

    row_bytes = expected_bytes(method, problem, 1)
    if row_bytes < _SMALL_ROW:
        return pd.DataFrame()
    moved = 2 * row_bytes - 4 * problem.parameter_count
    bandwidth = row_bandwidth(case.workers, row_bytes)
    gradient, commit = 1 / gradients_per_second, moved / bandwidth
    row = {
        **case._asdict(),
        "commit_mbytes": moved / 1e6,
        "gbytes_per_second": bandwidth / 1e9,
        "share_left": gradient / (gradient + commit),
    }
    return pd.DataFrame([row])


def row_bandwidth(rows: int, row_bytes: int) -> float:
    """Return the bytes read or written per second when rows of an array are changed in place, in random order."""
    rows = min(rows, max(2, _ARRAY // row_bytes))
    array = np.ones((rows, row_bytes // 4), np.float32)
    order = np.random.default_rng(0).integers(0, rows, max(_FEWEST_ROWS, _MOVED // (2 * row_bytes)))

    def change(order: np.ndarray) -> None:
        for row in order:
            np.negative(array[row], out=array[row])

    return 2 * row_bytes * len(order) / _best_seconds(change, order)


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
