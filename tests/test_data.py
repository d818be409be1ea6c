"""Data: files of MNIST, of CIFAR-10 and of texts, whole or with a remedy; batches and shards of
workers.
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
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsim import InputError
from asyncsim.problems import characters, cifar10, data, digits, mnist
from asyncsim.problems.problem import BatchIndices, dirichlet_shards

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


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def files(task, monkeypatch, tmp_path):
    """A folder with the files of invented examples, their hashes in place of the real ones, and
    their arrays.
    """
    rng, folder, arrays = np.random.default_rng(0), tmp_path / task, {}
    folder.mkdir()
    if task == "mnist":
        for part, examples in (("train", 12), ("t10k", 6)):
            arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (examples, 28, 28), np.uint8)
            arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, examples, np.uint8)
        for name, array in arrays.items():
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / name).write_bytes(header + array.tobytes())
            monkeypatch.setitem(data.MNIST_FILES, name, sha256(folder / name))
    else:
        archive = folder / data.CIFAR10_ARCHIVE
        with tarfile.open(archive, mode="w:gz") as packed:
            packed.addfile(tarfile.TarInfo("cifar-10-batches-bin/readme.html"), io.BytesIO())
            for name in reversed(data.CIFAR10_FILES):
                arrays[name] = rng.integers(0, 256, (4, 3073), np.uint8)
                arrays[name][:, 0] %= 10
                member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                member.size = arrays[name].nbytes
                packed.addfile(member, io.BytesIO(arrays[name].tobytes()))
        monkeypatch.setattr(data, "CIFAR10_SHA256", sha256(archive))
    return tmp_path, arrays


def zipped(folder):
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def check(problem, arrays):
    train, test = problem.train, problem.test
    assert train["label"].dtype == test["label"].dtype == np.int32
    if problem.name == "mnist":
        pixels = arrays["train-images-idx3-ubyte"] / 255
        # float32 standardised values reach 2.8: an ulp there is 2.4e-7.
        np.testing.assert_allclose(train["image"], (pixels - 0.1307) / 0.3081, atol=5e-7)
        assert np.array_equal(test["label"], arrays["t10k-labels-idx1-ubyte"])
        assert train["image"].dtype == np.float32
        return
    batches = np.concatenate([arrays[f"data_batch_{i}.bin"] for i in range(1, 6)])
    assert np.array_equal(train["label"], batches[:, 0])
    # Red first, row by row.
    assert np.array_equal(train["image"][7, 0, 1], batches[7, 33:65])
    assert np.array_equal(test["image"].reshape(4, -1), arrays["test_batch.bin"][:, 1:])
    assert test["image"].dtype == np.uint8


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
    assert problem.train["image"].shape == (60_000, 28, 28)
    # The published mean and standard deviation have four digits.
    assert problem.train["image"].mean() == pytest.approx(0, abs=3e-4)
    assert problem.train["image"].std() == pytest.approx(1, abs=3e-4)
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(problem.test["label"]).tolist() == counts


# Texts


def test_windows_follow_the_text(tmp_path):
    text = "".join(chr(ord("a") + i * i % 23) for i in range(200)) + "\u00e4\u00f6\u00df"
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    problem = characters(batch_size=2, text=path, context=6, stride=4, width=4, heads=1)
    alphabet = problem.config["alphabet"]
    assert alphabet == "".join(sorted(set(text))) and problem.config["characters"] == 203
    # The last tenth, twenty characters, is the test: three windows that share one character each.
    starts = {"train": range(0, 183 - 6, 4), "test": (183, 189, 195)}
    for name, places in starts.items():
        windows = getattr(problem, name)
        decoded = ["".join(alphabet[code] for code in window) for window in windows]
        assert decoded == [text[i : i + 7] for i in places] and windows.dtype == np.int32
    assert characters(text=path, context=16, width=4).config["stride"] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short, 0 characters"),
        (b"a" * 89, "too short, 89 characters; its last tenth must hold more than context = 8"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"a\0" * 100, "holds zero bytes, so it is not text"),
    ],
)
def test_files_that_are_not_a_text_or_too_short(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        characters(4, context=8, width=8, heads=2, text=tmp_path / "text.txt")


# Batches and shards


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
            assert len(set(epoch)) == len(epoch) and set(epoch) <= set(held)


@settings(max_examples=30)
@given(st.data())
def test_rows_do_not_depend_on_how_they_are_asked_for(draws):
    jobs = st.tuples(st.integers(0, 3), st.integers(0, 30))
    worker, job = np.array(draws.draw(st.lists(jobs, min_size=1, max_size=40))).T
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
