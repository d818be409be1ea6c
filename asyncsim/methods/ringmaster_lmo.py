"""Ringmaster LMO: steps of Muon at the server, on gradients that are not too stale."""

import functools

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Fraction, in_range
from asyncsim.base.errors import InputError
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    NO_MATRICES,
    Array,
    Method,
    Timing,
    rate_at,
)
from asyncsim.methods.server_optimizer import server_optimizer

#: The authors' coefficients ``(a, b, c)`` of each step ``a X + (b G + c G G) X``, ``G = X X'``.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
#: Added to the Frobenius norm, by which a matrix is divided.
_EPSILON = 1e-7


@declared
def ringmaster_lmo(
    learning_rate: Rate = LEARNING_RATE,
    server_momentum: Fraction = 0.95,
    policy: PolicyLike = "cancel_stale(limit=10)",
) -> Method:
    """Return Ringmaster LMO with Muon's steps (Ringmaster Muon).

    With ``g`` a gradient whose delay is below the limit, for each tensor::

        m       <- server_momentum m + (1 - server_momentum) g
        u        = server_momentum m + (1 - server_momentum) g
        central <- central - learning_rate muon(u)

    Parameters
    ----------
    policy : Policy or text, optional
        The limit R of the delay, and what becomes of a gradient that reaches it. The authors'
        program stops its computation and starts another at the newest parameters:
        ``cancel_stale(limit=R)``. The paper's algorithm 1 refuses it on arrival:
        ``discard_stale(limit=R)``.

    Notes
    -----
    ``muon(u)`` of a matrix is `orthogonalized` (u), of a vector or a number ``u``. A tensor of more
    than two axes is a matrix whose rows are its first axis. The authors treat only the matrices of
    their transformer's blocks so, embeddings as vectors, and compute in float32. Their layers have
    weights of shape ``[outputs, inputs]``, this package's ``[inputs, outputs]``: the scale uses the
    rows and columns of the array as it is.

    Raises
    ------
    InputError
        For a problem without matrices, at its replay.

    References
    ----------
    Sadiev, Maranjyan, Ilin and Richtarik 2026, "Ringmaster LMO: asynchronous linear minimization
    oracle momentum method", arXiv 2605.18174, and its authors' program; Amsel, Persson, Musco and
    Gower 2025, "The Polar Express", arXiv 2505.16932 (the coefficients).
    """
    method = server_optimizer(adaptive=False, optimizer=lmo_steps(learning_rate, server_momentum))
    return method._replace(timing=Timing(window=1, policy=policy))


@in_range
def lmo_steps(
    learning_rate: Rate, momentum: Fraction = 0.95
) -> optax.GradientTransformationExtraArgs:
    """Return the steps of `ringmaster_lmo` as an optax transformation; its state is ``m``."""

    def update(gradients, m, params=None, *, visit=None, **_):
        m = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, m, gradients)
        steps = jax.tree.map(
            lambda m, g: (
                -rate_at(learning_rate, visit, g)
                * orthogonalized(momentum * m + (1 - momentum) * g)
            ),
            m,
            gradients,
        )
        return steps, m

    def init(params):
        if all(leaf.ndim < 2 for leaf in jax.tree.leaves(params)):
            raise InputError(f"ringmaster_lmo: {NO_MATRICES}")
        return optax.tree.zeros_like(params)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalized(u: Array) -> Array:
    """Bring the singular values of a matrix near 1 by five Newton-Schulz steps, and scale it.

    The scale is ``sqrt(max(1, rows / columns))``. Singular values of at least 0.001 of the
    Frobenius norm end in [0.858, 1.142] before it, all others below 1.142; in float32 the largest
    error of an entry is about 0.005. A vector stays as it is.
    """
    if u.ndim < 2:
        return u
    matrix = u.reshape(u.shape[0], -1)
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / (jnp.linalg.norm(x) + _EPSILON)
    # Each step multiplies X by a polynomial of its Gram matrix. These commute, so that the Gram
    # matrix can be carried instead of X, and X, the larger one, is multiplied once.
    gram, factors = x @ x.T, []
    for a, b, c in POLAR_EXPRESS:
        factor = a * jnp.eye(len(x), dtype=x.dtype) + b * gram + c * gram @ gram
        factors.append(factor)
        gram = factor @ (factor @ gram)
    x = functools.reduce(jnp.matmul, factors) @ x
    x = x.T if rows > columns else x
    return (max(1.0, rows / columns) ** 0.5 * x).reshape(u.shape)
