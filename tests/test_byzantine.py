"""BASGD without buckets, and what Kardam takes as equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, methods, problems, replay, simulate
from asyncsim.methods import Visit


def test_basgd_with_one_bucket_and_the_mean_is_asynchronous_sgd():
    trace, problem = (
        simulate(Cluster(4, "exponential(1)", policy="buckets(1)"), 200),
        problems.quadratic([1.0, 0.1]),
    )
    runs = [
        replay(trace, one, problem, progress=False)
        for one in (methods.basgd(0.1, 1, "mean()"), methods.downpour(0.1))
    ]
    np.testing.assert_allclose(*(run.params for run in runs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("difference", "applied"), [(0.0, True), (4.0, True), (1e6, False)])
def test_kardam_takes_updates_that_differ_by_round_off_as_equal(dtype, difference, applied):
    """Two updates at one point, some units of round-off apart."""
    with jax.enable_x64(dtype == "float64"):
        central = jnp.asarray([1.0, -2.0, 0.5], dtype)
        method = methods.kardam(0.1, f=1)
        memory = method.init_memory(central)._replace(update=-0.1 * central)
        update = memory.update * (1 + difference * float(jnp.finfo(dtype).eps))
        zero = jnp.int32(0)
        visit = Visit(
            staleness=zero,
            worker=zero,
            worker_step=zero + 1,
            commit=zero,
            time=zero,
            local_steps=zero + 1,
        )

        class Coefficients:
            def of_all(self, name):
                return jnp.asarray([-1.0, 1.0, 1.0, 1.0], dtype)

        after = method.apply(
            method.init_server(central), central, update, memory, visit, Coefficients()
        )
    np.testing.assert_allclose(after.central, central + update if applied else central, rtol=1e-6)
    assert float(after.memory.lipschitz) == (0 if applied else float(jnp.finfo(dtype).max))
