"""Arrays of 64 bits that a user's functions close over, in runs of both precisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, Gamma, methods, problems, replay, simulate

CURVATURE, SCALE, RATE = np.linspace(0.1, 1.5, 16) / 3, np.linspace(0.5, 1, 16) / 3, 0.05
TRACE = simulate(Cluster(workers=3, compute=Gamma(1.0, 0.2)), 60, seed=0)


@jax.jit
def kept_by_jax(params):
    return 0.5 * jnp.sum(CURVATURE * params**2)


LOSSES = {
    "closed over": lambda p, batch, key: 0.5 * jnp.sum(CURVATURE * p**2),
    "jitted": lambda p, *_: kept_by_jax(p),
}


def scaled(worker, update, start, central, visit):
    return jnp.asarray(SCALE) * update, worker, {}


def expected():
    """The last central variable, by a loop over the trace."""
    versions = [np.ones(16)]
    for row in TRACE.frame.itertuples():
        versions.append(versions[-1] - SCALE * RATE * CURVATURE * versions[row.read_version])
    return versions[-1]


@pytest.mark.parametrize(
    ("loss", "under_x64"), zip(LOSSES.values(), (False, True), strict=True), ids=LOSSES
)
def test_closed_over_arrays_have_the_precision_of_the_run(lenient, loss, under_x64):
    with jax.enable_x64(under_x64):
        problem = problems.custom(lambda key: jnp.ones(16), loss)
        method = methods.Method(methods.gradient_steps(RATE), "scaled", message=scaled)
        for precision in ("float64", "float32", "float64"):
            params = replay(TRACE, method, problem, precision=precision).params
            assert params.dtype == precision
            np.testing.assert_allclose(
                params, expected(), rtol={"float32": 1e-5, "float64": 1e-14}[precision]
            )


def test_the_settings_of_jax_that_change_results_are_recorded():
    problem = problems.quadratic(np.ones(4), noise=0.5)
    runs = []
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            runs.append(replay(TRACE, methods.downpour(RATE), problem))
    assert [run.config["jax_threefry_partitionable"] for run in runs] == [True, False, True]
    losses = [run.commits["loss"].to_numpy() for run in runs]
    assert (losses[0] == losses[2]).all() and (losses[0] != losses[1]).any()
