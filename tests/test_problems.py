import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_cifar10, tiny_mnist
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

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
from asyncsim.problems.problem import BatchIndices, dirichlet_shards, mean_in_pieces

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


def classes(predict, train=None, test=None):
    """A user's problem of two classes that predicts; with data of the user's own instead of these,
    if given.
    """
    x = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
    data = {"x": x, "label": np.array([0, 1, 0])}
    given = {
        "train": data if train is None else train,
        "test": data if test is None else test,
        "batch_size": 1,
    }
    return custom(lambda key: jnp.eye(2), lambda p, b, k: jnp.sum(p * p), **given, predict=predict)


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
    assert all(
        r.shape == () and r.dtype == jnp.float32 and np.isfinite(r) for r in results.values()
    )


@pytest.mark.full
def test_a_key_gives_the_same_start_in_both_precisions():
    for make in (CASES[name] for name in ("digits", "mnist", "characters", "cifar10, small")):
        problem = make()
        double = problem.init(KEY)
        again = problem.init(KEY)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (double, again)), strict=True)
        )
        with jax.enable_x64(False):
            single = problem.init(KEY)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (double, single)), strict=True)
        )


def test_losses_work_mapped_and_batched_over_workers(problem):
    if problem.config.get("network") in ("resnet20", "alexnet"):
        pytest.skip("of the layers of the others")
    params, state, batch = inputs(problem, jnp.float64)
    keys = jax.random.split(KEY, 3)

    def gradient(key):
        return jax.grad(lambda p: problem.stateful_loss(p, state, batch, key)[0])(params)

    one, many = jax.jit(lambda k: lax.map(gradient, k))(keys), jax.jit(jax.vmap(gradient))(keys)
    for a, b in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.full
def test_parameter_counts():
    assert digits().parameter_count == 17_226
    assert tiny_mnist().parameter_count == 163_790
    assert quadratic(np.ones(16)).parameter_count == 16
    assert least_squares().parameter_count == logistic().parameter_count == 40
    assert characters().parameter_count == 111_545
    assert tiny_cifar10("small").parameter_count == 122_570
    assert tiny_cifar10("resnet20").parameter_count == 269_722
    assert tiny_cifar10("alexnet").parameter_count == 1_026_666


# Matrix completion


def test_matrix_completion_ignores_rotations_and_unobserved_entries():
    problem = matrix_completion(12, 2, observed=0.5)
    x = np.asarray(problem.init(KEY))
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    height = float(problem.evaluate(x, None, None)["loss"])
    assert problem.evaluate(x @ turn, None, None)["loss"] == pytest.approx(height, rel=1e-12)
    assert height < matrix_completion(12, 2).evaluate(x, None, None)["loss"]
    assert not np.array_equal(problem.init_replica(KEY, 1), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 51}, "rank = 51: must not exceed dimension = 50"),
        ({"observed": 0}, "observed = 0: must be above zero"),
    ],
)
def test_matrix_completion_refuses_sizes(options, message):
    with pytest.raises(InputError, match=message):
        matrix_completion(**options)


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
    ours = np.concatenate(
        [np.c_[part["image"], part["label"]] for part in (problem.train, problem.test)]
    )
    pixels, labels = load_digits(return_X_y=True)
    theirs = np.c_[pixels / 16, labels]
    order = [np.lexsort(table.T) for table in (ours, theirs)]
    assert np.array_equal(ours[order[0]], theirs[order[1]])
    # Every fifth of each class, up to the one that a class's end cuts off.
    shares = np.bincount(problem.test["label"]) / np.bincount(labels.astype(int))
    np.testing.assert_allclose(shares, 0.2, atol=1 / 174)


# MNIST


