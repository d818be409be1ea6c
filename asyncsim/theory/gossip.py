"""Consensus on a topology: eigenvalues, rates, and exact averages.

All for averaging alone, without gradients: ``x <- P x`` with the matrices of the cycle in turn, all
workers in step.
"""

import numpy as np

from asyncsim.base.errors import require_count
from asyncsim.clusters.topologies import Topology, as_topology

#: Tolerance for a matrix that averages exactly.
_ROUND_OFF = 1e-12


def second_eigenvalue(topology: Topology | str, workers: int) -> float:
    """Return the second largest eigenvalue modulus of the product of a cycle's matrices.

    In the long run the distance from consensus shrinks by this factor in each cycle. The largest
    modulus is 1.
    """
    product = _product(topology, workers)
    if workers == 1 or np.ptp(product, axis=1).max() < _ROUND_OFF:  # eigenvalues would be round-off
        return 0.0
    return float(np.sort(abs(np.linalg.eigvals(product)))[-2])


def consensus_rate(topology: Topology | str, workers: int) -> float:
    """Return the factor by which the distance from consensus shrinks in a round, in the long run.

    It is `second_eigenvalue` to the power of one over the length of the cycle; 0 if a cycle
    averages exactly.
    """
    return second_eigenvalue(topology, workers) ** (1 / len(as_topology(topology).edges(workers)))


def spectral_gap(topology: Topology | str, workers: int) -> float:
    """Return one less the consensus rate: 1 if a cycle averages exactly, 0 without consensus.

    For one symmetric matrix this is ``1 - max(abs(lambda_2), abs(lambda_n))``, as in the bounds of
    D-PSGD.

    References
    ----------
    Lian et al. 2017, arXiv 1705.09056, assumption 1.3.
    """
    return 1.0 - consensus_rate(topology, workers)


def _product(topology: Topology | str, workers: int) -> np.ndarray:
    product = np.eye(require_count("workers", workers))
    for matrix in as_topology(topology).matrices(workers):
        product = matrix @ product
    return product
