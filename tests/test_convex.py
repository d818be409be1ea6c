"""Least squares and logistic regression whose workers differ: data, minima, shards, learning, bad
input.
"""

import jax
import numpy as np
import pytest

from asyncsim.problems import least_squares, logistic
from asyncsim.problems.convex import make_shards

MAKE = {"least_squares": least_squares, "logistic": logistic}
OUTCOME = {"least_squares": "target", "logistic": "label"}


pytestmark = pytest.mark.usefixtures("float64")


def truths(workers, heterogeneity, dimension=5):
    """What each worker's own examples say without noise, shape ``[workers, dimension]``."""
    problem = least_squares(
        workers, 1, heterogeneity, dimension, examples=2 * dimension, label_noise=0.0
    )
    a, b = problem.train["features"], problem.train["target"]
    return np.array([np.linalg.lstsq(a[i::workers], b[i::workers])[0] for i in range(workers)])


def values(problem, x):
    """The objective and its gradient at ``x``, in NumPy from the docstrings."""
    a, outcome = problem.train["features"], problem.train[OUTCOME[problem.name]]
    if problem.name == "least_squares":
        residual = a @ x - outcome
        return np.mean(residual**2) / 2, a.T @ residual / len(a)
    l2 = problem.config["regularisation"]
    margin = outcome * (a @ x)
    slope = -outcome / (1 + np.exp(margin))
    return np.mean(np.log(1 + np.exp(-margin))) + l2 * x @ x / 2, a.T @ slope / len(a) + l2 * x


def solution(problem):
    """The minimiser: normal equations, or Newton steps from zero."""
    a = problem.train["features"]
    x = np.zeros(a.shape[1])
    for _ in range(30):
        if problem.name == "least_squares":
            hessian = a.T @ a / len(a)
        else:
            share = 1 / (1 + np.exp(-a @ x))
            hessian = a.T @ ((share * (1 - share))[:, None] * a) / len(a)
            hessian += problem.config["regularisation"] * np.eye(len(x))
        x = x - np.linalg.solve(hessian, values(problem, x)[1])
    return x


def test_heterogeneity_is_how_far_the_workers_truths_lie_from_the_shared_one():
    workers, dimension = 200, 5
    shared, one, three = (truths(workers, h, dimension) for h in (0.0, 1.0, 3.0))
    np.testing.assert_allclose(shared, np.broadcast_to(shared[0], shared.shape), atol=1e-12)
    np.testing.assert_allclose(three - shared, 3 * (one - shared), atol=1e-11)
    # A squared distance is a chi-square of five degrees of freedom over five: variance 2/5. Five
    # standard errors.
    distance = np.mean(np.sum((one - shared) ** 2, 1))
    assert distance == pytest.approx(1, abs=5 * (2 / dimension / workers) ** 0.5)


def test_labels_have_the_logistic_probabilities():
    problem = logistic(10, 1, heterogeneity=1.0, examples=2000)
    shards = make_shards("logistic", 10, 40, 2000, 10.0, 1.0, data_seed=0)
    assert np.array_equal(problem.train["features"], shards.features)
    assert set(problem.train["label"]) == {-1.0, 1.0}
    probability = 1 / (1 + np.exp(-shards.response))
    for part in (shards.response < -0.5, shards.response > 0.5):
        found, p = problem.train["label"][part] > 0, probability[part]
        error = np.sqrt(np.sum(p * (1 - p))) / part.sum()
        assert found.mean() == pytest.approx(p.mean(), abs=5 * error)


@pytest.mark.parametrize("name", MAKE)
def test_each_worker_has_its_own_shard_that_no_other_changes(name):
    few, many = (MAKE[name](workers, 3, 1.0, dimension=4, examples=6) for workers in (3, 5))
    for i in range(3):
        for leaf in few.train:
            assert np.array_equal(few.train[leaf][i::3], many.train[leaf][i::5])
    rows = few.batch_indices(0, 3).rows([0, 1, 2], [4, 0, 1])
    assert np.array_equal(rows[:, 0] % 3, [[0] * 3, [1] * 3, [2] * 3])
    alone = few.batch_indices(0, 1).rows([0] * 6, np.arange(6)).ravel()
    assert sorted(alone.tolist()) == list(range(18))
    again, other = (
        MAKE[name](3, 3, 1.0, dimension=4, examples=6, data_seed=seed) for seed in (0, 1)
    )
    assert np.array_equal(few.train["features"], again.train["features"])
    assert not np.any(few.train["features"] == other.train["features"])


@pytest.mark.parametrize("heterogeneity", [0.0, 2.0])
@pytest.mark.parametrize("name", MAKE)
def test_evaluation_is_the_distance_to_the_minimum(name, heterogeneity):
    problem = MAKE[name](6, 5, heterogeneity, dimension=7, examples=30)
    minimiser = solution(problem)
    minimum, gradient = values(problem, minimiser)
    assert np.linalg.norm(gradient) < 1e-13
    for x in (np.zeros(7), np.linspace(-1, 1, 7), minimiser + 1e-3):
        found = jax.jit(problem.evaluate)(x, None, problem.train)
        value, gradient = values(problem, x)
        assert float(found["loss"]) == pytest.approx(value, rel=1e-13)
        assert float(found["gradient_norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-11)
        # The difference of the two values has their round-off, some 1e-16.
        assert float(found["excess"]) == pytest.approx(value - minimum, abs=2e-15)
    assert abs(float(problem.evaluate(minimiser, None, problem.train)["excess"])) < 1e-15


@pytest.mark.parametrize("name", MAKE)
def test_minibatch_gradients_are_those_of_the_workers_examples(name):
    problem = MAKE[name](4, 10, 1.0, dimension=3, examples=10)
    x = np.array([0.3, -1.0, 0.5])
    gradients = []
    for rows in problem.batch_indices(0, 4).rows(np.arange(4), np.zeros(4, int))[:, 0]:
        batch = {leaf: array[rows] for leaf, array in problem.train.items()}
        gradients.append(jax.grad(problem.loss)(x, batch, None))
    # Full batches of equal shards: their mean is the gradient of the objective.
    np.testing.assert_allclose(np.mean(gradients, 0), values(problem, x)[1], rtol=1e-12, atol=1e-15)
    assert np.ptp(gradients, 0).min() > 0.05