def reference_logits(params, images, kept, dropout):
    """The network as in the paper's order of operations, with XLA's own convolution and pooling."""
    ways = ("NHWC", "HWIO", "NHWC")

    def convolve(layer, x):
        return (
            lax.conv_general_dilated(x, layer["weight"], (1, 1), "VALID", dimension_numbers=ways)
            + layer["bias"]
        )

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    x = jax.nn.relu(pool(convolve(params["conv1"], images[..., None])))
    x = convolve(params["conv2"], x) * kept / (1 - dropout)
    x = jnp.moveaxis(jax.nn.relu(pool(x)), -1, 1).reshape(len(images), -1)
    for name in ("dense1", "dense2"):
        x = jax.nn.relu(x @ params[name]["weight"] + params[name]["bias"])
    return x @ params["dense3"]["weight"] + params["dense3"]["bias"]


@pytest.mark.full  # the default run has test_convolution_is_xlas
def test_mnist_network_against_xla_convolutions(dropout=0.2):
    problem = tiny_mnist(batch_size=12, dropout=dropout)
    params, _, batch = inputs(problem, jnp.float64)
    kept = jax.random.uniform(KEY, (20, 1, 1, 12), jnp.float32) >= dropout
    kept = jnp.transpose(kept, (3, 1, 2, 0)).astype(jnp.float64)

    @jax.jit
    @jax.value_and_grad
    def reference(params, kept, dropout):
        scores = reference_logits(params, batch["image"], kept, dropout)
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], 1)
        )

    value, gradient = jax.jit(jax.value_and_grad(lambda p: problem.loss(p, batch, KEY)))(params)
    expected, slope = reference(params, kept, dropout)
    assert float(value) == pytest.approx(float(expected), rel=1e-12)
    for a, b in zip(*map(jax.tree.leaves, (gradient, slope)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    evaluated = jax.jit(problem.evaluate)(params, None, batch)["loss"]
    assert float(evaluated) == pytest.approx(
        float(reference(params, jnp.ones_like(kept), 0.0)[0]), rel=1e-12
    )


def test_mnist_initial_weights_fill_pytorchs_range():
    fan_in = {"conv1": 25, "conv2": 250, "dense1": 320, "dense2": 300, "dense3": 200}
    params = tiny_mnist().init(KEY)
    for name, layer in params.items():
        weight, bound = np.asarray(layer["weight"], float), fan_in[name] ** -0.5
        assert np.abs(weight).max() <= bound and np.abs(layer["bias"]).max() <= bound
        # Five standard errors of a uniform law's mean square, bound^2 / 3: its variance is 4
        # bound^4 / 45.
        error = bound**2 * (4 / 45 / weight.size) ** 0.5
        assert np.mean(weight**2) == pytest.approx(bound**2 / 3, abs=5 * error)


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
    own = custom(
        lambda key: jnp.ones(2), lambda p, b, k: jnp.sum(p), evaluate=lambda p, d: {"loss": p[0]}
    )
    assert own.evaluate(jnp.full(2, 3.0), None, None) == {"loss": 3.0}
    assert custom(lambda key: jnp.ones(2), lambda p, b, k: jnp.sum(p)).evaluate(
        jnp.ones(2), None, None
    ) == {"loss": 2.0}


@pytest.mark.parametrize("examples", [6, 7, 13])
def test_mean_in_pieces(examples):
    values = jnp.arange(examples, dtype=jnp.float64)
    result = mean_in_pieces(lambda part: {"loss": part["v"].mean()}, {"v": values}, piece=7)
    assert float(result["loss"]) == pytest.approx(float(values.mean()), rel=1e-15)


# Batches


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 6),
    examples=st.integers(12, 60),
    batch_size=st.integers(1, 2),
    window=st.integers(1, 4),
    sharded=st.booleans(),
)
def test_an_epoch_is_a_permutation(seed, workers, examples, batch_size, window, sharded):
    stride = workers if sharded else 1
    parts = [np.arange(examples)[worker % stride :: stride] for worker in range(workers)]
    indices = BatchIndices(seed, batch_size, parts)
    for worker, held in enumerate(parts):
        batches = len(held) // batch_size
        jobs = -(-3 * batches // window)
        rows = indices.rows(np.full(jobs, worker), np.arange(jobs), window)
        assert rows.shape == (jobs, window, batch_size) and rows.dtype == np.int32
        for epoch in rows.reshape(-1, batch_size)[: 3 * batches].reshape(3, -1):
            assert len(set(epoch.tolist())) == len(epoch) and set(epoch.tolist()) <= set(
                held.tolist()
            )


@settings(max_examples=30)
@given(st.data())
def test_rows_do_not_depend_on_how_they_are_asked_for(draws):
    jobs = draws.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=40)
    )
    worker, job = np.array(jobs).T
    together, alone = (BatchIndices(5, 5, [np.arange(37)] * 4) for _ in range(2))
    together = together.rows(worker, job, 3)
    for w, j, rows in zip(worker, job, together, strict=True):
        assert np.array_equal(alone.rows([w], [j], 3)[0], rows)


