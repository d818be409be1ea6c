"""The random durations of a run, drawn for each worker independently."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from asyncsim.base.streams import Streams
from asyncsim.clusters.laws import Constant, Law

#: Durations drawn at once for a worker: enough to spread the cost of reaching its stream.
_BLOCK = 64


def delays(
    laws: Sequence[Law], seed: int, purpose: str, steps: int | Sequence[int] = 1
) -> Callable[[int], float]:
    """Return the function from a worker to its next duration.

    A worker's durations depend only on the seed, the purpose, its index and its law: not on the
    number of workers, nor on the order of draws. Constant laws draw nothing.

    Parameters
    ----------
    laws : sequence of Law
        One per worker.
    seed : int
        The run's seed.
    purpose : str
        The name of the stream; durations of other purposes are independent.
    steps : int or sequence of int
        The number of draws in a duration, one for all or one per worker.

    Returns
    -------
    function
        From a worker's index to its next duration, seconds.

    Notes
    -----
    The durations drawn ahead lie in one array, and not in an iterator per worker: with 100,000
    workers most of the time goes into cache misses, and an array has the fewest.
    """
    counts = [steps] * len(laws) if isinstance(steps, int) else steps
    if all(isinstance(law, Constant) for law in laws):
        return [law.mean * count for law, count in zip(laws, counts, strict=True)].__getitem__
    streams = Streams(seed, purpose)
    ahead = array("d", [0.0]) * (len(laws) * _BLOCK)
    blocks = np.frombuffer(ahead).reshape(len(laws), _BLOCK)
    consumed = [0] * len(laws)

    def refill(worker: int, block: int) -> None:
        # Constant laws must give the same number with and without random laws beside them: a sum of
        # draws may differ from the product in its last digit.
        if isinstance(laws[worker], Constant):
            blocks[worker] = laws[worker].mean * counts[worker]
            return
        drawn = laws[worker].sample(streams.generator(worker, block), (_BLOCK, counts[worker]))
        blocks[worker] = drawn[:, 0] if counts[worker] == 1 else drawn.sum(axis=1)

    def take(worker: int) -> float:
        count = consumed[worker]
        consumed[worker] = count + 1
        place = count % _BLOCK
        if place == 0:
            refill(worker, count // _BLOCK)
        return ahead[worker * _BLOCK + place]

    return take
