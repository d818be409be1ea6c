"""The call syntax of laws, policies, methods and problems: ``name(argument=value, ...)``, nested where needed.

`read` takes a text apart into numbers, texts, lists and calls, and `bind` gives the arguments of a call their names.
Nothing of a text is ever executed.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncsim.base.errors import InputError, choices_like, require_choice, shown
from asyncsim.base.units import quoted

#: A guard against ``[1] * 10**12``: more entries than any cluster has workers.
_LONGEST_LIST = 1_000_000
#: Characters of a part that are repeated without quotes.
_LONGEST_PART = 60
#: A number with a unit; not with an exponent.
_UNIT = re.compile(r"\d\s*(?!e[-+]?\d)[^\W\d_]", re.IGNORECASE)


class Call(NamedTuple):
    """A name with its arguments; ``brackets`` says whether there were any, also empty ones."""

    name: str
    positional: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    brackets: bool = False

    def __str__(self) -> str:
        arguments = [*map(write, self.positional), *(f"{name}={write(value)}" for name, value in self.named)]
        return f"{self.name}({', '.join(arguments)})" if self.brackets else self.name


def read(text: str, what: str, example: str, units: bool = False) -> Any:
    """Return what a text stands for: a number, True, False, None, a text in quotes, a `Call`, or a list of these.

    A list may be repeated and added: ``[gamma(1, 0.2)] * 90 + [3] * 10``. ``what`` it should be, and an ``example``,
    are for messages. With ``units`` a number with a unit is a text in quotes, ``"40 ms"``, which
    `asyncsim.base.units.quantity` reads.

    Raises
    ------
    InputError
        If the text is anything else.
    """
    try:
        return _value(ast.parse(quoted(text.strip()) if units else text.strip(), mode="eval").body, what)
    except InputError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        unit = "; numbers have no unit here" if not units and _UNIT.search(text) else ""
        raise InputError(f"{shown(text)}: not {what}; write for example {example}{unit}") from None


def called(
    argument: str, text: str, functions: Mapping[str, Callable[..., Any]], units: bool = False, prefixed: bool = False
) -> Any:
    """Return the result of the call that a text means, of one of some functions by their names.

    Brackets without parameters may be left out; calls among the parameters are passed on as texts. ``argument`` is what
    had the text, for messages; ``units`` as in `read`; with ``prefixed`` they begin errors of the function, too.

    Raises
    ------
    InputError
        If the text is no call of one of these functions, or the function refuses its parameters.
    """
    subject = f"{argument} = {shown(text)}"
    try:
        call = read(text, "a call", "", units)
    except InputError:
        call = None
    name = call.name if isinstance(call, Call) else text.partition("(")[0].strip()
    if name not in functions:
        raise InputError(f"{subject}: unknown; {choices_like(name, map(form_of, functions.values()))}")
    if not isinstance(call, Call):
        raise InputError(f"{subject}: cannot be read; write {form_of(functions[name])}")
    given = bind(call, functions[name], subject)
    try:
        return functions[name](**{key: str(one) if isinstance(one, Call) else one for key, one in given.items()})
    except InputError as error:
        if not prefixed:
            raise
        raise InputError(f"{subject}: {str(error).removeprefix(f'{subject}: ')}") from None


def from_text(
    argument: str, value: Any, kind: type, functions: Mapping[str, Callable[..., Any]], module: str, example: str
) -> Any:
    """Return a value of a kind from itself, or from the text of a call that makes it.

    ``functions``: those that make one, of this ``module``; ``example``: a call, for messages.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        return called(argument, value, functions)
    uncalled = any(value is function for function in functions.values())
    instead = f"call it, as in {module}{form_of(value)}" if uncalled else f"write {module}{example}"
    raise InputError(f"{argument} = {value!r:.80}: must be a {argument}; {instead}")


def bind(call: Call, target: Any, told: str, complete: bool = True) -> dict[str, Any]:
    """Return the arguments of a call by the names that a function, or a dataclass, has for them."""
    parameters = parameters_of(target)
    if len(call.positional) > len(parameters):
        raise InputError(f"{told}: {len(call.positional)} parameters given; write {form_of(target)}")
    given = dict(zip(parameters, call.positional, strict=False))
    for name, value in call.named:
        require_choice(f"{told}: parameter", name, parameters)
        if name in given:
            raise InputError(f"{told}: {name} is given twice; write {form_of(target)}")
        given[name] = value
    if complete:
        require_all(given, target, told)
    return given


