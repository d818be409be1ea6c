"""Which gradients are computed together, by which thread and in which order, where commits are dispatched.

That is planned beforehand from the trace, as if each local step took the same time and nothing else took any. Nothing
depends on how long it really takes but the speed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Group(NamedTuple):
    """Consecutive commits whose gradients one call computes.

    Attributes
    ----------
    begin, end : int
        From the first to before the last, counted from the first commit of the chunk.
    thread : int
        Which starts the call.
    after : int
        Commits of this chunk that must be dispatched before. 0: all of the chunk before; -k: all of that but its last
        k.
    """

    begin: int
    end: int
    thread: int
    after: int


class Clock(NamedTuple):
    """When everything is done by the plan of a chunk, in local steps.

    Attributes
    ----------
    free : list of float
        When each thread is.
    computing : list of int
        The commits of its last group.
    made : list of float
        When each of the chunk's commits is.
    """

    free: list[float]
    computing: list[int]
    made: list[float]

    @classmethod
    def start(cls, threads: int) -> "Clock":
        """Return the clock before the first chunk."""
        return cls([0.0] * threads, [0] * threads, [])


def plan_groups(
    needed: Sequence[float], steps: Sequence[int], room: int, ahead: int, before: Clock
) -> tuple[list[Group], Clock]:
    """Plan the groups of a chunk, in the order in which they are begun.

    The thread that is free first takes the first commits whose gradients can be begun by then; those that cannot yet
    are passed over. It takes consecutive ones, up to ``room`` and to its share of all that can be begun or are being
    computed: no commit of a group is made before the group's last gradient, so that longer ones would keep other
    threads waiting.

    Parameters
    ----------
    needed : sequence of float
        How many commits of the chunk must be made before a gradient can be begun; zero or less if it hangs on one of
        the chunk before, less than any number if on none.
    steps : sequence of int
        Local steps of each commit.
    room : int
        Commits that a group may have.
    ahead : int
        How far ahead of the commits a gradient may be begun, as what it makes has to be kept until then.
    before : Clock
        Where the plan of the chunk before has ended.
    """
    free, computing, made, count = [*before.free], [*before.computing], list[float](), len(needed)
    finished = [math.inf] * count
    groups = []

    def ready(i: int) -> float:
        own, earlier = needed[i], len(before.made) + needed[i]
        if own > 0:
            return made[int(own) - 1] if own <= len(made) else math.inf
        return before.made[int(earlier) - 1] if earlier > 0 else 0.0

    while len(made) < count:
        thread = min(range(len(free)), key=free.__getitem__)
        reach = range(len(made), min(count, len(made) + ahead))
        waiting = {i: ready(i) for i in reach if finished[i] == math.inf}
        now = max(free[thread], min(waiting.values()))
        can_begin = [i for i, then in waiting.items() if then <= now]
        computed = sum(length for length, until in zip(computing, free, strict=True) if until > now)
        longest = max(1, min(room, (len(can_begin) + computed) // len(free)))
        begin = can_begin[0]
        end = begin + sum(1 for place, i in enumerate(can_begin[:longest]) if i == begin + place)
        groups.append(Group(begin, end, thread, after=int(max(end - ahead, *needed[begin:end]))))
        free[thread], computing[thread] = now + sum(steps[begin:end]), end - begin
        finished[begin:end] = [free[thread]] * (end - begin)
        while len(made) < count and finished[len(made)] < math.inf:
            last = made or before.made
            made.append(max(finished[len(made)], last[-1] if last else 0.0))
    return groups, Clock(free, computing, made)
