"""Model averaging: workers train from the same parameters, and the mean of what they arrive at is the next start."""

import optax

from asyncsim.clusters.policy import Policy
from asyncsim.methods.buffer import add_mean
from asyncsim.methods.method import LEARNING_RATE, Method, Schedule, Timing, local_steps, require_policy
from asyncsim.methods.recipe import shares_programs


@shares_programs
def averaging(
    learning_rate: float | Schedule = LEARNING_RATE,
    optimizer: optax.GradientTransformation | None = None,
    policy: Policy | str | None = "barrier()",
) -> Method:
    """Return model averaging, the window of the trace being the local steps between two averages.

    With ``x`` the parameters that a worker arrives at from the central variable::

        central <- mean of all x          (once they are complete)

    Notes
    -----
    dist-keras averages after each epoch of every worker's own share of the data: a window of ``examples / workers /
    batch_size`` and a problem with ``sharded=True``. It makes a new local optimizer for each epoch; here its state
    stays with the worker and is neither averaged nor reset. A window of one is synchronous SGD.

    What is sent is the local progress, whose mean is added: the same as the mean of the parameters, as all start from
    one version. On a trace without a barrier it is the mean of a version's progress, wherever that began.

    References
    ----------
    dist-keras' ``AveragingTrainer``; McMahan et al. 2017, arXiv 1602.05629 (with all clients and equal shares); Stich
    2019, "Local SGD converges fast and communicates little", arXiv 1805.09767.
    """
    named, local = local_steps(learning_rate, optimizer)
    needed = require_policy(policy)
    return Method(
        name="averaging",
        hyperparameters={**named, "policy": None if needed is None else str(needed)},
        optimizer=local,
        combine=add_mean,
        timing=Timing(policy=needed),
    )
