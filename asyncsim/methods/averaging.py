"""Model averaging: workers train from the same parameters, then average their results."""

from asyncsim.methods.buffer import add_mean
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Method, Timing, local_steps


@declared
def averaging(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return model averaging; the trace's window is the local steps between two averages.

    With ``x`` a worker's parameters after its local steps from the central variable::

        central <- mean of all x          (once all have arrived)

    Notes
    -----
    dist-keras averages after each epoch of every worker's own share of the data: a window of
    ``examples / workers / batch_size`` and a problem with ``split="even"``. It creates a new local
    optimizer for each epoch; here its state stays with the worker and is neither averaged nor
    reset. A window of one is synchronous SGD.

    Workers send their local progress, whose mean is added: the same as the mean of the parameters,
    as all start from one version. On a trace without a barrier it is the mean of a version's
    progress from different starts.

    References
    ----------
    dist-keras' ``AveragingTrainer``; McMahan et al. 2017, "Communication-efficient learning of deep
    networks from decentralized data", arXiv 1602.05629 (with all clients and equal shares); Stich
    2019, "Local SGD converges fast and communicates little", arXiv 1805.09767.
    """
    return Method(
        local_steps(learning_rate, optimizer),
        combine=add_mean,
        timing=Timing(policy=policy),
        coordinatewise=True,
    )
