"""Rescaled ASGD: learning rates in proportion to the workers' times, for heterogeneous data."""

import jax.numpy as jnp

from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Timing, gradient_steps


@declared
def rescaled_asgd(learning_rate: Rate = LEARNING_RATE) -> Method:
    """Return asynchronous SGD whose workers contribute equally, whatever their speeds.

    With ``T_i`` worker ``i``'s mean time between commits so far, and ``n`` workers::

        central <- central - learning_rate * T_i * mean over j of 1 / T_j * gradient

    All workers thus have the same rate in a unit of time, and the central variable tends to the
    optimum of the mean of their objectives. With equal rates (`downpour`) it tends to the optimum
    of a mean that weights each objective by the frequency of its worker's commits.

    Notes
    -----
    The times are measured: ``T_i`` is the time of the visit over worker ``i``'s number of commits,
    so that the factor is ``k / (n k_i)``, with ``k`` commits of which ``k_i`` are the worker's. The
    paper's theory has fixed and known computation times. The factors' mean over all commits is one;
    the paper's normalisation is not known here, and the learning rate absorbs it. The factor of a
    slow worker is large: a stable rate is the smaller, the slower the slowest worker. The paper is
    known second-hand.

    References
    ----------
    Mahran, Maranjyan and Richtarik 2026, "Rescaled asynchronous SGD: optimal distributed
    optimization under data and system heterogeneity", arXiv 2605.13434.
    """

    def apply(server, central, message, memory, visit):
        counts = visit.commit + 1, visit.worker_step + 1, visit.workers
        k, k_i, n = (jnp.asarray(count, central.dtype) for count in counts)
        return Applied(central + k / (n * k_i) * message, server, memory)

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        timing=Timing(window=1),
        coordinatewise=True,
    )
