"""AGN: a worker's accumulated gradients, normalised by their number."""

import optax

from asyncsim.methods.method import LEARNING_RATE, Method, Schedule, local_steps
from asyncsim.methods.recipe import shares_programs


@shares_programs
def agn(
    learning_rate: float | Schedule = LEARNING_RATE,
    optimizer: optax.GradientTransformation | None = None,
) -> Method:
    """Return accumulated gradient normalization, with the communication window of the trace.

    A worker takes ``window`` local steps from the copy that it read and sends their mean; the
    server adds it::

        sent    = sum of the local steps / window
        central <- central + sent

    The window's steps determine the direction; the length is one step's. With window 1 it is
    DOWNPOUR.

    Notes
    -----
    dist-keras calls this method ADAG, the thesis' name for another method
    (`asyncsim.methods.adag`); its first window is a full one, unlike in its DOWNPOUR. TensorFlow's
    AGNOptimizer sends the mean of the raw gradients, and one optimizer for all takes the step on
    the server: the same with plain steps, another method with Adam, which the runs of Hermans'
    thesis use on the workers.

    References
    ----------
    Hermans, Spanakis and Moeckel 2017, "Accumulated gradient normalization", arXiv 1710.02368;
    Hermans 2017, "On scalable deep learning and parallelizing gradient descent", master thesis,
    Maastricht University.
    """
    named, local = local_steps(learning_rate, optimizer)

    def message(worker, update, start, central, visit):
        return update / visit.local_steps.astype(update.dtype), worker, {}

    return Method(
        name="agn", hyperparameters=named, optimizer=local, message=message, coordinatewise=True
    )
