"""Hogwild: workers read and write the parameters without locks, so that what they read is torn."""

from asyncsim.errors import require_count
from asyncsim.methods.downpour import downpour
from asyncsim.methods.method import LEARNING_RATE, Method, Schedule, Timing


def hogwild(learning_rate: float | Schedule = LEARNING_RATE, blocks: int | None = 8) -> Method:
    """Return Hogwild, for traces whose reads see the parameters block by block while others commit.

    With ``s`` what the worker read, each block of it as it was at its own instant::

        central <- central - learning_rate * gradient(s)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
    blocks : int, optional
        Blocks of the parameters, as long as each other but for the last ones, that a read goes through. None: whatever
        the trace has.

    Raises
    ------
    InputError
        For a learning rate that is not above zero, or blocks that are no count.

    Notes
    -----
    That nobody waits and reads are torn is timing: the cluster's ``discipline="lock_free"`` and ``read_blocks``, see
    `asyncsim.traces.torn`; any method can be run on such a trace. The values are those of `asyncsim.methods.downpour`.

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
