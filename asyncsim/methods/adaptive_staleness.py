"""Adaptive staleness: an update counts less the staler it is."""

import optax

from asyncsim.methods.checks import require_rate
from asyncsim.methods.method import Applied, Method, Schedule, gradient_steps


def adaptive_staleness(
    learning_rate: float | Schedule = 0.05, optimizer: optax.GradientTransformation | None = None
) -> Method:
    """Return DOWNPOUR with each update divided by its staleness plus one.

    ::

        central <- central + sent / (staleness + 1)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps; ignored if an optimizer is given.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer.

    Raises
    ------
    InputError
        For a learning rate that is not above zero.

    Notes
    -----
    Counted from zero: a fresh update is taken whole. Zhang et al. divide by the staleness itself, and leave
    a fresh update alone. Called DynSGD in dist-keras, after a different rule of Jiang et al. (2017).

    References
    ----------
    Zhang, Gupta, Lian and Liu 2016, arXiv 1511.05950; the form of Hermans and Louppe 2018, arXiv 1805.08469.
    """
    require_rate("learning_rate", learning_rate)

    def apply(server, central, message, memory, visit):
        return Applied(central + message / (visit.staleness + 1).astype(central.dtype), server, memory)

    return Method(
        name="adaptive_staleness",
        hyperparameters={"learning_rate": learning_rate} if optimizer is None else {"optimizer": "optax"},
        optimizer=optimizer or gradient_steps(learning_rate),
        apply=apply,
        elementwise=True,
    )
