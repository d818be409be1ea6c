"""YellowFin: its tuner against the authors' rule, as a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import AuthorsTuner

from asyncsim import methods, prescribed, problems, replay
from asyncsim.methods.yellowfin import init_tuner, tune

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("beta", "window", "sparse"), [(0.999, 20, False), (0.9, 7, True)])
def test_the_tuner_is_the_authors_rule(beta, window, sparse):
    rng = np.random.default_rng(0)
    gradients = rng.normal(0.3, 1, (200, 12)) * np.linspace(3, 0.1, 200)[:, None]
    if sparse:
        gradients[:, 1:][rng.random((200, 11)) < 0.6] = 0
    authors = AuthorsTuner(beta, window, rate=0.1)
    state = init_tuner({"a": jnp.zeros(4), "b": jnp.zeros((2, 4))}, 0.1, 0.0, window)
    step = jax.jit(lambda state, g: tune(state, g, beta))
    for gradient in gradients:
        authors.take(gradient)
        state = step(state, {"a": gradient[:4], "b": gradient[4:].reshape(2, 4)})
        np.testing.assert_allclose(state.momentum, authors.momentum, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(state.learning_rate, authors.rate, rtol=1e-10)
    assert 0.01 < authors.momentum < 1 and authors.rate != 0.1


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
def test_extreme_gradients_leave_finite_values(scale, dtype="float32"):
    state = init_tuner(jnp.zeros(3, dtype), 0.1, 0.0, 5)
    for _ in range(4):
        state = tune(state, jnp.full(3, scale, dtype), 0.9)
    assert 0 <= state.momentum <= 1 and state.momentum.dtype == dtype


def test_the_optimizer_is_the_authors_momentum_sgd():
    h, x = np.array([0.1, 1.0, 4.0]), np.array([1.0, -2.0, 0.5])
    optimizer = methods.yellowfin(learning_rate=0.05, beta=0.95)
    run = replay(
        prescribed(0, 60, 1),
        methods.downpour(optimizer=optimizer),
        problems.quadratic(h, start=x),
        precision="float64",
    )
    tuner, accumulated = AuthorsTuner(0.95, 20, rate=0.05), 0 * x
    for _ in range(60):
        gradient = h * x
        accumulated = tuner.momentum * accumulated + gradient
        x = x - tuner.rate * accumulated
        tuner.take(gradient)
    np.testing.assert_allclose(run.params, x, rtol=1e-10, atol=1e-12)
