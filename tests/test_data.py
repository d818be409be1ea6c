"""MNIST and CIFAR-10 as files: where they are looked for, that they are whole, and what to do where
they are not.
"""

import functools
import gzip
import hashlib
import http.server
import io
import os
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pooch
import pytest

from asyncsim import InputError
from asyncsim.problems import cifar10, data, mnist

REAL_DATA = Path(
    os.environ.get("ASYNCSIM_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
)
NOBODY = "http://127.0.0.1:9/"  # nothing listens on this port
THREE_WAYS = r"data_dir.*ASYNCSIM_DATA.*network"
MAKE = {"mnist": mnist, "cifar10": cifar10}
#: The file that is damaged, and the files of each that lie in the cache.
DAMAGED = {"mnist": "train-images-idx3-ubyte", "cifar10": data.CIFAR10_ARCHIVE}
CACHED = {
    "mnist": [f"{name}.gz" for name in data.MNIST_FILES],
    "cifar10": [data.CIFAR10_ARCHIVE],
}


@pytest.fixture(params=MAKE)
def task(request):
    return request.param


def idx(array):
    """The bytes of an IDX file of unsigned bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def files(task, monkeypatch, tmp_path):
    """A folder with the files of invented examples, their hashes in place of the real ones, and
    their arrays.
    """
    rng, arrays = np.random.default_rng(0), {}
    for part, examples in (("train", 12), ("t10k", 6)) if task == "mnist" else ():
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (examples, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, examples, np.uint8)
    for name in data.CIFAR10_FILES if task == "cifar10" else ():
        arrays[name] = rng.integers(0, 256, (4, 3073), np.uint8)
        arrays[name][:, 0] %= 10
    contents = {
        name: idx(array) if task == "mnist" else array.tobytes() for name, array in arrays.items()
    }
    (tmp_path / task).mkdir()
    for name, content in contents.items():
        (tmp_path / task / name).write_bytes(content)
        if task == "mnist":
            monkeypatch.setitem(data.MNIST_FILES, name, hashlib.sha256(content).hexdigest())
    if task == "cifar10":
        packed(tmp_path / task, monkeypatch)
    return tmp_path, arrays


def zipped(folder):
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def packed(folder, monkeypatch):
    """Put the files into an archive like the standard one, whose hash takes the place of the real
    one.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("cifar-10-batches-bin/readme.html"), io.BytesIO())
        for path in sorted(folder.glob("*.bin"), reverse=True):
            archive.add(path, f"cifar-10-batches-bin/{path.name}")
            path.unlink()
    (folder / data.CIFAR10_ARCHIVE).write_bytes(buffer.getvalue())
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(buffer.getvalue()).hexdigest())


def check(problem, arrays):
    if problem.name == "mnist":
        pixels = arrays["train-images-idx3-ubyte"] / 255
        # float32 standardised values reach 2.8: an ulp there is 2.4e-7.
        np.testing.assert_allclose(problem.train["image"], (pixels - 0.1307) / 0.3081, atol=5e-7)
        assert np.array_equal(problem.test["label"], arrays["t10k-labels-idx1-ubyte"])
        assert (
            problem.train["image"].dtype == np.float32 and problem.test["label"].dtype == np.int32
        )
        return
    batches = np.concatenate([arrays[f"data_batch_{i}.bin"] for i in range(1, 6)])
    assert (
        np.array_equal(problem.train["label"], batches[:, 0])
        and problem.train["label"].dtype == np.int32
    )
    # Red first, row by row.
    assert np.array_equal(problem.train["image"][7, 0, 1], batches[7, 33:65])
    assert np.array_equal(problem.test["image"].reshape(4, -1), arrays["test_batch.bin"][:, 1:])
    assert problem.test["image"].dtype == np.uint8


@pytest.mark.parametrize("named", ["argument", "environment"])
def test_from_a_folder(task, files, monkeypatch, named):
    if named == "environment":
        if task == "mnist":
            zipped(files[0] / task)
        monkeypatch.setenv("ASYNCSIM_DATA", str(files[0]))
    check(MAKE[task](batch_size=4, data_dir=files[0] if named == "argument" else None), files[1])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def another_pixel(path):
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


def not_gzip(path):
    path.rename(f"{path}.gz")


def damaged_gzip(path):
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, another_pixel, not_gzip, damaged_gzip, Path.unlink])
def test_damaged_or_missing_files_say_what_to_do(task, files, damage):
    if task == "cifar10" and damage in (not_gzip, damaged_gzip):
        pytest.skip("an archive has no other form")
    damage(files[0] / task / DAMAGED[task])
    with pytest.raises(InputError, match=f"{DAMAGED[task]}.*{THREE_WAYS}"):
        MAKE[task](data_dir=files[0])
    with pytest.raises(InputError, match="no/such/folder"):
        MAKE[task](data_dir="no/such/folder")


@pytest.mark.parametrize(
    "contents", [b"", b"\0\0\x09\1\0\0\0\1x", b"\0\0\x08\3\0\0", b"\0\0\x08\1\0\0\0\7abc"], ids=repr
)
def test_files_that_are_not_idx(tmp_path, contents):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file").write_bytes(contents)
    with pytest.raises(InputError, match=r"file: (not an IDX file|header says)"):
        data.load_mnist(tmp_path, {"file": hashlib.sha256(contents).hexdigest()})


@pytest.fixture
def cache(task, monkeypatch, tmp_path):
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "asyncsim" / task


@pytest.fixture
def address(task, monkeypatch):
    """Sets the address of the task's files."""
    return functools.partial(monkeypatch.setattr, data, f"{task.upper()}_ADDRESS")


@pytest.fixture
def server(task, files, address):
    """The files from a server on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    if task == "mnist":
        zipped(files[0] / task)
    handler = functools.partial(Quiet, directory=files[0] / task)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        address(f"http://127.0.0.1:{serving.server_port}/")
        yield
        serving.shutdown()


def test_downloaded_once_and_a_damaged_cache_mends_itself(task, files, server, cache, address):
    check(MAKE[task](batch_size=4), files[1])
    assert sorted(path.name for path in cache.iterdir()) == sorted(CACHED[task])
    truncate(cache / CACHED[task][0])
    if task == "mnist":
        with pytest.raises(InputError, match="removed from the cache: try again"):
            MAKE[task](batch_size=4)
    check(MAKE[task](batch_size=4), files[1])
    address(NOBODY)
    check(MAKE[task](batch_size=4), files[1])


def test_a_wrong_download_is_never_kept(task, files, server, cache):
    for path in (files[0] / task).iterdir():
        truncate(path)
    with pytest.raises(InputError, match=r"no download|removed from the cache"):
        MAKE[task](batch_size=4)
    assert list(cache.iterdir()) == []


def test_no_data_and_no_network_names_three_ways(task, cache, address):
    address(NOBODY)
    with pytest.raises(InputError, match=rf"no download.*{THREE_WAYS}"):
        MAKE[task]()


@pytest.mark.skipif(
    not (REAL_DATA / "mnist").is_dir(),
    reason="needs MNIST: set ASYNCSIM_DATA to its folder's parent",
)
def test_real_mnist():
    problem = mnist(data_dir=REAL_DATA)
    assert problem.train["image"].shape == (60_000, 28, 28) and problem.test["label"].shape == (
        10_000,
    )
    # The published mean and standard deviation have four digits.
    assert problem.train["image"].mean() == pytest.approx(0, abs=3e-4)
    assert problem.train["image"].std() == pytest.approx(1, abs=3e-4)
    assert np.bincount(problem.test["label"]).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
