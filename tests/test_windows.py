"""Windows that differ by worker, and other timings that methods need: their times, their gradients,
and windows in proportion to the speed.
"""

import numpy as np
import pytest
from cases import make_problem

from asyncsim import (
    Cluster,
    methods,
    problems,
    proportional_windows,
    replay,
    simulate,
)

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
