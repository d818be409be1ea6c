"""Named random streams: every random number belongs to a (seed, purpose, worker).

Two methods replayed with one seed see the same delays and the same batches, and adding a worker
changes no other's numbers. The streams are counter-based (Philox, Salmon et al. 2011): the name
is the position in the counter's space, so reaching a stream costs microseconds and no memory.
"""

import zlib

import numpy as np

#: Philox buffers four numbers from each counter value; at 4 the next draw starts a new one.
_PHILOX_BUFFER_EMPTY = 4


class Streams:
    """The independent streams of one purpose, one for each worker and block.

    Parameters
    ----------
    seed : int
        The run's seed, zero or above.
    purpose : str
        Use of the numbers, such as ``"compute"`` or ``"batches"``; other purposes are independent.
    """

    def __init__(self, seed: int, purpose: str):
        self._bits = np.random.Philox(key=stream_key(seed, purpose))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state

    def generator(self, worker: int, block: int = 0) -> np.random.Generator:
        """Return a generator at the start of a worker's block of numbers.

        There is one generator a purpose, so draw the numbers before requesting the next generator.
        A block holds 2**128 numbers: no draw can run into the next one.
        """
        self._start["state"]["counter"][:] = (0, 0, block, worker)
        self._start["buffer_pos"] = _PHILOX_BUFFER_EMPTY
        self._start["has_uint32"] = 0
        self._bits.state = self._start
        return self._generator


def stream_key(seed: int, purpose: str) -> np.ndarray:
    """Return the key of a purpose's streams, shape ``[2]``, uint64."""
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(2, np.uint64)
