"""CIFAR-10: files, layers and networks against XLA's own, learning, bad input."""

import functools
import gzip
import hashlib
import http.server
import importlib
import io
import tarfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_cifar10
from jax import lax

from asyncsim import InputError, methods, prescribed, replay
from asyncsim.problems import cifar10, data, layers
from asyncsim.study.config import StudyConfig

KEY = jax.random.key(3)
DEEP = ("resnet20", "alexnet")
WAYS = ("NHWC", "HWIO", "NHWC")
MEAN, STD = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def no_folder_from_outside(monkeypatch):
    monkeypatch.delenv("ASYNCSIM_DATA", raising=False)


# Layers


def uniform(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).uniform(-1, 1, shape))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "biased"), [(1, 1, 0, True), (3, 1, 1, False), (3, 2, 1, False), (2, 3, 2, True)]
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
        found = lax.conv_general_dilated(images, layer["weight"], (stride, stride), around, None, None, ways)
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
    expected = expected * np.reshape(layer["scale"], (6, 1, 1, 1)) + np.reshape(layer["bias"], (6, 1, 1, 1))
    np.testing.assert_allclose(
        jax.jit(layers.group_norm, static_argnums=2)(layer, images, 2), expected, rtol=1e-12, atol=1e-14
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


def alexnet(params, x):
    for name, padding, pooled in (("conv1", 2, 1), ("conv2", 2, 1), ("conv3", 1, 0), ("conv4", 1, 0), ("conv5", 1, 1)):
        x = jax.nn.relu(convolve(params[name], x, padding=padding))
        x = pool(x) if pooled else x
    x = flat(x)
    for name in ("fc6", "fc7"):
        x = jax.nn.relu(dense(params[name], x))
    return dense(params["fc8"], x)


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
@pytest.mark.parametrize("reference", [small, alexnet, resnet20])
def test_network_against_xla_convolutions(float64, reference):
    problem = tiny_cifar10(reference.__name__, batch_size=3)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf, float) + 0.02 * rng.normal(size=leaf.shape)), problem.init(KEY)
    )
    batch = jax.tree.map(lambda leaf: leaf[:3], problem.train)
    pixels = jnp.asarray((np.moveaxis(batch["image"], 1, -1) / 255 - MEAN) / STD)
    scores = np.asarray(jax.jit(reference)(params, pixels))
    expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(3), batch["label"]])
    assert float(jax.jit(problem.loss)(params, batch, None)) == pytest.approx(float(expected), rel=1e-11)
    found = jax.jit(problem.evaluate)(params, None, batch)
    assert float(found["loss"]) == pytest.approx(float(expected), rel=1e-11)
    assert float(found["accuracy"]) == np.mean(np.argmax(scores, 1) == batch["label"])


@pytest.mark.full
def test_evaluation_takes_the_first_ten_thousand(monkeypatch):
    monkeypatch.setattr(importlib.import_module("asyncsim.problems.cifar10"), "_EVALUATED", 3)
    problem = tiny_cifar10("small")
    params, evaluate = problem.init(KEY), jax.jit(problem.evaluate)
    whole, first = (evaluate(params, None, part) for part in (problem.train, problem.test))
    assert float(whole["loss"]) == pytest.approx(
        float(first["loss"]), rel=1e-6
    )  # the test set has the first three of the training set


@pytest.mark.full
@pytest.mark.parametrize("network", ["small", *DEEP])
def test_ten_images_are_learnt(network):
    commits = 40
    problem = tiny_cifar10(network, batch_size=10)
    trace = prescribed(0, commits, workers=1)
    run = replay(trace, methods.downpour(learning_rate=0.03), problem, evaluate_every=commits, progress=False)
    # Ten classes, one image each: without looking at them nothing is below log(10) = 2.3.
    assert run.status == "finished" and run.evaluations["train_loss"].iloc[-1] < 1.6


@pytest.mark.full
def test_deep_networks_start_the_same_in_both_precisions():
    for network in DEEP:
        problem = tiny_cifar10(network)
        starts = []
        for x64 in (False, True):
            with jax.enable_x64(x64):
                starts.append(jax.tree.leaves(jax.jit(problem.init)(KEY)))
        assert all(np.array_equal(a, b) for a, b in zip(*starts, strict=True))


def test_alexnets_tensors_have_the_names_of_the_paper():
    params = jax.eval_shape(tiny_cifar10("alexnet").init, KEY)
    assert list(params) == [*(f"conv{i}" for i in range(1, 6)), "fc6", "fc7", "fc8"]


# Files


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A folder with CIFAR-10's six files of four invented records each."""
    rng = np.random.default_rng(0)
    (tmp_path / "cifar10").mkdir()
    records = {}
    for name in data.CIFAR10_FILES:
        records[name] = rng.integers(0, 256, (4, 3073), np.uint8)
        records[name][:, 0] %= 10
        (tmp_path / "cifar10" / name).write_bytes(records[name].tobytes())
    hashes = {name: hashlib.sha256(contents.tobytes()).hexdigest() for name, contents in records.items()}
    monkeypatch.setattr(data, "CIFAR10_FILES", hashes)
    return tmp_path, records


