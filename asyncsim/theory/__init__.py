"""Closed forms of asynchronous training: what a simulation must agree with.

Each function states its assumptions; those that end in ``_theory`` say what is known of an `asyncsim.Cluster`. Times
are in the unit of the laws (seconds); staleness is counted in versions between the read and the apply, so that one
worker alone has staleness 0.
"""

from asyncsim.theory.barriers import BoundedClocks, barrier_time, batch_time, bounded_clocks, sum_law
from asyncsim.theory.cluster_theory import (
    QueueTheory,
    StalenessTheory,
    ThroughputTheory,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)
from asyncsim.theory.gossip import (
    consensus_rate,
    pair_contraction,
    ring_second_eigenvalue,
    rounds_to_average,
    second_eigenvalue,
    spectral_gap,
)
from asyncsim.theory.momentum import (
    critical_step,
    elastic_path,
    elastic_round_robin,
    elastic_stable_alpha,
    elastic_stable_beta,
    elastic_synchronous,
    implicit_momentum,
    implicit_momentum_path,
    stable_step,
    window_step,
)
from asyncsim.theory.queueing import Repairman, knee, repairman, repairman_probabilities, saturation_bound, think_time
from asyncsim.theory.staleness import (
    GeometricStaleness,
    batch_staleness,
    conserved_staleness,
    expected_inverse_staleness,
    first_staleness,
    geometric_staleness,
    geometric_staleness_variance,
    heterogeneous_geometric_staleness,
    other_open_reads,
    renewal_staleness_means,
    renewal_staleness_variance,
    round_robin_staleness,
)

__all__ = [
    "BoundedClocks",
    "GeometricStaleness",
    "QueueTheory",
    "Repairman",
    "StalenessTheory",
    "ThroughputTheory",
    "barrier_time",
    "batch_staleness",
    "batch_time",
    "bounded_clocks",
    "consensus_rate",
    "conserved_staleness",
    "critical_step",
    "elastic_path",
    "elastic_round_robin",
    "elastic_stable_alpha",
    "elastic_stable_beta",
    "elastic_synchronous",
    "expected_inverse_staleness",
    "first_staleness",
    "geometric_staleness",
    "geometric_staleness_variance",
    "heterogeneous_geometric_staleness",
    "implicit_momentum",
    "implicit_momentum_path",
    "knee",
    "other_open_reads",
    "pair_contraction",
    "queue_theory",
    "renewal_staleness_means",
    "renewal_staleness_variance",
    "repairman",
    "repairman_probabilities",
    "ring_second_eigenvalue",
    "round_robin_staleness",
    "rounds_to_average",
    "saturating_workers",
    "saturation_bound",
    "second_eigenvalue",
    "spectral_gap",
    "stable_step",
    "staleness_theory",
    "sum_law",
    "think_time",
    "throughput_theory",
    "window_step",
]
