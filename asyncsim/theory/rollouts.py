"""Closed forms of the staleness of rollouts.

Notation: C slots, batches of B samples, groups of S, lengths with mean E L and coefficient of
variation cv, M the mean of the longest length of a group over E L, T the seconds of an update.
``rho = T C / (B E L)`` is the rate of rollouts over the rate of training if all slots are busy. All
are means over a long run with one learner, no transfer time and no failures.
"""

import math

import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.clusters.laws import Law
from asyncsim.clusters.rollouts import Rollouts

#: Points of the quadrature over a law of lengths.
_POINTS = 20_000


def load(rollouts: Rollouts, update_time: float) -> float:
    """Return rho: the rate at which busy slots generate samples over the rate of training."""
    return update_time * rollouts.slots / (rollouts.batch * rollouts.length.mean)


def longest(length: Law, group: int) -> float:
    """Return M: the mean longest length of a group over the mean length, by quadrature."""
    return _mean_of_largest(length, group) / length.mean


def _mean_of_largest(length: Law, count: int) -> float:
    """Return the mean of the largest of independent lengths: the integral of 1 - F(x)**count."""
    high = length.mean
    while 1.0 - length.cdf(high) ** count > 1e-9:
        high *= 2.0
    grid = np.linspace(0.0, high, _POINTS)
    return float(np.trapezoid(1.0 - length.cdf(grid) ** count, grid))


def mean_staleness(rollouts: Rollouts, update_time: float, weight: str = "samples") -> float | None:
    """Return the mean staleness of trained samples; None where no closed form is known.

    Parameters
    ----------
    weight : {"samples", "tokens"}
        As in `Trace.staleness`.

    Notes
    -----
    ``pace(eta)`` while the window is full: exactly eta, for every law and order; by samples only.
    ``keep()`` with rho < 1, and ``drop_oldest(q)`` with rho > 1: see the module's notation. Of
    tokens the forms are known for groups of one.

    Simulations agree within 2 % but for `drop_oldest` with hardly more slots than samples in a
    batch, or with groups, one batch that waits and rho near one: there the forms are up to 5 % off.
    """
    if weight not in ("samples", "tokens"):
        raise InputError(f"weight = {weight!r}: must be 'samples' or 'tokens'")
    rho, queue = load(rollouts, update_time), rollouts.queue
    per_batch = rollouts.slots / rollouts.batch
    if rollouts.consume != "finished" or rollouts.submit != "rollout":
        return float(queue.eta) if queue.eta is not None and weight == "samples" else None
    if queue.eta is not None:
        return float(queue.eta) if weight == "samples" else None
    waits = rho
    if queue.name == "drop_oldest" and rho > 1:
        assert queue.batches is not None
        waits = (2 * queue.batches + rho - 1) / (2 * rho)
    elif queue.name == "discard" or rho >= 1:
        return None
    generation = per_batch / max(1.0, rho)
    if weight == "samples":
        return generation * longest(rollouts.length, rollouts.group) + waits
    if rollouts.group > 1:
        return None
    spread = 1 + (rollouts.length.std / rollouts.length.mean) ** 2
    halves = 2.0 if rollouts.updates == "in_flight" else 1.0
    return generation * spread / halves + waits


def kept_share(rollouts: Rollouts, update_time: float) -> float:
    """Return the share of samples that ``discard(K)`` keeps, for groups of one and rho < 1.

    A sample is kept iff ``ceil(phi + L / P) - 1 + 1{phi < rho} <= K``, phi uniform on [0, 1) and P
    the period of updates, which itself depends on the share: solved by bisection.
    """
    limit = rollouts.queue.limit
    if limit is None or rollouts.group > 1:
        raise InputError(f"queue = {rollouts.queue}: must be discard(limit), with group=1")
    phi = (np.arange(400) + 0.5) / 400

    def share(period: float) -> float:
        waits = phi < update_time / period
        longest = (limit + 1 - waits - phi) * period  # the longest length that is kept
        return float(np.mean(rollouts.length.cdf(np.maximum(longest, 0.0)) * (longest > 0)))

    shortest = rollouts.batch * rollouts.length.mean / rollouts.slots
    low, high = shortest, shortest
    while high * share(high) < shortest:
        high *= 2.0
        if not math.isfinite(high):
            raise InputError(f"queue = {rollouts.queue}: no sample would be kept")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * share(middle) < shortest else (low, middle)
    return share(max(high, update_time))
