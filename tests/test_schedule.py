"""Plans of who computes which gradients: complete, possible, and without idle threads."""

import math

import pytest
from hypothesis import given, strategies

from asyncsim import Cluster, simulate
from asyncsim.replays.groups import Schedule, plan_groups


def needed_by(workers):
    """How many commits must be made before each gradient: those up to its worker's last."""
    last, needed = {}, []
    for i, worker in enumerate(workers):
        needed.append(last.get(worker, -math.inf))
        last[worker] = i + 1
    return needed


def plan(needed, threads, room, chunk, steps=None):
    """Plan chunk by chunk; the groups are counted from the first commit of all."""
    clock, groups = Schedule.start(threads), []
    for begin in range(0, len(needed), chunk):
        own = [after - begin for after in needed[begin : begin + chunk]]
        taken = steps[begin : begin + chunk] if steps else [1] * len(own)
        found, clock = plan_groups(own, taken, room, (threads + 1) * room, clock)
        groups += [(begin + group.begin, begin + group.end, group.thread, begin + group.after) for group in found]
    return groups, clock


#: Of each commit: how far back the last commit is that its gradient needs (None: it needs none), and its local steps.
COMMIT = strategies.tuples(strategies.none() | strategies.integers(1, 20), strategies.integers(1, 5))


@given(
    commits=strategies.lists(COMMIT, min_size=1, max_size=60),
    threads=strategies.integers(1, 4),
    room=strategies.integers(1, 5),
    chunk=strategies.integers(1, 70),
)
def test_all_gradients_are_begun_once_and_their_commits_can_be_made_in_turn(commits, threads, room, chunk):
    needed = [-math.inf if back is None or back > i else i + 1 - back for i, (back, _) in enumerate(commits)]
    steps = [own for _, own in commits]
    groups, clock = plan(needed, threads, room, chunk, steps)
    begun = set()
    for begin, end, thread, after in groups:
        done = next(i for i in range(len(needed) + 1) if i not in begun)  # commits that can be dispatched before it
        assert max(needed[begin:end]) <= after <= done
        assert end - after <= (threads + 1) * room and 1 <= end - begin <= room and thread < threads
        assert begun.isdisjoint(range(begin, end))
        begun |= set(range(begin, end))
    assert begun == set(range(len(needed)))
    assert clock.made == sorted(clock.made) and sum(steps) / threads <= max(clock.free) <= sum(steps)


@pytest.mark.parametrize("chunk", [2_000, 100])
@pytest.mark.parametrize(("workers", "compute", "busy"), [(10, "exponential(1)", 0.95), (100, "gamma(1, 0.2)", 0.995)])
def test_threads_hardly_idle(workers, compute, busy, chunk):
    trace = simulate(Cluster(workers, compute=compute), 2_000)
    groups, clock = plan(needed_by(trace.frame["worker"].tolist()), threads=2, room=4, chunk=chunk)
    assert 2_000 / 2 / clock.made[-1] > busy
    if workers == 100:
        assert len(groups) < 2_000 / 3.8  # full ones


def test_what_cannot_be_begun_is_passed_over():
    groups, _ = plan(needed_by([0, 1, 1, 2, 3]), threads=2, room=1, chunk=5, steps=[1, 3, 1, 1, 1])
    assert [(begin, thread) for begin, _, thread, _ in groups] == [(0, 0), (1, 1), (3, 0), (4, 0), (2, 0)]


def test_threads_share_what_a_barrier_lets_go():
    groups, _ = plan([-math.inf] * 6 + [6] * 6, threads=2, room=4, chunk=12)
    assert [group[:3] for group in groups] == [(0, 3, 0), (3, 6, 1), (6, 9, 0), (9, 12, 1)]


def test_longer_local_steps_take_a_thread_for_longer():
    groups, _ = plan([-math.inf] * 6, threads=2, room=1, chunk=6, steps=[4, 1, 1, 1, 1, 1])
    assert [thread for _, _, thread, _ in groups] == [0, 1, 1, 1, 1, 0]
