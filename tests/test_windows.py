"""Windows that differ by worker, and other timings that methods need: their times, their gradients,
and windows in proportion to the speed; groups of tensors that are read at different versions.
"""

import numpy as np
import pytest
from cases import make_problem

from asyncsim import (
    Cluster,
    Trace,
    methods,
    pipeline,
    prescribed,
    problems,
    proportional_windows,
    replay,
    simulate,
)
from asyncsim.base.files import field_values
from asyncsim.problems.partition import partition
from asyncsim.traces.columns import Source

SECONDS = (0.58, 0.75, 1.51, 3.33)  # per step, of the workers of the authors' toy


pytestmark = pytest.mark.usefixtures("float64")


def test_windows_in_proportion_to_the_speed():
    assert proportional_windows(SECONDS, 20) == (20, 15, 7, 3)
    assert proportional_windows([1.0, 3.0], 3) == (3, 1)  # not 0 by round-off
    assert proportional_windows(["gamma(1, 0.2)", 100.0], 5) == (5, 1)
    assert proportional_windows("[gamma(1, 0.2)] * 2 + [2]", 5) == (5, 5, 2)
    assert proportional_windows(np.array([1.0, 2.0]), 4) == (4, 2)


def test_a_cluster_takes_one_window_or_one_each():
    laws = [1.0, 2.0, 3.0]
    assert Cluster(3, laws, window=[4, 4, 4]) == Cluster(3, laws, window=4)
    cluster = Cluster(3, laws, window=[6, 3, 2])
    assert Cluster.from_dict(cluster.to_dict()) == cluster and cluster.windows == (6, 3, 2)
    assert cluster.mean_window == pytest.approx(11 / 3)  # all commit equally often
    assert Cluster(2, [1.0, 3.0], window=[2, 2]).mean_window == 2


def test_each_worker_goes_through_its_own_examples_without_a_gap():
    indices = make_problem("digits").batch_indices(0, 4)
    one = indices.rows([2] * 6, range(6), 1)
    several = indices.rows([2] * 2, range(2), 5, [3, 3])
    np.testing.assert_array_equal(several[:, :3].reshape(6, 1, -1), one)


def test_the_window_of_one_worker_changes_no_numbers_of_another():
    """A gradient's noise is the job's: of a window of one as of a first step."""
    task = problems.quadratic([0.1, 1.0], noise=0.5)
    first = [
        replay(
            simulate(Cluster(2, [1.0, 5.0], window=window), 4), methods.qsgd(), task, progress=False
        ).commits["loss"][0]
        for window in ((1, 1), (1, 2))
    ]
    assert len(set(first)) == 1


# Groups of tensors, and reads whose shards have different versions


def test_groups_of_tensors_partition_the_flat_vector():
    shapes = problems.digits(hidden=(64, 64, 64)).shapes
    assert partition(shapes, ["0,2", "1", "[3]"]) == (
        ("0,2", "1", "[3]"),
        (0, 4160, 8320, 12480, 13130),
        (0, 1, 0, 2),
    )
    assert partition(shapes, ["[0]['weight'],[0]['bias']", "1,2,3"]).bounds == (0, 4160, 13130)
    assert partition(shapes, 3, by_layer=True).names == ("0", "1", "2,3")
    six = partition(shapes, 6)
    assert len(six.names) == 6 and np.diff(six.bounds).max() == 4160


COMMITS = 100
DRAWN = np.random.default_rng(0).integers(0, 9, (COMMITS, 2))
#: A trace and the delay of each group of layers in each commit.
DELAYS = {
    "stashed": (pipeline(3, COMMITS), np.tile([2, 1, 0], (COMMITS, 1))),
    "2bw": (pipeline(3, COMMITS, "2bw"), np.ones((COMMITS, 3), int)),
    "two stages": (pipeline(["0,1", "2"], COMMITS), np.tile([1, 0], (COMMITS, 1))),
    "first layer": (
        prescribed({"1,2": 0, "0": 12}, COMMITS, workers=4),
        np.tile([0, 12], (COMMITS, 1)),
    ),
    "split": (
        prescribed({"0,2": DRAWN[:, 0], "1": DRAWN[:, 1]}, COMMITS, workers=5),
        DRAWN[:, :2],
    ),
}


@pytest.mark.parametrize("name", DELAYS)
def test_groups_of_layers_are_read_as_late_as_stated(name):
    trace, delays = DELAYS[name]
    commits = np.arange(COMMITS)
    expected = commits[:, None] - np.minimum(delays, commits[:, None])
    np.testing.assert_array_equal(trace.group_versions(), expected)
    np.testing.assert_array_equal(commits - expected.min(1), trace.frame["staleness"])


def test_a_trace_of_groups_is_saved_and_summarised(tmp_path):
    trace = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 200, workers=10, seed=1)
    loaded = Trace.load(trace.save(tmp_path / "trace.parquet"))
    assert field_values(loaded, Source) == field_values(trace, Source) and loaded.reads.equals(
        trace.reads
    )
    assert np.array_equal(loaded.group_versions(), trace.group_versions())
    of_shard = (np.arange(200)[:, None] - trace.group_versions())[50:].mean(axis=0)
    assert (of_shard[0], of_shard[1]) == (24, 0) and 2 < of_shard[2] < 4
    assert trace.summary(warm_up=50)["staleness_mean"] == pytest.approx(of_shard.mean())
    assert trace.frame["staleness"][50:].min() == 24  # of the oldest
    assert repr(trace) == (
        "<Trace of 200 commits by 10 workers in 3 groups of tensors, prescribed, seed 1>"
    )
    longer = prescribed({"0": 24, "1": 0, "2": "exponential(3)"}, 300, workers=10, seed=1)
    assert np.array_equal(longer.group_versions()[:200], trace.group_versions())
    fewer = prescribed({"2": "exponential(3)", "0,1": 2}, 200, workers=10, seed=1)
    assert np.array_equal(fewer.group_versions()[:, 0], trace.group_versions()[:, 2])
