"""Commits of a group in calls of some each, and what is recorded of them."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Method
from asyncsim.replays.commits import build_visit
from asyncsim.replays.passing import Passing
from asyncsim.replays.replay_state import Layout, Records
from asyncsim.replays.rows import tree_row
from asyncsim.replays.schedule import Group


def calls(group: Group, most: int) -> Iterator[range]:
    """Yield a group's commits, as many for each call as a power of two says, so that few numbers are compiled."""
    begin = group.begin
    while begin < group.end:
        length = 1 << min(most, group.end - begin).bit_length() - 1
        yield range(begin, begin + length)
        begin += length


#: For `Passing`: results 1 and 2 of the function below, the server's state and the workers' rows, may have the memory
#: of arguments 1 and 2. The central variable and what was read or pulled of it have other owners.
_REPLACED = {1: 1, 2: 2}


def build_call(method: Method, layout: Layout, room: int) -> Passing:
    """Return the function that makes some commits of a group, one after the other, and their replies.

    ``room`` is that of `asyncsim.replays.groups.Made`: how many gradients a group has at most.
    """
    visited = build_visit(method, layout)

    def commits_and_replies(central, server, rows, reads, forms, made, visits, i, place):
        """Make the commits from ``i`` of a chunk on, whose gradients are those from ``place`` of their group on.

        Parameters
        ----------
        central, server
            Of the replay's state.
        rows, reads, forms : list
            Of each commit: its worker's row, what that worker read, and what its message is formed of, if that is
            separate.
        made : Made
            The group's gradients.
        visits : Visit
            Of the chunk.
        i, place : int
        """
        done = []
        for turn, (row, read, form) in enumerate(zip(rows, reads, forms, strict=True)):
            visit = jax.tree.map(lambda leaf, at=i + turn: leaf[at, 0], visits)
            own = tree_row(made, place + turn) if room > 1 else made
            done.append(visited(central, server, row, read, (own.start, *own.result), form, visit))
            central, server, *_ = done[-1]
        centrals, _, rows, learners, replies, numbers = map(list, zip(*done, strict=True))
        return centrals, server, rows, learners, replies, jnp.stack(numbers)

    return Passing(commits_and_replies, _REPLACED)


class _Recorded:
    """What is recorded of the commits of some calls: ``[commits, numbers]`` of each."""

    def __init__(self, of_calls: Sequence[Any]):
        self.of_calls = of_calls

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The numbers of all commits, ``[commits, numbers]``; they are waited for."""
        return np.concatenate([np.asarray(of_call) for of_call in self.of_calls])


class Column:
    """A number of each commit, ``[commits, 1]``, that is waited for when it is asked for."""

    def __init__(self, recorded: _Recorded, place: int):
        self._recorded, self._place = recorded, place

    @property
    def first(self) -> Array:
        """That of the first commit, ``[1, 1]``."""
        return self._recorded.of_calls[0][:1, self._place : self._place + 1]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self._recorded.table[:, self._place : self._place + 1], dtype)


def records(of_calls: Sequence[Any]) -> Records:
    """Return what is recorded of the commits of some calls, of each ``[commits, numbers]``, the fields of `Records`.

    It is waited for when it is asked for.
    """
    recorded = _Recorded(of_calls)
    columns: Any = [Column(recorded, place) for place in range(len(Records._fields))]
    return Records(*columns)
