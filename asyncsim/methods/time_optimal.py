"""Rennala and Ringmaster: plain averages and steps, once the timing has chosen which gradients count."""

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
    require_rate,
)
from asyncsim.methods.recipe import shares_programs


@shares_programs
def batch_sgd(learning_rate: float | Schedule = LEARNING_RATE, policy: Policy | str | None = "barrier()") -> Method:
    """Return SGD with the mean of all gradients that make up a version.

    ::

        central <- central - learning_rate * mean of the version's gradients       (once it is complete)

    ``policy``: which gradients make a version; by default one of each worker, synchronous SGD.

    Notes
    -----
    What it is called is a matter of the trace. All workers at a barrier: synchronous SGD. The first K of them: K-sync,
    or synchronous SGD with backup workers; with the others computing on, K-async. Any K gradients: K-batch-async.
    A version of one gradient each: DOWNPOUR.

    References
    ----------
    Chen, Pan, Monga, Bengio and Jozefowicz 2016, arXiv 1604.00981 (backup workers); Dutta et al. 2018, arXiv 1803.01113
    (K-sync and its relatives).
    """
    require_rate("learning_rate", learning_rate)
    needed = require_policy(policy)
    return Method(
        name="batch_sgd",
        hyperparameters={"learning_rate": learning_rate, "policy": None if needed is None else str(needed)},
        optimizer=gradient_steps(learning_rate),
        combine=add_mean,
        timing=Timing(policy=needed),
    )


@shares_programs
def rennala(
    learning_rate: float | Schedule = LEARNING_RATE, policy: Policy | str | None = "discard_stale(limit=1, count=10)"
) -> Method:
    """Return Rennala SGD, for traces on which a fixed number of fresh gradients makes a version.

    ::

        central <- central - learning_rate * mean of the version's gradients       (once it is complete)

    ``learning_rate``: about half the inverse of the largest curvature. ``policy``: with the batch of fresh gradients as
    its count.

    Notes
    -----
    That only gradients at the newest version count is timing: stale ones are discarded, or their computation is
    cancelled, in the simulation. The values are those of `batch_sgd`.

    References
    ----------
    Tyurin and Richtarik 2023, "Optimal time complexities of parallel stochastic optimization methods under a fixed
    computation model", arXiv 2305.12387.
    """
    return batch_sgd(learning_rate, policy)._replace(name="rennala")


@shares_programs
def ringmaster(
    learning_rate: float | Schedule = LEARNING_RATE, policy: Policy | str | None = "discard_stale(limit=10, count=1)"
) -> Method:
    """Return Ringmaster ASGD, for traces without gradients that are too stale.

    ::

        central <- central - learning_rate * gradient

    ``learning_rate``: about half the inverse of the largest curvature times the limit of the staleness. ``policy``:
    with the limit of the staleness; ``cancel_stale`` for the variant with stops.

    Notes
    -----
    That gradients from some staleness on are ignored (the paper's first algorithm), or no longer computed (its second),
    is timing and done in the simulation. The values are those of `asyncsim.methods.downpour`.

    References
    ----------
    Maranjyan, Tyurin and Richtarik 2025, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
    arXiv 2501.16168.
    """
    needed = require_policy(policy)
    named = {"learning_rate": learning_rate, "policy": None if needed is None else str(needed)}
    return downpour(learning_rate)._replace(name="ringmaster", hyperparameters=named, timing=Timing(policy=needed))
