"""YellowFin: the momentum and the learning rate of SGD, tuned from the gradients alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Count, Fraction, Positive, in_range
from asyncsim.methods.method import Array

#: The least estimate of the gradients' variance.
_LEAST_VARIANCE = 1e-6
#: Ends of the cubic's coefficient, whose third power must be finite in float32.
_COEFFICIENTS = (1e-12, 1e12)


class YellowFin(NamedTuple):
    """The tuner's state: moving averages from zero, and the values for the next gradient."""

    step: Array
    curvatures: Array  #: logarithms of the last squared norms, shape ``[window]``
    least_curvature: Array  #: average of the window's least logarithm; the next one of its largest
    largest_curvature: Array
    gradient: Any  #: average gradient, a tree like the parameters
    norm: Array
    squared_norm: Array
    distance: Array  #: average of the estimated distance from the optimum
    density: Array  #: share of the gradient's entries that are not zero
    momentum: Array
    learning_rate: Array


def init_tuner(params: Any, learning_rate: Any, momentum: Any, window: int) -> YellowFin:
    """Build the state before the first gradient."""
    zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
    return YellowFin(
        step=jnp.int32(0),
        curvatures=jnp.zeros(window, zero.dtype),
        least_curvature=zero,
        largest_curvature=zero,
        gradient=jax.tree.map(jnp.zeros_like, params),
        norm=zero,
        squared_norm=zero,
        distance=zero,
        density=zero,
        momentum=zero + momentum,
        learning_rate=zero + learning_rate,
    )


def tune(state: YellowFin, gradients: Any, beta: Any) -> YellowFin:
    """Return the state after a gradient, with the momentum and the learning rate for the next one.

    With ``<.>`` averages with weight ``beta`` on the past, corrected for their start at zero, and
    ``h`` the squared norm of the gradient ``g``, in a window of the last ones::

        h_min, h_max = exp <log least h>, exp <log largest h>
        C            = max(<|g|^2> - |<g>|^2, 1e-6)
        D            = < <|g|> / <|g|^2> >
        x            = the root of  D^2 h_min^2 / (2 C) x = (1 - x)^3  between 0 and 1
        momentum     = max(x^2, ((sqrt(h_max / h_min) - 1) / (sqrt(h_max / h_min) + 1))^2)
        rate         = (1 - sqrt(momentum))^2 / h_min

    The state has their averages with weight ``beta``, from the initial values on, without
    correction; the first gradient does not change them. Curvatures and variance are multiplied by
    the average share of non-zero entries, the distance is divided by its root.

    References
    ----------
    Zhang, Mitliagkas and Re 2017, "YellowFin and the art of momentum tuning", arXiv 1706.03471;
    the rule of the authors' program for TensorFlow.
    """
    dtype = state.norm.dtype
    leaves = jax.tree.leaves(gradients)
    step = state.step + 1
    correction = 1 - beta ** step.astype(dtype)

    def average(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)

    # A gradient of zero has no logarithm.
    squared = jnp.maximum(sum(jnp.vdot(leaf, leaf) for leaf in leaves), jnp.finfo(dtype).tiny)
    filled = sum(jnp.count_nonzero(leaf).astype(dtype) for leaf in leaves)
    density = average(state.density, filled / sum(leaf.size for leaf in leaves))
    curvatures = state.curvatures.at[state.step % len(state.curvatures)].set(jnp.log(squared))
    valid = jnp.arange(len(curvatures), dtype=jnp.int32) < step
    lowest = average(state.least_curvature, jnp.min(jnp.where(valid, curvatures, jnp.inf)))
    highest = average(state.largest_curvature, jnp.max(jnp.where(valid, curvatures, -jnp.inf)))
    mean = average(state.gradient, gradients)
    norm, squared_norm = average((state.norm, state.squared_norm), (jnp.sqrt(squared), squared))
    distance = average(state.distance, norm / squared_norm)

    # Neither the share nor a curvature may be zero below.
    smallest = jnp.finfo(dtype)
    filled_share = jnp.maximum(density / correction, smallest.eps)
    h_min, h_max = (
        jnp.maximum(jnp.exp(logarithm / correction) * filled_share, smallest.tiny)
        for logarithm in (lowest, highest)
    )
    squared_mean = sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(mean)) / correction**2
    variance = filled_share * jnp.maximum(squared_norm / correction - squared_mean, _LEAST_VARIANCE)
    d = distance / correction / jnp.sqrt(filled_share)
    x = _root(jnp.clip((d * h_min) ** 2 / 2 / variance, *_COEFFICIENTS))
    condition = jnp.sqrt(h_max / h_min)
    momentum = jnp.maximum(x**2, ((condition - 1) / (condition + 1)) ** 2)
    rate = (1 - jnp.sqrt(momentum)) ** 2 / h_min
    old = state.momentum, state.learning_rate
    values = jax.tree.map(
        lambda tuned, now: jnp.where(state.step == 0, now, tuned),
        average(old, (momentum, rate)),
        old,
    )
    return YellowFin(
        step, curvatures, lowest, highest, mean, norm, squared_norm, distance, density, *values
    )


@in_range
def yellowfin(
    learning_rate: Positive = 1.0,
    momentum: Fraction = 0.0,
    beta: Fraction = 0.999,
    window: Count = 20,
) -> optax.GradientTransformationExtraArgs:
    """Return SGD with YellowFin's momentum and learning rate, as an optax transformation.

    ``a <- momentum a + gradient``, ``params <- params - learning_rate a``; then the gradient tunes
    both (`tune`). ``learning_rate`` and ``momentum`` are the initial values, the paper's by
    default; ``window``: squared norms among which the curvature's range is taken. Without the
    authors' clip of gradients, their factor of the rate and the slow start of their later program.
    """

    def init(params):
        tuner = init_tuner(params, learning_rate, momentum, window)
        return tuner, jax.tree.map(jnp.zeros_like, params)

    def update(gradients, state, params=None, **_):
        tuner, accumulated = state
        accumulated = jax.tree.map(lambda a, g: tuner.momentum * a + g, accumulated, gradients)
        steps = jax.tree.map(lambda a: -tuner.learning_rate * a, accumulated)
        return steps, (tune(tuner, gradients, beta), accumulated)

    return optax.GradientTransformationExtraArgs(init, update)


def _root(p: Array) -> Array:
    """Return the root between 0 and 1 of ``p x = (1 - x)^3``."""
    # Cardano's formula for y = x - 1, y^3 + p y + p = 0, whose only real root is negative.
    w = -jnp.cbrt((jnp.sqrt(p**2 + 4 / 27 * p**3) + p) / 2)
    return w - p / (3 * w) + 1
