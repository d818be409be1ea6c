"""The bytes of Leader SGD."""

import pytest

from asyncsim import Cluster, methods, simulate
from asyncsim.study.cell import meet


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
