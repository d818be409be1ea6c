"""Adaptive staleness, and the equal rule of dist-keras' DynSGD: stale updates have less weight."""

from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, local_steps


@declared
def adaptive_staleness(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DOWNPOUR with each update divided by its staleness plus one.

    ::

        central <- central + sent / (staleness + 1)

    Notes
    -----
    Staleness counts from zero: a fresh update is applied whole. Zhang et al. divide by the
    staleness itself, and do not scale a fresh update (`asyncsim.methods.softsync`). dist-keras'
    DynSGD has this rule (`dynsgd`).

    References
    ----------
    Zhang, Gupta, Lian and Liu 2016, arXiv 1511.05950; the form of Hermans and Louppe 2018, arXiv
    1805.08469.
    """

    def apply(server, central, message, memory, visit):
        return Applied(
            central + message / (visit.staleness + 1).astype(central.dtype), server, memory
        )

    return Method(
        local_steps(learning_rate, optimizer),
        apply=apply,
        coordinatewise=True,
    )


@declared
def dynsgd(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DynSGD: the sum of a window's steps, divided by its staleness plus one.

    ::

        central <- central + sent / (staleness + 1)

    Notes
    -----
    The same rule as `asyncsim.methods.adaptive_staleness`, the energy-matching paper's name for it;
    dist-keras' users know this one. The message is not divided by the window. The thesis' runs use
    Adam. dist-keras counts the staleness outside its lock, so that under contention it can be too
    small by the number of waiting commits; here it is counted when the message is applied. Jiang et
    al. store several versions of the parameters on the server and divide by the number of workers
    that push to a version: another method, known to us only from memory and not included.

    References
    ----------
    Hermans 2017, "On scalable deep learning and parallelizing gradient descent", master thesis,
    Maastricht University; after Jiang, Cui, Zhang and Yu 2017, "Heterogeneity-aware distributed
    parameter servers".
    """
    return adaptive_staleness(learning_rate, optimizer)._replace(name="dynsgd")
