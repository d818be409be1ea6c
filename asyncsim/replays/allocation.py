"""What the C library keeps of memory that is free."""

import ctypes
import functools
import sys
from collections.abc import Callable

#: What glibc's mallopt is told, a parameter and bytes each: allocations larger than the first (M_MMAP_THRESHOLD, 32 MiB
#: is the most it takes) go back to the system when they are freed, and so does what is free at the end of an arena but
#: for the second (M_TOP_PAD; half of a thread's heap, which would never go back with all of it).
_KEEPING = ((-3, 32 * 2**20), (-2, 32 * 2**20))


@functools.cache
def keep() -> None:
    """Keep free memory for what is allocated next, some 32 MiB for each arena, to the end of the process; with glibc.

    By default glibc gives back what a gradient's intermediate results took after each gradient, and the system clears
    it page by page before the next: 20 to 180 pages for each commit of MNIST's network, 3 to 8 % of the rate.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        for option in _KEEPING:
            set_option(*option)


def trim() -> None:
    """Give free memory back to the system, if the C library is glibc; others do so themselves, or cannot be told.

    JAX's arrays begin at multiples of 64 bytes, and glibc does not fit such an array into what one of the same size
    has left. A replay of the thesis' perceptron by GEM with 100 workers held 7.7 GiB after 300 commits without this and
    5.1 with it; it costs 2 to 9 % of the rate.
    """
    give_back = _of_glibc("malloc_trim")
    if give_back is not None:
        give_back(0)


@functools.cache
def _of_glibc(function: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
