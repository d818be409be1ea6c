"""Adaptive staleness: an update counts less the staler it is."""

import optax

from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Schedule, local_steps


def adaptive_staleness(
    learning_rate: float | Schedule = LEARNING_RATE, optimizer: optax.GradientTransformation | None = None
) -> Method:
    """Return DOWNPOUR with each update divided by its staleness plus one.

    ::

        central <- central + sent / (staleness + 1)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer, in the place of plain steps.

    Raises
    ------
    InputError
        For a learning rate that is not above zero, or one beside an optimizer.

    Notes
    -----
    Counted from zero: a fresh update is taken whole. Zhang et al. divide by the staleness itself, and leave
    a fresh update alone (`asyncsim.methods.softsync`). The rule of dist-keras' DynSGD (`asyncsim.methods.dynsgd`).

    References
    ----------
    Zhang, Gupta, Lian and Liu 2016, arXiv 1511.05950; the form of Hermans and Louppe 2018, arXiv 1805.08469.
    """
    named, local = local_steps(learning_rate, optimizer)

    def apply(server, central, message, memory, visit):
        return Applied(central + message / (visit.staleness + 1).astype(central.dtype), server, memory)

    return Method(
        name="adaptive_staleness",
        hyperparameters=named,
        optimizer=local,
        apply=apply,
        elementwise=True,
    )
