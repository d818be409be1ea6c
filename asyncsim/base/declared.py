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
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, cast

from asyncsim.base.calls import (
    Call,
    bind,
    called,
    form_of,
    name_of,
    parameters_of,
    quoted_phrase,
    write,
)
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_list,
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
        name, ranges = factory.__name__, _ranges(factory)
        if len(ranges) < len(inspect.signature(factory).parameters):
            raise InputError(f"{name}: must name each of its parameters, without * and /")

        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(Call(name, args, tuple(kwargs.items())), factory, name)
            values = {
                argument: checked(argument, arguments.get(argument, default), annotation)
                for argument, (annotation, default) in ranges.items()
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


def each(check: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
    """Return the check of a list, from the check of an entry."""
    return lambda argument, value: tuple(
        check(f"{argument}[{i}]", entry) for i, entry in enumerate(require_list(argument, value))
    )


def call_text(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    text: Callable[[Any], str] = write,
) -> str:
    """Write the call of a factory, without the arguments that have their default."""
    entries = (
        f"{name}={text(arguments[name])}"
        for name, (_, default) in _ranges(factory).items()
        if default is inspect.Parameter.empty or arguments[name] != default
    )
    return f"{name_of(factory)}({', '.join(entries)})"


def check_fields(instance: Any, prefix: str = "") -> None:
    """Check the fields of a frozen dataclass by their annotations, in ``__post_init__``.

    ``prefix``: of the fields' names in error messages.
    """
    for name, (annotation, _) in _ranges(instance.__class__).items():
        value = checked(f"{prefix}{name}", getattr(instance, name), annotation)
        object.__setattr__(instance, name, value)


@functools.cache
def _ranges(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each argument of a factory or a dataclass."""
    hints, parameters = typing.get_type_hints(target, include_extras=True), parameters_of(target)
    return {name: (hints.get(name), entry.default) for name, entry in parameters.items()}


class Value:
    """A value in call syntax: a frozen dataclass whose annotations are the ranges of its fields.

    ``buffered(count=8)`` is the call in Python, the text on the command line and ``str`` of it.

    Attributes
    ----------
    kind : str
        The noun of its kind, for error messages.
    lacking : frozenset of str
        The fields of all values of a kind: None where a value lacks one.
    """

    kind: ClassVar[str]
    lacking: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        """Return None for a field that only other values of the kind have."""
        if name in type(self).lacking:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        check_fields(self, f"{self.subject}: ")

    @property
    def name(self) -> str:
        """The name in call syntax."""
        return name_of(type(self))

    @property
    def subject(self) -> str:
        """The kind and the name, for error messages."""
        return f"{self.kind} {self.name}"

    def __str__(self) -> str:
        return call_text(type(self), vars(self), quoted_phrase)


def from_text(
    argument: str, value: Any, kind: type[Value], kinds: Mapping[str, type[Value]], example: str
) -> Any:
    """Return a value of a kind as it is, or create the one that a text names, with units.

    ``kinds``: the classes by name; ``example``: a call in Python, for error messages.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        return called(argument, value, kinds, units=True)
    instead = f"write {example}"
    if any(value is entry for entry in kinds.values()):
        instead = f"call it, as in {example.rpartition('.')[0]}.{form_of(value)}"
    raise InputError(f"{argument} = {value!r:.80}: must be a {kind.kind}; {instead}")
