"""CIFAR-10: layers and networks against XLA's own, learning, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_cifar10
from jax import lax

from asyncsim.problems import layers

KEY = jax.random.key(3)
WAYS = ("NHWC", "HWIO", "NHWC")
MEAN, STD = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])


# Layers


def uniform(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).uniform(-1, 1, shape))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "biased"),
    [(1, 1, 0, True), (3, 1, 1, False), (3, 2, 1, False), (2, 3, 2, True)],
)
def test_convolution_is_xlas(float64, kernel, stride, padding, biased):
    images, layer = uniform(3, 9, 8, 5), {"weight": uniform(kernel, kernel, 3, 4)}
    if biased:
        layer["bias"] = uniform(4)

    @jax.jit
    def xlas(layer, images):
        around = [(padding, padding)] * 2
        images = jnp.moveaxis(images, -1, 0)
        ways = ("NCHW", "HWIO", "CHWN")
        found = lax.conv_general_dilated(
            images, layer["weight"], (stride, stride), around, None, None, ways
        )
        return found + layer["bias"][:, None, None, None] if biased else found

    found = jax.jit(layers.convolve, static_argnums=(2, 3))(layer, images, stride, padding)
    np.testing.assert_allclose(found, xlas(layer, images), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 7)])
def test_max_pool_is_xlas(float64, height, width):
    images = uniform(3, height, width, 2)
    expected = lax.reduce_window(images, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    assert np.array_equal(layers.max_pool(images), expected)


def test_group_norm_standardises_each_group_of_each_example(float64):
    images, layer = 3 + 2 * uniform(6, 4, 5, 3), {"scale": uniform(6), "bias": uniform(6)}
    expected = np.array(images)
    for example in range(3):
        for group in (slice(0, 3), slice(3, 6)):
            part = expected[group, ..., example]
            expected[group, ..., example] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    expected = expected * np.reshape(layer["scale"], (6, 1, 1, 1)) + np.reshape(
        layer["bias"], (6, 1, 1, 1)
    )
    np.testing.assert_allclose(
        jax.jit(layers.group_norm, static_argnums=2)(layer, images, 2),
        expected,
        rtol=1e-12,
        atol=1e-14,
    )


# Networks


def convolve(layer, x, stride=1, padding=0):
    around = [(padding, padding)] * 2
    x = lax.conv_general_dilated(x, layer["weight"], (stride, stride), around, None, None, WAYS)
    return x if "scale" in layer else x + layer["bias"]


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dense(layer, x):
    return x @ layer["weight"] + layer["bias"]


def flat(x):
    return jnp.moveaxis(x, -1, 1).reshape(len(x), -1)


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


@pytest.mark.full
@pytest.mark.parametrize("reference", [small, resnet20])
def test_network_against_xla_convolutions(float64, reference):
    problem = tiny_cifar10(reference.__name__, batch_size=3)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf, float) + 0.02 * rng.normal(size=leaf.shape)),
        problem.init(KEY),
    )
    batch = jax.tree.map(lambda leaf: leaf[:3], problem.train)
    pixels = jnp.asarray((np.moveaxis(batch["image"], 1, -1) / 255 - MEAN) / STD)
    scores = np.asarray(jax.jit(reference)(params, pixels))
    expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(3), batch["label"]])
    assert float(jax.jit(problem.loss)(params, batch, None)) == pytest.approx(
        float(expected), rel=1e-11
    )
    found = jax.jit(problem.evaluate)(params, None, batch)
    assert float(found["loss"]) == pytest.approx(float(expected), rel=1e-11)
    assert float(found["accuracy"]) == np.mean(np.argmax(scores, 1) == batch["label"])


# Options
