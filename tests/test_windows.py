"""Windows that differ by worker, and other timings that methods need: their times, their gradients,
and windows in proportion to the speed.
"""

import dataclasses

import numpy as np
import pytest
from cases import make_problem

from asyncsim import (
    Cluster,
    InputError,
    methods,
    problems,
    proportional_windows,
    replay,
    simulate,
)
from asyncsim.study.cell import meet, same_gradients

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


def test_a_needed_window_and_the_same_gradients():
    cluster = Cluster(2, [1.0, 2.0], window=[4, 2])
    assert meet(cluster, methods.dc_asgd().timing).window == 1
    assert meet(cluster, methods.sgd().timing).workers == 1
    eighth = methods.Timing(message_size=0.125)
    assert meet(cluster, eighth) == cluster  # without a bandwidth
    linked = dataclasses.replace(cluster, bandwidth=100, message_bytes=400)
    lighter = meet(linked, eighth)
    assert (lighter.transfer_up, lighter.transfer_down) == (0.5, 4.0) and meet(
        lighter, eighth
    ) == lighter
    assert same_gradients(90, cluster, meet(cluster, methods.Timing(window=1))) == 270
    with pytest.raises(InputError, match=r"needs a trace with window = 4, this one has \(2, 4\)"):
        replay(
            simulate(cluster, 20),
            methods.downpour()._replace(timing=methods.Timing(window=4)),
            problems.quadratic([1.0]),
        )


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


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        # 4 workers with 10 visits each, 5 parameters of 4 bytes: losses up, leaders down.
        (methods.lsgd(), 40 * 4, 40 * 20),
        # Every second visit the overall leader comes down, too.
        (methods.lsgd(groups=2, global_every=2), 40 * 4, (40 + 20) * 20),
        (methods.lgd(policy=None), 40 * 4, 40 * 20),
        (methods.aeasgd(), 40 * 20, 40 * 20),
    ],
)
def test_bytes_are_those_of_losses_and_leaders(method, up, down):
    cluster = Cluster(4, 1.0, bandwidth=20.0, message_bytes=20.0)
    found = meet(cluster, method.timing)
    sizes = found.message_bytes if isinstance(found.message_bytes, tuple) else (20.0, 20.0)
    assert (40 * sizes[0], 40 * sizes[1]) == (up, down)
    # Each visit takes the transfers and the second of the gradient.
    frame = simulate(found, 40).frame
    assert frame["commit_time"].iloc[-1] == pytest.approx(
        10 * (1 + sum(sizes) / 20) - sizes[1] / 20
    )
