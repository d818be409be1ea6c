"""Data files: find, download, check and read them; and check the examples in them."""

import contextlib
import gzip
import hashlib
import io
import logging
import math
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pooch

from asyncsim.base.errors import InputError, require_path

#: SHA-256 of the files' contents, uncompressed: archives of the same contents differ.
MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
#: SHA-256 of the archive, from TensorFlow Datasets and MLDatasets.jl. Its page has only an MD5.
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
#: SHA-256 of the files in the archive, from TorchVision for Ruby.
CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
DATA_VARIABLE = "ASYNCSIM_DATA"

_UNSIGNED_BYTE = 8
_LAST_CLASS = 9
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label and the pixels, one channel after the other
_TIMEOUT = 30  # seconds without an answer


def load_mnist(
    data_dir: str | os.PathLike | None = None, files: Mapping[str, str] = MNIST_FILES
) -> dict[str, np.ndarray]:
    """Load MNIST's files as uint8 arrays, by file name.

    ``data_dir``: a folder that contains ``mnist/`` with the files, gzipped or not. Without it the
    folder named by the environment variable ``ASYNCSIM_DATA``; without that the user's cache,
    downloaded on first use. ``files``: SHA-256 of each file's uncompressed contents, by name.
    """
    folder = _given_folder(data_dir)
    if folder is not None:
        return {name: _parse_idx(*_read_given(folder, name, sha)) for name, sha in files.items()}
    return {name: _parse_idx(*_read_cached("mnist", name, sha)) for name, sha in files.items()}


def load_cifar10(data_dir: str | os.PathLike | None = None) -> dict[str, np.ndarray]:
    """Load CIFAR-10's binary files as uint8 arrays of shape ``[10000, 3073]``, by file name.

    A record is the label, from 0 to 9, then 32x32 pixels of red, of green and of blue.

    ``data_dir``: a folder that contains ``cifar10/`` with the standard archive, or with its six
    ``.bin`` files, gzipped or not. Without it the folder named by ``ASYNCSIM_DATA``; without that
    the user's cache, downloaded on first use. Archive and files must have the SHA-256 of the
    originals.
    """
    data_folder = _given_folder(data_dir)
    if data_folder is None:
        return _read_cifar10_archive(_cached_cifar10_archive())
    folder = data_folder / "cifar10"
    archive = folder / CIFAR10_ARCHIVE
    return _read_cifar10_archive(archive) if archive.is_file() else _read_cifar10_files(folder)


