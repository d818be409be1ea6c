"""Cutting traces: against the definition, worked out commit by commit."""

import numpy as np
import pytest
from edits import with_versions
from hypothesis import given, settings
from hypothesis import strategies as st
from world import ROUTES, clusters

from asyncsim import Cluster, Exponential, Gamma, barrier, prescribed, simulate
from asyncsim.replays.waves import Reads, cut, find_waves, most_at_one_position, separate_reads

NO_READS = Reads(np.empty(0, int), np.empty(0, int))


def simulated(routes=ROUTES):
    return st.builds(
        simulate, clusters(sizes=(1, 9), routes=routes), st.integers(1, 120), st.integers(0, 2**20)
    )


@st.composite
def stated(draw):
    commits, workers = draw(st.integers(1, 120)), draw(st.integers(1, 9))
    listed = st.lists(st.integers(0, 12), min_size=commits, max_size=commits)
    staleness = draw(
        st.one_of(st.integers(0, 30), listed, st.sampled_from([Exponential(4.0), Gamma(6.0, 0.2)]))
    )
    return prescribed(staleness, commits, workers, seed=draw(st.integers(0, 100)))


@st.composite
def buffered(draw):
    """A server that makes a new version only of every few commits."""
    trace, every = draw(simulated()), draw(st.integers(2, 5))
    return with_versions(trace, np.arange(len(trace) + 1) // every)


traces = st.one_of(simulated(), stated(), buffered())
sizes = st.sampled_from([1, 2, 3, 8, 1000])


class Cut:
    """A trace cut as a replay cuts it, with what each commit depends on, found one by one."""

    def __init__(self, trace, piece_size, starts=()):
        self.trace, self.waves = trace, find_waves(trace)
        waves = self.waves
        self.reads = (
            separate_reads(waves.read, waves.slot) if waves.reads == "separate" else NO_READS
        )
        self.forms = (
            separate_reads(waves.push, waves.push_slot) if waves.separate_pushes else NO_READS
        )
        kinds = tuple(kind for kind in (self.reads, self.forms) if len(kind.position))
        self.room = max(piece_size, *(most_at_one_position(kind) for kind in kinds), 1)
        self.cuts = cut(waves, piece_size, kinds, self.room, np.array(starts, int))
        self.read = [first_position(trace, version) for version in trace.frame["read_version"]]
        self.form = [first_position(trace, version) for version in trace.frame["push_version"]]
        self.previous = []
        last = {}
        for k, worker in enumerate(trace.frame["worker"]):
            self.previous.append(last.get(worker, -1))
            last[worker] = k

    def pieces(self):
        return zip(self.cuts[:-1].tolist(), self.cuts[1:].tolist(), strict=True)


def first_position(trace, version):
    """How many commits it took until there was this version."""
    return 0 if version == 0 else trace.frame["version"].tolist().index(version) + 1


@given(traces, sizes, st.lists(st.integers(0, 119), max_size=4))
@settings(max_examples=50)
def test_pieces_hold_only_commits_that_can_be_computed_at_once(trace, piece_size, starts):
    starts = [start for start in starts if start < len(trace)]
    made = Cut(trace, piece_size, starts)
    assert made.cuts[0] == 0 and made.cuts[-1] == len(trace)
    assert {*starts} <= {*made.cuts.tolist()}
    for begin, end in made.pieces():
        assert 0 < end - begin <= piece_size
        for k in range(begin, end):
            assert made.read[k] <= begin and made.previous[k] < begin
        for kind in (made.reads, made.forms):
            assert np.sum((kind.position > begin) & (kind.position <= end)) <= made.room


@given(traces)
@settings(max_examples=66)
def test_no_fewer_waves_are_possible(trace):
    """Every commit needs all those before its read, and its worker's one before, in earlier
    waves.
    """
    made = Cut(trace, piece_size=len(trace))
    if len(made.reads.position) or len(made.forms.position):
        # Room for any number of reads: a cut is then made for a dependency only.
        made.cuts = cut(made.waves, len(trace), (), 0, np.empty(0, int))
    deepest = [0]  # the longest chain among the first 0, 1, ... commits
    for k in range(len(trace)):
        chain = 1 + deepest[max(made.read[k], made.previous[k] + 1)]
        deepest.append(max(deepest[-1], chain))
    assert len(made.cuts) - 1 == deepest[-1]


@given(traces, sizes)
@settings(max_examples=50)
def test_every_commit_finds_what_it_read_in_its_slot(trace, piece_size):
    """Slots are filled at a piece's end and looked into at its start, or for messages as soon as
    they are filled.
    """
    made = Cut(trace, piece_size)
    waves = made.waves
    slots, form_slots = (
        dict.fromkeys(range(waves.slots), 0),
        dict.fromkeys(range(waves.push_slots), 0),
    )
    for begin, end in made.pieces():
        assert [slots[waves.slot[k]] for k in range(begin, end)] == made.read[begin:end]
        if waves.separate_pushes:
            for k in range(begin, end):
                # A read of this same piece is not taken from the slot.
                assert made.form[k] >= begin or form_slots[waves.push_slot[k]] == made.form[k]
        if waves.reads == "separate":
            fill(slots, made.reads, begin, end)
        else:
            shift = 1 if waves.reads == "after" else 0
            slots |= {waves.slot[k]: k + shift for k in range(begin, end)}
        fill(form_slots, made.forms, begin, end)


def fill(slots, reads, begin, end):
    made = (reads.position > begin) & (reads.position <= end)
    for position, slot in zip(
        reads.position[made].tolist(), reads.slot[made].tolist(), strict=True
    ):
        slots[slot] = position


@pytest.mark.parametrize(
    ("options", "reads", "separate_forms"),
    [
        ({}, "after", False),
        ({"protocol": "read_then_write"}, "before", False),
        ({"protocol": "read_then_write", "exclusive": False}, "separate", True),
        ({"protocol": "write_then_read"}, "separate", False),
    ],
)
def test_protocols_are_told_apart(options, reads, separate_forms):
    cluster = Cluster(
        5, Exponential(1.0), service=Exponential(0.2), latency=Exponential(0.2), **options
    )
    waves = find_waves(simulate(cluster, 200))
    assert (waves.reads, waves.separate_pushes) == (reads, separate_forms)
    assert waves.slots == 5 or reads == "separate"


def test_workers_that_read_the_same_share_a_slot():
    waves = find_waves(simulate(Cluster(10, Exponential(1.0), policy=barrier()), 100))
    assert waves.reads == "separate" and waves.slots == 1
    assert separate_reads(waves.read, waves.slot).position.tolist() == list(range(10, 100, 10))
