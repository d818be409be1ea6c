"""Batch SGD, Rennala and Ringmaster: plain means and steps; the policy selects the gradients."""

from asyncsim.clusters.policy import Policy
from asyncsim.methods.buffer import add_mean
from asyncsim.methods.downpour import downpour
from asyncsim.methods.method import (
    LEARNING_RATE,
    Method,
    Schedule,
    Timing,
    gradient_steps,
    require_policy,
)
from asyncsim.methods.recipe import shares_programs


@shares_programs
def batch_sgd(
    learning_rate: float | Schedule = LEARNING_RATE, policy: Policy | str | None = "barrier()"
) -> Method:
    """Return SGD with the mean of a version's gradients.

    ::

        central <- central - learning_rate * mean of the version's gradients (once it is complete)

    ``policy``: which gradients make a version; by default those of the cluster's
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
    policy = require_policy(policy)
    return Method(
        name="batch_sgd",
        hyperparameters={
            "learning_rate": learning_rate,
            "policy": None if policy is None else str(policy),
        },
        optimizer=gradient_steps(learning_rate),
        combine=add_mean,
        timing=Timing(policy=policy),
        coordinatewise=True,
    )


@shares_programs
def rennala(
    learning_rate: float | Schedule = LEARNING_RATE,
    policy: Policy | str | None = "discard_stale(limit=1, count=10)",
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


@shares_programs
def ringmaster(
    learning_rate: float | Schedule = LEARNING_RATE,
    policy: Policy | str | None = "discard_stale(limit=10, count=1)",
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
    policy = require_policy(policy)
    named = {"learning_rate": learning_rate, "policy": None if policy is None else str(policy)}
    return downpour(learning_rate)._replace(
        name="ringmaster", hyperparameters=named, timing=Timing(policy=policy)
    )
