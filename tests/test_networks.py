"""Networks: their layers against XLA's own, and the whole against plain programs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_cifar10, tiny_mnist
from jax import lax

from asyncsim.problems import characters, layers

pytestmark = pytest.mark.usefixtures("float64")
KEY = jax.random.key(3)


def uniform(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).uniform(-1, 1, shape))


# Plain layers, the examples first and the channels last


def convolve(layer, x, stride=1, padding=0):
    around, ways = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, layer["weight"], (stride, stride), around, None, None, ways)
    return x + layer["bias"] if "bias" in layer and "scale" not in layer else x


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dense(layer, x):
    return x @ layer["weight"] + layer["bias"]


def flat(x):
    return jnp.moveaxis(x, -1, 1).reshape(len(x), -1)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "biased"),
    [(1, 1, 0, True), (3, 1, 1, False), (3, 2, 1, False), (2, 3, 2, True)],
)
def test_convolution_is_xlas(kernel, stride, padding, biased):
    images, layer = uniform(3, 9, 8, 5), {"weight": uniform(kernel, kernel, 3, 4)}
    if biased:
        layer["bias"] = uniform(4)
    result = jax.jit(layers.convolve, static_argnums=(2, 3))(layer, images, stride, padding)
    expected = convolve(layer, jnp.moveaxis(images, (3, 0), (0, 3)), stride, padding)
    np.testing.assert_allclose(
        jnp.moveaxis(result, (3, 0), (0, 3)), expected, rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 7)])
def test_max_pool_is_xlas(height, width):
    images = uniform(3, height, width, 2)
    assert np.array_equal(layers.max_pool(images), pool(images))


def test_group_norm_standardises_each_group_of_each_example():
    images, layer = 3 + 2 * uniform(6, 4, 5, 3), {"scale": uniform(6), "bias": uniform(6)}
    expected = np.array(images)
    for example in range(3):
        for group in (slice(0, 3), slice(3, 6)):
            part = expected[group, ..., example]
            expected[group, ..., example] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    scale, bias = (np.reshape(layer[name], (6, 1, 1, 1)) for name in ("scale", "bias"))
    result = jax.jit(layers.group_norm, static_argnums=2)(layer, images, 2)
    np.testing.assert_allclose(result, expected * scale + bias, rtol=1e-12, atol=1e-14)


# Whole networks


def shaken(params, size):
    """The same parameters with biases and scales that do something."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf, float) + size * rng.normal(size=leaf.shape)),
        params,
    )


def mnist(params, x, dropout=0.2):
    """In the paper's order of operations, with the channels that ``KEY`` drops."""
    kept = jnp.transpose(jax.random.uniform(KEY, (20, 1, 1, len(x)), jnp.float32) >= dropout)
    x = jax.nn.relu(pool(convolve(params["conv1"], x)))
    x = convolve(params["conv2"], x) * kept.astype(x.dtype) / (1 - dropout)
    x = flat(jax.nn.relu(pool(x)))
    for name in ("dense1", "dense2"):
        x = jax.nn.relu(dense(params[name], x))
    return dense(params["dense3"], x)


def small(params, x):
    x = pool(jax.nn.relu(convolve(params["conv1"], x)))
    x = pool(jax.nn.relu(convolve(params["conv2"], x)))
    x = flat(jax.nn.relu(convolve(params["conv3"], x)))
    return dense(params["dense2"], jax.nn.relu(dense(params["dense1"], x)))


