"""Consensus on a topology: eigenvalues, rates, and whether a cycle averages exactly.

Of the averaging alone, without gradients: ``x <- P x`` with one matrix of the cycle after the other, all in step.
"""

import math

import numpy as np

from asyncsim.base.errors import require_count
from asyncsim.clusters.topologies import Topology, as_topology

#: By how much a matrix that averages exactly may miss it.
_ROUND_OFF = 1e-12


def second_eigenvalue(topology: Topology | str, workers: int) -> float:
    """Return the second largest modulus of the eigenvalues of the product of a cycle's matrices.

    The distance from consensus shrinks by it in each cycle, in the long run. The largest is 1.
    """
    product = _product(topology, workers)
    if workers == 1 or np.ptp(product, axis=1).max() < _ROUND_OFF:  # not to take eigenvalues of round-off
        return 0.0
    return float(np.sort(abs(np.linalg.eigvals(product)))[-2])


def consensus_rate(topology: Topology | str, workers: int) -> float:
    """Return the factor by which the distance from consensus shrinks per round, in the long run.

    `second_eigenvalue` to the power of one over the length of the cycle; 0 where a cycle averages exactly.
    """
    return second_eigenvalue(topology, workers) ** (1 / len(as_topology(topology).edges(workers)))


def spectral_gap(topology: Topology | str, workers: int) -> float:
    """Return one less the consensus rate: 1 for exact averages in a cycle, 0 for none at all.

    Of one symmetric matrix, ``1 - max(abs(lambda_2), abs(lambda_n))``, as the bounds of D-PSGD have it.

    References
    ----------
    Lian et al. 2017, arXiv 1705.09056, assumption 1.3.
    """
    return 1.0 - consensus_rate(topology, workers)


def ring_second_eigenvalue(workers: int) -> float:
    """Return the second largest eigenvalue of the ring of three and more, ``(1 + 2 cos(2 pi / workers)) / 3``."""
    return (1 + 2 * math.cos(2 * math.pi / require_count("workers", workers, minimum=3))) / 3


def rounds_to_average(topology: Topology | str, workers: int) -> int | None:
    """Return after how many rounds from the begin of a cycle all have the exact mean; None if the cycle ends before."""
    product = np.eye(workers)
    for done, matrix in enumerate(as_topology(topology).matrices(workers)):
        if abs(product - 1 / workers).max() < _ROUND_OFF:
            return done
        product = matrix @ product
    return len(as_topology(topology).edges(workers)) if abs(product - 1 / workers).max() < _ROUND_OFF else None


def pair_contraction(topology: Topology | str, workers: int) -> float:
    """Return the factor by which one exchange of a random pair shrinks the expected squared distance from the mean.

    Each worker is as likely as another to begin the next exchange (exponential clocks alike), with one of its
    neighbours at random: the second largest eigenvalue of the mean matrix. An equality on the complete graph,
    ``1 - 1 / (workers - 1)``; elsewhere the largest that it can be.

    References
    ----------
    Boyd, Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms".
    """
    neighbours = as_topology(topology).neighbours(workers)
    mean = np.eye(workers)
    for one, others in enumerate(neighbours):
        for other in others:
            step = np.zeros(workers)
            step[[one, other]] = 1, -1
            mean -= np.outer(step, step) / (2 * workers * len(others))
    return float(np.sort(np.linalg.eigvalsh(mean))[-2]) if workers > 1 else 0.0


def _product(topology: Topology | str, workers: int) -> np.ndarray:
    product = np.eye(require_count("workers", workers))
    for matrix in as_topology(topology).matrices(workers):
        product = matrix @ product
    return product
