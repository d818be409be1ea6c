"""Leader SGD: where its leader rests, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_catalogue import with_versions

from asyncsim import Cluster, InputError, methods, prescribed, problems, simulate
from asyncsim.wave_replay import Replay, replay

STARTS = np.array([-1.2, 1.3, 0.9, -0.8])
ROUNDS = 1000


def double_well():
    """The loss (x^2 - 1)^2 + 0.3 x, whose wells are of different depth."""
    return problems.custom(lambda key: np.array([STARTS.mean()]), lambda x, batch, key: ((x**2 - 1) ** 2 + 0.3 * x)[0])


def rest(method, replicas):
    """Return where workers that start in both wells come to rest, and the central variable there.

    ``replicas`` writes the starts into the workers' states.
    """
    count = len(STARTS)
    trace = prescribed([k % count for k in range(ROUNDS * count)], ROUNDS * count, count)
    trace = with_versions(trace, np.arange(1, len(trace) + 1) // count)
    with jax.enable_x64(True):
        running = Replay(trace, method, double_well(), precision="float64", diagnose_every=0)
        workers = running.state.workers
        written = workers._replace(method=replicas(workers.method, jnp.array(STARTS)[:, None]))
        running.running.state = running.state._replace(workers=written)
        running.advance(len(trace))
        own = jax.vmap(method.resume, in_axes=(0, None))(running.state.workers.method, running.state.central)
        return np.asarray(own)[:, 0], float(running.state.central[0])


def gradient(x):
    return 4 * x * (x**2 - 1) + 0.3


def test_a_resting_leader_is_a_stationary_point_and_easgds_center_is_not():
    """The authors' claim, with the resting points of a loop over both rules to five digits."""
    pull, start = 0.005, STARTS.mean()
    own, leader = rest(methods.lgd(0.01, pull, policy=None), lambda free, x: x - pull * start)
    np.testing.assert_allclose(own, [-1.03558, 0.78365, 0.78365, -1.03558], atol=1e-5)
    assert abs(gradient(leader)) < 1e-12
    own, center = rest(methods.easgd(0.01, alpha=pull, policy=None), lambda worker, x: worker._replace(replica=x))
    np.testing.assert_allclose(own, [-0.97857, 0.88527, 0.88527, -0.97857], atol=1e-5)
    assert center == pytest.approx(-0.04665, abs=1e-5) and gradient(center) == pytest.approx(0.486, abs=1e-3)


def test_pulls_of_every_step_need_a_window_of_one():
    trace = simulate(Cluster(3, "constant(1)", window=2), 9)
    with pytest.raises(InputError, match="method = 'lsgd': needs a trace with window = 1, this one has 2"):
        replay(trace, methods.lsgd(step_pull=0.1), problems.quadratic([1.0]))
