"""The random durations of a run, worker by worker, taken one at a time."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from asyncsim.base.streams import Streams
from asyncsim.clusters.laws import Constant, Law

#: Durations drawn at once for a worker: enough to spread the cost of reaching its stream.
_BLOCK = 64


def delays(laws: Sequence[Law], seed: int, purpose: str, steps: int | Sequence[int] = 1) -> Callable[[int], float]:
    """Return the function that takes a worker's next duration.

    A worker's durations depend on the seed, the purpose, its index and its own law, and on nothing
    else: not on how many workers there are, nor on who draws first. Constant laws draw nothing.

    Parameters
    ----------
    laws : sequence of Law
        One per worker.
    seed : int
        The run's seed.
    purpose : str
        What the durations are for; other purposes are independent.
    steps : int or sequence of int
        How many draws make one duration; a sequence has one number per worker.

    Returns
    -------
    function
        From a worker's index to its next duration, seconds.

    Notes
    -----
    The durations drawn ahead lie in one array, and not in an iterator per worker: with 100,000 workers
    the time goes into fetching what the caches do not hold, and this touches the least.
    """
    each = [steps] * len(laws) if isinstance(steps, int) else steps
    if all(isinstance(law, Constant) for law in laws):
        return [law.mean * count for law, count in zip(laws, each, strict=True)].__getitem__
    streams = Streams(seed, purpose)
    ahead = array("d", [0.0]) * (len(laws) * _BLOCK)
    blocks = np.frombuffer(ahead).reshape(len(laws), _BLOCK)
    taken = [0] * len(laws)

    def refill(worker: int, block: int) -> None:
        if isinstance(laws[worker], Constant):  # as among constant laws only: a sum may be off in its last digit
            blocks[worker] = laws[worker].mean * each[worker]
            return
        drawn = laws[worker].sample(streams.generator(worker, block), (_BLOCK, each[worker]))
        blocks[worker] = drawn[:, 0] if each[worker] == 1 else drawn.sum(axis=1)

    def take(worker: int) -> float:
        count = taken[worker]
        taken[worker] = count + 1
        place = count % _BLOCK
        if place == 0:
            refill(worker, count // _BLOCK)
        return ahead[worker * _BLOCK + place]

    return take
