"""HeLoCo: the server corrects a worker's direction that conflicts with its momentum."""

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Fraction, NonNegative, Positive, Share
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Array, Method, local_steps


@declared
def heloco(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.7,
    server_momentum: Fraction = 0.9,
    keep: Share = 0.2,
    shrink: NonNegative = 0.5,
    shrink_limit: Share = 0.5,
    turn: NonNegative = 1.0,
    kappa: NonNegative = 3.0,
    weight: Positive | None = None,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return HeLoCo, asynchronous DiLoCo with a momentum look-ahead and corrected directions.

    The window of the trace is the number of inner steps. With ``D`` the start less the end of a
    worker's inner steps, ``m`` the momentum, ``u`` and ``v`` their unit vectors, for each tensor::

        c    = <u, v>
        conf = |D| / (|D| + kappa |m|)
        G    = D                                                           if c >= keep
               D - b c |D| v,  b = min(-shrink c conf, shrink_limit)       if c < 0
               |D| w / |w|,    w = (1 - l) u + l v,
                               l = min(turn (1 - c) conf, 1)               otherwise

    and for all parameters::

        m       <- server_momentum m + (1 - server_momentum) weight G
        central <- central - server_rate (weight G + server_momentum m)
        read     = central - server_rate server_momentum m                 (the worker's next one)

    Parameters
    ----------
    keep : float
        Cosine from which on a direction is not changed, in (0, 1].
    shrink, shrink_limit : float
        How much of a component against the momentum is removed; at most the limit, in (0, 1].
    turn : float
        How far a direction almost orthogonal to the momentum is turned towards it.
    kappa : float
        Above zero: less correction of messages that are short beside the momentum.
    weight : float, optional
        Of a message; None for one over the root of the number of workers.
    optimizer : optax.GradientTransformation, optional
        The workers' inner optimizer; its state stays with the worker.

    Notes
    -----
    A tensor without momentum, as at the start, keeps ``D``: the rule as printed would replace it by
    zero for ever. The paper's server rate and momentum are not known here: the defaults are
    DiLoCo's. The rule is known second-hand.

    References
    ----------
    Asif, Diem, Munoz, Wolf, Jannesari and Mazaheri 2026, "HeLoCo: efficient asynchronous
    low-communication training under data and device heterogeneity", arXiv 2606.00271.
    """

    def correct(delta: Array, m: Array) -> Array:
        length, m_length = jnp.linalg.norm(delta), jnp.linalg.norm(m)
        u, v = delta / _divisor(length), m / _divisor(m_length)
        cosine = jnp.vdot(u, v)
        confidence = length / _divisor(length + kappa * m_length)
        shrunk = (
            delta - jnp.minimum(-shrink * cosine * confidence, shrink_limit) * cosine * length * v
        )
        share = jnp.minimum(turn * (1 - cosine) * confidence, 1)
        direction = (1 - share) * u + share * v
        turned = length * direction / _divisor(jnp.linalg.norm(direction))
        is_kept = (cosine >= keep) | (m_length == 0)
        return jnp.where(is_kept, delta, jnp.where(cosine < 0, shrunk, turned))

    def apply(server, central, message, memory, visit):
        kind = jax.tree.leaves(central)[0].dtype
        rho = 1 / jnp.sqrt(jnp.asarray(visit.workers, kind)) if weight is None else weight
        direction = jax.tree.map(lambda sent, m: rho * correct(-sent, m), message, server)
        mu = server_momentum
        m = jax.tree.map(lambda m, g: mu * m + (1 - mu) * g, server, direction)
        central = jax.tree.map(
            lambda x, g, m: x - server_rate * (g + mu * m), central, direction, m
        )
        return Applied(central, m, memory)

    def reply(server, central, memory, visit):
        return jax.tree.map(lambda x, m: x - server_rate * server_momentum * m, central, server)

    return Method(
        local_steps(learning_rate, optimizer),
        apply=apply,
        init_server=optax.tree.zeros_like,
        reply=reply,
        space="tensors",
    )


def _divisor(length: Array) -> Array:
    return jnp.where(length > 0, length, 1)
