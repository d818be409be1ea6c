"""DOWNPOUR: each worker's local progress is added to the central variable, however stale."""

import optax

from asyncsim.methods.checks import require_rate
from asyncsim.methods.method import Method, Schedule, gradient_steps


def downpour(learning_rate: float | Schedule = 0.05, optimizer: optax.GradientTransformation | None = None) -> Method:
    """Return DOWNPOUR, with the communication window of the trace.

    A worker takes ``window`` local steps from the copy that it read, and sends their sum; the server adds it::

        sent    = sum of the local steps       (window 1: -learning_rate * gradient)
        central <- central + sent

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps; ignored if an optimizer is given.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer. Its state stays with the worker and is not reset by a read.

    Raises
    ------
    InputError
        For a learning rate that is not above zero.

    Notes
    -----
    Dean et al. let fetch and push periods differ and run them in threads beside the computation, on a
    server in shards without a common version; here both periods are the window and the visit is whole.
    dist-keras looks at the window before the batch, so that its first commit carries one batch less (none
    with window 1); here every window is full.

    References
    ----------
    Dean et al. 2012, "Large scale distributed deep networks", algorithm 1.1 of its appendix.
    """
    require_rate("learning_rate", learning_rate)
    return Method(
        name="downpour",
        hyperparameters={"learning_rate": learning_rate} if optimizer is None else {"optimizer": "optax"},
        optimizer=optimizer or gradient_steps(learning_rate),
        elementwise=True,
    )
