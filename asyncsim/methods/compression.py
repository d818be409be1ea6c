"""Compressed messages: QSGD rounds updates at random to a few levels; Mem-SGD sends the largest
elements only.

A worker of Mem-SGD keeps the other elements and adds them to its next update.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from asyncsim.base.declared import Count, Share
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Timing, local_steps

#: Bits of a single-precision number, and of an element's index.
_BITS = 32


@declared
def qsgd(
    learning_rate: Rate = LEARNING_RATE,
    levels: Count = 7,
    bucket: Count | None = 512,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DOWNPOUR with quantized messages.

    With ``s`` the levels and ``norm`` the Euclidean one of a bucket of consecutive elements, each
    element ``u`` of the update (window 1: ``-learning_rate * gradient``) is sent as::

        norm * sign(u) * l / s, l = floor(a) or, with probability a - floor(a), floor(a) + 1, a = s
        |u| / norm

    so that the message is the update in the mean. The server adds it.

    ``levels``: above zero, at least 1: 7 of either sign are 4 bits an element, 1 is a ternary
    message. ``bucket``: elements that share a norm, at least 1; None: all. The second moment of a
    message is at most ``1 + min(b / s**2, sqrt(b) / s)`` times the second moment of the update,
    with ``b`` the bucket.

    Notes
    -----
    The paper's algorithm is synchronous, and each worker sends to all. Here the server answers with
    the uncompressed central variable, and a window's steps are summed before they are rounded. An
    element costs the bits of its sign and level, the norm of each whole bucket 32 bits; where plain
    numbers are shorter, these are sent (`Timing.message_size`, of parameters in 32 bits). The
    paper's Elias code is shorter. Its experiments use the largest element as the norm.

    References
    ----------
    Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD: communication-efficient SGD via gradient
    quantization and encoding", arXiv 1610.02132, section 3.
    """

    def message(worker, update, start, central, visit):
        return quantized(visit.key, update, levels, bucket), worker, {}

    bits = math.ceil(math.log2(2 * levels + 1)) + (0 if bucket is None else _BITS / bucket)
    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        timing=Timing(message_size=min(1.0, bits / _BITS)),
        needs_key=True,
    )


def quantized(key: Array, vector: Array, levels: int, bucket: int | None) -> Array:
    """Round a vector at random to ``levels`` levels of either sign, as in `qsgd`."""
    size = vector.size if bucket is None else min(bucket, vector.size)
    buckets = jnp.pad(vector, (0, -vector.size % size)).reshape(-1, size)
    norm = jnp.linalg.norm(buckets, axis=1, keepdims=True)
    scaled = levels * jnp.abs(buckets) / jnp.where(norm == 0, 1, norm)
    below = jnp.floor(scaled)
    up = jax.random.uniform(key, buckets.shape, buckets.dtype) < scaled - below
    level = jnp.where(up, below + 1, below)
    return (norm * jnp.sign(buckets) * level / levels).reshape(-1)[: vector.size]


@declared
def mem_sgd(
    learning_rate: Rate = LEARNING_RATE,
    fraction: Share = 0.01,
    memory: bool = True,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DOWNPOUR with sparse messages: sparsified SGD with memory, also called top-k with
    error feedback.

    With ``m`` the worker's memory (zero at first), ``u`` its update (window 1:
    ``-learning_rate * gradient``) and ``top`` the ``k`` elements of largest size, the others zero::

        message = top(m + u)
        m <- m + u - message

    The server adds the message.

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps. It scales the update, even if parts of the update are sent later.
    fraction : float
        Share of the elements that are sent: ``k = fraction * parameters``, rounded, at least 1.
        Above 0, at most 1; with 1 this is DOWNPOUR.
    memory : bool
        Whether the worker keeps the elements that it does not send. False discards them, for
        comparison.

    Notes
    -----
    In the paper's parallel algorithm all workers write to one shared memory without locks
    (``discipline="lock_free"``); here they may also send to a server, which answers with the
    uncompressed central variable. Its step sizes shrink and it averages its iterates with weights;
    here the rate is constant unless it is a schedule, and nothing is averaged. A window's steps are
    summed before they are compressed. Among elements of equal size the first are sent. An element
    costs its value, in the bits of a parameter, and 32 bits for its index; where the plain vector
    is shorter, it is sent instead (`Timing.message_size`; with fewer parameters than
    ``1 / fraction`` messages are longer than that).

    With updates of norms up to ``G`` a worker's memory stays within ``2 G sqrt(1 - q) / q``, with
    ``q`` the share of elements sent: Karimireddy et al., lemma 3, stated there for squares and in
    the mean.

    References
    ----------
    Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory", arXiv 1809.07599, algorithms 1
    and 2. Karimireddy, Rebjock, Stich and Jaggi 2019, "Error feedback fixes SignSGD and other
    gradient compression schemes", arXiv 1901.09847.
    """

    def message(worker, update, start, central, visit):
        total = worker + update if memory else update
        sent = largest(total, max(1, round(fraction * total.size)))
        return sent, total - sent if memory else worker, {}

    def message_share(bits: int) -> float:
        return min(1.0, fraction * (bits + _BITS) / bits)

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        init_worker=lambda central: jnp.zeros_like(central) if memory else (),
        timing=Timing(message_size=message_share(_BITS), message_share=message_share),
    )


def largest(vector: Array, count: int) -> Array:
    """Keep the ``count`` elements of largest size; set the others to zero."""
    _, places = lax.top_k(jnp.abs(vector), count)
    return jnp.zeros_like(vector).at[places].set(vector[places])
