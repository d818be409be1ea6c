"""Problems: contracts, values, and data of the user."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_cifar10, tiny_mnist

from asyncsim import Cluster, InputError, methods, replay, simulate
from asyncsim.problems import (
    characters,
    custom,
    digits,
    least_squares,
    logistic,
    matrix_completion,
    quadratic,
)
from asyncsim.problems.convex import make_shards
from asyncsim.problems.problem import dirichlet_shards, mean_in_pieces

KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def exact():
    """float64, and no promotion that the code does not ask for."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def in_precision(tree, dtype):
    """What the replay does with the parameters and the data."""
    return jax.tree.map(
        lambda a: jnp.asarray(a, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype), tree
    )


def regression():
    """A user's problem: a parameter tree of tuples, two arrays, no evaluate."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 3))
    train = {"x": x, "y": x @ [1.0, -2.0, 0.5] + 0.1}

    def init(key):
        return {"w": jax.random.normal(key, (3,)), "rest": (jnp.zeros(()),)}

    def loss(params, batch, key):
        return jnp.mean((batch["x"] @ params["w"] + params["rest"][0] - batch["y"]) ** 2)

    return custom(init, loss, train, {"x": x[:7], "y": train["y"][:7]}, batch_size=8)


def line(key):
    return jnp.ones(2)


def half(params, batch, key):
    return jnp.sum(params * params)


def own(*data, **options):
    return custom(line, half, *data, **options)


def scores(params, data):
    return data["x"] @ params


def images(shape=(28, 28), label=(0, 9, 4)):
    return {"image": np.zeros((3, *shape), np.float32), "label": np.array(label)}


def classes(predict, train=None, test=None):
    """A user's problem of two classes that predicts; with data of the user's own instead of these,
    if given.
    """
    data = {"x": np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), "label": np.array([0, 1, 0])}
    train, test = (data if part is None else part for part in (train, test))
    return custom(lambda key: jnp.eye(2), half, train, test, batch_size=1, predict=predict)


def with_state():
    """A user's problem that counts its batches in a state."""

    def loss(params, state, batch, key):
        return jnp.sum(params * params) * jnp.mean(batch), {"seen": state["seen"] + 1}

    return custom(
        lambda key: jnp.ones(2),
        loss,
        np.ones(10, np.float32),
        batch_size=2,
        init_state=lambda: {"seen": jnp.zeros((), jnp.int32)},
    )


CASES = {
    "quadratic": lambda: quadratic([0.1, 1.0, 3.0], noise=0.5, start=[1.0, 2.0, -1.0]),
    "quadratic, noiseless": lambda: quadratic([1.0, 2.0]),
    "matrix_completion": lambda: matrix_completion(6, 2, observed=0.5),
    "digits": lambda: digits(batch_size=5),
    "digits, linear": lambda: digits(hidden=()),
    "mnist": tiny_mnist,
    "least_squares": lambda: least_squares(4, 5, heterogeneity=1.0, dimension=6, examples=20),
    "logistic": lambda: logistic(4, 5, heterogeneity=1.0, dimension=6, examples=20),
    "characters": lambda: characters(4, context=8, width=8, heads=2),
    "cifar10, small": lambda: tiny_cifar10("small"),
    "cifar10, resnet20": lambda: tiny_cifar10("resnet20"),
    "cifar10, alexnet": lambda: tiny_cifar10("alexnet"),
    "custom": regression,
    "custom with state": with_state,
}


def inputs(problem, dtype):
    params = in_precision(problem.init(KEY), dtype)
    state = problem.init_state() if problem.init_state else None
    batch = in_precision(jax.tree.map(lambda a: a[: problem.batch_size], problem.train), dtype)
    return params, state, batch


#: Slow to compile.
DEEP = {"mnist", "cifar10, small", "cifar10, resnet20", "cifar10, alexnet", "characters"}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.full if name in DEEP else []) for name in CASES]
)
def problem(request):
    return CASES[request.param]()


# Contract, every problem


def test_single_precision_stays_single_under_x64(problem):
    params, state, batch = inputs(problem, jnp.float32)
    value_and_gradient = jax.jit(jax.value_and_grad(problem.stateful_loss, has_aux=True))
    (value, _), gradient = value_and_gradient(params, state, batch, KEY)
    assert value.shape == () and value.dtype == jnp.float32 and np.isfinite(value)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    results = jax.jit(problem.evaluate)(params, state, in_precision(problem.train, jnp.float32))
    assert "loss" in results and json.loads(json.dumps(problem.config)) == problem.config
    for result in results.values():
        assert result.shape == () and result.dtype == jnp.float32 and np.isfinite(result)


