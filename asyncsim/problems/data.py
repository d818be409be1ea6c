"""Data sets as files: where they are looked for, fetched from, checked and read."""

import contextlib
import gzip
import hashlib
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from asyncsim.errors import InputError

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
DATA_VARIABLE = "ASYNCSIM_DATA"

_UNSIGNED_BYTE = 8
_TIMEOUT = 30  # seconds without an answer


def load_mnist(
    data_dir: str | os.PathLike | None = None, files: Mapping[str, str] = MNIST_FILES
) -> dict[str, np.ndarray]:
    """Return the arrays of MNIST's files, uint8, by file name.

    Parameters
    ----------
    data_dir : path, optional
        A folder that holds ``mnist/`` with the files, gzipped or not. Without it the folder named by the
        environment variable ``ASYNCSIM_DATA``; without that the user's cache, downloaded on first use.
    files : mapping
        SHA-256 of each file's uncompressed contents, by name.

    Raises
    ------
    InputError
        A file that is missing and cannot be downloaded, or that holds something else.
    """
    given = data_dir or os.environ.get(DATA_VARIABLE)
    if given:
        return {name: _parse_idx(*_read_given(Path(given), name, sha)) for name, sha in files.items()}
    return {name: _parse_idx(*_read_cached("mnist", name, sha)) for name, sha in files.items()}


def _read_given(folder: Path, name: str, sha256: str) -> tuple[Path, bytes]:
    """Return the path and the contents of ``folder/mnist/name``, or of the same with ``.gz``."""
    for path in (folder / "mnist" / name, folder / "mnist" / f"{name}.gz"):
        if path.is_file():
            return path, _read_checked(path, sha256)
    raise InputError(f"{folder / 'mnist' / name}: no such file, gzipped or not; {_ways(name)}")


def _read_cached(data_set: str, name: str, sha256: str) -> tuple[Path, bytes]:
    """Return the path and the contents of a file in the user's cache, downloading it if need be."""
    import pooch

    path = Path(pooch.os_cache("asyncsim")) / data_set / name
    if path.is_file():
        with contextlib.suppress(InputError):  # a damaged cache mends itself
            return path, _read_checked(path, sha256)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            contents = _download(name, sha256, scratch)
            checked = Path(scratch, name)
            checked.write_bytes(contents)
            os.replace(checked, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); {_ways(name)}") from error
    return path, contents


def _download(name: str, sha256: str, scratch: str) -> bytes:
    """Return the checked contents of a file from the first mirror that gives them."""
    import pooch

    failures = []
    for mirror in MNIST_MIRRORS:
        fetch = pooch.HTTPDownloader(progressbar=True, timeout=_TIMEOUT)
        try:
            # pooch hashes the archive, which differs between mirrors; the contents are checked below.
            with _quiet(pooch.get_logger()):
                archive = pooch.retrieve(f"{mirror}{name}.gz", None, f"{name}.gz", scratch, downloader=fetch)
            return _read_checked(Path(archive), sha256)
        except (OSError, ValueError) as error:
            failures.append(f"{mirror}: {type(error).__name__}")
            Path(scratch, f"{name}.gz").unlink(missing_ok=True)
    raise InputError(f"{name}: not in the cache, and no download ({'; '.join(failures)}); {_ways(name)}")


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Hide a logger's advice for the length of a block."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_checked(path: Path, sha256: str) -> bytes:
    """Return a file's uncompressed contents; raise InputError unless they have this SHA-256."""
    try:
        contents = path.read_bytes()
        if path.suffix == ".gz":
            contents = gzip.decompress(contents)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); {_ways(path.name)}") from error
    if hashlib.sha256(contents).hexdigest() != sha256:
        raise InputError(f"{path}: damaged, or not the standard file (SHA-256 differs); {_ways(path.name)}")
    return contents


def _parse_idx(path: Path, contents: bytes) -> np.ndarray:
    """Return the array of an IDX file: two zero bytes, the type, the rank, the sizes, the values."""
    rank = contents[3] if len(contents) > 3 else 0
    header = 4 + 4 * rank
    if contents[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or len(contents) < header:
        raise InputError(f"{path}: not an IDX file of bytes; {_ways(path.name)}")
    shape = np.frombuffer(contents[4:header], ">u4").tolist()
    if len(contents) != header + math.prod(shape):
        raise InputError(f"{path}: header says {shape}, {len(contents) - header} values; {_ways(path.name)}")
    return np.frombuffer(contents, np.uint8, offset=header).reshape(shape)


def _ways(name: str) -> str:
    return (
        f"supply the standard file mnist/{name.removesuffix('.gz')} (gzipped or not) in the folder that the "
        f"data_dir option names, or in the one that {DATA_VARIABLE} names, or connect to a network once for "
        "the download"
    )