def resnet20(params, x):
    def block(name, x, stride=1):
        layer = params[name]
        x = convolve(layer, x, stride, padding=1)
        groups = jnp.stack(jnp.split(x, 8, axis=-1))
        mean, variance = (f(groups, axis=(2, 3, 4), keepdims=True) for f in (jnp.mean, jnp.var))
        x = jnp.concatenate(list((groups - mean) / jnp.sqrt(variance + 1e-5)), axis=-1)
        return x * layer["scale"] + layer["bias"]

    x = jax.nn.relu(block("conv", x))
    for i in range(9):
        name, halved = f"stage{i // 3 + 1}_block{i % 3 + 1}", i in (3, 6)
        inside = block(f"{name}_conv2", jax.nn.relu(block(f"{name}_conv1", x, 1 + halved)))
        if halved:
            zeros = jnp.zeros_like(x[:, ::2, ::2, : x.shape[-1] // 2])
            x = jnp.concatenate([zeros, x[:, ::2, ::2], zeros], axis=-1)
        x = jax.nn.relu(inside + x)
    return dense(params["dense"], x.mean((1, 2)))


@pytest.mark.full  # the default run has the layers
@pytest.mark.parametrize("reference", [mnist, small, resnet20])
def test_networks_are_those_of_plain_layers(reference):
    if reference is mnist:
        problem, without_dropout = tiny_mnist(3, dropout=0.2), (0.0,)
        pixels = problem.train["image"][:3, ..., None]
    else:
        problem, without_dropout = tiny_cifar10(reference.__name__, batch_size=3), ()
        mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
        pixels = (np.moveaxis(problem.train["image"][:3], 1, -1) / 255 - mean) / std
    images, label = problem.train["image"][:3], problem.train["label"][:3]
    images = jnp.asarray(images, float) if reference is mnist else images
    params, pixels = shaken(problem.init(KEY), 0.02), jnp.asarray(pixels, float)

    def loss(scores):
        scores = np.asarray(scores)
        of_label = scores[np.arange(3), label]
        return pytest.approx(np.mean(np.log(np.exp(scores).sum(1)) - of_label), rel=1e-11)

    batch = {"image": images, "label": label}
    assert float(jax.jit(problem.loss)(params, batch, KEY)) == loss(
        jax.jit(reference)(params, pixels)
    )
    evaluated = jax.jit(problem.evaluate)(params, None, batch)
    scores = jax.jit(reference)(params, pixels, *without_dropout)
    assert float(evaluated["loss"]) == loss(scores)
    assert float(evaluated["accuracy"]) == np.mean(np.asarray(scores).argmax(1) == label)


def test_mnist_initial_weights_fill_pytorchs_range():
    fan_in = {"conv1": 25, "conv2": 250, "dense1": 320, "dense2": 300, "dense3": 200}
    params = tiny_mnist().init(KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 163_790
    for name, layer in params.items():
        weight, bound = np.asarray(layer["weight"], float), fan_in[name] ** -0.5
        assert np.abs(weight).max() <= bound and np.abs(layer["bias"]).max() <= bound
        # Five standard errors of a uniform law's mean square, bound^2 / 3: its variance is 4
        # bound^4 / 45.
        error = bound**2 * (4 / 45 / weight.size) ** 0.5
        assert np.mean(weight**2) == pytest.approx(bound**2 / 3, abs=5 * error)


def transformer(params, window, heads, blocks):
    """One window, head by head, in NumPy; a place attends to itself and those before."""
    params, before = jax.tree.map(np.asarray, params), np.tri(len(window))

    def norm(layer, x):
        mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * layer["scale"] + layer["bias"]

    def gelu(x):
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = params["characters"][window] + params["positions"][: len(window)]
    for block in (params[f"block{i + 1}"] for i in range(blocks)):
        parts = np.split(dense(block["attention"], norm(block["norm1"], x)), 3 * heads, axis=1)
        attended = []
        for q, k, v in zip(parts[:heads], parts[heads:-heads], parts[-heads:], strict=True):
            weight = np.exp(q @ k.T / math.sqrt(q.shape[1])) * before
            attended.append(weight / weight.sum(1, keepdims=True) @ v)
        x = x + dense(block["attended"], np.concatenate(attended, axis=1))
        x = x + dense(block["contract"], gelu(dense(block["expand"], norm(block["norm2"], x))))
    return dense(params["last"], norm(params["norm"], x))


@pytest.mark.full
@pytest.mark.parametrize(("heads", "blocks"), [(2, 2), (4, 11)])
def test_the_transformer_is_one_in_numpy(heads, blocks):
    problem = characters(4, context=8, width=8, heads=heads, layers=blocks)
    params = shaken(problem.init(KEY), 0.3)
    batch = problem.train[:3]
    expected = []
    for window in batch:
        scores = transformer(params, window[:-1], heads, blocks)
        expected.append(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), window[1:]])
    # As a replay has them: rebuilt from a flat vector, in which the blocks' order is that of their
    # names.
    params = jax.tree.unflatten(*reversed(jax.tree.flatten(params)))
    assert float(jax.jit(problem.loss)(params, batch, None)) == pytest.approx(
        np.mean(expected), rel=1e-11
    )
    evaluated = jax.jit(problem.evaluate)(params, None, batch)["loss"]
    assert float(evaluated) == pytest.approx(np.mean(expected), rel=1e-11)
