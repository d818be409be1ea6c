"""The transfer of messages: latency and bandwidth, up and down, by worker and between sites."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from asyncsim.base.calls import Call, bind, form_of, read
from asyncsim.base.declared import each
from asyncsim.base.errors import InputError, require_count, require_list, shown
from asyncsim.base.units import BYTES, RATES, positive
from asyncsim.clusters.laws import Constant, Law, as_law, parse

#: A user's bandwidth or size: a number, a text, or a pair of them.
SizeLike: TypeAlias = float | str | tuple[float | str, float | str] | list[float | str]
#: A checked matrix between sites: from the site of a row to the site of a column.
Matrix: TypeAlias = tuple[tuple[Any, ...], ...]
#: Largest sum of runs of equal values in a text; Python cannot parse a sum of thousands.
_MOST_SUMMANDS = 100
_MATRIX_EXAMPLE = "[[0, 40 ms], [40 ms, 0]]"
_RATE_EXAMPLE = "100 Mbit/s, [1 MB/s, 2 MB/s] or per_worker([1 MB/s, 2 MB/s])"


class SlowLinkWarning(UserWarning):
    """Warns that one message takes longer than a hundred computations: the bandwidth may be in
    another unit.
    """


@dataclass(frozen=True)
class PerWorker:
    """A latency or a bandwidth for each worker; made by `per_worker`."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"per_worker({as_text(self.values)})"

    def first(self, workers: int) -> Any:
        """Return the values of the first workers; a single value if all are equal."""
        values = self.values[:workers]
        return values[0] if len(set(values)) == 1 else PerWorker(values)


def per_worker(values: Sequence[Any]) -> PerWorker:
    """Return a latency or a bandwidth with a separate value for each worker.

    ``values``: one per worker, each in a form that ``latency`` or ``bandwidth`` of
    `asyncsim.Cluster` accepts.
    """
    return PerWorker(tuple(require_list("per_worker: values", values)))


class Way(NamedTuple):
    """One direction of the network, per worker."""

    latency: tuple[Law, ...]
    transfer: tuple[float, ...]  #: seconds that the bandwidth adds to a message with parameters

    @property
    def alike(self) -> bool:
        """Whether all workers have the same latency and bandwidth."""
        return len(set(self.transfer)) == 1 and all(law == self.latency[0] for law in self.latency)

    @property
    def means(self) -> tuple[float, ...]:
        """Mean seconds of a message without parameters."""
        return tuple(law.mean for law in self.latency)


def as_latency(argument: str, value: Any, workers: int = 0, sites: int = 0) -> Any:
    """Check a latency: a law, a pair of laws (up, down), or one of these for each worker.

    Between ``sites`` it may be a matrix of laws, see `as_matrix`.
    """
    value = _from_text(argument, value, "a law", "gamma(mean=1, cv=0.2) or 40 ms", parse)
    return _checked(argument, value, workers, sites, as_law, "law")


def as_bandwidth(argument: str, value: Any, workers: int = 0, sites: int = 0) -> Any:
    """Check a bandwidth (bytes/s): a number, a pair (up, down), or one of these for each worker.

    Between ``sites`` it may be a matrix of numbers, see `as_matrix`.
    """
    value = _from_text(argument, value, "a bandwidth", _RATE_EXAMPLE)
    rate = functools.partial(positive, units=RATES)
    return _checked(argument, value, workers, sites, rate, "number")


def as_message_bytes(argument: str, value: Any) -> float | tuple[float, float]:
    """Check a message size (bytes): a number, or a pair (up, down)."""
    value = _from_text(argument, value, "a size", "25 MB or [25 MB, 5 MB]")
    return _pair(argument, value, functools.partial(positive, units=BYTES), "number")


def as_sites(value: Any, workers: int) -> tuple[int, ...]:
    """Check the numbers of workers at each site; 0 at a site that only has the server."""
    sites = each(functools.partial(require_count, minimum=0))("sites", value)
    if sum(sites) != workers:
        raise InputError(
            f"sites = {', '.join(map(str, sites))}: have {sum(sites)} workers, and workers = "
            f"{workers}; let both agree"
        )
    return sites