def require_all(given: dict[str, Any], target: Any, told: str) -> None:
    """Raise InputError unless all arguments of a function are given that have no default."""
    parameters = parameters_of(target)
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in given]
    if missing:
        raise InputError(f"{told}: {' and '.join(missing)} missing; write {form_of(target)}")


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that have names."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in inspect.signature(target).parameters.items() if one.kind in named}


def form_of(target: Any) -> str:
    """Return how a call is written, for messages: ``gamma(mean=..., cv=...)``, ``discard_stale(limit, count=1)``."""
    if dataclasses.is_dataclass(target):
        return f"{name_of(target)}({', '.join(f'{parameter}=...' for parameter in parameters_of(target))})"
    shown_defaults = (
        f'{name}="{one.default}"'
        if isinstance(one.default, str)
        else f"{name}={write(one.default)}"
        if isinstance(one.default, int | float)
        else name
        for name, one in parameters_of(target).items()
    )
    target = target.func if isinstance(target, functools.partial) else target
    return f"{target.__name__}({', '.join(shown_defaults)})"


def write(value: Any) -> str:
    """Return the text of a number, a dataclass or a sequence; floats in their shortest exact form."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={write(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{name_of(type(value))}({', '.join(fields)})"
    if isinstance(value, tuple | list) and not isinstance(value, Call):
        return f"[{', '.join(map(write, value))}]"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def name_of(kind: Any) -> str:
    """Return the name that a class has on the command line."""
    return kind.__name__.lower()


def as_float(number: Any) -> float:
    """Return a number as a float, infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def split(texts: Any) -> list[Any]:
    """Split texts at commas outside of brackets and quotes; leave all that is no text as it is."""
    entries: list[Any] = []
    for text in [texts] if isinstance(texts, str) else texts:
        if not isinstance(text, str):
            entries.append(text)
            continue
        depth, quote, part = 0, "", ""
        for letter in f"{text},":
            if quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            depth += (letter in "([{") - (letter in ")]}") if not quote else 0
            if letter == "," and depth <= 0 and not quote:
                entries += [part.strip()] if part.strip() else []
                part = ""
            else:
                part += letter
        entries += [part.strip(" ,")] if part.strip(" ,") else []  # of brackets that are left open
    return entries


def _value(node: ast.expr, what: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id="inf" | "nan" as name):  # for whoever takes it to refuse, with the argument's name
            return float(name)
        case ast.Name(id=name):
            return Call(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            if _is_number(value := _value(operand, what)):
                return -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(entry, what) for entry in entries]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeat(_value(left, what), _value(right, what), node, what)
        case ast.BinOp(op=ast.Add()):
            parts = [_value(part, what) for part in _summands(node)]
            if all(isinstance(part, list) for part in parts):
                return list(itertools.chain.from_iterable(parts))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            # What two stars stand for is nobody's argument.
            named = [(one.arg, _value(one.value, what)) if one.arg else ("**", None) for one in keywords]
            return Call(name, tuple(_value(one, what) for one in args), tuple(named), brackets=True)
    raise not_a(what, _unparsed(node))


def not_a(what: str, part: str) -> InputError:
    """Return the error for a part of a text that is not what it should be."""
    kind = what.removeprefix("a ")
    return InputError(
        f"{part}: not {what}; write a number, name(parameter=value, ...) or [{kind}] * count + [{kind}] * count"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _summands(node: ast.expr) -> list[ast.expr]:
    """Return the parts of a sum in their order; in a loop, as there may be a thousand of them."""
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _repeat(left: Any, right: Any, node: ast.expr, what: str) -> list[Any]:
    entries, count = (left, right) if isinstance(left, list) else (right, left)
    if not isinstance(entries, list) or not _is_number(count) or count < 0 or as_float(count) % 1:
        raise InputError(
            f"{_unparsed(node)}: only a list can be repeated, a whole number of times: [{what.removeprefix('a ')}] * 10"
        )
    if count * len(entries) > _LONGEST_LIST:
        raise InputError(f"{_unparsed(node)}: more than {_LONGEST_LIST} entries; repeat fewer times")
    return entries * int(count)


def _unparsed(node: ast.expr) -> str:
    """Return the text of a part; in quotes, and cut, where it is long."""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST_PART else shown(text)
