"""Entropy-SGD and Parle: each step goes to the mean of an inner loop that explores around a
replica.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Fraction, NonNegative, Positive
from asyncsim.clusters.policy import asynchronous
from asyncsim.methods.buffer import mean_message
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Timing,
    Visit,
    rate_at,
)


class InnerLoop(NamedTuple):
    """State of the inner loop, trees like the parameters, which are the average ``z``."""

    ahead: Any  #: ``y - z``: how far the iterate is from the average
    velocity: Any  #: Nesterov's momentum; ``()`` without
    step: Array  #: inner steps since the loop began


@declared
def entropy_sgd(
    learning_rate: Rate = LEARNING_RATE,
    gamma: Positive | None = 100.0,
    scoping: Fraction = 0.001,
    noise: NonNegative = 1e-4,
    decay: Fraction = 0.75,
    momentum: Fraction = 0.9,
    outer_rate: Positive = 1.0,
    gamma_least: Positive = 1.0,
) -> Method:
    """Return Entropy-SGD on one worker; the window of the trace has the inner steps, 20 in the
    paper's runs.

    An inner loop of stochastic gradient Langevin dynamics begins at the parameters ``x``,
    ``y = z = x``, and takes ``window`` steps, with ``N`` a standard normal of each weight::

        d <- gradient(y) + (y - x) / gamma
        y <- y - learning_rate * d + noise * sqrt(2 * learning_rate) * N
        z <- decay z + (1 - decay) y

    with Nesterov's momentum on ``d``.

    Then the parameters go to its average, ``x <- x - outer_rate (x - z)``, and the loop restarts.

    Parameters
    ----------
    gamma : float, optional
        Reach of the inner loop: the inverse of the paper's gamma. None: no force pulls ``y`` to
        ``x``.
    scoping : float
        In [0, 1). At the ``t``-th outer step the reach is
        ``max(gamma (1 - scoping)**t, gamma_least)``, or ``gamma`` where that is the smaller.
    noise : float
        Root of the temperature; zero for none.
    decay : float
        Of the average, in [0, 1): the paper's alpha. With 0 the average is the last iterate.
    momentum : float
        Nesterov's, of the inner loop, in [0, 1): ``v <- momentum v + d``, and ``d + momentum v``
        replaces ``d``.
    outer_rate : float
        Above zero. The paper's outer step has a factor ``1 / gamma``; its authors' program and this
        leave it out.

    Notes
    -----
    With ``window`` 1, ``decay`` 0 and neither ``gamma``, ``noise`` nor ``momentum`` this is SGD;
    with ``window`` 1 and ``decay`` .75 it is SGD at a quarter of the rate.

    The authors' program gives momentum to the gradient alone, not to the pull, and starts each
    inner loop with the gradient at ``x`` as velocity (here the velocity is kept). It lets
    ``1 / gamma`` grow without bound, by ``1 + scoping`` each time; its ``gamma`` is 1e-4 on MNIST,
    so 10,000 here, and 0.03 on CIFAR-10, 33. Its weight decay and outer momentum are left out.

    References
    ----------
    Chaudhari et al. 2017, "Entropy-SGD: biasing gradient descent into wide valleys", arXiv
    1611.01838, algorithm 1, and its authors' program.
    """
    optimizer = _inner_loop(learning_rate, gamma, gamma_least, scoping, noise, decay, momentum)

    def message(worker, update, start, central, visit):
        return outer_rate * update, worker, {}

    return Method(
        optimizer,
        message=message,
        look_ahead=lambda loop: loop.ahead,
        timing=Timing(workers=1, protocol="exchange", policy=asynchronous()),
        needs_key=_is_noisy(noise),
        coordinatewise=True,
    )


@declared
def parle(
    learning_rate: Rate = LEARNING_RATE,
    gamma: Positive | None = 100.0,
    rho: Positive | None = 10.0,
    scoping: Fraction = 0.01,
    noise: NonNegative = 0.0,
    decay: Fraction = 0.75,
    momentum: Fraction = 0.9,
    outer_rate: Positive = 1.0,
    gamma_least: Positive = 1.0,
    rho_least: Positive = 1.0,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return Parle: replicas that each run Entropy-SGD and are pulled to their mean, once in a
    window of the trace.

    A worker's replica is ``x``. It runs the inner loop of `entropy_sgd` from ``y = z = x`` for
    ``window`` steps, 25 in the paper's runs. Then, with the central variable, the mean of all
    replicas in the previous round::

        x       <- x - outer_rate (x - z) - outer_rate / rho * (x - central)
        central <- mean of all x         (once all have arrived)

    Parameters
    ----------
    gamma, noise, decay, momentum : see `entropy_sgd`
    rho : float, optional
        Reach of the replicas around their mean. None: no force pulls them to it.
    scoping : float
        In [0, 1): ``1 / (2 B)`` in the paper, with ``B`` minibatches in an epoch. In a worker's
        ``t``-th round the reaches are ``max(gamma (1 - scoping)**t, gamma_least)`` and
        ``max(rho (1 - scoping)**t, rho_least)``, or ``gamma`` and ``rho`` where these are the
        smaller.
    outer_rate : float
        Above zero; values of twice ``rho`` and more let the replicas' distances grow.

    Notes
    -----
    Only the replicas' mean is communicated, so that communication per gradient is a ``window``-th
    of data-parallel SGD's. With one worker and without ``rho`` this is `entropy_sgd`. With a window
    of one, ``decay`` 0, ``momentum`` 0 and without ``gamma`` it is elastic averaging whose center
    is the mean of the new replicas, where `easgd` has a moving average of the old ones.

    The paper's rule and its constants are from memory. The authors' program differs: the outer step
    starts at the last ``y`` instead of ``x``, uses an average ``z`` of all replicas, and has
    momentum; its ``gamma`` and ``rho`` are the inverses of the paper's and of these, at first 0.01
    and ``0.01 window workers``, and grow to at most 1 and 10 at an outer rate of 0.1: an
    ``outer_rate / rho`` of 1, the end of the scoping here. Its counter advances once for each
    tensor, so that its scoping is too fast by the number of tensors. On a trace without a barrier
    the central variable is the mean of that version's replicas alone.

    References
    ----------
    Chaudhari et al. 2017, "Parle: parallelizing stochastic gradient descent", arXiv 1707.00424.
    """
    optimizer = _inner_loop(learning_rate, gamma, gamma_least, scoping, noise, decay, momentum)
    pull = _shrinking(rho, rho_least, scoping)

    def message(worker, update, start, central, visit):
        x = start + outer_rate * update
        if rho is not None:
            x = x - outer_rate / pull(visit, x) * (start - central)
        return x, x, {}

    def combine(server, central, messages, visits):
        return Applied(mean_message(messages, visits), server)

    return Method(
        optimizer,
        message=message,
        combine=combine,
        init_worker=lambda central: central,
        resume=lambda worker, read: worker,
        look_ahead=lambda loop: loop.ahead,
        timing=Timing(policy=policy),
        needs_key=_is_noisy(noise),
        coordinatewise=True,
    )


