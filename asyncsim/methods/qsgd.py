"""QSGD: updates rounded at random to a few levels, so that a message takes a few bits an element."""

import math

import jax
import jax.numpy as jnp
import optax

from asyncsim.errors import require_count
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Schedule, Timing, local_steps

#: Of a number that is sent as it is.
_BITS = 32


def qsgd(
    learning_rate: float | Schedule = LEARNING_RATE,
    levels: int = 7,
    bucket: int | None = 512,
    optimizer: optax.GradientTransformation | None = None,
) -> Method:
    """Return DOWNPOUR with quantized messages.

    With ``s`` the levels and ``norm`` the Euclidean one of a bucket of consecutive elements, each element ``u`` of the
    update (window 1: ``-learning_rate * gradient``) is sent as::

        norm * sign(u) * l / s,    l = floor(a) or, with probability a - floor(a), floor(a) + 1,    a = s |u| / norm

    so that the message is the update in the mean. The server adds it.

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    levels : int
        Above zero, at least 1: 7 of either sign are 4 bits an element, 1 is a ternary message.
    bucket : int, optional
        Elements that share a norm, at least 1; None: all. The second moment of a message is at most
        ``1 + min(b / s**2, sqrt(b) / s)`` times that of the update, ``b`` being the bucket.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer, in the place of plain steps.

    Notes
    -----
    The paper's algorithm is synchronous, and each worker sends to all. Here the server answers with the central
    variable as it is, and a window's steps are summed before they are rounded. Each element is taken to be sent in as
    many bits as tell its sign and level, and the norm of each whole bucket in 32, or all as they are where that is less
    (`Timing.message_size`, of parameters in 32 bits); the paper's Elias code takes fewer. In its experiments norms are
    the largest element's.

    References
    ----------
    Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD: communication-efficient SGD via gradient quantization and
    encoding", arXiv 1610.02132, section 3.
    """
    named, local = local_steps(learning_rate, optimizer)
    require_count("levels", levels)
    if bucket is not None:
        require_count("bucket", bucket)

    def message(worker, update, start, central, visit):
        return quantized(visit.key, update, levels, bucket), worker, {}

    bits = math.ceil(math.log2(2 * levels + 1)) + (0 if bucket is None else _BITS / bucket)
    return Method(
        name="qsgd",
        hyperparameters={**named, "levels": levels, "bucket": bucket},
        optimizer=local,
        message=message,
        timing=Timing(message_size=min(1.0, bits / _BITS)),
        draws=True,
    )


def quantized(key: Array, vector: Array, levels: int, bucket: int | None) -> Array:
    """Round a vector at random to ``levels`` levels of either sign; see `qsgd`."""
    size = vector.size if bucket is None else min(bucket, vector.size)
    buckets = jnp.pad(vector, (0, -vector.size % size)).reshape(-1, size)
    norm = jnp.linalg.norm(buckets, axis=1, keepdims=True)
    scaled = levels * jnp.abs(buckets) / jnp.where(norm == 0, 1, norm)
    below = jnp.floor(scaled)
    up = jax.random.uniform(key, buckets.shape, buckets.dtype) < scaled - below
    level = jnp.where(up, below + 1, below)
    return (norm * jnp.sign(buckets) * level / levels).reshape(-1)[: vector.size]
