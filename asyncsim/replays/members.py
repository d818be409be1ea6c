"""The members of an ensemble as one method on ``[members, parameters]``: what differs is batched, the rest shared."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from asyncsim.methods.method import Array, Memories, Method, Visit, add, send_update
from asyncsim.problems.problem import Problem
from asyncsim.recorders import Commit, Recorder
from asyncsim.replays.local import Flat, Learner, LocalResult, build_anew, build_local, from_vector
from asyncsim.replays.state import Layout, ReplayState, initial_state


class Members(NamedTuple):
    """Methods of one kind that differ in some hyper-parameters.

    Attributes
    ----------
    make : function
        From the hyper-parameters that differ, by name, to a Method.
    differing : Mapping[str, Array]
        Their values, each of shape ``[members]``.
    """

    make: Callable[..., Method]
    differing: Mapping[str, Array]


_FUNCTIONS = ("message", "apply", "reply", "resume", "origin", "proxy", "mix", "meet", "replica", "last")


def over_members(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one member's commit as a function of all members' commits."""

    def of_all(*arguments: Any) -> Any:
        return jax.vmap(function, in_axes=tuple(map(_axis, arguments)))(*arguments)

    return of_all


def batched_method(members: Members, one: Method) -> Method:
    """Return the members' method, all but its optimizer; ``one`` is any of them."""

    def over(name: str) -> Any:
        found = getattr(one, name)
        # The defaults work with any axes, and are recognised as such.
        if found in (None, send_update, add):
            return found

        def function(*arguments: Any) -> Any:
            def of_one(values: Any, *arguments: Any) -> Any:
                return getattr(members.make(**values), name)(*arguments)

            return over_members(of_one)(dict(members.differing), *arguments)

        return function

    return one._replace(**{name: over(name) for name in _FUNCTIONS})


def batched_local(members: Members, problem: Problem, layout: Layout, flat: Flat) -> Callable[..., LocalResult]:
    """Return that of `asyncsim.replays.local.from_vector` for all members, each with its key and its examples."""

    def local(data: Any, keys: Array, start: Array, learner: Learner, visit: Visit, job: Array, rows: Array):
        def one(values: Any, key: Array, start: Array, learner: Learner, visit: Visit, rows: Array) -> LocalResult:
            of_one = build_local(members.make(**values), problem, layout.window, layout.windows_differ)
            return from_vector(of_one, flat)(data, key, start, learner, visit, job, rows)

        return over_members(one)(dict(members.differing), keys, start, learner, visit, rows)

    return local


def batched_anew(members: Members, problem: Problem, flat: Flat, dtype: Any) -> Callable[[Array], Any]:
    """Return that of `asyncsim.replays.local.build_anew` for all members."""

    def one(values: Any, read: Array) -> Any:
        return build_anew(members.make(**values), problem, flat, dtype)(read)

    return lambda read: jax.vmap(one)(dict(members.differing), read)


def _axis(argument: Any) -> Any:
    """Return where an argument has its axis of members; of a visit only loss and key have one."""
    shared: Any = None
    if isinstance(argument, Visit):
        axes: Any = [0 if name in ("loss", "key") else shared for name in Visit._fields]
        return Visit(*axes)
    if isinstance(argument, Commit):
        every: Any = 0
        return Commit(_axis(argument.visit), *[every] * (len(Commit._fields) - 1))
    return Memories(rows=1, newer=1, worker=shared) if isinstance(argument, Memories) else 0


#: Where the axis of members is: rows of workers and slots stay the leading axis.
_AXES: Any = {"central": 0, "server": 0, "recorders": 0, "read": 1, "push_read": 1, "workers": 1, "messages": 1}


def batched_state(
    members: Members, recorders: tuple[Recorder, ...], flat: Flat, params: Any, problem_state: Any, **sizes: int
) -> ReplayState:
    """Return the state at version zero; the parameters have a leading axis of members, the problem's state has none."""

    def one(values: Any, params: Any) -> ReplayState:
        return initial_state(members.make(**values), recorders, flat, params, problem_state, **sizes)

    return jax.vmap(one, out_axes=ReplayState(**_AXES))(dict(members.differing), params)
