"""Leader SGD: the decrease of a step, the error at a fixed rate, and the direction of the pull.

``convexity`` and ``smoothness`` are the least and the largest curvature, ``noise`` the standard
deviation of the gradient, and ``pull`` the share of the way to the leader that a step takes, as in
`asyncsim.methods.lgd`: the learning rate times the paper's lambda. All from Teng et al. 2019,
arXiv 1905.10395, as the authors' poster quotes it.
"""

from collections.abc import Sequence

import numpy as np

from asyncsim.base.errors import (
    InputError,
    require_count,
    require_nonnegative,
    require_positive,
)


def leader_step_bound(
    gap: float,
    leader_gap: float,
    learning_rate: float,
    pull: float,
    convexity: float,
    smoothness: float,
    noise: float = 0.0,
) -> float:
    """Return a bound of the mean loss above the minimum after a worker's step.

    ::

        (1 - convexity rate) gap - pull (gap - leader_gap) + rate^2 smoothness noise^2 / 2

    for small learning rates: the leader adds a decrease to SGD's, as its loss is the lower one.
    ``gap``, ``leader_gap``: the losses of the worker and the leader above the minimum.
    """
    for name, value in (("gap", gap), ("leader_gap", leader_gap), ("noise", noise)):
        require_nonnegative(name, value)
    _require_rates(learning_rate, convexity, smoothness)
    require_nonnegative("pull", pull)
    if leader_gap > gap:
        raise InputError(
            f"leader_gap = {leader_gap}: the leader's loss is not above the worker's, gap = {gap}"
        )
    return (
        (1 - convexity * learning_rate) * gap
        - pull * (gap - leader_gap)
        + learning_rate**2 * smoothness * noise**2 / 2
    )


def leader_floor(
    learning_rate: float,
    pull: float,
    workers: int,
    convexity: float,
    smoothness: float,
    noise: float = 0.0,
    loss_noise: float = 0.0,
) -> float:
    """Return a bound of the mean loss above the minimum in the long run, with an estimated leader.

    ::

        rate smoothness / convexity noise^2 / 2 + 4 / convexity lambda sqrt(workers) loss_noise

    with ``lambda = pull / rate``. ``loss_noise``: standard deviation of the losses by which the
    leader is chosen. The first term is SGD's; the second vanishes with exact losses. If rate and
    lambda fall as 1 over the number of steps, the error does, too, as SGD's.
    """
    _require_rates(learning_rate, convexity, smoothness)
    for name, value in (("pull", pull), ("noise", noise), ("loss_noise", loss_noise)):
        require_nonnegative(name, value)
    root = np.sqrt(require_count("workers", workers))
    strength = pull / learning_rate
    of_gradients = learning_rate * smoothness / convexity * noise**2 / 2
    return float(of_gradients + 4 / convexity * strength * root * loss_noise)


def newton_share(
    curvature: Sequence[float],
    x: Sequence[float],
    strength: float,
    samples: int = 10_000,
    seed: int = 0,
) -> float:
    """Return the share of better points towards which a pull turns the step to Newton's direction.

    Points ``z`` are drawn uniformly from the set with at most the loss of ``x``, on the
    quadratic ``sum(curvature x^2) / 2``. A point counts if the angle of
    ``-gradient + strength (z - x)`` with the Newton step ``-x`` is smaller than the angle of
    ``-gradient``. At least a half, if ``strength`` (the paper's lambda) is small, or if the
    gradient is far from Newton's direction.
    """
    h, point = np.asarray(curvature, float), np.asarray(x, float)
    if h.ndim != 1 or h.shape != point.shape or not (h > 0).all() or not point.any():
        raise InputError(
            f"curvature = {curvature!r}, x = {x!r}: must be as many positive eigenvalues as "
            "coordinates, and x not the minimum"
        )
    require_positive("strength", strength)
    rng = np.random.default_rng(require_count("seed", seed, minimum=0))
    directions = rng.normal(size=(require_count("samples", samples), len(h)))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    radius = np.sqrt(h @ point**2) * rng.random((samples, 1)) ** (1 / len(h))
    leaders = radius * directions / np.sqrt(h)
    pulled = -h * point + strength * (leaders - point)
    return float(np.mean(_cosines(pulled, -point) > _cosines(-(h * point)[None], -point)))


def _cosines(steps: np.ndarray, newton: np.ndarray) -> np.ndarray:
    return steps @ newton / np.linalg.norm(steps, axis=1) / np.linalg.norm(newton)


def _require_rates(learning_rate: float, convexity: float, smoothness: float) -> None:
    for name, value in (
        ("learning_rate", learning_rate),
        ("convexity", convexity),
        ("smoothness", smoothness),
    ):
        require_positive(name, value)
    if convexity > smoothness:
        raise InputError(
            f"convexity = {convexity}: the least curvature is at most the largest, "
            f"smoothness = {smoothness}"
        )
