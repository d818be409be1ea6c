"""The members of an ensemble as one method on ``[members, parameters]``.

Vectors, losses and keys have an axis of members; members share the trace and the plan.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

from asyncsim.methods.method import (
    OF_MESSAGE,
    Array,
    Inbox,
    Memories,
    Method,
    Visit,
    add,
    send_update,
)
from asyncsim.replays.local import MakeParts, Parts
from asyncsim.replays.recorders import Commit
from asyncsim.replays.state import ReplayState

#: Functions of a method that take one commit; members' commits are a batch of it.
_FUNCTIONS = ["message", "apply", "receive", "reply", "refresh", "resume", "origin", "proxy"]
_FUNCTIONS += ["mix", "meet", "replica", "last", "presents"]
#: The axes of members in a visit: members share the trace, so that only loss and key differ.
_AXES_OF_VISIT: Any = [0 if name in ("loss", "key") else None for name in Visit._fields]
_VISIT: Any = Visit(*_AXES_OF_VISIT)


def over_members(function: Callable[..., Any], members: int | None) -> Callable[..., Any]:
    """Vectorise a function of one member's commit over all members' commits, if there are any."""
    if members is None:
        return function

    def function_of_members(*arguments: Any) -> Any:
        return jax.vmap(function, in_axes=tuple(map(_axis, arguments)))(*arguments)

    return function_of_members


def batched_parts(
    make: MakeParts, method: Method, numbers: Mapping[str, Array], restarts: bool
) -> Parts:
    """Return the functions of all members.

    ``numbers`` have a leading axis of members; ``method`` is the method of any member.
    """

    def over(select: Callable[[Parts], Any], *axes: Any) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            def of_member(values: Any, *inputs: Any) -> Any:
                return select(make(values))(*inputs)

            in_axes = (0, *(axes or map(_axis, arguments)))
            return jax.vmap(of_member, in_axes)(dict(numbers), *arguments)

        return function

    # The method is built inside the vmap: there each member's numbers are scalars.
    functions: dict[str, Any] = {
        name: over(operator.attrgetter(f"method.{name}"))
        for name in _FUNCTIONS
        # The defaults work with any axes, and `finish` recognises them.
        if getattr(method, name) not in (None, send_update, add)
    }
    if method.combine is not None:
        visits = _VISIT._replace(**dict.fromkeys(OF_MESSAGE, 1))
        functions["combine"] = over(operator.attrgetter("method.combine"), 0, 0, 1, visits)
    local = over(operator.attrgetter("local"), None, 0, 0, 0, _VISIT, None, 0)
    return Parts(
        method._replace(**functions),
        local,
        over(operator.attrgetter("restart")) if restarts else None,
    )


def _axis(argument: Any) -> Any:
    """Return the axis of members in an argument of a method's function."""
    if isinstance(argument, Visit):
        return _VISIT
    if isinstance(argument, Commit):
        leading: Any = 0
        return Commit(_VISIT, *[leading] * (len(Commit._fields) - 1))
    unbatched: Any = None
    if isinstance(argument, Inbox):
        return Inbox(messages=1, weights=unbatched, senders=unbatched)
    return Memories(rows=1, newer=1, worker=unbatched) if isinstance(argument, Memories) else 0


#: Where the axis of members is: rows of workers and slots stay the leading axis.
_AXES: Any = dict.fromkeys(("central", "server", "recorders"), 0)
_AXES |= dict.fromkeys(("read", "push_read", "workers", "messages", "waiting"), 1)


def batched_state(
    make: Callable[..., ReplayState], numbers: Any, start: Any, *arguments: Any, **sizes: int
) -> ReplayState:
    """Build the state at version zero; only numbers and the start have an axis of members."""

    def of_member(values: Any, start: Any) -> ReplayState:
        return make(values, start, *arguments, **sizes)

    return jax.vmap(of_member, out_axes=ReplayState(**_AXES))(dict(numbers), start)
