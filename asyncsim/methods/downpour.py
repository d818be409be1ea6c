"""DOWNPOUR, and Hogwild, where reads and writes are without locks: updates are added as they come."""

import optax

from asyncsim.base.errors import require_count
from asyncsim.methods.method import LEARNING_RATE, Method, Schedule, Timing, local_steps
from asyncsim.methods.recipe import shares_programs


@shares_programs
def downpour(
    learning_rate: float | Schedule = LEARNING_RATE, optimizer: optax.GradientTransformation | None = None
) -> Method:
    """Return DOWNPOUR, with the communication window of the trace.

    A worker takes ``window`` local steps from the copy that it read, and sends their sum; the server adds it::

        sent    = sum of the local steps       (window 1: -learning_rate * gradient)
        central <- central + sent

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
    return Method(name="downpour", hyperparameters=named, optimizer=local)


@shares_programs
def hogwild(learning_rate: float | Schedule = LEARNING_RATE, blocks: int | None = 8) -> Method:
    """Return Hogwild, for traces whose reads see the parameters block by block while others commit.

    With ``s`` what the worker read, each block of it as it was at its own instant::

        central <- central - learning_rate * gradient(s)

    ``blocks``: blocks of the parameters, as long as each other but for the last ones, that a read goes through. None:
    whatever the trace has.

    Notes
    -----
    That nobody waits and reads are torn is timing: the cluster's ``discipline="lock_free"`` and ``read_blocks``, see
    `asyncsim.Trace.block_versions`; any method can be run on such a trace. The values are those of `downpour`.

    The paper's gradients are sparse, and a worker reads and writes only what its examples touch; here they are as the
    problem has them, and all blocks are read. Each component is added to atomically, as in the paper: nothing is
    overwritten. A message is written at one instant, the end of its visit. A visit's staleness is that of the block
    read last, which may have no parameter if these are few; the other blocks are staler.

    References
    ----------
    Recht, Re, Wright and Niu 2011, "Hogwild! A lock-free approach to parallelizing stochastic gradient descent",
    arXiv 1106.5730.
    """
    timing = Timing()
    if blocks is not None:
        require_count("blocks", blocks)
        timing = Timing(protocol="write_then_read", window=1, discipline="lock_free", read_blocks=blocks)
    named = {"learning_rate": learning_rate, "blocks": blocks}
    return downpour(learning_rate)._replace(name="hogwild", hyperparameters=named, timing=timing)