def _inner_loop(
    learning_rate: Any,
    gamma: Any,
    gamma_least: Any,
    scoping: Any,
    noise: Any,
    decay: Any,
    momentum: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return the inner loop: an optimizer of ``z`` by gradients at ``y``."""
    length = _shrinking(gamma, gamma_least, scoping)
    keeps = not (isinstance(momentum, int | float) and momentum == 0)

    def init(params: Any) -> InnerLoop:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return InnerLoop(zeros, zeros if keeps else (), jnp.int32(0))

    def update(gradients, state, params, *, visit, start, **_):
        d = gradients
        if gamma is not None:
            d = jax.tree.map(
                lambda g, z, x, y: g + (z - x + y) / length(visit, g), d, params, start, state.ahead
            )
        velocity: Any = ()
        if keeps:
            velocity = jax.tree.map(lambda v, d: momentum * v + d, state.velocity, d)
            d = jax.tree.map(lambda v, d: d + momentum * v, velocity, d)
        move = jax.tree.map(lambda d: -rate_at(learning_rate, visit, d) * d, d)
        if _is_noisy(noise):
            leaves, tree = jax.tree.flatten(move)
            for place, leaf in enumerate(leaves):
                normal = jax.random.normal(
                    jax.random.fold_in(visit.key, place), leaf.shape, leaf.dtype
                )
                width = noise * jnp.sqrt(
                    2 * jnp.asarray(rate_at(learning_rate, visit, leaf), leaf.dtype)
                )
                leaves[place] = leaf + width * normal
            move = jax.tree.unflatten(tree, leaves)
        # The distance of y from z before z follows; no sum with z itself, so that one step of decay
        # 0 is exactly SGD's.
        ahead = jax.tree.map(jnp.add, state.ahead, move)
        step = state.step + 1
        is_last = step >= jnp.asarray(visit.local_steps, step.dtype)
        # The next loop begins with y = z.
        next_ahead = jax.tree.map(lambda y: jnp.where(is_last, 0, decay * y), ahead)
        step_of_average = jax.tree.map(lambda y: (1 - decay) * y, ahead)
        return step_of_average, InnerLoop(next_ahead, velocity, jnp.where(is_last, 0, step))

    return optax.GradientTransformationExtraArgs(init, update)


def _shrinking(first: Any, smallest: Any, scoping: Any) -> Callable[[Visit, Array], Array]:
    """Return a function that computes a reach at a visit; it shrinks with the worker's rounds."""

    def length(visit: Visit, like: Array) -> Array:
        rounds = jnp.asarray(visit.worker_step, like.dtype)
        return jnp.maximum(first * (1 - scoping) ** rounds, jnp.minimum(first, smallest)).astype(
            like.dtype
        )

    return length


def _is_noisy(noise: Any) -> bool:
    """Return whether noise is drawn: always, unless it is the constant zero."""
    return not (isinstance(noise, int | float) and noise == 0)
