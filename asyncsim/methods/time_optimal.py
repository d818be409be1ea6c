"""Batch SGD, Rennala and Ringmaster: plain means and steps; the policy selects the gradients."""

from asyncsim.methods.buffer import add_mean
from asyncsim.methods.declared import PolicyLike, Rate, declared
from asyncsim.methods.downpour import downpour
from asyncsim.methods.method import LEARNING_RATE, Method, Timing, gradient_steps


@declared
def batch_sgd(learning_rate: Rate = LEARNING_RATE, policy: PolicyLike = "barrier()") -> Method:
    """Return SGD with the mean of a version's gradients.

    ::

        central <- central - learning_rate * mean of the version's gradients (once it is complete)

    ``policy``: which gradients make a version; by default the gradients of the cluster's
    `asyncsim.barrier`, on other clusters one of each worker: synchronous SGD.

    Notes
    -----
    The trace decides the usual name. All workers at a barrier: synchronous SGD. The first K of
    them: K-sync, or synchronous SGD with backup workers; if the others continue computing, K-async.
    Any K gradients: K-batch-async. One gradient a version: DOWNPOUR.

    References
    ----------
    Chen, Pan, Monga, Bengio and Jozefowicz 2016, "Revisiting distributed synchronous SGD", arXiv
    1604.00981 (backup workers); Dutta et al. 2018, "Slow and stale gradients can win the race:
    error-runtime trade-offs in distributed SGD", arXiv 1803.01113 (K-sync and its relatives).
    """
    return Method(
        gradient_steps(learning_rate),
        combine=add_mean,
        timing=Timing(policy=policy),
        coordinatewise=True,
    )


@declared
def rennala(
    learning_rate: Rate = LEARNING_RATE,
    policy: PolicyLike = "discard_stale(limit=1, count=10)",
) -> Method:
    """Return Rennala SGD, for traces on which a fixed number of fresh gradients makes a version.

    ::

        central <- central - learning_rate * mean of the version's gradients (once it is complete)

    ``learning_rate``: about half the inverse of the largest curvature. ``policy``: its count is the
    batch of fresh gradients.

    Notes
    -----
    The simulation discards stale gradients, or cancels their computation, so that only gradients at
    the newest version count. The update is `batch_sgd`'s.

    References
    ----------
    Tyurin and Richtarik 2023, "Optimal time complexities of parallel stochastic optimization
    methods under a fixed computation model", arXiv 2305.12387.
    """
    return batch_sgd(learning_rate, policy)._replace(name="rennala")


@declared
def ringmaster(
    learning_rate: Rate = LEARNING_RATE,
    policy: PolicyLike = "discard_stale(limit=10)",
) -> Method:
    """Return Ringmaster ASGD, for traces without gradients that are too stale.

    ::

        central <- central - learning_rate * gradient

    ``learning_rate``: about half the inverse of the largest curvature times the limit of the
    staleness. ``policy``: the staleness limit; use ``cancel_stale`` for the variant with stops.

    Notes
    -----
    The simulation ignores gradients beyond the limit (the paper's first algorithm) or stops
    computing them (its second). The update is `asyncsim.methods.downpour`'s.

    References
    ----------
    Maranjyan, Tyurin and Richtarik 2025, "Ringmaster ASGD: the first asynchronous SGD with optimal
    time complexity", arXiv 2501.16168.
    """
    return downpour(learning_rate)._replace(timing=Timing(policy=policy))
