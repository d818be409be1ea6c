"""Data files: find, download, check and read them; and check the examples in them."""

import gzip
import hashlib
import io
import math
import os
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pooch

from asyncsim.base.errors import InputError, require_path

#: SHA-256 of MNIST's uncompressed files: archives of the same contents differ.
MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MNIST_ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
#: SHA-256 of the archive, from TensorFlow Datasets and MLDatasets.jl. Its page has only an MD5.
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/"
#: The files in the archive; it has another order.
CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
DATA_VARIABLE = "ASYNCSIM_DATA"

_UNSIGNED_BYTE = 8
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
    arrays = {}
    for name, sha256 in files.items():
        path = _find(f"mnist/{name}.gz", None, MNIST_ADDRESS, data_dir)
        arrays[name] = _parse_idx(path, _contents(path, sha256))
    return arrays


def load_cifar10(data_dir: str | os.PathLike | None = None) -> dict[str, np.ndarray]:
    """Load CIFAR-10's binary files as uint8 arrays of shape ``[10000, 3073]``, by file name.

    A record is the label, from 0 to 9, then 32x32 pixels of red, of green and of blue.

    ``data_dir``: a folder that contains ``cifar10/`` with the standard archive. Without it the
    folder named by ``ASYNCSIM_DATA``; without that the user's cache, downloaded on first use.
    """
    digest = f"sha256:{CIFAR10_SHA256}"
    path = _find(f"cifar10/{CIFAR10_ARCHIVE}", digest, CIFAR10_ADDRESS, data_dir)
    records = {}
    with tarfile.open(fileobj=io.BytesIO(_contents(path, CIFAR10_SHA256))) as archive:
        for member in archive:
            name = Path(member.name).name
            file = archive.extractfile(member) if name in CIFAR10_FILES else None
            if file is not None:
                records[name] = np.frombuffer(file.read(), np.uint8).reshape(-1, _CIFAR10_RECORD)
    return {name: records[name] for name in CIFAR10_FILES}


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
    image = arrays["image"]
    if image.shape[1:] != shape:
        raise InputError(
            f"{argument}: images of shape {list(image.shape[1:])}, must be {list(shape)}; reshape "
            "them"
        )
    require_labels(argument, arrays, classes=10)
    return arrays


def require_labels(argument: str, examples: Any, classes: int) -> None:
    """Raise InputError unless examples have labels, whole numbers from 0 to ``classes - 1``."""
    label = examples.get("label") if isinstance(examples, Mapping) else None
    if not isinstance(label, np.ndarray) or label.ndim != 1 or label.dtype.kind not in "iu":
        raise InputError(f'{argument}: needs a dict with a "label" of each example, whole numbers')
    if label.size and (label.min() < 0 or label.max() >= classes):
        raise InputError(
            f"{argument}: labels from {label.min()} to {label.max()}, and there are {classes} "
            f"classes; number them from 0 to {classes - 1}"
        )


def _find(name: str, digest: str | None, address: str, data_dir: str | os.PathLike | None) -> Path:
    """Return the path of a file in the user's folder; without one in the cache, where pooch
    downloads it.
    """
    if data_dir is not None:
        folder = require_path("data_dir", data_dir)
    elif os.environ.get(DATA_VARIABLE):
        folder = Path(os.environ[DATA_VARIABLE])
    else:
        cache, file = Path(pooch.os_cache("asyncsim"), name).parent, Path(name).name
        fetch = pooch.HTTPDownloader(progressbar=True, timeout=_TIMEOUT)
        pooch.get_logger().setLevel("WARNING")  # its advice is for callers without a hash
        try:
            return Path(pooch.retrieve(f"{address}{file}", digest, file, cache, downloader=fetch))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{name}: not in the cache, and no download ({address}: {type(error).__name__}); "
                f"{_remedy(name)}"
            ) from error
    for path in (folder / name, (folder / name).with_suffix("")):
        if path.is_file():
            return path
    raise InputError(f"{folder / name}: no such file; {_remedy(name)}")


def _contents(path: Path, sha256: str) -> bytes:
    """Read a file's contents, without the compression of a single file; check their SHA-256.

    A damaged file of the cache is removed, so that the next call downloads it again.
    """
    remedy = _remedy(f"{path.parent.name}/{path.name}")
    try:
        contents = path.read_bytes()
        if path.suffix == ".gz" and path.name != CIFAR10_ARCHIVE:
            contents = gzip.decompress(contents)
        if hashlib.sha256(contents).hexdigest() == sha256:
            return contents
        fault = "damaged, or not the standard file (SHA-256 differs)"
    except (OSError, EOFError, zlib.error) as error:
        fault = f"cannot be read ({error})"
    if Path(pooch.os_cache("asyncsim")) in path.parents:
        path.unlink(missing_ok=True)
        fault += ", and removed from the cache: try again"
    raise InputError(f"{path}: {fault}; {remedy}")


def _parse_idx(path: Path, contents: bytes) -> np.ndarray:
    """Parse an IDX file: two zero bytes, the type, the rank, the sizes, the values."""
    rank = contents[3] if len(contents) > 3 else 0
    header, remedy = 4 + 4 * rank, _remedy(f"mnist/{path.name}")
    if contents[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or len(contents) < header:
        raise InputError(f"{path}: not an IDX file of bytes; {remedy}")
    shape = np.frombuffer(contents[4:header], ">u4").tolist()
    if len(contents) != header + math.prod(shape):
        raise InputError(f"{path}: header says {shape}, {len(contents) - header} values; {remedy}")
    return np.frombuffer(contents, np.uint8, offset=header).reshape(shape)


def _remedy(name: str) -> str:
    return (
        f"supply the standard file {name} (MNIST's gzipped or not) in the folder that the data_dir "
        f"option names, or in the folder that {DATA_VARIABLE} names, or connect to a network once "
        "for the download"
    )