def is_matrix(value: Any) -> bool:
    """Return whether a value between sites is nested lists: one for each pair of sites."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1
    return isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value)


def as_matrix(argument: str, value: Any, sites: int, check: Callable[[str, Any], Any]) -> Matrix:
    """Check the values of all pairs of sites: from the site of a row to the site of a column.

    Raises InputError unless the matrix is square, has a row for each site and zeros on its
    diagonal; ``check`` reads the other entries.
    """
    rows = value.tolist() if isinstance(value, np.ndarray) else value
    lengths = [len(row) if isinstance(row, list | tuple) else 1 for row in rows]
    if set(lengths) != {len(rows)}:
        raise InputError(
            f"{argument} = {len(rows)} rows of {', '.join(map(str, lengths))} entries: must be "
            f"square; give each site a row and a column, such as {_MATRIX_EXAMPLE}"
        )
    if len(rows) != sites:
        raise InputError(
            f"{argument} = a matrix of {len(rows)} sites: there are {sites} sites; give as many "
            "rows and columns"
        )
    for i in range(sites):
        entry = rows[i][i]
        if entry != Constant(0.0) and str(entry).split()[:1] not in (["0"], ["0.0"]):
            raise InputError(
                f"{argument}[{i}][{i}] = {entry}: must be 0, as {argument.removeprefix('far_')} "
                "holds inside a site; write 0 on the diagonal"
            )
    return tuple(
        tuple(0.0 if i == j else check(f"{argument}[{i}][{j}]", row[j]) for j in range(sites))
        for i, row in enumerate(rows)
    )


def takes_no_time(laws: Sequence[Law]) -> bool:
    """Return whether all laws are zero."""
    return all(law == Constant(0.0) for law in laws)


def directed(value: Any, direction: int, workers: int) -> list[Any]:
    """Return each worker's checked latency or bandwidth in one direction, 0 up or 1 down."""
    values = value.values if isinstance(value, PerWorker) else (value,) * workers
    return [pair[direction] if isinstance(pair, tuple) else pair for pair in values]


def far_values(value: Any, direction: int, site_of: Sequence[int]) -> list[Any]:
    """Return each worker's checked value between sites in one direction, 0 up or 1 down."""
    if not is_matrix(value):
        return directed(value, direction, len(site_of))
    return [value[0][i] if direction else value[i][0] for i in site_of]


def as_text(values: Any) -> str:
    """Write a law or a number, or a list of them with repetitions counted."""
    if not isinstance(values, tuple):
        return str(values)
    texts = [
        f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
        for value in values
    ]
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    if len(runs) > _MOST_SUMMANDS:
        return f"[{', '.join(texts)}]"
    return " + ".join(f"[{text}]*{count}" for text, count in runs)


def _from_text(
    argument: str,
    value: Any,
    noun: str,
    example: str,
    otherwise: Callable[[str], Any] | None = None,
) -> Any:
    """Read a text, ``per_worker([...])`` or by ``otherwise``; return other values unchanged.

    Without ``otherwise`` a text in square brackets is a list, and others stay.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        return value.tolist()
    if not isinstance(value, str):
        return value
    try:
        if value.lstrip().startswith("[["):
            return read(value, "a matrix", _MATRIX_EXAMPLE, units=True)
        if not value.strip().startswith(per_worker.__name__):
            if otherwise is not None:
                return otherwise(value)
            return read(value, "a list", example, units=True) if "[" in value else value
        call = read(value, noun, example, units=True)
        if not isinstance(call, Call) or not call.brackets:
            raise InputError(f"{value}: needs its values; write {form_of(per_worker)}")
        return per_worker(bind(call, per_worker, call.name)["values"])
    except InputError as error:
        raise InputError(f"{argument} = {shown(value)}: {error}") from None


def _checked(
    argument: str, value: Any, workers: int, sites: int, check: Callable[[str, Any], Any], noun: str
) -> Any:
    """Check a value for all workers, or one for each; between ``sites`` it may be a matrix.

    With ``workers`` 0 one for each worker is an error.
    """
    if sites and is_matrix(value):
        return as_matrix(argument, value, sites, check)
    if not isinstance(value, PerWorker):
        return _pair(argument, value, check, noun)
    if not workers:
        raise InputError(
            f"{argument} = {value}: is between sites, and the same for all workers; give one, or a "
            "pair"
        )
    if len(value.values) != workers:
        raise InputError(
            f"{argument} = per_worker of {len(value.values)}: must hold one per worker, and there "
            f"are {workers}"
        )
    pairs = (_pair(f"{argument}[{i}]", item, check, noun) for i, item in enumerate(value.values))
    return PerWorker(tuple(pairs)).first(workers)


def _pair(argument: str, value: Any, check: Callable[[str, Any], Any], noun: str) -> Any:
    """Check a value or a pair, up and down; a pair of equal values becomes a single one."""
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return check(argument, value)
    if len(value) != 2:
        raise InputError(
            f"{argument} = a list of {len(value)} {noun}s: must be one {noun}, or a pair: the way "
            "up and the way down; per_worker([...]) gives one for each worker"
        )
    up, down = (check(f"{argument}[{i}]", item) for i, item in enumerate(value))
    return up if up == down else (up, down)
