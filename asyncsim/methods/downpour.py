"""DOWNPOUR adds updates as they arrive; Hogwild does so without locks on reads and writes."""

from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Method, Timing, local_steps


@declared
def downpour(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return DOWNPOUR, with the communication window of the trace.

    A worker takes ``window`` local steps from the copy that it read, and sends their sum; the
    server adds it::

        sent    = sum of the local steps       (window 1: -learning_rate * gradient)
        central <- central + sent

    Notes
    -----
    Dean et al. let fetch and push periods differ and run them in threads beside the computation, on
    a server in shards without a common version; here both periods are the window and the visit is
    whole. dist-keras looks at the window before the batch, so that its first commit carries one
    batch less (none with window 1); here every window is full.

    Hermans' thesis runs Adam on the workers (``optimizer=optax.adam(1e-3)``): the size of such
    messages does not follow the size of the gradients, and its collapses from some number of
    workers on are due to such steps.

    Dean et al. also run Adagrad on the server, which ignores the workers' rate:
    ``async_local_sgd(server_optimizer=optax.adagrad(rate, initial_accumulator_value=0))``.

    References
    ----------
    Dean et al. 2012, "Large scale distributed deep networks", algorithm 1.1 of its appendix.
    """
    return Method(local_steps(learning_rate, optimizer), coordinatewise=True)


@declared
def hogwild(learning_rate: Rate = LEARNING_RATE) -> Method:
    """Return Hogwild, for traces whose workers read and write without waiting for each other.

    With ``s`` the worker's read::

        central <- central - learning_rate * gradient(s)

    Notes
    -----
    The update is `downpour`'s; the cluster's ``discipline="lock_free"`` is the difference. The
    paper's gradients are sparse, and a worker reads and writes only the components of its examples;
    here they are as dense as the problem's. Each component is added to atomically, as in the paper:
    nothing is overwritten. A read and a write happen at one instant each, the end of their visit:
    in the paper others may write while a worker reads.

    References
    ----------
    Recht, Re, Wright and Niu 2011, "Hogwild! A lock-free approach to parallelizing stochastic
    gradient descent", arXiv 1106.5730.
    """
    timing = Timing(protocol="write_then_read", window=1, discipline="lock_free")
    return downpour(learning_rate)._replace(timing=timing)
