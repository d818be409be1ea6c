"""The signature of a factory declares its arguments: names, defaults and ranges.

::

    @declared                                   # made by `declaring`
    def gem(learning_rate: Rate = 0.05, momentum: Fraction = 0.9) -> Method:
        ...

A range is a function in the annotation, ``Fraction = Annotated[float, require_fraction]``. It maps
the argument's name and value to the value to use, or raises InputError. ``bool`` and
``Literal[...]`` are ranges by themselves, and ``| None`` allows None.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from asyncsim.base.calls import Call, bind, parameters_of
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    require_positive,
    require_share,
    require_switch,
)

Factory = TypeVar("Factory", bound=Callable[..., Any])

Fraction = Annotated[float, require_fraction]  #: in [0, 1)
Share = Annotated[float, require_share]  #: in (0, 1]
Positive = Annotated[float, require_positive]
NonNegative = Annotated[float, require_nonnegative]
Count = Annotated[int, require_count]
Natural = Annotated[int, functools.partial(require_count, minimum=0)]


def declaring(
    build: Callable[[Callable[..., Any], dict[str, Any]], Any],
) -> Callable[[Factory], Factory]:
    """Make a decorator of factories, whose arguments are checked by their annotations.

    Parameters
    ----------
    build : function
        ``build(factory, arguments)`` calls the factory with its checked arguments, all by name, and
        adds what the signature says: a name, a list of settings, the text of the call.

    Raises
    ------
    InputError
        From the decorator, for a factory with ``*`` or ``/``; from a call, for an argument that the
        factory lacks or whose value is outside its range.
    """

    def decorate(factory: Factory) -> Factory:
        name, parameters = factory.__name__, parameters_of(factory)
        if len(parameters) < len(inspect.signature(factory).parameters):
            raise InputError(f"{name}: must name each of its parameters, without * and /")
        hints = typing.get_type_hints(factory, include_extras=True)

        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(Call(name, args, tuple(kwargs.items())), factory, name)
            values = {
                argument: checked(
                    argument, arguments.get(argument, parameter.default), hints.get(argument)
                )
                for argument, parameter in parameters.items()
            }
            return build(factory, values)

        return cast(Factory, call)

    return decorate


#: The decorator that checks arguments and adds nothing.
in_range = declaring(lambda factory, arguments: factory(**arguments))


def checked(argument: str, value: Any, annotation: Any) -> Any:
    """Return the value to use for an argument; raise InputError outside its annotation's range."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is bool:
            require_switch(argument, value)
        elif typing.get_origin(option) is typing.Literal:
            require_choice(argument, value, typing.get_args(option))
        for check in getattr(option, "__metadata__", ()):
            value = check(argument, value)
    return value
