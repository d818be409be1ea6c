"""Torn reads: without locks a read takes time, and its blocks are of different versions.

A read that is made in ``blocks`` is spread evenly over its service: block ``b`` is read once ``(b + 1) / blocks`` of
the service's time have passed, the last one at its end. What was committed by then is seen in that block. All of it
follows from the times in the trace. The blocks are of consecutive parameters, as many in each; the last ones have what
is left.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncsim.traces.trace import Trace


def block_versions(trace: "Trace") -> np.ndarray:
    """Return the version that each block of each row's read is of.

    Returns
    -------
    int array, shape ``[rows, blocks]``
        Never decreasing along a row; the last column is ``read_version``, and the only one where reads are whole.

    Notes
    -----
    What is committed in the very instant in which a block is read is seen, unless the end of the read came before it in
    the trace. Messages are written at one instant, the end of their visit: a write that is spread over the same blocks
    as slowly as the reads would be seen by none of them in part, as neither overtakes the other.

    References
    ----------
    Recht, Re, Wright and Niu 2011, "Hogwild!", arXiv 1106.5730: components are read and written without locks.
    """
    column = {name: trace.frame[name].to_numpy() for name in ("read_serve_time", "read_time", "read_version")}
    begin, end, last = (values[:, None] for values in column.values())
    parts = np.arange(1, trace.read_blocks + 1) / trace.read_blocks
    made = np.searchsorted(trace.frame["commit_time"].to_numpy(), begin + parts * (end - begin), side="right")
    seen = np.minimum(np.r_[0, trace.frame["version"].to_numpy()][made], last)
    seen[:, -1] = column["read_version"]
    return seen