def as_images(
    argument: str, examples: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Convert examples to a dict of arrays; check the images' shape and the labels, 0 to 9."""
    missing = {"image", "label"} - set(examples if isinstance(examples, Mapping) else ())
    if missing:
        raise InputError(
            f"{argument}: has no {' and no '.join(sorted(missing))}; give a dict of "
            '"image" and "label"'
        )
    arrays = {name: np.asarray(array) for name, array in examples.items()}
    image, label = arrays["image"], arrays["label"]
    if image.shape[1:] != shape:
        raise InputError(
            f"{argument}: images of shape {list(image.shape[1:])}, must be {list(shape)}; reshape "
            "them"
        )
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise InputError(
            f"{argument}: labels of {label.dtype}{list(label.shape)}, must be whole numbers, one "
            "for each image"
        )
    if label.size and (label.min() < 0 or label.max() > _LAST_CLASS):
        raise InputError(
            f"{argument}: labels from {label.min()} to {label.max()}, and there are ten classes; "
            "number them from 0 to "
            f"{_LAST_CLASS}"
        )
    return arrays


def _given_folder(data_dir: str | os.PathLike | None) -> Path | None:
    """Return the folder that the argument or the environment names; None for neither."""
    if data_dir is not None:
        return require_path("data_dir", data_dir)
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else None


def _read_cifar10_files(folder: Path) -> dict[str, np.ndarray]:
    records = {}
    for name, sha256 in CIFAR10_FILES.items():
        paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if not paths:
            raise InputError(f"{folder / name}: no such file, gzipped or not; {_cifar10_ways()}")
        records[name] = _cifar10_records(_read_checked(paths[0], sha256, _cifar10_ways()))
    return records


def _cached_cifar10_archive() -> Path:
    """Return the path of the archive in the user's cache; download it if missing."""
    folder = Path(pooch.os_cache("asyncsim")) / "cifar10"
    # pooch downloads an archive with another hash, for example a damaged one, again.
    digest = f"sha256:{CIFAR10_SHA256}"
    return _download(
        CIFAR10_MIRRORS, CIFAR10_ARCHIVE, digest, folder, lambda archive: archive, _cifar10_ways()
    )


def _read_cifar10_archive(path: Path) -> dict[str, np.ndarray]:
    """Read the records of the files in the standard archive; raise InputError for another one."""
    contents = path.read_bytes()
    if hashlib.sha256(contents).hexdigest() != CIFAR10_SHA256:
        raise InputError(
            f"{path}: damaged, or not the standard archive (SHA-256 differs); {_cifar10_ways()}"
        )
    records = {}
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        for member in archive:
            name = Path(member.name).name
            file = archive.extractfile(member) if name in CIFAR10_FILES else None
            if file is not None:
                records[name] = _cifar10_records(file.read())
    return {name: records[name] for name in CIFAR10_FILES}  # the archive has another order


def _cifar10_records(contents: bytes) -> np.ndarray:
    return np.frombuffer(contents, np.uint8).reshape(-1, _CIFAR10_RECORD)


def _read_given(folder: Path, name: str, sha256: str) -> tuple[Path, bytes]:
    """Read ``folder/mnist/name``, or the same with ``.gz``; return its path and contents."""
    for path in (folder / "mnist" / name, folder / "mnist" / f"{name}.gz"):
        if path.is_file():
            return path, _read_checked(path, sha256)
    raise InputError(f"{folder / 'mnist' / name}: no such file, gzipped or not; {_ways(name)}")


def _read_cached(data_set: str, name: str, sha256: str) -> tuple[Path, bytes]:
    """Read a file in the user's cache, downloading it if missing; return its path and contents."""
    path = Path(pooch.os_cache("asyncsim")) / data_set / name
    if path.is_file():
        with contextlib.suppress(InputError):  # a damaged cache is downloaded again
            return path, _read_checked(path, sha256)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            # pooch would hash the archive, which differs between mirrors.
            contents = _download(
                MNIST_MIRRORS,
                f"{name}.gz",
                None,
                Path(scratch),
                lambda path: _read_checked(path, sha256),
                _ways(name),
            )
            checked = Path(scratch, name)
            checked.write_bytes(contents)
            os.replace(checked, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); {_ways(name)}") from error
    return path, contents


def _download(
    mirrors: Sequence[str],
    file: str,
    digest: str | None,
    folder: Path,
    use: Callable[[Path], Any],
    remedy: str,
) -> Any:
    """Download a file from the first working mirror and return the result of ``use`` on it."""
    failures = []
    for mirror in mirrors:
        fetch = pooch.HTTPDownloader(progressbar=True, timeout=_TIMEOUT)
        try:
            with _quiet(pooch.get_logger()):
                return use(
                    Path(pooch.retrieve(f"{mirror}{file}", digest, file, folder, downloader=fetch))
                )
        except (OSError, ValueError) as error:
            failures.append(f"{mirror}: {type(error).__name__}")
            if digest is None:  # or pooch would reuse it for the next mirror
                Path(folder, file).unlink(missing_ok=True)
    name = file.removesuffix(".gz") if digest is None else file
    raise InputError(
        f"{name}: not in the cache, and no download ({' and '.join(failures)}); {remedy}"
    )


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Hide a logger's advice within a block."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_checked(path: Path, sha256: str, remedy: str | None = None) -> bytes:
    """Read a file's uncompressed contents; raise InputError unless they have this SHA-256."""
    remedy = remedy or _ways(path.name)
    try:
        contents = path.read_bytes()
        contents = gzip.decompress(contents) if path.suffix == ".gz" else contents
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); {remedy}") from error
    if hashlib.sha256(contents).hexdigest() != sha256:
        raise InputError(f"{path}: damaged, or not the standard file (SHA-256 differs); {remedy}")
    return contents


def _parse_idx(path: Path, contents: bytes) -> np.ndarray:
    """Parse an IDX file: two zero bytes, the type, the rank, the sizes, the values."""
    rank = contents[3] if len(contents) > 3 else 0
    header = 4 + 4 * rank
    if contents[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or len(contents) < header:
        raise InputError(f"{path}: not an IDX file of bytes; {_ways(path.name)}")
    shape = np.frombuffer(contents[4:header], ">u4").tolist()
    if len(contents) != header + math.prod(shape):
        raise InputError(
            f"{path}: header says {shape}, {len(contents) - header} values; {_ways(path.name)}"
        )
    return np.frombuffer(contents, np.uint8, offset=header).reshape(shape)


def _ways(name: str) -> str:
    return _supply(f"the standard file mnist/{name.removesuffix('.gz')} (gzipped or not)")


def _cifar10_ways() -> str:
    return _supply(
        f"the standard archive cifar10/{CIFAR10_ARCHIVE} (or the six .bin files that are in it)"
    )


def _supply(files: str) -> str:
    return (
        f"supply {files} in the folder that the data_dir option names, or in the folder that "
        f"{DATA_VARIABLE} names, or "
        "connect to a network once for the download"
    )