@pytest.mark.full
@pytest.mark.parametrize("name", ["digits", "mnist", "characters", "cifar10, small"])
def test_a_key_gives_the_same_start_in_both_precisions(name):
    problem = CASES[name]()
    double, again = problem.init(KEY), problem.init(KEY)
    with jax.enable_x64(False):
        single = problem.init(KEY)
    for leaves in zip(*map(jax.tree.leaves, (double, again, single)), strict=True):
        assert np.array_equal(*leaves[:2]) and np.array_equal(*leaves[1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("problem", "count"),
    [
        (digits, 17_226),
        (tiny_mnist, 163_790),
        (lambda: quadratic(np.ones(16)), 16),
        (least_squares, 40),
        (logistic, 40),
        (characters, 111_545),
        (lambda: tiny_cifar10("small"), 122_570),
        (lambda: tiny_cifar10("resnet20"), 269_722),
        (lambda: tiny_cifar10("alexnet"), 1_026_666),
    ],
)
def test_parameter_counts(problem, count):
    assert problem().parameter_count == count


# Matrix completion


def test_matrix_completion_ignores_rotations_and_unobserved_entries():
    problem = matrix_completion(12, 2, observed=0.5)
    x = np.asarray(problem.init(KEY))
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    height = float(problem.evaluate(x, None, None)["loss"])
    assert problem.evaluate(x @ turn, None, None)["loss"] == pytest.approx(height, rel=1e-12)
    assert height < matrix_completion(12, 2).evaluate(x, None, None)["loss"]
    assert not np.array_equal(problem.init_replica(KEY, 1), x)


# The quadratic


def test_quadratic_values():
    problem = quadratic([1.0, 4.0], start=[2.0, 0.5])
    x = problem.init(KEY)
    assert problem.loss(x, None, KEY) == problem.evaluate(x, None, None)["loss"] == 2.5
    assert jax.grad(problem.loss)(x, None, KEY).tolist() == [2.0, 2.0]
    assert (problem.train, problem.batch_size, problem.batch_indices(0, 4)) == (None, None, None)
    assert problem.examples == 0


def test_quadratic_noise_is_the_gradients_standard_deviation():
    noise, draws = 0.3, 20_000
    problem = quadratic(np.linspace(0.5, 2, 4), noise)
    x = problem.init(KEY)
    keys = jax.random.split(jax.random.key(0), draws)
    gradients = jax.vmap(lambda key: jax.grad(problem.loss)(x, None, key))(keys)
    # Five standard errors: of a mean, noise / sqrt(N); of a standard deviation, noise / sqrt(2 N).
    np.testing.assert_allclose(
        gradients.mean(0), np.linspace(0.5, 2, 4), atol=5 * noise / draws**0.5
    )
    np.testing.assert_allclose(gradients.std(0), noise, atol=5 * noise / (2 * draws) ** 0.5)
    correlation = np.corrcoef(gradients.T)[np.triu_indices(4, 1)]
    np.testing.assert_allclose(correlation, 0, atol=5 / draws**0.5)


# The digits


def test_digits_are_the_bundled_ones_split_by_class():
    from sklearn.datasets import load_digits

    problem = digits()
    assert (len(problem.train["label"]), len(problem.test["label"])) == (1437, 360)
    parts = [np.c_[part["image"], part["label"]] for part in (problem.train, problem.test)]
    pixels, labels = load_digits(return_X_y=True)
    tables = np.concatenate(parts), np.c_[pixels / 16, labels]
    assert np.array_equal(*(table[np.lexsort(table.T)] for table in tables))
    # Every fifth of each class, up to the one that a class's end cuts off.
    shares = np.bincount(problem.test["label"]) / np.bincount(labels.astype(int))
    np.testing.assert_allclose(shares, 0.2, atol=1 / 174)


# Least squares and logistic regression whose workers differ


CONVEX = {"least_squares": least_squares, "logistic": logistic}
OUTCOME = {"least_squares": "target", "logistic": "label"}


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
        share, p = (problem.train["label"][part] > 0).mean(), probability[part]
        error = np.sqrt(np.sum(p * (1 - p))) / part.sum()
        assert share == pytest.approx(p.mean(), abs=5 * error)


@pytest.mark.parametrize("name", CONVEX)
def test_each_worker_has_its_own_shard_that_no_other_changes(name):
    few, many = (CONVEX[name](workers, 3, 1.0, dimension=4, examples=6) for workers in (3, 5))
    for i in range(3):
        for leaf in few.train:
            assert np.array_equal(few.train[leaf][i::3], many.train[leaf][i::5])
    rows = few.batch_indices(0, 3).rows([0, 1, 2], [4, 0, 1])
    assert np.array_equal(rows[:, 0] % 3, [[0] * 3, [1] * 3, [2] * 3])
    alone = few.batch_indices(0, 1).rows([0] * 6, np.arange(6)).ravel()
    assert sorted(alone.tolist()) == list(range(18))
    other = CONVEX[name](3, 3, 1.0, dimension=4, examples=6, data_seed=1)
    assert not np.any(few.train["features"] == other.train["features"])


@pytest.mark.parametrize("heterogeneity", [0.0, 2.0])
@pytest.mark.parametrize("name", CONVEX)
def test_evaluation_is_the_distance_to_the_minimum(name, heterogeneity):
    problem = CONVEX[name](6, 5, heterogeneity, dimension=7, examples=30)
    minimiser, evaluate = solution(problem), jax.jit(problem.evaluate)
    minimum, gradient = values(problem, minimiser)
    assert np.linalg.norm(gradient) < 1e-13
    for x in (np.zeros(7), np.linspace(-1, 1, 7), minimiser + 1e-3):
        evaluated = {k: float(v) for k, v in evaluate(x, None, problem.train).items()}
        value, gradient = values(problem, x)
        assert evaluated["loss"] == pytest.approx(value, rel=1e-13)
        assert evaluated["gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-11)
        # The difference of the two values has their round-off, some 1e-16.
        assert evaluated["excess"] == pytest.approx(value - minimum, abs=2e-15)
    assert abs(float(evaluate(minimiser, None, problem.train)["excess"])) < 1e-15


@pytest.mark.parametrize("name", CONVEX)
def test_minibatch_gradients_are_those_of_the_workers_examples(name):
    problem = CONVEX[name](4, 10, 1.0, dimension=3, examples=10)
    x = np.array([0.3, -1.0, 0.5])
    gradients = []
    for rows in problem.batch_indices(0, 4).rows(np.arange(4), np.zeros(4, int))[:, 0]:
        batch = {leaf: array[rows] for leaf, array in problem.train.items()}
        gradients.append(jax.grad(problem.loss)(x, batch, None))
    # Full batches of equal shards: their mean is the gradient of the objective.
    np.testing.assert_allclose(np.mean(gradients, 0), values(problem, x)[1], rtol=1e-12, atol=1e-15)
    assert np.ptp(gradients, 0).min() > 0.05


# A user's own


def test_custom_default_evaluation_is_the_mean_loss():
    problem = regression()
    params, _, _ = inputs(problem, jnp.float64)
    whole = in_precision(problem.train, jnp.float64)
    assert problem.evaluate(params, None, whole)["loss"] == problem.loss(params, whole, KEY)


def test_custom_evaluate_and_state():
    problem = with_state()
    params, state, batch = inputs(problem, jnp.float64)
    assert problem.stateful_loss(params, state, batch, KEY)[1] == {"seen": 1}
    assert problem.evaluate(params, state, batch)["loss"] == 2.0
    evaluated = own(evaluate=lambda params, data: {"loss": params[0]})
    assert evaluated.evaluate(jnp.full(2, 3.0), None, None) == {"loss": 3.0}
    assert own().evaluate(jnp.ones(2), None, None) == {"loss": 2.0}


@pytest.mark.parametrize("examples", [6, 7, 13])
def test_mean_in_pieces(examples):
    values = jnp.arange(examples, dtype=jnp.float64)
    result = mean_in_pieces(lambda part: {"loss": part["v"].mean()}, {"v": values}, piece=7)
    assert float(result["loss"]) == pytest.approx(float(values.mean()), rel=1e-15)


# Data of the user


def test_whole_numbers_are_never_cut_off():
    label, trace = 2**40, simulate(Cluster(2, "gamma(1, 0.2)"), 200)

    def loss(params, batch, key):
        return jnp.mean((params["w"] - batch["y"].astype(params["w"].dtype) / label) ** 2)

    data = {"x": np.ones((20, 1), np.float32), "y": np.full(20, label, np.int64)}
    problem = custom(lambda key: {"w": jnp.zeros(())}, loss, data, batch_size=4)
    message = r"whole numbers from 1099511627776 to .* int32 cannot hold; use precision="
    with pytest.raises(InputError, match=message):
        replay(trace, methods.downpour(0.1), problem, precision="float32")
    run = replay(trace, methods.downpour(0.1), problem, precision="float64", progress=False)
    assert run.params["w"] == pytest.approx(1, rel=1e-3)


def split_by_class(**options):
    data = {"x": np.arange(12, dtype=np.float32), "label": np.arange(12) % 3}
    return custom(
        lambda key: jnp.ones(1),
        lambda p, batch, key: jnp.mean((batch["x"] - p[0]) ** 2),
        data,
        batch_size=2,
        **options,
    )


def test_a_custom_problem_splits_its_examples():
    parts = [[0, 1, 2, 3, 4], [4, 11]]
    batches = split_by_class(split=parts).batch_indices(0, workers=2)
    for worker, part in enumerate(parts):
        drawn = batches.rows([worker] * 2, [0, 1])
        assert set(drawn.flat) <= set(part) and len(set(drawn.flat)) == min(4, len(part))
    problem = split_by_class(split=0.1)
    shards = dirichlet_shards(problem.train["label"], 3, 0.1, 5)
    first = problem.batch_indices(5, workers=3).rows([0, 1, 2], [0, 0, 0])
    assert all(set(row.flat) <= set(shard) for row, shard in zip(first, shards, strict=True))
    assert not np.array_equal(shards[0], dirichlet_shards(problem.train["label"], 3, 0.1, 6)[0])
    assert problem.config["split"] == 0.1
    assert split_by_class(split=parts).config["split"] == [5, 2]
    function = split_by_class(split=lambda workers, seed: parts)
    assert np.array_equal(function.batch_indices(0, 2).rows([1], [0]), batches.rows([1], [0]))


def labelled(label):
    return {"x": np.ones((3, 2)), "label": np.array(label)}


def of_images(make, shape, *args):
    """A problem of good training images, and of others to test."""
    return make(images(shape), images(*args), batch_size=1)
