"""The call syntax of laws, policies, methods and problems: ``name(argument=value, ...)``, nested
where needed.

`read` parses a text into numbers, texts, lists and calls; `bind` assigns the arguments of a call to
the parameters of a function. No text is ever executed.
"""

import ast
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncsim.base.errors import InputError, choices_like, require_choice, shown
from asyncsim.base.units import quoted

#: A guard against ``[1] * 10**12``: more entries than any cluster has workers.
_LONGEST_LIST = 1_000_000
#: Characters of a part that are repeated without quotes.
_LONGEST_PART = 60
#: A number with a unit; the lookahead excludes exponents, as in ``1e5``.
_UNIT = re.compile(r"\d\s*(?!e[-+]?\d)[^\W\d_]", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """A name with its arguments; ``brackets``: whether they were written, possibly empty."""

    name: str
    positional: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    brackets: bool = False

    def __str__(self) -> str:
        named = (f"{name}={quoted_phrase(value)}" for name, value in self.named)
        arguments = [*map(quoted_phrase, self.positional), *named]
        return f"{self.name}({', '.join(arguments)})" if self.brackets else self.name


def read(text: str, expected: str, example: str, units: bool = False) -> Any:
    """Parse a text: a number, True, False, None, a text in quotes, a `Call`, or a list of these.

    A list may be repeated and added: ``[gamma(1, 0.2)] * 90 + [3] * 10``. Error messages name what
    is ``expected``, and an ``example``. With ``units`` a number with a unit is a text in quotes,
    ``"40 ms"``, which `asyncsim.base.units.quantity` reads.

    Raises
    ------
    InputError
        If the text is anything else.
    """
    try:
        return _value(
            ast.parse(quoted(text.strip()) if units else text.strip(), mode="eval").body, expected
        )
    except InputError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        unit = "; numbers have no unit here" if not units and _UNIT.search(text) else ""
        raise InputError(
            f"{shown(text)}: not {expected}; write for example {example}{unit}"
        ) from None


def called(
    argument: str,
    text: str | Call,
    functions: Mapping[str, Callable[..., Any]],
    units: bool = False,
    prefixed: bool = False,
) -> Any:
    """Call the function that a text names, among ``functions`` by name; return its result.

    Brackets without parameters may be left out; calls among the parameters are passed on as texts.
    In error messages ``argument`` is the source of the text. ``units`` is as in `read`; with
    ``prefixed`` errors of the function begin with the argument, too.

    Raises
    ------
    InputError
        The text is no call of one of these functions, or the function refuses its parameters.
    """
    subject = f"{argument} = {shown(str(text))}"
    try:
        call = read(text, "a call", "", units) if isinstance(text, str) else text
    except InputError:
        call = None
    name = call.name if isinstance(call, Call) else str(text).partition("(")[0].strip()
    if name not in functions:
        raise InputError(
            f"{subject}: unknown; {choices_like(name, map(form_of, functions.values()))}"
        )
    if not isinstance(call, Call):
        raise InputError(f"{subject}: cannot be read; write {form_of(functions[name])}")
    parameters = bind(call, functions[name], subject)
    try:
        return functions[name](
            **{
                key: str(value) if isinstance(value, Call) else value
                for key, value in parameters.items()
            }
        )
    except TypeError as error:  # a list where a number belongs
        raise InputError(f"{subject}: {error}; write {form_of(functions[name])}") from error
    except InputError as error:
        if not prefixed:
            raise
        raise InputError(f"{subject}: {str(error).removeprefix(f'{subject}: ')}") from None


def bind(call: Call, target: Any, subject: str, complete: bool = True) -> dict[str, Any]:
    """Map the arguments of a call to the parameters of a function or a dataclass."""
    parameters = parameters_of(target)
    if len(call.positional) > len(parameters):
        raise InputError(
            f"{subject}: {len(call.positional)} parameters given; write {form_of(target)}"
        )
    arguments = dict(zip(parameters, call.positional, strict=False))
    for name, value in call.named:
        require_choice(f"{subject}: parameter", name, parameters)
        if name in arguments:
            raise InputError(f"{subject}: {name} is given twice; write {form_of(target)}")
        arguments[name] = value
    if complete:
        require_all(arguments, target, subject)
    return arguments


def require_all(arguments: dict[str, Any], target: Any, subject: str) -> None:
    """Raise InputError if an argument without a default is missing."""
    parameters = parameters_of(target)
    required = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise InputError(f"{subject}: {' and '.join(missing)} missing; write {form_of(target)}")


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that can be named in a call."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(target).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in named}


def form_of(target: Any) -> str:
    """Describe a call: ``gamma(mean, cv)``, ``discard_stale(limit, count=1)``."""
    parameters = (
        f'{name}="{parameter.default}"'
        if isinstance(parameter.default, str)
        else f"{name}={write(parameter.default)}"
        if isinstance(parameter.default, int | float)
        else name
        for name, parameter in parameters_of(target).items()
    )
    target = target.func if isinstance(target, functools.partial) else target
    name = name_of(target) if isinstance(target, type) else target.__name__
    return f"{name}({', '.join(parameters)})"


def write(value: Any) -> str:
    """Return the text of a value or a sequence; floats in their shortest exact form."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(write, value))}]"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def quoted_phrase(value: Any) -> str:
    """Return the text of an argument: as `write`, and a text of several words in quotes."""
    is_phrase = isinstance(value, str) and not value.isidentifier()
    return repr(value) if is_phrase else write(value)


def name_of(kind: Any) -> str:
    """Return the name of a class on the command line."""
    return kind.__name__.lower()


def split(texts: Any) -> list[Any]:
    """Split texts at commas outside of brackets and quotes; leave other values unchanged."""
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
        entries += [part.strip(" ,")] if part.strip(" ,") else []  # a bracket was not closed
    return entries


def _value(node: ast.expr, expected: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id="inf" | "nan" as name):  # the caller refuses it, and names the argument
            return float(name)
        case ast.Name(id=name):
            return Call(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            if _is_number(value := _value(operand, expected)):
                return -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(entry, expected) for entry in entries]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeat(_value(left, expected), _value(right, expected), node, expected)
        case ast.BinOp(op=ast.Add()):
            parts = [_value(part, expected) for part in _summands(node)]
            if all(isinstance(part, list) for part in parts):
                return list(itertools.chain.from_iterable(parts))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            # ``f(**values)`` has no name; the two stars make `bind` refuse it as a parameter.
            named = [
                (word.arg, _value(word.value, expected)) if word.arg else ("**", None)
                for word in keywords
            ]
            return Call(
                name, tuple(_value(arg, expected) for arg in args), tuple(named), brackets=True
            )
    raise not_a(expected, _unparsed(node))


def not_a(expected: str, part: str) -> InputError:
    """Build the error for a part of a text of the wrong kind."""
    kind = expected.removeprefix("a ")
    return InputError(
        f"{part}: not {expected}; write a number, name(parameter=value, ...) or [{kind}] * count + "
        f"[{kind}] * count"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _summands(node: ast.expr) -> list[ast.expr]:
    """Return the summands in order; a loop, as recursion fails for a thousand of them."""
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _repeat(first: Any, second: Any, node: ast.expr, expected: str) -> list[Any]:
    entries, count = (first, second) if isinstance(first, list) else (second, first)
    if not isinstance(entries, list) or not _is_number(count) or count < 0 or count % 1:
        raise InputError(
            f"{_unparsed(node)}: only a list can be repeated, a whole number of times: "
            f"[{expected.removeprefix('a ')}] * 10"
        )
    if count * len(entries) > _LONGEST_LIST:
        raise InputError(
            f"{_unparsed(node)}: more than {_LONGEST_LIST} entries; repeat fewer times"
        )
    return entries * int(count)


def _unparsed(node: ast.expr) -> str:
    """Return the text of a part, quoted and truncated if it is long."""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST_PART else shown(text)
