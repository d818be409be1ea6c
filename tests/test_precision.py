"""Arrays of 64 bits that a user's functions close over, in runs of both precisions; and products of
matrices, of the run's precision on any device, in all that a replay or a real process computes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, Gamma, methods, prescribed, problems, replay, simulate
from asyncsim.base.tracing import whole_products
from asyncsim.methods import Method
from asyncsim.real.arrays import Computing, Task

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


# Products


@pytest.fixture
def told():
    """What JAX was told of products wherever a function of the problem or the method was traced."""
    return {}


@pytest.fixture
def tell(told):
    def told_of(where):
        told.setdefault(where, set()).add(jax.config.jax_default_matmul_precision)

    return told_of


@pytest.fixture
def problem(tell):
    @jax.custom_vjp
    def distance(x):
        return jnp.sum(x**2)

    def forward(x):
        return distance(x), x

    def backward(x, up):
        tell("backward")
        return (2 * up * x,)

    distance.defvjp(forward, backward)

    def loss(params, batch, key):
        tell("loss")
        return distance(params)

    def evaluate(params, state, data):
        tell("evaluate")
        return {"loss": distance(params)}

    return problems.Problem("told", lambda key: jnp.ones(3), loss, evaluate)


@pytest.fixture
def method(tell):
    def message(worker, update, start, central, visit):
        tell("message")
        return update, worker, {"share": update}

    return Method(methods.gradient_steps(0.1), "told", message=message)


@pytest.mark.parametrize(
    ("own", "expected"), [(None, "float32"), ("tensorfloat32", "tensorfloat32")]
)
def test_a_replay_multiplies_in_its_precision_unless_jax_is_told_otherwise(
    own, expected, problem, method, told
):
    with jax.default_matmul_precision(own):
        replay(prescribed(1, 20, 2), method, problem, progress=False)
        assert jax.config.jax_default_matmul_precision == own
    assert expected in told.pop("message")  # checked before, by its shapes
    assert told == {where: {expected} for where in ("loss", "backward", "evaluate")}


def test_so_does_a_real_process(problem, method, told):
    computing = Computing(Task(method, problem, Cluster(2, 1.0), 1, 0, "float32"))
    told.clear()
    computing.run(0, computing.first_job(0))
    assert told == {"loss": {"float32"}, "backward": {"float32"}}


def test_what_devices_are_given_to_compile():
    image = jnp.ones((2, 3))
    asked = [
        str(jax.make_jaxpr(way(lambda a: a @ a.T))(image))
        for way in (lambda f: f, whole_products())
    ]
    assert ["HIGHEST" in text for text in asked] == [False, True]
