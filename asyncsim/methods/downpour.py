"""DOWNPOUR: each worker's local progress is added to the central variable, however stale."""

import optax

from asyncsim.methods.method import LEARNING_RATE, Method, Schedule, local_steps


def downpour(
    learning_rate: float | Schedule = LEARNING_RATE, optimizer: optax.GradientTransformation | None = None
) -> Method:
    """Return DOWNPOUR, with the communication window of the trace.

    A worker takes ``window`` local steps from the copy that it read, and sends their sum; the server adds it::

        sent    = sum of the local steps       (window 1: -learning_rate * gradient)
        central <- central + sent

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer, in the place of plain steps. Its state stays with the worker and is not reset by
        a read.

    Raises
    ------
    InputError
        For a learning rate that is not above zero, or one beside an optimizer.

    Notes
    -----
    Dean et al. let fetch and push periods differ and run them in threads beside the computation, on a
    server in shards without a common version; here both periods are the window and the visit is whole.
    dist-keras looks at the window before the batch, so that its first commit carries one batch less (none
    with window 1); here every window is full.

    Hermans' thesis runs Adam on the workers (``optimizer=optax.adam(1e-3)``): the size of its messages does not follow
    that of the gradients, and its collapses from some number of workers on are those of such steps.

    Dean et al. also run Adagrad on the server, which makes nothing of the workers' rate:
    ``async_local_sgd(server_optimizer=optax.adagrad(rate, initial_accumulator_value=0))``.

    References
    ----------
    Dean et al. 2012, "Large scale distributed deep networks", algorithm 1.1 of its appendix.
    """
    named, local = local_steps(learning_rate, optimizer)
    return Method(name="downpour", hyperparameters=named, optimizer=local, elementwise=True)
