"""The partition of a problem's parameters into shards: groups of whole tensors, by name."""

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError

#: Largest number of tensors that an error message lists; beyond it, the message lists layers.
_LISTED = 12


class Partition(NamedTuple):
    """A partition of the flat vector of parameters; a shard is one run of it, or several.

    Attributes
    ----------
    names : tuple of str
        The groups of tensors, in the order of the shards.
    bounds : tuple of int
        Run ``i`` of the vector is ``bounds[i]:bounds[i + 1]``.
    owners : tuple of int
        The shard of each run; adjacent runs have different shards.
    """

    names: tuple[str, ...]
    bounds: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Shard, first index and end of each run."""
        return zip(self.owners, self.bounds, self.bounds[1:], strict=False)


def names_of_tensors(params: Any) -> list[str]:
    """List the names of a tree's tensors in the order of the flat vector, as in ``"0.weight"``."""
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def partition(
    params: Any, groups: int | Sequence[str], argument: str = "groups", by_layer: bool = False
) -> Partition:
    """Partition a problem's parameters into shards.

    Parameters
    ----------
    params : tree of arrays or of their shapes
    groups : int or sequence of str
        Groups of tensors. A text names one or several parts of the tree, separated by commas or,
        on the command line, by ``+``:
        ``"0"`` is the first layer of `asyncsim.problems.digits`, ``"0.weight,1.weight"`` are two
        tensors. Names as in `asyncsim.Run` mean the same: ``"[0]['weight']"``. A
        number: groups of neighbouring tensors, with the smallest possible largest group.
    argument : str
        The name of ``groups`` in messages.
    by_layer : bool
        Whether a number of groups keeps the tensors of a layer together. Layers are the entries of
        a problem's list; the keys of a table have no order.

    Raises
    ------
    InputError
        For an unknown or a repeated part, a tensor in no group, more groups than tensors or layers,
        or layers without an order.
    """
    names = names_of_tensors(params)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    if isinstance(groups, int):
        if by_layer and not isinstance(params, Sequence):
            raise InputError(
                f"{argument} = {groups}: the order of the problem's layers is unknown; list the "
                f"groups of tensors in order, of {', '.join(_layers(names))}"
                if len(names) > 1
                else f"{argument} = {groups}: the problem has one tensor and no layers; choose "
                "another problem, such as digits"
            )
        parts = _layers(names) if by_layer else names
        noun = "layer" if by_layer else "tensor"
        groups = _even_groups(parts, names, sizes, groups, argument, noun)
    owner = _owners(names, groups, argument)
    # An empty tensor has no parameters, and ends no run.
    owner, sizes = (
        [value for value, size in zip(values, sizes, strict=True) if size]
        for values in (owner, sizes)
    )
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    bounds = np.r_[0, np.cumsum(sizes)][np.r_[first, len(sizes)]]
    owners = np.array(owner)[first]
    return Partition(tuple(groups), tuple(bounds.tolist()), tuple(owners.tolist()))


def _layers(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _owners(names: Sequence[str], groups: Sequence[str], argument: str) -> list[int]:
    """Return the group of each tensor."""
    owner = [-1] * len(names)
    for number, group in enumerate(groups):
        for part in re.split(r"[,+]", group):
            # From the notation of `Run`: "[0]['weight']".
            path = ".".join(re.sub(r"[\[\]'\".]+", " ", part).split())
            matches = [
                i for i, name in enumerate(names) if name == path or name.startswith(f"{path}.")
            ]
            if not matches:
                listed = names if len(names) <= _LISTED else _layers(names)
                raise InputError(
                    f"{argument}: no tensor of the problem is named {part.strip()!r}; the names "
                    f"are {', '.join(listed)}"
                )
            for tensor in matches:
                if owner[tensor] == number:
                    raise InputError(
                        f"{argument}: the tensor {names[tensor]} is twice in {group!r}; name it "
                        "once"
                    )
                if owner[tensor] >= 0:
                    raise InputError(
                        f"{argument}: the tensor {names[tensor]} is in {groups[owner[tensor]]!r} "
                        f"and in {group!r}; name it in one group"
                    )
                owner[tensor] = number
    if -1 in owner:
        raise InputError(
            f"{argument}: the tensor {names[owner.index(-1)]} is in no group; add it to one"
        )
    return owner


def _even_groups(
    parts: Sequence[str],
    names: Sequence[str],
    sizes: Sequence[int],
    count: int,
    argument: str,
    noun: str,
) -> list[str]:
    """Join neighbouring parts to ``count`` groups with the smallest possible maximum size."""
    if not 1 <= count <= len(parts):
        raise InputError(
            f"{argument} = {count}: must be from 1 to {len(parts)}, as the problem has "
            f"{counted(len(parts), noun)}"
        )
    size_of = dict.fromkeys(parts, 0)
    for name, size in zip(names, sizes, strict=True):
        size_of[name if name in size_of else name.partition(".")[0]] += size

    def join(limit: int) -> list[list[str]]:
        """Join parts up to a limit of parameters, with enough left for the missing groups."""
        groups: list[list[str]] = []
        total = 0
        for number, part in enumerate(parts):
            missing = count - len(groups)
            if not groups or total + size_of[part] > limit or len(parts) - number <= missing:
                groups.append([])
                total = 0
            groups[-1].append(part)
            total += size_of[part]
        return groups

    largest, total = max(size_of.values()), sum(sizes)
    limits = range(largest, total + 1)
    limit = limits[bisect.bisect_left(limits, True, key=lambda limit: len(join(limit)) <= count)]
    return [",".join(group) for group in join(limit)]