def test_adding_a_worker_changes_nobodys_batches():
    problem = digits()
    worker, job = np.repeat(np.arange(5), 60), np.tile(np.arange(60), 5)
    few = problem.batch_indices(7, 5).rows(worker, job)
    many = problem.batch_indices(7, 6).rows(worker, job)
    assert np.array_equal(few, many)
    assert not np.array_equal(few[:60], few[60:120])
    assert not np.array_equal(few, problem.batch_indices(8, 5).rows(worker, job))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 12),
    concentration=st.sampled_from([1e-12, 0.01, 0.1, 1.0, 1e9]),
    label=st.lists(st.integers(0, 4), min_size=12, max_size=60),
)
def test_dirichlet_shards_are_disjoint_complete_and_of_one_size(
    seed, workers, concentration, label
):
    shards = dirichlet_shards(np.array(label), workers, concentration, seed)
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(label)))
    assert [len(shard) for shard in shards] == [
        len(range(i, len(label), workers)) for i in range(workers)
    ]


def test_workers_draw_from_their_dirichlet_shards():
    problem = digits(split=0.1, batch_size=8)
    shards = dirichlet_shards(problem.train["label"], 5, 0.1, 3)
    rows = (
        problem.batch_indices(3, 5)
        .rows(np.repeat(np.arange(5), 35), np.tile(np.arange(35), 5))
        .reshape(5, -1)
    )
    for shard, drawn in zip(shards, rows, strict=True):
        assert set(drawn.tolist()) <= set(shard.tolist()) and len(set(drawn.tolist())) == 35 * 8
    assert problem.config["split"] == 0.1 and "split" not in digits().config
    assert not np.array_equal(shards[0], dirichlet_shards(problem.train["label"], 5, 0.1, 4)[0])


# Bad input


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


@pytest.mark.parametrize(
    ("label", "precision", "fits"),
    [(2**40, "float32", False), (2**40, "float64", True), (7, "float32", True)],
)
def test_whole_numbers_are_never_cut_off(label, precision, fits):
    def loss(params, batch, key):
        return jnp.mean((params["w"] - batch["y"].astype(params["w"].dtype) / label) ** 2)

    data = {"x": np.ones((20, 1), np.float32), "y": np.full(20, label, np.int64)}
    problem = custom(lambda key: {"w": jnp.zeros(())}, loss, data, batch_size=4)
    trace = simulate(Cluster(2, "gamma(1, 0.2)"), 200)
    options = {"precision": precision, "progress": False}
    if not fits:
        with pytest.raises(
            InputError,
            match=r"whole numbers from 1099511627776 to .* int32 cannot hold; use precision=",
        ):
            replay(trace, methods.downpour(0.1), problem, **options)
        return
    assert replay(trace, methods.downpour(0.1), problem, **options).params["w"] == pytest.approx(
        1, rel=1e-3
    )


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
    assert problem.config["split"] == 0.1
    assert split_by_class(split=parts).config["split"] == [5, 2]
    function = split_by_class(split=lambda workers, seed: parts)
    assert np.array_equal(function.batch_indices(0, 2).rows([1], [0]), batches.rows([1], [0]))


def labelled(label):
    return {"x": np.ones((3, 2)), "label": np.array(label)}


def of_images(make, shape, *args):
    """A problem of good training images, and of others to test."""
    return make(images(shape), images(*args), batch_size=1)
