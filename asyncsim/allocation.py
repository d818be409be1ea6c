"""What the C library keeps of memory that is free."""

import ctypes
import functools
import sys
from collections.abc import Callable


def trim() -> None:
    """Give free memory back to the system, if the C library is glibc; others do so themselves, or cannot be told.

    JAX's arrays begin at multiples of 64 bytes, and glibc does not fit such an array into what one of the same size
    has left. A replay of the thesis' perceptron by GEM with 100 workers held 1.4 times their state after 300 commits
    without this, and 0.9 times with it; it costs 5 % of the rate.
    """
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
