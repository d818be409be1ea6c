"""Keys of random numbers that are drawn in JAX: a problem's, and those of methods that draw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array
from asyncsim.streams import stream_key


def purpose_key(seed: int, purpose: str) -> Array:
    """Return the key of a purpose's random numbers, see `asyncsim.streams`."""
    return jax.random.wrap_key_data(jnp.asarray(stream_key(seed, purpose).view(np.uint32)[:2]), impl="threefry2x32")


def method_key(seed: int) -> Array:
    """Return the key of which a run's visits have theirs, see `visit_key`."""
    return purpose_key(seed, "method")


def visit_key(key: Array, worker: Any, worker_step: Any) -> Array:
    """Return the key of a visit, from that of `method_key`."""
    return jax.random.fold_in(jax.random.fold_in(key, worker), worker_step)


@jax.jit
def visit_keys(keys: Array, worker: Array, worker_step: Array) -> Array:
    """Return the keys of many visits, ``[*visits, *runs]``, from that of one run, or from those of some."""
    of_runs = visit_key if keys.ndim == 0 else jax.vmap(visit_key, (0, None, None))
    of_all = jax.vmap(lambda *visit: of_runs(keys, *visit))(worker.reshape(-1), worker_step.reshape(-1))
    return of_all.reshape(*worker.shape, *keys.shape)
