"""Leader SGD: where its leader rests, and what it refuses."""

import jax
import numpy as np
import pytest
from test_catalogue import with_versions

from asyncsim import Cluster, InputError, methods, prescribed, problems, simulate
from asyncsim.replays.replay import Replay, replay
from asyncsim.study.cell import meet

ROUNDS = 1000


def rest(method):
    """Return the resting points of workers that start in both wells, and the central variable."""
    count = 4
    trace = prescribed([k % count for k in range(ROUNDS * count)], ROUNDS * count, count)
    trace = with_versions(trace, np.arange(1, len(trace) + 1) // count)
    with jax.enable_x64(True):
        running = Replay(trace, method, problems.wells(tilt=0.3), precision="float64")
        running.advance(len(trace))
        own = jax.vmap(method.resume, in_axes=(0, None))(
            running.state.workers.method, running.state.central
        )
        return np.asarray(own)[:, 0], float(running.state.central[0])


def gradient(x):
    return 4 * x * (x**2 - 1) + 0.3


@pytest.mark.full
def test_a_resting_leader_is_a_stationary_point_and_easgds_center_is_not():
    """The authors' claim, with the resting points of a loop over both rules to five digits."""
    own, leader = rest(methods.lgd(0.01, 0.005, policy=None))
    np.testing.assert_allclose(own, [-1.03558, 0.78365, 0.78365, -1.03558], atol=1e-5)
    assert abs(gradient(leader)) < 1e-12
    own, center = rest(methods.easgd(0.01, alpha=0.005, policy=None))
    np.testing.assert_allclose(own, [-0.97857, 0.88527, 0.88527, -0.97857], atol=1e-5)
    assert center == pytest.approx(-0.04665, abs=1e-5) and gradient(center) == pytest.approx(
        0.486, abs=1e-3
    )


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


def test_pulls_of_every_step_need_a_window_of_one():
    trace = simulate(Cluster(3, "constant(1)", window=2), 9)
    with pytest.raises(
        InputError, match="method = 'lsgd': needs a trace with window = 1, this one has 2"
    ):
        replay(trace, methods.lsgd(step_pull=0.1), problems.quadratic([1.0]))
