"""Entropy-SGD and Parle: NumPy loops from the papers, their limits, and the law of the Langevin
noise.
"""

import functools

import jax
import numpy as np
import pytest
from formulas import CURVATURE, START, diverse
from test_catalogue import one_worker, quadratic, unless

from asyncsim import Cluster, Gamma, methods, problems, replay, simulate
from asyncsim.base.streams import stream_key
from asyncsim.replays.replay import Replay

pytestmark = pytest.mark.usefixtures("float64")
ROUNDS, SEED, LOCAL = 30, 5, 2**32 - 1


def normal(worker, step, inner):
    """What a worker draws for an inner step: the generator is the run's, which is all that a
    formula does not say.
    """
    key = jax.random.wrap_key_data(stream_key(SEED, "method").view(np.uint32)[:2])
    for number in (worker, step, LOCAL, inner, 0):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.normal(key, START.shape, float))


def parle(n, window, gamma, rho, scoping, noise, decay, mu, eta, least):
    """The paper's loop; the mean of the replicas after each round."""
    x, v, path = [START] * n, [0 * START] * n, [START]
    for t in range(ROUNDS):
        reach, apart = (
            max(first * (1 - scoping) ** t, min(least, first)) for first in (gamma, rho)
        )
        after = []
        for a in range(n):
            rate = (1 + a / 4) / 16
            y = z = x[a]
            for k in range(window):
                d = CURVATURE * y + (y - x[a]) / reach
                v[a] = mu * v[a] + d
                y = y - rate * (d + mu * v[a]) + noise * np.sqrt(2 * rate) * normal(a, t, k)
                z = decay * z + (1 - decay) * y
            after.append(x[a] - eta * (x[a] - z) - eta / apart * (x[a] - path[-1]))
        x = after
        path.append(np.mean(x, axis=0))
    return np.array(path)


@functools.cache
def rounds(n, window, **policy):
    return simulate(Cluster(n, Gamma(1.0, 0.4), window=window, **policy), ROUNDS * n)


def deviation_from(path, method, trace):
    """The largest deviation of the central variable after a round, relative to the largest
    value.
    """
    n = trace.workers
    stops = np.arange(n, ROUNDS * n + 1, n)
    replayed, worst = (
        Replay(trace, method, quadratic(), SEED, precision="float64", stops=stops),
        0.0,
    )
    for t, stop in enumerate(stops.tolist()):
        replayed.advance(stop)
        worst = max(worst, float(np.abs(np.asarray(replayed.state.central) - path[t + 1]).max()))
    return worst / np.abs(path).max()


@pytest.mark.parametrize(
    ("n", "window", "noise"),
    [(5, 4, 0.01), unless(False, 5, 1, 0.0), unless(False, 1, 3, 0.1), unless(False, 2, 3, 0)],
)
def test_parle_is_its_papers_loop(n, window, noise):
    options = {"gamma": 2.0, "rho": 3.0, "scoping": 0.1, "noise": noise, "decay": 0.75}
    method = methods.parle(
        diverse, **options, momentum=0.6, outer_rate=0.9, gamma_least=1.0, rho_least=1.0
    )
    path = parle(n, window, **options, mu=0.6, eta=0.9, least=1.0)
    assert deviation_from(path, method, rounds(n, window, policy="barrier()")) < 1e-10


@pytest.mark.parametrize("window", [1, 4])
def test_parle_of_one_worker_without_rho_is_entropy_sgd(window):
    options = {"gamma": 2.0, "scoping": 0.1, "noise": 0.1}
    path = parle(1, window, **options, rho=1e300, decay=0.75, mu=0.9, eta=1.0, least=1.0)
    trace = rounds(1, window)
    assert deviation_from(path, methods.entropy_sgd(diverse, **options), trace) < 1e-10
    assert (
        deviation_from(path, methods.parle(diverse, **options, rho=None, policy=None), trace)
        < 1e-10
    )


@pytest.mark.full
def test_limits_are_sgd_bit_for_bit(optimized):
    problem = problems.quadratic(CURVATURE, noise=0.1, start=START)
    plain = {"gamma": None, "noise": 0.0, "momentum": 0.0}

    def losses(method):
        return one_worker(method, problem, 1, "float32").commits["loss"].to_numpy()

    expected = losses(methods.sgd(0.05, momentum=0.0)).tobytes()
    assert (
        losses(methods.parle(0.05, rho=None, policy=None, decay=0.0, **plain)).tobytes() == expected
    )
    assert losses(methods.entropy_sgd(0.05, decay=0.0, **plain)).tobytes() == expected
    # The average begins anew at x in each round, so that a step is a quarter of SGD's.
    quarter = losses(methods.entropy_sgd(0.2, decay=0.75, **plain))
    np.testing.assert_allclose(quarter, losses(methods.sgd(0.05, momentum=0.0)), rtol=1e-5)


def test_langevin_noise_has_its_stationary_variance():
    """2 noise^2 / ((h + 1 / gamma) (2 - a)), with a = learning rate (h + 1 / gamma), of a step that
    is not small.
    """
    size, h, rate, noise = 20_000, 0.7, 0.2, 0.3
    problem = problems.quadratic(np.full(size, h), start=np.zeros(size))
    method = methods.entropy_sgd(rate, gamma=1.0, noise=noise, decay=0.0, momentum=0.0)
    run = replay(
        simulate(Cluster(1, 1.0, window=60), 1),
        method,
        problem,
        precision="float64",
        progress=False,
    )
    expected = 2 * noise**2 / ((h + 1) * (2 - rate * (h + 1)))
    assert np.mean(np.asarray(run.params) ** 2) == pytest.approx(
        expected, rel=4 * np.sqrt(2 / size)
    )
