"""AGN: a worker's accumulated gradients, normalised by their number."""

from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Method, local_steps


@declared
def agn(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
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

    def message(worker, update, start, central, visit):
        return update / visit.local_steps.astype(update.dtype), worker, {}

    return Method(local_steps(learning_rate, optimizer), message=message, coordinatewise=True)
