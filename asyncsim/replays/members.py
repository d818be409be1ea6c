"""The members of an ensemble as one method on ``[members, parameters]``: what differs is batched, the rest shared."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from asyncsim.methods.method import OF_MESSAGE, Array, Memories, Method, Visit, add, send_update
from asyncsim.replays.local import Learner, MakeParts, Parts
from asyncsim.replays.recorders import Commit
from asyncsim.replays.state import ReplayState

_FUNCTIONS = ("message", "apply", "receive", "reply", "resume", "origin", "proxy", "mix", "meet", "replica", "last")


def over_members(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one member's commit as a function of all members' commits."""

    def of_all(*arguments: Any) -> Any:
        return jax.vmap(function, in_axes=tuple(map(_axis, arguments)))(*arguments)

    return of_all


def batched_parts(make: MakeParts, method: Method, numbers: Mapping[str, Array], restarts: bool) -> Parts:
    """Return the functions of all members.

    ``numbers`` have a leading axis of members; ``method`` is the method of any member.
    """

    def over(function_of: Callable[[Parts], Any]) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            return over_members(lambda values, *inputs: function_of(make(values))(*inputs))(dict(numbers), *arguments)

        return function

    def of_method(name: str) -> Any:
        function = getattr(method, name)
        # The defaults work with any axes, and are recognised as such.
        return function if function in (None, send_update, add) else over(lambda parts: getattr(parts.method, name))

    def local(data: Any, keys: Array, start: Array, learner: Learner, visit: Visit, job: Array, rows: Array):
        def of_member(values: Any, key: Array, start: Array, learner: Learner, visit: Visit, rows: Array):
            return make(values).local(data, key, start, learner, visit, job, rows)

        return over_members(of_member)(dict(numbers), keys, start, learner, visit, rows)

    def combine(server: Any, central: Array, messages: Any, visits: Visit) -> Any:
        def of_member(values: Any, *arguments: Any) -> Any:
            of_version: Any = make(values).method.combine
            return of_version(*arguments)

        axes: Any = _axis(visits)._replace(**dict.fromkeys(OF_MESSAGE, 1))
        return jax.vmap(of_member, (0, 0, 0, 1, axes))(dict(numbers), server, central, messages, visits)

    def restart(read: Array) -> Any:
        def of_member(values: Any, read: Array) -> Any:
            anew: Any = make(values).anew
            return anew(read)

        return jax.vmap(of_member)(dict(numbers), read)

    functions = {name: of_method(name) for name in _FUNCTIONS}
    functions["combine"] = combine if method.combine else None
    return Parts(method._replace(**functions), local, restart if restarts else None)


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
_AXES: Any = dict.fromkeys(("central", "server", "recorders"), 0)
_AXES |= dict.fromkeys(("read", "push_read", "workers", "messages", "waiting"), 1)


def batched_state(
    make: Callable[..., ReplayState], numbers: Any, params: Any, *arguments: Any, **sizes: int
) -> ReplayState:
    """Return the state at version zero; numbers and parameters have a leading axis of members, other arguments none."""

    def of_member(values: Any, params: Any) -> ReplayState:
        return make(values, params, *arguments, **sizes)

    return jax.vmap(of_member, out_axes=ReplayState(**_AXES))(dict(numbers), params)