def pack(folder, monkeypatch):
    """Put the files into an archive like the standard one, whose hash takes the place of the real one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        readme = tarfile.TarInfo("cifar-10-batches-bin/readme.html")
        archive.addfile(readme, io.BytesIO())
        for path in sorted((folder / "cifar10").glob("*.bin"), reverse=True):
            archive.add(path, f"cifar-10-batches-bin/{path.name}")
            path.unlink()
    (folder / "cifar10" / data.CIFAR10_ARCHIVE).write_bytes(buffer.getvalue())
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(buffer.getvalue()).hexdigest())


def check(problem, records):
    batches = np.concatenate([records[f"data_batch_{i}.bin"] for i in range(1, 6)])
    assert np.array_equal(problem.train["label"], batches[:, 0]) and problem.train["label"].dtype == np.int32
    # Red first, row by row.
    assert np.array_equal(problem.train["image"][7, 0, 1], batches[7, 33:65])
    assert np.array_equal(problem.test["image"].reshape(4, -1), records["test_batch.bin"][:, 1:])
    assert problem.test["image"].dtype == np.uint8


@pytest.mark.parametrize("form", ["files", "gzipped", "archive"])
@pytest.mark.parametrize("named", ["argument", "environment"])
def test_from_a_folder(tiny, monkeypatch, form, named):
    folder, records = tiny
    if form == "gzipped":
        for path in (folder / "cifar10").iterdir():
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    if form == "archive":
        pack(folder, monkeypatch)
    if named == "environment":
        monkeypatch.setenv("ASYNCSIM_DATA", str(folder))
    check(cifar10(batch_size=4, data_dir=folder if named == "argument" else None), records)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def another_pixel(path):
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


def not_gzip(path):
    path.rename(f"{path}.gz")


THREE_WAYS = r"data_dir.*ASYNCSIM_DATA.*network"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"data_batch_3.bin: damaged, or not the standard file \(SHA-256 differs\)"),
        (another_pixel, r"data_batch_3.bin: damaged, or not the standard file \(SHA-256 differs\)"),
        (not_gzip, "data_batch_3.bin.gz: cannot be read"),
        (Path.unlink, "data_batch_3.bin: no such file, gzipped or not"),
    ],
)
def test_damaged_or_missing_files_say_what_to_do(tiny, damage, message):
    damage(tiny[0] / "cifar10" / "data_batch_3.bin")
    with pytest.raises(InputError, match=f"{message}.*{THREE_WAYS}"):
        cifar10(data_dir=tiny[0])


def test_another_archive_is_refused(tiny, monkeypatch):
    pack(tiny[0], monkeypatch)
    truncate(tiny[0] / "cifar10" / data.CIFAR10_ARCHIVE)
    with pytest.raises(InputError, match=rf"cifar-10-binary.tar.gz: damaged, or not .*SHA-256 differs.*{THREE_WAYS}"):
        cifar10(data_dir=tiny[0])


@pytest.fixture
def cache(monkeypatch, tmp_path):
    import pooch

    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "asyncsim" / "cifar10"


@pytest.fixture
def mirror(tiny, monkeypatch):
    """The archive from a server on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    pack(tiny[0], monkeypatch)
    handler = functools.partial(Quiet, directory=tiny[0] / "cifar10")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(data, "CIFAR10_MIRRORS", (f"http://127.0.0.1:{server.server_port}/",))
        yield
        server.shutdown()


def test_downloaded_once_and_a_damaged_cache_mends_itself(tiny, mirror, cache, monkeypatch):
    for _ in range(2):
        check(cifar10(batch_size=4), tiny[1])
        truncate(cache / data.CIFAR10_ARCHIVE)
    check(cifar10(batch_size=4), tiny[1])
    monkeypatch.setattr(data, "CIFAR10_MIRRORS", ("http://127.0.0.1:9/",))  # nothing listens on this port
    check(cifar10(batch_size=4), tiny[1])


def test_a_wrong_download_is_never_kept(tiny, mirror, cache):
    truncate(tiny[0] / "cifar10" / data.CIFAR10_ARCHIVE)
    with pytest.raises(InputError, match="no download"):
        cifar10()
    assert list(cache.iterdir()) == []


def test_no_data_and_no_network_names_three_ways(cache, monkeypatch):
    monkeypatch.setattr(data, "CIFAR10_MIRRORS", ("http://127.0.0.1:9/",))
    with pytest.raises(InputError, match=rf"not in the cache, and no download.*{THREE_WAYS}"):
        cifar10()


# Options


def test_the_network_option_of_a_study(tiny, capsys):
    config = StudyConfig(problem="cifar10", network="alexnet", data_dir=tiny[0], batch_size=4)
    assert config.make_problem().config["network"] == "alexnet"
    assert StudyConfig(problem="cifar10", data_dir=tiny[0], batch_size=4).make_problem().config["network"] == "small"
    assert capsys.readouterr().err == ""
    StudyConfig(network="mlp").make_problem()
    assert capsys.readouterr().err == "note: --network changes nothing for digits\n"


@pytest.mark.parametrize(
    ("problem", "network", "message"),
    [
        ("cifar10", "resnet", "network = 'resnet': unknown; did you mean 'resnet20'.*small, resnet20, alexnet"),
        ("mnist", "small", "network = 'small': unknown; .*choose from cnn, mlp"),
    ],
)
def test_an_unknown_network_is_refused_before_any_data_are_read(problem, network, message):
    with pytest.raises(InputError, match=message):
        StudyConfig(problem=problem, network=network, data_dir="no/such/folder").make_problem()


def test_other_bad_input(tiny):
    with pytest.raises(InputError, match="batch_size = 21: train has only 20"):
        cifar10(21, data_dir=tiny[0])
    with pytest.raises(InputError, match="no/such/folder"):
        cifar10(data_dir="no/such/folder")
