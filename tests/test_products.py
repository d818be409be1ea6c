"""Products of matrices: of the run's precision on any device, in all that a replay or a real
process computes.
"""

import jax
import jax.numpy as jnp
import pytest

from asyncsim import Cluster, methods, prescribed, problems, replay
from asyncsim.base.tracing import whole_products
from asyncsim.methods import Method
from asyncsim.real.arrays import Computing, Task


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
