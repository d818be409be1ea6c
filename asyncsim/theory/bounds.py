"""What a bound on staleness costs and saves: stale synchronous parallel with memoryless workers, exactly."""

import math
from typing import NamedTuple

import numpy as np

from asyncsim.errors import InputError, require_count

#: More states than these take more than seconds to solve.
_MOST_STATES = 6_000

#: Workers at each clock above the slowest, from 0 to the bound and one more.
_State = tuple[int, ...]


class BoundedClocks(NamedTuple):
    """Stale synchronous parallel in the long run.

    Attributes
    ----------
    throughput : float
        Commits relative to workers that never wait.
    staleness : float
        Mean over commits, in versions, if every commit makes one.
    """

    throughput: float
    staleness: float


def bounded_clocks(workers: int, bound: int) -> BoundedClocks:
    """Return throughput and mean staleness under `asyncsim.bounded_staleness`, exponential times and no queue.

    The clocks relative to the slowest are a Markov chain on how many workers are at 0, 1, ..., ``bound + 1``; those at
    the last one wait. Its stationary law gives the throughput, and by the conservation of staleness its mean: with each
    commit the reads of the others age that do not wait. Bound 0 gives ``1 / H_n`` and ``(n - 1) / 2``, two workers
    ``1 - 1 / (2 bound + 3)``.

    Raises
    ------
    InputError
        If there are more than 6,000 states: ``comb(workers + bound, workers - 1)``.
    """
    n, s = require_count("workers", workers), require_count("bound", bound, 0)
    if n == 1:
        return BoundedClocks(1.0, 0.0)
    size = math.comb(n + s, n - 1)
    if size > _MOST_STATES:
        told = f"{size:,}" if size < 10**12 else "far too many"
        raise InputError(
            f"workers = {n}, bound = {s}: {told} states, and {_MOST_STATES:,} can be solved; "
            "give fewer workers, a lower bound, or simulate"
        )
    states, moves = _chain(n, s)
    stationary = _stationary(len(states), moves)
    waiting = np.array([state[-1] for state in states])
    active = n - waiting
    commits = float(stationary @ active)
    others_waiting = float(stationary @ (active * waiting)) / commits
    return BoundedClocks(commits / n, n - 1 - others_waiting)


def _chain(workers: int, bound: int) -> tuple[list[_State], list[tuple[int, int, int]]]:
    """Return the states that are reached from all clocks alike, and the moves: from, to, rate."""
    first = (workers, *[0] * (bound + 1))
    index, states, moves = {first: 0}, [first], []
    for at, state in enumerate(states):  # grows as it goes
        for clock in range(bound + 1):
            if not state[clock]:
                continue
            new = list(state)
            new[clock] -= 1
            new[clock + 1] += 1
            after = tuple(new) if new[0] else (*new[1:], 0)
            if after not in index:
                index[after] = len(states)
                states.append(after)
            moves.append((at, index[after], state[clock]))
    return states, moves


def _stationary(states: int, moves: list[tuple[int, int, int]]) -> np.ndarray:
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve

    begin, end, rate = np.array(moves, np.float64).T
    leaves = coo_array((rate, (begin, begin)), (states, states))
    balance = (leaves - coo_array((rate, (end, begin)), (states, states))).tocsc()
    # One balance follows from the others, so the first state's weight is free; then they add up to one.
    others = spsolve(balance[1:, 1:], -balance[1:, [0]].toarray()[:, 0])
    weights = np.concatenate([[1.0], np.atleast_1d(others)])
    return weights / weights.sum()
