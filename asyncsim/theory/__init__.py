"""Closed forms of asynchronous training, against which simulations are tested.

Each function states its assumptions; names that end in ``_theory`` apply the closed forms to an
`asyncsim.Cluster`. Times are in the unit of the laws (seconds); staleness is counted in versions
between the read and the apply, so that one worker alone has staleness 0.
"""

from asyncsim.theory.barriers import (
    barrier_time,
    sum_law,
    trial_success,
)
from asyncsim.theory.cluster_theory import (
    QueueTheory,
    StalenessTheory,
    ThroughputTheory,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)
from asyncsim.theory.failures import (
    checkpoint_efficiency,
    daly_interval,
    young_interval,
)
from asyncsim.theory.gossip import (
    consensus_rate,
    second_eigenvalue,
    spectral_gap,
)
from asyncsim.theory.momentum import (
    elastic_stable_alpha,
    elastic_stable_beta,
    implicit_momentum,
    implicit_momentum_path,
    momentum_stable_rate,
    stable_step,
    window_step,
)
from asyncsim.theory.queueing import (
    Repairman,
    knee,
    repairman,
    saturation_bound,
    think_time,
)
from asyncsim.theory.staleness import (
    first_staleness,
    geometric_staleness,
    geometric_staleness_variance,
    renewal_staleness_variance,
)

__all__ = [
    "QueueTheory",
    "Repairman",
    "StalenessTheory",
    "ThroughputTheory",
    "barrier_time",
    "checkpoint_efficiency",
    "consensus_rate",
    "daly_interval",
    "elastic_stable_alpha",
    "elastic_stable_beta",
    "first_staleness",
    "geometric_staleness",
    "geometric_staleness_variance",
    "implicit_momentum",
    "implicit_momentum_path",
    "knee",
    "momentum_stable_rate",
    "queue_theory",
    "renewal_staleness_variance",
    "repairman",
    "saturating_workers",
    "saturation_bound",
    "second_eigenvalue",
    "spectral_gap",
    "stable_step",
    "staleness_theory",
    "sum_law",
    "think_time",
    "throughput_theory",
    "trial_success",
    "window_step",
    "young_interval",
]
